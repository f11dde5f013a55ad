"""RMS over samples, reach and decay, lags of dL/dW, lifetimes and eigenvalues of steps, against closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rnnlens as rl
from rnnlens.measures import profiles as m
from rnnlens.measures.profiles import finite_median, finite_quartiles, quartiles


def test_rms_of_shapes_by_hand():
    values = np.array([[3.0, -6.0], [40.0, 10.0], [0.0, 0.0]])  # the last sample, without gradient, is not counted
    np.testing.assert_allclose(m.rms_of_shapes(values), [np.sqrt((0.25 + 1) / 2), np.sqrt((1 + 1 / 16) / 2)])


@given(st.integers(0, 2**32 - 1))
def test_the_size_of_a_sample_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    values, scale = rng.normal(size=(4, 5, 2)), 10.0 ** rng.uniform(-20, 20, size=(4, 1, 1))
    np.testing.assert_allclose(m.rms_of_shapes(values * scale), m.rms_of_shapes(values), rtol=1e-12)
    for curve, scaled_curve in zip(
        *(vars(m.peak_band(np.abs(v))).values() for v in (values, values * scale)), strict=True
    ):
        np.testing.assert_allclose(curve, scaled_curve, rtol=1e-12)


def test_what_is_not_counted_does_not_matter():
    values = np.array([[1.0, 2.0, 99.0], [4.0, 1.0, 1.0]])
    mask = np.array([[True, True, False], [True, True, True]])
    np.testing.assert_allclose(
        m.rms_of_shapes(values, mask), [np.sqrt((0.25 + 1) / 2), np.sqrt((1 + 1 / 16) / 2), 0.25]
    )
    np.testing.assert_allclose(m.peak_band(values, mask).median, [0.75, 0.625, 0.25])
    assert np.isnan(m.rms_of_shapes(values, mask & np.array([True, True, False]))[2])
    assert np.isnan(m.peak_band(values, mask & np.array([True, True, False])).median[2])


def test_a_missing_value_stays_missing_in_the_rms_and_spoils_no_other():
    values = np.array([[1.0, np.nan, 2.0], [1.0, 1.0, 2.0]])
    rms = m.rms_of_shapes(values)
    assert np.isnan(rms).tolist() == [False, True, False]
    assert rms[[0, 2]] == pytest.approx([0.5, 1.0])


def test_the_typical_sample_has_the_median_loss():
    assert m.typical_first([5.0, 1.0, 3.0, 2.0, 4.0]).tolist() == [2, 3, 4, 1, 0]
    assert m.typical_first([np.nan, 1.0, 3.0, 2.0])[[0, -1]].tolist() == [3, 0]


def test_lorenz_curve_and_who_carries_half():
    np.testing.assert_allclose(m.lorenz([3.0, 1.0, np.nan, 0.0]), [0, 0, 0.25, 1])
    assert m.carriers(np.ones(10)) == 0.5
    assert m.carriers([0, 0, 0, 1.0]) == 0.25
    assert np.isnan(m.carriers(np.zeros(3)))


def test_only_what_is_far_out_is_an_outlier():
    normal = np.random.default_rng(0).normal(size=200)
    assert m.far_out(normal) is None
    assert m.far_out([*normal, 20.0]) == 200
    assert m.far_out([*normal, -20.0, np.nan]) == 200
    assert m.far_out([1.0, 1.0, 1.0, 1.0, 2.0]) is None  # the quartiles are equal


@pytest.mark.parametrize("rate", [0.3, 0.9, 1.0])
def test_reach_and_decay_of_a_geometric_gradient(rate):
    norms = np.array([[1.0], [1e6]]) * rate ** np.arange(40.0)
    squares = np.cumsum(rate ** (2 * np.arange(40.0)))
    assert m.gradient_reach(norms) == int(np.argmax(squares >= 0.95 * squares[-1])) + 1
    assert m.gradient_decay(norms) == pytest.approx(rate)


def test_a_spike_at_the_last_step_neither_sets_the_decay_nor_ends_the_reach():
    norms = 0.95 ** np.arange(60.0)[None, :]
    norms[0, 0] = 1.5
    assert m.gradient_decay(norms) == pytest.approx(0.95, abs=1e-3)
    assert m.gradient_reach(norms) > 20
    assert rl.measures.half_life(norms[0]) < 9  # the spike shortens the half-life


def test_lags_of_a_gradient():
    norms = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]])
    shares = m.lag_shares(norms)
    assert np.isnan(shares[0]).all()
    np.testing.assert_allclose(shares[1], [0.5, 0.75, 1.0])
    np.testing.assert_allclose(m.lag_shares(norms, runs_back=True)[1], [0.25, 0.5, 1.0])


def test_what_gates_keep_and_own_diagonals():
    forget = np.array([[[0.5], [0.8], [0.5]]])
    np.testing.assert_allclose(m.kept_by_gates(forget)[0, :, 0], [0.5, 0.4, 0.2])
    np.testing.assert_allclose(m.kept_by_gates(forget, [[True, False, True]])[0, :, 0], [0.5, 0.5, 0.25])
    np.testing.assert_array_equal(m.own_diagonal(np.arange(8.0).reshape(2, 2, 2)), [[0, 3], [4, 7]])


def test_sensitivity_is_gradient_times_spread():
    gradient, x = np.random.default_rng(0).normal(size=(2, 6, 4, 3))
    np.testing.assert_allclose(m.input_sensitivity(gradient, x), np.linalg.norm(gradient * x.std(axis=0), axis=-1))


def test_medians_leave_out_what_is_not_finite():
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.inf, np.nan]])
    assert finite_median(values)[0] == 2
    assert np.isnan(finite_median(values)[1])
    np.testing.assert_allclose(finite_quartiles(values)[::2, 0], [1.5, 2.5])
    assert quartiles([1.0, 2.0, 3.0, np.nan]) == (1.5, 2.0, 2.5)


def test_eigenvalues_of_steps_are_those_of_the_dense_jacobian():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = torch.nn.RNN(2, 4, batch_first=True).double()
    x = torch.randn(3, 6, 2, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cell

        def forward(self, batch):
            return self.rnn(batch)[0]

    result = rl.step_eigenvalues(Model(), x, steps=3)
    assert result.time.values.tolist() == [0, 2, 5]
    states = cell(x)[0].detach().numpy()
    w = cell.weight_hh_l0.detach().numpy()
    for sample in range(3):
        for index, step in enumerate(result.time.values):
            dense = (1 - states[sample, step, :, None] ** 2) * w  # tanh: diag(1 - h^2) W
            expected = np.linalg.eigvals(dense)
            values = (result.eigenvalue_real + 1j * result.eigenvalue_imag).values[sample, index]
            np.testing.assert_allclose(np.sort_complex(values), np.sort_complex(expected), atol=1e-10)
            assert (np.diff(np.abs(values)) <= 1e-12).all()
    with pytest.raises(rl.errors.LayerNotFoundError):
        rl.step_eigenvalues(Model(), x, layer="lstm")
