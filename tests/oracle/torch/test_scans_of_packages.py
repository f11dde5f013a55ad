"""Scans of packages, rebuilt here in small: mambapy, minGRU-pytorch, xlstm, and Triton kernels on a CPU."""

from __future__ import annotations

import functools
import sys
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import rnnlens as rl


def assert_same_states(actual, expected):
    expected = torch.stack([t.detach() for t in expected], 1).numpy()
    assert np.abs(actual.values - expected).max() <= 1e-12 * np.abs(expected).max()


def assert_is_right(trace, layer, states, loss):
    """Compare the states of all steps and their total gradients with those of a loop of single steps in autograd."""
    assert trace.certificate.state == "passed"
    assert max(check.residual for check in trace.certificate.checks) <= 1e-12
    grads = torch.autograd.grad(loss, states)
    assert_same_states(layer.state, states)
    assert_same_states(layer.state_grad, grads)


def last_squares(output):
    return (output[:, -1] ** 2).sum()


def data(width, steps=9):
    torch.manual_seed(0)
    return torch.randn(2, steps, width, dtype=torch.float64)


class MambaBlock(nn.Module):
    """The selective scan as mambapy has it: a method of tensors (sample, time, channel)."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(d_inner=3, d_state=2)
        self.parts, self.rate = nn.Linear(3, 7), nn.Parameter(torch.rand(3, 2))
        self.skip = nn.Parameter(torch.ones(3))

    def forward(self, x):
        delta, write, read = self.parts(x).split([3, 2, 2], -1)
        return self.selective_scan(x, functional.softplus(delta), -self.rate, write, read, self.skip)

    def selective_scan(self, x, delta, A, B, C, D):
        self.taps, states = [], torch.zeros_like(x[:, 0, :, None] * B[:, 0, None])
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            states = torch.exp(step * A) * states + step * B[:, t, None] * x[:, t, :, None]
            self.taps.append(states)
        return (torch.stack(self.taps, 1) @ C[..., None])[..., 0] + D * x


def test_the_selective_scan_of_a_method():
    x, model = data(3), nn.Sequential(MambaBlock(), nn.Linear(3, 1)).double()
    (row,) = rl.layers(model)
    assert (row.cell, row.state_axes) == ("mamba", (("channel", 3), ("state_unit", 2)))
    trace = rl.trace(model, x, loss=last_squares)
    loss = last_squares(model(x))
    assert_is_right(trace, trace["0"], model[0].taps, loss)


class OtherScan(nn.Module):
    """A method of the same name with other arguments."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 3, batch_first=True)

    def forward(self, x):
        return self.selective_scan(self.rnn(x)[0], 2.0)

    def selective_scan(self, x, factor):
        return x * factor


def test_a_method_of_the_same_name_is_left_alone():
    model = OtherScan()
    assert [row.cell for row in rl.layers(model)] == ["gru"]
    assert rl.trace(model, torch.randn(2, 4, 3), loss=last_squares).certificate.state == "passed"


def heinsen_associative_scan_log(log_coeffs, log_values):
    """Compute the states of a minGRU in log space; Heinsen 2023, arXiv:2311.06281, eq. 2."""
    total = log_coeffs.cumsum(1)
    return (total + (log_values - total).logcumsumexp(1)).exp()


class MinGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(3, 8, bias=False)

    def forward(self, x, prev_hidden=None):
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, -1)
        return heinsen_associative_scan_log(-functional.softplus(gate), -functional.softplus(-gate) + hidden)


def test_the_log_scan_of_a_min_gru():
    x, model = data(3), nn.Sequential(MinGRU(), nn.Linear(4, 1)).double()
    (row,) = rl.layers(model)
    assert (row.cell, row.state_axes) == ("log_scan", (("channel", 4),))
    trace = rl.trace(model, x, loss=last_squares)
    hidden, gate = model[0].to_hidden_and_gate(x).chunk(2, -1)
    state, states = torch.zeros(2, 4, dtype=torch.float64), []
    for t in range(9):
        state = torch.sigmoid(-gate[:, t]) * state + torch.sigmoid(gate[:, t]) * torch.exp(hidden[:, t])
        states.append(state)
    assert_is_right(trace, trace["0"], states, last_squares(model[1](torch.stack(states, 1))))


