"""Use of a report in Chromium: opening it offline, choosing samples, pointing, clicking, saving, printing."""

from __future__ import annotations

import csv
import io
import re
import time

import numpy as np
import pytest
import torch
from report_pages import HOSTILE, KEY_WORDS, Classifier, Page, Sentences, sentences
from torch import nn

import rnnlens as rl
from rnnlens.results.diagnosis import Diagnosis, Finding

pytestmark = pytest.mark.browser
LOSS = nn.functional.cross_entropy


@pytest.fixture
def acquittal_page(report_of):
    findings = [
        Finding("MISSED_DEPENDENCY", "fault", "model", "The input 9 steps back would explain errors."),
        Finding("PATH_OPEN", "fault", "rnn", "A training signal reaches that input."),
    ]
    return report_of(Diagnosis({}, findings=findings)).path


def show_figure(sheet, id):
    """Unfold a figure, scroll to it, wait until the script has drawn it, and return it."""
    figure = sheet.locator(f"#{id}")
    figure.evaluate("figure => { const fold = figure.closest('details'); if (fold) fold.open = true; }")
    figure.scroll_into_view_if_needed()
    figure.locator(".plot svg:not(.static)").wait_for()
    return figure


def move_pointer(sheet, figure, across, down):
    """Move the pointer to the given fractions of the axes' width and height; return its x and y."""
    figure.locator(".plot > svg").scroll_into_view_if_needed()
    box = figure.locator(".plot > svg").bounding_box()
    left, right, top, bottom = 62, 12, 8, 34
    x = box["x"] + left + across * (box["width"] - left - right)
    y = box["y"] + top + down * (box["height"] - top - bottom)
    sheet.mouse.move(x, y)
    return x, y


def wait_until(sheet, expression, argument=None):
    """Wait until an expression is true; Playwright's own waiting needs ``unsafe-eval``, which the page forbids."""
    deadline = time.monotonic() + 5
    while not sheet.evaluate(expression, argument):
        assert time.monotonic() < deadline, f"never true: {expression}"
        sheet.wait_for_timeout(20)


def legend_text(figure):
    return figure.locator(".legend").inner_text()


def last_number(text):
    return float(re.search(r"(-?[\d.]+(?:e[-+]?\d+)?)\s*$", text.strip())[1])


def svg_of(figure):
    return figure.locator(".plot > svg").evaluate("svg => svg.outerHTML")


def save_figure(sheet, figure, kind):
    with sheet.expect_download() as download:
        figure.locator(f"button.{kind}").click()
    return download.value.suggested_filename, download.value.path().read_text("utf-8")


def test_a_cursor_shows_the_values_of_the_typical_sample(reader, page, model, batch):
    sheet = reader()
    figure = show_figure(sheet, "track-1-gradient")
    trace, typical = rl.trace(model, *batch, loss=LOSS), page.data["typical"]
    expected = np.linalg.norm(trace["rnn[1]"].hidden_grad.values[typical].astype(float), axis=-1)
    for step in (0, 5, 11):
        move_pointer(sheet, figure, (step + 0.5) / 12, 0.5)
        wait_until(sheet, f"document.getElementById('readout').innerText.includes('step {step}')")
        actual = last_number(figure.locator(".legend .key").first.inner_text())
        assert actual == pytest.approx(expected[step], rel=0.01)


def test_one_cursor_stands_in_every_panel(reader):
    sheet = reader()
    ids = ("input-size", "track-0-gradient", "track-0-hidden", "track-0-cell", "track-0-gates", "track-0-gate-gradient",
           "track-1-gradients")  # fmt: skip
    figures = [show_figure(sheet, id) for id in ids]
    move_pointer(sheet, figures[-1], 7.5 / 12, 0.5)
    wait_until(sheet, "document.getElementById('readout').innerText.includes('step 7')")
    positions = []
    for figure in figures:
        path = figure.locator(".cursor").get_attribute("d")
        width = figure.locator(".plot > svg").bounding_box()["width"]
        positions.append((float(re.match(r"M([\d.]+)", path)[1]) - 62) / (width - 74))
    assert positions == pytest.approx([7.5 / 12] * len(ids), abs=0.01)


