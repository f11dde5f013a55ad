"""Time Jacobians of recurrences with diagonal steps, computed for all units at once, against autograd."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

SAMPLES, STEPS, RAW, FEATURES, UNITS = 2, 6, 2, 3, 4
X = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, RAW))


class Cell(nn.Module):
    width = UNITS

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.8 * torch.randn(*shape, dtype=torch.float64)))


class Minimal(Cell):
    def __init__(self):
        super().__init__(w=(FEATURES, 2 * UNITS), b=(2 * UNITS,))

    def forward(self, x, h):
        z, n = (x @ self.w + self.b).chunk(2, dim=-1)
        return torch.lerp(h, n, torch.sigmoid(z))


class Independent(Cell):
    def __init__(self):
        super().__init__(w=(FEATURES, UNITS), u=(UNITS,))

    def forward(self, x, h):
        return torch.tanh(x @ self.w + self.u * h)


class Rotating(Cell):
    width = 2 * UNITS

    def __init__(self):
        modes = dict.fromkeys(("nu", "theta", "gamma"), (UNITS,))
        super().__init__(**modes, re=(FEATURES, UNITS), im=(FEATURES, UNITS))

    def forward(self, x, state):
        turn = torch.polar(torch.exp(-torch.exp(self.nu)), torch.exp(self.theta))
        into = torch.complex(x @ self.re, x @ self.im) * torch.exp(self.gamma)
        new = turn * torch.complex(*state.chunk(2, dim=-1)) + into
        return torch.cat([new.real, new.imag], dim=-1)


rl.cells.register(Minimal, rl.cells.MinGRU, weights={"kernel": "w", "bias": "b"})
rl.cells.register(
    Independent, rl.cells.IndRNN, weights={"kernel": "w", "recurrent_weight": "u"}, options={"activation": "tanh"}
)
mode_names = {name: name for name in ("nu", "theta", "gamma")}
rl.cells.register(Rotating, rl.cells.LRU, weights=mode_names | {"input_real": "re", "input_imaginary": "im"})


class Model(nn.Module):
    """A dense layer at every step, the recurrence, and a readout of every step."""

    def __init__(self, cell):
        super().__init__()
        self.below, self.cell = nn.Linear(RAW, FEATURES).double(), cell
        self.head = nn.Linear(cell.width, 2).double()

    def forward(self, x, record=None):
        x, h, states = self.below(x), x.new_zeros(len(x), self.cell.width), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        if record is not None:
            record.extend(states)
        return self.head(torch.stack(states, 1))


@pytest.fixture(params=[Minimal, Independent, Rotating], ids=lambda cell: cell.__name__)
def model(request):
    torch.manual_seed(1)
    return Model(request.param())


def reference_blocks(model):
    """Return the Jacobian of all states by the input (sample, out_time, in_time, unit, feature) by autograd."""
    blocks = np.zeros((SAMPLES, STEPS, STEPS, model.cell.width, RAW))
    x, states = torch.tensor(X, requires_grad=True), []
    model(x, states)
    for t, u in itertools.product(range(STEPS), range(model.cell.width)):
        blocks[:, t, :, u] = torch.autograd.grad(states[t][:, u].sum(), x, retain_graph=True)[0].numpy()
    return blocks


MEASURES = {
    "norm": lambda g: np.sqrt((g**2).sum((-2, -1))),
    "spectral": lambda g: np.linalg.svd(g, compute_uv=False)[..., 0],
    "sum": lambda g: g.sum((-2, -1)),
    "mean": lambda g: g.mean((-2, -1)),
    "abs_mean": lambda g: np.abs(g).mean((-2, -1)),
}


def assert_close(actual, expected, bound=1e-11):
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("mode", ["auto", "reverse", "forward"])
def test_states_by_the_input_are_those_of_torch(model, mode):
    expected = reference_blocks(model)
    jacobian = rl.jacobian(model, X, of="cell.hidden", mode=mode)
    assert_close(jacobian.transpose("sample", "out_time", "in_time", "out_unit", "in_feature").values, expected)
    for measure, measure_of in MEASURES.items():
        actual = rl.jacobian(model, X, of="cell.hidden", measure=measure, mode=mode)
        assert_close(actual.transpose("sample", "out_time", "in_time").values, measure_of(expected), 1e-8)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_some_steps_and_means_over_samples_are_those_of_torch(model, mode):
    steps = {"out_time": [4, 1], "in_time": [3, 0, 1]}
    expected = MEASURES["norm"](reference_blocks(model))[:, [4, 1]][:, :, [3, 0, 1]]
    norms = rl.jacobian(model, X, of="cell.hidden", measure="norm", at=steps, mode=mode)
    assert_close(norms.transpose("sample", "out_time", "in_time").values, expected)
    norms = rl.jacobian(model, X, of="cell.hidden", measure="norm", at=steps, across="mean", mode=mode)
    assert_close(norms.transpose("out_time", "in_time").values, expected.mean(0))


def test_readouts_and_initial_states_are_those_of_torch(model):
    x, start = torch.tensor(X, requires_grad=True), torch.zeros(SAMPLES, model.cell.width, dtype=torch.float64)
    output = model(x)
    rows = [torch.autograd.grad(output[:, t].mean(-1).sum(), x, retain_graph=True)[0] for t in range(STEPS)]
    jacobian = rl.jacobian(model, X, reduce="mean")
    assert_close(
        jacobian.squeeze().transpose("sample", "out_time", "in_time", "in_feature").values, torch.stack(rows, 1).numpy()
    )

    def final_state(h):
        for t in range(STEPS):
            h = model.cell(model.below(torch.tensor(X))[:, t], h)
        return h.sum(0)

    expected = torch.autograd.functional.jacobian(final_state, start).permute(1, 0, 2).numpy()
    jacobian = rl.jacobian(model, X, of="cell.final_hidden", wrt="cell.initial_hidden")
    assert_close(np.asarray(jacobian).reshape(expected.shape), expected)


def test_a_tolerance_leaves_out_no_more_than_it_says(model):
    expected = MEASURES["norm"](reference_blocks(model))
    norms = rl.jacobian(model, X, of="cell.hidden", measure="norm", rtol=1e-2, mode="reverse")
    assert np.abs(norms.transpose("sample", "out_time", "in_time").values - expected).max() <= 0.02 * expected.max()
