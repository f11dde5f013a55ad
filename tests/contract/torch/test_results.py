"""Tables, files, figures, weights and Jacobians work on torch results as on those of other frameworks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

B, T, F, H = 3, 5, 2, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(F, H, 2, bidirectional=True, batch_first=True)
        self.cell, self.head = nn.GRUCell(2 * H, H), nn.Linear(H, 1)

    def forward(self, x):
        y, _ = self.rnn(x)
        h = y.new_zeros(len(x), H)
        for t in range(y.shape[1]):
            h = self.cell(y[:, t], h)
        return self.head(h)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def trace(model):
    return rl.trace(model, torch.randn(B, T, F), torch.randn(B, 1), loss=nn.functional.mse_loss)


@pytest.mark.parametrize("name", ["run.nc", "run.zarr"])
def test_save_and_open(trace, tmp_path, name):
    trace.save(tmp_path / name)
    opened = rl.open(tmp_path / name)
    assert list(opened) == list(trace) == ["rnn[0]", "rnn[1]", "cell"]
    for node in trace:
        for quantity, array in trace[node].dataset.items():
            np.testing.assert_array_equal(opened[node][quantity].values, array.values)
            assert opened[node][quantity].attrs == array.attrs
    assert opened.loss == trace.loss


def test_provenance_names_framework_version_dtype_and_device(trace):
    text = trace["cell"].hidden_grad.attrs["provenance"]
    assert all(term in text for term in ("torch", torch.__version__, "float32", "cpu"))


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(nn.MSELoss(), "mean"), (nn.MSELoss(reduction="sum"), "sum"), (nn.functional.mse_loss, None)],
)
def test_provenance_says_how_the_loss_is_reduced(model, loss, reduction):
    x, y = torch.randn(B, T, F), torch.randn(B, 1)
    assert rl.trace(model, x, y, loss=loss).provenance.get("loss_reduction") == reduction
    g = rl.gradients(model, x, y, of="loss", wrt=["cell.output"], loss=loss)
    assert g.provenance.get("loss_reduction") == reduction
    assert "loss_reduction" not in rl.trace(model, x).provenance


def test_pictures(trace):
    for draw in (rl.plot.curves, rl.plot.heatmap):
        for node in ("rnn[1]", "cell"):
            panels = np.atleast_1d(draw(trace[node].hidden_grad))
            assert all(axes.has_data() for axes in panels.ravel())


def test_table_of_layers(model):
    text = str(rl.layers(model))
    assert all(term in text for term in ("rnn[0]", "rnn[1]", "cell", "LSTM", "GRUCell", "bidirectional"))


def test_weights_by_gate(model):
    weights = rl.weights(model)
    assert weights["rnn[0]"].kernel.dims == ("direction", "feature", "gate", "unit")
    assert weights["cell"].recurrent_kernel.dims == ("unit_in", "gate", "unit")
    r, z, n = model.cell.weight_hh.detach().chunk(3)
    for gate, expected in {"update": z, "reset": r, "candidate": n}.items():
        np.testing.assert_array_equal(weights["cell"].recurrent_kernel.sel(gate=gate).values, expected.T.numpy())
    assert {"bias", "recurrent_bias"} <= set(weights["cell"].dataset)


def test_time_jacobian_equals_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(F, F), nn.GRU(F, H, batch_first=True)).double()

    class Out(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return self.body(x)[0]

    net, x = Out(), torch.randn(2, T, F, dtype=torch.float64)
    jacobian = rl.jacobian(net, x)
    expected = torch.autograd.functional.jacobian(lambda v: net(v).sum(0), x)
    np.testing.assert_allclose(jacobian.values, expected.permute(2, 0, 1, 3, 4).numpy(), atol=1e-12)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("verb", ["jacobian", "gradients"])
def test_a_lone_array_says_how_it_was_checked_also_from_a_file(verb, suffix, model, tmp_path):
    x = torch.randn(B, T, F, generator=torch.Generator().manual_seed(0))
    options = {"of": "output", "reduce": "sum"} if verb == "gradients" else {}
    array = getattr(rl, verb)(model, x, wrt="input", **options)
    assert array.certificate.state == "passed"
    assert set(array.certificate.checks) <= set(array.checks)
    assert any(check.name.startswith("reference") for check in array.checks)
    assert array.provenance["framework"] == array.provenance["engine"] == f"torch {torch.__version__}"
    doubled = 2 * array
    assert (doubled.checks, doubled.certificate) == (array.checks, array.certificate)
    array.save(tmp_path / f"array{suffix}")
    opened = rl.open(tmp_path / f"array{suffix}")
    assert (opened.checks, opened.certificate, opened.provenance) == (array.checks, array.certificate, array.provenance)
    np.testing.assert_array_equal(opened.values, array.values)


class OneByOne(nn.Module):
    """Model that calls its LSTM once per sample."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(F, H), nn.Linear(H, 1)

    def forward(self, x):
        return torch.stack([self.head(self.rnn(row)[0]) for row in x])


def test_a_report_of_a_loop_over_the_samples(tmp_path):
    """A report works if a layer is called once per sample, so that the number of calls depends on the data."""
    torch.manual_seed(0)
    path = rl.report(OneByOne(), torch.randn(B, T, F), torch.randn(B, T, 1), tmp_path / "a.html",
                     loss=nn.functional.mse_loss, diagnosis=False)  # fmt: skip
    assert "rnn#0" in path.read_text()


def test_a_layer_that_returns_several_tensors_is_traced_at_the_first_with_a_note_on_the_others():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.look, self.head = (
                nn.GRU(3, 4, batch_first=True),
                nn.MultiheadAttention(4, 2),
                nn.Linear(4, 1),
            )

        def forward(self, x):
            y = self.rnn(x)[0].transpose(0, 1)
            return self.head(self.look(y, y, y)[0][-1])

    trace = rl.trace(Attending(), torch.randn(2, 5, 3), layers=["rnn", "look"])
    expected = (
        "look returns 2 tensors: output is the first, of shape (5, 2, 4); not traced are those of shape (2, 5, 5)."
    )
    assert expected in trace.notes
    assert not any("returns" in note for note in rl.trace(Attending(), torch.randn(2, 5, 3), layers=["rnn"]).notes)


class TwoLoopsOfOneCell(nn.Module):
    """Two loops over a known cell, a step without a module, and a cell whose arguments have no telling names."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(7, 4)

        def forward(self, a, b):
            return torch.tanh(self.linear(torch.cat([a, b], 1)))

    def __init__(self):
        super().__init__()
        self.cell, self.mix = nn.GRUCell(3, 4), self.Mix()

    def forward(self, x):
        h = mixed = decayed = again = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h, mixed = self.cell(step, h), self.mix(step, mixed)
            decayed = rl.torch.step(lambda x, h: h / 2 + x.sum(1, keepdim=True), step, decayed)
        for step in x.unbind(1):
            again = self.cell(step, again)
        return h + mixed + decayed + again


def test_layers_are_those_of_a_trace_with_data_and_the_same_before_and_after_runs_without():
    model, x = TwoLoopsOfOneCell(), torch.randn(2, 5, 3)
    rows = rl.layers(model).rows()
    listed = rl.layers(model, x)
    assert listed.names == ("cell#0", "mix", "loop", "cell#1")
    assert [row.units for row in listed] == [4, 4, 4, 4]
    assert listed.names == tuple(rl.trace(model, x))
    assert rl.layers(model).rows() == rows
    assert rl.layers(model).names == ("cell",)
