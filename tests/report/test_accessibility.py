"""Pages made by rnnlens (the report, and that of ``rnnlens tail --serve``) satisfy the rules of axe-core."""

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

import rnnlens as rl
from rnnlens.reporting.live import LiveServer
from rnnlens.results.training_run import Alert
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store

pytestmark = pytest.mark.browser
VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}},
}


def violations(sheet):
    return [
        f"{rule['id']}: {rule['help']} ({node['html'][:120]}: {node['failureSummary']})"
        for rule in Axe().run(sheet).response["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_a_report_has_no_violations(reader, view):
    assert violations(reader(**VIEWS[view])) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_three_axes_has_no_violations(reader, view, tmp_path):
    states = np.cumsum(np.random.default_rng(0).normal(size=(4, 9, 5)), axis=1)
    rl.plot.trajectories(states, components=(1, 2, 3), color=list("abab")).save(tmp_path / "states.html")
    assert violations(reader(tmp_path / "states.html", **VIEWS[view])) == []


@pytest.fixture
def address(tmp_path):
    store = Store(tmp_path / "a.zarr")
    for step in range(3):
        note = (Alert("exploding", "lstm/adjoint", 2, 5.0, 0.01).sentence,) if step == 2 else ()
        store.write(TrainingRecord(step, 0, "probe", {"loss": 1.0, "lstm/reach": float(step)}, notes=note))
    store.close("finished")
    server = LiveServer({"a.zarr": tmp_path / "a.zarr"}, 0)
    yield server.address
    server.close()


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_of_a_run_has_no_violations_and_asks_nobody_else(browser, address, view):
    context, requests = browser.new_context(**VIEWS[view]), []
    try:
        sheet = context.new_page()
        sheet.on("request", lambda request: requests.append(request.url))
        sheet.goto(address)
        sheet.wait_for_selector("#scalar-loss svg")
        assert sheet.locator("#alerts .finding").count() == 1
        assert violations(sheet) == []
        assert requests
        assert all(url.startswith((address, "data:")) for url in requests)
    finally:
        context.close()
