"""If two axes vary with the steps, or one axis holds more than steps, an error asks for ``axes=``.

With the ``axes=`` that the message suggests, results equal autograd of the untouched model.
"""

import ast
import re

import numpy as np
import pytest
import torch
from function_models import make_model, noise
from torch import nn

import rnnlens as rl

B, F, H, V = 3, 2, 5, 4


def pointer(steps, *, softmax=False, head=False, time_first=False):
    """Return an LSTM encoder and LSTMCell decoder with additive attention; its output: scores, weights or logits."""

    def run(m, x):
        encoded, (h, c) = m.encoder(x.transpose(0, 1) if time_first else x)
        h, c, context, outputs = h[0], c[0], encoded[:, 0] * 0, []
        for _ in range(steps):
            h, c = m.decoder(context, (h, c))
            scores = m.score(torch.tanh(m.keys(encoded) + m.query(h)[:, None])).squeeze(-1)
            weights = torch.softmax(scores, -1)
            context = (weights[:, None] @ encoded)[:, 0]
            outputs.append(m.head(torch.cat([h, context], -1)) if head else weights if softmax else scores)
        return torch.stack(outputs, 0 if time_first else 1)

    modules = {"keys": nn.Linear(H, H), "query": nn.Linear(H, H), "score": nn.Linear(H, 1), "head": nn.Linear(2 * H, V)}
    return make_model(run, encoder=nn.LSTM(F, H, batch_first=True), decoder=nn.LSTMCell(H, H), **modules)


def luong(*, softmax=False):
    """Return two LSTMs with multiplicative attention, whose output is scores or attention weights."""

    def run(m, x, y):
        encoded, state = m.encoder(x)
        scores = m.decoder(y, state)[0] @ m.keys(encoded).transpose(1, 2)
        return torch.softmax(scores, -1) if softmax else scores

    recurrent = {name: nn.LSTM(F, H, batch_first=True) for name in ("encoder", "decoder")}
    return make_model(run, keys=nn.Linear(H, H), **recurrent)


def attention_to_itself(*, softmax):
    def run(m, x):
        y = m.rnn(x)[0]
        scores = y @ m.keys(y).transpose(1, 2)
        return torch.softmax(scores, -1) if softmax else scores

    return make_model(run, rnn=nn.LSTM(F, H, batch_first=True), keys=nn.Linear(H, H))


def reshaped(steps, *, feature_first=False, static=0, repeated=False, last=False):
    """Return a model that reshapes (sample, step * feature); ``static`` constant features may be in front."""

    def run(m, x):
        front, series = x[:, :static], x[:, static:]
        if feature_first:
            series = series.reshape(len(x), F, steps).transpose(1, 2)
        series = series.reshape(len(x), steps, F)
        if repeated:
            series = torch.cat([series, front[:, None].expand(-1, steps, -1)], -1)
        y = m.rnn(series)[0]
        return m.head(y[:, -1] if last else y)

    width = F + (static if repeated else 0)
    return make_model(run, rnn=nn.LSTM(width, H, batch_first=True), head=nn.Linear(H, V))


def flat_output():
    return make_model(
        lambda m, x: m.head(m.rnn(x)[0]).flatten(1), rnn=nn.GRU(F, H, batch_first=True), head=nn.Linear(H, V)
    )


def full_jacobian(model, leaves, index, samples_at=0, of_samples_at=0):
    """Return the Jacobian (sample, *output, *input) of each sample's output by its own part of one input."""

    def run(leaf):
        return model(*leaves[:index], leaf, *leaves[index + 1 :])

    full = torch.autograd.functional.jacobian(run, leaves[index])
    rank = model(*leaves).ndim
    rows = [full.select(rank + samples_at, b).select(of_samples_at, b) for b in range(B)]
    return torch.stack(rows).numpy()


def close(actual, expected):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 1e-9
    assert np.abs(actual - expected).max() <= 1e-12


def suggested_axes(error):
    """Return every ``axes=`` that an error message suggests."""
    suggestions = [ast.literal_eval(text) for text in re.findall(r"axes=(\{.*?\})", str(error.value))]
    assert suggestions
    return suggestions


TWO = {
    "pointer": lambda D, T: (pointer(D), (noise(B, T, F),)),
    "luong": lambda D, T: (luong(), (noise(B, T, F), noise(B, D, F))),
}
LENGTHS = [(4, 6), (6, 4), (5, 5), (3, 3), (2, 6)]


