"""Loops that change a cell's state between steps are traced as one recurrence, with the gradients of autograd."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H = 3, 6, 4, 5


class Leaky(nn.Module):
    """A leaky cell h' = (1 - a) h + a tanh(W x + U h), where a in (0, 1) is a weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(F, H), nn.Linear(H, H, bias=False)
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, h):
        return (1 - self.rate) * h + self.rate * torch.tanh(self.inner(x) + self.recurrent(h))


class WithOutput(nn.Module):
    """A cell of two states that returns (output, states)."""

    def __init__(self):
        super().__init__()
        self.joint, self.out = nn.Linear(F + H, 2 * H), nn.Linear(H, H)

    def forward(self, x, state):
        h, c = state
        gate, new = self.joint(torch.cat([x, h], 1)).chunk(2, 1)
        c = torch.sigmoid(gate) * c + torch.tanh(new)
        h = torch.tanh(c)
        return self.out(h), (h, c)


def zoneout(model, t, old, new):
    return 0.2 * old + 0.8 * new


def random_zoneout(model, t, old, new):
    mask = torch.bernoulli(torch.full_like(new, 0.3), generator=torch.Generator().manual_seed(t))
    return mask * old + (1 - mask) * new


def decay(model, t, old, new):
    """Decay the state by the time since the last observation, as GRU-D does; no decay at step 2."""
    gamma = torch.exp(-torch.relu(model.decay * torch.tensor([0.5, 0.1, -1.0, 0.7, 0.3, 0.2])[t]))
    return new * gamma


def euler(model, t, old, new):
    """Advance the state by two Euler steps between two observations, as GRU-ODE does."""
    for _ in range(2):
        new = new + 0.1 * torch.tanh(model.field(new))
    return new


CHANGES = {f.__name__: f for f in (zoneout, random_zoneout, decay, euler)}
CELLS = {
    "gru": lambda: nn.GRUCell(F, H),
    "lstm": lambda: nn.LSTMCell(F, H),
    "rnn": lambda: nn.RNNCell(F, H),
    "leaky": Leaky,
    "with output": WithOutput,
}


class Loop(nn.Module):
    def __init__(self, kind, change):
        super().__init__()
        self.kind, self.change = kind, CHANGES[change]
        self.cell = CELLS[kind]()
        self.decay, self.field = nn.Parameter(torch.ones(H)), nn.Linear(H, H)
        self.head = nn.Linear(H, 2)

    def forward(self, x, record=None):
        two_states = self.kind in ("lstm", "with output")
        state = tuple(x.new_zeros(len(x), H) for _ in range(1 + two_states))
        outputs = []
        for t in range(x.shape[1]):
            returned = self.cell(x[:, t], state if two_states else state[0])
            output, new = returned if self.kind == "with output" else (None, returned)
            new = new if two_states else (new,)
            if record is not None:
                record.append([s.detach() for s in state])
                record.append(list(new))
                [s.retain_grad() for s in new]
            state = tuple(self.change(self, t, old, s) for old, s in zip(state, new, strict=True))
            outputs.append(state[0] if output is None else output)
        return self.head(outputs[-1] + outputs[1])


def make_case(kind, change):
    torch.manual_seed(0)
    model = Loop(kind, change).double()
    return model, torch.randn(B, T, F, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)


def autograd_states(model, x, y):
    """Return the states before and after each step, and the total gradients of the latter by retain_grad."""
    record = []
    nn.functional.mse_loss(model(x, record), y).backward()
    model.zero_grad()
    before, after = record[::2], record[1::2]

    def stack_steps(steps, tensor_of):
        return [torch.stack([tensor_of(s) for s in column], 1).numpy() for column in zip(*steps, strict=True)]

    def gradient(s):
        return torch.zeros_like(s) if s.grad is None else s.grad

    return stack_steps(before, lambda s: s), stack_steps(after, lambda s: s.detach()), stack_steps(after, gradient)


def assert_close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-12 * max(np.abs(expected).max(), 1e-3))


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", CELLS)
def test_one_recurrence_with_the_gradients_of_the_states_that_the_cell_returned(kind, change):
    model, x, y = make_case(kind, change)
    trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
    assert list(trace) == ["cell"]
    assert trace.certificate.state == "passed"
    before, after, grads = autograd_states(model, x, y)
    layer = trace["cell"]
    names = {"lstm": ("hidden", "cell"), "with output": ("hidden", "state_1")}.get(kind, ("hidden",))
    for name, b, a, g in zip(names, before, after, grads, strict=True):
        assert_close(layer[f"previous_{name}"], b)
        assert_close(layer[name], a)
        assert_close(layer[f"{name}_grad"], g)
    assert "output_grad" not in layer.dataset or kind == "with output"
    gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="cell.hidden")
    assert_close(gradients, grads[0])
    assert gradients.certificate.state == "passed"


def test_gates_are_those_of_the_state_that_the_cell_received():
    model, x, y = make_case("gru", "decay")
    layer = rl.trace(model, x, y, loss=nn.functional.mse_loss)["cell"]
    gates = (
        (x @ model.cell.weight_ih.T + model.cell.bias_ih).detach(),
        (torch.tensor(layer.previous_hidden.values) @ model.cell.weight_hh.T + model.cell.bias_hh).detach(),
    )
    reset, update, _ = (sum(gates)).chunk(3, -1)
    assert_close(layer.gates.sel(gate="update"), torch.sigmoid(update).numpy())
    assert_close(layer.gates.sel(gate="reset"), torch.sigmoid(reset).numpy())


