"""``rl.torch.scan`` declares a diagonal recurrence; steps of ``rl.torch.step`` may read tensors made from weights."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl


def parallel_scan(a, b):
    """Return the states by prefix products in log space, without a loop over steps."""
    total = torch.cumsum(torch.log(a), 1)
    return torch.exp(total) * torch.cumsum(b * torch.exp(-total), 1)


class MinGRU(nn.Module):
    """The minGRU h_t = (1 - z_t) h_{t-1} + z_t n_t of Feng et al. 2024, arXiv:2410.01201, section 3.1."""

    def __init__(self, function=None, by_hand=False):
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 2)
        self.function, self.by_hand, self.taps = function, by_hand, []

    def forward(self, x):
        z, n = torch.sigmoid(self.gate(x)), torch.tanh(self.new(x))
        if not self.by_hand:
            return self.head(rl.torch.scan(1 - z, z * n, function=self.function, name="memory"))
        h, self.taps = x.new_zeros(len(x), 5), []
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * n[:, t]
            self.taps.append(h)
        return self.head(torch.stack(self.taps, 1))


def last_step_loss(outputs):
    return (outputs[:, -1] ** 2).sum()


@pytest.mark.parametrize("function", [None, parallel_scan], ids=["sequential", "parallel"])
def test_states_and_total_gradients_are_those_of_a_loop(function):
    torch.manual_seed(0)
    model, x = MinGRU(function).double(), torch.randn(2, 40, 3, dtype=torch.float64)
    twin = MinGRU(by_hand=True).double()
    twin.load_state_dict(model.state_dict())
    trace = rl.trace(model, x, loss=last_step_loss)
    assert trace.certificate.state == "passed"
    grads = torch.autograd.grad(last_step_loss(twin(x)), twin.taps)
    layer = trace["memory"]
    for actual, expected in ((layer.state, twin.taps), (layer.state_grad, grads)):
        expected = torch.stack([t.detach() for t in expected], 1).numpy()
        assert np.abs(actual.values - expected).max() <= 1e-12 * np.abs(expected).max()
    assert "5 units" in repr(rl.layers(model, x))
    gradients = rl.gradients(model, x, loss=last_step_loss, wrt="weights")
    assert gradients.certificate.state == "passed"


def test_a_wrong_function_is_named():
    torch.manual_seed(0)
    model = MinGRU(lambda a, b: 1.1 * parallel_scan(a, b))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = rl.trace(model, torch.randn(2, 8, 3), loss=last_step_loss)
    assert any("memory: the replayed output differs" in str(warning.message) for warning in caught)
    assert trace.certificate.state == "failed"


def test_time_jacobian_total_and_frozen():
    torch.manual_seed(0)
    model, x = MinGRU().double(), torch.randn(2, 7, 3, dtype=torch.float64)
    axes = {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")}
    jacobian = rl.jacobian(model, x, axes=axes)
    expected = torch.autograd.functional.jacobian(model, x).numpy()
    for sample in range(2):
        assert np.allclose(jacobian.values[sample], expected[sample, :, :, sample], rtol=1e-12, atol=1e-14)
    assert jacobian.certificate.state == "passed"
    frozen = rl.jacobian(model, x, axes=axes, frozen=True)
    assert not np.allclose(frozen, jacobian)


def test_shapes_are_checked():
    with pytest.raises(rl.errors.InputError, match="two tensors of one shape"):
        rl.torch.scan(torch.ones(1, 3, 1), torch.ones(1, 3, 2))
    with pytest.raises(rl.errors.InputError, match="initial= is one state"):
        rl.torch.scan(torch.ones(1, 3, 1), torch.ones(1, 3, 1), torch.ones(2))
    decay = torch.full((1, 3, 1), 0.5)
    assert rl.torch.scan(decay, torch.ones(1, 3, 1), torch.full((1, 1), 2.0)).flatten().tolist() == [2.0, 2.0, 2.0]


class Decaying(nn.Module):
    """A loop whose step reads the tensor A = -exp(A_log), computed from the parameter A_log."""

    def __init__(self):
        super().__init__()
        self.A_log, self.inp, self.head = nn.Parameter(torch.randn(4) * 0.3), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        rate, h = -torch.exp(self.A_log), x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = rl.torch.step(lambda u, h: torch.exp(rate * 0.1) * h + self.inp(u), x[:, t], h)
        return self.head(h)


def test_a_step_may_read_tensors_made_from_weights():
    torch.manual_seed(0)
    model, x = Decaying(), torch.randn(2, 6, 3)
    trace = rl.trace(model, x, loss=torch.sum)
    assert trace.certificate.state == "passed"
    assert trace["loop"].hidden_grad.sizes["time"] == 6
    (expected,) = torch.autograd.grad(model(x).sum(), model.A_log)
    gradient = rl.gradients(model, x, loss=torch.sum, wrt="decaying/A_log")
    assert np.allclose(gradient, expected.numpy(), rtol=1e-5)


class ComplexUnit(nn.Module):
    """The LRU of Orvieto et al. 2023, arXiv:2303.06349, section 3: complex decay and input matrix, real output.

    ``real_part``: which coefficient of the scan is real.
    """

    def __init__(self, real_part=None, by_hand=False, function=None):
        super().__init__()
        self.rate, self.angle = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.write = nn.Parameter(torch.randn(3, 6, dtype=torch.cfloat))
        self.start, self.head = nn.Parameter(torch.randn(6)), nn.Linear(12, 2)
        self.real_part, self.by_hand, self.function, self.taps = real_part, by_hand, function, []

    def forward(self, x):
        b = x.to(self.write.dtype) @ self.write
        a = torch.exp(-torch.exp(self.rate - 3) + 1j * self.angle).expand_as(b)
        a, b = (a.real.contiguous() if self.real_part == "a" else a), (b.real if self.real_part == "b" else b)
        start = self.start.expand(len(x), 6)
        start = start if self.real_part == "initial" else start * (1 + 0.5j)
        if not self.by_hand:
            states = rl.torch.scan(a, b, start, function=self.function)
        else:
            state, self.taps = start, []
            for t in range(x.shape[1]):
                state = a[:, t] * state + b[:, t]
                self.taps.append(state)
            states = torch.stack(self.taps, 1)
        return self.head(torch.cat([states.real, states.imag], -1))


@pytest.mark.parametrize("real_part", [None, "a", "b", "initial"])
def test_complex_states_and_gradients_are_those_of_a_loop(real_part):
    torch.manual_seed(0)
    model, twin = ComplexUnit(real_part).double(), ComplexUnit(real_part, by_hand=True).double()
    for module in (model, twin):
        module.write.data = module.write.data.to(torch.complex128)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 70, 3, dtype=torch.float64)
    weights = dict(twin.named_parameters())
    value = last_step_loss(twin(x))
    expected = torch.autograd.grad(value, [*weights.values(), *twin.taps])
    gradients = rl.gradients(model, x, loss=last_step_loss, wrt="weights")
    trace = rl.trace(model, x, loss=last_step_loss)
    for result in (gradients, trace):
        assert result.certificate.state == "passed"
    for name, grad in zip(weights, expected, strict=False):
        key = name.replace(".", "/") if "." in name else f"complexunit/{name}"
        assert np.abs(gradients[key].values - grad.numpy()).max() <= 1e-12 * np.abs(grad.numpy()).max()
    layer, state_grads = trace["scan"], expected[len(weights) :]
    for actual, tensors in ((layer.state, twin.taps), (layer.state_grad, state_grads)):
        reference = torch.stack([t.detach() for t in tensors], 1).numpy()
        assert np.abs(actual.values - reference).max() <= 1e-12 * np.abs(reference).max()


def test_jacobian_and_measures_of_a_complex_scan():
    torch.manual_seed(0)
    model, x = ComplexUnit(), torch.randn(2, 9, 3)
    axes = {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")}
    jacobian = rl.jacobian(model, x, axes=axes)
    expected = torch.autograd.functional.jacobian(model, x).numpy()
    for sample in range(2):
        assert np.allclose(jacobian.values[sample], expected[sample, :, :, sample], rtol=1e-4, atol=1e-6)
    assert jacobian.certificate.state == "passed"
    decay = torch.exp(-torch.exp(model.rate - 3)).detach().numpy()
    trace = rl.trace(model, x)
    half_life = rl.measures.decay_half_life(trace["scan"].decay.transpose("sample", "time", "unit").values)
    assert np.allclose(half_life, np.log(0.5) / np.log(decay), rtol=1e-4)
    with pytest.raises(rl.errors.InputError, match=r"draws real numbers[\s\S]*abs\(data\)"):
        rl.plot.curves(trace["scan"].state)


class WithoutConjugate(torch.autograd.Function):
    """A complex scan whose backward pass lacks the conjugate."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return rl.adapters.torch.public.scan_by_steps(a, b)

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        total, grads = torch.zeros_like(grad[:, 0]), []
        for t in reversed(range(grad.shape[1])):
            total = grad[:, t] + (a[:, t + 1] * total if t + 1 < grad.shape[1] else 0)
            grads.append(total)
        return None, torch.stack(grads[::-1], 1)


