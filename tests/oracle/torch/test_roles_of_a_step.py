"""Steps whose arguments and results come in any order, against autograd with retained gradients on the plain model."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

State = namedtuple("State", ["voltage", "trace"])
X = torch.tensor(np.random.default_rng(0).normal(size=(4, 6, 3)))


def mse(output, target):
    return nn.functional.mse_loss(output, target)


class Step(nn.Module):
    """A step of 3 features, 5 units and an output of 5; its ``forward`` is one of the functions below."""

    def __init__(self, inputs=3):
        super().__init__()
        self.update, self.read = nn.Linear(inputs + 5, 5), nn.Linear(3 + 5, 5)

    def new_state(self, h, *inputs):
        return torch.tanh(self.update(torch.cat([*inputs, h], 1)))

    def scores(self, x, h):
        return self.read(torch.cat([x, h], 1))


def steps_of(order):
    """Return a step's class and the function (cell, x, context, mask, h) -> (y, h) that calls it."""

    class StateFirst(Step):
        def forward(self, first, second):
            return self.new_state(first, second)

    class WithContext(Step):
        def forward(self, x, context, h):
            return self.new_state(h, x, context)

    class WithContextLast(Step):
        def forward(self, x, h, context):
            return self.new_state(h, x, context)

    class WithMask(Step):
        def forward(self, x, mask, h):
            return torch.where(mask, self.new_state(h, x), h)

    class StateThenOutput(Step):
        def forward(self, x, h):
            return self.new_state(h, x), self.scores(x, h)

    class TwoOutputs(Step):
        def forward(self, x, h):
            return self.scores(x, h), self.new_state(h, x), self.scores(x, h).sin()

    class ByIndex(Step):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 3)

        def forward(self, index, h):
            return self.new_state(h, self.embedding(index))

    return {
        "state first": (StateFirst(), lambda cell, x, c, m, h: (h, cell(h, x))),
        "context": (WithContext(8), lambda cell, x, c, m, h: (h, cell(x, c, h))),
        "context of the state": (WithContext(8), lambda cell, x, c, m, h: (h, cell(x, (c * h).cos(), h))),
        "context last": (WithContextLast(8), lambda cell, x, c, m, h: (h, cell(x, h, c))),
        "mask": (WithMask(), lambda cell, x, c, m, h: (h, cell(x, m, h))),
        "state, then output": (StateThenOutput(), lambda cell, x, c, m, h: cell(x, h)[::-1]),
        "two outputs": (TwoOutputs(), lambda cell, x, c, m, h: ((o := cell(x, h))[0] + o[2], o[1])),
        "index": (ByIndex(), lambda cell, x, c, m, h: (h, cell((x[:, 0] > 0).long(), h))),
    }[order]


class Loop(nn.Module):
    """A loop over a step, read through its outputs and its last state; it keeps the states of the last call."""

    def __init__(self, cell, call):
        super().__init__()
        self.cell, self.out, self.call, self.states = cell, nn.Linear(5, 2), call, []

    def forward(self, x):
        h, context, outputs, self.states = x.new_zeros(len(x), 5), x.mean(1) @ torch.ones(3, 5).double(), [], []
        for t in range(x.shape[1]):
            y, h = self.call(self.cell, x[:, t], context, x[:, t, :1] > 0, h)
            h = h if h.requires_grad else h.detach().requires_grad_()
            h.retain_grad()
            self.states.append(h)
            outputs.append(y)
        return self.out(h + torch.stack(outputs).mean(0))


ORDERS = (
    "state first",
    "context",
    "context of the state",
    "context last",
    "mask",
    "state, then output",
    "two outputs",
    "index",
)


def loop_of(order):
    torch.manual_seed(0)
    return Loop(*steps_of(order)).double()


@pytest.mark.parametrize("order", ORDERS)
def test_state_and_its_gradient_are_those_that_the_next_call_receives(order):
    model, y = loop_of(order), torch.zeros(4, 2).double()
    mse(model(X), y).backward()
    states, grads = ([getattr(h, kind) for h in model.states] for kind in ("data", "grad"))
    model.zero_grad()

    trace = rl.trace(model, X, y, loss=mse)

    assert list(trace) == ["cell"]
    np.testing.assert_allclose(trace["cell"].hidden.values, torch.stack(states, 1).numpy(), atol=1e-12)
    np.testing.assert_allclose(trace["cell"].hidden_grad.values, torch.stack(grads, 1).numpy(), atol=1e-12)
    assert trace.certificate.state == "passed"