class ParallelMemory(nn.Module):
    """An mLSTM in the parallel form of the package xlstm; Beck et al. 2024, arXiv:2405.04517, eqs. 75-81."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_heads=2, embedding_dim=4)
        self.igate, self.fgate, self.outnorm = nn.Linear(12, 2), nn.Linear(12, 2), nn.Identity()

    def forward(self, q, k, v):
        gates = torch.cat([q, k, v], -1)
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in (q, k, v))
        write, forget = self.igate(gates).mT, functional.logsigmoid(self.fgate(gates)).mT.cumsum(-1)
        logs = forget[..., :, None] - forget[..., None, :] + write[..., None, :]
        logs = logs.masked_fill(~torch.ones(logs.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        largest = logs.amax(-1, keepdim=True)
        scores = (q @ k.mT) * 2**-0.5 * torch.exp(logs - largest)
        scale = torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-largest)) + 1e-6
        return self.outnorm(scores / scale @ v).transpose(1, 2).flatten(2)


ParallelMemory.__module__, ParallelMemory.__name__ = "xlstm.blocks.mlstm.cell", "mLSTMCell"


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.cell = nn.Linear(3, 12), ParallelMemory()

    def forward(self, x):
        return self.cell(*self.project(x).chunk(3, -1))


def test_the_parallel_memory_of_an_mlstm():
    x, model = data(3), Memory().double()
    assert [(row.cell, row.state_axes[1:]) for row in rl.layers(model)] == [("mlstm", (("key", 2), ("value", 3)))]
    trace = rl.trace(model, x, loss=last_squares)
    assert trace.certificate.state == "passed"
    assert max(check.residual for check in trace.certificate.checks) <= 1e-12


class DiagonalSystem(nn.Module):
    """The part of an S5 that runs one sequence in the package s5-pytorch; Smith et al. 2023, arXiv:2208.04933."""

    def __init__(self, liquid, bidir, degree):
        super().__init__()
        self.Lambda = nn.Parameter(torch.complex(-torch.rand(3), torch.randn(3)))
        self.B, self.C = (nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)) for _ in range(2))
        self.D, self.log_step = nn.Parameter(torch.rand(3)), nn.Parameter(torch.randn(3) - 1)
        self.liquid, self.bidir, self.degree = liquid, bidir, degree

    def get_BC_tilde(self):  # noqa: N802  the package's name
        return self.B, self.C

    def discretize(self, rate, matrix, step):
        decay = torch.exp(rate * step)
        return decay, ((decay - 1) / rate)[..., None] * matrix

    def states_of(self, signal, step_scale, state=None):
        """Return the states after each step of one sequence."""
        step = (step_scale[:, None] if step_scale.ndim else step_scale) * torch.exp(self.log_step)
        decay, matrix = self.discretize(self.Lambda, self.B, step)
        added = (matrix**self.degree @ signal.to(decay.dtype)[..., None])[..., 0]
        decay, states = (decay + added if self.liquid else decay).expand_as(added), []
        for t in range(len(signal)):
            state = added[t] if not t and state is None else decay[t] * state + added[t]
            states.append(state)
        return torch.stack(states)

    def forward(self, signal, step_scale=1.0, state=None, return_state=False):
        states = self.states_of(signal, step_scale, state)
        if self.bidir:
            states = states + self.states_of(signal.flip(0), step_scale).flip(0)
        output = (states @ self.C.mT).real + self.D * signal
        return (output, states[-1]) if return_state else output


class S5(nn.Module):
    def __init__(self, liquid=False, bidir=False, degree=1):
        super().__init__()
        self.seq = DiagonalSystem(liquid, bidir, degree)

    def forward(self, signal, step_scale=1.0, state=None, return_state=False):
        scale = step_scale if torch.is_tensor(step_scale) else torch.ones(len(signal)) * step_scale
        given = (signal, scale) if state is None else (signal, scale, state)

        def one(signal, scale, state=None):
            return self.seq(signal, step_scale=scale, state=state, return_state=return_state)

        return torch.vmap(one)(*given)


S5.__module__, S5.__name__ = "s5.s5_model", "S5"


class S5InTwo(nn.Module):
    """Runs the first four steps, then the others from the state that was returned."""

    def __init__(self, scale=1.0, **options):
        super().__init__()
        self.s5, self.head, self.scale = S5(**options), nn.Linear(3, 1), scale

    def forward(self, x):
        scales = [self.scale] * 2
        if torch.is_tensor(self.scale) and self.scale.dim() == 2:
            scales = [self.scale[:, :4], self.scale[:, 4:]]
        first, state = self.s5(x[:, :4], step_scale=scales[0], return_state=True)
        return self.head(torch.cat([first, self.s5(x[:, 4:], step_scale=scales[1], state=state)], 1))


def complex_double(model):
    """Convert the numbers of a model to double precision, complex ones to complex."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.complex128 if weight.is_complex() else torch.float64)
    return model