def test_a_function_whose_gradient_lacks_the_conjugate_fails_the_certificates():
    torch.manual_seed(0)
    model, x = ComplexUnit(), torch.randn(4, 12, 3)

    def wrong_scan(a, b, initial):
        return WithoutConjugate.apply(a, torch.cat([(b[:, :1] + a[:, :1] * initial[:, None]), b[:, 1:]], 1))

    model.function = wrong_scan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            rl.trace(model, x, loss=last_step_loss),
            rl.gradients(model, x, loss=last_step_loss, wrt=["weights", "input"]),
            rl.jacobian(model, x),
        ]
    assert [result.certificate.state for result in results] == ["failed"] * 3


def my_parallel_scan(a, b):
    """Return the states of a scan that rnnlens does not know, as a package of somebody else has it."""
    return parallel_scan(a, b)


class OfAPackage(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        z = torch.sigmoid(self.gate(x))
        return self.head(my_parallel_scan(1 - z, z))


def test_an_unknown_scan_is_named_with_the_line_that_declares_it(monkeypatch):
    torch.manual_seed(0)
    model, x = OfAPackage().double(), torch.randn(2, 9, 3, dtype=torch.float64)
    with pytest.raises(rl.errors.ModelError, match=r"my_parallel_scan[\s\S]*lambda a, b: rl\.torch\.scan") as caught:
        rl.trace(model, x, loss=last_step_loss)
    line = str(caught.value).partition("second axis: ")[2]
    module = sys.modules[OfAPackage.__module__]
    monkeypatch.setattr(module, "my_parallel_scan", my_parallel_scan)  # puts the function back after the test
    exec(" ".join(line.split()).replace(module.__name__, "package"), {"rl": rl, "package": module})
    trace = rl.trace(model, x, loss=last_step_loss)
    assert trace.layers == ("scan",)
    assert trace.certificate.state == "passed"


def test_weights_have_an_entry_of_the_measures_of_a_declared_scan():
    """The half-life and the loss after pruning are those of the coefficients, and of a model with units set to 0."""
    torch.manual_seed(0)
    model, x = MinGRU().double(), torch.randn(4, 12, 3, dtype=torch.float64)
    weights = rl.weights(model, x, loss=last_step_loss, keep=(0.4, 1.0))
    assert weights.certificate.state == "passed"
    assert "memory: a declared scan has no weights; the layers that compute its coefficients have." in weights.notes
    entry = weights["memory"]
    with torch.no_grad():
        decay = 1 - torch.sigmoid(model.gate(x))
        half_life = np.log(0.5) / torch.log(decay).mean((0, 1)).numpy()
        write = (1 - decay) * torch.tanh(model.new(x))
        states = rl.torch.scan(decay, write)
        np.testing.assert_allclose(entry.half_life, half_life, rtol=1e-12)
        kept = (states**2).mean((0, 1)).argsort(descending=True)[:2]
        mask = torch.zeros(5, dtype=torch.float64).index_fill(0, kept, 1)
        losses = [float(last_step_loss(model.head(states * m))) for m in (mask, torch.ones_like(mask))]
    np.testing.assert_allclose(entry.loss_after_pruning, losses, rtol=1e-12)
    assert set(rl.weights(model)) == {"gate", "new", "head"}
    assert "memory" not in rl.weights(model, x, loss=last_step_loss, layers=["gate"])
