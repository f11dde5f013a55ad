"""Structured step matrices against the same matrices in dense form, and whole sweeps against unrolled products."""

import itertools
from dataclasses import dataclass

import array_api_compat.numpy as anp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlens.measures.dynamics import lyapunov_spectrum
from rnnlens.recurrence import linear, structured
from rnnlens.recurrence.arrays import Workspace, namespace, on_cpu
from rnnlens.recurrence.jacobian import Entrances, Taps, UnitRows, forward, reverse
from rnnlens.recurrence.reductions import REDUCTIONS, Collector, Extent, FieldCollector, Reduction
from rnnlens.recurrence.sweep_reverse import BlockedSweep
from rnnlens.recurrence.sweep_rows import FieldRows, PointRows, Units, VanishedRowPruning

B, T, F = 2, 5, 3
STRUCTURES = ("diagonal", "complex", "dense")
MASK = np.array([[True, True, False, True, False], [False, True, True, True, True]])


def random_entries(structure, rng, time=T):
    """Return random arrays of a structured matrix, and the dense matrices A (sample, time, state, state)."""
    draw = lambda *shape: 0.9 * rng.normal(size=shape)  # noqa: E731
    if structure == "complex":
        z = draw(B, time, 3) + 1j * draw(B, time, 3)
        a = np.zeros((B, time, 6, 6))
        for j in range(3):
            a[:, :, j, j] = a[:, :, 3 + j, 3 + j] = z[..., j].real
            a[:, :, j, 3 + j], a[:, :, 3 + j, j] = -z[..., j].imag, z[..., j].imag
        return (z.real, z.imag), a
    if structure == "dense":
        a = draw(B, time, 4, 4)
        return (a,), a
    values = draw(B, time, 4)
    return (values,), np.einsum("bts,sr->btsr", values, np.eye(4))


class DenseSystem(linear.ProductSystem):
    """Linear recurrence of dense matrices A (sample, time, state, state) and B (sample, time, state, feature)."""

    def __init__(self, a, b, order="forward", mask=None):
        self.work = Workspace(namespace(a), a)
        self.batch, self.time, self.rows = (int(n) for n in a.shape[:3])
        self.columns, self.features, self.order = self.rows, int(b.shape[3]), order
        self.state_sizes = (self.rows,)
        self.product = self.work.xp.concat([a, b], axis=3)

    def build(self, first, stop, samples, *, inputs):
        width = self.rows + (self.features if inputs else 0)
        return linear.ProductSteps(self.work, self.product[samples, first:stop, :, :width])


def complex_diagonal(real, imaginary, b, order="forward", mask=None):
    """Return the system of a complex diagonal, as of an LRU; entries (1, 1, unit) apply to all samples and steps."""
    transition = structured.ComplexDiagonal(Workspace(namespace(real), real), real, imaginary)
    batch, time = (B, T) if real.shape[:2] == (1, 1) else real.shape[:2]
    return structured.StructuredSystem(transition, b, int(batch), int(time), order, mask)


def constant_kernels(b):
    """Return kernels of one matrix (state, feature) that applies to all samples and steps."""
    return structured.Kernels(np.ones((1, 1, 1, len(b))), [b.T])


MAKE = {"diagonal": structured.diagonal, "complex": complex_diagonal, "dense": DenseSystem}


def random_kernels(rng, states, scale):
    """Return the kernels of two gates, and the equal dense matrices (sample, time, state, feature)."""
    coefficients, kernels = rng.normal(size=(B, T, 2, states)), [rng.normal(size=(F, states)) for _ in range(2)]
    multipliers = {None: None, "shared": rng.normal(size=(B, F)), "per_gate": rng.normal(size=(2, B, F))}[scale]
    matrices = np.einsum("btgs,gfs->btgsf", coefficients, np.stack(kernels))
    if scale == "shared":
        matrices = matrices * multipliers[:, None, None, None]
    if scale == "per_gate":
        matrices = matrices * multipliers.transpose(1, 0, 2)[:, None, :, None]
    return structured.Kernels(coefficients, kernels, multipliers), matrices.sum(2)


