"""A watch of a JAX training loop: bit-identical training, records that are traces, failures that end nothing."""

import functools
import re
from contextlib import closing
from urllib.request import urlopen

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rnnlens as rl
from rnnlens.cli import main as command_line
from rnnlens.errors import InputError, LayerNotFoundError, TrackingWarning

B, T, D, H, STEPS = 4, 6, 3, 5, 8
OPTIMIZER = optax.adam(1e-2)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, Y = numbers(B, T, D), numbers(B, seed=1)
PROBE = numbers(B, T, D, seed=2), numbers(B, seed=3)


def mse(output, target):
    return jnp.mean((output - target) ** 2)


def apply(params, x):
    def step(h, x_t):
        return jnp.tanh(x_t @ params["rnn"]["w"] + h @ params["rnn"]["u"]), None

    return jax.lax.scan(step, jnp.zeros((x.shape[0], H)), jnp.swapaxes(x, 0, 1))[0] @ params["out"]


def fresh_params():
    weights = {"w": 0.3 * numbers(D, H, seed=4), "u": 0.3 * numbers(H, H, seed=5)}
    return jax.tree.map(jnp.array, {"rnn": weights, "out": 0.3 * numbers(H, seed=6)})


def update(params, state, x):
    value, grads = jax.value_and_grad(lambda p: mse(apply(p, x), Y))(params)
    changes, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(params, changes), state, value


#: The step consumes its parameters, as trainings that fill the memory do.
train_step = functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def train(make_watch=None, steps=STEPS, x=X, after=None):
    """Train a function of plain arrays; return its parameters and losses, and the watch."""
    params = fresh_params()
    state, losses = OPTIMIZER.init(params), []
    watch = None if make_watch is None else make_watch(rl.jax.model(apply, params))
    with watch if watch is not None else jax.named_scope("alone"):
        for number in range(steps):
            params, state, value = train_step(params, state, x)
            losses.append(value)
            if watch is not None:
                watch.step(params, loss=value, batch=(x, Y))
                if after is not None:
                    after(number, params, watch)
    return params, losses, watch


def same(a, b):
    return all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_training_with_donated_buffers_is_the_same_bit_by_bit_and_its_records_are_traces(tmp_path, capsys):
    alone, traces = train(), {}

    def after(number, params, watch):
        if number + 1 in (3, 6):
            traces[number + 1] = rl.trace(rl.jax.model(apply, params), *PROBE, loss=mse)["rnn"].hidden_grad

    def make_watch(model):
        return rl.jax.watch(model, tmp_path / "a.zarr", probe=PROBE, loss=mse, every=3, keep="hidden_grad")

    watched = train(make_watch, after=after)
    assert same(alone[:2], watched[:2])
    assert repr(watched[2]).startswith("<rnnlens JaxWatch> closed: 8 batches, 3 records, 0 alerts; the run: ")
    run = rl.open(tmp_path / "a.zarr")
    assert list(run.steps) == [0, 3, 6]
    assert not watched[2].gaps
    for step, expected in traces.items():
        np.testing.assert_array_equal(run["rnn"].hidden_grad.sel(step=step), expected)
    norms = run.scalar("rnn/weight_norm/recurrent_kernel")
    assert float(norms[0]) == pytest.approx(np.linalg.norm(fresh_params()["rnn"]["u"]), rel=1e-6)
    assert float(norms[1]) != float(norms[0])
    rl.plot.timeline(run)
    with pytest.raises(SystemExit):
        command_line(["tail", str(tmp_path / "a.zarr"), "--only", "rnn/adjoint"])
    assert re.findall(r"step=(\d+) .*rnn/adjoint=", capsys.readouterr().out) == ["0", "3", "6"]


def test_the_end_of_epochs_is_recorded_with_the_parameters_of_their_last_step(tmp_path):
    expected = []

    def after(number, params, watch):
        if number in (3, STEPS - 1):
            expected.append(float(rl.trace(rl.jax.model(apply, params), *PROBE, loss=mse).loss))
        watch.epoch = (number + 1) // 2 if number < STEPS - 1 else watch.epoch  # two steps each

    def make_watch(model):
        return rl.jax.watch(model, tmp_path / "a.zarr", probe=PROBE, loss=mse, every=0, epochs=(1, 3))

    watched = train(make_watch, after=after)
    assert same(train()[:2], watched[:2])
    assert not watched[2].gaps
    run = rl.open(tmp_path / "a.zarr")
    assert list(run.steps) == [4, STEPS]
    np.testing.assert_array_equal(run.scalar("loss"), np.float32(expected))


