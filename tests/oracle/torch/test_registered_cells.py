"""Custom cells with registered equations, against autograd on the unmodified module."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens import errors

pytestmark = pytest.mark.check

FEATURES, UNITS = 3, 4
X = np.random.default_rng(0).normal(size=(2, 5, FEATURES))


class Minimal(nn.Module):
    """The minimal gated unit (arXiv:1603.09420), a linear layer per gate."""

    def __init__(self):
        super().__init__()
        self.into_f, self.into_n = nn.Linear(FEATURES, UNITS), nn.Linear(FEATURES, UNITS)
        self.from_f, self.from_n = nn.Linear(UNITS, UNITS, bias=False), nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x, h, record=None):
        z_f = self.into_f(x) + self.from_f(h)
        f = torch.sigmoid(z_f)
        z_n = self.into_n(x) + self.from_n(f * h)
        if record is not None:
            record.append((z_f, z_n))
        return (1 - f) * h + f * torch.tanh(z_n)


class MinimalGated(rl.cells.Cell):
    kind = "minimal_gated"
    gates = ("forget", "candidate")
    parameters = rl.cells.by_name(rl.cells.KERNEL, rl.cells.RECURRENT_KERNEL, rl.cells.BIAS)

    def step(self, projected, before, scale, xp):
        (h,), u = before, self.recurrent_kernel
        z_f = self.gate(projected, "forget") + h @ self.gate(u, "forget")
        f = rl.cells.sigmoid(z_f, xp)
        z_n = self.gate(projected, "candidate") + (f * h) @ self.gate(u, "candidate")
        n = xp.tanh(z_n)
        return self.record([z_f, z_n], [f, n], xp), ((1 - f) * h + f * n,)


class Coupled(nn.Module):
    """A cell with two states and one matrix for input and state; h_t depends on c_t of the same step."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(FEATURES + UNITS, 3 * UNITS)

    def forward(self, x, state):
        h, c = state
        f, n, o = self.both(torch.cat([x, h], dim=-1)).chunk(3, dim=-1)
        c = torch.sigmoid(f) * c + (1 - torch.sigmoid(f)) * torch.tanh(n)
        return torch.sigmoid(o) * torch.tanh(c), c


class CoupledCell(rl.cells.Cell):
    kind = "coupled_gates"
    gates = ("forget", "candidate", "output")
    states = ("hidden", "cell")
    parameters = rl.cells.by_name(rl.cells.KERNEL, rl.cells.RECURRENT_KERNEL, rl.cells.BIAS)

    def step(self, projected, before, scale, xp):
        h, c = before
        z = [self.gate(projected + h @ self.recurrent_kernel, name) for name in self.gates]
        f, n, o = rl.cells.sigmoid(z[0], xp), xp.tanh(z[1]), rl.cells.sigmoid(z[2], xp)
        c = f * c + (1 - f) * n
        return self.record(z, [f, n, o], xp), (o * xp.tanh(c), c)


def coupled_weights(parameters):
    """Split the joint matrix into kernel and recurrent kernel; a linear map, so it applies to gradients too."""
    matrix = parameters["both.weight"].T
    return {"kernel": matrix[:FEATURES], "recurrent_kernel": matrix[FEATURES:], "bias": parameters["both.bias"]}


def register():
    rl.cells.register(
        Minimal,
        MinimalGated,
        weights={
            "kernel": ("into_f.weight.T", "into_n.weight.T"),
            "recurrent_kernel": ("from_f.weight.T", "from_n.weight.T"),
            "bias": ("into_f.bias", "into_n.bias"),
        },
    )
    rl.cells.register(Coupled, CoupledCell, weights=coupled_weights)


register()


class Model(nn.Module):
    def __init__(self, cell, states):
        super().__init__()
        self.cell, self.head, self.states = cell, nn.Linear(UNITS, 2), states

    def forward(self, x, record=None):
        state = x.new_zeros(x.shape[0], UNITS)
        state = state if self.states == 1 else (state, state)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            if record is not None:
                record.append(state)
        return self.head(state if self.states == 1 else state[0])


@pytest.fixture(params=["minimal", "coupled"])
def model(request):
    torch.manual_seed(0)
    net = Model(Minimal(), 1) if request.param == "minimal" else Model(Coupled(), 2)
    return net.double()


def loss(output):
    return (output**2).sum() + output.sum()


