"""Figures as pages: trajectories in three axes turn under the pointer and the arrow keys, words name their numbers."""

import numpy as np
import pytest
import xarray as xr
from axe_playwright_python.sync_playwright import Axe

import rnnlens as rl

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def drawing():
    states = np.cumsum(np.random.default_rng(0).normal(size=(5, 11, 6)), axis=1)
    return rl.plot.trajectories(states, components=(1, 2, 3), color=list("ababa"), color_label="context")


@pytest.fixture
def sheet(reader, drawing, tmp_path):
    drawing.save(tmp_path / "states.html")
    return reader(tmp_path / "states.html")


def view(sheet):
    return [int(angle) for angle in sheet.locator("canvas").get_attribute("data-view").split()]


def wait_for_view(sheet, azimuth, elevation):
    sheet.wait_for_selector(f'canvas[data-view="{azimuth} {elevation}"]')


def test_dragging_and_arrow_keys_turn_it(sheet):
    canvas = sheet.locator("canvas")
    assert view(sheet) == [-60, 30]
    before = canvas.screenshot()
    box = canvas.bounding_box()
    sheet.mouse.move(box["x"] + 200, box["y"] + 200)
    sheet.mouse.down()
    sheet.mouse.move(box["x"] + 260, box["y"] + 180)
    sheet.mouse.up()
    wait_for_view(sheet, -90, 20)
    assert canvas.screenshot() != before
    canvas.focus()
    sheet.keyboard.press("ArrowRight")
    wait_for_view(sheet, -100, 20)
    sheet.keyboard.press("ArrowUp")
    wait_for_view(sheet, -100, 10)
    sheet.locator(".reset").click()
    wait_for_view(sheet, -60, 30)


def test_the_nearest_step_is_named(sheet, drawing):
    box = sheet.locator("canvas").bounding_box()
    inner_width, inner_height = box["width"] - 2, box["height"] - 2  # within the border
    azimuth, elevation = np.deg2rad([-60.0, 30.0])
    x, y, z = drawing.scene["paths"][2]["at"][-1]
    scale = min(inner_width, inner_height) * 0.42 / 1000
    right = np.cos(azimuth) * y - np.sin(azimuth) * x
    up = np.cos(elevation) * z - np.sin(elevation) * (np.cos(azimuth) * x + np.sin(azimuth) * y)
    sheet.mouse.move(box["x"] + 1 + inner_width / 2 + scale * right, box["y"] + 1 + inner_height / 2 - scale * up)
    sheet.locator("#readout", has_text="sample 2, context a, step 10").wait_for()


def test_the_steps_that_are_shown_are_chosen(sheet):
    canvas = sheet.locator("canvas")
    before = canvas.screenshot()
    sheet.locator("input").fill("3")
    sheet.locator("output", has_text="3").wait_for()
    assert canvas.screenshot() != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_notebook_shows_it_in_a_frame(browser, drawing, scheme, tmp_path):
    html = drawing._repr_mimebundle_()["text/html"]
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><body>{html}</body>", "utf-8")
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 390, "height": 800})
    try:
        sheet = context.new_page()
        sheet.goto((tmp_path / "cell.html").as_uri())
        frame = sheet.frame_locator("iframe")
        frame.locator("html[data-ready]").wait_for(state="attached")
        assert frame.locator("body").evaluate("body => body.scrollWidth <= innerWidth")
        ground = frame.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    finally:
        context.close()


ROWS = np.array([[0.5, 0.0, 0.0], [0.25, 1.0, 0.0], [4.0, 2.0, 0.5]])


@pytest.fixture
def words(reader, tmp_path):
    """Return the page of a time Jacobian of three words."""
    jacobian = xr.DataArray(ROWS[None], dims=("sample", "out_time", "in_time"))
    rl.plot.input_map(jacobian, tokens=["not ", "so ", "bad"]).save(tmp_path / "words.html")
    return reader(tmp_path / "words.html")


def shares(sheet):
    return [
        float(share) for share in sheet.eval_on_selector_all("#words button", "all => all.map(w => w.dataset.share)")
    ]


def test_words_are_shaded_by_their_effect_and_name_their_number(words):
    assert shares(words) == [1.0, 0.5, 0.125]
    words.get_by_role("button", name="so", exact=True).hover()
    words.locator("#readout", has_text="step 1, “so”: effect on output step 2 2, 50 % of the largest").wait_for()
    words.get_by_role("button", name="bad").focus()
    words.locator("#readout", has_text="0.5, 13 % of the largest").wait_for()


def test_a_click_asks_what_the_output_at_a_word_depends_on(words):
    words.get_by_role("button", name="so", exact=True).click()
    assert shares(words) == [0.25, 1.0, 0.0]
    assert words.locator("select").input_value() == "1"
    words.locator("select").select_option("0")
    assert shares(words) == [1.0, 0.0, 0.0]


ATTENTION = np.array([[[[[1.0, 0.0], [-0.25, 2.0]]]], [[[[1.5, 0.0], [0.5, -4.0]]]]])


def attention_page(folder, tokens):
    """Write the page of a hidden attention of two channels over two steps; the second is three times the first."""
    maps = np.concatenate([ATTENTION, 3 * ATTENTION], axis=2)
    coords = {"map": ["frozen", "total"], "channel": [3, 8]}
    array = xr.DataArray(maps, dims=("map", "sample", "channel", "out_time", "in_time"), coords=coords)
    rl.plot.hidden_attention(array, tokens=tokens).save(folder / "attention.html")
    return folder / "attention.html"


def test_hidden_attention_says_both_numbers_of_a_cell(reader, tmp_path):
    sheet = reader(attention_page(tmp_path, ["not", "bad"]))
    total = sheet.locator("canvas").nth(1)
    box = total.bounding_box()
    sheet.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.25 * box["height"])  # output steps go upward
    said = "output step 1 “bad” from input step 0 “not”: coefficients held {}, total {}"
    sheet.locator("#readout", has_text=said.format(-0.25, 0.5)).wait_for()
    sheet.locator("select").select_option("1")
    sheet.locator("#readout", has_text=said.format(-0.75, 1.5)).wait_for()
    total.focus()
    sheet.keyboard.press("ArrowRight")
    sheet.locator("#readout", has_text="output step 1 “bad” from input step 1 “bad”").wait_for()
    corner = "canvas => [...canvas.getContext('2d').getImageData(1, 0, 1, 1).data]"
    assert total.evaluate(corner) == [8, 48, 107, 255]  # -1 of the largest


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hidden_attention_has_no_violations_on_a_telephone(browser, scheme, tmp_path):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800})
    try:
        sheet = context.new_page()
        sheet.goto(attention_page(tmp_path, None).as_uri())
        sheet.locator("html[data-ready]").wait_for(state="attached")
        assert sheet.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert [rule["id"] for rule in Axe().run(sheet).response["violations"]] == []
    finally:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_have_no_violations_on_a_telephone(browser, scheme, tmp_path):
    tokens = [f"word{i} " for i in range(60)]
    jacobian = xr.DataArray(np.tril(np.ones((60, 60)))[None], dims=("sample", "out_time", "in_time"))
    rl.plot.input_map(jacobian, tokens=tokens).save(tmp_path / "words.html")
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800})
    try:
        sheet = context.new_page()
        sheet.goto((tmp_path / "words.html").as_uri())
        sheet.locator("html[data-ready]").wait_for(state="attached")
        assert sheet.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert [rule["id"] for rule in Axe().run(sheet).response["violations"]] == []
    finally:
        context.close()