def test_the_hardest_sample_is_one_click_away(reader, page, model, batch):
    sheet = reader()
    figure = show_figure(sheet, "track-1-gradient")
    before = svg_of(figure)
    sheet.click(".pick-hardest")
    wait_until(sheet, "old => document.querySelector('#track-1-gradient .plot > svg').outerHTML !== old", before)
    hardest = page.data["hardest"]
    assert f"sample {hardest}, loss" in sheet.inner_text("#readout")
    move_pointer(sheet, figure, 3.5 / 12, 0.5)
    wait_until(sheet, "document.getElementById('readout').innerText.includes('step 3')")
    gradient = rl.trace(model, *batch, loss=LOSS)["rnn[1]"].hidden_grad.values[hardest, 3]
    actual = last_number(figure.locator(".legend .key").first.inner_text())
    assert actual == pytest.approx(np.linalg.norm(gradient.astype(float)), rel=0.01)


def test_the_picker_goes_by_loss(reader, page):
    sheet = reader()
    values = sheet.locator("#sample option").evaluate_all("all => all.map(o => Number(o.value))")
    losses = [page.data["samples"][i]["loss"] for i in values]
    assert losses == sorted(losses)
    assert int(sheet.input_value("#sample")) == page.data["typical"]
    sheet.select_option("#sample", str(values[3]))
    # The page redraws in its next frame.
    wait_until(sheet, "text => document.getElementById('readout').innerText.includes(text)", f"sample {values[3]},")


def test_a_unit_lights_up_everywhere(reader, model, batch, page):
    sheet = reader()
    figure_ids = ["track-0-gradients", "track-0-cell", "track-0-gate-units", "track-0-weights", "track-0-kernel"]
    figures = [show_figure(sheet, id) for id in figure_ids]
    hidden = show_figure(sheet, "track-0-hidden")
    x, y = move_pointer(sheet, hidden, 4.5 / 12, 2.5 / 6)
    sheet.mouse.click(x, y)
    wait_until(sheet, "document.querySelectorAll('#track-0-weights .unit').length === 1")
    for figure in figures:
        boxes = figure.locator(".unit").evaluate_all(
            "all => all.map(r => [+r.getAttribute('y'), +r.getAttribute('height')])"
        )
        plot_height = figure.locator(".plot > svg").evaluate("svg => svg.viewBox.baseVal.height")
        top, height = boxes[0]
        assert (top + height / 2 - 8) / (plot_height - 42) == pytest.approx(2.5 / 6, abs=0.02)
    value = rl.trace(model, *batch, loss=LOSS)["rnn[0]"].hidden.values[page.data["typical"], 4, 2]
    assert "unit 2, step 4" in legend_text(hidden)
    assert last_number(hidden.locator(".legend span").first.inner_text()) == pytest.approx(value, abs=0.01)
    row = figures[3].locator(".legend").inner_text()
    expected = np.linalg.norm(model.rnn.weight_ih_l0.detach().numpy()[2])  # weights of the input gate of unit 2
    assert f"W input {expected:.2g}"[:-1] in row
    assert show_figure(sheet, "track-0-gradient").locator(".single").count() == 2
    assert show_figure(sheet, "track-1-hidden").locator(".unit").count() == 0  # no unit of another layer is selected


PIXELS = """async image => {
    const picture = new Image();
    picture.src = image.getAttribute('href');
    await picture.decode();
    const canvas = document.createElement('canvas'), brush = canvas.getContext('2d');
    [canvas.width, canvas.height] = [picture.width, picture.height];
    brush.drawImage(picture, 0, 0);
    return Array.from(brush.getImageData(0, 0, picture.width, picture.height).data);
}"""