@pytest.mark.parametrize("order", ORDERS)
def test_jacobian_of_the_state_is_that_of_autograd(order):
    model = loop_of(order)
    model(X)
    last, first = model.states[4], model.states[2]
    rows = [torch.autograd.grad(last[:, i].sum(), first, retain_graph=True)[0] for i in range(5)]

    jacobian = rl.jacobian(model, X, of="cell.hidden", wrt="cell.hidden")

    block = jacobian.isel(out_time=4, in_time=2) if "out_time" in jacobian.dims else jacobian
    np.testing.assert_allclose(block.values, torch.stack(rows, 1).numpy(), atol=1e-12)
    assert jacobian.certificate.state != "failed"


def test_arguments_that_are_no_state_are_the_input_in_their_order():
    trace = rl.trace(loop_of("context"), X)

    context = X.mean(1) @ torch.ones(3, 5).double()
    np.testing.assert_array_equal(trace["cell"].input.values[:, 2], torch.cat([X[:, 2], context], 1).numpy())
    assert any("(3,), (5,)" in note for note in trace.notes)


class NamedCell(nn.Module):
    """A spiking unit whose state is a named tuple of a voltage and a trace."""

    def __init__(self):
        super().__init__()
        self.update = nn.Linear(3, 5)

    def forward(self, x, state):
        voltage = 0.9 * state.voltage + self.update(x)
        return torch.sigmoid(voltage), State(voltage, 0.5 * state.trace + torch.tanh(voltage))


class NamedLoop(nn.Module):
    """A loop over a named state that begins with numbers without axes and grows."""

    def __init__(self):
        super().__init__()
        self.cell = NamedCell()

    def forward(self, x):
        state, self.states = State(torch.zeros(()).double(), torch.zeros(()).double()), []
        for t in range(x.shape[1]):
            y, state = self.cell(x[:, t], state)
            state.voltage.retain_grad()
            self.states.append(state.voltage)
        return y + state.trace


def test_fields_of_a_named_tuple_are_states_that_grow_from_numbers():
    torch.manual_seed(0)
    model, y = NamedLoop().double(), torch.zeros(4, 5).double()
    mse(model(X), y).backward()
    states, grads = ([getattr(h, kind) for h in model.states] for kind in ("data", "grad"))

    trace = rl.trace(model, X, y, loss=mse)

    np.testing.assert_allclose(trace["cell"].voltage.values, torch.stack(states, 1).numpy(), atol=1e-12)
    np.testing.assert_allclose(trace["cell"].voltage_grad.values, torch.stack(grads, 1).numpy(), atol=1e-12)
    assert trace.certificate.state == "passed"


class ByForward(Loop):
    """The loop above, which calls the step's ``forward`` itself."""

    def __init__(self):
        super().__init__(nn.GRUCell(3, 5), None)
        self.cell = steps_of("context")[0]
        self.call = lambda cell, x, c, m, h: (h, cell.forward(x, c, h))


class ByMethod(nn.Module):
    """A layer that runs its own loop over its method ``recurrence``."""

    def __init__(self):
        super().__init__()
        self.update = nn.Linear(3 + 5, 5)

    def recurrence(self, x, h):
        return torch.tanh(self.update(torch.cat([x, h], 1)))

    def forward(self, x, hidden=None):
        h, self.states = x.new_zeros(len(x), 5) if hidden is None else hidden, []
        for t in range(x.shape[1]):
            h = self.recurrence(x[:, t], h)
            h.retain_grad()
            self.states.append(h)
        return h


class FromNothing(ByMethod):
    """The layer above, whose step is called without a state at first, and then starts from a buffer of zeros."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(5))

    def recurrence(self, x, h=None):
        return super().recurrence(x, self.first.expand(len(x), -1) if h is None else h)

    def forward(self, x):
        h, self.states = None, []
        for t in range(x.shape[1]):
            h = self.recurrence(x[:, t], h)
            h.retain_grad()
            self.states.append(h)
        return h


class WithMethods(ByMethod):
    """The layer above, which makes the first state by a method of the form of a step, and keeps the state in itself."""

    def first_state(self, x, h):
        return torch.zeros(len(x), 5, dtype=x.dtype) if h is None else h

    def forward(self, x):
        self.h, self.states = None, []
        for t in range(x.shape[1]):
            self.h = self.recurrence(x[:, t], self.first_state(x[:, t], self.h))
            self.h.retain_grad()
            self.states.append(self.h)
        h, self.h = self.h, None
        return h


class Around(nn.Module):
    """A model around the layer above."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = ByMethod(), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.rnn(x))


