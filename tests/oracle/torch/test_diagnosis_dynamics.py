"""``rl.fixed_points`` and ``rl.compare`` on networks whose fixed points are known: lines, rings, repellers, saddles."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError


class KernelRNN(nn.Module):
    """An nn.RNN with the given recurrent kernel; all its other weights are zero."""

    def __init__(self, kernel, nonlinearity="tanh"):
        super().__init__()
        units = len(kernel)
        self.rnn = nn.RNN(1, units, batch_first=True, nonlinearity=nonlinearity)
        self.head = nn.Linear(units, 1)
        with torch.no_grad():
            for weight in self.rnn.parameters():
                weight.zero_()
            self.rnn.weight_hh_l0.copy_(torch.as_tensor(kernel))

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


X = np.random.default_rng(0).normal(size=(64, 10, 1)).astype("float32")


def test_a_line_attractor_is_a_line_of_marginal_points():
    net = KernelRNN(np.array([[0.5, 0.5], [0.5, 0.5]]), "relu")  # keeps the mean of two units that are not negative
    starts = np.random.default_rng(1).uniform(0, 3, size=(200, 2))
    points = rl.fixed_points(net, X, input="zero", starts=starts)
    assert points.curves == ["line"]
    assert set(points.kinds) == {"marginal"}
    assert "a line of" in repr(points)
    assert "saddle" not in repr(points)
    assert not points.stable.any()


class OneSlowMode(nn.Module):
    """A linear step of eight units in a loop, of one eigenvalue near 1 and others of 0.3, in float32."""

    def __init__(self, eigenvalue):
        super().__init__()
        rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
        kernel = rotation @ np.diag([eigenvalue, *[0.3] * 7]) @ rotation.T
        self.kernel = nn.Parameter(torch.tensor(kernel, dtype=torch.float32))
        self.inward = nn.Parameter(torch.tensor(rotation[:, :1].T, dtype=torch.float32))

    def step(self, u, h):
        return h @ self.kernel.T + u @ self.inward

    def forward(self, u):
        h = u.new_zeros(len(u), 8)
        for t in range(u.shape[1]):
            h = rl.torch.step(self.step, u[:, t], h, name="rate")
        return h.sum(1, keepdim=True)


U = torch.as_tensor(np.random.default_rng(0).normal(size=(64, 30, 1)).astype("float32"))


@pytest.mark.parametrize(("seed", "most"), [(0, 128), (0, 512), (1, 512), (2, 512)])
def test_collinear_pieces_are_one_line(seed, most):
    points = rl.fixed_points(OneSlowMode(1.0), U, input="zero", seed=seed, most=most)
    assert points.curves == ["line"]
    assert repr(points).splitlines()[0].count(f"{len(points.kinds)} marginal") == 2


@pytest.mark.parametrize(("eigenvalue", "kind"), [(0.9999, "stable"), (1.0001, "saddle"), (1.0005, "saddle")])
def test_a_slow_line_is_no_marginal_line_in_single_precision(eigenvalue, kind):
    points = rl.fixed_points(OneSlowMode(eigenvalue), U, input="zero", most=128)
    kinds = np.array(points.kinds)
    assert set(kinds) <= {kind, "slow"}
    assert (kinds == kind).any()
    assert "marginal" not in repr(points)


def ring_kernel(units=48, gain=3.0):
    """Return cosine connections, which have a ring of fixed points (Ben-Yishai, Bar-Or, Sompolinsky 1995)."""
    angle = 2 * np.pi * np.arange(units) / units
    return gain * 2 / units * np.cos(angle[:, None] - angle[None, :])


@pytest.mark.full
def test_a_ring_attractor_is_a_ring():
    angle = 2 * np.pi * np.arange(48) / 48
    phase = np.random.default_rng(0).uniform(0, 2 * np.pi, size=(300, 1))
    points = rl.fixed_points(
        KernelRNN(ring_kernel()), X, input="zero", starts=2 * np.cos(angle - phase), tolerance=1e-3
    )
    assert "ring" in points.curves
    assert points.kinds.count("marginal") > 30
    assert "a ring of" in repr(points)


def test_repellers_saddles_and_stable_points_have_their_names():
    net = KernelRNN(np.diag([2.0, 3.0]))
    starts = np.random.default_rng(0).uniform(-1, 1, size=(200, 2))
    points = rl.fixed_points(net, X, input="zero", starts=starts)
    kinds = points.kinds
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"stable": 4, "saddle": 4, "repeller": 1}
    assert points.curves == []
    origin = np.abs(points.states.values).max(axis=1).argmin()
    assert kinds[origin] == "repeller"
    assert "4 stable fixed points, 4 saddle fixed points, 1 repeller fixed point" in repr(points)


def test_saved_points_keep_their_kinds(tmp_path):
    starts = np.random.default_rng(1).uniform(0, 3, size=(100, 2))
    points = rl.fixed_points(KernelRNN(np.full((2, 2), 0.5), "relu"), X, input="zero", starts=starts)
    points.save(tmp_path / "points.nc")
    reopened = rl.open(tmp_path / "points.nc")
    assert (reopened.kinds, reopened.curves) == (points.kinds, points.curves)


class LastStep(nn.Module):
    """A recurrent layer of torch with a head on its last step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(1, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1].sum(-1, keepdim=True)