def step_scales(kind):
    shape = {"sample": (2,), "step": (2, 9)}.get(kind)
    return 0.7 if shape is None else torch.rand(shape, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("options", [{}, {"liquid": True}, {"degree": 2}])
@pytest.mark.parametrize("scale", ["number", "sample", "step"])
def test_an_s5_that_runs_each_sample_in_a_vmap(scale, options):
    x = data(3)
    model = complex_double(S5InTwo(step_scales(scale), **options))
    assert [(row.cell, row.state_axes) for row in rl.layers(model)] == [("s5", (("state_unit", 3),))]
    trace = rl.trace(model, x, loss=last_squares)
    scales = model.scale if torch.is_tensor(model.scale) else torch.ones(2) * model.scale
    states = [torch.stack([model.s5.seq.states_of(*of_sample) for of_sample in zip(x, scales, strict=True)])]
    assert_same_states(trace["s5#1"].state, states[0][:, 4:].unbind(1))
    assert_gradients_are_autograds(model, x, trace)


def assert_gradients_are_autograds(model, x, trace):
    """Compare loss, gradients by input and weights, and time Jacobian with those of the untouched model."""
    assert trace.certificate.state == "passed"
    source = x.clone().requires_grad_()
    loss = last_squares(model(source))
    expected = torch.autograd.grad(loss, [source, *model.parameters()])
    found = rl.gradients(model, x, loss=last_squares, wrt="input")
    np.testing.assert_allclose(found, expected[0], atol=1e-12 * float(expected[0].abs().max()))
    by_weight = rl.gradients(model, x, loss=last_squares)
    for (name, _), gradient in zip(model.named_parameters(), expected[1:], strict=True):
        layer, _, key = name.rpartition(".")
        np.testing.assert_allclose(by_weight[layer][key], gradient.numpy(), atol=1e-12 * float(gradient.abs().max()))
    full = torch.autograd.functional.jacobian(model, x)
    jacobian = torch.stack([full[n, ..., n, :, :] for n in range(2)])
    np.testing.assert_allclose(rl.jacobian(model, x), jacobian, atol=1e-12 * float(jacobian.abs().max()))


def test_an_s5_of_both_directions_has_gradients_and_no_recurrent_layer():
    x, model = data(3), complex_double(nn.Sequential(S5(bidir=True), nn.Linear(3, 1)))
    source = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(last_squares(model(source)), source)
    np.testing.assert_allclose(rl.gradients(model, x, loss=last_squares, wrt="input"), expected, atol=1e-12)
    assert not rl.layers(model)


class LRU(nn.Module):
    """The LRU of the package lru-pytorch, which loops over samples; Orvieto et al. 2023, arXiv:2303.06349."""

    def __init__(self):
        super().__init__()
        self.nu_log, self.theta_log, self.gamma_log = (nn.Parameter(torch.randn(4) - 1) for _ in range(3))
        self.B = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.C = nn.Parameter(torch.randn(2, 4, dtype=torch.complex64))
        self.D, self.state = nn.Parameter(torch.randn(2, 3)), torch.zeros(4, dtype=torch.complex128)

    def states_of(self, steps, state):
        modulus, phase = torch.exp(-torch.exp(self.nu_log)), torch.exp(self.theta_log)
        for step in steps:
            added = torch.exp(self.gamma_log)[:, None] * self.B @ step.to(self.B.dtype)
            state = torch.polar(modulus, phase) * state + added
            yield state

    def forward(self, input, state=None):
        self.state = self.state if state is None else state
        outputs = torch.empty(*input.shape[:-1], 2)
        for number, steps in enumerate(input if input.dim() == 3 else input[None]):
            for t, state in enumerate(self.states_of(steps, self.state)):
                outputs[(number, t) if input.dim() == 3 else t] = (self.C @ state).real + self.D @ steps[t]
            self.state = torch.zeros_like(self.state)
        return outputs


LRU.__module__, LRU.__name__ = "LRU_pytorch.LRU", "LRU"


@pytest.fixture
def double_by_default():
    """Let tensors that a model makes have double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_an_lru_that_loops_over_samples(double_by_default):
    x, model = data(3), complex_double(nn.Sequential(LRU(), nn.Linear(2, 1)))
    assert [(row.cell, row.state_axes) for row in rl.layers(model)] == [("lru", (("state_unit", 4),))]
    trace = rl.trace(model, x, loss=last_squares)
    states = [torch.stack(list(model[0].states_of(steps, torch.zeros(4)))) for steps in x]
    assert_same_states(trace["0"].state, torch.stack(states).unbind(1))
    assert_gradients_are_autograds(model, x, trace)


def test_an_lru_from_a_state_is_refused():
    class FromState(nn.Module):
        def __init__(self):
            super().__init__()
            self.lru = LRU()

        def forward(self, x):
            return self.lru(x, torch.ones(4, dtype=torch.complex64))

    with pytest.raises(rl.errors.UnsupportedError, match="state that only its first sample gets") as error:
        rl.trace(FromState(), data(3).float(), loss=last_squares)
    assert "without state= every sample starts from zeros" in str(error.value)


def test_an_lru_on_one_sequence_is_refused_and_runs_as_the_error_says(double_by_default):
    class One(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.lru, self.call = complex_double(LRU()), call

        def forward(self, x):
            return self.call(self.lru, x[0])[None]

    with pytest.raises(rl.errors.UnsupportedError, match=r"lru\(x\[None\]\)\[0\] runs one sequence"):
        rl.trace(One(lambda lru, x: lru(x)), data(3)[:1], loss=last_squares)
    trace = rl.trace(One(lambda lru, x: lru(x[None])[0]), data(3)[:1], loss=last_squares)
    assert "lru" in trace
    assert trace.certificate.state == "passed", trace.certificate


def no_triton(*arguments, **options):
    raise RuntimeError("0 active drivers ([]). There should only be one.")


class DeltaLayer(nn.Module):
    """A gated delta rule with a norm, whose kernels run on accelerators alone."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_k_dim, self.head_v_dim = 2, 3, 2
        self.parts, self.weight = nn.Linear(3, 20), nn.Parameter(torch.rand(2))
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2))

    def coefficients(self, x):
        q, k, v, g, beta = self.parts(x).split([6, 6, 4, 2, 2], -1)
        return q.unflatten(-1, (2, 3)), k.unflatten(-1, (2, 3)), v.unflatten(-1, (2, 2)), g, beta

    def forward(self, x):
        q, k, v, g, beta = self.coefficients(x)
        module = sys.modules["fla.layers.gated_deltanet"]
        options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        gates = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        y, _ = chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options, **gates)  # noqa: F821
        return module.norm(y, self.weight).flatten(2)


