"""Models whose forward runs in an unusual way: checkpoints, transforms, hooks, direct calls, batch statistics.

Results equal torch's own backward pass of the untouched model; an error names what cannot be captured.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rnnlens as rl

B, T, F, H = 3, 5, 2, 4


class Sequence(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.rnn, self.head, self.norm = run, nn.LSTM(F, H, batch_first=True), nn.Linear(H, 1), nn.Identity()

    def forward(self, x):
        return self.head(self.norm(self.run(self.rnn, x)[:, -1]))


class Steps(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step, self.rnn, self.head = step, nn.GRUCell(F, H), nn.Linear(H, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), H)
        for t in range(T):
            h = self.step(self.rnn, x[:, t], h)
        return self.head(h)


class Doubling(nn.LSTM):
    def __call__(self, x):
        return self.forward(2 * x)


def add_hooks(model, pre=None, post=None, layer="rnn"):
    if pre is not None:
        getattr(model, layer).register_forward_pre_hook(pre)
    if post is not None:
        getattr(model, layer).register_forward_hook(post)
    return model


def with_modules(model, **modules):
    for name, module in modules.items():
        setattr(model, name, module)
    return model


class Encoded(Sequence):
    """A model whose frozen encoder runs without gradients."""

    def __init__(self):
        super().__init__(lambda rnn, x: rnn(x)[0])
        self.frozen = nn.GRU(F, F, batch_first=True)

    def forward(self, x):
        with torch.no_grad():
            extra = self.frozen(x)[0]
        return super().forward(x + extra)


class Remembering(nn.Module):
    """A model that keeps its state in an attribute from call to call."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(F, H, batch_first=True), nn.Linear(H, 1)
        self.state = (torch.full((1, B, H), 0.1, dtype=torch.float64), torch.full((1, B, H), -0.2, dtype=torch.float64))

    def forward(self, x):
        y, state = self.rnn(x, self.state)
        self.state = tuple(tensor.detach() for tensor in state)
        return self.head(y[:, -1])


def run_rnn(rnn, x):
    return rnn(x)[0]