@pytest.mark.parametrize(("D", "T"), LENGTHS)
@pytest.mark.parametrize("name", TWO)
def test_scores_between_decoder_and_encoder_are_asked_for(name, D, T):
    model, leaves = TWO[name](D, T)
    x = leaves if len(leaves) > 1 else leaves[0]
    for index in range(len(leaves)):
        wrt = f"input[{index}]" if len(leaves) > 1 else "input"
        with pytest.raises(rl.errors.InputError, match="axis_1 and axis_2 of 'output' vary with the steps") as error:
            rl.jacobian(model, x, wrt=wrt)
        expected = full_jacobian(model, leaves, index)
        decoder, encoder = suggested_axes(error)
        assert decoder == {"output": ("sample", "time", "unit")}
        jacobian = rl.jacobian(model, x, wrt=wrt, axes=decoder)
        assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
        close(jacobian, expected)
        close(rl.jacobian(model, x, wrt=wrt, axes=encoder), expected.swapaxes(1, 2))
    wrt = "input[0]" if len(leaves) > 1 else "input"
    options = {"of": "output", "at": {"time": 0}, "reduce": "sum", "wrt": wrt}
    with pytest.raises(rl.errors.InputError, match="name the axis that counts steps: axes=") as error:
        rl.gradients(model, x, **options)
    for axes, axis in zip(suggested_axes(error), (1, 2), strict=True):
        leaf = leaves[0].clone().requires_grad_()
        (input_grad,) = torch.autograd.grad(model(leaf, *leaves[1:]).select(axis, 0).sum(), leaf)
        close(rl.gradients(model, x, axes=axes, **options), input_grad.numpy())


def test_scores_time_first_are_named_in_the_order_of_the_tensor():
    model, x = pointer(4, time_first=True), noise(6, B, F)
    with pytest.raises(rl.errors.InputError, match="axis_0 and axis_2 of 'output'") as error:
        rl.jacobian(model, x)
    decoder = suggested_axes(error)[0]
    assert decoder == {"output": ("time", "sample", "unit")}
    close(rl.jacobian(model, x, axes=decoder), full_jacobian(model, (x,), 0, 1, 1))
    with pytest.raises(rl.errors.InputError, match="name the axis") as error:
        rl.gradients(model, x, of="output", at={"time": 0}, reduce="sum", wrt="input")
    assert suggested_axes(error)[0] == decoder


@pytest.mark.parametrize("softmax", [False, True])
def test_scores_of_a_sequence_with_itself_are_asked_for(softmax):
    model, x = attention_to_itself(softmax=softmax), noise(B, 6, F)
    with pytest.raises(rl.errors.InputError, match="axis_1 and axis_2 of 'output' vary with the steps") as error:
        rl.jacobian(model, x)
    close(rl.jacobian(model, x, axes=suggested_axes(error)[0]), full_jacobian(model, (x,), 0))


@pytest.mark.parametrize(("D", "T"), LENGTHS)
def test_where_only_decoder_steps_are_apart_they_are_time(D, T):
    x, y = noise(B, T, F), noise(B, D, F)
    cases = [(pointer(D, softmax=True), (x,)), (pointer(D, head=True), (x,)), (luong(softmax=True), (x, y))]
    for model, leaves in cases:
        wrt = "input[0]" if len(leaves) > 1 else "input"
        jacobian = rl.jacobian(model, leaves if len(leaves) > 1 else x, wrt=wrt)
        assert jacobian.sizes["out_time"] == D
        close(jacobian, full_jacobian(model, leaves, 0))


FLAT = {
    "step by feature": {},
    "feature by step": {"feature_first": True},
    "last step": {"last": True},
    "static in front": {"static": 3},
    "static at every step": {"static": 3, "repeated": True},
}


@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("name", FLAT)
def test_an_input_that_holds_all_features_of_all_steps_is_asked_for(name, steps):
    model = reshaped(steps, **FLAT[name])
    x = noise(B, steps * F + FLAT[name].get("static", 0))
    with pytest.raises(rl.errors.InputError, match="axis_1 of 'input' varies with the steps, but") as error:
        rl.jacobian(model, x)
    features, entries = suggested_axes(error)
    expected = full_jacobian(model, (x,), 0)
    actual = rl.jacobian(model, x, axes=features)
    assert actual.dims[-1] == "in_feature"
    assert "in_time" not in actual.dims
    close(actual, expected)
    close(rl.jacobian(model, x, axes=entries)[..., 0], expected)
    leaf = x.clone().requires_grad_()
    (input_grad,) = torch.autograd.grad((model(leaf) ** 2).sum(), leaf)
    actual = rl.gradients(model, x, of="output", reduce=lambda y: (y**2).sum(), combine="sum", wrt="input")
    assert "time" not in actual.dims
    close(actual, input_grad.numpy())


