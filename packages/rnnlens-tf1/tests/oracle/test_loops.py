"""Cells in TensorFlow's loops: kinds, states and total gradients equal those of the same cells called step by step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf1_cells
from tf1_cells import CELLS, LENGTHS, STEPS

import rnnlens as rl

IS_VALID = np.arange(STEPS)[None] < np.array(LENGTHS)[:, None]


def assert_close(actual, expected, bound):
    assert np.shape(actual) == np.shape(expected)
    assert np.abs(np.asarray(actual) - expected).max() <= bound * max(1.0, np.abs(expected).max())


def compare(names, *, lengths, bound=1e-12, **options):
    """Check states and total gradients of every layer; return the cell kinds by layer.

    Weight gradients are covered by the certificate, whose reference run is TensorFlow's own.
    """
    net, x, loss, grads, states = tf1_cells.network_with_reference(names, lengths=lengths, **options)
    trace = rl.trace(net, x, np.ones(tf1_cells.SAMPLES))
    assert trace.loss == pytest.approx(loss, rel=bound)
    if "dropout_of_one" not in names:  # draws random numbers, although all units are kept
        assert trace.certificate.state == "passed"
    layer_cells = {row.name: row.cell for row in rl.layers(net)}
    is_valid = IS_VALID if lengths else np.ones_like(IS_VALID)
    for name, truth in grads.items():
        for quantity, grad, state in zip(("hidden", "cell"), truth, states[name], strict=False):
            traced, traced_grad = (_layer_quantity(trace, layer_cells, name, q) for q in (quantity, f"{quantity}_grad"))
            assert_close(traced[is_valid], _chronological(state, name, lengths)[is_valid], bound)
            assert_close(traced_grad[is_valid], _chronological(grad, name, lengths)[is_valid], bound)
    return layer_cells


def _layer_quantity(trace, layer_cells, name, quantity):
    """Return a traced array (sample, step, unit) of a layer, or of one direction of it (name/fw, name/bw)."""
    if name in layer_cells:
        return trace[name][quantity].values
    stem, _, direction = name.rpartition("/")
    return trace[stem][quantity].sel(direction={"fw": "forward", "bw": "backward"}[direction]).values


def _chronological(steps, name, lengths):
    """Return steps in order of time: a backward direction's steps are reversed within each sample's length."""
    if "/bw" not in name:
        return steps
    reversed_steps = steps.copy()
    for sample, count in enumerate(LENGTHS if lengths else [STEPS] * len(LENGTHS)):
        reversed_steps[sample, :count] = steps[sample, :count][::-1]
    return reversed_steps


@pytest.mark.parametrize("names", [("gru", "lstm_all"), ("stack_joined", "own")])
def test_states_of_loops(names):
    """The loop of a single cell is one layer; the loop of a stack is split into one layer per cell."""
    layer_cells = compare(names, lengths=True)
    for name in names:
        kinds = CELLS[name][1]
        layers = [f"{name}/rnn"] if len(kinds) == 1 else [f"{name}/rnn/cell_{i}" for i in range(len(kinds))]
        assert kinds == ("unknown",) or tuple(layer_cells[layer] for layer in layers) == kinds


def test_both_directions():
    """A bidirectional RNN is one layer, whose backward direction is reversed within each sample's length."""
    layer_cells = compare(("basic_lstm",), lengths=True, both=True)
    assert layer_cells == {"basic_lstm/bidirectional_rnn": "lstm"}


def test_two_stacks_are_no_layer_of_two_directions():
    """Two stacks of opposite directions are four layers: each upper cell reads only its own stack's lower outputs."""
    layer_cells = compare(("stack",), lengths=True, both=True)
    names = [f"stack/bidirectional_rnn/{direction}/cell_{i}" for direction in ("fw", "bw") for i in range(2)]
    assert layer_cells == dict(zip(names, ["gru", "lstm"] * 2, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "whole"])
@pytest.mark.parametrize("time_major", [True, False], ids=["time", "batch"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
@pytest.mark.parametrize("dtype", [tf.float64, tf.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", CELLS)
def test_product(name, lengths, time_major, both, dtype):
    """States and gradients equal the reference for every cell and wrapper under every option."""
    bound = 1e-12 if dtype == tf.float64 else 1e-4
    compare((name,), lengths=lengths, time_major=time_major, both=both, dtype=dtype, bound=bound)
