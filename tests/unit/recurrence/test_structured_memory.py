"""Adjoint and time Jacobians of a diagonal recurrence with thousands of states: memory is linear in the states."""

import tracemalloc

import array_api_compat.numpy as anp
import numpy as np
import pytest

from rnnlens.recurrence import structured
from rnnlens.recurrence.arrays import Workspace
from rnnlens.recurrence.jacobian import Entrances, Taps, forward, reverse
from rnnlens.recurrence.reductions import REDUCTIONS, Collector, Extent, FieldCollector, Reduction
from rnnlens.recurrence.sweep_rows import FieldRows, PointRows, Units

T, F = 1000, 3


def make_system(states, structure="diagonal"):
    rng = np.random.default_rng(0)
    kernels = structured.Kernels(
        rng.random((1, T, 2, states), dtype="float32"), rng.random((2, F, states), dtype="float32")
    )
    a = rng.uniform(0.9, 1.0, size=(1, T, states)).astype("float32")
    if structure == "complex":
        real, imaginary = 0.8 * a[..., : states // 2], 0.6 * a[..., states // 2 :]
        return structured.StructuredSystem(
            structured.ComplexDiagonal(Workspace(anp, a), real, imaginary), kernels, 1, T
        )
    return structured.diagonal(a, kernels)


def adjoint(system):
    """Run the adjoint of a loss at every step: gradients of the input, every state and the initial state."""
    cotangents = np.ones((1, 1, T, system.state_sizes[0]), dtype="float32")
    taps = Taps(
        FieldCollector(np.zeros((1, 1, T, F), dtype="float32")),
        {0: FieldCollector(np.zeros_like(cotangents))},
        {0: FieldCollector(np.zeros_like(cotangents[:, :, :1]))},
    )
    reverse(system, FieldRows({0: cotangents}), taps)


def norms(system, outs=range(0, T, 25)):
    """Return Frobenius norms (sample, in step, out step) of the Jacobian of all units by the reverse sweep."""
    size = system.state_sizes[0]
    sink = Collector(
        system.work, Extent(1, len(outs), size, F), {t: t for t in range(T)}, Reduction(REDUCTIONS["norm"])
    )
    reverse(system, Units(outs, 0, size), Taps(input=sink))
    return sink.result


def projected_jacobian(system, outs=range(0, T, 25)):
    """Return the Jacobian (sample, in step, out step, ...) of the units' mean by the reverse sweep."""
    size = system.state_sizes[0]
    sink = Collector(system.work, Extent(1, len(outs), 1, F), {t: t for t in range(T)})
    reverse(system, PointRows(outs, {0: np.full((1, 1, 1, size), 1 / size, dtype="float32")}), Taps(input=sink))
    return sink.result


def push_norms(system, ins=range(0, T, 25)):
    """Compute Frobenius norms of the Jacobian of all steps by the inputs of ``ins`` in a forward sweep."""
    size = system.state_sizes[0]
    positions = {t: t for t in range(T)}
    sink = Collector(system.work, Extent(1, len(ins), F, size), positions, Reduction(REDUCTIONS["norm"]), swapped=True)
    forward(system, Entrances("input", ins), {0: sink}, frozenset(range(T)))


def peak_memory(job, states, structure):
    """Return the peak of allocated bytes while the job runs, without those of the system."""
    system = make_system(states, structure)
    tracemalloc.start()
    try:
        job(system)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("structure", ["diagonal", "complex"])
@pytest.mark.parametrize("job", [adjoint, norms, projected_jacobian, push_norms])
def test_memory_is_linear_in_the_states(job, structure):
    large, small = peak_memory(job, 4096, structure), peak_memory(job, 1024, structure)
    assert large < 4.4 * small
    # Less than one dense step matrix, and than 5 copies of the states of all steps.
    assert large < 4096 * 4096 * 4
    assert large < 5 * T * 4096 * 4


@pytest.mark.full
def test_norms_of_all_pairs_of_steps_in_memory_linear_in_the_states():
    assert peak_memory(lambda system: norms(system, range(T)), 4096, "diagonal") < 5 * T * 4096 * 4


def test_norms_of_a_long_diagonal_recurrence_in_closed_form():
    """For h_t = a h_{t-1} + K x_t the Jacobian block of lag tau is a^tau times the kernel K."""
    rng = np.random.default_rng(1)
    a, kernel = rng.uniform(0.99, 1.0, 50), rng.normal(size=(F, 50))
    system = structured.diagonal(np.broadcast_to(a, (1, T, 50)), structured.Kernels(np.ones((1, 1, 1, 50)), [kernel]))
    actual = norms(system, [T - 1])[0, :, 0]
    lag = np.arange(T)[::-1, None]
    expected = np.sqrt((a ** (2 * lag) * (kernel**2).sum(0)).sum(1))
    assert np.abs(actual / expected - 1).max() < 1e-11
