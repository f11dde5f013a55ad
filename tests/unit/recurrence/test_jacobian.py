"""Optimised Jacobian sweeps against products of dense per-step matrices, and these against finite differences."""

import itertools

import cells
import numpy as np
import pytest
import torch

from rnnlens.recurrence.arrays import on_cpu
from rnnlens.recurrence.cells.affine import UnitVectorSystem
from rnnlens.recurrence.jacobian import Entrances, Taps, forward, reverse
from rnnlens.recurrence.linear import state_columns
from rnnlens.recurrence.reductions import REDUCTIONS, Collector, Extent, FieldCollector, Reduction
from rnnlens.recurrence.replay import replay
from rnnlens.recurrence.sweep_reverse import BlockedSweep, plan_blocks
from rnnlens.recurrence.sweep_rows import FieldRows, PointRows
from rnnlens.recurrence.trajectory import Scales

B, T, F, H = 2, 5, 3, 4
KINDS = ("lstm", "gru_after", "gru_before", "simple_rnn", "lstm_projected", "lstm_softmax", "gru_softmax")


def make_cell(kind, rng, convert):
    gates = {"lstm": 4, "gru": 3, "simple": 1}[kind.split("_")[0]]
    hidden = 2 if kind == "lstm_projected" else H
    random = lambda *shape: convert(0.6 * rng.normal(size=shape))  # noqa: E731
    return cells.make_cell(
        {"simple": "simple_rnn"}.get(kind.split("_")[0], kind.split("_")[0]),
        random(F, gates * H),
        random(hidden, gates * H),
        bias=random(gates * H),
        recurrent_bias=random(gates * H) if kind == "gru_after" else None,
        projection=random(H, hidden) if kind == "lstm_projected" else None,
        activation="softmax" if kind.endswith("softmax") else "tanh",
        reset_after=kind != "gru_before",
    )


def make_run(kind, order="forward", masked=False, dropout=None, engine="numpy", x=None, seed=0):
    rng = np.random.default_rng(seed)
    convert = torch.from_numpy if engine == "torch" else np.asarray
    cell = make_cell(kind, rng, convert)
    random_x = rng.normal(size=(B, T, F))
    state = tuple(convert(0.3 * rng.normal(size=(B, n))) for n in cell.state_sizes)
    mask = convert(np.array([[True, True, False, True, False], [False, True, True, True, True]])) if masked else None
    gates = len(cell.gates)
    shapes = {None: None, "shared": (B,), "per_gate": (gates, B)}[dropout]
    scale = [
        None if shapes is None else convert(2.0 * (rng.random((*shapes, n)) < 0.6)) for n in (F, cell.state_sizes[0])
    ]
    return replay(
        cell,
        convert(random_x if x is None else x),
        state,
        mask=mask,
        order=order,
        scales=Scales(*scale),
    )


def dense_chain(run):
    """Return d(state after t)/d(input k, state after k, initial state) as dense products: (sample, t, state, ...)."""
    block = UnitVectorSystem(run.cell, run).build(0, T, slice(None), inputs=True)
    product = np.asarray(block.product)
    size = sum(int(s.shape[-1]) for s in run.states)
    A, N = np.swapaxes(product[..., :size], 0, 1), np.swapaxes(product[..., size:], 0, 1)
    by_input, by_state = np.zeros((B, T, size, T, F)), np.zeros((B, T, size, T, size))
    by_initial = np.zeros((B, T, size, size))
    order = list(run.steps())
    for i, t in enumerate(order):
        transition = np.broadcast_to(np.eye(size), (B, size, size))
        for k in reversed(order[: i + 1]):
            by_state[:, t, :, k] = transition
            by_input[:, t, :, k] = transition @ N[k]
            transition = transition @ A[k]
        by_initial[:, t] = transition
    return by_input, by_state, by_initial


def assert_close(a, b, bound=1e-12):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= bound * max(1.0, np.abs(b).max())


