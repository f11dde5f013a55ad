"""Pages made by rnnlens (the report, and that of ``rnnlens tail --serve``) satisfy the rules of axe-core."""

import html

import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from torch import nn

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
    "dark phone": {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"},
}
LOSS = nn.functional.cross_entropy


def violations(sheet):
    """Return what axe-core finds once all that is folded is open, and whether the page is wider than the window."""
    sheet.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    assert sheet.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return [
        f"{rule['id']}: {rule['help']} ({node['html'][:120]}: {node['failureSummary']})"
        for rule in Axe().run(sheet).response["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_a_report_has_no_violations(reader, view):
    assert violations(reader(**VIEWS[view])) == []


@pytest.fixture(scope="module")
def views_of_results(model, batch, tmp_path_factory):
    """Return the path of each page that a notebook shows, by the kind of its result."""
    folder = tmp_path_factory.mktemp("views")
    store = Store(folder / "a.zarr")
    for step in range(3):
        store.write(TrainingRecord(step, 0, "probe", {"loss": 1.0, "lstm/reach": float(step)}))
    store.close("finished")
    results = {
        "trace": rl.trace(model, *batch, loss=LOSS),
        "jacobian": rl.jacobian(model, batch[0][:4], of="rnn[1].hidden", wrt="input", measure="norm"),
        "diagnosis": rl.diagnose(model, *batch, loss=LOSS),
        "run": rl.open(folder / "a.zarr"),
    }
    for name, result in results.items():
        frame = result._repr_mimebundle_()["text/html"].partition("srcdoc='")[2].rpartition("'></iframe>")[0]
        (folder / f"{name}.html").write_text(html.unescape(frame), "utf-8")
    return folder


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("result", ["trace", "jacobian", "diagnosis", "run"])
def test_what_a_notebook_shows_has_no_violations(reader, views_of_results, result, view):
    sheet = reader(views_of_results / f"{result}.html", **VIEWS[view])
    assert violations(sheet) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_report_of_sentences_has_no_violations(reader, tmp_path, view):
    torch.manual_seed(0)
    model, ids = Reader(), torch.randint(1, 12, (30, 40))
    words = ["<pad>", *(f"a-rather-long-word-{i}" for i in range(1, 12))]
    path = rl.report(model, ids, ids[:, 0] % 3, tmp_path / "r.html", loss=LOSS, tokens=words, diagnosis=False)
    sheet = reader(path, **VIEWS[view])
    assert sheet.locator("#tokens span").count() == 40
    lines = "tokens => tokens.map(token => token.getClientRects().length)"
    assert set(sheet.locator("#tokens span").evaluate_all(lines)) == {1}  # no word is broken between lines
    assert violations(sheet) == []


class Reader(nn.Module):
    """Sentences of up to 12 words into 3 classes."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(12, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.rnn(self.words(ids))[0][:, -1])


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
