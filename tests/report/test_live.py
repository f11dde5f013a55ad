"""The live page of a training in Chromium: waiting, growing curves, hover, alerts, two runs."""

import pytest

import rnnlens as rl
from rnnlens.reporting.live import LiveServer
from rnnlens.results.training_run import Alert
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store

pytestmark = pytest.mark.browser
ALERT = Alert("exploding", "lstm/adjoint", 30, 5.0, 0.01)


def write(store, step, notes=()):
    store.write(TrainingRecord(step, 0, "probe", {"loss": 1.0 / (1 + step), "lstm/adjoint": 1.0 + step}, notes=notes))


@pytest.fixture
def open_page(browser):
    """Return a function that serves runs and opens their page; errors of the page fail the test."""
    contexts, servers, complaints = [], [], []

    def open_(*paths):
        servers.append(LiveServer({path.name: path for path in paths}, 0, interval=0.1))
        contexts.append(browser.new_context(viewport={"width": 1000, "height": 800}))
        sheet = contexts[-1].new_page()
        sheet.on("console", lambda message: complaints.append(message.text))
        sheet.on("pageerror", lambda error: complaints.append(str(error)))
        sheet.goto(servers[-1].address)
        sheet.wait_for_selector("html[data-ready]", state="attached")
        return sheet

    yield open_
    for context in contexts:
        context.close()
    for server in servers:
        server.close()
    assert complaints == []


def point_at(sheet, id, across):
    box = sheet.locator(f"#{id} .plot > svg").bounding_box()
    sheet.mouse.move(box["x"] + 62 + across * (box["width"] - 74), box["y"] + box["height"] / 2)


def test_a_page_waits_for_its_run_and_grows_with_it(open_page, tmp_path):
    sheet = open_page(tmp_path / "a.zarr")
    assert sheet.locator("#runs").inner_text() == "Waiting for the run."
    store = Store(tmp_path / "a.zarr")
    for step in (0, 10, 20):
        write(store, step)
    sheet.locator("#runs", has_text="3 records, step 20").wait_for()
    point_at(sheet, "scalar-loss", 0.5)
    sheet.locator("#scalar-loss .legend", has_text="loss at 10: 0.0909").wait_for()
    assert sheet.locator("#alerts .finding").count() == 0
    write(store, 30, (ALERT.sentence,))
    sheet.locator("#alerts .finding", has_text=ALERT.sentence).wait_for()
    store.close("finished")
    sheet.locator("#runs", has_text="4 records, step 30").wait_for()
    point_at(sheet, "scalar-loss", 1.0)
    sheet.locator("#scalar-loss .legend", has_text="loss at 30: 0.0323").wait_for()
    assert rl.open(tmp_path / "a.zarr").alerts == [ALERT]


def test_two_runs_share_their_figures(open_page, tmp_path):
    for name in "ab":
        store = Store(tmp_path / f"{name}.zarr")
        for step in (0, 10):
            write(store, step)
        store.close("finished")
    sheet = open_page(tmp_path / "a.zarr", tmp_path / "b.zarr")
    legend = sheet.locator("#scalar-loss .legend")
    legend.locator(".key").nth(1).wait_for()
    assert legend.locator(".key").all_inner_texts() == ["loss · a.zarr", "loss · b.zarr"]
    assert sheet.locator("#scalar-loss path.line").count() == 2