def reverse_full(run, state, tap, times=range(T), reduce=None):
    system = run.linear_system()
    size = system.state_sizes[state]
    order = "forward" if run.order == "forward" else "backward"
    source = PointRows(list(times), {state: system.work.eye(size)[None, None]}, order)
    width = F if tap == "input" else system.state_sizes[tap]
    sink = Collector(
        system.work, Extent(B, len(times), size, width), {t: t for t in range(T)}, Reduction(REDUCTIONS.get(reduce))
    )
    taps = Taps(input=sink) if tap == "input" else Taps(states={tap: sink})
    cost = reverse(system, source, taps)
    result = on_cpu(sink.result)[:, :, np.argsort(source.sequence)]
    return (np.moveaxis(result, 1, 3) if reduce is None else np.moveaxis(result, 1, 2)), cost


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("kind", "order", "masked", "dropout"),
    list(itertools.product(KINDS, ("forward", "backward"), (False, True), (None, "shared", "per_gate"))),
)
def test_reverse_and_forward_sweeps_equal_the_plain_product_chain(kind, order, masked, dropout, engine):
    run = make_run(kind, order, masked, dropout, engine)
    by_input, _, by_initial = dense_chain(run)
    hidden = int(run.states[0].shape[-1])
    assert_close(reverse_full(run, 0, "input")[0], by_input[:, :, :hidden])

    system = run.linear_system()
    sink = Collector(system.work, Extent(B, T, F, hidden), {t: t for t in range(T)}, swapped=True)
    forward(system, Entrances("input", range(T)), {0: sink}, frozenset(range(T)))
    actual = on_cpu(sink.result)  # (sample, out_time, in_time last read first, feature, unit)
    entered = list(run.steps())
    chronological = actual[:, :, [T - 1 - entered.index(k) for k in range(T)]]
    assert_close(chronological.transpose(0, 1, 4, 2, 3), by_input[:, :, :hidden])

    initial = Collector(system.work, Extent(B, T, hidden, system.state_sizes[-1]), {-1: 0})
    source = PointRows(range(T), {0: system.work.eye(hidden)[None, None]}, order)
    reverse(system, source, Taps(initial={len(run.states) - 1: initial}))
    actual = on_cpu(initial.result)[:, 0, np.argsort(source.sequence)]
    assert_close(actual, by_initial[:, :, :hidden, -system.state_sizes[-1] :])


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("kind", "order", "masked", "dropout", "length"),
    list(itertools.product(KINDS, ("forward", "backward"), (False, True), (None, "per_gate"), (1, 2, 3, 4, 9))),
)
def test_a_sweep_in_blocks_equals_the_plain_product_chain(kind, order, masked, dropout, length, engine):
    run = make_run(kind, order, masked, dropout, engine)
    by_input, _, by_initial = dense_chain(run)
    hidden, last = int(run.states[0].shape[-1]), len(run.states) - 1
    system = run.linear_system()
    source = PointRows(range(T), {0: system.work.eye(hidden)[None, None]}, order)
    sink = Collector(system.work, Extent(B, T, hidden, F), {t: t for t in range(T)})
    initial = Collector(system.work, Extent(B, T, hidden, system.state_sizes[last]), {-1: 0})
    with system.work.no_autograd():
        BlockedSweep(system, source, Taps(input=sink, initial={last: initial}), slice(None), length).run(None)
    chronological = np.argsort(source.sequence)
    assert_close(np.moveaxis(on_cpu(sink.result)[:, :, chronological], 1, 3), by_input[:, :, :hidden])
    actual = on_cpu(initial.result)[:, 0, chronological]
    assert_close(actual, by_initial[:, :, :hidden, -system.state_sizes[last] :])


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize(
    ("outs", "ins"), list(itertools.product(([4, 1], [0, 2, 3], [2]), ([3, 1], [0], [4], [0, 1, 2, 3, 4])))
)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_sweep_in_blocks_of_chosen_steps_and_samples(order, outs, ins, length):
    run = make_run("lstm", order)
    by_input, _, _ = dense_chain(run)
    system = run.linear_system()
    source = PointRows(outs, {0: system.work.eye(H)[None, None], 1: np.ones((1, 1, H, H))}, order)
    sink = Collector(system.work, Extent(1, len(outs), H, F), {t: i for i, t in enumerate(ins)})
    taps = Taps(input=sink, steps=frozenset(ins))
    BlockedSweep(system, source, taps, slice(1, 2), length).run(None)
    selected = by_input[1:, source.sequence]
    expected = selected[:, :, :H] + selected[:, :, H:].sum(2, keepdims=True)
    assert_close(np.moveaxis(sink.result, 1, 3), expected[:, :, :, ins])


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("reduce", ["norm", "spectral", None])
def test_reductions_inside_a_sweep_in_blocks(reduce, average):
    run = make_run("gru_after")
    results = []
    for length in (0, 2):
        system = run.linear_system()
        source = PointRows(range(T), {0: system.work.eye(H)[None, None]})
        positions = {t: t for t in range(T)}
        sink = Collector(system.work, Extent(B, T, H, F), positions, Reduction(REDUCTIONS.get(reduce), average=average))
        if length:
            BlockedSweep(system, source, Taps(input=sink), slice(None), length).run(None)
        else:
            reverse(system, source, Taps(input=sink))
        results.append(sink.result)
    assert np.abs(results[0]).max() > 0.01
    assert_close(results[1], results[0], 1e-8 if reduce == "spectral" else 1e-12)


