"""Models in shapes that public programs have: state inside the cell, weights made by the forward, several arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specimens_torch import Carrying
from torch import nn

import rnnlens as rl
from rnnlens.adapters.torch import adapter

B, T, F, H = 3, 6, 3, 4
MSE = nn.functional.mse_loss


def data():
    torch.manual_seed(0)
    return torch.randn(B, T, F).double(), torch.randn(B, 2).double()


def by_autograd(model, x, y, tensors=None):
    """Return the gradients of the untouched model at its input, or at given tensors."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(MSE(model(leaf), y), [leaf] if tensors is None else tensors)


class KeepsState(nn.Module):
    """Spiking cell that keeps its potential in a buffer, or as an attribute; a state argument is ignored."""

    def __init__(self, pair, buffer):
        super().__init__()
        self.pair = pair
        if buffer:
            self.register_buffer("potential", torch.zeros(0), persistent=False)
        else:
            self.potential = torch.zeros(0)

    def forward(self, x, state=None):
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = 0.9 * self.potential + x
        return ((self.potential > 1).to(x), self.potential) if self.pair else self.potential


class Spiking(nn.Module):
    def __init__(self, pair, buffer):
        super().__init__()
        self.inner, self.cell, self.out = nn.Linear(F, H), KeepsState(pair, buffer), nn.Linear(H, 2)

    def forward(self, x):
        self.cell.potential = torch.zeros(0)
        for t in range(x.shape[1]):
            returned = self.cell(self.inner(x[:, t]))
        return self.out(returned[1] if self.cell.pair else returned)


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_a_cell_that_keeps_its_state_in_itself(pair, buffer):
    (x, y), model = data(), Spiking(pair, buffer).double()
    gradients = rl.gradients(model, x, y, loss=MSE, wrt="input")
    np.testing.assert_allclose(gradients.values, by_autograd(model, x, y)[0], rtol=1e-12)
    assert gradients.certificate.state == "passed"
    x = torch.zeros(B, T, F).double()
    x[:, :2] = -1.2e308
    with torch.no_grad():
        model.inner.weight.copy_(torch.eye(H, F))
        model.inner.bias.zero_()
        is_finite = bool(torch.isfinite(model(x)).all())
    found = rl.find_nonfinite(model, x, loss=lambda output: output.sum())
    assert not is_finite
    assert found is not None


class WeightDrop(nn.Module):
    """DropConnect: the recurrent weight is a parameter no more, and set before each call of the layer's forward."""

    def __init__(self):
        super().__init__()
        self.module = nn.LSTM(F, H, batch_first=True)
        raw = self.module.weight_hh_l0
        del self.module._parameters["weight_hh_l0"]
        self.module.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.data))
        self.out = nn.Linear(H, 2)

    def forward(self, x):
        weight = nn.functional.dropout(self.module.weight_hh_l0_raw, 0.5, self.training)
        self.module.weight_hh_l0 = weight
        return self.out(self.module.forward(x)[0][:, -1])


@pytest.mark.parametrize("verb", ["layers", "weights", "trace", "gradients", "jacobian", "diagnose", "weight_norms"])
def test_a_weight_that_the_first_forward_makes(verb):
    (x, y), model = data(), WeightDrop().double()
    before = set(vars(model.module))
    calls = {
        "layers": lambda: rl.layers(model),
        "weight_norms": lambda: rl.weight_norms(model),
        "jacobian": lambda: rl.jacobian(model, x),
        "gradients": lambda: rl.gradients(model, x, y, loss=MSE, wrt="weights"),
    }
    result = calls.get(verb, lambda: getattr(rl, verb)(model, x, y, loss=MSE))()
    assert set(vars(model.module)) == before
    model.eval()
    if verb == "gradients":
        (expected,) = by_autograd(model, x, y, [model.module.weight_hh_l0_raw])
        np.testing.assert_allclose(result["module"]["weight_hh_l0_raw"].values, expected, rtol=1e-9, atol=1e-12)
    if verb == "weights":
        values = result["module"]["recurrent_kernel"]
        norm = np.linalg.norm(values.values)
        np.testing.assert_allclose(norm, float(model.module.weight_hh_l0_raw.norm().detach()))