def test_epochs_without_a_probe_are_refused():
    with pytest.raises(InputError, match="epochs= schedules a probe"):
        rl.jax.watch(rl.jax.model(apply, fresh_params()), epochs=(1,), on_nonfinite="report")


def test_alerts_reach_on_alert_and_one_that_raises_ends_nothing():
    alerts, params = [], fresh_params()
    larger = {**params, "out": 1e3 * params["out"]}

    def on_alert(alert):
        alerts.append(alert)
        raise RuntimeError("of the user")

    watch = rl.jax.watch(rl.jax.model(apply, params), probe=PROBE, loss=mse, every=1, on_alert=on_alert)

    def steps():
        with watch:
            for number in range(16):
                watch.step(params if number < 12 else larger)

    with pytest.warns(TrackingWarning, match="of the user"):
        steps()
    assert [alert.finding for alert in alerts] == ["exploding"]
    assert watch.steps == 16


def test_the_run_is_served_as_a_page(tmp_path):
    pages = []

    def after(number, params, watch):
        if number == 3:
            with closing(watch.serve(port=0)) as page, urlopen(page.address, timeout=30) as answer:
                pages.append(answer.read().decode())

    train(lambda model: rl.jax.watch(model, tmp_path / "a.zarr", probe=PROBE, loss=mse, every=2), after=after)
    assert "a.zarr" in pages[0]
    with pytest.raises(InputError, match="A live page needs a run on disk"):
        rl.jax.watch(rl.jax.model(apply, fresh_params()), probe=PROBE, loss=mse).serve()


def test_a_compiled_loop_over_steps_is_recorded_between_its_chunks(tmp_path):
    @jax.jit
    def chunk(params, state):
        def body(carry, _):
            params, state, value = update(*carry, X)
            return (params, state), value

        (params, state), values = jax.lax.scan(body, (params, state), length=4)
        return params, state, values

    def training(watch):
        params = fresh_params()
        state, losses = OPTIMIZER.init(params), []
        for _ in range(3):
            params, state, values = chunk(params, state)
            losses.append(values)
            if watch is not None:
                watch.step(params, steps=4)
        return params, losses

    with rl.jax.watch(
        rl.jax.model(apply, fresh_params()), tmp_path / "a.zarr", probe=PROBE, loss=mse, every=6
    ) as watch:
        watched = training(watch)
    assert same(training(None), watched)
    assert list(rl.open(tmp_path / "a.zarr").steps) == [0, 8, 12]  # 6 and 12 were passed
    with rl.jax.watch(rl.jax.model(apply, watched[0]), tmp_path / "a.zarr", probe=PROBE, loss=mse, every=6) as watch:
        assert watch.steps == 12
        training(watch)
    assert list(rl.open(tmp_path / "a.zarr").steps) == [0, 8, 12, 20, 24]


def test_modules_of_nnx_and_equinox(tmp_path):
    class Net(nnx.Module):
        def __init__(self):
            self.rnn = nnx.RNN(nnx.GRUCell(D, H, rngs=nnx.Rngs(0)))

        def __call__(self, x):
            return self.rnn(x)[:, -1].sum(-1)

    @nnx.jit
    def nnx_step(net, optimizer):
        value, grads = nnx.value_and_grad(lambda net: mse(net(X), Y))(net)
        optimizer.update(net, grads)
        return value

    def train_nnx(watch=None):
        net = Net() if watch is None else nets[0]
        optimizer = nnx.Optimizer(net, OPTIMIZER, wrt=nnx.Param)
        for _ in range(2):
            nnx_step(net, optimizer)
            if watch is not None:
                watch.step()
        return nnx.to_pure_dict(nnx.state(net, nnx.Param))

    nets = [Net()]
    with rl.jax.watch(nets[0], tmp_path / "nnx.zarr", probe=PROBE, loss=mse, every=1) as watch:
        watched = train_nnx(watch)
    assert same(train_nnx(), watched)
    losses = rl.open(tmp_path / "nnx.zarr").loss.values
    assert len(set(losses)) == 3

    class Reader(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, xs):
            return jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(H), xs)[0].sum()

    net = Reader(eqx.nn.GRUCell(D, H, key=jax.random.key(0)))
    with rl.jax.watch(net, probe=PROBE, loss=mse, every=1) as watch:
        first = watch.record.scalars["cell/adjoint"]
        watch.step(jax.tree.map(lambda a: a * 0.5 if eqx.is_array(a) else a, net))
    assert watch.record.step == 1
    assert watch.record.scalars["cell/adjoint"] != first
    assert not watch.gaps