def make_system(structure, order="forward", masked=False, scale=None, engine="numpy", seed=0):
    """Return a system and its matrices A (sample, time, state, state), N (sample, time, state, feature)."""
    rng = np.random.default_rng(seed)
    entries, a = random_entries(structure, rng)
    inputs, n = random_kernels(rng, a.shape[2], scale)
    masked = masked and structure != "dense"
    convert = torch.from_numpy if engine == "torch" else np.asarray
    valid = MASK[:, :, None, None] if masked else np.ones((B, T, 1, 1), dtype=bool)
    a, n = np.where(valid, a, np.eye(a.shape[2])), np.where(valid, n, 0.0)
    if structure == "dense":
        b = convert(n)
    else:
        multipliers = None if inputs.scale is None else convert(inputs.scale)
        b = structured.Kernels(convert(inputs.coefficients), [convert(k) for k in inputs.kernels], multipliers)
    options = {"order": order} | ({"mask": convert(MASK)} if masked else {})
    return MAKE[structure](*map(convert, entries), b, **options), a, n


def assert_close(actual, expected, bound=1e-12):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= bound * max(1.0, np.abs(expected).max())


def unrolled(a, n, order):
    """Return d(state after t) by the input at k (sample, t, state, k, feature) and by the initial state."""
    size = a.shape[2]
    by_input, by_initial = np.zeros((B, T, size, T, F)), np.zeros((B, T, size, size))
    steps = list(range(T)) if order == "forward" else list(range(T))[::-1]
    for i, t in enumerate(steps):
        transition = np.broadcast_to(np.eye(size), (B, size, size))
        for k in reversed(steps[: i + 1]):
            by_input[:, t, :, k] = transition @ n[:, k]
            transition = transition @ a[:, k]
        by_initial[:, t] = transition
    return by_input, by_initial


def pull_rows(system, step, rows, inputs):
    rows = rows.copy()
    step.to_total_gradients(rows, rows.shape[1])
    out = np.full((B, rows.shape[1], system.rows + (F if inputs else 0)), np.nan)
    step.pull(rows, out, inputs=inputs)
    return out


def push_rows(step, rows):
    out = np.full(rows.shape, np.nan)
    step.push(rows, out)
    return out


def inject_block(system, step, block):
    out = np.full((B, F if block is None else block.shape[1], system.rows), np.nan)
    step.inject(block, out)
    return out


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(STRUCTURES),
    st.booleans(),
    st.sampled_from([None, "shared", "per_gate"]),
    st.integers(0, T - 1),
    st.integers(1, 3),
    st.integers(0, 9999),
)
def test_a_step_is_the_matrix_that_it_stands_for(structure, masked, scale, t, count, seed):
    system, a, n = make_system(structure, masked=masked, scale=scale, seed=seed)
    step = system.build(t, t + 1, slice(None), inputs=True)[0]
    rng = np.random.default_rng(seed + 1)
    rows, block = rng.normal(size=(B, count, system.rows)), rng.normal(size=(B, count, F))
    assert_close(pull_rows(system, step, rows, True), np.concatenate([rows @ a[:, t], rows @ n[:, t]], axis=2))
    assert_close(pull_rows(system, step, rows, False), rows @ a[:, t])
    assert_close(push_rows(step, rows), rows @ a[:, t].swapaxes(1, 2))
    assert_close(inject_block(system, step, block), block @ n[:, t].swapaxes(1, 2))
    assert_close(inject_block(system, step, None), n[:, t].swapaxes(1, 2))
    assert_close(step.input_matrix(), n[:, t])


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("structure", "order", "masked", "scale"),
    list(itertools.product(STRUCTURES, ("forward", "backward"), (False, True), (None, "per_gate"))),
)
def test_time_jacobians_both_ways_and_the_adjoint_against_unrolled_products(structure, order, masked, scale, engine):
    system, a, n = make_system(structure, order, masked, scale, engine)
    by_input, by_initial = unrolled(a, n, order)
    for state, size in enumerate(system.state_sizes):
        columns = linear.state_columns(system, state)
        source = PointRows(range(T), {state: system.work.eye(size)[None, None]}, order)
        sink, initial = (
            Collector(system.work, Extent(B, T, size, width), positions)
            for width, positions in ((F, {t: t for t in range(T)}), (size, {-1: 0}))
        )
        reverse(system, source, Taps(input=sink, initial={state: initial}))
        chronological = np.argsort(source.sequence)
        assert_close(np.moveaxis(on_cpu(sink.result)[:, :, chronological], 1, 3), by_input[:, :, columns])
        assert_close(on_cpu(initial.result)[:, 0, chronological], by_initial[:, :, columns, columns])
        sink = Collector(system.work, Extent(B, T, F, size), {t: t for t in range(T)}, swapped=True)
        forward(system, Entrances("input", range(T)), {state: sink}, frozenset(range(T)))
        youngest = np.arange(T)[::-1] if order == "forward" else np.arange(T)
        blocks = on_cpu(sink.result)[:, :, youngest]
        assert_close(blocks.transpose(0, 1, 4, 2, 3), by_input[:, :, columns])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_field_of_cotangents_meets_the_inner_product_with_tangents(structure, masked):
    """<lambda, G dx> by the forward sweep equals <G^T lambda, dx> by the reverse sweep; G^T as the unrolled product."""
    system, a, n = make_system(structure, masked=masked)
    rng = np.random.default_rng(2)
    change, last = rng.normal(size=(B, T, F)), len(system.state_sizes) - 1
    cotangents = {s: rng.normal(size=(B, 1, T, size)) for s, size in enumerate(system.state_sizes)}
    pulled = np.zeros((B, 1, T, F))
    reverse(system, FieldRows(cotangents), Taps(input=FieldCollector(pulled)))
    entrances = Entrances("input", range(T), change[:, :, None, :])
    total = np.zeros(B)
    for s, size in enumerate(system.state_sizes):
        sink = Collector(system.work, Extent(B, T, 1, size), {t: t for t in range(T)}, swapped=True)
        forward(system, entrances, {s: sink}, frozenset(range(T)))
        total += np.einsum("btgu,btu->b", sink.result[:, :, :, 0], cotangents[s][:, 0])
    assert_close(np.einsum("btf,btf->b", pulled[:, 0], change), total)
    by_input = unrolled(a, n, "forward")[0]
    all_cotangents = np.concatenate([cotangents[s][:, 0] for s in range(last + 1)], axis=2)
    assert_close(pulled[:, 0], np.einsum("bts,btskf->bkf", all_cotangents, by_input))


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_sweep_in_blocks(structure, length):
    system, a, n = make_system(structure, masked=True)
    size = system.state_sizes[0]
    source = PointRows(range(T), {0: system.work.eye(size)[None, None]})
    sink = Collector(system.work, Extent(B, T, size, F), {t: t for t in range(T)})
    BlockedSweep(system, source, Taps(input=sink), slice(None), length).run(None)
    assert_close(np.moveaxis(sink.result, 1, 3), unrolled(a, n, "forward")[0][:, :, :size])