def assert_close(computed, reference):
    reference = np.asarray(reference.detach() if hasattr(reference, "detach") else reference)
    np.testing.assert_allclose(np.asarray(computed), reference, rtol=1e-10, atol=1e-12)


def reference_layout(model, value_of):
    """Return ``value_of(parameter)`` for each parameter in the layout of rnnlens, written out by hand."""
    parameters = {name: value_of(p) for name, p in model.cell.named_parameters()}
    if model.states == 2:
        matrix = parameters["both.weight"].T
        return {"kernel": matrix[:FEATURES], "recurrent_kernel": matrix[FEATURES:], "bias": parameters["both.bias"]}
    cat = torch.cat
    return {
        "kernel": cat([parameters["into_f.weight"].T, parameters["into_n.weight"].T], 1),
        "recurrent_kernel": cat([parameters["from_f.weight"].T, parameters["from_n.weight"].T], 1),
        "bias": cat([parameters["into_f.bias"], parameters["into_n.bias"]]),
    }


def test_states_and_their_total_gradients(model):
    states = []
    value = loss(model(torch.tensor(X), states))
    trace = rl.trace(model, X, loss=loss)["cell"]
    names = ["hidden", "cell"][: model.states]
    for i, name in enumerate(names):
        values = [s if model.states == 1 else s[i] for s in states]
        assert_close(trace[name], torch.stack(values, 1))
        grads = torch.autograd.grad(value, values, retain_graph=True)
        assert_close(trace[f"{name}_grad"], torch.stack(grads, 1))


def test_gates_and_their_gradients():
    model = Model(Minimal(), 1).double()
    rows, inner = [], model.cell.forward
    model.cell.forward = lambda x, h: inner(x, h, rows)
    value = loss(model(torch.tensor(X)))
    grads = [torch.stack(torch.autograd.grad(value, [r[g] for r in rows], retain_graph=True), 1) for g in range(2)]
    del model.cell.forward
    trace = rl.trace(model, X, loss=loss)["cell"]
    assert list(trace.gates.gate.values) == ["forget", "candidate"]
    assert_close(trace.gate_grad, torch.stack(grads, 2))
    assert_close(trace.gate_preactivation, torch.stack([torch.stack([r[g] for r in rows], 1) for g in range(2)], 2))
    assert_close(trace.gates.sel(gate="forget"), torch.sigmoid(torch.stack([r[0] for r in rows], 1)))
    gradients = rl.gradients(model, X, loss=loss, wrt="cell.gate_preactivation")
    assert_close(gradients, torch.stack(grads, 2))


def test_weights_by_gate_and_step(model):
    loss(model(torch.tensor(X))).backward()
    values, grads = reference_layout(model, lambda p: p.detach()), reference_layout(model, lambda p: p.grad)
    weights = rl.weights(model, X, loss=loss, by_time=True)["cell"]
    for name, expected in grads.items():
        computed = weights[f"{name}_grad"]
        assert computed.sizes["time"] == X.shape[1]
        assert_close(computed.sum("time").values.reshape(expected.shape), expected)
        assert_close(weights[name].values.reshape(expected.shape), values[name])
        gradient = rl.gradients(model, X, loss=loss, wrt=f"cell/{name}")
        assert_close(np.asarray(gradient).reshape(expected.shape), expected)
        for n, sample in enumerate(
            rl.gradients(model, X, of="output", reduce="sum", per_sample=True, wrt=f"cell/{name}")
        ):
            model.zero_grad()
            model(torch.tensor(X[n : n + 1])).sum().backward()
            assert_close(np.asarray(sample).reshape(expected.shape), reference_layout(model, lambda p: p.grad)[name])


def test_the_time_jacobian(model):
    jacobian = rl.jacobian(model, X)
    expected = torch.autograd.functional.jacobian(model, torch.tensor(X))
    for n in range(len(X)):
        assert_close(jacobian[n].transpose("out_unit", "in_time", "in_feature"), expected[n, :, n])


def test_fixed_points_are_those_of_the_module(model):
    fixed_points = rl.fixed_points(model, X, layer="cell", input="zero")
    point = torch.tensor(fixed_points.states.values[fixed_points.fixed.values])
    assert len(point)

    def step(s):
        state = s if model.states == 1 else tuple(s.chunk(2, dim=-1))
        after = model.cell(torch.zeros(len(s), FEATURES).double(), state)
        return after if model.states == 1 else torch.cat(after, dim=-1)

    np.testing.assert_allclose(step(point).detach(), point, atol=1e-7)
    slope = torch.autograd.functional.jacobian(step, point[:1])[0, :, 0]
    assert_close(
        abs(fixed_points.eigenvalues[fixed_points.fixed.values][0]), np.sort(abs(np.linalg.eigvals(slope)))[::-1]
    )


