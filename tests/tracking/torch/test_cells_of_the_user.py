"""Cells of the user's own, called once per step by the training script, are one layer over time in batch mode.

References are float64 gradients of ``torch.autograd`` on a copy of the model with the weights before the step.
"""

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch_trainings import same_weights

import rnnlens as rl
from rnnlens.errors import TrackingWarning, UnsupportedError

B, T, F, H = 4, 6, 3, 5


class Plain(nn.Module):
    """(x, h) -> h."""

    def __init__(self):
        super().__init__()
        self.read, self.turn = nn.Linear(F, H), nn.Linear(H, H)

    def start(self):
        return torch.zeros(B, H)

    def forward(self, x, h):
        return torch.tanh(self.read(x) + self.turn(h))

    def step(self, x, h):
        h = self(x, h)
        return h, h


class WithWeights(Plain):
    """Weights of its own, without submodules, and the state first."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(F, H) / 2), nn.Parameter(torch.randn(H, H) / 3)

    def forward(self, h, x):
        return torch.tanh(x @ self.w + h @ self.u)

    def step(self, x, h):
        h = self(h, x)
        return h, h


class SeveralInputs(Plain):
    """(x, gain, h) -> (y, h), with a number and a second tensor among the inputs."""

    def forward(self, x, gain, h, *, scale):
        h = torch.tanh(self.read(x) * gain + self.turn(h))
        return h.square() * scale, h

    def step(self, x, h):
        return self(x, x.exp()[:, :1], h, scale=0.5)


class TwoStates(Plain):
    """(x, (h, c)) -> h, (h, c), whose first call gets no state."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(F + H, 3 * H)

    def start(self):
        return None

    def forward(self, x, state=None):
        h, c = (x.new_zeros(len(x), H), x.new_zeros(len(x), H)) if state is None else state
        i, o, g = self.gates(torch.cat([x, h], 1)).chunk(3, 1)
        c = 0.8 * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)

    def step(self, x, state):
        return self(x, state)


class Membrane(NamedTuple):
    voltage: torch.Tensor
    current: torch.Tensor


class NamedStates(Plain):
    """A named tuple of states, and a spike-like output of another size."""

    def start(self):
        return Membrane(torch.zeros(B, H), torch.zeros(B, H))

    def forward(self, x, state):
        current = 0.7 * state.current + self.read(x)
        voltage = 0.9 * state.voltage + current - self.turn(torch.sigmoid(state.voltage))
        return torch.sigmoid(voltage), Membrane(voltage, current)

    def step(self, x, state):
        return self(x, state)


class Noisy(Plain):
    """A rate unit that draws noise at every step."""

    def forward(self, x, h):
        h = super().forward(x, h)
        return h + 0.1 * torch.randn_like(h)


class Raising(Plain):
    """A cell that raises at its third call once; the script calls it again."""

    count = 0

    def forward(self, x, h):
        self.count += 1
        if self.count == 3:
            raise ValueError("not yet")
        return super().forward(x, h)

    def step(self, x, h):
        try:
            return super().step(x, h)
        except ValueError:
            return super().step(x, h)


