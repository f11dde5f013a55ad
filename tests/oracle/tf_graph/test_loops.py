"""Cells in TensorFlow's loops: recognised, replayed and swept, against the same cells called step by step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf1_cells
from tf1_cells import CELLS, LENGTHS, STEPS

import rnnlens as rl

REAL = np.arange(STEPS)[None] < np.array(LENGTHS)[:, None]


def close(mine, truth, bound):
    assert np.shape(mine) == np.shape(truth)
    assert np.abs(np.asarray(mine) - truth).max() <= bound * max(1.0, np.abs(truth).max())


def compare(names, *, lengths, bound=1e-12, **how):
    """Kinds, states and total gradients of every layer; weights by the certificate, which is TensorFlow's own run."""
    net, x, loss, grads, states = tf1_cells.of(names, lengths=lengths, **how)
    trace = rl.trace(net, x, np.ones(tf1_cells.SAMPLES))
    assert trace.loss == pytest.approx(loss, rel=bound)
    if "dropout_of_one" not in names:  # draws random numbers, though they do not count
        assert trace.certificate.state == "passed"
    words = {row.name: row.cell for row in rl.layers(net)}
    real = REAL if lengths else np.ones_like(REAL)
    for name, truth in grads.items():
        for quantity, grad, state in zip(("hidden", "cell"), truth, states[name], strict=False):
            mine, total = (_of(trace, words, name, q) for q in (quantity, f"{quantity}_grad"))
            close(mine[real], _chronological(state, name, lengths)[real], bound)
            close(total[real], _chronological(grad, name, lengths)[real], bound)
    return words


def _of(trace, words, name, quantity):
    """A quantity of a layer, or of one direction of it."""
    if name in words:
        return trace[name][quantity].values
    stem, _, half = name.rpartition("/")
    return trace[stem][quantity].sel(direction={"fw": "forward", "bw": "backward"}[half]).values


def _chronological(steps, name, lengths):
    """What ran backwards, in the order of time: each sample is turned round by itself."""
    if "/bw" not in name:
        return steps
    turned = steps.copy()
    for sample, count in enumerate(LENGTHS if lengths else [STEPS] * len(LENGTHS)):
        turned[sample, :count] = steps[sample, :count][::-1]
    return turned


@pytest.mark.parametrize("names", [("gru", "lstm_all"), ("stack_joined", "own")])
def test_states_of_loops(names):
    """Loops as they stand, and loops that are taken apart: each layer of a stack by itself."""
    words = compare(names, lengths=True)
    for name in names:
        kinds = CELLS[name][1]
        layers = [f"{name}/rnn"] if len(kinds) == 1 else [f"{name}/rnn/cell_{i}" for i in range(len(kinds))]
        assert kinds == ("unknown",) or tuple(words[layer] for layer in layers) == kinds


def test_both_directions():
    """One layer, two directions, each turned round by the lengths."""
    words = compare(("basic_lstm",), lengths=True, both=True)
    assert words == {"basic_lstm/bidirectional_rnn": "lstm"}


def test_two_stacks_are_no_layer_of_two_directions():
    """The second cell of each stack reads what the first of the same stack put out."""
    words = compare(("stack",), lengths=True, both=True)
    halves = [f"stack/bidirectional_rnn/{half}/cell_{i}" for half in ("fw", "bw") for i in range(2)]
    assert words == dict(zip(halves, ["gru", "lstm"] * 2, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "whole"])
@pytest.mark.parametrize("time_major", [True, False], ids=["time", "batch"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
@pytest.mark.parametrize("dtype", [tf.float64, tf.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", CELLS)
def test_product(name, lengths, time_major, both, dtype):
    """Every cell and wrapper under every option."""
    bound = 1e-12 if dtype == tf.float64 else 1e-4
    compare((name,), lengths=lengths, time_major=time_major, both=both, dtype=dtype, bound=bound)
