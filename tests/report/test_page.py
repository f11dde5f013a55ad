"""Content of the report file, without a browser: numbers, text, and no resource from another address."""

from __future__ import annotations

import base64
import html
import io
import re
from html.parser import HTMLParser

import keras
import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from report_pages import HOSTILE, Classifier
from torch import nn

import rnnlens as rl
from rnnlens.reporting.evidence import _missed_figure
from rnnlens.reporting.tracks import sort_keys, tracks_of

LOSS = nn.functional.cross_entropy


class Tags(HTMLParser):
    """Parser that collects all tags with attributes, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._inside = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.texts.append(data)


def curve(encoded, row, levels=65_000):
    """Return the values of one row of an encoded curve, by a decoder independent of the page's script."""
    codes = np.frombuffer(base64.b64decode(encoded["rows"]), "<u2").reshape(-1, encoded["width"])[row].astype(float)
    low, high, log = encoded["scale"]
    value = low + codes / levels * (high - low)
    return np.where(codes > 0, 10**value, 0.0) if log else value


def test_nothing_comes_from_elsewhere(page):
    tags = Tags(page.text).tags
    addresses = [v for _, a in tags for k, v in a.items() if k in ("src", "href", "action", "data", "srcset") and v]
    assert addresses
    assert [a for a in addresses if not a.startswith(("#", "data:image/png;base64,"))] == []
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in tags}
    assert "@import" not in page.text
    policy = next(a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_curves_are_the_gradients_of_the_trace(page, model, batch):
    trace = rl.trace(model, *batch, loss=LOSS)
    for number, layer in enumerate(trace.layers):
        figure = page.figure(f"track-{number}-gradient")
        expected = np.linalg.norm(trace[layer].hidden_grad.values.astype(float), axis=-1)
        encoded = figure["lines"][0]["moments"][0]
        for row, sample in enumerate(figure["samples"]):
            np.testing.assert_allclose(curve(encoded, row), expected[sample], rtol=1e-3)


def test_the_gradients_of_the_gates_are_those_of_the_trace(page, model, batch):
    trace = rl.trace(model, *batch, loss=LOSS)
    for number, layer in enumerate(trace.layers):
        figure = page.figure(f"track-{number}-gate-gradient")
        expected = np.linalg.norm(trace[layer].gate_grad.values.astype(float), axis=-1)
        names = [f"|dL/dz_t| {gate}" for gate in trace[layer].gate.values]
        assert [line["name"] for line in figure["lines"]] == names
        for gate_index, line in enumerate(figure["lines"]):
            for row, sample in enumerate(figure["samples"]):
                np.testing.assert_allclose(curve(line["moments"][0], row), expected[sample, :, gate_index], rtol=1e-3)


def test_bands_are_median_and_quartiles_over_all_samples(page, model, batch):
    trace = rl.trace(model, *batch, loss=LOSS)
    encoded = page.figure("track-0-gates")["lines"][1]["moments"][0]
    expected = np.quantile(trace["rnn[0]"].gates.sel(gate="forget").mean("unit").values, [0.25, 0.5, 0.75], axis=0)
    actual = [curve({**encoded, "rows": encoded["band"]}, row) for row in range(3)]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_maps_are_pictures_that_hold_the_values(page, model, batch):
    trace = rl.trace(model, *batch, loss=LOSS)
    figure, sample = page.figure("track-1-cell"), str(page.data["typical"])
    low, high, log = figure["choices"][0]["moments"][0][sample][1]
    url = next(a["href"] for tag, a in Tags(page.text).tags if tag == "image" and a.get("id") == "track-1-cell-0")
    codes = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))), dtype=float)
    expected = trace["rnn[1]"].cell.values[int(sample)].T
    assert not log
    np.testing.assert_allclose(low + codes / 250 * (high - low), expected, atol=(high - low) / 400)