class Network(nn.Module):
    """A cell and a head, with a module of two arguments that is no cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.mix, self.head = cell, nn.Bilinear(H, H, H), nn.Linear(H, 1)


CELLS = (Plain, WithWeights, SeveralInputs, TwoStates, NamedStates, Noisy, Raising)


def make(cell):
    torch.manual_seed(0)
    network = Network(cell()).double()
    return network, torch.randn(3, B, T, F, dtype=torch.float64)


def readout(network, outputs):
    return sum(network.head(network.mix(y, y)).square().mean() for y in outputs)


def unroll(network, x):
    """Call the cell once per step; return outputs and first states of all steps."""
    cell = network.cell
    state = cell.start()
    state = state if state is None else torch.utils._pytree.tree_map(lambda t: t.to(x), state)
    outputs, states = [], []
    for t in range(T):
        y, state = cell.step(x[:, t], state)
        outputs.append(y)
        states.append(torch.utils._pytree.tree_leaves(state)[0])
    return outputs, states


def train(network, batches, watch=None):
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1)
    before = rng_states = None

    def run():
        nonlocal before, rng_states
        for x in batches:
            before, rng_states = copy.deepcopy(network), torch.get_rng_state()
            optimizer.zero_grad()
            readout(network, unroll(network, x)[0]).backward()
            optimizer.step()

    if watch is None:
        run()
    else:
        with watch:
            run()
    return before, rng_states, torch.get_rng_state()


@pytest.mark.parametrize("cell", CELLS)
def test_direct_and_total_gradients_are_those_of_autograd_and_the_training_is_not_changed(cell, tmp_path):
    network, batches = make(cell)
    unwatched = copy.deepcopy(network)
    *_, expected_rng = train(unwatched, batches)
    watch = rl.torch.watch(network, tmp_path / "run.zarr", every=1)
    before, rng, actual_rng = train(network, batches, watch)
    assert same_weights(network, unwatched)
    assert torch.equal(actual_rng, expected_rng)

    batch = watch.latest
    assert batch.layers == ["cell"]
    torch.set_rng_state(rng)
    outputs, states = unroll(before, batches[-1])
    leaves = [y.detach().requires_grad_() for y in outputs]
    direct = torch.stack(torch.autograd.grad(readout(before, leaves), leaves), 1)
    np.testing.assert_allclose(batch.direct["cell"].output.values, torch.stack(outputs, 1).detach(), atol=1e-15)
    np.testing.assert_allclose(batch.direct["cell"].output_grad.values, direct, rtol=0, atol=1e-12)
    if cell is Noisy:
        with pytest.raises(UnsupportedError, match="gives other numbers than the training step"):
            _ = batch.trace
        return
    total = torch.stack(torch.autograd.grad(readout(before, outputs), states), 1)
    assert float(abs(total).max()) > 1e-3
    state = next(name for name in ("state_0", "voltage", "hidden") if name in batch.trace["cell"].dataset)
    np.testing.assert_allclose(batch.trace["cell"].dataset[f"{state}_grad"].values, total, rtol=0, atol=1e-12)
    assert all(check.ok for check in batch.trace.checks)


def test_weights_of_a_cell_have_the_gradients_of_the_step():
    network, batches = make(Plain)
    watch = rl.torch.watch(network, every=1)
    before, *_ = train(network, batches, watch)
    readout(before, unroll(before, batches[-1])[0]).backward()
    weights = watch.latest.weights
    np.testing.assert_array_equal(weights["cell.turn"].weight.values, before.cell.turn.weight.detach())
    for kind in ("grad", "grad_accumulated", "grad_applied"):
        np.testing.assert_allclose(
            weights["cell.turn"].dataset[f"weight_{kind}"].values, before.cell.turn.weight.grad, atol=1e-14
        )
    assert watch.latest.norms()["cell.turn/weight_grad_norm/weight"] == pytest.approx(
        float(before.cell.turn.weight.grad.norm())
    )


def test_an_output_that_is_fed_back_is_an_input():
    network, _ = make(SeveralInputs)
    network.cell.read = nn.Linear(H, H).double()

    def unroll_on_itself(network):
        y = h = torch.zeros(B, H, dtype=torch.float64)
        outputs, states = [], []
        for _ in range(T):
            y, h = network.cell(y + 0, torch.ones(B, 1, dtype=torch.float64), h, scale=1.0)
            outputs.append(y)
            states.append(h)
        return outputs, states

    before = copy.deepcopy(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with rl.torch.watch(network, every=1) as watch:
        readout(network, unroll_on_itself(network)[0]).backward()
        optimizer.step()
    outputs, states = unroll_on_itself(before)
    loss = readout(before, outputs)
    by_output = torch.stack(torch.autograd.grad(loss, outputs, retain_graph=True), 1)
    by_state = torch.stack(torch.autograd.grad(loss, states), 1)
    np.testing.assert_allclose(watch.latest["cell"].output_grad.values, by_output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(watch.latest["cell"].hidden_grad.values, by_state, rtol=0, atol=1e-12)


def test_the_cell_inside_is_recorded_and_not_the_module_around_it():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Plain(), nn.Linear(H, 1)

        def forward(self, x, h):
            h = self.cell(x, h)
            return self.head(h), h

    model = Around()
    with rl.torch.watch(model, every=1) as watch:
        h, loss = torch.zeros(B, H), 0
        for _ in range(T):
            y, h = model(torch.randn(B, F), h)
            loss = loss + y.square().mean()
        loss.backward()
        watch.step()
    assert watch.latest.layers == ["cell"]
    assert not any(name.startswith("head") for name in watch.latest.norms())


def test_a_detached_state_begins_a_loop_of_its_own():
    cell = Plain()
    with rl.torch.watch(cell, every=1) as watch:
        h, loss = torch.zeros(B, H), 0
        for t in range(T):
            h = cell(torch.randn(B, F), h.detach() if t == T // 2 else h)
            loss = loss + h.square().mean()
        loss.backward()
        watch.step()
    assert watch.latest.layers == ["plain#0", "plain#1"]
    assert any("2 recurrences of 3 to 3 steps" in note for note in watch.latest.notes)


class Summed(Plain):
    def forward(self, x, h):
        return super().forward(x, h) + h


@pytest.mark.parametrize("make_cell", [Summed, lambda: nn.GRUCell(F, H)])
def test_a_state_changed_in_place_begins_a_loop_of_its_own(make_cell):
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": make_cell()})
    with rl.torch.watch(model, every=1) as watch:
        h, loss = torch.zeros(B, H), 0
        for t in range(T):
            h = model["cell"](torch.randn(B, F), h)
            loss = loss + (h * 2).sum()
            if t == T // 2:
                h.mul_(torch.rand(B, 1))
        loss.backward()
        watch.step()
    assert watch.latest.layers == ["cell#0", "cell#1"]
    np.testing.assert_allclose(watch.latest.direct["cell#0"].output_grad.values[:, :-1], 2, atol=1e-5)
    np.testing.assert_allclose(watch.latest.direct["cell#1"].output_grad.values, 2, atol=1e-5)


def test_a_module_that_never_gets_its_state_back_is_missed_with_a_reason():
    cell = Plain()
    watch = rl.torch.watch(cell, every=1)
    watch.__enter__()
    cell(torch.randn(B, F), torch.zeros(B, H)).square().mean().backward()
    watch.step()
    with pytest.warns(TrackingWarning, match="no call of plain in training mode got, as its state"):
        watch.close()
    assert watch.latest is None


def test_a_state_that_is_passed_on_as_a_view_is_missed_with_a_reason():
    """Agents of one batch share a cell: their states are reshaped before each step, and not changed."""
    model = nn.ModuleDict({"cell": nn.GRUCell(F, H)})
    watch = rl.torch.watch(model, every=1)
    watch.__enter__()
    h = torch.zeros(2, B // 2, H)
    for _ in range(T):
        h = model["cell"](torch.randn(B, F), h.reshape(-1, H))
    h.square().mean().backward()
    watch.step()
    with pytest.warns(
        TrackingWarning, match=r"cell: its state is changed .* \(a view or copy of it is another tensor\)"
    ):
        watch.close()
    assert not watch.latest.layers


def test_a_cell_in_evaluation_mode_is_missed_for_that_reason():
    cell = Plain().eval()
    watch = rl.torch.watch(cell, every=1)
    watch.__enter__()
    h = torch.zeros(B, H)
    for _ in range(T):
        h = cell(torch.randn(B, F), h)
    h.square().mean().backward()
    watch.step()
    with pytest.warns(TrackingWarning, match=r"the model was in evaluation mode, as in a validation: model\.train\(\)"):
        watch.close()
    assert watch.latest is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_cell_is_left_to_a_probe():
    """A module in TorchScript takes no hooks; the layer beside it is recorded."""
    scripted = torch.jit.script(Plain())
    model = nn.ModuleDict({"cell": scripted, "gru": nn.GRU(H, H, batch_first=True)})
    with rl.torch.watch(model, every=1) as watch:
        h, states = torch.zeros(B, H), []
        for _ in range(T):
            h = model["cell"](torch.randn(B, F), h)
            states.append(h)
        model["gru"](torch.stack(states, 1))[0].square().mean().backward()
        watch.step()
    assert watch.latest.layers == ["gru"]
    with pytest.raises(UnsupportedError, match="a probe records every layer"), rl.torch.watch(scripted, every=1):
        pass


@pytest.mark.parametrize("make_layer", [Plain, lambda: nn.GRUCell(F, H)])
def test_a_gradient_that_is_kept_whole_is_recorded(make_layer, tmp_path):
    model = nn.ModuleDict({"cell": make_layer()})
    with rl.torch.watch(model, tmp_path / "run.zarr", every=1, keep=["hidden_grad"]) as watch:
        h, loss = torch.zeros(B, H), 0
        for _ in range(T):
            h = model["cell"](torch.randn(B, F), h)
            loss = loss + h.square().mean()
        loss.backward()
        watch.step()
    assert not watch.gaps
    kept = rl.open(tmp_path / "run.zarr")["cell"].hidden_grad
    np.testing.assert_allclose(
        kept.values[0], watch.latest["cell"].hidden_grad.values, atol=1e-2 * float(abs(kept).max())
    )