@pytest.mark.parametrize(
    ("make", "layer", "keeper"),
    [
        (ByForward, "cell", lambda model: model),
        (Around, "rnn", lambda model: model.rnn),
        (ByMethod, "bymethod", lambda model: model),
        (FromNothing, "fromnothing", lambda model: model),
        (WithMethods, "withmethods", lambda model: model),
    ],
)
def test_steps_called_by_forward_or_by_another_method_are_recorded(make, layer, keeper):
    torch.manual_seed(0)
    model = make().double()
    y = torch.zeros_like(model(X)).detach()
    mse(model(X), y).backward()
    states, grads = ([getattr(h, kind) for h in keeper(model).states] for kind in ("data", "grad"))
    (own,) = (w.grad.numpy() for name, w in model.named_parameters() if name.endswith("update.bias"))
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    model.zero_grad()

    trace = rl.trace(model, X, y, loss=mse)

    assert list(trace) == [layer]
    np.testing.assert_allclose(trace[layer].hidden.values, torch.stack(states, 1).numpy(), atol=1e-12)
    np.testing.assert_allclose(trace[layer].hidden_grad.values, torch.stack(grads, 1).numpy(), atol=1e-12)
    assert trace.certificate.state == "passed"
    assert rl.layers(model, X).names == (layer,)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    found = rl.gradients(model, X, y, loss=mse, wrt="weights")
    arrays = [array.values for part in found.values() for array in part.values()]
    assert any(array.shape == own.shape and np.allclose(array, own, atol=1e-12) for array in arrays)


def test_an_error_says_of_each_module_why_it_is_no_recurrence():
    class Block(nn.Module):
        def forward(self, x, h):
            return x + h

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.once, self.rnn = Block(), Block(), nn.GRU(3, 5)

        def forward(self, x):
            return self.once(x[:, 0], x[:, 1])

    with pytest.raises(rl.errors.ModelError) as caught:
        rl.trace(Model().double(), X)
    text = str(caught.value)
    assert "spare was not called" in text
    assert "once was called once" in text
    assert "rnn was not called" in text


def test_a_declared_state_is_that_of_a_cell_that_is_called_once():
    torch.manual_seed(0)
    model, y, x = Loop(*steps_of("context")).double(), torch.zeros(4, 2).double(), X[:, :1]
    mse(model(x), y).backward()
    state, grad = model.states[0].detach().numpy(), model.states[0].grad.numpy()

    with rl.torch.cell(model.cell, state="h"):
        trace = rl.trace(model, x, y, loss=mse)

    np.testing.assert_allclose(trace["cell"].hidden.values[:, 0], state, atol=1e-12)
    np.testing.assert_allclose(trace["cell"].hidden_grad.values[:, 0], grad, atol=1e-12)
    assert trace["cell"].input.shape == (4, 1, 8)
    assert trace.certificate.state == "passed"


def test_a_wrong_name_of_a_state_and_a_called_declaration_are_refused():
    cell = steps_of("context")[0]
    with pytest.raises(rl.errors.InputError, match="among the arguments x, context, h"):
        rl.torch.cell(cell, state="hidden")
    with rl.torch.cell(cell) as declared, pytest.raises(rl.errors.InputError, match="does not return one"):
        declared(X[:, 0])


class PairCell(nn.Module):
    """A step of two states, which it takes as a pair or stacked, and returns as a pair."""

    def __init__(self):
        super().__init__()
        self.update = nn.Linear(3 + 5, 5)

    def forward(self, x, states):
        h, c = states
        c = 0.5 * c + torch.tanh(self.update(torch.cat([x, h], 1)))
        return torch.sin(c) + 0.3 * h, c