BIDIRECTIONAL = partial(nn.LSTM, bidirectional=True)


class Backwards(nn.Module):
    """The backward half of a bidirectional layer alone: a forward layer, given the steps in reverse."""

    def __init__(self, bidirectional):
        super().__init__()
        self.layer = type(bidirectional)(1, 3, batch_first=True)
        names = [name for name, _ in self.layer.named_parameters()]
        self.layer.load_state_dict({name: getattr(bidirectional, f"{name}_reverse") for name in names})

    def forward(self, x):
        return self.layer(x.flip(1))[0][:, -1].sum(-1, keepdim=True)


@pytest.fixture(params=[nn.GRU, nn.LSTM])
def two_halves(request):
    torch.manual_seed(0)
    both = LastStep(partial(request.param, bidirectional=True))
    return both, Backwards(both.layer)


def test_each_half_of_a_bidirectional_layer_has_its_lyapunov_spectrum(two_halves):
    both, backwards = two_halves
    spectrum = rl.lyapunov(both, X)
    assert spectrum.direction.values.tolist() == ["forward", "backward"]
    xr.testing.assert_allclose(spectrum.sel(direction="backward", drop=True), rl.lyapunov(backwards, X), rtol=1e-4)
    assert not np.allclose(*spectrum.exponent)


def test_each_half_of_a_bidirectional_layer_has_its_eigenvalues(two_halves):
    both, backwards = two_halves
    eigenvalues = rl.step_eigenvalues(both, X, steps=10)
    assert eigenvalues.direction.values.tolist() == ["forward", "backward"]
    assert eigenvalues.time.values.tolist() == list(range(10))
    in_reverse = rl.step_eigenvalues(backwards, X, steps=10)
    chronological = in_reverse.isel(time=slice(None, None, -1)).assign_coords(time=eigenvalues.time)
    moduli, expected = (abs(d.eigenvalue_real + 1j * d.eigenvalue_imag) for d in (eigenvalues, chronological))
    xr.testing.assert_allclose(moduli.sel(direction="backward", drop=True), expected, atol=1e-5)
    figure = rl.plot.eigenvalues(eigenvalues).figure
    assert "layer (forward and backward)" in figure.get_suptitle()
    assert f"of {moduli.size:,} outside" in figure.artists[0].get_text()
    figure = rl.plot.eigenvalues(eigenvalues.sel(direction="backward")).figure
    assert "layer (backward)" in figure.get_suptitle()


def test_fixed_points_say_which_half_was_examined(two_halves):
    both, backwards = two_halves
    points = rl.fixed_points(both, X)
    assert points.data.attrs["direction"] == "forward"
    assert points.notes == ["The backward half of 'layer' was not examined: direction='backward'."]
    assert points.notes[0] in repr(points)
    assert rl.fixed_points(backwards, X).notes == []


def test_fixed_points_of_the_backward_half_are_those_of_its_layer_alone(two_halves):
    both, backwards = two_halves
    points, alone = rl.fixed_points(both, X, direction="backward"), rl.fixed_points(backwards, X)
    assert points.data.attrs["direction"] == "backward"
    assert points.notes == ["The forward half of 'layer' was not examined: direction='forward'."]
    assert points.kinds == alone.kinds
    np.testing.assert_allclose(points.states, alone.states, atol=1e-6)
    assert not np.allclose(points.states, rl.fixed_points(both, X).states, atol=1e-2)
    with pytest.raises(InputError, match=r"no such half[\s\S]*forward or backward"):
        rl.fixed_points(both, X, direction="sideways")


def test_fixed_points_under_several_inputs_are_those_of_single_calls(two_halves):
    both, _ = two_halves
    inputs = np.random.default_rng(0).normal(size=(3, X.shape[2])).astype("float32")
    together = rl.fixed_points(both, X, input=inputs)
    np.testing.assert_array_equal(together.data.inputs, inputs)
    for i, values in enumerate(inputs):
        alone, of_input = rl.fixed_points(both, X, input=values), together.data.input_index == i
        xr.testing.assert_equal(together.states[of_input], alone.states)
        xr.testing.assert_equal(together.eigenvalues[of_input], alone.eigenvalues)
        assert [kind for kind, of in zip(together.kinds, of_input, strict=True) if of] == alone.kinds