def trained(model, x, y, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        MSE(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_watch_of_a_weight_that_the_first_forward_makes():
    (x, y), states = data(), []
    for is_watched in (False, True):
        torch.manual_seed(1)
        model = WeightDrop().double()
        if is_watched:
            message = r"module\.forward\(x\), not module\(x\)"
            with pytest.warns(rl.errors.TrackingWarning, match=message), rl.torch.watch(model, every=1):
                states.append(trained(model, x, y))
        else:
            states.append(trained(model, x, y))
    assert torch.equal(*states)


class Lengths(nn.LSTM):
    def forward(self, x, lengths=None, hx=None, *, scale=1.0):
        return super().forward(x, hx)


class LengthsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = Lengths(F, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x):
        return self.out(self.rnn(x, torch.full((len(x),), T), scale=2.0)[0][:, -1])


def test_a_watch_repeats_a_subclass_with_more_arguments():
    (x, y), model = data(), LengthsNet().double()
    with rl.torch.watch(model, every=1) as watch:
        trained(model, x, y, steps=1)
        watched = watch.latest.trace["rnn"]
    torch.manual_seed(0)
    assert watched.hidden_grad.shape == (B, T, H)
    assert not watch.gaps


class DropsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(F, H), nn.Linear(H, 2)

    def forward(self, x):
        h = c = x.new_zeros(len(x), H)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            h = nn.functional.dropout(h, 0.1, self.training)
        return self.out(h)


def test_a_watch_says_why_no_layer_of_a_batch_is_recorded(tmp_path):
    (x, y), model = data(), DropsState().double()
    message = "its state is changed between its steps"
    with (
        pytest.warns(rl.errors.TrackingWarning, match=message),
        rl.torch.watch(model, tmp_path / "run.zarr", every=1) as watch,
    ):
        trained(model, x, y)
    assert not watch.gaps
    with pytest.raises(rl.errors.UnsupportedError, match=r"No layer of batch 2 was recorded\.\n.*its state is changed"):
        _ = watch.latest.trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(F, F)

    def forward(self, v, mask=None):
        return self.inner(v)


class WithBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.lstm, self.out = Block(), nn.LSTM(F, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x):
        self.seen = self.block(x)
        return self.out(self.lstm(self.seen)[0][:, -1])


def test_a_second_argument_makes_no_cell():
    (x, y), model = data(), WithBlock().double()
    by_block = rl.gradients(model, x, y, loss=MSE, wrt="block.output")
    loss = MSE(model(x), y)
    (expected,) = torch.autograd.grad(loss, model.seen)
    np.testing.assert_allclose(by_block.values, expected, rtol=1e-9, atol=1e-12)
    trace = rl.trace(model, x, y, loss=MSE, layers=["block"])
    np.testing.assert_allclose(trace["block"].output.values, model.seen.detach(), rtol=1e-12)
    assert set(rl.trace(model, x, y, loss=MSE, layers=["block", "lstm"])) == {"block", "lstm"}


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(F, H, batch_first=True), nn.Linear(H, 2)
        self.start = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, x):
        return self.out(self.rnn(x, self.start.expand(1, len(x), H).contiguous())[0][:, -1])


def test_a_model_named_like_its_layer():
    (x, y), model = data(), RNN().double()
    weights, gradients = rl.weights(model, x, y, loss=MSE), rl.gradients(model, x, y, loss=MSE)
    assert set(weights) == set(gradients) == {"rnn_model", "rnn", "out"}
    (expected,) = by_autograd(model, x, y, [model.start])
    np.testing.assert_allclose(gradients["rnn_model"]["start"].values, expected, rtol=1e-9, atol=1e-12)
    assert gradients.certificate.state == "passed"


def test_a_function_for_one_weight_is_refused():
    with pytest.raises(rl.errors.InputError, match="one function for all weights"):
        rl.cells.register(Block, rl.cells.LSTM, weights={"kernel": lambda weights: weights["inner.weight"].T})


class Packs(nn.Module):
    """Layer that gets steps first, and packs them by a list or tensor of lengths."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(F, H), nn.Linear(H, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0])


def test_a_list_of_lengths_is_refused_where_samples_are_cut_and_the_hint_works():
    model, x, y = Packs(), torch.randn(8, 4, F), torch.randn(8, 4, 2)
    with pytest.raises(rl.errors.InputError, match="what is no array is passed on whole") as caught:
        rl.diagnose(model, (x, [8, 5, 7, 3]), y, loss=MSE)
    assert "as a tensor" in str(caught.value)
    assert rl.diagnose(model, (x, torch.tensor([8, 5, 7, 3])), y, loss=MSE).findings


def test_an_unknown_name_of_an_input_is_answered_by_one_that_can_be_typed():
    model, x, y = Packs(), torch.randn(8, 4, F), torch.randn(8, 4, 2)
    with pytest.raises(rl.errors.LayerNotFoundError, match=r"input\[0\]"):
        rl.gradients(model, (x, [8, 5, 7, 3]), y, loss=MSE, wrt="input[x]")
    assert rl.gradients(model, (x, [8, 5, 7, 3]), y, loss=MSE, wrt="input[0]").shape == (4, 8, F)


def test_only_the_table_is_offered_where_ids_cannot_be_differentiated():
    torch.manual_seed(0)
    model = Carrying().eval()
    ids = torch.arange(10).reshape(2, 5) % 7
    with pytest.raises(rl.errors.InputError) as error:
        rl.jacobian(model, ids)
    assert 'wrt="table.output"' in str(error.value)
    assert "heads" not in str(error.value)
    g = rl.gradients(model, ids, of="output", reduce="sum", wrt=["table/weight", "heads.0/weight"])
    assert g["table"]["weight"].attrs["touched_rows"] == 7
    assert "touched_rows" not in g["heads.0"]["weight"].attrs


def test_a_module_without_weights_has_a_name():
    torch.manual_seed(0)
    model = Carrying().eval()
    ids = torch.arange(10).reshape(2, 5) % 7
    g = rl.gradients(model, ids, of="output", reduce="sum", wrt="drop.output")
    slope = torch.where(model(ids) > 0, 1.0, 0.01).double()
    passing = (model.heads[0](model.rnn(model.table(ids))[0].double()) > 0) & (slope == 1)
    expected = passing.double() @ model.heads[0].weight
    torch.testing.assert_close(torch.tensor(g.values).double(), expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "verb",
    [
        rl.layers,
        rl.weights,
        lambda model: rl.trace(model, torch.zeros(2, 5, 3)),
        lambda model: adapter.facts(model).submodules,
    ],
)
def test_a_module_that_waits_for_its_first_batch_is_refused_and_left_waiting(verb):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.LazyLinear(2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model = Net()
    with pytest.raises(rl.errors.ModelError, match="'head' is not built"):
        verb(model)
    assert model.head.has_uninitialized_params()
    model(torch.zeros(2, 5, 3))
    verb(model)