@pytest.fixture
def delta_layer(monkeypatch):
    """Return a layer of a package that is named as flash-linear-attention is and built as it is."""

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, use_qk_l2norm_in_kernel=False, **kwargs):
        return no_triton()

    class LayerNormFunction:
        apply = no_triton

    names = ("fla", "fla.layers", "fla.layers.gated_deltanet", "fla.modules.norm.layernorm")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    norms, layers = modules["fla.modules.norm.layernorm"], modules["fla.layers.gated_deltanet"]
    norms.LayerNormFunction = LayerNormFunction
    layers.norm = lambda x, w: norms.LayerNormFunction.apply(x, w, None, None, 1e-5, False, False, True)
    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule"
    layers.chunk_gated_delta_rule = chunk_gated_delta_rule
    vars(layers)["sys"] = sys
    # The method looks its kernel up in the module of its class, as methods of the package do.
    forward = FunctionType(DeltaLayer.forward.__code__, vars(layers))
    layer_class = type("GatedDeltaNet", (DeltaLayer,), {"__module__": layers.__name__, "forward": forward})
    return layer_class().double()


def test_triton_kernels_run_as_equations_on_a_cpu(delta_layer):
    x = data(3, steps=70)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        delta_layer(x)
    (row,) = rl.layers(delta_layer)
    assert (row.cell, row.state_axes) == ("gated_delta", (("head", 2), ("key", 3), ("value", 2)))
    trace = rl.trace(delta_layer, x, loss=last_squares)
    q, k, v, g, beta = delta_layer.coefficients(x)
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    decay = torch.exp(-torch.exp(delta_layer.A_log) * functional.softplus(g + delta_layer.dt_bias))
    state, states, outputs = torch.zeros(2, 2, 3, 2, dtype=torch.float64), [], []
    for t in range(70):
        state = decay[:, t, :, None, None] * state
        removed = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = torch.sigmoid(beta[:, t])[..., None] * (v[:, t] - removed)
        state = state + k[:, t, :, :, None] * write[:, :, None]
        states.append(state)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * 3**-0.5, state))
    y = torch.stack(outputs, 1)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * delta_layer.weight
    assert_is_right(trace, trace[row.name], states, last_squares(y.flatten(2)))
    assert any("Triton kernels" in note for note in trace.notes)
    with pytest.raises(RuntimeError, match="0 active drivers"):  # everything is restored
        delta_layer(x)


