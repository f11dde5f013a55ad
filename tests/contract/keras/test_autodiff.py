"""Taps and vector-Jacobian products of an autodiff engine, without Keras layers, against closed-form derivatives."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops
from left_behind import graphs_left

from rnnlens.autodiff import Memo, engine

RNG = np.random.default_rng(0)
A, B, X = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 2)), RNG.normal(size=(5, 3))


@pytest.fixture
def here():
    """Return the engine of this process; it attaches nothing to replaced tensors."""
    return engine(keras.backend.backend())


def tensors(*arrays):
    return [ops.convert_to_tensor(a, dtype="float64") for a in arrays]


def program(arguments, tap):
    """Return two targets, sin(x A) B and the square of sin(x A). The tap ``idle`` leads to neither."""
    x, a, b = arguments
    tap("idle", x)
    middle = tap("middle", ops.sin(ops.matmul(tap("x", x), a)))
    return {"y": ops.matmul(middle, b), "middle": ops.square(middle)}, {"x": x}


def chained(arguments, tap):
    """Return sin(x), with two taps of x in a row: both have the same gradient."""
    return {"y": ops.sin(tap("second", tap("first", arguments[0])))}, None


def test_the_gradient_of_two_taps_is_freed(here):
    found = here.gradients(lambda tap: (ops.sum(chained(tensors(X), tap)[0]["y"]), None))[2]
    for key in ("first", "second"):
        np.testing.assert_allclose(here.to_array(found[key]), np.cos(X), rtol=1e-12)
    held = weakref.ref(found["second"])
    del found
    gc.collect()
    assert held() is None


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("inside", [False, True])
def test_no_graph_outlives_its_program(here, inside):
    """``inside``: the gradient is taken in the graph, where TensorFlow cannot take it of the compiled graph."""

    def run():
        linear = here.linearise(chained, tensors(X), Memo())
        (seed,) = tensors(np.ones((5, 3)))
        found = linear._pull_in_graph({"y": seed}) if inside else linear.vjp({"y": seed[None]})
        for key in ("first", "second"):
            np.testing.assert_allclose(np.reshape(found[key], (5, 3)), np.cos(X), rtol=1e-12)

    run()
    before = graphs_left()
    run()
    run()
    assert graphs_left() == before


@pytest.mark.parametrize("count", [1, 4])
def test_cotangents_are_pulled_to_every_boundary(here, count):
    linear = here.linearise(program, tensors(X, A, B), Memo())
    seeds = RNG.normal(size=(count, 5, 2))
    found = linear.vjp({"y": seeds})
    middle = seeds @ B.T
    np.testing.assert_allclose(here.to_array(found["middle"]), middle, rtol=1e-12)
    np.testing.assert_allclose(here.to_array(found["x"]), (middle * np.cos(X @ A)) @ A.T, rtol=1e-12)
    assert found["idle"] is None


def test_several_targets_add_up(here):
    linear = here.linearise(program, tensors(X, A, B), Memo())
    one, other = RNG.normal(size=(2, 5, 2)), RNG.normal(size=(2, 5, 4))
    found = linear.vjp({"y": one, "middle": other})
    expected = one @ B.T + 2 * other * np.sin(X @ A)
    np.testing.assert_allclose(here.to_array(found["middle"]), expected, rtol=1e-12)


def test_gradients_of_a_loss(here):
    x, a = tensors(X, A)

    def run(tap):
        return ops.sum(ops.square(ops.matmul(tap("x", x), a))), {"beside": a}

    loss, aux, found = here.gradients(run)
    np.testing.assert_array_equal(here.to_array(aux["beside"]), A)
    np.testing.assert_allclose(here.to_array(loss), np.sum((X @ A) ** 2), rtol=1e-12)
    np.testing.assert_allclose(here.to_array(found["x"]), 2 * X @ A @ A.T, rtol=1e-12)


def test_what_is_attached_to_a_tensor_goes_along():
    kept = []

    def keep(old, new):
        kept.append(tuple(old.shape) == tuple(new.shape))
        return new

    linear = engine(keras.backend.backend(), keep).linearise(program, tensors(X, A, B), Memo())
    linear.vjp({"y": np.ones((1, 5, 2))})
    assert len(kept) >= 3
    assert all(kept)


def step(x, states, weights):
    """Return (h'^2, [h']) with the new state h' = tanh(x W + h U)."""
    new = ops.tanh(ops.matmul(x, weights["W"]) + ops.matmul(states[0], weights["U"]))
    return ops.square(new), [new]


def test_a_step_of_a_cell(here):
    w, u, h = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 4)), RNG.normal(size=(5, 4))
    x, h_, w_, u_ = tensors(X, h, w, u)
    inputs = (x, [h_], {"W": w_, "U": u_})
    single = here.per_step(step)
    new = np.tanh(X @ w + h @ u)
    np.testing.assert_allclose(here.to_array(single.step(*inputs)[0]), new**2, rtol=1e-12)
    of_output, of_state = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4))
    given = tensors(of_output, of_state)
    by_x, by_state, by_weight = single.vjp(inputs, (given[0], [given[1]]))
    produced = 2 * new * of_output + of_state
    np.testing.assert_allclose(here.to_array(single.produced(inputs, (given[0], [given[1]]))[0]), produced, rtol=1e-12)
    before = produced * (1 - new**2)
    np.testing.assert_allclose(here.to_array(by_x), before @ w.T, rtol=1e-12)
    np.testing.assert_allclose(here.to_array(by_state[0]), before @ u.T, rtol=1e-12)
    np.testing.assert_allclose(here.to_array(by_weight["U"]), h.T @ before, rtol=1e-12)
    rows, _ = single.jacobian(inputs)
    slope = (1 - new**2)[:, :, None] * u.T  # (sample, new unit, old unit)
    expected = np.concatenate([slope, 2 * new[:, :, None] * slope], axis=1)
    np.testing.assert_allclose(here.to_array(rows), expected, rtol=1e-12, atol=1e-14)
