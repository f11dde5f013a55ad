"""Cells called in a Python loop, against torch's autodiff with a zero added to every state of the same loop."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

B, T, F, H = 3, 5, 2, 4
KINDS = {
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
    "tanh": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}),
}
LENGTHS = torch.tensor([5, 3, 1])
MASK = torch.arange(T)[None, :] < LENGTHS[:, None]


class MinimalGated(nn.Module):
    """The minimal gated unit of Zhou et al. 2016, arXiv:1603.09420, eqs. 7-9."""

    def __init__(self, inputs, units):
        super().__init__()
        self.hidden_size = units
        self.gate, self.candidate = nn.Linear(inputs + units, units), nn.Linear(inputs + units, units)

    def forward(self, x, h):
        f = torch.sigmoid(self.gate(torch.cat([x, h], 1)))
        return (1 - f) * h + f * torch.tanh(self.candidate(torch.cat([x, f * h], 1)))


class NotingCell(nn.Module):
    """A cell that replaces each new state by ``note(index, state)`` before it uses the state."""

    note = staticmethod(lambda index, value: value)


class Nested(NotingCell):
    """A cell with a nested state: (input, {"fast": h, "slow": (c,)}) to (output, state)."""

    def __init__(self, inputs, units):
        super().__init__()
        self.mix, self.out = nn.Linear(inputs + units, units), nn.Linear(units + 2, 3)

    def forward(self, x, state):
        h, (c,) = state["fast"], state["slow"]
        h = self.note(0, torch.tanh(self.mix(torch.cat([x, h], 1))))
        c = self.note(1, 0.9 * c + 0.1 * h[:, :2])
        return self.out(torch.cat([h, c], 1)), {"fast": h, "slow": (c,)}


class Spread(NotingCell):
    """A cell that takes its states as separate arguments: (x, h, c) to (h, c)."""

    def __init__(self, inputs, units):
        super().__init__()
        self.cell = MinimalGated(inputs, units)
        self.slow = nn.Linear(units, units)

    def forward(self, x, h, c):
        c = self.note(1, torch.sigmoid(self.slow(h)) * c + x.mean(1, keepdim=True))
        return self.note(0, torch.tanh(self.cell.gate(torch.cat([x, h], 1)) + c)), c


def initial_state(kind):
    zeros = torch.zeros(B, H, dtype=torch.float64)
    return {
        "lstm": (zeros, zeros),
        "nested": {"fast": zeros, "slow": (zeros[:, :2],)},
        "spread": (zeros, zeros),
    }.get(kind, zeros)


def build_cell(kind):
    torch.manual_seed(0)
    if kind in KINDS:
        factory, options = KINDS[kind]
        return factory(F, H, **options).double()
    return {"minimal": MinimalGated, "nested": Nested, "spread": Spread}[kind](F, H).double()


def step(cell, kind, x, state):
    """Return the output and the next state of any of the cells."""
    if kind == "nested":
        return cell(x, state)
    state = cell(x, *state) if kind == "spread" else cell(x, state)
    return (state[0] if isinstance(state, tuple) else state), state


def map_states(function, *states):
    """Apply a function to matching tensors of nested states."""
    first = states[0]
    if isinstance(first, dict):
        return {key: map_states(function, *(s[key] for s in states)) for key in first}
    if isinstance(first, tuple | list):
        return tuple(map_states(function, *tensors) for tensors in zip(*states, strict=True))
    return function(*states)


class Loop(nn.Module):
    """One cell in a loop; ``style`` is the way in which the state is passed to the next step.

    ``taps``: a list to which the zeros added to the state at each step are appended, for the reference.
    """

    def __init__(self, kind, style):
        super().__init__()
        self.kind, self.style = kind, style
        self.cell = build_cell(kind)

    def forward(self, x, taps=None):
        state, outputs = initial_state(self.kind), []
        for t in range(x.shape[1]):
            if self.style == "early" and t == 3:
                break
            rows = slice(0, int((t < LENGTHS).sum())) if self.style == "shrink" else slice(None)
            previous = map_states(lambda s: s[rows], state)  # noqa: B023
            if self.style == "index":
                previous = map_states(lambda s: torch.stack([s, s])[1].clone(), state)
            if self.style == "detach" and t == 2:
                previous = map_states(lambda s: s.detach(), state)
            if self.style == "scaled" and t:
                previous = map_states(lambda s: 0.5 * s, state)
            if self.style == "weaker" and t:  # the same values exactly, half of the gradient
                previous = map_states(lambda s: s.detach() + 0.5 * (s - s.detach()), state)
            is_noting = taps is not None and isinstance(self.cell, NotingCell)
            if is_noting:
                taps.append(note_into(self.cell))
            output, new = step(self.cell, self.kind, x[rows, t], previous)
            if taps is not None and not is_noting:
                zeros = map_states(lambda s: torch.zeros_like(s, requires_grad=True), new)
                taps.append((zeros, map_states(torch.detach, new)))
                new = map_states(torch.add, new, zeros)
                output = output if self.kind == "nested" else flatten_state(new)[0]
            if self.style == "where":
                valid = MASK[:, t, None]
                new = map_states(lambda n, s: torch.where(valid, n, s), new, state)  # noqa: B023
            if self.style == "blend":
                valid = MASK[:, t, None].double()
                new = map_states(lambda n, s: valid * n + (1 - valid) * s, new, state)  # noqa: B023
            if self.style in ("where", "blend"):
                output = output * MASK[:, t, None]
            if self.style == "cells_used":
                map_states(lambda s: outputs.append(s.pow(2)), new)
            outputs.append(output.sin())
            state = new
        return outputs


def note_into(cell):
    """Make the cell's next step add zeros to its states; return the lists that it fills with zeros and states."""
    zeros, values = [None, None], [None, None]

    def note(index, value):
        zeros[index], values[index] = torch.zeros_like(value, requires_grad=True), value.detach()
        return value + zeros[index]

    cell.note = note
    return zeros, values