@pytest.mark.parametrize("kind", ["lstm", "gru_after", "simple_rnn"])
@pytest.mark.parametrize(("rows", "steps", "blocks"), [(40, 60, True), (1, 3, False), (8, 2, False)])
def test_blocks_are_chosen_by_their_cost_and_the_cost_is_what_was_done(kind, rows, steps, blocks):
    rng = np.random.default_rng(0)
    run = replay(
        make_cell(kind, rng, np.asarray),
        rng.normal(size=(B, steps, F)),
        tuple(np.zeros((B, H)) for _ in range(2 if kind == "lstm" else 1)),
    )
    system = run.linear_system()
    source = PointRows(range(steps), {0: rng.normal(size=(1, 1, rows, H))})
    sink = Collector(system.work, Extent(B, steps, rows, F), {t: t for t in range(steps)})
    cost = reverse(system, source, Taps(input=sink))
    plan = plan_blocks(system, rows * np.arange(1, steps + 1), F)
    assert (plan.length > 0) == blocks
    assert cost.flops == 2 * B * plan.products
    plain_products = rows * steps * (steps + 1) / 2 * system.rows * (system.columns + F)
    assert plan.products < 0.9 * plain_products if blocks else plan.products == plain_products


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_to_state_counts_the_path_of_c_through_h(kind, masked):
    run = make_run(kind, masked=masked)
    _, by_state, _ = dense_chain(run)
    sizes = [int(s.shape[-1]) for s in run.states]
    system = run.linear_system()
    starts = np.cumsum([0, *sizes])
    for target, wrt in itertools.product(range(len(sizes)), repeat=2):
        expected = by_state[:, :, starts[target] : starts[target + 1], :, starts[wrt] : starts[wrt + 1]].copy()
        if wrt == 1:
            # c_t also changes h_t: its gradient has the additional path (dh_t/dc_t) * d(h after t).
            lift = dense_lift(run)
            hidden = by_state[:, :, starts[target] : starts[target + 1], :, : sizes[0]]
            expected += np.einsum("btohm,bhmc->btohc", hidden, lift)
        actual, _ = reverse_full(run, target, wrt)
        assert_close(actual, expected)
        sink = Collector(system.work, Extent(B, T, sizes[wrt], sizes[target]), {t: t for t in range(T)}, swapped=True)
        forward(system, Entrances("state", range(T), state=wrt), {target: sink}, frozenset(range(T)))
        assert_close(sink.result[:, :, ::-1].transpose(0, 1, 4, 2, 3), expected)


