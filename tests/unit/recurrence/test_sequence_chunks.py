"""Chunks of sequence cells against a loop over steps in float64, differentiated by torch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rnnlens.recurrence import sequence
from rnnlens.recurrence.matrix_form import has_matrix_form
from rnnlens.recurrence.sequence import SequenceCell, forward
from rnnlens.verbs.traced_scans import carried_by_lag

#: Axes of a state of each family, the contracted one, and which vectors it has.
FAMILIES = ("per head", "per key", "delta", "delta per key", "rank one", "transposed", "one vector")


def log_decays(kind, *shape):
    uniform = torch.rand(*shape, dtype=torch.float64)
    scale = {"slow": 1e-4, "mixed": 1.0, "strong": 30.0, "log-uniform": 10.0 ** (4 * uniform - 4)}.get(kind, 1.0)
    logs = -scale * torch.rand(*shape, dtype=torch.float64)
    if kind == "resets":
        logs = logs.masked_fill(torch.rand(shape[:2], dtype=torch.float64).reshape(*shape[:2], 1, 1) < 0.1, -torch.inf)
    return logs


def make_cell(family, kind, steps, *, seed=0, samples=2, heads=2, keys=5, values=3):
    torch.manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    per_key = family in ("per key", "delta per key", "rank one")
    logs = log_decays(kind, samples, steps, heads, keys if per_key else 1)[..., None]
    key = torch.nn.functional.normalize(normal(samples, steps, heads, keys), dim=-1)[..., None]
    value, read = normal(samples, steps, heads, 1, values), normal(samples, steps, heads, keys, 1)
    rate = 2 * torch.rand(samples, steps, heads, 1, 1, dtype=torch.float64)
    write, vectors = (key, value), {}
    if family in ("delta", "delta per key"):
        write, vectors = (rate * key, value), {"right": key}
    elif family == "rank one":
        vectors = {"left": 0.5 * normal(samples, steps, heads, keys, 1), "right": key}
    elif family == "one vector":
        write, read = (normal(1, steps, heads, keys, 1), rate, value), read[:1]
        logs = -torch.rand(1, 1, heads, 1, 1, dtype=torch.float64)
    axes, contracted, initial = ("head", "key", "value"), -2, normal(samples, heads, keys, values)
    if family == "transposed":
        logs, read = logs.mT, read.mT
        write, axes, contracted = (value.mT, key.mT), ("head", "channel", "state_unit"), -1
        initial = initial.mT
    return SequenceCell(axes, (logs,), write, read=read, contracted=contracted, initial=initial, **vectors)


def loop(cell):
    """Return the states of all steps as a list, and the outputs, from the definition of a sequence cell."""
    decay, write = torch.exp(torch.prod(torch.stack(torch.broadcast_tensors(*cell.decay)), 0)), cell.writes()
    state, states, outputs = cell.initial, [], []
    for t in range(cell.steps):
        step = lambda part: part[:, min(t, part.shape[1] - 1)]  # noqa: B023, E731
        state = step(decay) * state
        if cell.right is not None:
            left = cell.write[0] if cell.left is None else cell.left
            state = state - step(left) * (step(cell.right) * state).sum(cell.contracted, keepdim=True)
        state = state + step(write)
        states.append(state)
        outputs.append((step(cell.read) * state).sum(cell.contracted))
    return states, torch.stack(outputs, 1)


def references(cell, output_weights, last_weights):
    """Return outputs, states, total gradients of states and of parts, by autograd through the loop."""
    leaf_cell = cell.with_parts(lambda part: part.clone().requires_grad_())
    states, outputs = loop(leaf_cell)
    value = (outputs * output_weights).sum() + (states[-1] * last_weights).sum()
    parts = leaf_cell.parts
    grads = torch.autograd.grad(value, [*states, *parts.values()])
    state_grads, part_grads = grads[: len(states)], dict(zip(parts, grads[len(states) :], strict=True))
    return outputs.detach(), torch.stack(states, 1).detach(), torch.stack(state_grads, 1), part_grads


def computed(cell, output_weights, last_weights):
    """Return the same by chunks."""
    outputs, run = forward(cell)
    states, state_grads, part_grads = [], [], {}
    for chunk, grad_before in run.sweep(output_weights, last_weights):
        initial_grad = grad_before
        states.append(chunk.states())
        state_grads.append(chunk.grads())
        for name, grad in chunk.part_grads().items():
            part_grads.setdefault(name, []).append(grad)
    parts = {name: torch.cat(grads[::-1], 1) for name, grads in part_grads.items()}
    parts = {name: g.sum(1, keepdim=True) if cell.parts[name].shape[1] == 1 else g for name, g in parts.items()}
    return outputs, torch.cat(states[::-1], 1), torch.cat(state_grads[::-1], 1), parts | {"initial": initial_grad}


def largest_difference(actual, expected):
    """Return the largest difference of outputs, states and gradients, relative to the largest value of each."""
    pairs = [
        *zip(actual[:3], expected[:3], strict=True),
        *((actual[3][name], grad) for name, grad in expected[3].items()),
    ]
    differences = [(a.double() - b).abs().max() / b.abs().max().clamp_min(1e-300) for a, b in pairs]
    return float(max(differences))


KINDS = ("slow", "mixed", "strong", "log-uniform", "resets")
STEPS = (1, 37, 64, 129)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_are_the_loop_in_float64_and_float32(family):
    for seed, (kind, steps) in enumerate(product(KINDS, STEPS)):
        cell = make_cell(family, kind, steps, seed=seed)
        assert has_matrix_form(cell)
        shape = (2, steps, 2, 3)
        weights = torch.randn(shape, dtype=torch.float64), torch.randn(cell.initial.shape, dtype=torch.float64)
        expected = references(cell, *weights)
        assert largest_difference(computed(cell, *weights), expected) < 1e-10, (kind, steps)
        single = cell.with_parts(torch.Tensor.float)
        difference = largest_difference(computed(single, *(w.float() for w in weights)), expected)
        assert difference < 1e-5, (kind, steps, difference)


def test_a_decay_that_is_no_logarithm_and_numpy():
    cell = make_cell("delta", "mixed", 70)
    weights = torch.randn(2, 70, 2, 3, dtype=torch.float64), torch.randn(cell.initial.shape, dtype=torch.float64)
    expected = references(cell, *weights)
    direct = SequenceCell(
        cell.axes,
        tuple(torch.exp(decay) for decay in cell.decay),
        cell.write,
        read=cell.read,
        right=cell.right,
        contracted=-2,
        logarithmic=False,
        initial=cell.initial,
    )
    outputs, states, grads, parts = computed(direct, *weights)
    parts["decay_0"] = parts["decay_0"] * direct.decay[0]
    assert largest_difference((outputs, states, grads, parts), expected) < 1e-10
    outputs, run = forward(cell.with_parts(lambda part: part.numpy()))
    assert np.allclose(outputs, expected[0].numpy(), rtol=1e-12, atol=1e-12)
    for chunk, _ in run.sweep(weights[0].numpy(), weights[1].numpy()):
        assert np.allclose(chunk.grads(), expected[2][:, chunk.steps].numpy(), rtol=1e-10, atol=1e-10)


def test_single_positions_are_those_of_all_positions():
    cell = make_cell("delta per key", "resets", 100)
    weights = torch.randn(2, 100, 2, 3, dtype=torch.float64)
    _, states, grads, _ = computed(cell, weights, None)
    decay, carried = cell.decays(), []
    for chunk, _ in forward(cell)[1].sweep(weights):
        positions = [0, len(range(*chunk.steps.indices(100))) - 1]
        times = [chunk.steps.start + position for position in positions]
        assert torch.allclose(chunk.states(positions), states[:, times], atol=1e-12)
        assert torch.allclose(chunk.grads(positions), grads[:, times], atol=1e-12)
        previous = torch.cat([cell.initial[:, None], states], 1)[:, times]
        assert torch.allclose(chunk.previous_states(positions), previous, atol=1e-12)
        # a_t = 0 at a reset: the gradient by a_t itself is not zero there.
        pulled = grads[:, times] - cell.right[:, times] * (cell.write[0] * grads)[:, times].sum(-2, keepdim=True)
        assert torch.allclose(chunk.decay_grad(positions), (pulled * previous).sum(-1, keepdim=True), atol=1e-10)
        carried.append(chunk.decay_grad(positions))
    assert (decay == 0).any()


def test_cells_without_a_matrix_form_run_step_by_step():
    cell = make_cell("per head", "mixed", 20)
    by_value = torch.rand(2, 20, 2, 5, 3, dtype=torch.float64)
    assert not has_matrix_form(sequence.replace(cell, decay=(-by_value,)))
    assert not has_matrix_form(sequence.replace(cell, read=by_value))
    assert not has_matrix_form(sequence.replace(cell, write=(by_value,)))
    assert not has_matrix_form(sequence.replace(cell, read=None))
    negative = sequence.replace(cell, decay=(-torch.exp(cell.decay[0]),), logarithmic=False)
    assert not has_matrix_form(negative)
    weights = torch.randn(2, 20, 2, 3, dtype=torch.float64)
    outputs, run = forward(negative)
    chunk, _ = next(run.sweep(weights))
    assert type(chunk) is sequence.SequenceChunk
    assert outputs.shape == (2, 20, 2, 3)


def test_states_kept_grow_with_the_square_root_of_the_steps():
    runs = [forward(make_cell("delta", "slow", steps, heads=1, keys=2, values=1))[1] for steps in (512, 8192)]
    assert [len(run.states) for run in runs] == [4, 16]


def carried_by_autograd(cell, lag):
    """Return the root mean square of dS_T/dS_{T-lag} by (sample, head), by autograd through the loop."""
    if lag == 0:
        return torch.ones(cell.shape[0], cell.shape[2], dtype=torch.float64)
    later = cell.at(slice(cell.steps - lag, cell.steps))
    initial = cell.initial

    def last(state):
        return loop(sequence.replace(later, initial=state))[0][-1]

    jacobian = torch.autograd.functional.jacobian(last, initial)
    samples, heads = range(initial.shape[0]), range(initial.shape[1])
    size = initial[0, 0].numel()
    blocks = [[jacobian[i, h, ..., i, h, :, :].square().sum() / size for h in heads] for i in samples]
    return torch.tensor(blocks, dtype=torch.float64).sqrt()


@pytest.mark.parametrize("family", FAMILIES)
def test_share_of_an_earlier_state_is_that_of_the_jacobian_between_them(family):
    for kind in ("slow", "mixed", "resets"):
        cell = make_cell(family, kind, 70)
        lags, shares = sequence.carried_share(cell)
        assert lags == [6, 38, 70]
        for position, lag in enumerate(lags):
            expected = carried_by_autograd(cell, lag)
            share = torch.broadcast_to(shares[:, position], expected.shape)
            torch.testing.assert_close(share, expected, rtol=1e-10, atol=1e-14)


def test_share_of_an_earlier_state_of_diagonal_decays_is_their_product():
    decay = torch.rand(2, 40, 3, 4, dtype=torch.float64) * 2 - 1
    cell = SequenceCell(("channel", "state_unit"), (decay,), (decay, decay), read=decay, logarithmic=False)
    lags, shares = sequence.carried_share(cell)
    assert lags == [8, 40]
    torch.testing.assert_close(shares[:, 1], decay.prod(1).square().mean(-1).sqrt())
    by_vectors = sequence.replace(make_cell("delta", "mixed", 5), read=None)
    assert sequence.carried_share(by_vectors) is None
    # The change of a running maximum is part of the decay of states relative to it.
    assert carried_by_lag(cell) is not None
    assert carried_by_lag(sequence.replace(cell, relative=True)) is None


def influence_by_autograd(cell):
    """Return the energy in all outputs of what each step writes, (sample, time, head), by autograd through the loop."""
    samples, steps, heads = cell.shape[:3]

    def outputs(gains):
        held = cell if cell.left is not None or cell.right is None else sequence.replace(cell, left=cell.write[0])
        return loop(sequence.replace(held, write=(*held.write, gains)))[1]

    gains = torch.ones(samples, steps, heads, 1, 1, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(outputs, gains, vectorize=True)[..., 0, 0]
    energies = [
        [[jacobian[i, :, h, :, i, t, h].square().sum() for h in range(heads)] for t in range(steps)]
        for i in range(samples)
    ]
    return torch.tensor(energies, dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_influence_of_a_step_is_the_derivative_of_all_outputs_by_the_size_of_its_write(family):
    for kind in ("slow", "resets"):
        cell = make_cell(family, kind, 37)
        energies = torch.broadcast_to(sequence.later_influence(cell), (2, 37, 2))
        torch.testing.assert_close(energies, influence_by_autograd(cell), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("family", ["per head", "delta", "delta per key"])
def test_influence_of_all_steps_costs_less_than_two_scans(family):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    cell = make_cell(family, "mixed", 4 * sequence.CHUNK)
    with Count() as of_scan:
        forward(cell)
    with Count() as of_influence:
        sequence.later_influence(cell)
    assert of_influence.calls < 2 * of_scan.calls


def test_influence_of_complex_states_and_of_states_that_are_the_outputs():
    torch.manual_seed(0)
    shape = (2, 40, 3, 4)
    decay, write, read = (torch.randn(shape, dtype=torch.complex128) * size for size in (0.6, 1.0, 1.0))
    for has_read in (True, False):
        axes = ("head", "channel", "state_unit")[1:]
        cell = SequenceCell(axes, (decay,), (write,), read=read if has_read else None, logarithmic=False)
        energies = torch.zeros(2, 40, dtype=torch.float64)
        for t in range(40):
            state = write[:, t]
            for s in range(t, 40):
                state = decay[:, s] * state if s > t else state
                output = (read[:, s] * state).sum(-1) if has_read else state
                energies[:, t] += output.abs().square().flatten(1).sum(1)
        torch.testing.assert_close(sequence.later_influence(cell), energies, rtol=1e-10, atol=0)
    assert sequence.later_influence(sequence.replace(cell, right=read)) is None
    shared_read = sequence.replace(cell, read=read[:, :, :1])
    alike = sequence.replace(cell, read=read[:, :, :1].expand(shape))
    torch.testing.assert_close(sequence.later_influence(shared_read), sequence.later_influence(alike))


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_that_are_not_kept_stay_zero_and_the_others_run_without_them(family):
    cell = make_cell(family, "mixed", 37)
    axis, size = cell.contracted, cell.shape[cell.contracted]
    on_axis = torch.tensor([1.0, 0, 1, 0, 0], dtype=torch.float64)[:size]
    mask = on_axis.reshape([1, 1, 1, *((size, 1) if axis == -2 else (1, size))])
    kept = [i for i in range(size) if on_axis[i]]
    chosen = torch.tensor(kept)
    smaller = cell.with_parts(lambda part: part.index_select(axis, chosen) if part.shape[axis] > 1 else part)
    outputs, run = forward(cell.keeping(mask))
    expected, smaller_run = forward(smaller)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(run.last_state.index_select(axis, chosen), smaller_run.last_state)
    assert run.last_state.count_nonzero() == smaller_run.last_state.count_nonzero()
