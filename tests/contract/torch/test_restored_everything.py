"""Every verb, also one that raises, restores generators, weights, gradients and flags of a torch model and its loss."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.torch.restore import SMALL

B, T, F, H = 2, 8, 3, 5
GLOBAL = {"torch": torch.rand, "numpy": np.random.rand, "python": lambda *_: random.random()}


class Source:
    """Plain object with a generator, as a noise process or an environment has."""

    def __init__(self):
        self.generator, self.drawn = np.random.default_rng(3), 0


class Draws(nn.Module):
    """Cell, or step of a loop, that draws from a generator without an effect on its value."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.mix = kind, nn.Linear(F + H, H)
        self.held = {"torch held": torch.Generator().manual_seed(1), "list": [np.random.RandomState(2)]}
        self.own, self.source = random.Random(4), Source()

    def draw(self):
        held = {
            "torch held": lambda: torch.rand(2, generator=self.held["torch held"]),
            "numpy held": lambda: self.held["list"][0].randn(3),
            "python held": self.own.random,
            "in an object": self.source.generator.random,
        }
        value = GLOBAL[self.kind](2) if self.kind in GLOBAL else held[self.kind]()
        self.source.drawn += 1
        return 0 * float(np.sum(np.asarray(value)))

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1))) + self.draw()


KINDS = [*GLOBAL, "torch held", "numpy held", "python held", "in an object"]


class Net(nn.Module):
    def __init__(self, kind, looped):
        super().__init__()
        self.cell, self.out, self.looped, self.fail = Draws(kind), nn.Linear(H, 2), looped, False

    def forward(self, x):
        h = x.new_zeros(len(x), H)
        for t in range(x.shape[1]):
            h = rl.torch.step(self.cell.forward, x[:, t], h) if self.looped else self.cell(x[:, t], h)
        if self.fail:
            raise ZeroDivisionError
        return self.out(h)


def generator_states(model):
    cell = model.cell
    held = cell.held["torch held"].get_state(), cell.held["list"][0].get_state(), cell.own.getstate()
    plain = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    return (*plain, *held, cell.source.generator.bit_generator.state, cell.source.drawn)


def same(a, b):
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def failing_loss(output, target):
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    raise ZeroDivisionError


