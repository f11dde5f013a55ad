"""Derivatives of a single step of a custom cell equal torch's Jacobian of each sample (float64)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.torch import adapter, cells
from rnnlens.autodiff import torch as autodiff

B, T, F, H = 3, 4, 2, 3


class TwoStates(nn.Module):
    """A cell with two states of different shapes (one a matrix), a separate output and an unused weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(F + H, H), nn.Linear(H, 4), nn.Linear(H + 4, 2)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x, state):
        h, m = state
        h = torch.tanh(self.a(torch.cat([x, h], 1)))
        m = 0.5 * m + torch.sin(self.b(h)).reshape(-1, 2, 2)
        return self.out(torch.cat([h, m.flatten(1)], 1)), (h, m)


class Constant(nn.Module):
    """A cell whose second state never changes and whose first state ignores the input."""

    def forward(self, x, state):
        h, k = state
        return torch.tanh(2 * h), k


class Model(nn.Module):
    def __init__(self, cell, state):
        super().__init__()
        self.cell, self.state = cell, state

    def forward(self, x):
        state, outputs = self.state(len(x)), []
        for t in range(x.shape[1]):
            returned = self.cell(x[:, t], state)
            state = returned[1] if isinstance(returned[1], tuple) else returned
            outputs.append(returned[0])
        return torch.stack(outputs, 1)


def zero_states(*shapes):
    return lambda n: tuple(torch.zeros(n, *shape, dtype=torch.float64) for shape in shapes)


CELLS = {"two": (TwoStates, zero_states((H,), (2, 2))), "constant": (Constant, zero_states((H,), (2,)))}


def capture_call(name):
    torch.manual_seed(0)
    cell, state = CELLS[name]
    model, x = Model(cell().double(), state), torch.randn(B, T, F, dtype=torch.float64)
    with rl.torch.cell(model.cell):
        (call,) = adapter.run(
            model, Batch(x, loss=lambda out: out.sin().sum()), Taps.direct(weight_grads=True)
        ).capture.calls
    return call


def rowwise_jacobian(step, x, state):
    """Return d[new states, output] / d input and / d state, (sample, row, column), one sample at a time."""

    def function(row, *states):
        args, kwargs = step.form.call(
            row[None], [s.reshape(1, *shape) for s, shape in zip(states, step.form.shapes, strict=True)]
        )
        returned = cells.tensor_leaves(step.module(*args, **kwargs))
        output, new = returned[0], returned if step.form.output_is_state else returned[1:]
        return torch.cat([*(s.reshape(-1) for s in new), output.reshape(-1)])

    rows = [torch.autograd.functional.jacobian(function, (x[i], *(s[i] for s in state))) for i in range(len(x))]
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return columns[0], torch.cat(columns[1:], dim=2)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_jacobian_and_pull_backs(name, batched, monkeypatch):
    call = capture_call(name)
    step = call.cell
    if not batched:
        original_grad = torch.autograd.grad

        def reject_batched(*args, is_grads_batched=False, **options):
            if is_grads_batched:
                raise RuntimeError("no batching rule")
            return original_grad(*args, **options)

        monkeypatch.setattr(torch.autograd, "grad", reject_batched)
    x = torch.randn(5, F, dtype=torch.float64)
    state = [torch.randn(5, size, dtype=torch.float64) for size in step.state_sizes]
    state_jacobian, input_jacobian = step.jacobian(x, state)
    monkeypatch.undo()
    expected_input, expected_state = rowwise_jacobian(step, x, state)
    torch.testing.assert_close(input_jacobian, expected_input)
    torch.testing.assert_close(state_jacobian, expected_state)
    output, new = step.advance(x, state)
    cotangents = [torch.randn_like(output), *(torch.randn_like(s) for s in new)]
    dx, ds = step.vjp(x, state, cotangents[0], cotangents[1:])
    row = torch.cat([*cotangents[1:], cotangents[0]], 1)[:, None]
    torch.testing.assert_close(dx, (row @ expected_input)[:, 0])
    torch.testing.assert_close(torch.cat(ds, 1), (row @ expected_state)[:, 0])


@pytest.mark.parametrize("name", CELLS)
def test_a_jacobian_pulled_back_in_parts(name, monkeypatch):
    step = capture_call(name).cell
    x = torch.randn(5, F, dtype=torch.float64)
    state = [torch.randn(5, size, dtype=torch.float64) for size in step.state_sizes]
    calls, pull = [], autodiff.PullMany.__call__
    monkeypatch.setattr(autodiff.PullMany, "__call__", lambda *args: calls.append(args) or pull(*args))
    expected = step.jacobian(x, state)
    assert len(calls) == 1
    columns = sum(step.state_sizes) + F
    monkeypatch.setattr(autodiff, "ROWS_BUDGET", 2 * 4 * 8 * 5 * (expected[0].shape[1] + columns))
    chunked = step.jacobian(x, state)
    assert len(calls) == 1 + -(-expected[0].shape[1] // 2)  # two rows at once
    for reference, actual in zip(expected, chunked, strict=True):
        torch.testing.assert_close(reference, actual)


def test_weight_pull_back_sums_over_rows():
    call = capture_call("two")
    step, x = call.cell, torch.randn(5, F, dtype=torch.float64)
    state = [torch.randn(5, size, dtype=torch.float64) for size in step.state_sizes]
    output, new = step.advance(x, state)
    cotangents = [torch.randn_like(output), *(torch.randn_like(s) for s in new)]
    grads = step.weight_vjp(x, state, cotangents[0], cotangents[1:])
    row_grads = [
        step.weight_vjp(
            x[i : i + 1],
            [s[i : i + 1] for s in state],
            cotangents[0][i : i + 1],
            [c[i : i + 1] for c in cotangents[1:]],
        )
        for i in range(5)
    ]
    assert sorted(grads) == ["a.bias", "a.weight", "b.bias", "b.weight", "idle", "out.bias", "out.weight"]
    for key, value in grads.items():
        torch.testing.assert_close(value, sum(row[key] for row in row_grads))
    assert not grads["idle"].any()


@pytest.mark.parametrize("name", CELLS)
def test_a_step_repeats_what_ran(name):
    call = capture_call(name)
    state = call.initial_state
    for t in range(T):
        output, state = call.cell.advance(call.input[:, t], state)
        torch.testing.assert_close(output, call.output[:, t])
    assert call.cell.state_sizes == ((H, 4) if name == "two" else (H, 2))


def test_a_cell_that_starts_without_a_state():
    """``state=None`` at the first call counts as zeros only if the cell returns the same for zeros."""

    class Lazy(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.mix, self.start = nn.Linear(F + H, H), start

        def forward(self, x, state=None):
            h = x.new_full((len(x), H), self.start) if state is None else state[0]
            h = torch.tanh(self.mix(torch.cat([x, h], 1)))
            return h, (h,)

    class Loop(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.cell = Lazy(start)

        def forward(self, x):
            y, state = self.cell(x[:, 0])
            for t in range(1, x.shape[1]):
                y, state = self.cell(x[:, t], state)
            return y

    torch.manual_seed(0)
    x = torch.randn(B, T, F)
    trace = rl.trace(Loop(0.0), x, loss=lambda out: out.sum())
    assert trace["cell"].hidden.shape == (B, T, H)
    assert all(check.ok for check in trace.checks)
    with rl.torch.cell((model := Loop(0.5)).cell), pytest.raises(rl.errors.UnsupportedError, match="pass the first"):
        rl.trace(model, x)