def test_sorting_moves_rows(reader, page):
    sheet = reader()
    figure = show_figure(sheet, "track-0-hidden")
    before, image = svg_of(figure), figure.locator("image")
    rows = np.array(image.evaluate(PIXELS)).reshape(6, -1)
    sheet.select_option("#sort", "norm")
    wait_until(sheet, "old => document.querySelector('#track-0-hidden .plot > svg').outerHTML !== old", before)
    order = np.argsort(-np.array(page.data["tracks"][0]["keys"]["norm"]), kind="stable")
    names = figure.locator(".plot > svg text[text-anchor=end]").all_text_contents()
    assert [int(name) for name in names] == [int(unit) for unit in order][:: 6 // len(names)]
    np.testing.assert_array_equal(np.array(image.evaluate(PIXELS)).reshape(6, -1), rows[order])


def test_a_row_of_the_time_jacobian_colours_the_input(reader, model, batch, page):
    sheet = reader()
    figure = show_figure(sheet, "jacobian")
    strip = sheet.locator("#strip")
    assert "Coloured by |dL/dx_t|" in sheet.inner_text("#input-section")  # the shown sample's, until a row is clicked
    before = strip.evaluate("c => c.toDataURL()")
    x, y = move_pointer(sheet, figure, 2.5 / 12, 1 - 5.5 / 12)  # output steps upward
    sheet.mouse.click(x, y)
    wait_until(sheet, "document.getElementById('strip').dataset.row === '5'")
    assert strip.evaluate("c => c.toDataURL()") != before
    assert "mean over 8 samples, output step 5" in sheet.inner_text("#input-section")
    pixels = strip.evaluate("c => Array.from(c.getContext('2d').getImageData(0, 0, c.width, 1).data)")
    alpha = pixels[3::4]
    assert alpha[:6] == [255] * 6  # input steps that affect output step 5
    assert max(alpha[6:]) < 255  # later input steps
    assert "output step 5, input step 2" in legend_text(figure)


@pytest.mark.parametrize("declared", [True, False])
def test_the_words_that_the_answer_hangs_on_are_the_hottest(reader, tmp_path, declared):
    """In a cell whose gate opens for two words only, these are the two most highlighted; padding is not."""
    x, key_steps = sentences()
    y = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1))
    tokens = ["<pad>", "yes", "no", *(f"word{i}" for i in range(3, 12))]
    model = Sentences(masked=declared)
    path = rl.report(
        model, x, y, tmp_path / "r.html", loss=nn.functional.mse_loss, tokens=tokens, diagnosis=False, jacobian=True
    )
    sheet = reader(path)
    for sample in Page(path).data["order"]:
        sheet.select_option("#sample", str(sample))
        wait_until(
            sheet, "index => document.querySelector('.strip .words').innerText.includes(`sample ${index},`)", sample
        )
        spans = sheet.locator("#tokens span")
        heat = spans.evaluate_all("all => all.map(span => Number(span.dataset.share || 0))")
        assert set(np.argsort(heat)[-2:]) == key_steps[sample]
        assert all(int(x[sample, step]) in KEY_WORDS for step in key_steps[sample])
        padded = spans.evaluate_all("all => all.map(span => span.className.includes('pad'))")
        assert padded == [bool(declared and token_id == 0) for token_id in x[sample]]
    note = sheet.locator("#input-section .intro").inner_text()
    if declared:
        assert note == "Padding is hatched."
        figure = show_figure(sheet, "track-0-hidden")
        assert figure.locator("rect.padding").count() == 17 - int((x[sample] != 0).sum())  # padded to 17 steps
    else:
        assert "No mask was declared: the network reads these steps as input." in note


def test_the_contents_stay_in_sight_and_lead_everywhere(reader):
    sheet = reader()
    links = sheet.locator("nav.toc a")
    assert links.all_inner_texts() == [
        "Findings", "Memory", "Input", "Time Jacobian", "rnn[0]", "rnn[1]", "How this was made",
    ]  # fmt: skip
    links.nth(5).click()
    wait_until(sheet, "scrollY > 500")
    assert sheet.locator("nav.toc").bounding_box()["y"] == pytest.approx(0, abs=1)
    assert 0 < sheet.locator("#track-1").bounding_box()["y"] < 300


def test_the_first_panels_are_open_and_a_link_opens_the_others(reader):
    sheet = reader()
    assert sheet.locator("#track-0-gradient").is_visible()
    assert sheet.locator("#track-0-gates").is_visible()
    assert not sheet.locator("#track-0-cell").is_visible()
    assert "Cell state" in sheet.locator("#track-0 details.more > summary").inner_text()
    sheet.evaluate("location.hash = 'track-0-cell'")
    wait_until(sheet, "document.getElementById('track-0-cell').checkVisibility()")


def test_panels_side_by_side_are_equally_tall(reader):
    sheet = reader()
    for pair in (("track-0-gradient", "track-0-gates"), ("input-size", "input"), ("missed", "transfer-0")):
        boxes = [show_figure(sheet, id).bounding_box() for id in pair]
        plots = [show_figure(sheet, id).locator(".plot > svg").bounding_box() for id in pair]
        assert boxes[0]["height"] == pytest.approx(boxes[1]["height"], abs=1)
        assert plots[0]["height"] == pytest.approx(plots[1]["height"], abs=1)


def test_the_slider_shows_its_number_and_thresholds_their_names(reader):
    sheet = reader()
    sheet.locator("#time").fill("7")
    wait_until(sheet, "document.querySelector('#controls output').textContent === '7'")
    assert "99 % of chance" in show_figure(sheet, "missed").locator(".plot > svg").text_content()