def test_samples_are_sorted_by_their_own_loss(page, model, batch):
    x, y = batch
    expected = LOSS(model(x), y, reduction="none").detach().numpy()
    actual = [sample["loss"] for sample in page.data["samples"]]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert page.data["order"] == list(np.argsort(expected, kind="stable"))
    assert page.data["hardest"] == int(expected.argmax())
    assert page.data["easiest"] == int(expected.argmin())
    assert page.data["typical"] == int(np.argsort(expected, kind="stable")[(len(expected) - 1) // 2])


def report_and_passes(network, batch, report_of, **options):
    """Return the report of a network, and the number of forward passes that it took."""
    count = []
    handle = network.register_forward_hook(lambda *_: count.append(1))
    page = report_of(network, *batch, loss=LOSS, diagnosis=False, jacobian=False, **options)
    handle.remove()
    return page, len(count)


def test_the_losses_of_all_samples_take_one_pass_beside_two_samples_run_alone(report_of, batch):
    _, few = report_and_passes(Classifier(), batch, report_of, samples=4)
    _, many = report_and_passes(Classifier(), batch, report_of, samples=40)
    assert many == few


def test_outputs_that_cannot_be_cut_into_samples_give_the_same_losses(report_of, batch):
    class TimeFirst(Classifier):
        """Classifier that returns scores of every step (time, sample, class)."""

        def forward(self, x):
            return self.head(self.rnn(x)[0]).transpose(0, 1)

    x, y = batch
    target = y[:, None].repeat(1, x.shape[1])

    def loss(output, target):
        return LOSS(output.permute(1, 2, 0), target)

    network = TimeFirst()
    page = report_of(network, x, target, loss=loss, diagnosis=False, jacobian=False)
    expected = [float(loss(network(x[i : i + 1]), target[i : i + 1]).detach()) for i in range(len(x))]
    np.testing.assert_allclose([sample["loss"] for sample in page.data["samples"]], expected, rtol=1e-4)


def test_where_samples_mix_each_has_the_loss_that_it_has_alone(report_of, batch):
    class Mixing(Classifier):
        """Classifier that subtracts a share of the batch mean from its outputs, so that samples affect each other."""

        def forward(self, x):
            scores = super().forward(x)
            return 3 * (scores - 0.5 * scores.mean(0))

    x, y = batch
    network = Mixing()
    page, count = report_and_passes(network, batch, report_of)
    expected = [float(LOSS(network(x[i : i + 1]), y[i : i + 1]).detach()) for i in range(len(x))]
    np.testing.assert_allclose([sample["loss"] for sample in page.data["samples"]], expected, rtol=1e-4)
    assert count >= len(x)


def test_units_sort_by_the_norm_of_their_weights(page, model):
    actual = page.data["tracks"][0]["keys"]["norm"]
    rows = [model.rnn.weight_ih_l0, model.rnn.weight_hh_l0]
    expected = np.sqrt(sum((w.detach().numpy().reshape(4, 6, -1) ** 2).sum((0, 2)) for w in rows))
    np.testing.assert_allclose(actual, expected, rtol=1e-3)


def test_units_sort_by_the_share_of_saturated_gates(page, model, batch):
    gates = rl.trace(model, *batch, loss=LOSS)["rnn[0]"].gates.sel(gate=["input", "forget", "output"]).values
    expected = ((gates < 0.1) | (gates > 0.9)).mean(axis=(0, 1, 2))
    np.testing.assert_allclose(page.data["tracks"][0]["keys"]["saturation"], expected, rtol=1e-3)


def test_the_time_jacobian_is_the_one_of_the_verb(page, model, batch):
    figure = page.figure("jacobian")
    order = page.data["order"]
    assert figure["causal"] is True
    url = next(a["href"] for tag, a in Tags(page.text).tags if tag == "image" and a.get("id") == "jacobian-0")
    codes = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))), dtype=float)
    low, high, _ = figure["scale"]
    positions = [(len(order) - 1) // 2, len(order) - 1, 0, *(round((len(order) - 1) * k / 4) for k in (1, 2, 3))]
    positions += [round((len(order) - 1) * k / 8) for k in range(1, 8)]
    samples = [order[position] for position in dict.fromkeys(positions)][:8]
    norms = rl.jacobian(model, batch[0][samples], of="rnn[1].hidden", measure="norm", across="mean").values
    lower = np.tril(np.ones_like(norms, dtype=bool))
    ratio = 10 ** (low + codes / 250 * (high - low)) / np.where(lower, norms, 1)
    np.testing.assert_allclose(ratio[lower], 1, rtol=10 ** ((high - low) / 400) - 1)


def test_findings_are_linked_to_what_shows_them(page, model, batch):
    parsed = Tags(page.text)
    ids = {a["id"] for _, a in parsed.tags if "id" in a}
    links = [a["href"][1:] for tag, a in parsed.tags if tag == "a" and a.get("class") == "evidence-link"]
    diagnosis = rl.diagnose(model, *batch, loss=LOSS, baseline="init")
    assert len(links) == len(diagnosis.findings) > 0
    assert set(links) <= ids
    for finding in diagnosis.findings:
        assert finding.sentence in " ".join("".join(parsed.texts).split())


def test_the_residual_test_is_drawn_by_its_threshold_as_it_is_no_share():
    sums = xr.Dataset({"missed": ("lag", [4.0, 1.0]), "missed_threshold": 2.0, "missed_effect": 0.9})
    spec = _missed_figure(sums).spec
    assert (spec["y"], spec["levels"]) == ("share of the threshold", [[1.0, "99 % of chance"]])
    assert spec["lines"][0]["y"] == [2.0, 0.5]
    no_errors = sums.assign(missed_threshold=0.0, missed=0.0 * sums["missed"])
    assert _missed_figure(no_errors).spec["lines"][0]["y"] == [0.0, 0.0]


def test_how_it_was_made_can_be_made_again(page):
    text = " ".join(Tags(page.text).texts)
    assert "rl.report(model, x, y, path=" in text
    assert "baseline='init'" in text
    assert "seed=0" in text
    assert f"torch {torch.__version__}" in text
    assert rl.__version__ in text


def test_badges_say_the_residual(page, model, batch):
    with rl.options(certify="always"):  # as for the page: it had the first trace of this model
        trace = rl.trace(model, *batch, loss=LOSS)
    text = " ".join(" ".join(Tags(page.text).texts).split())
    assert "self-checks passed" in text
    assert f"certified against {trace.certificate.against}" in text
    assert f"largest residual {trace.certificate.worst.residual:.1g}" in text


def test_names_from_the_user_are_text(report_of, batch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({HOSTILE.replace(".", "_"): nn.GRU(3, 4, batch_first=True)})
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(next(iter(self.layers.values()))(x)[0][:, -1])

    page = report_of(Model(), *batch, loss=LOSS, title=HOSTILE)
    tags = Tags(page.text).tags
    assert len([tag for tag, _ in tags if tag == "script"]) == 2  # the data and the page's own script
    assert "taken" in " ".join(Tags(page.text).texts)
    assert "<script>document" not in page.text


def test_tokens_are_text(report_of):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(self.embedding(x))[0][:, -1])

    x = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(0))
    page = report_of(
        Model(), x, torch.zeros(8, dtype=torch.long), loss=LOSS, tokens=[f"{HOSTILE}{i}" for i in range(9)]
    )
    assert "<script>document" not in page.text
    first = page.data["typical"]
    assert page.data["words"][str(first)] == [f"{HOSTILE}{int(i)}" for i in x[first]]


