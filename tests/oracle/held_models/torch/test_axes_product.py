"""Inference of the sample and time axes of torch tensors: every verb against autograd of the untouched model.

Each model has hand-written conversions between its own layout and (sample, time, feature). The sizes are all different
in one run, and all equal in another, where the axes can be inferred only from runs of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

ALL_DIFFERENT, ALL_EQUAL = (3, 5, 2, 6), (4, 4, 4, 4)


def unchanged(x):
    return x


def swap_axes(x):
    return x.transpose(0, 1)


def channels_first(x):
    return x.transpose(1, 2)


@dataclass
class Case:
    """A forward function, with conversions from (sample, time, feature) to its input and back from its outputs."""

    forward: Callable
    make_modules: Callable
    to_input: Callable = unchanged
    from_output: Callable = unchanged
    from_first_layer: Callable = unchanged


class Model(nn.Module):
    def __init__(self, case, features, units):
        super().__init__()
        self.case = case
        for name, module in case.make_modules(features, units).items():
            setattr(self, name, module)

    def forward(self, x):
        return self.case.forward(self, x)


def module_factory(recurrent, width=1, **options):
    def make(f, h):
        return {
            "pre": nn.Linear(f, f),
            "rnn": recurrent(f, h, **options),
            "head": nn.Linear(width * h, h),
        }

    return make


def head_every_step(m, x):
    return m.head(m.rnn(m.pre(x))[0].tanh())


def convolve_first(m, x):
    return m.head(m.rnn(m.conv(x).transpose(1, 2))[0])


def with_convolution(f, h):
    return {"conv": nn.Conv1d(f, f, 3, padding=1), "rnn": nn.GRU(f, h, batch_first=True), "head": nn.Linear(h, h)}


def inception(m, x):
    """Apply convolutions of several widths side by side, with a shortcut, then a layer over time."""
    y = torch.relu(m.conv(x) + m.wide(x) + x)
    return m.head(m.rnn(y.transpose(1, 2))[0].mean(1))


def with_two_convolutions(f, h):
    return with_convolution(f, h) | {"wide": nn.Conv1d(f, f, 5, padding=2)}


def loop_over_steps(m, x):
    x = m.pre(x)
    h, outputs = x.new_zeros(x.shape[1], m.rnn.hidden_size), []
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        outputs.append(m.head(h))
    return torch.stack(outputs)


CASES = {
    "time first": Case(head_every_step, module_factory(nn.LSTM), swap_axes, swap_axes, swap_axes),
    "time first, two layers both ways": Case(
        head_every_step, module_factory(nn.GRU, 2, num_layers=2, bidirectional=True), swap_axes, swap_axes, swap_axes
    ),
    "time first, last step": Case(
        lambda m, x: m.head(m.rnn(m.pre(x))[0][-1]), module_factory(nn.RNN), swap_axes, unchanged, swap_axes
    ),
    "time first, turned round inside": Case(
        lambda m, x: head_every_step(m, x.transpose(0, 1)), module_factory(nn.LSTM, batch_first=True), swap_axes
    ),
    "batch first": Case(head_every_step, module_factory(nn.GRU, batch_first=True)),
    "batch first, output time first": Case(
        lambda m, x: head_every_step(m, x).transpose(0, 1),
        module_factory(nn.GRU, batch_first=True),
        unchanged,
        swap_axes,
    ),
    "channels first": Case(convolve_first, with_convolution, channels_first, unchanged, channels_first),
    "channels first at both ends": Case(
        lambda m, x: convolve_first(m, x).transpose(1, 2),
        with_convolution,
        channels_first,
        channels_first,
        channels_first,
    ),
    "channels first, no convolution": Case(
        lambda m, x: head_every_step(m, x.transpose(1, 2)).transpose(1, 2),
        module_factory(nn.GRU, batch_first=True),
        channels_first,
        channels_first,
    ),
    "channels first, last step": Case(
        lambda m, x: m.head(m.rnn(m.pre(x.transpose(2, 1)))[0][:, -1]),
        module_factory(nn.LSTM, batch_first=True),
        channels_first,
    ),
    "channels first, permuted to time first": Case(
        lambda m, x: m.head(m.rnn(m.pre(x.permute(2, 0, 1)))[0][-1]),
        module_factory(nn.LSTM),
        channels_first,
        unchanged,
        swap_axes,
    ),
    "channels first, convolutions side by side": Case(
        inception, with_two_convolutions, channels_first, unchanged, channels_first
    ),
    "logits folded, time first": Case(
        lambda m, x: head_every_step(m, x).flatten(0, 1),
        module_factory(nn.LSTM),
        swap_axes,
        lambda y: y.reshape(-1, BATCH[0], y.shape[-1]).transpose(0, 1),
        swap_axes,
    ),
    "logits folded, batch first": Case(
        lambda m, x: head_every_step(m, x).flatten(0, 1),
        module_factory(nn.LSTM, batch_first=True),
        unchanged,
        lambda y: y.reshape(BATCH[0], -1, y.shape[-1]),
    ),
    "cells in a loop, time first": Case(loop_over_steps, module_factory(nn.GRUCell), swap_axes, swap_axes, swap_axes),
}
BATCH = [0]  # the number of samples of the case that runs


@pytest.fixture(params=[ALL_DIFFERENT, ALL_EQUAL], ids=["sizes differ", "sizes equal"])
def sizes(request):
    BATCH[0] = request.param[0]
    return request.param


def test_a_function_of_the_output_for_each_sample(case):
    case, model, x = case
    leaf, data = x.clone().requires_grad_(), case.to_input(x).contiguous()
    (expected,) = torch.autograd.grad((output_of(model, case, leaf) ** 2).sum(), leaf)
    options = {"of": lambda y: (y**2).sum(-1), "reduce": "sum", "per_sample": True, "wrt": "input"}
    if model(data).dim() == 2 and output_of(model, case, x).dim() == 3:  # samples folded into the rows of the result
        with pytest.raises(rl.errors.InputError, match="axes="):
            rl.gradients(model, data, **options)
        return
    close(rl.gradients(model, data, **options).values, expected)


@pytest.fixture(params=CASES)
def case(request, sizes):
    samples, steps, features, units = sizes
    torch.manual_seed(0)
    case = CASES[request.param]
    model = Model(case, features, units).double()
    return case, model, torch.randn(samples, steps, features, dtype=torch.float64)


def output_of(model, case, x):
    """Return the output (sample, time, unit) or (sample, unit) for an input (sample, time, feature)."""
    return case.from_output(model(case.to_input(x)))


def close(actual, expected):
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 1e-6
    assert np.abs(actual - expected).max() <= 1e-10 * max(1, np.abs(expected).max())


def cube(y):
    return (y**3).sum() + (y[..., 0] * torch.arange(1, 1 + y[..., 0].numel()).reshape(y[..., 0].shape)).sum()


def test_the_input_of_the_loss(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cube(model(case.to_input(leaf))), leaf)
    input_grad = rl.gradients(model, case.to_input(x).contiguous(), loss=cube, wrt="input")
    assert input_grad.dims == ("sample", "time", "feature")
    close(input_grad.values, expected)


def test_each_sample_by_itself(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    target = output_of(model, case, leaf).flatten(1).norm(dim=1)
    (expected,) = torch.autograd.grad(target.sum(), leaf, retain_graph=True)
    data = case.to_input(x).contiguous()
    weights = torch.stack([torch.autograd.grad(value, model.head.bias, retain_graph=True)[0] for value in target])

    options = {"per_sample": True, "wrt": ["input", "weights"]}
    gradients = rl.gradients(model, data, of="output", reduce="norm", **options)
    close(gradients["model"]["input"].transpose("sample", "time", "feature").values, expected)
    close(gradients["head"]["bias"].values, weights)
    assert abs(gradients.value - target.detach().numpy()).max() <= 1e-10
    sample_grads = rl.gradients(model, data, loss=cube, per_sample=True, wrt="head/bias")
    batch_grad = rl.gradients(model, data, loss=cube, wrt="head/bias")
    assert sample_grads.sizes["sample"] == x.shape[0]
    assert np.abs(sample_grads.sum("sample") - batch_grad).max() <= 1e-10


def test_cut_into_batches_and_reduced_across_samples(case):
    case, model, x = case
    size = 2
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((output_of(model, case, leaf) ** 2).sum(), leaf)
    data = case.to_input(x).contiguous()
    options = {"of": "output", "reduce": sum_of_squares, "wrt": "input"}
    close(rl.gradients(model, data, batch_size=size, combine="sum", **options).values, expected)
    mean = rl.gradients(model, data, batch_size=size, combine="sum", across="mean", **options)
    assert mean.dims == ("time", "feature")
    close(mean.values, expected.mean(0))
    norm = rl.gradients(model, data, batch_size=size, combine="sum", measure="norm", across="mean", **options)
    assert norm.dims == ("time",)
    close(norm.values, expected.norm(dim=2).mean(0))


def sum_of_squares(y):
    return (y**2).sum()


def test_a_step_is_selected_by_name(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    output = output_of(model, case, leaf)
    step = output[1, 2] if output.dim() == 3 else output[1]
    (expected,) = torch.autograd.grad(step.sum(), leaf)
    selection = {"sample": 1, "time": 2} if output.dim() == 3 else {"sample": 1}
    input_grad = rl.gradients(
        model, case.to_input(x).contiguous(), of="output", at=selection, reduce="sum", wrt="input"
    )
    close(input_grad.values, expected)


def test_the_time_jacobian(case):
    case, model, x = case
    full = torch.autograd.functional.jacobian(lambda v: output_of(model, case, v), x)
    expected = torch.stack([full[b][..., b, :, :] for b in range(len(x))])
    jacobian = rl.jacobian(model, case.to_input(x).contiguous())
    dims = ("out_time",) if expected.dim() == 5 else ()
    assert jacobian.dims == ("sample", *dims, "out_unit", "in_time", "in_feature")
    close(jacobian.values, expected)


def test_a_plain_layer_of_a_trace_and_as_an_end_of_a_jacobian(case):
    case, model, x = case
    first_layer = "conv" if hasattr(model, "conv") else "pre"
    layer_outputs = []
    handle = getattr(model, first_layer).register_forward_hook(lambda m, a, out: layer_outputs.append(out))
    output = output_of(model, case, x)
    handle.remove()
    trace = rl.trace(model, case.to_input(x).contiguous(), loss=cube, layers=[first_layer, "rnn"])
    assert trace[first_layer].output.dims == ("sample", "time", "unit")
    close(trace[first_layer].output.values, case.from_first_layer(layer_outputs[0]))
    (grad,) = torch.autograd.grad(output.sum(), layer_outputs[0])
    jacobian = rl.jacobian(model, case.to_input(x).contiguous(), wrt=f"{first_layer}.output")
    out_dims = [dim for dim in ("out_time", "out_unit") if dim in jacobian.dims]
    close(jacobian.sum(out_dims).transpose("sample", "in_time", "in_feature").values, case.from_first_layer(grad))
