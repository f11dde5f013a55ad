"""Which axis of a torch tensor counts samples, and which steps: every verb against autograd of the untouched model.

Each model is written beside the two ways between its own tensors and (sample, time, feature), by hand. The sizes are
once all different, and once all equal, where only the model itself can tell one axis from another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

ALL_DIFFERENT, ALL_EQUAL = (3, 5, 2, 6), (4, 4, 4, 4)


def same(x):
    return x


def swapped(x):
    return x.transpose(0, 1)


def channels_first(x):
    return x.transpose(1, 2)


@dataclass
class Case:
    """A forward, and the ways from (sample, time, feature) to its input, and back from its output and first layer."""

    forward: Callable
    parts: Callable
    into: Callable = same
    back: Callable = same
    below: Callable = same


class Model(nn.Module):
    def __init__(self, case, features, units):
        super().__init__()
        self.case = case
        for name, part in case.parts(features, units).items():
            setattr(self, name, part)

    def forward(self, x):
        return self.case.forward(self, x)


def parts(recurrent, width=1, **options):
    def make(f, h):
        return {
            "pre": nn.Linear(f, f),
            "rnn": recurrent(f, h, **options),
            "head": nn.Linear(width * h, h),
        }

    return make


def everywhere(m, x):
    return m.head(m.rnn(m.pre(x))[0].tanh())


def convolved(m, x):
    return m.head(m.rnn(m.conv(x).transpose(1, 2))[0])


def with_convolution(f, h):
    return {"conv": nn.Conv1d(f, f, 3, padding=1), "rnn": nn.GRU(f, h, batch_first=True), "head": nn.Linear(h, h)}


def looped(m, x):
    x = m.pre(x)
    h, outputs = x.new_zeros(x.shape[1], m.rnn.hidden_size), []
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        outputs.append(m.head(h))
    return torch.stack(outputs)


CASES = {
    "time first": Case(everywhere, parts(nn.LSTM), swapped, swapped, swapped),
    "time first, two layers both ways": Case(
        everywhere, parts(nn.GRU, 2, num_layers=2, bidirectional=True), swapped, swapped, swapped
    ),
    "time first, last step": Case(lambda m, x: m.head(m.rnn(m.pre(x))[0][-1]), parts(nn.RNN), swapped, same, swapped),
    "time first, turned round inside": Case(
        lambda m, x: everywhere(m, x.transpose(0, 1)), parts(nn.LSTM, batch_first=True), swapped
    ),
    "batch first": Case(everywhere, parts(nn.GRU, batch_first=True)),
    "batch first, output time first": Case(
        lambda m, x: everywhere(m, x).transpose(0, 1), parts(nn.GRU, batch_first=True), same, swapped
    ),
    "channels first": Case(convolved, with_convolution, channels_first, same, channels_first),
    "channels first at both ends": Case(
        lambda m, x: convolved(m, x).transpose(1, 2), with_convolution, channels_first, channels_first, channels_first
    ),
    "logits folded, time first": Case(
        lambda m, x: everywhere(m, x).flatten(0, 1),
        parts(nn.LSTM),
        swapped,
        lambda y: y.reshape(-1, BATCH[0], y.shape[-1]).transpose(0, 1),
        swapped,
    ),
    "logits folded, batch first": Case(
        lambda m, x: everywhere(m, x).flatten(0, 1),
        parts(nn.LSTM, batch_first=True),
        same,
        lambda y: y.reshape(BATCH[0], -1, y.shape[-1]),
    ),
    "cells in a loop, time first": Case(looped, parts(nn.GRUCell), swapped, swapped, swapped),
}
BATCH = [0]  # the number of samples of the case that runs


@pytest.fixture(params=[ALL_DIFFERENT, ALL_EQUAL], ids=["sizes differ", "sizes equal"])
def sizes(request):
    BATCH[0] = request.param[0]
    return request.param


def test_a_function_of_the_output_for_each_sample(case):
    case, model, x = case
    leaf, data = x.clone().requires_grad_(), case.into(x).contiguous()
    (expected,) = torch.autograd.grad((seen(model, case, leaf) ** 2).sum(), leaf)
    asked = {"of": lambda y: (y**2).sum(-1), "reduce": "sum", "per_sample": True, "wrt": "input"}
    if model(data).dim() == 2 and seen(model, case, x).dim() == 3:  # samples folded into the rows of the result
        with pytest.raises(rl.errors.InputError, match="axes="):
            rl.gradients(model, data, **asked)
        return
    close(rl.gradients(model, data, **asked).values, expected)


@pytest.fixture(params=CASES)
def case(request, sizes):
    samples, steps, features, units = sizes
    torch.manual_seed(0)
    case = CASES[request.param]
    model = Model(case, features, units).double()
    return case, model, torch.randn(samples, steps, features, dtype=torch.float64)


def seen(model, case, x):
    """The output as (sample, time, unit) or (sample, unit), of an input (sample, time, feature)."""
    return case.back(model(case.into(x)))


def close(got, expected):
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    assert np.abs(expected).max() > 1e-6
    assert np.abs(got - expected).max() <= 1e-10 * max(1, np.abs(expected).max())


def cube(y):
    return (y**3).sum() + (y[..., 0] * torch.arange(1, 1 + y[..., 0].numel()).reshape(y[..., 0].shape)).sum()


def test_the_input_of_the_loss(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cube(model(case.into(leaf))), leaf)
    got = rl.gradients(model, case.into(x).contiguous(), loss=cube, wrt="input")
    assert got.dims == ("sample", "time", "feature")
    close(got.values, expected)


def test_each_sample_by_itself(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    target = seen(model, case, leaf).flatten(1).norm(dim=1)
    (expected,) = torch.autograd.grad(target.sum(), leaf, retain_graph=True)
    data = case.into(x).contiguous()
    weights = torch.stack([torch.autograd.grad(part, model.head.bias, retain_graph=True)[0] for part in target])

    asked = {"per_sample": True, "wrt": ["input", "weights"]}
    got = rl.gradients(model, data, of="output", reduce="norm", **asked)
    close(got["model"]["input"].transpose("sample", "time", "feature").values, expected)
    close(got["head"]["bias"].values, weights)
    assert abs(got.value - target.detach().numpy()).max() <= 1e-10
    share = rl.gradients(model, data, loss=cube, per_sample=True, wrt="head/bias")
    whole = rl.gradients(model, data, loss=cube, wrt="head/bias")
    assert share.sizes["sample"] == x.shape[0]
    assert np.abs(share.sum("sample") - whole).max() <= 1e-10


def test_cut_into_batches_and_reduced_across_samples(case):
    case, model, x = case
    size = 2
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((seen(model, case, leaf) ** 2).sum(), leaf)
    data = case.into(x).contiguous()
    asked = {"of": "output", "reduce": squared, "wrt": "input"}
    close(rl.gradients(model, data, batch_size=size, combine="sum", **asked).values, expected)
    mean = rl.gradients(model, data, batch_size=size, combine="sum", across="mean", **asked)
    assert mean.dims == ("time", "feature")
    close(mean.values, expected.mean(0))
    norm = rl.gradients(model, data, batch_size=size, combine="sum", measure="norm", across="mean", **asked)
    assert norm.dims == ("time",)
    close(norm.values, expected.norm(dim=2).mean(0))


def squared(y):
    return (y**2).sum()


def test_a_step_is_selected_by_name(case):
    case, model, x = case
    leaf = x.clone().requires_grad_()
    output = seen(model, case, leaf)
    step = output[1, 2] if output.dim() == 3 else output[1]
    (expected,) = torch.autograd.grad(step.sum(), leaf)
    at = {"sample": 1, "time": 2} if output.dim() == 3 else {"sample": 1}
    got = rl.gradients(model, case.into(x).contiguous(), of="output", at=at, reduce="sum", wrt="input")
    close(got.values, expected)


def test_the_time_jacobian(case):
    case, model, x = case
    full = torch.autograd.functional.jacobian(lambda v: seen(model, case, v), x)
    expected = torch.stack([full[b][..., b, :, :] for b in range(len(x))])
    got = rl.jacobian(model, case.into(x).contiguous())
    dims = ("out_time",) if expected.dim() == 5 else ()
    assert got.dims == ("sample", *dims, "out_unit", "in_time", "in_feature")
    close(got.values, expected)


def test_a_plain_layer_of_a_trace_and_as_an_end_of_a_jacobian(case):
    case, model, x = case
    below = "conv" if hasattr(model, "conv") else "pre"
    noted = []
    handle = getattr(model, below).register_forward_hook(lambda m, a, out: noted.append(out))
    output = seen(model, case, x)
    handle.remove()
    traced = rl.trace(model, case.into(x).contiguous(), loss=cube, layers=[below, "rnn"])
    assert traced[below].output.dims == ("sample", "time", "unit")
    close(traced[below].output.values, case.below(noted[0]))
    (grad,) = torch.autograd.grad(output.sum(), noted[0])
    got = rl.jacobian(model, case.into(x).contiguous(), wrt=f"{below}.output")
    rest = [dim for dim in ("out_time", "out_unit") if dim in got.dims]
    close(got.sum(rest).transpose("sample", "in_time", "in_feature").values, case.below(grad))