def test_results_are_certified_and_leave_the_model_alone(model):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    trace = rl.trace(model, X, loss=loss)
    assert trace.certificate.state == "passed"
    assert "gradients at inputs and other weights" in trace.certificate.certified
    assert any(quantity.startswith("weights of cell, ") for quantity in trace.certificate.uncertified)
    assert all(check.residual <= check.bound for check in trace.checks)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class WithDropped(MinimalGated):
    """Equations that are not those of the module: the new state is scaled by 0.9."""

    kind = "minimal_wrong"

    def step(self, projected, before, scale, xp):
        record, (h,) = super().step(projected, before, scale, xp)
        return record, (0.9 * h,)


@pytest.fixture
def restored_registry():
    yield
    register()


def test_equations_of_something_else_are_refused(restored_registry):
    rl.cells.register(Minimal, WithDropped, weights=minimal_weights)
    with pytest.raises(errors.UnsupportedError, match="equations of WithDropped differ from Minimal in 'cell'"):
        rl.trace(Model(Minimal(), 1).double(), X, loss=loss)


def minimal_weights(parameters):
    pairs = {"kernel": "into_{}.weight", "recurrent_kernel": "from_{}.weight"}
    kernels = {
        name: np.concatenate([np.asarray(parameters[pattern.format(g)]).T for g in "fn"], 1)
        for name, pattern in pairs.items()
    }
    return kernels | {"bias": np.concatenate([np.asarray(parameters[f"into_{g}.bias"]) for g in "fn"])}


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"kernel": ("into_f.weight.T", "into_n.weight.T")}, "leaves out"),
        ({"kernel": "into.weight"}, "does not have"),
    ],
)
def test_weights_that_do_not_fit_are_named(restored_registry, weights, text):
    rl.cells.register(Minimal, MinimalGated, weights=weights)
    with pytest.raises(errors.InputError, match=text):
        rl.layers(Model(Minimal(), 1).double())


def test_what_a_class_leaves_out_is_named():
    with pytest.raises(errors.InputError, match="no step"):
        rl.cells.register(Minimal, type("Empty", (rl.cells.Cell,), {"kind": "empty"}))
    with pytest.raises(errors.InputError, match=r"keeping = 'forgets'\n.*in gates = \('forget', 'candidate'\)"):
        rl.cells.register(Minimal, type("Mine", (MinimalGated,), {"kind": "mine", "keeping": "forgets"}))
    with pytest.raises(errors.InputError, match="kind 'lstm' is already registered"):
        rl.cells.register(Minimal, type("Mine", (MinimalGated,), {"kind": "lstm"}))
    with pytest.raises(errors.InputError, match="takes a class"):
        rl.cells.register(Minimal(), MinimalGated)


def test_gradients_by_gate_values_ask_for_the_method():
    with pytest.raises(errors.UnsupportedError, match="write gate_gradient"):
        rl.gradients(Model(Minimal(), 1).double(), X, loss=loss, wrt="cell.gates")


def test_figures_have_the_names_of_its_gates(model):
    weights = rl.weights(model, X, loss=loss)
    axes = rl.plot.weights_heatmap(weights["cell"])
    texts = {text.get_text() for ax in axes for text in [*ax.texts, *ax.get_xticklabels(), ax.title]}
    texts |= {label.get_text() for ax in axes for label in ax.figure.findobj() if hasattr(label, "get_text")}
    assert {"forget", "candidate"} <= texts


class Turned(Coupled):
    """``Coupled`` with its two states in the other order."""

    def forward(self, x, state):
        h, c = super().forward(x, (state[1], state[0]))
        return h, (c, h)


def test_states_in_another_order_are_refused():
    rl.cells.register(Turned, CoupledCell, weights=coupled_weights)
    model = Model(Turned(), 2).double()
    model.forward = lambda x: model.head(_unroll(model.cell, x))
    with pytest.raises(errors.UnsupportedError, match="The equations of CoupledCell differ from Turned in 'cell'"):
        rl.trace(model, X, loss=loss)


def _unroll(cell, x):
    state = (x.new_zeros(len(x), UNITS),) * 2
    for t in range(x.shape[1]):
        output, state = cell(x[:, t], state)
    return output