def slstm_step(inputs, recurrent, bias, states, constants):
    """Run a step of an sLSTM, which takes a branch of its own where n is 0 in all rows, as the package does."""
    _, c, n, m = states.unbind(0)
    i, f, z, o = (inputs + recurrent + bias).unflatten(-1, (4, -1)).unbind(1)
    kept = m + functional.logsigmoid(f)
    new_m = i if torch.all(n == 0.0) else torch.maximum(i, kept)
    write, forget = torch.exp(i - new_m).clamp(max=1.0), torch.exp(kept - new_m).clamp(max=1.0)
    c, n = forget * c + write * torch.tanh(z), forget * n + write
    return torch.stack([torch.sigmoid(o) * c / n, c, n, new_m]), None


def slstm_forward(x, states, R, b, pointwise_forward, constants=None, taps=None):
    """Run an sLSTM of the package xlstm: kernel R (head, gates * unit, unit)."""
    heads, _, width = R.shape
    all_states = [states]
    for inputs in x:
        y = states[0].reshape(-1, heads, 1, width) @ R.mT
        recurrent = y.reshape(-1, heads, 4, width).transpose(1, 2).flatten(1)
        states = pointwise_forward(inputs, recurrent, b, states, constants)[0]
        if taps is not None:
            taps.append(states.unbind(0))
            states = torch.stack(taps[-1])
        all_states.append(states)
    return torch.stack(all_states, 1), states, None


class ScalarMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.kernel = nn.Linear(3, 16), nn.Parameter(torch.randn(2, 8, 2) * 0.5)
        self.bias = nn.Parameter(torch.randn(16) * 0.3)

    def forward(self, x, **taps):
        function = sys.modules["xlstm.blocks.slstm.cell"].slstm_forward
        inputs, start = self.inputs(x).transpose(0, 1), x.new_zeros(4, len(x), 4)
        return function(inputs, start, self.kernel, self.bias, slstm_step, constants={}, **taps)[0][0, 1:].transpose(
            0, 1
        )


