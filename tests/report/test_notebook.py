"""Results and reports in a notebook cell: the bundle that IPython makes, its frame in Chromium, its size."""

import base64
import io

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from PIL import Image
from torch import nn

import rnnlens as rl
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store

pytestmark = pytest.mark.browser
LOSS = nn.functional.cross_entropy


def bundle_of(result):
    """Return what a kernel sends for the last expression of a cell, by MIME type."""
    return DisplayFormatter().format(result)[0]


@pytest.fixture(scope="module")
def trace(model, batch):
    return rl.trace(model, *batch, loss=LOSS)


@pytest.fixture
def cell(browser, tmp_path):
    """Return a function that shows HTML as the output of a cell; it returns the page and its frame."""
    contexts, complaints = [], []

    def show(html, **options):
        context = browser.new_context(offline=True, viewport={"width": 900, "height": 800}, **options)
        contexts.append(context)
        sheet = context.new_page()
        sheet.on("console", lambda message: complaints.append(message.text))
        sheet.on("pageerror", lambda error: complaints.append(str(error)))
        (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><body>{html}</body>", "utf-8")
        sheet.goto((tmp_path / "cell.html").as_uri())
        frame = sheet.frame_locator("iframe")
        frame.locator("html[data-ready]").wait_for(state="attached")
        return sheet, frame

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def move_over(sheet, frame, id, across):
    """Move the pointer over a figure at a fraction of its axes' width, half-way down."""
    frame.locator(f"#{id}").scroll_into_view_if_needed()  # which draws it
    svg = frame.locator(f"#{id} .plot > svg:not(.static)")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    sheet.mouse.move(box["x"] + 62 + across * (box["width"] - 74), box["y"] + box["height"] / 2)


def test_a_trace_is_picked_and_pointed_at_in_its_cell(cell, trace):
    sheet, frame = cell(bundle_of(trace)["text/html"])
    frame.locator("#sample").select_option("5")
    frame.locator("#readout b", has_text="sample 5").wait_for()
    move_over(sheet, frame, "track-1-gradient", 7.5 / 12)
    frame.locator("#readout", has_text="step 7").wait_for()
    text = frame.locator("#track-1-gradient .legend .key").first.inner_text()
    expected = (trace["rnn[1]"].hidden_grad[5, 7].astype(float) ** 2).sum() ** 0.5
    assert float(text.rpartition("=")[2]) == pytest.approx(float(expected), rel=0.01)
    assert not sheet.locator(".rnnlens-fallback").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_time_jacobian_shows_numbers_in_both_schemes(cell, model, batch, scheme):
    jacobian = rl.jacobian(model, batch[0][:4], of="rnn[1].hidden", wrt="input", measure="norm")
    sheet, frame = cell(bundle_of(jacobian)["text/html"], color_scheme=scheme)
    frame.locator("#jacobian .plot svg:not(.static)").wait_for()
    move_over(sheet, frame, "jacobian", 2.5 / 12)
    frame.locator("#jacobian .legend", has_text="input step 2").wait_for()
    text = frame.locator("#jacobian .legend span").first.inner_text()
    step = int(text.split()[2].rstrip(","))
    assert float(text.rpartition(":")[2]) == pytest.approx(float(jacobian.mean("sample")[step, 2]), rel=0.02)
    ground = frame.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_a_diagnosis_shows_its_findings_first(cell, model, batch):
    diagnosis = rl.diagnose(model, *batch, loss=LOSS)
    _, frame = cell(bundle_of(diagnosis)["text/html"])
    assert next(iter(diagnosis.sentences.values())) in frame.locator("body").inner_text()
    assert frame.locator(".finding").count() == len(diagnosis.findings) > 0


def test_a_run_shows_its_curves(cell, tmp_path):
    store = Store(tmp_path / "a.zarr")
    for step in range(5):
        store.write(TrainingRecord(10 * step, 0, "probe", {"loss": 1.0 / (1 + step), "lstm/reach": float(step)}))
    store.close("finished")
    sheet, frame = cell(bundle_of(rl.open(tmp_path / "a.zarr"))["text/html"])
    frame.locator("#scalar-loss .plot svg:not(.static)").wait_for()
    move_over(sheet, frame, "scalar-loss", 0.5)
    frame.locator("#scalar-loss .legend", has_text="loss at 20: 0.333").wait_for()


def test_a_report_shows_itself(cell, trace, tmp_path):
    path = rl.report(trace, path=tmp_path / "it's a report.html", title="A small LSTM")
    _, frame = cell(bundle_of(path)["text/html"])
    frame.locator("h1", has_text="A small LSTM").wait_for()
    assert bundle_of(path.parent).keys() == {"text/plain"}


def test_the_picture_is_left_where_frames_are_removed(browser, trace):
    bundle = bundle_of(trace)
    picture = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert picture.width > 300
    without_frame = bundle["text/html"].partition("<iframe")[0] + "</div>"
    sheet = browser.new_page()
    sheet.set_content(without_frame)
    assert sheet.locator("img").is_visible()
    sheet.close()


def test_size_is_bounded_and_what_is_left_out_is_said(cell):
    torch.manual_seed(0)
    model = nn.LSTM(8, 64, batch_first=True)
    large = rl.trace(model, torch.randn(150, 120, 8), loss=lambda out: out[0].square().mean())
    bundle = bundle_of(large)
    assert sum(map(len, bundle.values())) < 2_000_000
    assert len(bundle["text/html"]) < 1_000_000
    _, frame = cell(bundle["text/html"])
    assert "64 of 150 samples, the first, are shown." in frame.locator("#left-out").inner_text()


def test_other_results_keep_their_static_page(model):
    bundle = bundle_of(rl.weights(model))
    assert "<iframe" not in bundle["text/html"]
    assert "rnn[0]" in bundle["text/html"]
