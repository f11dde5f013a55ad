"""The contract of an adapter, on models of each library as their users write them."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rnnlens as rl
from rnnlens.adapters.protocol import Batch
from rnnlens.adapters.registry import adapter_for

B, T, D, H = 3, 5, 4, 2


def data(seed=0):
    draw = np.random.default_rng(seed).normal
    return draw(size=(B, T, D)).astype("float32"), draw(size=(B, T, H)).astype("float32")


def mse(output, target):
    return jnp.mean((output - target) ** 2)


def nnx_stack():
    class Net(nnx.Module):
        def __init__(self):
            self.lower = nnx.RNN(nnx.LSTMCell(D, 5, rngs=nnx.Rngs(0)))
            self.upper = nnx.RNN(nnx.GRUCell(5, 3, rngs=nnx.Rngs(1)), reverse=True, keep_order=True)
            self.head = nnx.Linear(3, H, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return self.head(self.upper(self.lower(x)))

    return Net()


def equinox_gru():
    class Net(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, xs):
            return jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, jnp.zeros(H), xs)[1]

    return Net(eqx.nn.GRUCell(D, H, key=jax.random.key(0)))


def linen_mgu():
    module = nn.RNN(nn.MGUCell(H))  # no cell of rnnlens: its steps are JAX's
    return rl.jax.model(module, module.init(jax.random.key(0), jnp.zeros((B, T, D))))


def haiku_lstm():
    def forward(x):
        core = hk.LSTM(H)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)[0]

    transformed = hk.without_apply_rng(hk.transform(forward))
    return rl.jax.model(transformed, transformed.init(jax.random.PRNGKey(0), jnp.zeros((B, T, D))))


@pytest.mark.parametrize("make", [nnx_stack, equinox_gru, linen_mgu, haiku_lstm])
def test_adapter_fulfils_the_contract(make):
    model, (x, y) = make(), data()
    adapter = adapter_for(model)
    rl.testing.check_adapter(adapter, adapter.bind(model, x), Batch(x, y, loss=mse), rtol=1e-4)


def test_every_verb_of_a_module_and_nothing_left_behind(tmp_path):
    net, (x, y) = nnx_stack(), data()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    counts = [int(v) for v in jax.tree.leaves(nnx.state(net, nnx.RngCount))]
    trace = rl.trace(net, x, y, loss=mse)
    assert list(trace["lower.cell"].gate.values) == ["input", "forget", "candidate", "output"]
    grads = rl.gradients(net, x, y, loss=mse, wrt="lower.cell.hidden")
    np.testing.assert_allclose(grads, trace["lower.cell"].hidden_grad, atol=1e-7)
    by_weight = rl.gradients(net, x, y, loss=mse, wrt="lower.cell/kernel")
    assert grads.certificate.state == by_weight.certificate.state == "passed"
    weights = rl.weights(net, x, y, loss=mse)
    np.testing.assert_allclose(by_weight, weights["lower.cell"].kernel_grad, atol=1e-7)
    jacobian = rl.jacobian(net, x, measure="norm")
    assert jacobian.certificate.state == "passed"
    rl.report(net, x, y, tmp_path / "report.html", loss=mse, diagnosis=False)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert weights["lower.cell"].kernel.dims == ("feature", "gate", "unit")
    assert weights["head"].kernel.shape == (3, H)
    assert not rl.find_nonfinite(net, x, y, loss=mse)
    assert [info.name for info in rl.layers(rl.jax.model(net, example=x))] == ["lower.cell", "upper.cell"]
    assert [info.name for info in rl.layers(net, x)] == ["lower.cell", "upper.cell"]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert counts == [int(v) for v in jax.tree.leaves(nnx.state(net, nnx.RngCount))]


def test_refusals_name_the_reason():
    x, y = data()
    with pytest.raises(rl.errors.ModelError, match=r"rl\.jax\.model\(module, params\)"):
        rl.trace(nn.Dense(2), x, y, loss=mse)
    with pytest.raises(rl.errors.ModelError, match="carries a state of floats"):
        rl.trace(rl.jax.model(lambda p, x: x @ p, np.ones((D, H), "f4")), x, y, loss=mse)
    with pytest.raises(rl.errors.InputError, match="example="):
        rl.layers(nnx_stack())
    with pytest.raises(rl.errors.InputError, match="A loss for a model of JAX is a function"):
        rl.trace(nnx_stack(), x, y, loss="mse")


def branch(p, x):
    step = lambda h, xt: (jnp.tanh(xt @ p["W"] + h), None)  # noqa: E731
    run = lambda: jax.lax.scan(step, jnp.zeros((B, H)), jnp.swapaxes(x, 0, 1))[0]  # noqa: E731
    return jax.lax.cond(x.sum() > 0, run, lambda: jnp.zeros((B, H)))


def test_a_loop_in_a_branch_is_refused_by_name():
    x, y = data()
    with pytest.raises(rl.errors.ModelError, match="a branch of"):
        rl.trace(rl.jax.model(branch, {"W": np.ones((D, H), "f4")}), x, y[:, 0], loss=mse)