def test_what_is_left_out_is_said(report_of, batch):
    page = report_of(Classifier(), *batch, loss=LOSS, samples=5, diagnosis=False, jacobian=False)
    text = " ".join(Tags(page.text).texts)
    assert "5 of 40 samples, the first, are shown." in text
    assert "was not diagnosed" in text


def test_without_a_target_there_is_no_loss_and_it_says_so(report_of, batch):
    page = report_of(Classifier(), batch[0])
    text = " ".join(" ".join(Tags(page.text).texts).split())
    assert "There is no loss, so there are no gradients in this report." in text
    assert "Samples are not sorted by loss: no target was given." in text
    assert not [figure for figure in page.data["figures"] if "gradient" in figure["id"]]


def test_nan_is_counted_and_shown_as_nothing_else(report_of, batch):
    nan_model = Classifier()
    with torch.no_grad():
        nan_model.rnn.weight_hh_l1[0, 0] = float("nan")
    page = report_of(nan_model, *batch, loss=LOSS, jacobian=False)
    text = " ".join(Tags(page.text).texts)
    assert "values of this sample are NaN or infinite: red." in text
    assert page.data["samples"][0]["loss"] is None


@pytest.mark.parametrize(
    ("path", "message"),
    [("r.txt", "A report is an HTML file."), ("nowhere/r.html", "There is no such folder.")],
)
def test_a_path_that_cannot_be_is_refused_first(tmp_path, path, message):
    with pytest.raises(rl.errors.FileError, match=message):
        rl.report(object(), path=tmp_path / path)