def test_the_switch_shows_the_baseline(reader, model, batch, page):
    sheet = reader()
    figure = show_figure(sheet, "track-0-gates")
    move_pointer(sheet, figure, 6.5 / 12, 0.5)
    wait_until(sheet, "document.getElementById('readout').innerText.includes('step 6')")
    after = figure.locator(".legend .key").nth(1).inner_text()
    sheet.click("#moments button:nth-child(2)")
    wait_until(sheet, "old => !document.querySelector('#track-0-gates .legend').innerText.includes(old)", after)
    before = figure.locator(".legend .key").nth(1).inner_text()
    assert before.startswith("forget = ")
    assert last_number(before) == pytest.approx(0.5, abs=0.1)  # small initial weights: every gate is near 0.5
    assert page.data["moments"] == ["as given", "re-initialised"]


@pytest.mark.parametrize("button", ["linear", "by own peak"])
def test_axes_switch(reader, button):
    sheet = reader()
    figure = show_figure(sheet, "track-0-gradient")
    before = svg_of(figure)
    sheet.get_by_role("button", name=button, exact=True).click()
    wait_until(sheet, "old => document.querySelector('#track-0-gradient .plot > svg').outerHTML !== old", before)
    texts = figure.locator(".plot > svg text").all_text_contents()
    if button == "linear":
        ticks = [float(t) for t in figure.locator(".plot > svg text[text-anchor=end]").all_text_contents()]
        assert np.allclose(np.diff(ticks), ticks[1] - ticks[0])
    else:
        assert "share of own peak" in texts


def test_numbers_are_saved(reader, model, batch, page):
    sheet = reader()
    name, text = save_figure(sheet, show_figure(sheet, "track-0-cell"), "csv")
    assert name == "track-0-cell.csv"
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["unit", *map(str, range(12))]
    expected = rl.trace(model, *batch, loss=LOSS)["rnn[0]"].cell.values[page.data["typical"]].T
    np.testing.assert_allclose(np.array(rows[1:], dtype=float)[:, 1:], expected, atol=np.abs(expected).max() / 100)


def test_a_figure_is_saved_as_it_looks(reader):
    sheet = reader()
    name, text = save_figure(sheet, show_figure(sheet, "track-0-gradient"), "svg")
    assert name == "track-0-gradient.svg"
    assert text.startswith("<svg ")
    assert "stroke: rgb(31, 111, 235)" in text  # colours are explicit, as the file has no style sheet
    assert "var(" not in text
    assert "dL/dh_t" not in text or "<text" in text


def test_it_is_read_without_scripts(reader):
    sheet = reader(java_script_enabled=False)
    for summary in sheet.locator("details.more > summary").all():
        summary.click()
    for id in ("track-0-gradient", "track-1-hidden", "jacobian", "input-size"):
        assert sheet.locator(f"#{id} svg.static").first.is_visible()
    assert sheet.locator("#track-0-gradient path.line").count() == 2
    assert sheet.locator("#track-0-gate-units image").count() == 4  # every gate: nothing switches without scripts
    assert not sheet.locator("#controls").is_visible()
    assert "picks samples" in sheet.inner_text("footer")