def test_a_complex_diagonal_against_finite_differences_of_the_complex_recurrence():
    rng, eps = np.random.default_rng(0), 0.5  # the recurrence is linear: finite differences are exact for any step
    magnitude, phase, input_weights = rng.uniform(0.6, 1.0, 4), rng.uniform(0, 3, 4), rng.normal(size=(4, F, 2))
    rotation, input_weights = magnitude * np.exp(1j * phase), input_weights[..., 0] + 1j * input_weights[..., 1]

    def run(x):
        h, states = np.zeros((B, 4), complex), []
        for t in range(T):
            h = rotation * h + x[:, t] @ input_weights.T
            states.append(np.concatenate([h.real, h.imag], axis=1))
        return np.stack(states, axis=1)

    x = rng.normal(size=(B, T, F))
    b = constant_kernels(np.concatenate([input_weights.real, input_weights.imag]))
    system = complex_diagonal(rotation.real[None, None], rotation.imag[None, None], b)
    sink = Collector(system.work, Extent(B, T, 8, F), {t: t for t in range(T)})
    reverse(system, PointRows(range(T), {0: np.eye(8)[None, None]}), Taps(input=sink))
    for k, f in itertools.product(range(T), range(F)):
        step = np.zeros_like(x)
        step[:, k, f] = eps
        assert_close(sink.result[:, k, :, :, f], (run(x + step) - run(x - step)) / (2 * eps))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="differ in size: A 4, B 3"):
        structured.diagonal(np.ones((1, 2, 4)), constant_kernels(np.ones((3, 2))))


def test_a_gated_step_is_the_matrix_that_it_stands_for():
    rng, units = np.random.default_rng(0), 3
    work = Workspace(anp, np.zeros(1))
    product, keep, lift = rng.normal(size=(B, 1, 6, 3)), rng.normal(size=(B, 1, 3)), rng.normal(size=(B, 1, 3))
    # pull_matrix: total gradients [dc | dh] to those before the step; total_matrix: direct to total gradients.
    pull_matrix, total_matrix = np.zeros((B, 6, 6)), np.tile(np.eye(6), (B, 1, 1))
    pull_matrix[:, :, units:], pull_matrix[:, :units, :units] = product[:, 0], keep[:, 0, :, None] * np.eye(3)
    total_matrix[:, units:, :units] = lift[:, 0, :, None] * np.eye(3)
    step, rows = linear.ProductSteps(work, product, keep, lift)[0], rng.normal(size=(B, 4, 6))
    pushed, pulled = np.zeros((B, 4, 6)), np.zeros((B, 4, 6))
    step.push(rows, pushed)
    assert_close(pushed, rows @ (total_matrix @ pull_matrix).swapaxes(1, 2))
    total_rows = rows.copy()
    step.to_total_gradients(total_rows, 4)
    step.pull(total_rows, pulled, inputs=False)
    assert_close(pulled, rows @ total_matrix @ pull_matrix)


