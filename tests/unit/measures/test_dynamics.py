"""State transfer, Lyapunov exponents and fixed points against linear cells, finite differences and hand calculation."""

import cells
import numpy as np
import pytest
import scipy.stats

from rnnlens.measures import dynamics
from rnnlens.measures import transfer as transfers
from rnnlens.measures.dynamics import find_points, iterate, step_map
from rnnlens.recurrence.cells import SimpleRNN
from rnnlens.recurrence.replay import replay

RNG = np.random.default_rng(0)


def orthogonal(size, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def run_of(cell, *, samples=6, steps=120, mask=None, order="forward", seed=1):
    features = cell.kernel.shape[0]
    x = np.random.default_rng(seed).normal(size=(samples, steps, features))
    start = tuple(np.zeros((samples, size)) for size in cell.state_sizes)
    return replay(cell, x, start, mask=mask, order=order)


def linear_cell(kernel):
    input_kernel = np.random.default_rng(2).normal(size=(3, len(kernel)))
    return SimpleRNN(input_kernel, kernel, activation="linear")


def random_cell(kind, units=7, features=3, **options):
    gates = {"simple_rnn": 1, "gru": 3, "lstm": 4}[kind]
    normal = np.random.default_rng(3).normal
    return cells.make_cell(
        kind,
        normal(size=(features, gates * units)),
        0.4 * normal(size=(units, gates * units)),
        normal(size=gates * units),
        **options,
    )


@pytest.mark.parametrize("rate", [0.8, 0.97, 1.05])
def test_transfer_of_a_scaled_rotation(rate):
    transfer = transfers.state_transfer(run_of(linear_cell(rate * orthogonal(16))))
    exponent, error = transfer.leading_exponent()
    # The norm is in units of each unit's spread: the ratio varies a little around rate ** lag.
    assert np.exp(exponent) == pytest.approx(rate, rel=0.02)
    assert error < 0.01
    assert transfer.kappa[60] == pytest.approx(rate**60, rel=0.5)


def test_a_sample_that_is_not_finite_says_nothing_of_the_others():
    cell, x = random_cell("simple_rnn"), np.random.default_rng(1).normal(size=(6, 120, 3))

    def transfer_of(x):
        return transfers.state_transfer(replay(cell, x, (np.zeros((6, 7)),)))

    expected = transfer_of(x)
    x[2, 70] = np.nan
    transfer = transfer_of(x)
    assert np.isnan(transfer.log_ratio[1:, 2]).all()
    other_samples = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(transfer.log_ratio[:40, other_samples], expected.log_ratio[:40, other_samples], atol=0.3)
    np.testing.assert_allclose(transfer.kappa, np.median(np.exp(transfer.log_ratio[:, other_samples]), axis=1))
    assert np.isfinite(transfer.quartiles()).all()
    assert transfer.leading_exponent()[0] == pytest.approx(expected.leading_exponent()[0], abs=0.1)
    x[:, 70] = np.nan
    all_missing = transfer_of(x)
    assert all_missing.kappa[0] == 1
    assert np.isnan(all_missing.kappa[1:]).all()
    assert all_missing.growth == 0


def test_masked_steps_carry_everything():
    mask = np.ones((6, 120), bool)
    mask[:, 60:] = False
    transfer = transfers.state_transfer(run_of(linear_cell(0.5 * orthogonal(8)), mask=mask))
    np.testing.assert_allclose(transfer.kappa[:61], 1, rtol=1e-12)
    assert transfer.kappa[70] < 0.01


@pytest.mark.parametrize(
    "cell",
    [
        random_cell("simple_rnn"),
        random_cell("gru"),
        random_cell("gru", reset_after=False),
        random_cell("lstm"),
    ],
    ids=["simple_rnn", "gru", "gru reset before", "lstm"],
)
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_step_jacobians_against_finite_differences(cell, order):
    run = run_of(cell, samples=2, steps=6, order=order)
    cuts, size, step = np.cumsum(cell.state_sizes)[:-1], sum(cell.state_sizes), 1e-6
    for t, a in zip(run.steps(), transfers.step_jacobians(run), strict=True):
        before = np.concatenate(run.state_before(t), axis=1)

        def next_state(s, t=t):
            projected = cell.project(run.input[:, t], None, np)
            return np.concatenate(cell.step(projected, np.split(s, cuts, 1), None, np)[1], axis=1)

        numeric = [(next_state(before + step * e) - next_state(before - step * e)) / (2 * step) for e in np.eye(size)]
        np.testing.assert_allclose(a, np.stack(numeric, axis=2), atol=1e-8)


@pytest.mark.parametrize("radii", [(0.9, 0.7, 0.5, 0.3), (1.1, 1.0, 0.6, 0.2)])
def test_exponents_of_a_normal_matrix_are_those_of_its_eigenvalues(radii):
    basis = orthogonal(4)
    spectrum = dynamics.lyapunov_spectrum(run_of(linear_cell(basis @ np.diag(radii) @ basis.T), steps=400))
    np.testing.assert_allclose(spectrum.exponents, np.log(radii), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("steps", [1, 4])
def test_exponents_of_fewer_steps_than_blocks_have_a_standard_error(steps):
    run = run_of(linear_cell(np.diag([0.9, 0.7, 0.5, 0.3])), samples=3, steps=steps)
    spectrum = dynamics.lyapunov_spectrum(run, burn_in=0.0)
    assert np.isfinite(spectrum.stderr).all()
    np.testing.assert_allclose(spectrum.exponents.sum(), np.log([0.9, 0.7, 0.5, 0.3]).sum(), rtol=1e-9)


def test_leading_exponent_of_a_chaotic_network_against_two_trajectories():
    units = 48
    kernel = 2.5 / units**0.5 * np.random.default_rng(5).normal(size=(units, units))
    cell = SimpleRNN(0.1 * np.random.default_rng(6).normal(size=(1, units)), kernel)
    run = run_of(cell, samples=8, steps=600)
    spectrum = dynamics.lyapunov_spectrum(run, count=3)
    # Direct: follow a small perturbation of each trajectory, rescaled to its size after every step.
    difference = 1e-8 * np.random.default_rng(7).normal(size=(8, units))
    size = np.linalg.norm(difference, axis=1, keepdims=True)
    rates = []
    for t in run.steps():
        projected = cell.project(run.input[:, t], None, np)
        near = cell.step(projected, (run.state_before(t)[0] + difference,), None, np)[1][0]
        difference_after = near - run.states[0][:, t]
        size_after = np.linalg.norm(difference_after, axis=1, keepdims=True)
        rates.append(np.log(size_after / size))
        difference = difference_after * (size / size_after)
    direct = float(np.mean(rates[60:]))
    assert direct > 0.05
    assert abs(spectrum.exponents[0] - direct) < 2 * spectrum.stderr[0] + 1e-3


@pytest.mark.parametrize(
    ("exponents", "dimension"), [((-0.1, -0.2), 0), ((0.1, -0.2), 1.5), ((0.2, 0.0, -0.1, -0.4), 3.25), ((1.0, 1.0), 2)]
)
def test_kaplan_yorke(exponents, dimension):
    assert dynamics.kaplan_yorke_dimension(np.array(exponents)) == pytest.approx(dimension)


def test_effective_rank():
    assert dynamics.effective_rank(np.eye(5)) == pytest.approx(5)
    assert dynamics.effective_rank(np.ones((4, 4))) == pytest.approx(1)


def test_theil_sen_ignores_an_outlier():
    profile = 0.8 ** np.arange(40)
    profile[0] = 50
    assert transfers.theil_sen(profile) == pytest.approx(np.log(0.8), rel=0.02)


@pytest.mark.parametrize("count", [2, 3, 40, 401])
def test_theil_sen_equals_scipy(count):
    profile = np.exp(-0.1 * np.arange(count) + np.random.default_rng(count).normal(size=count))
    seen = np.linspace(0, count - 1, min(count, 400)).round().astype(int)  # more points are thinned
    expected = scipy.stats.theilslopes(np.log(profile[seen]), seen).slope
    assert transfers.theil_sen(profile) == pytest.approx(expected, rel=1e-14)


def scalar_tanh(weight):
    return SimpleRNN(np.ones((1, 1)), np.array([[weight]]))


def test_fixed_points_of_one_tanh_unit():
    """tanh(w h) = h has one solution for w <= 1 and three for w > 1; the middle one is then unstable with slope w."""
    starts = np.linspace(-1, 1, 41)[:, None]
    one_point = find_points(step_map(scalar_tanh(0.5), np.zeros(1)), starts)
    np.testing.assert_allclose(one_point.states, [[0]], atol=1e-9)
    three_points = find_points(step_map(scalar_tanh(2.0), np.zeros(1)), starts)
    edge = 0.957504024082275  # solution of tanh(2 h) = h by bisection
    np.testing.assert_allclose(np.sort(three_points.states[:, 0]), [-edge, 0, edge], atol=1e-9)
    middle = int(np.abs(three_points.states[:, 0]).argmin())
    assert three_points.eigenvalues[middle, 0] == pytest.approx(2)
    assert three_points.stable.sum() == 2
    assert (three_points.speed <= 1e-16).all()


def test_a_cycle_of_two():
    map_ = step_map(scalar_tanh(-2.0), np.zeros(1))
    starts = np.linspace(-1, 1, 41)[:, None]
    assert len(find_points(map_, starts).states) == 1
    cycle = find_points(iterate(map_, 2), starts)
    assert cycle.stable.sum() == 2
    assert np.sort(np.abs(cycle.states[:, 0]))[-1] == pytest.approx(0.957504024082275)


def test_fixed_points_of_an_lstm_are_mapped_onto_themselves():
    cell = random_cell("lstm", units=5)
    map_ = step_map(cell, np.zeros(3))
    points = find_points(map_, np.random.default_rng(0).normal(size=(64, 10)))
    assert points.fixed.any()
    np.testing.assert_allclose(map_.step(points.states[points.fixed]), points.states[points.fixed], atol=1e-8)


def test_each_sample_may_end_at_a_step_of_its_own():
    """With an end step per sample, the transfer of one tanh unit is the product of w (1 - h_t^2) from there back."""
    cell = SimpleRNN(np.ones((1, 1)), np.full((1, 1), 0.9))
    run = run_of(cell, samples=3, steps=20)
    end_steps = np.array([19, 7, 12])
    log_ratio = transfers.state_transfer(run, ends=end_steps).log_ratio
    assert log_ratio.shape == (21, 3)
    for i, end in enumerate(end_steps):
        gains = np.log(0.9 * (1 - run.states[0][i, : end + 1, 0] ** 2))[::-1]
        np.testing.assert_allclose(log_ratio[: end + 2, i], np.append(0, np.cumsum(gains)), rtol=1e-9, atol=1e-12)
        assert np.isnan(log_ratio[end + 2 :, i]).all()
