"""Convolutional LSTMs in float64: the convolution against its definition, derivatives against finite differences."""

from dataclasses import replace

import numpy as np
import pytest

from rnnlens.recurrence.adjoint import adjoint, weight_gradients
from rnnlens.recurrence.cells import ConvLSTM1D, ConvLSTM2D, ConvLSTM3D
from rnnlens.recurrence.cells.conv_lstm import Window, convolve
from rnnlens.recurrence.replay import replay
from rnnlens.recurrence.trajectory import Scales

BATCH, TIME, FEATURES, CHANNELS = 2, 3, 2, 3
CLASSES = {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D}
SPACE = {1: (5,), 2: (5, 4), 3: (3, 4, 3)}
CASES = {
    "1d": (1, {"padding": "same"}),
    "2d": (2, {}),
    "2d strides": (2, {"padding": "same", "strides": (2, 3)}),
    "2d dilation": (2, {"padding": "valid", "dilation": (2, 1)}),
    "3d": (3, {"padding": "same"}),
}


def convolve_by_definition(x, kernel, window):
    """Return the convolution (sample, *space, channel), summed over the window for each output position."""
    rank = kernel.ndim - 2
    sizes, widths = x.shape[1:-1], kernel.shape[:rank]
    pads = window.pads(sizes, widths)
    counts = [
        (size + sum(pad) - (width - 1) * dilation - 1) // stride + 1
        for size, pad, width, stride, dilation in zip(sizes, pads, widths, window.strides, window.dilation, strict=True)
    ]
    out = np.zeros((x.shape[0], *counts, kernel.shape[-1]))
    for position in np.ndindex(*counts):
        for offset in np.ndindex(*widths):
            source = [
                i * s + k * d - pad[0]
                for i, s, k, d, pad in zip(position, window.strides, offset, window.dilation, pads, strict=True)
            ]
            if all(0 <= i < size for i, size in zip(source, sizes, strict=True)):
                out[(slice(None), *position)] += x[(slice(None), *source)] @ kernel[offset]
    return out


def make_inputs(case, rng, *, dropout=False):
    rank, options = CASES[case]
    space = SPACE[rank]
    cell = CLASSES[rank](
        kernel=rng.normal(size=(*(2,) * rank, FEATURES, 4 * CHANNELS)) * 0.5,
        recurrent_kernel=rng.normal(size=(*(3,) * rank, CHANNELS, 4 * CHANNELS)) * 0.3,
        bias=rng.normal(size=4 * CHANNELS),
        **options,
    )
    x = rng.normal(size=(BATCH, TIME, *space, FEATURES))
    states = cell.project(x[:, 0], None, np).shape[1:-1]
    start = tuple(rng.normal(size=(BATCH, *states, CHANNELS)) for _ in range(2))
    scales = Scales(
        rng.integers(0, 2, size=(4, BATCH, *space, FEATURES)) * 2.0,
        rng.integers(0, 2, size=(4, BATCH, *states, CHANNELS)) * 2.0,
    )
    return cell, x, start, scales if dropout else Scales()


def slope(function, array, rng, eps=1e-6):
    """Return the derivative of a scalar function in a random direction by finite differences, and that direction."""
    direction = rng.normal(size=array.shape)
    return (function(array + eps * direction) - function(array - eps * direction)) / (2 * eps), direction


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_is_its_definition(case):
    rng = np.random.default_rng(0)
    cell, x, _, _ = make_inputs(case, rng)
    ones = (1,) * len(cell.space)
    window = Window(cell.strides or ones, cell.dilation or ones, cell.padding)
    expected = convolve_by_definition(x[:, 0], cell.kernel, window)
    np.testing.assert_allclose(convolve(x[:, 0], cell.kernel, window, np), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("variant", ["plain", "masked", "dropout"])
@pytest.mark.parametrize("case", CASES)
def test_total_gradients_equal_finite_differences(case, variant, order):
    rng = np.random.default_rng(1)
    cell, x, start, scales = make_inputs(case, rng, dropout=variant == "dropout")
    mask = np.array([[True, False, True], [True, True, False]]) if variant == "masked" else None
    direct = tuple(rng.normal(size=(BATCH, TIME, *start[0].shape[1:])) for _ in range(2))

    def loss(cell=cell, x=x, hidden=start[0], carried=start[1]):
        run = replay(cell, x, (hidden, carried), mask=mask, order=order, scales=scales)
        return sum(float((d * s).sum()) for d, s in zip(direct, run.states, strict=True))

    run = replay(cell, x, start, mask=mask, order=order, scales=scales)
    result = adjoint(run, direct)
    gradients = {
        "x": (x, result.input_grad),
        "hidden": (start[0], result.initial_state_grad[0]),
        "carried": (start[1], result.initial_state_grad[1]),
    }
    for name, (array, gradient) in gradients.items():
        expected, direction = slope(lambda perturbed, name=name: loss(**{name: perturbed}), array, rng)
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-7, err_msg=name)
    weights = weight_gradients(run, result)
    assert weights.keys() == cell.weights().keys()
    by_step = weight_gradients(run, result, by_time=True)
    for name, array in cell.weights().items():
        expected, direction = slope(lambda perturbed, name=name: loss(replace(cell, **{name: perturbed})), array, rng)
        np.testing.assert_allclose((weights[name] * direction).sum(), expected, rtol=1e-7, err_msg=name)
        np.testing.assert_allclose(by_step[name].sum(axis=0), weights[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_gate_gradients_are_those_of_the_gates_by_themselves():
    rng = np.random.default_rng(2)
    cell, x, start, _ = make_inputs("2d", rng)
    direct = rng.normal(size=(BATCH, TIME, *start[0].shape[1:]))
    run = replay(cell, x, start)
    result = adjoint(run, direct)
    record, by_gate = run.record, cell.gate_gradient(run, result)
    slopes = [a * (1 - a) if k != 2 else 1 - a * a for k, a in enumerate(np.moveaxis(record.gates, -2, 0))]
    expected = np.stack([by_gate[..., k, :] * slope for k, slope in enumerate(slopes)], axis=-2)
    np.testing.assert_allclose(result.gate_grad, expected, rtol=1e-9, atol=1e-12)