def dense_lift(run):
    """Return dh_t/dc_t of an LSTM (sample, time, hidden, unit); zero at masked steps."""
    c, o = run.states[1], run.gates[:, :, 3, :]
    if run.cell.activation == "tanh":
        local = np.eye(H) * (o * (1 - np.tanh(c) ** 2))[..., None]
    else:
        e = np.exp(c - c.max(-1, keepdims=True))
        s = e / e.sum(-1, keepdims=True)
        local = o[..., None] * (np.eye(H) * s[..., None] - s[..., None] * s[..., None, :])
    if run.cell.projection is not None:
        local = run.cell.projection.T @ local
    return local if run.mask is None else local * run.mask[:, :, None, None]


@pytest.mark.parametrize("kind", ["lstm", "gru_after", "gru_before", "simple_rnn"])
def test_dense_chain_itself_against_finite_differences(kind):
    run, eps = make_run(kind), 1e-6
    by_input, _, _ = dense_chain(run)
    x, hidden = np.asarray(run.input), int(run.states[0].shape[-1])
    for k, f in itertools.product(range(T), range(F)):
        step = np.zeros_like(x)
        step[:, k, f] = eps
        up, down = (make_run(kind, x=x + s * step).states[0] for s in (1, -1))
        assert_close((up - down) / (2 * eps), by_input[:, :, :hidden, k, f], 1e-8)


@pytest.mark.parametrize("reduce", ["norm", "spectral", "sum", "mean", "abs_mean"])
@pytest.mark.parametrize("kind", ["lstm", "gru_after"])
def test_reductions_inside_the_sweep_equal_those_of_the_full_jacobian(kind, reduce):
    run = make_run(kind)
    full = np.moveaxis(dense_chain(run)[0][:, :, :H], 2, 3)  # (sample, out, in, unit, feature)
    expected = {
        "norm": lambda g: np.sqrt((g**2).sum((-2, -1))),
        "spectral": lambda g: np.linalg.svd(g, compute_uv=False)[..., 0],
        "sum": lambda g: g.sum((-2, -1)),
        "mean": lambda g: g.mean((-2, -1)),
        "abs_mean": lambda g: np.abs(g).mean((-2, -1)),
    }[reduce](full)
    assert_close(reverse_full(run, 0, "input", reduce=reduce)[0], expected, 1e-8 if reduce == "spectral" else 1e-12)


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["lstm", "gru_before", "lstm_projected"])
def test_a_field_of_cotangents_is_pulled_back_as_the_sum_of_its_points(kind, order):
    run = make_run(kind, order, masked=True)
    by_input = dense_chain(run)[0]
    system, hidden = run.linear_system(), int(run.states[0].shape[-1])
    cotangents = np.random.default_rng(1).normal(size=(B, 7, T, hidden))
    field = np.zeros((B, 7, T, F))
    reverse(system, FieldRows({0: cotangents}), Taps(input=FieldCollector(field)))
    assert_close(field, np.einsum("brth,bthkf->brkf", cotangents, by_input[:, :, :hidden]))


def test_chosen_steps_and_samples_only():
    run = make_run("lstm")
    by_input = dense_chain(run)[0]
    system = run.linear_system()
    source = PointRows([4, 1], {0: system.work.eye(H)[None, None]})
    sink = Collector(system.work, Extent(1, 2, H, F), {3: 0, 1: 1})
    cost = reverse(system, source, Taps(input=sink, steps=frozenset((3, 1))), samples=slice(1, 2))
    assert_close(np.moveaxis(sink.result, 1, 3), by_input[1:, [1, 4]][:, :, :H][:, :, :, [3, 1]])
    full_cost = reverse_full(run, 0, "input")[1]
    assert cost.flops < 0.5 * full_cost.flops


def test_the_acausal_half_costs_nothing():
    run = make_run("gru_after")
    _, cost = reverse_full(run, 0, "input")
    alive_rows = sum(range(1, T + 1)) * H
    assert cost.flops == 2 * B * alive_rows * H * (H + F)


@pytest.mark.parametrize("kind", ["lstm", "gru_after", "simple_rnn"])
def test_state_columns_cover_every_state_once(kind):
    system = make_run(kind).linear_system()
    columns = sorted(i for s in range(len(system.state_sizes)) for i in range(*state_columns(system, s).indices(99)))
    assert columns == list(range(sum(system.state_sizes)))