def test_an_output_that_holds_all_units_of_all_steps_is_asked_for():
    model, x = flat_output(), noise(B, 6, F)
    with pytest.raises(rl.errors.InputError, match="axis_1 of 'output' varies with the steps, but") as error:
        rl.jacobian(model, x)
    close(rl.jacobian(model, x, axes=suggested_axes(error)[0]), full_jacobian(model, (x,), 0))


CLEAR = {
    "numbers, one a step": (lambda m, x: m.head(m.rnn(x[:, :, None])[0]), 1, (B, 6)),
    "a window slid over them": (lambda m, x: m.head(m.rnn(x.unfold(1, 3, 1))[0]), 3, (B, 8)),
    "frames that overlap": (lambda m, x: m.head(m.rnn(x.unfold(1, 4, 2))[0]), 4, (B, 10)),
    "every second of them": (lambda m, x: m.head(m.rnn(x[:, ::2, None])[0]), 1, (B, 8)),
    "two steps in one": (lambda m, x: m.head(m.rnn(x.reshape(B, -1, 2 * F))[0]), 2 * F, (B, 6, F)),
}


@pytest.mark.parametrize("name", CLEAR)
def test_axes_in_order_of_steps_are_time(name):
    run, width, shape = CLEAR[name]
    model, x = make_model(run, rnn=nn.GRU(width, H, batch_first=True), head=nn.Linear(H, V)), noise(*shape)
    jacobian = rl.jacobian(model, x)
    assert jacobian.sizes["in_time"] == shape[1]
    close(jacobian if len(shape) == 3 else jacobian[..., 0], full_jacobian(model, (x,), 0))


def test_steps_folded_with_samples_stay_known():
    model = make_model(lambda m, x: m.head(m.rnn(x)[0].reshape(-1, H)), rnn=nn.LSTM(F, H), head=nn.Linear(H, V))
    x = noise(6, B, F)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).reshape(6, B, V)[2].sum(), leaf)
    input_grad = rl.gradients(model, x, of="output", at={"time": 2}, reduce="sum", wrt="input")
    close(input_grad, expected.transpose(0, 1).numpy())


class ByFeature(nn.Module):
    """A model that reads a dictionary and runs its layer over one feature after the other."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, H, batch_first=True), nn.Linear(4 * H, V)

    def forward(self, inputs):
        x = inputs["values"]["series"] * inputs["values"]["mask"]
        return self.out(torch.cat([self.rnn(x[..., i : i + 1])[0] for i in range(x.shape[2])], -1))


def test_the_axes_to_type_name_an_input_of_a_dictionary():
    torch.manual_seed(0)
    model, x = ByFeature().double(), noise(B, 6, 4).double().requires_grad_()
    inputs = {"values": {"series": x.detach(), "mask": torch.ones(B, 6, 4).double()}}
    truth = torch.autograd.grad((model({"values": inputs["values"] | {"series": x}}) ** 2).sum(), x)[0].numpy()
    wrt = "input[values.series]"
    options = {"loss": lambda output: (output**2).sum(), "wrt": wrt}

    numbered = rl.gradients(model, inputs, **options)
    assert numbered.dims == ("sample", "axis_1", "axis_2")
    with pytest.raises(rl.errors.InputError) as caught:
        rl.jacobian(model, inputs, wrt=wrt)
    damaged = inputs["values"]["series"].clone()
    damaged[1, 4, 2] = np.nan
    found = rl.find_nonfinite(model, {"values": inputs["values"] | {"series": damaged}})
    for text in (numbered.attrs["flagged"], str(caught.value), repr(found)):
        axes = ast.literal_eval(re.search(r"axes=({.*?})", text)[1])
        assert axes == {wrt: ("sample", "time", "feature")}
    named = rl.gradients(model, inputs, **options, axes=axes)
    assert named.dims == ("sample", "time", "feature")
    np.testing.assert_allclose(named.values, truth, atol=1e-12)
    jacobian = rl.jacobian(model, inputs, wrt=wrt, axes=axes)
    assert (jacobian.sizes["in_time"], jacobian.sizes["in_feature"]) == (6, 4)
    assert jacobian.certificate.state == "passed"