def test_curves_under_several_inputs_stay_apart():
    layer = nn.RNN(1, 2, batch_first=True, nonlinearity="relu", bias=False)  # every state (s, 0), s >= 0, is kept
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.5]]))
        layer.weight_ih_l0.copy_(torch.tensor([[0.0], [1.0]]))
    x = torch.rand(8, 12, 1)
    starts = np.stack([np.linspace(0.1, 3, 64), np.ones(64)], axis=1)
    alone = rl.fixed_points(nn.Sequential(layer), x, input=[0.0], starts=starts)
    together = rl.fixed_points(nn.Sequential(layer), x, input=[[0.0], [0.5]], starts=starts)
    assert alone.curves == ["line"]
    assert together.curves == ["line", "line"]
    assert set(together.data.curve.values[together.data.input_index == 1]) == {1}


def side_by_side(trace, names, **direction):
    """Return the states of a traced layer at all samples and steps, (start, state)."""
    states = [trace["layer"][name].sel(direction).values for name in names]
    return np.concatenate([values.reshape(-1, values.shape[-1]) for values in states], axis=1)


@pytest.mark.parametrize(
    ("layer", "names", "direction"),
    [
        (nn.LSTM, ("hidden", "cell"), {}),
        (nn.GRU, ("hidden",), {}),
        (BIDIRECTIONAL, ("hidden", "cell"), {"direction": "forward"}),
    ],
)
def test_starts_from_a_trace_are_its_states(layer, names, direction):
    torch.manual_seed(0)
    model = LastStep(layer)
    trace = rl.trace(model, X)
    from_trace = rl.fixed_points(model, X, starts=trace)
    from_arrays = rl.fixed_points(model, X, starts=side_by_side(trace, names, **direction))
    xr.testing.assert_equal(from_trace.data, from_arrays.data)
    xr.testing.assert_equal(rl.fixed_points(model, X, starts=trace.tree).data, from_arrays.data)


def test_starts_from_a_trace_without_a_state_name_what_is_missing():
    model = LastStep(nn.LSTM)
    trace = rl.trace(model, X, quantities=["hidden"])
    with pytest.raises(InputError, match=r"(?s)no states of 'layer'.*got: +hidden.*a trace with hidden and cell"):
        rl.fixed_points(model, X, starts=trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 10**6}, "The search is too large"),
        ({"input": np.array([np.nan])}, "The input is not finite"),
        ({"starts": np.full((4, 2), np.inf)}, "The starts are not finite"),
        ({"noise": float("inf")}, "noise"),
        ({"tolerance": float("nan")}, "tolerance"),
    ],
)
def test_a_search_that_cannot_be_is_one_clear_error(change, message):
    with pytest.raises(InputError, match=message):
        rl.fixed_points(KernelRNN(np.eye(2)), X, **change)


def tap_network(lag, scale=1.0):
    kernel = np.diag(np.ones(13), -1)
    net = KernelRNN(kernel)
    with torch.no_grad():
        net.rnn.weight_ih_l0[0, 0] = 0.01
        net.head.weight.zero_()
        net.head.bias.zero_()
        net.head.weight[0, lag] = 100 * scale
    return net.eval()


def test_comparisons_print_differences_and_no_numbers_where_memory_is_unknown():
    x = np.random.default_rng(0).normal(size=(256, 20, 1)).astype("float32")
    y = x[:, -4]
    first, second = rl.diagnose(tap_network(3), x, y), rl.diagnose(tap_network(3), x, y + 0 * y)
    noise = rl.diagnose(tap_network(3), x, np.random.default_rng(1).normal(size=(256, 1)))
    fewer = rl.diagnose(tap_network(3), x[:128], y[:128])
    text = str(rl.compare({"a": first, "b": second, "noise": noise, "fewer": fewer}))
    assert "memory +0 against a (95 % CI +0 to +0)" in text
    assert "no difference of memory, as one is unknown" in text
    assert "no difference of memory, as the samples are not the same" in text
    table = rl.compare({"a": first, "noise": noise}).table
    assert np.isnan(table.memory.values[1])
    assert np.isnan(table.difference.values[1])
    assert np.isfinite(table.skill.values).all()


def test_batches_of_unequal_length_are_one_clear_error():
    x = np.random.default_rng(0).normal(size=(128, 20, 1)).astype("float32")
    batches = [(x[:64], x[:64, -4]), (x[64:, :15], x[64:, -4])]
    with pytest.raises(InputError, match="The batches differ in other axes than the number of samples"):
        rl.diagnose(tap_network(3), iter(batches))


def test_nan_born_between_two_layers_is_not_blamed_on_the_upper_one():
    class Between(nn.Module):
        """Two GRUs with sqrt(0 * h ** 2) between them: the infinite gradient of sqrt at 0, times 0, is NaN."""

        def __init__(self):
            super().__init__()
            self.low, self.high = nn.GRU(1, 3, batch_first=True), nn.GRU(3, 3, batch_first=True)

        def forward(self, x):
            return self.high(torch.sqrt(0.0 * self.low(x)[0] ** 2))[0][:, -1]

    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(4, 6, 1)).astype("float32")
    nonfinite = rl.find_nonfinite(Between(), x, np.zeros((4, 3), "float32"), loss=nn.functional.mse_loss)
    assert nonfinite.layer == "low"
    assert nonfinite.fed_by == "the backward pass between low and high"