def test_a_model_without_data_is_refused():
    with pytest.raises(rl.errors.InputError, match="A report of a model needs data"):
        rl.report(Classifier())


def test_a_baseline_of_another_shape_is_refused(tmp_path, batch):
    with pytest.raises(rl.errors.InputError, match="The baseline does not fit the model"):
        rl.report(Classifier(), *batch, tmp_path / "r.html", loss=LOSS, baseline=Classifier(units=4), diagnosis=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diagnosis": "yes"}, "diagnosis= is not understood"),
        ({"jacobian": 3}, "jacobian= is not understood"),
        ({"tokens": "words"}, "tokens= gives no text"),
        ({"tokens": [["a", "word", "of", "a", "sentence"]]}, "expected: the vocabulary: the text of token 0, 1, 2"),
        ({"tokens": ["a"], "diagnosis": False, "jacobian": False}, "tokens= is for inputs of integers"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, batch, options, message):
    with pytest.raises(rl.errors.InputError, match=message):
        rl.report(Classifier(), *batch, tmp_path / "r.html", loss=LOSS, **options)


def test_the_code_beside_a_figure_gives_it(page, model, batch):
    """The code shown beside each figure runs; only the call of ``rl.report``, which made the page, is left out."""
    (x, y), loss = batch, LOSS
    trace = rl.trace(model, x, y, loss=loss)
    codes = re.findall("<code>(rl[.].*?)</code>", page.text)
    assert len(codes) > 8
    for code in dict.fromkeys(map(html.unescape, codes)):
        if not code.startswith("rl.report"):
            code = code.replace("diagnose(model, x, y)", "diagnose(model, x, y, loss=loss)")
            assert eval(code, {"rl": rl, "model": model, "x": x, "trace": trace, "loss": loss, "y": y}) is not None
    assert "loss=cross_entropy" in page.text


def test_finished_results_make_a_page(report_of, model, batch):
    trace = rl.trace(model, *batch, loss=LOSS)
    diagnosis = rl.diagnose(model, *batch, loss=LOSS)
    page = report_of([trace, diagnosis, rl.jacobian(model, batch[0], of="rnn[1].hidden", measure="norm")])
    ids = {figure["id"] for figure in page.data["figures"]}
    assert {"track-0-gradient", "track-1-cell", "transfer-0", "jacobian"} <= ids


def test_a_sample_that_is_not_finite_is_kept_out_of_the_time_jacobian(report_of, model, batch):
    x = batch[0].clone()
    x[3, 7, 1] = float("nan")
    page = report_of(model, x, batch[1], loss=LOSS)
    assert "The time Jacobian is that of samples whose states are finite." in page.text
    url = next(a["href"] for tag, a in Tags(page.text).tags if tag == "image" and a.get("id") == "jacobian-0")
    codes = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    assert codes.max() <= 250  # larger codes are padding and non-finite values


def test_units_are_sorted_by_the_gate_that_keeps_their_state():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.gru(x)[1][-1])

    trace = rl.trace(Net(), torch.randn(6, 7, 3), torch.arange(6) % 4, loss=LOSS)
    (track,) = tracks_of(trace)
    expected = rl.measures.gate_timescale(trace["gru"].gates.sel(gate="update").values)
    np.testing.assert_allclose(sort_keys(track, None)["timescale"], expected)