class FromStacked(nn.Module):
    """A loop over the step above whose first states are one tensor; it counts steps first."""

    def __init__(self):
        super().__init__()
        self.cell = PairCell()

    def forward(self, x):
        states, self.states, outputs = torch.full((2, x.shape[1], 5), 0.3).to(x), [], []
        for current in x:
            states = self.cell(current, states)
            states[0].retain_grad()
            self.states.append(states[0])
            outputs.append(states[0])
        return torch.stack(outputs)


def test_first_states_in_one_tensor_are_the_states():
    torch.manual_seed(0)
    model, x = FromStacked().double(), X.transpose(0, 1).contiguous()
    y = torch.zeros(6, 4, 5).double()
    mse(model(x), y).backward()
    states, grads = ([getattr(h, kind) for h in model.states] for kind in ("data", "grad"))
    model.zero_grad()

    trace = rl.trace(model, x, y, loss=mse)

    assert list(trace) == ["cell"]
    np.testing.assert_allclose(trace["cell"].hidden.values, torch.stack(states, 1).numpy(), atol=1e-12)
    np.testing.assert_allclose(trace["cell"].hidden_grad.values, torch.stack(grads, 1).numpy(), atol=1e-12)
    assert trace.certificate.state == "passed"


class EqualCell(nn.Module):
    """A step of two states that are equal after the first step from zeros."""

    def __init__(self):
        super().__init__()
        self.update = nn.Linear(3, 5)

    def forward(self, x, current, potential):
        current = 0.8 * current + self.update(x)
        potential = 0.9 * potential + current
        return torch.sigmoid(potential), current, potential


class EqualLoop(nn.Module):
    """A loop over the step above that keeps the potentials of the last call."""

    def __init__(self):
        super().__init__()
        self.cell = EqualCell()

    def forward(self, x):
        current, potential, outputs, self.states = x.new_zeros(len(x), 5), x.new_zeros(len(x), 5), [], []
        for t in range(x.shape[1]):
            output, current, potential = self.cell(x[:, t], current, potential)
            potential.retain_grad()
            self.states.append(potential)
            outputs.append(output)
        return torch.stack(outputs, 1)


def test_states_that_are_equal_after_the_first_step_are_told_apart():
    torch.manual_seed(0)
    model, y = EqualLoop().double(), torch.zeros(4, 6, 5).double()
    mse(model(X), y).backward()
    states, grads = ([getattr(h, kind) for h in model.states] for kind in ("data", "grad"))
    model.zero_grad()

    trace = rl.trace(model, X, y, loss=mse)

    np.testing.assert_allclose(trace["cell"].state_1.values, torch.stack(states, 1).numpy(), atol=1e-12)
    np.testing.assert_allclose(trace["cell"].state_1_grad.values, torch.stack(grads, 1).numpy(), atol=1e-12)
    assert trace["cell"].input.shape == (4, 6, 3)
    assert trace.certificate.state == "passed"


class Spiking(nn.Module):
    """A loop over steps first whose cell replaces an empty first state; ``start`` is that state's value."""

    def __init__(self, start=0.0):
        super().__init__()
        self.read_in, self.decay, self.start = nn.Linear(3, 4), nn.Parameter(torch.tensor(0.9)), start
        self.cell = self.Cell(self)

    class Cell(nn.Module):
        def __init__(self, owner):
            super().__init__()
            self.decay, self.start = owner.decay, owner.start

        def forward(self, current, potential):
            if potential.shape != current.shape:
                potential = torch.full_like(current, self.start)
            potential = self.decay * potential + current
            return torch.tanh(potential - 0.5), potential

    def forward(self, x):
        potential, spikes = torch.zeros(0), []
        for current in self.read_in(x):
            spike, potential = self.cell(current, potential)
            spikes.append(spike)
        return torch.stack(spikes)


STEPS_FIRST = {"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")}


def test_an_empty_first_state_stands_for_zeros():
    model, x = Spiking().double(), X.transpose(0, 1).contiguous()
    jacobian = rl.jacobian(model, x, axes=STEPS_FIRST)
    truth = torch.autograd.functional.jacobian(model, x).numpy()
    expected = np.stack([truth[:, i, :, :, i] for i in range(X.shape[0])])
    np.testing.assert_allclose(jacobian.values, expected, rtol=1e-12, atol=1e-14)
    trace = rl.trace(model, x, torch.zeros(6, 4, 4).double(), loss=mse, axes=STEPS_FIRST)
    assert (trace.certificate.state, trace["cell"].hidden.shape) == ("passed", (4, 6, 4))