@pytest.mark.parametrize("kind", ["gru", "lstm", "leaky"])
def test_jacobians_and_weights_include_the_changes(kind):
    model, x, y = make_case(kind, "euler")
    jacobian = rl.jacobian(model, x)
    expected = [torch.autograd.functional.jacobian(lambda s: model(s[None])[0], sample).numpy() for sample in x]
    assert_close(jacobian, np.stack(expected))
    assert jacobian.certificate.state == "passed"
    record = []
    model(x, record)
    first, last = record[1][0], record[-1][0]
    by_first = [torch.autograd.grad(last[:, u].sum(), first, retain_graph=True)[0] for u in range(H)]
    state_jacobian = rl.jacobian(model, x, of="cell.hidden", wrt="cell.hidden")
    assert state_jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    assert_close(state_jacobian[:, -1, :, 0], torch.stack(by_first, 1).numpy())
    nn.functional.mse_loss(model(x), y).backward()
    weights = rl.weights(model, x, y, loss=nn.functional.mse_loss)
    assert weights.certificate.state == "passed"
    is_leaky = kind == "leaky"
    layer, name = ("cell.inner", "weight_grad") if is_leaky else ("cell", "recurrent_kernel_grad")
    grad = model.cell.inner.weight.grad if is_leaky else model.cell.weight_hh.grad
    total = (weights[layer].dataset[name] ** 2).sum()
    assert_close(total, float((grad**2).sum()))


def test_the_users_initial_state_is_that_of_the_first_step_only():
    model, x, y = make_case("gru", "zoneout")
    start = np.random.default_rng(0).normal(size=(B, H))
    trace = rl.trace(model, x, y, loss=nn.functional.mse_loss, initial_state={"cell": [start]})
    before = trace["cell"].previous_hidden.values
    assert_close(before[:, 0], start)
    assert_close(before[:, 1], 0.8 * trace["cell"].hidden.values[:, 0])


class TwoLoops(nn.Module):
    """An encoder loop and a decoder loop over one cell, with a dense layer between them."""

    def __init__(self, change):
        super().__init__()
        self.cell, self.bridge, self.change = nn.GRUCell(F, H), nn.Linear(H, H), change

    def forward(self, x):
        h = x.new_zeros(len(x), H)
        for t in range(T):
            h = self.cell(x[:, t], h) * self.change
        h = torch.tanh(self.bridge(h))
        for t in range(2):
            h = self.cell(x[:, t], h) * self.change
        return h


@pytest.mark.parametrize("change", [1.0, 0.9])
def test_two_loops_with_one_cell_are_two_recurrences(change):
    model, x = TwoLoops(change).double(), torch.randn(B, T, F, dtype=torch.float64)
    trace = rl.trace(model, x, loss=lambda out: out.sum())
    assert list(trace) == ["cell#0", "cell#1"]
    assert [trace[name].hidden.sizes["time"] for name in trace] == [T, 2]
    assert trace.certificate.state == "passed"


def test_a_shrinking_batch_with_changed_states_is_not_joined():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F, H)

        def forward(self, x):
            h, last = x.new_zeros(len(x), H), []
            for t, count in enumerate((3, 3, 2)):
                h = self.cell(x[:count, t], h[:count] * 0.9)
                last.append(h)
            return torch.cat(last)

    trace = rl.trace(Shrinking().double(), torch.randn(B, T, F, dtype=torch.float64), loss=lambda out: out.sum())
    assert list(trace) == ["cell#0", "cell#1"]
    assert [trace[name].hidden.sizes["sample"] for name in trace] == [3, 2]
    assert any("not passed on unchanged" in note for note in trace.notes)


def test_a_cell_whose_states_a_module_mixes_is_one_recurrence():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(2 * H, H)

        def forward(self, new, old):
            gate = torch.sigmoid(self.gate(torch.cat([new, old], 1)))
            return gate * new + (1 - gate) * old

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.mixer = nn.GRUCell(F, H), Mixer()

        def forward(self, x):
            h = x.new_zeros(len(x), H)
            for t in range(T):
                h = self.mixer(self.cell(x[:, t], h), h)
            return h

    trace = rl.trace(Mixed().double(), torch.randn(B, T, F, dtype=torch.float64), loss=lambda out: out.sum())
    assert "cell" in trace
    assert trace["cell"].hidden.sizes["time"] == T
    assert trace.certificate.state == "passed"


@pytest.mark.parametrize("verb", [rl.fixed_points, rl.lyapunov, rl.step_eigenvalues])
def test_dynamics_of_the_cell_alone_are_refused(verb):
    model, x, _ = make_case("gru", "zoneout")
    with pytest.raises(rl.errors.UnsupportedError, match="changes the state between the steps"):
        verb(model, x)


@pytest.mark.parametrize("change", ["zoneout", "decay"])
def test_a_diagnosis_leaves_out_what_a_replay_does_not_know(change):
    model, _, _ = make_case("gru", change)
    torch.manual_seed(1)
    x, y = torch.randn(40, T, F, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    diagnosis = rl.diagnose(model, x, y, loss="mse")
    assert set(diagnosis) == {"model"}
    assert any("'cell' were not measured: the model's code changes the state" in note for note in diagnosis.notes)
    # By exchange of inputs between samples, the model itself answers, with all of each step.
    assert np.isfinite(diagnosis["model"]["use"]).all()