PATTERNED = ("diagonal", "complex")
BLOCK_NUMBERS = {
    None: lambda g: g,
    "norm": lambda g: np.sqrt((g**2).sum((-2, -1))),
    "spectral": lambda g: np.linalg.svd(g, compute_uv=False)[..., 0],
    "sum": lambda g: g.sum((-2, -1)),
    "mean": lambda g: g.mean((-2, -1)),
    "abs_mean": lambda g: np.abs(g).mean((-2, -1)),
}


def unit_jacobian(system, state, tap, reduce=None, readout=None, pruning=None, average=False, moves=None, width=F):
    """Return the Jacobian (sample, out step, in step, ...) by one sweep of all units of a state, and its collector."""
    size, positions = system.state_sizes[state], {t: t for t in range(T)}
    sink = Collector(
        system.work,
        Extent(B, T, size, width),
        positions,
        Reduction(REDUCTIONS.get(reduce), average=average),
        readout=readout,
    )
    taps = Taps(input=sink) if tap == "input" else Taps(states={tap: sink})
    source = Units(range(T), state, size, system.order, moves)
    reverse(system, source, taps, pruning=pruning)
    chronological = np.argsort(source.sequence)
    if average:
        return on_cpu(sink.result)[:, chronological].swapaxes(0, 1), sink
    return on_cpu(sink.result)[:, :, chronological].swapaxes(1, 2), sink


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("structure", "order", "masked"), list(itertools.product(PATTERNED, ("forward", "backward"), (False, True)))
)
def test_all_units_at_once_equal_the_unrolled_product(structure, order, masked, engine):
    system, a, n = make_system(structure, order, masked, engine=engine)
    by_input, _ = unrolled(a, n, order)
    blocks = np.moveaxis(by_input, 2, 3)
    assert np.abs(blocks).max() > 0.1
    for reduce, reduction in BLOCK_NUMBERS.items():
        jacobian, _ = unit_jacobian(system, 0, "input", reduce)
        assert_close(jacobian, reduction(blocks), 1e-8 if reduce == "spectral" else 1e-12)


@pytest.mark.parametrize("structure", PATTERNED)
def test_all_units_at_once_by_states_and_by_the_initial_state(structure):
    system, a, _ = make_system(structure, masked=True)
    states = [s for s in range(len(system.state_sizes)) if system.pattern(s) is not None]
    by_state = np.zeros((B, T, T, *a.shape[2:]))
    for t, k in itertools.combinations_with_replacement(range(T), 2):
        by_state[:, k, t] = np.eye(a.shape[2])
        for j in range(k, t, -1):
            by_state[:, k, t] = by_state[:, k, t] @ a[:, j]
    for out_state, in_state, reduce in itertools.product(states, states, (None, "norm", "sum", "abs_mean")):
        rows, columns = linear.state_columns(system, out_state), linear.state_columns(system, in_state)
        jacobian, _ = unit_jacobian(system, out_state, in_state, reduce, width=system.state_sizes[in_state])
        assert_close(jacobian, BLOCK_NUMBERS[reduce](by_state[:, :, :, rows, columns]))
        sink = Collector(system.work, Extent(B, T, rows.stop - rows.start, columns.stop - columns.start), {-1: 0})
        reverse(system, Units(range(T), out_state, rows.stop - rows.start), Taps(initial={in_state: sink}))
        assert_close(
            sink.result[:, 0], np.stack([(by_state[:, t, 0] @ a[:, 0])[:, rows, columns] for t in range(T)], 1)
        )


@pytest.mark.parametrize("reduce", [None, "norm", "sum", "spectral"])
@pytest.mark.parametrize("structure", PATTERNED)
def test_all_units_at_once_seen_through_a_layer_below_averaged_and_where_they_move(structure, reduce):
    system, a, n = make_system(structure)
    by_input, below_jacobian = unrolled(a, n, "forward")[0], np.random.default_rng(5).normal(size=(B, T, F, 4))
    columns = linear.state_columns(system, 0)
    blocks = np.moveaxis(by_input[:, :, columns], 2, 3) @ below_jacobian[:, None] * MASK[:, :, None, None, None]
    readout = lambda t, values: values @ below_jacobian[:, t]  # noqa: E731
    bound = 1e-8 if reduce == "spectral" else 1e-12
    jacobian, _ = unit_jacobian(system, 0, "input", reduce, readout, moves=MASK, width=4)
    assert_close(jacobian, BLOCK_NUMBERS[reduce](blocks), bound)
    jacobian, _ = unit_jacobian(system, 0, "input", reduce, readout, moves=MASK, width=4, average=True)
    assert_close(jacobian, BLOCK_NUMBERS[reduce](blocks).sum(0), bound)


