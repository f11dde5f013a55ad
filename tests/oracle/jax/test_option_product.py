"""Options of a recurrent layer in combination: every number against the user's function unrolled in Python."""

from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unrolled_jax import difference, scans_in_python, unrolled

import rnnlens as rl

B, T, D, H = 3, 5, 2, 4
LENGTHS = np.resize([5, 3, 4], 64)  # of as many samples as a trace may have
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
CELLS = {
    "lstm": nn.LSTMCell,
    "optimized lstm": nn.OptimizedLSTMCell,
    "gru": nn.GRUCell,
    "simple": nn.SimpleCell,
    "mgu": nn.MGUCell,
}
OPTIONS = {
    "cell": tuple(CELLS),
    "form": ("rnn", "scan"),
    "way": ("forward", "reverse", "bidirectional"),
    "mask": (False, True),
    "start": ("zero", "given"),
    "dropout": (False, True),
    "dtype": ("float32", "float64"),
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def carry_of(cell, start, samples, dtype):
    """Return an initial carry: zeros, or numbers that differ between samples."""
    zeros = cell.initialize_carry(jax.random.key(0), (samples, D))
    if start == "zero":
        return zeros
    return jax.tree.map(lambda a: jnp.asarray(numbers(64, H, seed=7), dtype)[:samples], zeros)


class ScannedCell(nn.Module):
    """A cell stepped by ``nn.scan`` as users write it: the state is kept where a sequence has ended.

    ``returns_state``: whether a step returns the kept state, or what the cell computed before.
    """

    cell: nn.Module
    reverse: bool
    returns_state: bool = True

    @nn.compact
    def __call__(self, x, lengths, carry):
        def step(cell, carry, inputs):
            x_t, t = inputs
            after, output = cell(carry, x_t)
            if lengths is not None:
                after = jax.tree.map(lambda new, old: jnp.where((t < lengths)[:, None], new, old), after, carry)
                output = jax.tree.leaves(after)[-1] if self.returns_state else output
            return after, output

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=((1, 0),),
            out_axes=1,
            reverse=self.reverse,
        )
        return scan(self.cell, carry, (x, jnp.arange(x.shape[1])))[1]


class Net(nn.Module):
    """One layer, or two that read in both directions, and a readout at every step."""

    cell: str
    form: str
    way: str
    mask: bool
    start: str
    dropout: bool
    dtype: str

    def layer(self, x, reverse):
        dtype = jnp.dtype(self.dtype)
        cell = CELLS[self.cell](H, dtype=dtype, param_dtype=dtype)
        lengths = jnp.asarray(LENGTHS)[: x.shape[0]] if self.mask else None
        carry = carry_of(cell, self.start, x.shape[0], dtype)
        if self.form == "scan":
            return ScannedCell(cell, reverse)(x, lengths, carry)
        return nn.RNN(cell, reverse=reverse, keep_order=True)(x, initial_carry=carry, seq_lengths=lengths)

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.4, deterministic=not self.dropout)(x)
        ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[self.way]
        h = jnp.concatenate([self.layer(x, reverse) for reverse in ways], -1)
        return nn.Dense(2, dtype=jnp.dtype(self.dtype), param_dtype=jnp.dtype(self.dtype))(h)


def mse(output, target):
    return jnp.mean((output - target) ** 2)