def run_autocast(rnn, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return rnn(x)[0]


MODELS = {
    "checkpoint, reentrant": lambda: Sequence(lambda rnn, x: checkpoint(lambda v: rnn(v)[0], x, use_reentrant=True)),
    "checkpoint": lambda: Sequence(lambda rnn, x: checkpoint(lambda v: rnn(v)[0], x, use_reentrant=False)),
    "steps checkpointed, reentrant": lambda: Steps(lambda cell, x, h: checkpoint(cell, x, h, use_reentrant=True)),
    "steps checkpointed": lambda: Steps(lambda cell, x, h: checkpoint(cell, x, h, use_reentrant=False)),
    "vmap above": lambda: with_modules(Sequence(run_rnn), norm=_Mapped()),
    "batch norm in training": lambda: with_modules(Sequence(run_rnn), norm=nn.BatchNorm1d(H)),
    "forward called directly": lambda: Sequence(lambda rnn, x: rnn.forward(x)[0]),
    "call overridden": lambda: with_modules(Sequence(run_rnn), rnn=Doubling(F, H, batch_first=True)),
    "part without gradients": Encoded,
    "state in an attribute": Remembering,
    "autocast, double inside": lambda: Sequence(run_autocast),
    "data parallel": lambda: nn.DataParallel(Sequence(run_rnn)),
    "hook replaces the output": lambda: add_hooks(Sequence(run_rnn), post=lambda m, a, out: (3 * out[0], out[1])),
    "hook replaces the input": lambda: add_hooks(Sequence(run_rnn), pre=lambda m, a: (3 * a[0],)),
    "hook of the head": lambda: add_hooks(Sequence(run_rnn), layer="head", post=lambda m, a, out: out * out),
    "gradient hook of the head": lambda: _backward_hook(Sequence(run_rnn)),
    "parametrised head": lambda: _parametrised(Sequence(run_rnn)),
}


class _Mapped(nn.Module):
    def forward(self, x):
        return torch.vmap(torch.tanh)(x)


def _backward_hook(model):
    model.head.register_full_backward_hook(lambda module, into, out: (2 * into[0],))
    return model


def _parametrised(model):
    nn.utils.parametrizations.weight_norm(model.head)
    return model


def mse(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_untouched_model(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    training = "training" in name
    reference = copy.deepcopy(model).train(training)
    x, y = torch.randn(B, T, F, dtype=torch.float64), torch.randn(B, 1, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    loss = mse(reference(leaf), y)
    loss.backward()
    before = copy.deepcopy(model.state_dict())
    traced = rl.trace(model, x, y, loss=mse, training=training)
    assert abs(traced.loss - loss.item()) <= 1e-12
    gradients = rl.gradients(model, x, y, loss=mse, wrt=["input", "*head/*"], training=training)
    assert np.abs(gradients["model"]["input"].values - leaf.grad.numpy()).max() <= 1e-12
    for path, parameter in reference.named_parameters():
        layer, _, key = path.rpartition(".")
        if layer.endswith("head"):
            assert np.abs(gradients[layer][key].values - parameter.grad.numpy()).max() <= 1e-12, path
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["forward called directly", "call overridden"])
def test_a_layer_that_is_called_without_its_hooks_keeps_its_name(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, y = torch.randn(B, T, F, dtype=torch.float64), torch.randn(B, 1, dtype=torch.float64)
    mse(model(x), y).backward()
    bias_grad = rl.gradients(model, x, y, loss=mse, wrt="rnn/bias").values  # gates: input, forget, candidate, output
    assert np.abs(bias_grad.reshape(-1) - model.rnn.bias_ih_l0.grad.numpy()).max() <= 1e-12
    assert list(rl.trace(model, x)) == ["rnn"]


def sample_runner(cell):
    def run(x):
        h = x.new_zeros(1, H)
        for t in range(T):
            h = cell(x[t : t + 1], h)
        return h[0]

    return run


class MappedOverSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(F, H)

    def forward(self, x):
        return torch.vmap(sample_runner(self.cell))(x)


class GradientInside(nn.Module):
    """A model whose output is a gradient of its own layer."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(F, H)

    def forward(self, x):
        return torch.stack([torch.func.grad(lambda v: sample_runner(self.cell)(v).sum())(row) for row in x])


class HookedStates(nn.Module):
    """A model with hooks that halve the gradient of each state, like hand-written clipping."""

    def __init__(self, chunks=False):
        super().__init__()
        self.cell, self.chunks = (nn.LSTM(F, H, batch_first=True) if chunks else nn.LSTMCell(F, H)), chunks

    def forward(self, x):
        shape = (1, len(x), H) if self.chunks else (len(x), H)
        h, c = x.new_zeros(shape), x.new_zeros(shape)
        for t in range(T):
            h, c = self.cell(x[:, t : t + 1], (h, c))[1] if self.chunks else self.cell(x[:, t], (h, c))
            if h.requires_grad:
                h.register_hook(lambda g: 0.5 * g)
        return h


@pytest.mark.parametrize("make", [MappedOverSamples, GradientInside, HookedStates, lambda: HookedStates(chunks=True)])
@pytest.mark.parametrize("verb", ["trace", "gradients", "jacobian"])
def test_what_cannot_be_seen_is_refused_by_name(make, verb):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(B, T, F, dtype=torch.float64)
    call = {
        "trace": lambda: rl.trace(model, x, loss=lambda out: out.sum()),
        "gradients": lambda: rl.gradients(model, x, loss=lambda out: out.sum(), wrt="input"),
        "jacobian": lambda: rl.jacobian(model, x),
    }[verb]
    with pytest.raises(rl.errors.UnsupportedError, match="'cell'"):
        call()


def test_a_checkpoint_is_a_checkpoint_again_afterwards():
    module = torch.utils.checkpoint
    before = module.CheckpointFunction.apply, module._checkpoint_without_reentrant_generator
    model, x = MODELS["checkpoint"]().double(), torch.randn(B, T, F, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError):
        rl.trace(model, x, loss=lambda out: 1 / 0)
    assert (module.CheckpointFunction.apply, module._checkpoint_without_reentrant_generator) == before


class InHalf(nn.Module):
    """A wrapper that runs a model in bfloat16 autocast and returns float32."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


class OwnCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(F + H, H)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


def with_own_cell():
    return with_modules(Steps(lambda cell, x, h: cell(x, h)), rnn=OwnCell())


@pytest.mark.usefixtures("bfloat16_lstm")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequence(run_rnn),
        lambda: with_modules(Sequence(run_rnn), rnn=nn.GRU(F, H, batch_first=True)),
        lambda: Steps(lambda cell, x, h: cell(x, h)),
        with_own_cell,
    ],
    ids=["LSTM", "GRU", "GRUCell", "own cell"],
)
def test_autocast_is_no_fault_of_the_layer_inside_it(make):
    """Half-precision rounding of a model in autocast gives no self-check warning (warnings are errors here)."""
    torch.manual_seed(0)
    model = InHalf(make())
    x, y = torch.randn(B, T, F), torch.randn(B, 1)
    loss = mse(model(x), y)
    loss.backward()
    traced = rl.trace(model, x, y, loss=mse)
    assert abs(traced.loss - loss.item()) <= 1e-6
    weight_grad = rl.gradients(model, x, y, loss=mse, wrt="inner.head/weight")
    assert np.abs(weight_grad.values - model.inner.head.weight.grad.numpy()).max() <= 1e-6


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(F, H, batch_first=True), nn.Linear(H, 1)

    def forward(self, x):
        x.mul_(2).clamp_(-1, 1)
        y = self.rnn(x)[0]
        x.zero_()
        return self.head(y)


def test_a_model_that_writes_over_its_input_gets_a_copy():
    torch.manual_seed(0)
    model, x = ChangesItsInput().double(), torch.randn(B, T, F, dtype=torch.float64)
    before, leaf = x.clone(), x.clone().requires_grad_()

    def untouched(v):
        return model.head(model.rnn((2 * v).clamp(-1, 1))[0])

    (expected,) = torch.autograd.grad((untouched(leaf) ** 2).sum(), leaf)
    input_grad = rl.gradients(model, x, loss=lambda out: (out**2).sum(), wrt="input")
    assert np.abs(input_grad.values - expected.numpy()).max() <= 1e-12
    traced = rl.trace(model, x)
    assert np.abs(traced["rnn"].input.values - (2 * before).clamp(-1, 1).numpy()).max() <= 1e-12
    full = torch.autograd.functional.jacobian(untouched, x)
    expected_jacobian = torch.stack([full[b][:, :, b] for b in range(B)]).numpy()
    assert np.abs(rl.jacobian(model, x).values - expected_jacobian).max() <= 1e-12
    assert torch.equal(x, before)
