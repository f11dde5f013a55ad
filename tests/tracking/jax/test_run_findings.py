"""Findings on a recorded training in JAX, and the numbers behind them against parameters that are saved by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rnnlens as rl

STEPS, UNITS = 12, 8


def draw(seed, *shape):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape)


X = draw(0, 64, 10, 2)
Y = X[:, -2, 0]


def mse(output, target):
    return jnp.mean((output - target) ** 2)


def apply(params, x, cut=False):
    def step(h, x_t):
        return jnp.tanh(x_t @ params["rnn"]["w"] + h @ params["rnn"]["u"]), None

    h = jax.lax.scan(step, jnp.zeros((len(x), UNITS)), jnp.swapaxes(x, 0, 1))[0]
    return (jax.lax.stop_gradient(h) if cut else h) @ params["out"]["w"][:, 0]


def train(path, rate, *, cut=False, every=1, chunk=1):
    """Train by a compiled step that consumes its parameters; return the run and the parameters after each step."""
    optimizer = optax.adam(rate)
    forward = functools.partial(apply, cut=cut)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state):
        grads = jax.grad(lambda p: mse(forward(p, X), Y))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = {"rnn": {"w": draw(1, 2, UNITS), "u": draw(2, UNITS, UNITS)}, "out": {"w": draw(3, UNITS, 1)}}
    state, saved = optimizer.init(params), [jax.tree.map(np.array, params)]
    probe = (X[:16], Y[:16])
    with rl.jax.watch(rl.jax.model(forward, params), path, probe=probe, loss=mse, every=every) as watch:
        for i in range(STEPS):
            params, state = train_step(params, state)
            saved.append(jax.tree.map(np.array, params))
            if (i + 1) % chunk == 0:
                watch.step(params, steps=chunk)
    return rl.open(path), saved


def ratio(before, after):
    return np.linalg.norm(after.astype(float) - before.astype(float)) / np.linalg.norm(before.astype(float))


@pytest.mark.parametrize("every", [1, 4])
def test_update_ratios_are_those_of_parameters_saved_by_hand(tmp_path, every):
    run, saved = train(tmp_path / "a.zarr", 1e-2, every=every)
    steps = [step for step in run.steps.values if step]
    assert steps == [*range(every, STEPS + 1, every)]
    paths = {"rnn.w": ("rnn", "w"), "rnn.u": ("rnn", "u"), "out.w": ("out", "w")}
    ratios = {n: [ratio(saved[s - 1][a][b], saved[s][a][b]) for s in steps] for n, (a, b) in paths.items()}
    for name, expected in ratios.items():
        recorded = run.scalar(f"update_ratio/{name}").sel(step=steps).values
        np.testing.assert_allclose(recorded, expected, rtol=1e-6, err_msg=name)
    medians = np.median([*ratios.values()], axis=0)
    np.testing.assert_allclose(run.scalar("update_ratio").sel(step=steps).values, medians, rtol=1e-6)
    assert run.findings == []


@pytest.mark.parametrize(("rate", "code"), [(1e-7, "UPDATES_TOO_SMALL"), (3.0, "UPDATES_TOO_LARGE")])
def test_a_learning_rate_far_off(tmp_path, rate, code):
    run, _ = train(tmp_path / "a.zarr", rate)
    assert [finding.code for finding in run.findings] == [code]


def test_parameters_behind_a_stop_gradient(tmp_path):
    run, saved = train(tmp_path / "a.zarr", 1e-2, cut=True)
    (finding,) = run.findings
    assert finding.code == "WEIGHTS_WITHOUT_GRADIENT"
    assert sorted(finding.evidence["weights"]) == ["rnn.u", "rnn.w"]
    assert all(np.array_equal(saved[0]["rnn"][key], saved[-1]["rnn"][key]) for key in "wu")
    assert "2 of 3 trained weights did not change at all in 12 recorded steps, and the others did" in finding.sentence


def test_chunks_of_steps_have_no_update_of_one_step(tmp_path):
    run, _ = train(tmp_path / "a.zarr", 1e-7, chunk=3, every=3)
    assert not any("update_ratio" in name for name in run.scalars)
    assert run.findings == []