def drawing_reduction(value):
    return value.sum() + 0 * (torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002


VERBS = {
    "trace": lambda m, x, y, loss: rl.trace(m, x, y, loss=loss),
    "weights": lambda m, x, y, loss: rl.weights(m, x, y, loss=loss),
    "gradients": lambda m, x, y, loss: rl.gradients(m, x, y, loss=loss, wrt="input"),
    "gradients of outputs": lambda m, x, y, loss: rl.gradients(
        m, x, of="output", wrt="input", reduce=drawing_reduction
    ),
    "jacobian": lambda m, x, y, loss: rl.jacobian(m, x),
    "find_nonfinite": lambda m, x, y, loss: rl.find_nonfinite(m, x, y, loss=loss),
    "fixed_points": lambda m, x, y, loss: rl.fixed_points(m, x),
    "lyapunov": lambda m, x, y, loss: rl.lyapunov(m, x),
    "step_eigenvalues": lambda m, x, y, loss: rl.step_eigenvalues(m, x),
    "diagnose": lambda m, x, y, loss: rl.diagnose(m, x, y, loss=loss),
}


@pytest.mark.parametrize("looped", [False, True], ids=["cell", "step"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_generators(verb, kind, looped):
    model = Net(kind, looped)
    x, y, mse = torch.randn(B, T, F), torch.randn(B, 2), nn.functional.mse_loss
    for fail, loss in ((False, mse), (False, failing_loss), (True, mse)):
        model.fail = fail
        before = generator_states(model)
        try:
            VERBS[verb](model, x, y, loss)
        except ZeroDivisionError:
            assert fail or loss is failing_loss
        assert same(before, generator_states(model)), (fail, loss)


def train(model, steps, x, y):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::rnnlens.errors.TrackingWarning")
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_probe_leaves_the_training_bit_identical(noise, tmp_path):
    class Noisy(Net):
        def forward(self, x):
            return super().forward(x + noise * torch.randn_like(x))

    class NoisyCell(Draws):
        def forward(self, x, h):
            return super().forward(x, h) + noise * torch.randn_like(h)

    def make():
        torch.manual_seed(0)
        model = Noisy("numpy", looped=False)
        model.cell.__class__ = NoisyCell
        np.random.seed(0)  # noqa: NPY002
        return model, torch.randn(B, T, F), torch.randn(B, 2)

    model, x, y = make()
    expected = train(model, 4, x, y)
    model, x, y = make()
    mse = nn.functional.mse_loss
    with rl.torch.watch(model, probe=(x, y), loss=mse, every=1, path=tmp_path / "runs.zarr"):
        assert torch.equal(train(model, 4, x, y), expected)


WRITES = {
    "assigned": lambda w: setattr(w, "data", w.data * 0.5),
    "in place": lambda w: torch.no_grad()(w.mul_)(0.5),
    "in place by data": lambda w: w.data.mul_(0.5),
    "assigned and in place": lambda w: (w.data.mul_(0.5), setattr(w, "data", w.data * 0.5)),
    "half precision and back": lambda w: setattr(w, "data", w.data.half().to(w.dtype)),
}


class Writes(nn.Module):
    """Model whose forward writes weights, a gradient and flags of its parameters."""

    def __init__(self, write, size):
        super().__init__()
        self.write, self.rnn, self.out = WRITES[write], nn.GRU(F, size, batch_first=True), nn.Linear(size, 2)
        self.table, self.fail = torch.ones(size), False

    def forward(self, x):
        for weight in (self.rnn.weight_hh_l0, self.out.weight):
            self.write(weight)
        self.table.mul_(0.5)
        (self.rnn.bias_ih_l0**2).sum().backward()
        self.out.bias.requires_grad_(False)
        h = self.rnn(x)[0][:, -1] * self.table.clone()
        if self.fail:
            raise ZeroDivisionError
        return self.out(h)


def complete_state(model):
    parameters = dict(model.named_parameters())
    return {
        "values": {name: p.detach().clone() for name, p in (*parameters.items(), ("table", model.table))},
        "memory": {name: (id(p), p.data_ptr()) for name, p in parameters.items()},
        "grad": {name: (id(p.grad), p.grad.clone()) for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
    }


@pytest.mark.parametrize("size", [4, 160])  # 160: more than SMALL bytes, copied before the first run only
@pytest.mark.parametrize("verb", ["trace", "weights", "gradients", "jacobian", "find_nonfinite", "fixed_points"])
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_in_the_forward(write, verb, size):
    torch.manual_seed(0)
    model, x, y = Writes(write, size).double(), torch.randn(B, T, F).double(), torch.randn(B, 2).double()
    assert size == 4 or model.rnn.weight_hh_l0.numel() * 8 > SMALL
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = complete_state(model)
    for _ in range(2):
        model.fail = False
        VERBS[verb](model, x, y, nn.functional.mse_loss)
        assert same(before, complete_state(model))
        with pytest.raises(ZeroDivisionError):
            VERBS[verb](model, x, y, failing_loss if verb in ("trace", "weights", "gradients") else fail_next(model))
        assert same(before, complete_state(model))


def fail_next(model):
    model.fail = True
    return nn.functional.mse_loss


@pytest.mark.parametrize("write", WRITES)
def test_derivatives_with_written_weights(write):
    torch.manual_seed(0)
    model, x, y = Writes(write, 4).double(), torch.randn(B, T, F).double(), torch.randn(B, 2).double()
    mse = nn.functional.mse_loss
    by_input = rl.gradients(model, x, y, loss=mse, wrt="input")
    by_hidden = rl.gradients(model, x, y, loss=mse, wrt="rnn.hidden")
    jacobian = rl.jacobian(model, x)
    trace = rl.trace(model, x, y, loss=mse)
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    (expected,) = torch.autograd.grad(mse(output, y), leaf, retain_graph=True)
    rows = [torch.autograd.grad(output[:, i].sum(), leaf, retain_graph=True)[0] for i in range(2)]
    np.testing.assert_allclose(by_input.values, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(trace["rnn"].input_grad.values, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(trace["rnn"].hidden_grad.values, by_hidden.values, rtol=1e-9, atol=1e-12)
    named = jacobian.transpose("sample", "out_unit", "in_time", "in_feature").values
    np.testing.assert_allclose(named, torch.stack(rows, 1), rtol=1e-9, atol=1e-12)
    assert by_input.certificate.state == trace.certificate.state == "passed"


class QueueLoss(nn.Module):
    """Loss with a running mean and a generator of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.generator, self.calls = torch.Generator().manual_seed(0), 0

    def forward(self, output, target):
        self.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        self.calls += 1
        noise = torch.randn(output.shape, generator=self.generator)
        return ((output - target + noise - self.mean.clone()) ** 2).mean()


@pytest.mark.parametrize("verb", ["trace", "weights", "gradients", "find_nonfinite", "diagnose"])
def test_the_loss_is_restored(verb):
    model, loss = Net("torch", looped=False), QueueLoss()
    x, y = torch.randn(B, T, F), torch.randn(B, 2)
    before = loss.mean.clone(), loss.generator.get_state(), loss.calls
    VERBS[verb](model, x, y, loss)
    assert same(before, (loss.mean, loss.generator.get_state(), loss.calls))


class OwnTrain(nn.Module):
    """Model with a method ``train`` that is not torch's; one layer is kept in evaluation mode by its own ``train``."""

    def __init__(self):
        super().__init__()
        self.rnn, self.frozen, self.out = nn.GRU(F, H, batch_first=True), Frozen(), nn.Linear(H, 2)
        self.trained = 0

    def train(self, data, valid):
        self.trained += 1

    def forward(self, x):
        return self.out(self.frozen(self.rnn(x)[0][:, -1]))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.modes = nn.BatchNorm1d(H), []
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        modes.append(self.norm.training)
        return self.norm(x)


modes = []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("verb", [rl.trace, rl.weights, rl.gradients, rl.find_nonfinite])
def test_a_train_method_of_the_users_is_not_called(verb, training):
    model, x, y = OwnTrain(), torch.randn(B, T, F), torch.randn(B, 2)
    before = [m.training for m in model.modules()]
    modes.clear()
    verb(model, x, y, loss=nn.functional.mse_loss, training=training)
    assert set(modes) == {False}
    assert model.trained == 0
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_gradients_also_where_the_caller_turned_them_off(grad_mode):
    model, x = nn.GRU(F, H, batch_first=True), torch.randn(B, T, F)
    expected = rl.trace(model, x, loss=lambda out: out[0].sum())["gru"].hidden_grad.values
    with grad_mode():
        x = x.clone()
        actual = rl.trace(model, x, loss=lambda out: out[0].sum())["gru"].hidden_grad.values
        assert not torch.is_grad_enabled()
    np.testing.assert_array_equal(actual, expected)


def test_naming_a_cell_leaves_no_trace_on_it():
    cell = Draws("python")
    before = dict(cell.__dict__)
    with rl.torch.cell(cell):
        assert dict(cell.__dict__) == before
    rl.torch.cell(cell)
    reference = weakref.ref(cell)
    del cell
    gc.collect()
    assert reference() is None