def test_it_prints(reader):
    sheet = reader()
    pdf = sheet.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 20
    sheet.emulate_media(media="print")
    assert not sheet.locator("#controls").is_visible()
    assert sheet.locator("#track-0-gradient svg").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_both_schemes(reader, scheme):
    sheet = reader(color_scheme=scheme)

    def luminance(selector, css_property):
        colour = sheet.locator(selector).first.evaluate(f"node => getComputedStyle(node).{css_property}")
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    background = luminance("body", "backgroundColor")
    assert (background < 0.1) == (scheme == "dark")
    for selector in (".sentence", ".facts", ".badge", "figcaption .words", "a.evidence-link", "#controls label"):
        light, dark = sorted((luminance(selector, "color"), background), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector  # minimum contrast of WCAG 2.1, level AA


def test_the_theme_is_switched_by_hand(reader):
    sheet = reader(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    before = sheet.evaluate(background)
    sheet.click(".theme")
    assert sheet.evaluate(background) != before


@pytest.mark.parametrize("width", [1440, 820, 360])
def test_nothing_is_wider_than_the_window(reader, width):
    sheet = reader(viewport={"width": width, "height": 800})
    show_figure(sheet, "track-1-kernel")
    assert sheet.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("java_script_enabled", [True, False])
def test_charts_fit_a_phone(reader, java_script_enabled):
    sheet = reader(viewport={"width": 390, "height": 800}, java_script_enabled=java_script_enabled)
    right_edge = "all => all.map(node => node.getBoundingClientRect().right)"
    charts = sheet.locator("#input-size .plot svg, #track-1-gradient .plot svg").evaluate_all(right_edge)
    frames = sheet.locator("#input-size, #track-1-gradient").evaluate_all(right_edge)
    assert len(charts) == len(frames) == 2
    assert all(chart < frame <= 390 for chart, frame in zip(charts, frames, strict=True))


def test_a_reader_who_knows_nothing_is_told_first(reader):
    sheet = reader()
    assert sheet.locator("h1 + p").inner_text().startswith("This page shows what 2 recurrent layers do")
    remedies = sheet.locator(".finding .remedy")
    assert remedies.first.is_visible()
    assert remedies.first.inner_text().startswith("What to do: ")
    term = sheet.locator("#findings abbr", has_text="skill").first
    assert "best constant prediction" in term.get_attribute("title")


def test_what_is_ruled_out_is_not_red(reader, acquittal_page):
    sheet = reader(acquittal_page)
    border = "node => getComputedStyle(node).borderLeftColor"
    fault, ruled_out = sheet.locator(".finding").all()
    assert fault.evaluate(border) == "rgb(200, 30, 30)"
    assert ruled_out.evaluate(border) != "rgb(200, 30, 30)"
    assert "ruled out" in ruled_out.inner_text()


def test_arrow_keys_move_the_cursor(reader):
    sheet = reader()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        sheet.keyboard.press(key)
    wait_until(sheet, "document.getElementById('readout').innerText.includes('step 2')")


def test_names_of_the_user_run_nothing(reader, batch, tmp_path):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.layers = nn.ModuleDict({HOSTILE.replace(".", "_"): nn.GRU(4, 4, batch_first=True)})
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(next(iter(self.layers.values()))(self.embedding(x))[0][:, -1])

    x = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(0))
    tokens = [f"<img src=x onerror=\"document.title='taken'\">{i}" for i in range(9)]
    y = torch.arange(8) % 3
    path = rl.report(Tokens(), x, y, tmp_path / "r.html", loss=LOSS, tokens=tokens, title=HOSTILE, diagnosis=False)
    sheet = reader(path)
    figure = show_figure(sheet, "track-0-hidden")
    move_pointer(sheet, figure, 0.5, 0.5)
    assert sheet.title() == HOSTILE
    assert "<script>" in sheet.inner_text("h1")
    typical = Page(path).data["typical"]
    assert sheet.locator("#tokens span").all_text_contents() == [tokens[int(i)] for i in x[typical]]
    assert sheet.locator("#tokens img").count() == 0


def test_two_directions_and_nan_are_drawn(reader, batch, tmp_path):
    model = Classifier(bidirectional=True)
    with torch.no_grad():
        model.rnn.weight_hh_l1_reverse[0, 0] = float("nan")
    path = rl.report(model, *batch, tmp_path / "r.html", loss=LOSS, diagnosis=False)
    sheet = reader(path)
    figure = show_figure(sheet, "track-3-hidden")
    trace, typical = rl.trace(model, *batch, loss=LOSS), Page(path).data["typical"]
    grads = [trace["rnn[1]"][name].sel(direction="backward").values[typical] for name in ("hidden_grad", "cell_grad")]
    broken = sum((~np.isfinite(grad).all(axis=-1)).sum() for grad in grads)
    assert show_figure(sheet, "track-3-gradient").locator(".broken").count() == broken > 20
    x, y = move_pointer(sheet, figure, 0.04, 0.04)  # the unit whose gate is NaN, at the last step backward
    sheet.mouse.click(x, y)
    wait_until(sheet, "document.querySelector('#track-3-hidden .legend').innerText.includes('unit 0, step 0')")
    assert "NaN or infinite" in legend_text(figure)
    assert "rnn[1] · backward" in sheet.inner_text("#track-3 h2")


def test_a_curve_that_leaves_its_axis_says_so_with_and_without_the_script(reader, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(70, 60, 3)
    path = rl.report(Classifier(4), x, x[:, 59, 0].long().clamp(0, 2), tmp_path / "r.html", loss=LOSS)
    for figure in (
        show_figure(reader(path), "transfer-0"),
        reader(path, java_script_enabled=False).locator("#transfer-0"),
    ):
        assert re.search("▾ below 1e-0?8", figure.locator(".plot > svg").text_content())