def check(case):
    options = dict(zip(OPTIONS, case, strict=True))
    dtype, bound = options["dtype"], BOUNDS[options["dtype"]]
    x, y = (jnp.asarray(numbers(B, T, n, seed=n), dtype) for n in (D, 2))
    net, rngs = Net(**options), {"dropout": jax.random.key(3)}
    params = net.init({"params": jax.random.key(0), **rngs}, x)
    model = rl.jax.model(net, params, rng=rngs)
    function = lambda x: net.apply(params, x, rngs=rngs)  # noqa: E731
    trace = rl.trace(model, x, y, loss=mse)
    assert trace.certificate.state == "passed", trace.certificate
    states, totals = unrolled(lambda: mse(function(x), y))
    assert len(trace) == len(states)
    for name, (number, loop) in zip(trace, enumerate(states), strict=True):
        found = trace[name]
        found_number, in_time = placed(found.hidden.values, loop, options)
        assert difference(found.hidden, in_time(loop[found_number])) < bound
        _, direct = unrolled(lambda: mse(function(x), y), cut=number)
        pairs = ((found.hidden_grad, totals), (found.output_grad, direct))
        for ours, theirs in pairs:
            assert difference(ours, in_time(theirs[number][found_number])) < bound
    jacobian = rl.jacobian(model, x)

    def run(x):
        with scans_in_python():
            return function(x)

    full = np.asarray(jax.jit(jax.jacrev(run))(x))
    assert difference(jacobian, np.stack([full[b][:, :, b] for b in range(B)])) < bound


def placed(hidden, loop, options):
    """Return the number of the loop's state that is the output, and the function that orders steps by time.

    A loop of ``nn.RNN(reverse=True)`` runs over flipped inputs; with lengths each sequence is flipped by itself.
    """

    def forward(steps):
        return np.moveaxis(steps, 0, 1)

    def flipped(steps):
        return np.moveaxis(steps, 0, 1)[:, ::-1]

    def candidates():
        for number, state in enumerate(loop):
            for order in (forward, flipped):
                if order(state).shape == hidden.shape:
                    yield np.abs(order(state) - hidden).max(), number, order

    _, number, order = min(candidates(), key=lambda candidate: candidate[0])
    return number, order


ALL = list(product(*OPTIONS.values()))


def drawn(count):
    """Return cases in which all values occur alike, in a fixed order."""
    numbers_drawn = np.random.default_rng(0).permutation(len(ALL))[:count]
    return [ALL[i] for i in numbers_drawn]


def name_of(case):
    return "-".join(str(value).replace(" ", "_") for value in case)


@pytest.mark.parametrize("case", drawn(60), ids=name_of)
def test_drawn_options(case):
    check(case)


def test_an_output_that_is_no_state_of_the_step_is_never_certified():
    """A step that returns what its cell computed, and carries on another value: its states are not all that is read."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            lengths = jnp.asarray(LENGTHS)[: x.shape[0]]
            return ScannedCell(nn.GRUCell(H), False, returns_state=False)(x, lengths, jnp.zeros((x.shape[0], H)))

    x, y = (jnp.asarray(numbers(B, T, n, seed=n), "float32") for n in (D, H))
    net = Net()
    with pytest.warns(rl.errors.SelfCheckWarning, match="GRUCell_0"):
        trace = rl.trace(rl.jax.model(net, net.init(jax.random.key(0), x)), x, y, loss=mse)
    assert trace.certificate.state == "failed"
    assert rl.gradients(rl.jax.model(net, net.init(jax.random.key(0), x)), x, y, loss=mse).certificate.state == "passed"


@pytest.mark.parametrize("fault", ["states", "gradients"])
def test_a_planted_fault_is_found(fault, monkeypatch):
    """Steps in another order, or a gradient that misses the recurrence, must not pass as right."""
    from rnnlens.adapters.jax.layers import RecurrentLayer

    if fault == "states":
        monkeypatch.setattr(RecurrentLayer, "to_port", _reversed(RecurrentLayer.to_port))
    else:
        monkeypatch.setattr(RecurrentLayer, "zeros_at", _half(RecurrentLayer.zeros_at))
    case = ("gru", "rnn", "forward", False, "zero", False, "float64")
    with pytest.raises(AssertionError), pytest.warns(rl.errors.SelfCheckWarning):
        check(case)


def _reversed(to_port):
    return lambda layer, variable, value: jnp.flip(to_port(layer, variable, value), 1)


def _half(zeros_at):
    return lambda layer, port, zero: {point: z / 2 for point, z in zeros_at(layer, port, zero).items()}
