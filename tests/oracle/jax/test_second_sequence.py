"""Loops over other steps than those of the first input: a decoder's targets, pooled steps, a rollout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_programs import A, B, D, H, T, mse, numbers
from unrolled_jax import difference, scans_in_python, unrolled

import rnnlens as rl

#: Steps of the decoder: another number than the encoder's.
U = 4


def cell(params, h, x):
    return jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])


def cell_params(features, seed):
    return {"w": numbers(features, H, seed=seed), "u": 0.5 * numbers(H, H, seed=seed + 1), "b": numbers(H, seed=9)}


def run(params, start, x):
    """Run a simple cell over (sample, time, feature) and return its states."""

    def step(h, x):
        h = cell(params, h, x)
        return h, h

    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def attending_decoder(params, x):
    """Decode a second sequence; its context, an attention over the encoder's states, is a state of its own."""
    source, target = x
    encoded = run(params["encoder"], jnp.zeros((source.shape[0], H)), source)

    def step(state, x):
        h, context = state
        h = cell(params["decoder"], h, jnp.concatenate([x, context], -1))
        share = jax.nn.softmax(jnp.einsum("bth,bh->bt", encoded, h), -1)
        context = jnp.einsum("bt,bth->bh", share, encoded)
        return (h, context), jnp.concatenate([h, context], -1) @ params["head"]

    start = encoded[:, -1], jnp.zeros((source.shape[0], H))
    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(target, 0, 1))[1], 0, 1)


def pyramid(params, x):
    """Read the states of the first layer in pairs by a second one; a single last step is left out."""
    first = run(params["fine"], jnp.zeros((x.shape[0], H)), x)
    pairs = first[:, : x.shape[1] // 2 * 2].reshape(x.shape[0], x.shape[1] // 2, 2 * H)
    return run(params["coarse"], jnp.zeros((x.shape[0], H)), pairs) @ params["head"]


def rollout(params, x):
    """Read a sequence, then predict further steps, each from the prediction before, with the same cell."""
    read = run(params["cell"], jnp.zeros((x.shape[0], H)), x)[:, -1]

    def step(state, _):
        h, y = state
        h = cell(params["cell"], h, y @ params["feed"])
        y = h @ params["head"]
        return (h, y), y

    start = read, read @ params["head"]
    return jnp.swapaxes(jax.lax.scan(step, start, None, length=U)[1], 0, 1)


def queries(params, x):
    """Read a sequence, then answer learned queries, one at each further step."""
    read = run(params["encoder"], jnp.zeros((x.shape[0], H)), x)[:, -1]

    def step(h, query):
        h = cell(params["decoder"], h, query)
        return h, h @ params["head"]

    return jnp.swapaxes(jax.lax.scan(step, read, params["queries"])[1], 0, 1)


def queries_case():
    params = {"encoder": cell_params(D, 1), "decoder": cell_params(A, 3), "head": numbers(H, A, seed=5)}
    params["queries"] = numbers(U, A, seed=4)
    return queries, params, numbers(B, T, D, seed=6), numbers(B, U, A, seed=8), "input", U


def rollout_case():
    params = {"cell": cell_params(D, 1), "head": numbers(H, A, seed=5), "feed": numbers(A, D, seed=4)}
    return rollout, params, numbers(B, T, D, seed=6), numbers(B, U, A, seed=8), "input", U


def decoder_case():
    params = {"encoder": cell_params(D, 1), "decoder": cell_params(A + H, 3), "head": numbers(2 * H, A, seed=5)}
    x = numbers(B, T, D, seed=6), numbers(B, U, A, seed=7)
    return attending_decoder, params, x, numbers(B, U, A, seed=8), "input[0]", U


def pyramid_case(steps):
    params = {"fine": cell_params(D, 1), "coarse": cell_params(2 * H, 3), "head": numbers(H, A, seed=5)}
    x, y = numbers(B, steps, D, seed=6), numbers(B, steps // 2, A, seed=7)
    return pyramid, params, x, y, "input", steps // 2


CASES = {
    "decoder": decoder_case,
    "even pyramid": lambda: pyramid_case(T),
    "odd pyramid": lambda: pyramid_case(T + 1),
    "rollout": rollout_case,
    "queries": queries_case,
}


@pytest.fixture(params=CASES)
def case(request):
    function, params, x, y, wrt, steps = CASES[request.param]()
    return rl.jax.model(function, params), function, params, x, y, wrt, steps


def test_both_loops_are_layers_with_the_states_and_gradients_of_the_unrolled_program(case):
    model, function, params, x, y, _, steps = case
    trace = rl.trace(model, x, y, loss=mse)
    assert trace.certificate.state == "passed"
    assert [trace[name].hidden.sizes["time"] for name in trace] == [np.shape(jax.tree.leaves(x)[0])[1], steps]
    states, totals = unrolled(lambda: mse(function(params, jax.tree.map(jnp.asarray, x)), y))
    for name, of_loop, grads in zip(trace, states, totals, strict=True):
        sizes = [state.shape[-1] for state in of_loop]
        state = sizes.index(trace[name].hidden.sizes["unit"])
        assert difference(trace[name].hidden, np.moveaxis(of_loop[state], 0, 1)) < 1e-12
        assert difference(trace[name].hidden_grad, np.moveaxis(grads[state], 0, 1)) < 1e-12


def test_weights_of_a_cell_in_two_loops_are_named_as_not_compared_and_their_gradient_is_the_whole():
    function, params, x, y, *_ = rollout_case()
    model = rl.jax.model(function, params)
    certificate = rl.trace(model, x, y, loss=mse).certificate
    assert certificate.state == "passed"
    assert certificate.uncertified == ("weights of cell, which are shared with other layers",)
    found = rl.gradients(model, x, y, loss=mse, wrt="weights")["cell"]
    expected = jax.grad(lambda params: mse(function(params, x), y))(params)["cell"]
    for key, name in (("kernel", "w"), ("recurrent_kernel", "u"), ("bias", "b")):
        assert difference(found[key].values.reshape(expected[name].shape), expected[name]) < 1e-12


@pytest.mark.parametrize("case", ["decoder", "even pyramid", "odd pyramid"], indirect=True)  # whose steps the data give
def test_the_output_steps_of_the_jacobian_are_those_of_the_second_loop(case):
    model, function, params, x, _, wrt, steps = case
    jacobian = rl.jacobian(model, x, wrt=wrt)
    assert jacobian.certificate.state == "passed"
    assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
    assert jacobian.sizes["out_time"] == steps
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, x))

    def output(first):
        with scans_in_python():
            return function(params, jax.tree.unflatten(tree, [first, *leaves[1:]]))

    full = np.asarray(jax.jit(jax.jacrev(output))(leaves[0]))
    assert difference(jacobian, np.stack([full[b][:, :, b] for b in range(B)])) < 1e-12