def loss(outputs):
    return sum(((i + 1) * output).sum() for i, output in enumerate(outputs))


def flatten_state(state):
    tensors = []
    map_states(tensors.append, state)
    return tensors


def reference_gradients(model, x):
    """Return the total gradient (sample, time, unit) of each state tensor, zero where a sample has left the batch.

    The zeros are added to the c_t of ``nn.LSTMCell`` after h_t is computed, so the gradient through
    h_t = o_t tanh(c_t) is added here.
    """
    taps = []
    value = loss(model(x, taps))
    zeros = [tap for state, _ in taps for tap in flatten_state(state)]
    tap_grads = iter(torch.autograd.grad(value, zeros, allow_unused=True))
    columns = []
    for state, values in taps:
        grads = [torch.zeros_like(tap) if (g := next(tap_grads)) is None else g for tap in flatten_state(state)]
        if getattr(model, "kind", "") == "lstm":
            h, c = values
            grads[1] = grads[1] + grads[0] * h / torch.tanh(c) * (1 - torch.tanh(c) ** 2)
        columns.append([torch.cat([g, g.new_zeros(B - len(g), g.shape[1])]) for g in grads])
    return [torch.stack(column, dim=1).numpy() for column in zip(*columns, strict=True)]


def run_trace(model, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return rl.trace(model, x, loss=loss, **options)


NAMES = {"lstm": ("hidden", "cell"), "nested": ("fast", "slow_0"), "spread": ("hidden", "state_1")}
ONE_RECURRENCE = ("plain", "index", "where", "blend", "shrink", "early", "cells_used")


@pytest.mark.parametrize("style", ONE_RECURRENCE)
@pytest.mark.parametrize("kind", [*KINDS, "minimal", "nested", "spread"])
def test_one_recurrence(kind, style):
    """The calls are one layer if the state is passed unchanged, by a stack, by a mask or in a shrinking batch."""
    model = Loop(kind, style)
    x = torch.randn(B, T, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference_gradients(model, x)
    trace = run_trace(model, x)
    assert list(trace) == ["cell"]
    assert all(check.ok for check in trace.checks)
    names = NAMES.get(kind, ("hidden",))
    for name, reference in zip(names, expected, strict=True):
        actual = trace["cell"][f"{name}_grad"].values
        mask = trace["cell"].mask.values[:, :, None] if "mask" in trace["cell"].dataset else True
        assert np.abs(reference).max() > 0
        # At masked steps the reference is the gradient of the dropped state, that of rnnlens of the state carried over.
        np.testing.assert_allclose(np.where(mask, actual, reference), reference, atol=1e-10 * np.abs(reference).max())
    if style in ("where", "blend", "shrink"):
        assert trace["cell"].mask.values[:, : T - 1].tolist() == MASK[:, : T - 1].tolist()


@pytest.mark.parametrize("style", ["detach", "scaled", "weaker"])
@pytest.mark.parametrize("kind", [*KINDS, "minimal", "nested", "spread"])
def test_a_detached_state_starts_a_new_recurrence_and_a_scaled_one_does_not(kind, style):
    """A detached state splits the loop into two nodes, a scaled state does not; gradients are exact in both cases."""
    model = Loop(kind, style)
    x = torch.randn(B, T, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference_gradients(model, x)
    trace = run_trace(model, x)
    assert list(trace) == (["cell#0", "cell#1"] if style == "detach" else ["cell"])
    assert all(check.ok for check in trace.checks)
    note_text = "not passed on unchanged" if style == "detach" else "changes the state between its steps"
    assert any(note_text in note for note in trace.notes)
    for name, reference in zip(NAMES.get(kind, ("hidden",)), expected, strict=True):
        actual = np.concatenate([trace[node][f"{name}_grad"].values for node in trace], axis=1)
        np.testing.assert_allclose(actual, reference, atol=1e-10 * np.abs(reference).max())


def test_dropped_states_that_are_used_after_all():
    """If the loss reads a state that a mask drops, the mask counts as a state change; the gradients are exact."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = build_cell("gru")

        def forward(self, x, taps=None):
            h, outputs = initial_state("gru"), []
            for t in range(T):
                new = self.cell(x[:, t], h)
                if taps is not None:
                    taps.append((torch.zeros_like(new, requires_grad=True), new.detach()))
                    new = new + taps[-1][0]
                outputs.append(new.sin())
                h = torch.where(MASK[:, t, None], new, h)
            return [*outputs, h]

    model, x = Leaky(), torch.randn(B, T, F, dtype=torch.float64)
    expected = reference_gradients(model, x)[0]
    trace = run_trace(model, x)
    assert list(trace) == ["cell"]
    np.testing.assert_allclose(trace["cell"].hidden_grad.values, expected, atol=1e-10)


@pytest.mark.parametrize("valid", [[[0, 0, 1, 1, 1]] * 3, [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]])
def test_steps_that_are_padding_for_every_sample(valid):
    """Padding before all sequences, or after the longest one, does not split the recurrence."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = build_cell("lstm")

        def forward(self, x):
            h, c = initial_state("lstm")
            for t in range(T):
                m = torch.tensor(valid, dtype=x.dtype)[:, t, None]
                new_h, new_c = self.cell(x[:, t], (h, c))
                h, c = m * new_h + (1 - m) * h, m * new_c + (1 - m) * c
            return [h]

    trace = run_trace(Padded(), torch.randn(B, T, F, dtype=torch.float64))
    assert list(trace) == ["cell"]
    assert all(check.ok for check in trace.checks)
    assert trace["cell"].mask.values[:, : T - 1].tolist() == np.array(valid, dtype=bool)[:, : T - 1].tolist()


def test_two_calls_from_one_state_are_two_recurrences():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.first = build_cell("gru"), nn.Parameter(torch.ones(B, H, dtype=torch.float64))

        def forward(self, x):
            h = self.cell(x[:, 0], self.first * 1)
            return [self.cell(x[:, 1], h), self.cell(x[:, 2], h)]

    trace = run_trace(Branches(), torch.randn(B, T, F, dtype=torch.float64))
    assert list(trace) == ["cell#0", "cell#1"]
    assert [trace[node].hidden.sizes["time"] for node in trace] == [2, 1]
    assert all(check.ok for check in trace.checks)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_fused_module_called_step_by_step(kind):
    """Calls ``output, h = rnn(x_t, h)`` are one recurrence, with the numbers of one call on the whole sequence."""
    torch.manual_seed(0)
    rnn = kind(F, H, 2).double()

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn

        def forward(self, x):
            h, outputs = None, []
            for t in range(T):
                y, h = self.rnn(x[t : t + 1], h)
                outputs.append(y)
            return torch.cat(outputs), h

    class OneCall(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn

        def forward(self, x):
            return self.rnn(x)

    def value(returned):
        y, h = returned
        return y.sin().sum() + sum((s**2).sum() for s in (h if isinstance(h, tuple) else (h,)))

    x = torch.randn(T, B, F, dtype=torch.float64)
    steps, one_call = rl.trace(Steps(), x, loss=value), rl.trace(OneCall(), x, loss=value)
    assert list(steps) == list(one_call) == ["rnn[0]", "rnn[1]"]
    for node in steps:
        for name in one_call[node].dataset:
            np.testing.assert_allclose(steps[node][name].values, one_call[node][name].values, atol=1e-12, err_msg=name)