def test_units_reach_a_field_as_rows():
    system, a, n = make_system("complex")
    field, size = np.zeros((B, T * 6, T, F)), 6
    reverse(system, Units(range(T), 0, size), Taps(input=FieldCollector(field)))
    assert_close(field.reshape(B, T, size, T, F), unrolled(a, n, "forward")[0])


def test_norms_of_complex_states_do_not_cancel():
    """After a quarter turn the real part has derivative 0; a difference of squares would leave a rounding error."""
    turn = np.exp(0.5j * np.pi)
    rows = np.array([[turn.real, -turn.imag], [0.0, 0.0]])[None, None]  # row of the real part; imaginary: 0
    pattern = structured.ComplexDiagonal(Workspace(anp, rows), rows[..., :1], rows[..., 1:]).pattern()
    assert UnitRows(rows, pattern, np.array([[[1.0], [0.0]]])).norms().item() < 1e-15


@pytest.mark.parametrize("structure", PATTERNED)
def test_what_pruning_took_away_is_estimated_without_bias(structure):
    rng = np.random.default_rng(3)
    entries, a = random_entries(structure, rng, 40)
    entries = [0.3 * entry for entry in entries]
    inputs = structured.Kernels(rng.normal(size=(B, 1, 1, a.shape[2])), [rng.normal(size=(F, a.shape[2]))])
    system = MAKE[structure](*entries, inputs)
    size, exact = system.state_sizes[0], None
    errors, estimates = [], []
    for seed in [None, *range(30)]:
        sink = Collector(system.work, Extent(B, 40, size, F), {t: t for t in range(40)})
        pruning = None if seed is None else VanishedRowPruning(system.work, 1e-2, size, probes=4, interval=2, seed=seed)
        reverse(system, Units(range(40), 0, size), Taps(input=sink), pruning=pruning)
        if exact is None:
            exact = sink.result
            continue
        assert pruning.dropped > 0
        assert pruning.dropped % size == 0
        errors.append(float(((sink.result - exact) ** 2).sum()))
        estimates.append(sink.error_squares)
    assert 0.5 < np.mean(estimates) / np.mean(errors) < 2


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("structure", PATTERNED)
def test_moduli_are_those_of_the_eigenvalues(structure, order):
    system, a, _ = make_system(structure, order, masked=True)
    expected = np.sort(np.abs(np.linalg.eigvals(a)))
    assert_close(np.sort(np.asarray(system.moduli())), expected)


def test_steps_without_common_eigenvectors_have_no_moduli():
    assert make_system("dense")[0].moduli() is None


@dataclass
class DiagonalRun:
    """Substitute for a run, with the attributes that ``lyapunov_spectrum`` reads."""

    system: object
    input: np.ndarray
    states: tuple
    order: str
    mask: None = None

    @property
    def cell(self):
        return self

    def linear_system(self, run):
        return self.system

    def steps(self, reverse=False):
        return iter(range(self.input.shape[1])[:: 1 if (self.order == "forward") != reverse else -1])


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("structure", ["diagonal", "complex"])
def test_lyapunov_exponents_of_diagonal_steps_are_means_of_logarithms(structure, order):
    time = 12
    entries, a = random_entries(structure, np.random.default_rng(0), time)
    system = MAKE[structure](*entries, constant_kernels(np.ones((a.shape[2], F))), order=order)
    run = DiagonalRun(system, np.zeros((B, time, F)), (np.zeros((B, time, a.shape[2])),), order)
    spectrum = lyapunov_spectrum(run, count=2, burn_in=0.25)
    counted_steps = a[:, 3:] if order == "forward" else a[:, :-3]
    if structure == "complex":
        real, imaginary = (
            np.diagonal(counted_steps[:, :, rows, :3], axis1=2, axis2=3) for rows in (slice(3), slice(3, 6))
        )
        logs = np.tile(np.log(np.hypot(real, imaginary)), 2)
    else:
        logs = np.log(np.abs(np.diagonal(counted_steps, axis1=2, axis2=3)))
    assert_close(spectrum.exponents, np.sort(logs.mean(1))[:, ::-1][:, :2].mean(0))
