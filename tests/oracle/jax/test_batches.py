"""Gradients of a data set: those of all samples at once, from arrays that are cut and from sources of batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax_programs import A, D, H, T, mse, numbers
from unrolled_jax import difference

import rnnlens as rl
from rnnlens.errors import InputError

X, Y = numbers(7, T, D, seed=1), numbers(7, A, seed=2)


class Reader(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jax.lax.scan(lambda h, v: (self.cell(v, h), None), jnp.zeros(H), x)[0])


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return Reader(eqx.nn.GRUCell(D, H, key=jax.random.key(0)), eqx.nn.Linear(H, A, key=jax.random.key(1)))


def batches():
    return iter([(X[i : i + 3], Y[i : i + 3]) for i in range(0, 7, 3)])


@pytest.mark.parametrize("wrt", ["input", "cell.weights"])
def test_a_loss_of_batches_is_that_of_all_samples(model, wrt):
    whole = rl.gradients(model, X, Y, loss=mse, wrt=wrt)
    cut = rl.gradients(model, X, Y, loss=mse, wrt=wrt, batch_size=3)
    assert cut.certificate.state == "passed"
    if wrt == "input":
        expected = jax.grad(lambda x: mse(jax.vmap(model)(x), Y))(jnp.asarray(X))
        assert difference(cut, expected) < 1e-12
        assert difference(whole, expected) < 1e-12
        return
    for name in whole["cell"]:
        assert difference(cut["cell"][name], whole["cell"][name]) < 1e-12


def test_a_source_of_batches_is_read_from_its_first(model):
    found = rl.gradients(model, batches(), loss=mse, wrt="cell.weights", combine="sum")["cell"].recurrent_kernel
    parts = [rl.gradients(model, *batch, loss=mse, wrt="cell.weights")["cell"].recurrent_kernel for batch in batches()]
    assert difference(found, sum(parts)) < 1e-12
    assert rl.jacobian(model, batches(), across="mean").dims == ("out_unit", "in_time", "in_feature")


def test_a_source_without_batches_and_a_list_of_batches_are_refused(model):
    with pytest.raises(InputError, match="The data set is empty"):
        rl.gradients(model, iter([]), loss=mse, wrt="weights")
    with pytest.raises(ValueError, match="Your model raised"):
        rl.gradients(model, list(batches()), loss=mse, wrt="weights")
