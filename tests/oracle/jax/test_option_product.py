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
    """A cell stepped by ``nn.scan`` as users write it: the state is kept where a sequence has ended."""

    cell: nn.Module
    reverse: bool

    @nn.compact
    def __call__(self, x, lengths, carry):
        def step(cell, carry, inputs):
            x_t, t = inputs
            after, output = cell(carry, x_t)
            if lengths is not None:
                after = jax.tree.map(lambda new, old: jnp.where((t < lengths)[:, None], new, old), after, carry)
                output = jax.tree.leaves(after)[-1]
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


def stepped_in_python(cell, x, lengths, carry, reverse):
    """Return the outputs of a cell that a Python loop calls, its state kept where a sequence has ended."""
    outputs = [None] * x.shape[1]
    for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        after, outputs[t] = cell(carry, x[:, t])
        if lengths is not None:
            after = jax.tree.map(lambda new, old, t=t: jnp.where((t < lengths)[:, None], new, old), after, carry)
            outputs[t] = jax.tree.leaves(after)[-1]
        carry = after
    return jnp.stack(outputs, 1)


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
        if self.form == "loop":
            return stepped_in_python(cell, x, lengths, carry, reverse)
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


LOOPS = list(product(*(OPTIONS | {"form": ("loop",)}).values()))


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_in_python_is_refused_by_name_with_any_options(seed):
    """It leaves no loop in the program; ten draws for each seed."""
    for number in np.random.default_rng(seed).permutation(len(LOOPS))[:10]:
        options = dict(zip(OPTIONS, LOOPS[number], strict=True))
        x, y = (jnp.asarray(numbers(B, T, n, seed=n), options["dtype"]) for n in (D, 2))
        net, rngs = Net(**options), {"dropout": jax.random.key(3)}
        params = net.init({"params": jax.random.key(0), **rngs}, x)
        with pytest.raises(rl.errors.ModelError, match="no recurrent layer") as refusal:
            rl.trace(rl.jax.model(net, params, rng=rngs), x, y, loss=mse)
        assert "jax.lax.scan" in str(refusal.value)


#: What a masked step returns, of what its cell computed, the state that it keeps, and the state before.
RETURNED = {
    "computed": lambda new, kept, old, real: (new,),
    "computed, zeros at padding": lambda new, kept, old, real: (jnp.where(real, new, 0),),
    "computed and kept": lambda new, kept, old, real: (new, kept),
    "before": lambda new, kept, old, real: (old,),
}


class Returning:
    """Cells whose carry is masked, and whose steps return something else; one that reads forwards, or two."""

    def __init__(self, cell, way, returned):
        self.cell, self.returned = CELLS[cell](H, param_dtype=float), RETURNED[returned]
        self.reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[way]
        carry = self.cell.initialize_carry(jax.random.key(0), (B, D))
        keys = jax.random.split(jax.random.key(1), 2)
        self.params = {f"cell{i}": self.cell.init(keys[i], carry, jnp.ones((B, D))) for i in range(len(self.reverse))}
        width = H * len(self.reverse) * (2 if returned == "computed and kept" else 1)
        self.params["readout"] = jnp.asarray(numbers(width, 2, seed=5))

    def layer(self, params, x, reverse):
        """Return what the steps return, (time, sample, unit) each."""
        lengths = jnp.asarray(LENGTHS)[: x.shape[0]]

        def step(carry, inputs):
            after, _ = self.cell.apply(params, carry, inputs[0])
            real = (inputs[1] < lengths)[:, None]
            kept = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, carry)
            states = [jax.tree.leaves(tree)[-1] for tree in (after, kept, carry)]
            return kept, self.returned(*states, real)

        start = carry_of(self.cell, "given", x.shape[0], x.dtype)
        return jax.lax.scan(step, start, (jnp.swapaxes(x, 0, 1), jnp.arange(x.shape[1])), reverse=reverse)[1]

    def sequences(self, params, x):
        return [self.layer(params[f"cell{i}"], x, reverse) for i, reverse in enumerate(self.reverse)]

    @staticmethod
    def readout(params, sequences):
        return jnp.swapaxes(jnp.concatenate(jax.tree.leaves(sequences), -1) @ params["readout"], 0, 1)

    def __call__(self, params, x):
        return self.readout(params, self.sequences(params, x))


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("way", OPTIONS["way"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "simple"])
def test_what_a_masked_step_returns_beside_its_state_is_its_output(cell, way, returned):
    """A step that carries on one value and returns another: every gradient is that of the untouched function."""
    x, y = (jnp.asarray(numbers(B, T, n, seed=n)) for n in (D, 2))
    net = Returning(cell, way, returned)
    params, real = net.params, np.arange(T) < LENGTHS[:B, None]
    model = rl.jax.model(net, params)
    trace = rl.trace(model, x, y, loss=mse)
    assert trace.certificate.state == "passed", trace.certificate
    assert rl.gradients(model, x, y, loss=mse).certificate.state == "passed"
    states, totals = unrolled(lambda: mse(net(params, x), y))
    direct = jax.grad(lambda sequences: mse(net.readout(params, sequences), y))(net.sequences(params, x))
    assert len(trace) == len(states)
    for name, loop, total, of_returned in zip(trace, states, totals, direct, strict=True):
        found, number = trace[name], len(loop) - 1  # h is the last state of an LSTM of Flax
        assert difference(found.hidden, np.moveaxis(loop[number], 0, 1)) < 1e-12
        assert difference(found.hidden_grad, np.moveaxis(total[number], 0, 1)) < 1e-12
        expected = np.moveaxis(np.asarray(of_returned[0]), 0, 1)
        expected = expected * real[..., None] if "zeros" in returned else expected
        assert difference(found.output_grad, expected) < 1e-12
    inputs = jax.grad(lambda x: mse(net(params, x), y))(x)
    assert difference(sum(trace[name].input_grad.values[..., :D] for name in trace), inputs) < 1e-12

    def run(x):
        with scans_in_python():
            return net(params, x)

    full = np.asarray(jax.jit(jax.jacrev(run))(x))
    assert difference(rl.jacobian(model, x), np.stack([full[b][:, :, b] for b in range(B)])) < 1e-12


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


@pytest.mark.parametrize("cell", ["gru", "lstm", "simple"])
def test_states_that_are_recorded_one_per_cent_too_large_fail_the_certificate(cell, monkeypatch):
    from rnnlens.adapters.jax import capture

    recorded = capture._CallReader._steps
    scale = {True: 1.01, False: 1.0}
    monkeypatch.setattr(
        capture._CallReader, "_steps", lambda *args: recorded(*args) * scale[args[-1].startswith("state")]
    )
    x, y = (jnp.asarray(numbers(B, T, n, seed=n), "float64") for n in (D, 2))
    net = Net(cell, "rnn", "forward", False, "zero", False, "float64")
    model = rl.jax.model(net, net.init(jax.random.key(0), x))
    with pytest.warns(rl.errors.SelfCheckWarning):
        trace = rl.trace(model, x, y, loss=mse)
    assert trace.certificate.state == "failed"
    with pytest.warns(rl.errors.SelfCheckWarning):
        certificate = rl.jacobian(model, x, of=f"{next(iter(trace))}.hidden").certificate
    assert certificate.state == "failed"


def _reversed(to_port):
    return lambda layer, variable, value: jnp.flip(to_port(layer, variable, value), 1)


def _half(zeros_at):
    return lambda layer, port, zero: {point: z / 2 for point, z in zeros_at(layer, port, zero).items()}
