"""Certificates of a part of the samples: the gradient at the outputs, and faults in the steps of a scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_programs import mse, numbers
from unrolled_jax import difference

import rnnlens as rl
from rnnlens.adapters.jax import capture


@pytest.fixture(autouse=True)
def compare_parts(monkeypatch):
    monkeypatch.setattr(capture, "MOST_PRODUCTS", 0)


def states(params, x):
    """Return the states of a simple cell for x (sample, time, feature)."""
    step = lambda h, x_t: ((new := jnp.tanh(x_t @ params["w"] + h @ params["u"])), new)  # noqa: E731
    start = jnp.zeros((x.shape[0], 5), x.dtype)
    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


PARAMS = {"w": numbers(3, 5), "u": 0.3 * numbers(5, 5)}


def loss_of_three(outputs, target):
    first, second, again = outputs
    return (first**2 * second[..., None]).mean() + (again**3).mean() + target.mean()


def test_gradients_at_outputs_are_those_of_the_loss_alone(monkeypatch):
    """The second output is computed from the first, and the third is the first: each path is counted once."""

    def apply(params, x):
        h = states(params, x)
        return h, h.sum(-1), h

    found = []
    first_gradient = capture.ProgramRun.first_gradient
    monkeypatch.setattr(
        capture.ProgramRun,
        "first_gradient",
        lambda run, port: found.append((port, first_gradient(run, port))) or found[-1][1],
    )
    x, y = numbers(20, 6, 3, seed=1), numbers(20)
    model = rl.jax.model(apply, PARAMS)
    traces = [rl.trace(model, x, y, loss=loss_of_three) for _ in range(2)]
    assert [trace.certificate.state for trace in traces] == ["passed"] * 2
    assert [bool(trace.certificate.samples) for trace in traces] == [False, True]
    grads = {port.index: grad for port, grad in found if port.layer is None and port.kind == "output"}
    by_hand = jax.grad(loss_of_three)(apply(PARAMS, x), y)
    assert difference(grads[0], by_hand[0] + by_hand[2]) < 1e-12
    assert difference(grads[1], by_hand[1]) < 1e-12
    assert grads[2] is None
    np.testing.assert_array_equal(*(trace[next(iter(trace))].hidden_grad for trace in traces))


def test_a_fault_in_later_traces_is_found(monkeypatch):
    model, x, y = rl.jax.model(states, PARAMS), numbers(20, 6, 3, seed=1), numbers(20, 6, 5, seed=2)
    rl.trace(model, x, y, loss=mse)
    original = capture._CallReader._steps
    monkeypatch.setattr(capture._CallReader, "_steps", lambda *a: 1.01 * original(*a))
    with pytest.warns(rl.errors.SelfCheckWarning):
        rl.trace(model, x, y, loss=mse)


def test_a_cell_without_weights_is_traced():
    def apply(params, x):
        step = lambda h, x_t: ((new := jnp.tanh(x_t + h)), new)  # noqa: E731
        hidden = jax.lax.scan(step, jnp.zeros((x.shape[0], 3)), jnp.swapaxes(x, 0, 1))[1]
        return params["a"] * jnp.swapaxes(hidden, 0, 1)

    x, y = numbers(2, 6, 3, seed=1), numbers(2, 6, 3, seed=2)
    assert rl.trace(rl.jax.model(apply, {"a": 2.0}), x, y, loss=mse).certificate.state == "passed"