def test_the_first_step_that_is_not_finite_is_written_with_the_weights_before_it(tmp_path):
    bad = X.copy()
    bad[2, 4, 1] = np.inf
    params, before = fresh_params(), None
    state = OPTIMIZER.init(params)
    with rl.jax.watch(rl.jax.model(apply, params), tmp_path / "a.zarr", loss=mse, on_nonfinite="report") as watch:
        for number in range(4):
            x = bad if number == 2 else X
            before = jax.tree.map(np.array, params) if number == 2 else before
            params, state, value = train_step(params, state, x)
            watch.step(params, loss=value, batch=(x, Y))
    incident = rl.open(tmp_path / "a.nonfinite.nc")
    assert incident.step == 3
    assert "step 4 of sample 2" in incident.found
    np.testing.assert_array_equal(incident.x, bad)
    np.testing.assert_array_equal(incident.weights["rnn.u"], before["rnn"]["u"])


class Failing:
    """A logger that always fails."""

    def write(self, record):
        raise OSError("the disk is full")

    def close(self, reason):
        raise OSError("the disk is full")


def test_nothing_ends_the_training():
    alone = train()

    def failing_loss(output, target):
        raise ZeroDivisionError("in the loss")

    with pytest.warns(TrackingWarning, match="in the loss"):
        watched = train(lambda model: rl.jax.watch(model, probe=PROBE, loss=failing_loss, every=2))
    assert same(alone[:2], watched[:2])
    assert watched[2].gaps[0].records == 1 + STEPS // 2
    with pytest.warns(TrackingWarning, match="the disk is full"):
        watched = train(lambda model: rl.jax.watch(model, probe=PROBE, loss=mse, every=4, loggers=Failing()))
    assert same(alone[:2], watched[:2])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda watch, params: watch.step(), "needs the parameters"),
        (lambda watch, params: jax.jit(watch.step)(params), "inside a compiled function"),
        (lambda watch, params: (jax.tree.map(lambda a: a.delete(), params), watch.step(params)), "were donated"),
    ],
    ids=["absent", "traced", "deleted"],
)
def test_parameters_that_cannot_be_recorded_are_a_gap_with_the_reason(wrong, words):
    with (
        pytest.warns(TrackingWarning, match=words),
        rl.jax.watch(rl.jax.model(apply, fresh_params()), probe=PROBE, loss=mse, every=1) as watch,
    ):
        wrong(watch, fresh_params())
    assert words in watch.gaps[0].reason


def test_arguments_that_do_not_fit_are_refused_before_training():
    model = rl.jax.model(apply, fresh_params())
    with pytest.raises(InputError, match=r"probe=\(x, y\), loss=loss"):
        rl.jax.watch(model)
    with pytest.raises(InputError, match="probe= is a batch"):
        rl.jax.watch(model, probe=X[None].sum())
    with pytest.raises(LayerNotFoundError, match="rnn"), rl.jax.watch(model, probe=PROBE, loss=mse, layers="rnm"):
        pass
    with pytest.warns(TrackingWarning, match=r"watch\.step"), rl.jax.watch(model, probe=PROBE, loss=mse, every=5):
        pass


def test_parameters_are_not_kept_alive_between_steps():
    import weakref

    params = fresh_params()
    with rl.jax.watch(rl.jax.model(apply, params), probe=PROBE, loss=mse, every=1) as watch:
        later = fresh_params()
        watch.step(later)
        kept = weakref.ref(later["out"])
        del later
        assert kept() is None