def test_an_empty_first_state_that_stands_for_something_else_is_refused():
    model, x = Spiking(start=0.7).double(), X.transpose(0, 1).contiguous()
    with pytest.raises(rl.errors.ModelError, match="cell: its first state is empty, and does not stand for zeros"):
        rl.trace(model, x, axes=STEPS_FIRST)


class MakesItsState(nn.Module):
    """A rate unit that makes its first state, a named tuple or one tensor, at a call without one."""

    def __init__(self, is_named):
        super().__init__()
        self.update, self.is_named = nn.Linear(3 + 5, 5), is_named

    def forward(self, x, state=None):
        if state is None:
            state = x.new_zeros(len(x), 5)
            state = State(state, state) if self.is_named else state
        if not self.is_named:
            return torch.tanh(self.update(torch.cat([x, state], 1)))
        voltage = 0.9 * state.voltage + self.update(torch.cat([x, state.trace], 1))
        return torch.sigmoid(voltage), State(voltage, 0.5 * state.trace + torch.tanh(voltage))


class Stack(nn.Module):
    """Layers and cells in a row, called once per step with the states of all cells, or with None at the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.second = MakesItsState(False), nn.Linear(5, 3), MakesItsState(True)

    def forward(self, x, state=None):
        before = (None, None) if state is None else state
        hidden = self.first(x, before[0])
        output, after = self.second(self.mix(hidden), before[1])
        return output, (hidden, after)


class LoopOfAStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = Stack()

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            output, state = self.stack(step, state)
            outputs.append(output)
        return torch.stack(outputs, 1)


def test_cells_within_a_step_that_starts_without_states_have_the_gradients_of_all_steps():
    torch.manual_seed(0)
    model, y = LoopOfAStack().double(), torch.randn(4, X.shape[1], 5).double()
    x = X.clone().requires_grad_()
    mse(model(x), y).backward()
    expected = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    model.zero_grad()
    weights = rl.weights(model, X, y, loss=mse)
    assert weights.certificate.state == "passed"
    gradients = rl.gradients(model, X, y, loss=mse)
    assert gradients.certificate.state == "passed"
    for layer in ("stack.first.update", "stack.mix", "stack.second.update"):
        for name in ("weight", "bias"):
            np.testing.assert_allclose(weights[layer][f"{name}_grad"].values, expected[f"{layer}.{name}"], atol=1e-13)
    by_input = rl.gradients(model, X, y, loss=mse, wrt="input")
    np.testing.assert_allclose(by_input.values, x.grad.numpy(), atol=1e-13)
    trace = rl.trace(model, X, y, loss=mse)
    assert trace.certificate.state == "passed"


class StepOfTwoMethods(nn.Module):
    """A loop over a method that computes the next state by another method of the same arguments."""

    def __init__(self):
        super().__init__()
        self.update, self.turn, self.states = nn.Linear(3, 5), nn.Linear(5, 5), []

    def next_state(self, x, h):
        return torch.tanh(self.update(x) + self.turn(h))

    def step(self, x, h):
        return self.next_state(x, h)

    def forward(self, x):
        h, self.states = x.new_zeros(len(x), 5), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            self.states.append(h)
        return torch.stack(self.states, 1)


def test_a_method_within_a_step_is_no_recurrence_of_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(StepOfTwoMethods()).double()
    trace = rl.trace(model, X, X.new_ones(4, 6, 5), loss=mse)
    grads = torch.autograd.grad(mse(model(X), X.new_ones(4, 6, 5)), model[0].states)
    np.testing.assert_allclose(trace["0"].hidden_grad.values, torch.stack(grads, 1).numpy(), atol=1e-13)
    assert trace.certificate.state == "passed"
    assert trace.notes == []


def test_a_first_trace_describes_a_cell_that_only_the_run_shows():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, u, z):
            return torch.tanh(self.first(u) + self.second(z))

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            z = torch.zeros(len(x), 4)
            for step in x.unbind(1):
                z = self.cell(step, z)
            return z

    model, x = Loop(), torch.randn(5, 6, 3)
    first, second = (rl.trace(model, x).dataset("cell").attrs for _ in range(2))
    assert first == second
    assert (first["cell"], first["direction"]) == ("custom", "forward")