class TwoSizes(nn.Module):
    """A cell with a second state of another size, which depends on the new hidden state of the same step."""

    def __init__(self):
        super().__init__()
        self.both, self.into = nn.Linear(FEATURES + UNITS, UNITS), nn.Linear(UNITS, 6, bias=False)

    def forward(self, x, h, m):
        h = torch.tanh(self.both(torch.cat([x, h], -1)) + m.mean(-1, keepdim=True))
        return h, 0.9 * m + torch.tanh(self.into(h))


class TwoSizesCell(rl.cells.Cell):
    kind = "two_sizes"
    gates = ("candidate",)
    states = ("hidden", "memory")
    parameters = rl.cells.by_name(
        rl.cells.KERNEL,
        rl.cells.RECURRENT_KERNEL,
        rl.cells.BIAS,
        rl.cells.Quantity("into_memory", ("unit", "memory_unit"), "memory kernel", "1", "from h_t to the memory"),
    )

    @property
    def state_sizes(self):
        return self.units, int(self.into_memory.shape[1])

    def step(self, projected, before, scale, xp):
        h, m = before
        z = projected + h @ self.recurrent_kernel + xp.mean(m, axis=-1, keepdims=True)
        h = xp.tanh(z)
        return self.record([z], [h], xp), (h, 0.9 * m + xp.tanh(h @ self.into_memory))


def two_sizes_weights(parameters):
    matrix = parameters["both.weight"].T
    kernels = {"kernel": matrix[:FEATURES], "recurrent_kernel": matrix[FEATURES:], "bias": parameters["both.bias"]}
    return kernels | {"into_memory": parameters["into.weight"].T}


rl.cells.register(TwoSizes, TwoSizesCell, weights=two_sizes_weights)


class TwoSizesLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = TwoSizes()

    def forward(self, x, record=None):
        h, m = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            h, m = self.cell(x[:, t], h, m)
            if record is not None:
                record.append((h, m))
        return torch.cat([h, m], -1)


def test_states_and_weights_with_names_of_their_own():
    torch.manual_seed(0)
    model, states = TwoSizesLoop().double(), []
    value = loss(model(torch.tensor(X), states))
    trace = rl.trace(model, X, loss=loss)
    for i, name in enumerate(("hidden", "memory")):
        grads = torch.stack(torch.autograd.grad(value, [s[i] for s in states], retain_graph=True), 1)
        assert_close(trace["cell"][f"{name}_grad"], grads)
        assert_close(rl.gradients(model, X, loss=loss, wrt=f"cell.{name}"), grads)
        jacobian = rl.jacobian(model, X, of=f"cell.{name}", wrt="input")
        for t in (0, 4):
            rows = torch.autograd.functional.jacobian(lambda x, t=t, i=i: _states_of(model, x)[t][i], torch.tensor(X))
            assert_close(jacobian.isel(out_time=t, sample=1), rows[1, :, 1])
    value.backward()
    memory_kernel_grad = rl.weights(model, X, loss=loss, by_time=True)["cell"].into_memory_grad
    assert memory_kernel_grad.dims == ("time", "unit", "memory_unit")
    assert_close(memory_kernel_grad.sum("time"), model.cell.into.weight.grad.T)
    restricted = rl.trace(model, X, loss=loss, quantities=["memory", "memory_grad"])
    assert_close(restricted["cell"].memory, torch.stack([s[1] for s in states], 1))
    with pytest.raises(rl.errors.QuantityNotFoundError, match=r"'memory_grad' was not computed .*: no loss was given"):
        _ = rl.trace(model, X)["cell"].memory_grad
    with pytest.raises(rl.errors.QuantityNotFoundError, match="it is not among quantities="):
        _ = rl.trace(model, X, loss=loss, quantities=["hidden"])["cell"].memory


def test_starts_from_a_trace_have_the_states_of_the_cell():
    torch.manual_seed(0)
    model = TwoSizesLoop().double()
    trace = rl.trace(model, X)
    states = np.concatenate([trace["cell"].hidden, trace["cell"].memory], axis=-1).reshape(-1, UNITS + 6)
    from_trace, from_arrays = (rl.fixed_points(model, X, starts=starts).data for starts in (trace, states))
    np.testing.assert_array_equal(from_trace["trajectory"], from_arrays["trajectory"])


def _states_of(model, x):
    states = []
    model(x, states)
    return states