def test_the_loop_of_an_slstm(monkeypatch):
    module = ModuleType("xlstm.blocks.slstm.cell")
    module.slstm_forward = slstm_forward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x, first, second = data(3), ScalarMemory().double(), ScalarMemory().double()
    model, taps = nn.Sequential(first, nn.Linear(4, 3).double(), second), []
    trace = rl.trace(model, x, loss=last_squares)
    assert trace.certificate.state == "passed"
    loss = last_squares(second(model[1](first(x, taps=taps)), taps=taps))
    for layer, steps in (("slstm_loop", taps[:9]), ("slstm_loop_1", taps[9:])):
        for index, name in enumerate(("hidden", "state_1", "state_2", "state_3")):
            states = [parts[index] for parts in steps]
            grads = torch.autograd.grad(loss, states, retain_graph=True, materialize_grads=True)
            assert_same_states(trace[layer][name], states)
            assert_same_states(trace[layer][f"{name}_grad"], grads)
    assert module.slstm_forward is slstm_forward


def elementwise_recurrence_naive(
    u, x, weight, bias, initial, activation, units, both, skip, scale=None, dropout=None, padding=None, taps=None
):
    """Run an SRU of the package sru: steps before samples, the last axis of ``u`` has three or four parts."""
    u = u.view(*x.shape[:2], units, -1)
    shortcut = x * scale if u.shape[-1] == 3 else u[..., 3]
    (wf, wr), (bf, br), c, hidden = weight.view(2, -1), bias.view(2, -1), initial, []
    for t in range(len(x)):
        forget, reset = torch.sigmoid(u[t, ..., 1] + bf + c * wf), torch.sigmoid(u[t, ..., 2] + br + c * wr)
        c = u[t, ..., 0] * (1 - forget) + c * forget
        if taps is not None:
            taps.append(c)
        y = torch.tanh(c) if activation else c
        hidden.append(y * reset + shortcut[t] * (1 - reset) if skip else y * reset)
    return torch.stack(hidden), c


class SimpleUnits(nn.Module):
    def __init__(self, parts, activation, skip):
        super().__init__()
        self.project, self.options = nn.Linear(4, 4 * parts), (activation, 4, False, skip)
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x, **taps):
        x, function = x.transpose(0, 1), sys.modules["sru.modules"].elementwise_recurrence_naive
        tensors = (self.project(x), x, self.weight, self.bias, torch.zeros_like(x[0]))
        y, _ = function(*tensors, *self.options, torch.tensor([1.5], dtype=x.dtype), **taps)
        return y.transpose(0, 1)


@pytest.mark.parametrize(
    ("parts", "activation", "skip"), [(3, 0, True), (4, 1, True), (3, 1, False)], ids=["plain", "tanh", "no skip"]
)
def test_the_loop_of_an_sru(monkeypatch, parts, activation, skip):
    module = ModuleType("sru.modules")
    module.elementwise_recurrence_naive = elementwise_recurrence_naive
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x, model, taps = data(4), SimpleUnits(parts, activation, skip).double(), []
    trace = rl.trace(model, x, loss=torch.sum)
    assert trace.certificate.state == "passed"
    loss = model(x, taps=taps).sum()
    assert_same_states(trace["sru_loop"].hidden, taps)
    assert_same_states(trace["sru_loop"].hidden_grad, torch.autograd.grad(loss, taps))


def with_kernel(torch_function):
    """Return a function of transformers that calls a kernel where its package can be imported."""

    @functools.wraps(torch_function)
    def wrapped(*args, **kwargs):
        return no_triton()

    return wrapped


def test_models_of_transformers_run_where_the_kernels_can_be_imported(monkeypatch):
    from scan_models import build, tokens
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    wrapped = with_kernel(module.torch_chunk_gated_delta_rule.__wrapped__)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", wrapped)
    model, ids = build("qwen3_next"), tokens(2, 8)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(ids)
    trace = rl.trace(model, ids, loss=lambda output: (output.logits[:, -1] ** 2).sum())
    assert trace.certificate.state == "passed"
    assert module.torch_chunk_gated_delta_rule is wrapped