def test_a_trace_without_the_gate_that_keeps_the_state_makes_a_page(report_of, batch):
    trace = rl.trace(Classifier(), *batch, loss=LOSS, at={"gate": [0]})
    page = report_of(trace)
    assert [line["name"] for line in page.figure("track-0-gates")["lines"]] == ["input"]
    assert set(page.data["tracks"][0]["keys"]) == {"mean_lag", "saturation"}


@pytest.mark.parametrize("drawn", [[], ["gru"]], ids=["alone", "below a GRU"])
def test_a_convolutional_layer_is_left_out_and_the_page_says_why(report_of, drawn):
    above = [keras.layers.TimeDistributed(keras.layers.Flatten()), keras.layers.GRU(3, name="gru")] if drawn else []
    conv = keras.layers.ConvLSTM2D(2, 3, return_sequences=bool(drawn), name="conv")
    layers = [keras.Input((4, 5, 4, 2)), conv, *above, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 4, 5, 4, 2)).astype("f"), rng.normal(size=(6, 1)).astype("f")
    sentence = "Layer 'conv' is not drawn: its states have axes of space (height, width)"
    for page in (report_of(model, x, y), report_of(rl.trace(model, x, y))):
        assert html.unescape(page.text).count(sentence) == 1
        assert [track["layer"] for track in page.data["tracks"]] == drawn
    page = report_of(model, x, y)
    assert ("No time Jacobian: no layer is drawn over time." in page.text) == (not drawn)
    if drawn:
        assert {"input", "jacobian", "track-0-gates"} <= {figure["id"] for figure in page.data["figures"]}
        assert "rl.plot.heatmap(trace['gru'].input)" in html.unescape(page.text)


class Leaky(nn.Module):
    """A cell of two states: a leaky memory, and its tanh."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(3, 10), nn.Linear(5, 10, bias=False)

    def forward(self, x, hidden, memory):
        keep, new = (self.w(x) + self.u(hidden)).chunk(2, -1)
        memory = torch.sigmoid(keep) * memory + (1 - torch.sigmoid(keep)) * torch.tanh(new)
        return torch.tanh(memory), memory


class LeakyCell(rl.cells.Cell):
    kind, gates, states, keeping = "leaky_of_the_report", ("keep", "new"), ("hidden", "memory"), "keep"
    parameters = rl.cells.by_name(rl.cells.KERNEL, rl.cells.RECURRENT_KERNEL, rl.cells.BIAS)

    def step(self, projected, before, scale, xp):
        hidden, memory = before
        z = [self.gate(projected + hidden @ self.recurrent_kernel, name) for name in self.gates]
        keep, new = rl.cells.sigmoid(z[0], xp), xp.tanh(z[1])
        memory = keep * memory + (1 - keep) * new
        return self.record(z, [keep, new], xp), (xp.tanh(memory), memory)


def test_states_of_a_registered_cell_are_drawn(report_of, batch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.spare = Leaky(), nn.Linear(5, 3), nn.LSTM(3, 2)

        def forward(self, x):
            hidden = memory = x.new_zeros(len(x), 5)
            for t in range(x.shape[1]):
                hidden, memory = self.cell(x[:, t], hidden, memory)
            return self.head(hidden)

    names = {"kernel": "w.weight.T", "recurrent_kernel": "u.weight.T", "bias": "w.bias"}
    rl.cells.register(Leaky, LeakyCell, weights=names)
    page = report_of(Net(), *batch, loss=LOSS, samples=8, diagnosis=False, jacobian=False)
    gradients = page.figure("track-0-gradient")["lines"]
    assert [line["name"] for line in gradients] == ["|dL/dh_t|", "|dL/dmemory_t|"]
    assert {"track-0-hidden", "track-0-memory"} <= {figure["id"] for figure in page.data["figures"]}
    page = report_of(Net(), batch[0], samples=8, diagnosis=False, jacobian=False)
    assert {"track-0-hidden", "track-0-memory"} <= {figure["id"] for figure in page.data["figures"]}
