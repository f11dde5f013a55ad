"""Taps and vector-Jacobian products of an autodiff engine, without Keras layers, equal closed-form derivatives."""

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
def autodiff_engine():
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


def chained_taps(arguments, tap):
    """Return sin(x), with two taps of x in a row: both have the same gradient."""
    return {"y": ops.sin(tap("second", tap("first", arguments[0])))}, None


def test_the_gradient_of_two_taps_is_freed(autodiff_engine):
    gradients = autodiff_engine.gradients(lambda tap: (ops.sum(chained_taps(tensors(X), tap)[0]["y"]), None))[2]
    for key in ("first", "second"):
        np.testing.assert_allclose(autodiff_engine.to_array(gradients[key]), np.cos(X), rtol=1e-12)
    reference = weakref.ref(gradients["second"])
    del gradients
    gc.collect()
    assert reference() is None


@pytest.mark.only_on("tensorflow")
@pytest.mark.parametrize("in_graph", [False, True])
def test_no_graph_outlives_its_program(autodiff_engine, in_graph):
    """No graph outlives its program, also if TensorFlow can take its gradients only inside the graph (``in_graph``)."""

    def run():
        linear = autodiff_engine.linearise(chained_taps, tensors(X), Memo())
        (cotangent,) = tensors(np.ones((5, 3)))
        gradients = linear._pull_in_graph({"y": cotangent}) if in_graph else linear.vjp({"y": cotangent[None]})
        for key in ("first", "second"):
            np.testing.assert_allclose(np.reshape(gradients[key], (5, 3)), np.cos(X), rtol=1e-12)

    run()
    before = graphs_left()
    run()
    run()
    assert graphs_left() == before


@pytest.mark.parametrize("count", [1, 4])
def test_cotangents_are_pulled_to_every_boundary(autodiff_engine, count):
    linear = autodiff_engine.linearise(program, tensors(X, A, B), Memo())
    cotangents = RNG.normal(size=(count, 5, 2))
    gradients = linear.vjp({"y": cotangents})
    middle_grad = cotangents @ B.T
    np.testing.assert_allclose(autodiff_engine.to_array(gradients["middle"]), middle_grad, rtol=1e-12)
    np.testing.assert_allclose(
        autodiff_engine.to_array(gradients["x"]), (middle_grad * np.cos(X @ A)) @ A.T, rtol=1e-12
    )
    assert gradients["idle"] is None


def test_several_targets_add_up(autodiff_engine):
    linear = autodiff_engine.linearise(program, tensors(X, A, B), Memo())
    y_cotangent, middle_cotangent = RNG.normal(size=(2, 5, 2)), RNG.normal(size=(2, 5, 4))
    gradients = linear.vjp({"y": y_cotangent, "middle": middle_cotangent})
    expected = y_cotangent @ B.T + 2 * middle_cotangent * np.sin(X @ A)
    np.testing.assert_allclose(autodiff_engine.to_array(gradients["middle"]), expected, rtol=1e-12)


def test_gradients_of_a_loss(autodiff_engine):
    x, a = tensors(X, A)

    def program_loss(tap):
        return ops.sum(ops.square(ops.matmul(tap("x", x), a))), {"beside": a}

    loss, aux, gradients = autodiff_engine.gradients(program_loss)
    np.testing.assert_array_equal(autodiff_engine.to_array(aux["beside"]), A)
    np.testing.assert_allclose(autodiff_engine.to_array(loss), np.sum((X @ A) ** 2), rtol=1e-12)
    np.testing.assert_allclose(autodiff_engine.to_array(gradients["x"]), 2 * X @ A @ A.T, rtol=1e-12)


def test_what_is_attached_to_a_tensor_goes_along():
    same_shapes = []

    def record_shapes(old, new):
        same_shapes.append(tuple(old.shape) == tuple(new.shape))
        return new

    linear = engine(keras.backend.backend(), record_shapes).linearise(program, tensors(X, A, B), Memo())
    linear.vjp({"y": np.ones((1, 5, 2))})
    assert len(same_shapes) >= 3
    assert all(same_shapes)


def cell_step(x, states, weights):
    """Return (h'^2, [h']) with the new state h' = tanh(x W + h U)."""
    new = ops.tanh(ops.matmul(x, weights["W"]) + ops.matmul(states[0], weights["U"]))
    return ops.square(new), [new]


def test_a_step_of_a_cell(autodiff_engine):
    w, u, h = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 4)), RNG.normal(size=(5, 4))
    x, h_, w_, u_ = tensors(X, h, w, u)
    inputs = (x, [h_], {"W": w_, "U": u_})
    per_step = autodiff_engine.per_step(cell_step)
    new = np.tanh(X @ w + h @ u)
    np.testing.assert_allclose(autodiff_engine.to_array(per_step.step(*inputs)[0]), new**2, rtol=1e-12)
    output_cotangent, state_cotangent = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 4))
    cotangents = tensors(output_cotangent, state_cotangent)
    x_grad, state_grads, weight_grads = per_step.vjp(inputs, (cotangents[0], [cotangents[1]]))
    produced = 2 * new * output_cotangent + state_cotangent
    np.testing.assert_allclose(
        autodiff_engine.to_array(per_step.produced(inputs, (cotangents[0], [cotangents[1]]))[0]),
        produced,
        rtol=1e-12,
    )
    preactivation_grad = produced * (1 - new**2)
    np.testing.assert_allclose(autodiff_engine.to_array(x_grad), preactivation_grad @ w.T, rtol=1e-12)
    np.testing.assert_allclose(autodiff_engine.to_array(state_grads[0]), preactivation_grad @ u.T, rtol=1e-12)
    np.testing.assert_allclose(autodiff_engine.to_array(weight_grads["U"]), h.T @ preactivation_grad, rtol=1e-12)
    jacobian, _ = per_step.jacobian(inputs)
    state_jacobian = (1 - new**2)[:, :, None] * u.T  # (sample, new unit, old unit)
    expected = np.concatenate([state_jacobian, 2 * new[:, :, None] * state_jacobian], axis=1)
    np.testing.assert_allclose(autodiff_engine.to_array(jacobian), expected, rtol=1e-12, atol=1e-14)
