"""Cells from papers, written as torch modules and registered in one line, against autograd.

The modules follow the papers and share no code with the equations that are tested.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

import rnnlens as rl

FEATURES, UNITS, STEPS = 3, 4, 5
X = np.random.default_rng(0).normal(size=(2, STEPS, FEATURES))


class RandomParameters(nn.Module):
    """A module of randomly drawn parameters, given by name and shape."""

    sizes = (UNITS,)

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.7 * torch.randn(*shape, dtype=torch.float64)))


class Peephole(RandomParameters):
    sizes = (2, UNITS)

    def __init__(self):
        shapes = {"w": (FEATURES, 4 * UNITS), "u": (2, 4 * UNITS), "b": (4 * UNITS,), "p": (UNITS, 2)}
        super().__init__(**shapes, w_i=(UNITS,), w_f=(UNITS,), w_o=(UNITS,))

    def forward(self, x, state):
        h, c = state
        i, f, g, o = (x @ self.w + h @ self.u + self.b).split(UNITS, dim=-1)
        i, f = torch.sigmoid(i + self.w_i * c), torch.sigmoid(f + 1 + self.w_f * c)
        c = torch.clamp(f * c + i * torch.tanh(g), -0.7, 0.7)
        h = torch.sigmoid(o + self.w_o * c) * torch.tanh(c)
        return torch.clamp(h @ self.p, -0.4, 0.4), c


class Coupled(RandomParameters):
    sizes = (UNITS, UNITS)

    def __init__(self):
        super().__init__(w=(FEATURES, 3 * UNITS), u=(UNITS, 3 * UNITS), b=(3 * UNITS,))

    def forward(self, x, state):
        h, c = state
        f, g, o = (x @ self.w + h @ self.u + self.b).split(UNITS, dim=-1)
        c = torch.lerp(torch.tanh(g), c, torch.sigmoid(f))
        return torch.sigmoid(o) * torch.tanh(c), c


class Normalised(RandomParameters):
    sizes = (UNITS, UNITS)

    def __init__(self):
        shapes = dict.fromkeys(("g_x", "g_h", "b"), (4 * UNITS,))
        super().__init__(w=(FEATURES, 4 * UNITS), u=(UNITS, 4 * UNITS), **shapes, g_c=(UNITS,), b_c=(UNITS,))

    def forward(self, x, state):
        h, c = state
        size = (4 * UNITS,)
        z = layer_norm(x @ self.w, size, self.g_x, self.b) + layer_norm(h @ self.u, size, self.g_h)
        i, f, g, o = z.split(UNITS, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(layer_norm(c, (UNITS,), self.g_c, self.b_c)), c


class MinimalGRU(RandomParameters):
    def __init__(self):
        super().__init__(w_z=(FEATURES, UNITS), w_h=(FEATURES, UNITS), b_z=(UNITS,), b_h=(UNITS,))

    def forward(self, x, h):
        z = torch.sigmoid(x @ self.w_z + self.b_z)
        return (1 - z) * h + z * (x @ self.w_h + self.b_h)


class MinimalLSTM(RandomParameters):
    def __init__(self):
        super().__init__(w_i=(FEATURES, UNITS), w_f=(FEATURES, UNITS), w_h=(FEATURES, UNITS))

    def forward(self, x, h):
        i, f = torch.sigmoid(x @ self.w_i), torch.sigmoid(x @ self.w_f)
        return f / (f + i) * h + i / (f + i) * (x @ self.w_h)


class Linear(RandomParameters):
    sizes = (2 * UNITS,)

    def __init__(self):
        modes = dict.fromkeys(("nu_log", "theta_log", "gamma_log"), (UNITS,))
        super().__init__(**modes, b_re=(UNITS, FEATURES), b_im=(UNITS, FEATURES))

    def forward(self, x, state):
        lam = torch.exp(torch.complex(-torch.exp(self.nu_log), torch.exp(self.theta_log)))
        old = torch.complex(*state.chunk(2, dim=-1))
        new = lam * old + torch.exp(self.gamma_log) * (x.to(old.dtype) @ torch.complex(self.b_re, self.b_im).T)
        return torch.cat([new.real, new.imag], dim=-1)


class Independent(RandomParameters):
    def __init__(self):
        super().__init__(w=(FEATURES, UNITS), u=(UNITS,), b=(UNITS,))

    def forward(self, x, h):
        return torch.relu(x @ self.w + self.u * h + self.b)


class OldGRU(RandomParameters):
    """The GRUCell of TensorFlow 1, with its two matrices."""

    def __init__(self):
        super().__init__()
        for name, size in (("gates", 2 * UNITS), ("candidate", UNITS)):
            parameters = RandomParameters(kernel=(FEATURES + UNITS, size), bias=(size,))
            setattr(self, name, parameters)

    def forward(self, x, h):
        preactivation = torch.cat([x, h], dim=-1) @ self.gates.kernel + self.gates.bias
        r, u = torch.sigmoid(preactivation).chunk(2, dim=-1)
        n = torch.tanh(torch.cat([x, r * h], dim=-1) @ self.candidate.kernel + self.candidate.bias)
        return u * h + (1 - u) * n


class TorchGRU(RandomParameters):
    """A copy of ``nn.GRUCell`` that is no subclass of it."""

    def __init__(self):
        rows = 3 * UNITS
        super().__init__(weight_ih=(rows, FEATURES), weight_hh=(rows, UNITS), bias_ih=(rows,), bias_hh=(rows,))

    def forward(self, x, h):
        return torch.gru_cell(x, h, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)


PAPERS = {
    Peephole: (
        rl.cells.PeepholeLSTM,
        {"kernel": "w", "recurrent_kernel": "u", "bias": "b", "projection": "p"}
        | {f"peephole_{name}": f"w_{name[0]}" for name in ("input", "forget", "output")},
        {"cell_clip": 0.7, "projection_clip": 0.4, "forget_bias": 1.0},
    ),
    Coupled: (rl.cells.CIFG, {"kernel": "w", "recurrent_kernel": "u", "bias": "b"}, None),
    Normalised: (
        rl.cells.LayerNormLSTM,
        {"kernel": "w", "recurrent_kernel": "u", "gain_input": "g_x", "gain_recurrent": "g_h", "bias": "b"}
        | {"gain_cell": "g_c", "shift_cell": "b_c"},
        None,
    ),
    MinimalGRU: (rl.cells.MinGRU, {"kernel": ("w_z", "w_h"), "bias": ("b_z", "b_h")}, None),
    MinimalLSTM: (rl.cells.MinLSTM, {"kernel": ("w_i", "w_f", "w_h")}, None),
    Linear: (
        rl.cells.LRU,
        {"nu": "nu_log", "theta": "theta_log", "gamma": "gamma_log"}
        | {"input_real": "b_re.T", "input_imaginary": "b_im.T"},
        None,
    ),
    Independent: (rl.cells.IndRNN, {"kernel": "w", "recurrent_weight": "u", "bias": "b"}, None),
    OldGRU: (rl.cells.GRU, rl.cells.gru_tensorflow1(UNITS), {"reset_after": False}),
    TorchGRU: (rl.cells.GRU, rl.cells.gru_torch, {"reset_after": True}),
}
for module, (equations, weights, options) in PAPERS.items():
    rl.cells.register(module, equations, weights=weights, options=options)


class Model(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.sizes[0], 2).double()

    def forward(self, x, record=None):
        state = tuple(x.new_full((x.shape[0], n), 0.1) for n in self.cell.sizes)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state if len(self.cell.sizes) > 1 else state[0])
            state = state if isinstance(state, tuple) else (state,)
            if record is not None:
                record.append(state)
        return self.head(state[0])


@pytest.fixture(params=PAPERS, ids=lambda cell: cell.__name__)
def model(request):
    torch.manual_seed(3)
    return Model(request.param())


def loss(output):
    return (output**2).sum() + output.sum()


def assert_close(computed, reference):
    reference = np.asarray(reference.detach() if hasattr(reference, "detach") else reference)
    np.testing.assert_allclose(np.asarray(computed), reference, rtol=1e-9, atol=1e-11)


def test_trace_has_the_states_and_total_gradients_of_torch(model):
    x, states = torch.tensor(X, requires_grad=True), []
    value = loss(model(x, states))
    trace = rl.trace(model, X, loss=loss)
    layer = trace["cell"]
    for i, name in enumerate(("hidden", "cell")[: len(model.cell.sizes)]):
        values = [state[i] for state in states]
        assert_close(layer[name], torch.stack(values, 1))
        assert_close(layer[f"{name}_grad"], torch.stack(torch.autograd.grad(value, values, retain_graph=True), 1))
    assert_close(layer.input_grad, torch.autograd.grad(value, x)[0])
    assert trace.certificate.state == "passed"
    assert all(check.residual <= check.bound for check in trace.checks)


def test_weights_and_gradients_are_those_of_torch(model):
    loss(model(torch.tensor(X))).backward()
    _, weights, _ = PAPERS[type(model.cell)]
    if not isinstance(weights, dict):  # a function: its result on torch's gradients is the expected value
        named_grads = {name: p.grad.numpy() for name, p in model.cell.named_parameters()}
        expected = weights(named_grads)
    else:
        expected = {}
        for weight_name, parameter_names in weights.items():
            paths = [parameter_names] if isinstance(parameter_names, str) else parameter_names
            grads = [getattr(model.cell, path.removesuffix(".T")).grad for path in paths]
            transposed = [grad.T if path.endswith(".T") else grad for grad, path in zip(grads, paths, strict=True)]
            expected[weight_name] = torch.cat(transposed, dim=-1)
    weight_grads = rl.weights(model, X, loss=loss, by_time=True)["cell"]
    for name, grad in expected.items():
        assert_close(weight_grads[f"{name}_grad"].sum("time").values.reshape(grad.shape), grad)
        assert_close(np.asarray(rl.gradients(model, X, loss=loss, wrt=f"cell/{name}")).reshape(grad.shape), grad)
    norms = rl.weights(model, X, loss=loss, by_time=True, measure="norm")["cell"]
    for name, grad in expected.items():
        squares = (weight_grads[f"{name}_grad"] ** 2).sum(
            [d for d in weight_grads[f"{name}_grad"].dims if d not in ("time", "gate")]
        )
        assert_close(norms[f"{name}_grad_norm"], squares**0.5)
        assert np.isfinite(np.asarray(grad)).all()


def test_the_time_jacobian_is_that_of_torch(model):
    expected = torch.autograd.functional.jacobian(model, torch.tensor(X))
    jacobian = rl.jacobian(model, X)
    for n in range(len(X)):
        assert_close(jacobian[n].transpose("out_unit", "in_time", "in_feature"), expected[n, :, n])
    record = []
    output = model(torch.tensor(X), record)
    for i, name in enumerate(("hidden", "cell")[: len(model.cell.sizes)]):
        states = [state[i] for state in record]
        rows = [torch.stack(torch.autograd.grad(output[:, j].sum(), states, retain_graph=True), 1) for j in range(2)]
        state_jacobian = rl.jacobian(model, X, wrt=f"cell.{name}")
        assert_close(state_jacobian.transpose("sample", "out_unit", "in_time", ...), torch.stack(rows, 1))


def test_dynamics_are_those_of_the_module(model):
    def step(s):
        state = s.split(list(model.cell.sizes), dim=-1)
        after = model.cell(torch.zeros(len(s), FEATURES).double(), state if len(state) > 1 else state[0])
        return torch.cat(after, dim=-1) if isinstance(after, tuple) else after

    fixed_points = rl.fixed_points(model, X, layer="cell", input="zero")
    points = torch.tensor(fixed_points.states.values[fixed_points.fixed.values])
    np.testing.assert_allclose(step(points).detach(), points, atol=1e-6)
