"""Programs of JAX's users in their own shapes: each library's recurrent models as they are written."""

import functools
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rnnlens as rl

B, T, D, H, A = 3, 6, 4, 5, 2
PROGRAMS = {}


class Program(NamedTuple):
    """``model`` for rnnlens, and its data; ``function(x)``: the user's own call; ``layers``: name -> (cell, loop)."""

    model: object
    x: object
    y: object
    function: object
    layers: dict
    time_major: bool = False
    returns_loss: bool = False


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def mse(output, target):
    return jnp.mean((jax.tree.leaves(output)[0] - target) ** 2)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def key(seed=0):
    return jax.random.key(seed)


def double():
    """Return the dtype of parameters and of computations: float64, or float32 where JAX has no other."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    return {"param_dtype": dtype, "dtype": dtype}


RESETS = np.zeros((T, B), dtype=bool)
RESETS[3, 1] = RESETS[2, 0] = True


def scanned_rnn(make_cell):
    """The class of recurrent reinforcement learning in JAX: a cell scanned over time, reset by dones."""

    class ScannedRNN(nn.Module):
        @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
        @nn.compact
        def __call__(self, carry, inputs):
            ins, resets = inputs
            fresh = make_cell(None).initialize_carry(jax.random.PRNGKey(0), ins.shape)
            carry = jax.tree.map(lambda new, old: jnp.where(resets[:, None], new.astype(old.dtype), old), fresh, carry)
            return make_cell("cell")(carry, ins)

    return ScannedRNN


def actor_critic(make_cell, embed):
    class ActorCriticRNN(nn.Module):
        @nn.compact
        def __call__(self, hidden, inputs):
            obs, dones = inputs
            features = nn.relu(nn.Dense(embed, **double())(obs)) if embed else obs
            hidden, features = scanned_rnn(make_cell)()(hidden, (features, dones))
            actor = nn.Dense(A, **double())(nn.relu(nn.Dense(H, **double())(features)))
            critic = nn.Dense(1, **double())(nn.relu(nn.Dense(H, **double())(features)))
            return hidden, actor, jnp.squeeze(critic, -1)

    net = ActorCriticRNN()
    cell = make_cell(None)
    start = jax.tree.map(lambda a: a.astype(float), cell.initialize_carry(jax.random.PRNGKey(0), (B, embed or D)))
    params = net.init(key(), start, (jnp.zeros((T, B, D)), jnp.zeros((T, B), bool)))

    def apply(params, obs, dones):
        hidden = jax.tree.map(lambda a: jnp.zeros((obs.shape[1], a.shape[1]), a.dtype), start)
        return net.apply(params, hidden, (obs, dones))[1]

    return apply, params


def _actor(make_cell, kind, embed, name):
    apply, params = actor_critic(make_cell, embed)
    x, y = (numbers(T, B, D, seed=1), RESETS), numbers(T, B, A, seed=2)
    return Program(
        rl.jax.model(apply, params),
        x,
        y,
        lambda x: apply(params, *x),
        {f"ScannedRNN_0.{name}": (kind, 0)},
        time_major=True,
    )


@program
def purejaxrl_ppo_rnn():
    return _actor(lambda name: nn.GRUCell(H, name=name, **double()), "gru", None, "cell")


@program
def jaxmarl_ippo_rnn():
    return _actor(lambda name: nn.GRUCell(H, name=name, **double()), "gru", 7, "cell")


@program
def stoix_rec_ppo():
    return _actor(lambda name: nn.OptimizedLSTMCell(H, name=name, **double()), "lstm", 7, "cell")


@program
def craftax_ppo_rnn():
    """As purejaxrl's, with the hidden state given by the caller."""
    apply, params = actor_critic(lambda name: nn.GRUCell(H, name=name, **double()), 6)
    x, y = (numbers(T, B, D, seed=1), RESETS), numbers(T, B, A, seed=2)
    loss_of = lambda params, obs, dones, target: mse(apply(params, obs, dones), target)  # noqa: E731
    return Program(
        rl.jax.model(loss_of, params),
        x,
        y,
        lambda x: loss_of(params, *x, y),
        {"ScannedRNN_0.cell": ("gru", 0)},
        time_major=True,
        returns_loss=True,
    )


@program
def flax_seq2seq():
    """An encoder whose state starts a decoder, which is fed the target's numbers."""

    class Seq2seq(nn.Module):
        @nn.compact
        def __call__(self, source, target):
            encoder = nn.RNN(nn.LSTMCell(H, **double()), return_carry=True, name="encoder")
            decoder = nn.RNN(nn.LSTMCell(H, **double()), name="decoder")
            state, _ = encoder(source)
            return nn.Dense(A, **double())(decoder(target, initial_carry=state))

    net, x = Seq2seq(), (numbers(B, T, D, seed=1), numbers(B, T, A, seed=3))
    params = net.init(key(), *map(jnp.asarray, x))
    layers = {"LSTMCell_0": ("lstm", 0), "LSTMCell_1": ("lstm", 1)}
    return Program(rl.jax.model(net, params), x, numbers(B, T, A, seed=2), lambda x: net.apply(params, *x), layers)


def _module(net, layers, x=None, y=None):
    x = numbers(B, T, D, seed=1) if x is None else x
    y = numbers(B, A, seed=2) if y is None else y
    function = pure(net) if isinstance(net, nnx.Module) else net
    return Program(net, x, y, function, layers)


def pure(net):
    """Return a module of NNX as a function that leaves its counters alone."""
    graph, state = nnx.split(net)
    return lambda *x: nnx.merge(graph, state, copy=True)(*x)


class Head(nnx.Module):
    def __init__(self, rnn, width=H):
        self.rnn, self.head = rnn, nnx.Linear(width, A, rngs=nnx.Rngs(1), **double())

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


@program
def nnx_lstm():
    return _module(Head(nnx.RNN(nnx.LSTMCell(D, H, rngs=nnx.Rngs(0), **double()))), {"rnn.cell": ("lstm", 0)})


@program
def nnx_optimized_lstm_reversed():
    cell = nnx.OptimizedLSTMCell(D, H, rngs=nnx.Rngs(0), **double())
    return _module(Head(nnx.RNN(cell, reverse=True, keep_order=True)), {"rnn.cell": ("lstm", 0)})


@program
def nnx_simple():
    return _module(Head(nnx.RNN(nnx.SimpleCell(D, H, rngs=nnx.Rngs(0), **double()))), {"rnn.cell": ("simple_rnn", 0)})


@program
def nnx_bidirectional():
    cells = [nnx.GRUCell(D, H, rngs=nnx.Rngs(i), **double()) for i in range(2)]
    net = Head(nnx.Bidirectional(*map(nnx.RNN, cells)), 2 * H)
    return _module(net, {"rnn.forward_rnn.cell": ("gru", 0), "rnn.backward_rnn.cell": ("gru", 1)})


@program
def nnx_actor():
    """A cell of NNX stepped by ``nnx.scan`` over axis 1, reset by flags."""

    class Actor(nnx.Module):
        def __init__(self):
            self.cell = nnx.GRUCell(D, H, rngs=nnx.Rngs(0), **double())
            self.head = nnx.Linear(H, A, rngs=nnx.Rngs(1), **double())

        def __call__(self, obs, dones):
            @nnx.scan(in_axes=(nnx.Carry, None, 1, 1), out_axes=(nnx.Carry, 1))
            def step(h, cell, obs_t, done_t):
                h, y = cell(jnp.where(done_t[:, None], 0.0, h), obs_t)
                return h, y

            _, hidden = step(jnp.zeros((obs.shape[0], H)), self.cell, obs, dones)
            return self.head(hidden)

    net = Actor()
    x, y = (numbers(B, T, D, seed=1), RESETS.T.copy()), numbers(B, T, A, seed=2)
    return Program(net, x, y, lambda x: pure(net)(*x), {"cell": ("gru", 0)})


class EquinoxRNN(eqx.Module):
    cell: eqx.Module
    linear: eqx.nn.Linear
    pairs: bool = eqx.field(static=True)

    def __call__(self, xs):
        start = jnp.zeros(H)
        state, _ = jax.lax.scan(lambda c, x: (self.cell(x, c), None), (start, start) if self.pairs else start, xs)
        return self.linear(state[0] if self.pairs else state)


def _equinox(cell, kind):
    net = EquinoxRNN(cell, eqx.nn.Linear(H, A, key=key(1)), kind == "lstm")
    return _module(net, {"cell": (kind, 0)})._replace(function=jax.vmap(net))


@program
def equinox_train_rnn():
    return _equinox(eqx.nn.GRUCell(D, H, key=key()), "gru")


@program
def equinox_lstm():
    return _equinox(eqx.nn.LSTMCell(D, H, key=key()), "lstm")


@program
def feedbax_controller():
    """A recurrent controller that moves a point mass, and is fed where it is: two states of a pytree in one loop."""

    class Loop(eqx.Module):
        net: eqx.nn.GRUCell
        readout: eqx.nn.Linear

        def __call__(self, goals):
            def step(state, goal):
                hidden = self.net(jnp.concatenate([goal, state["position"]]), state["hidden"])
                velocity = 0.9 * state["velocity"] + 0.1 * self.readout(hidden)
                state = {"hidden": hidden, "position": state["position"] + 0.1 * velocity, "velocity": velocity}
                return state, state["position"]

            start = {"hidden": jnp.zeros(H), "position": jnp.zeros(A), "velocity": jnp.zeros(A)}
            return jax.lax.scan(step, start, goals)[1]

    net = Loop(eqx.nn.GRUCell(D + A, H, key=key()), eqx.nn.Linear(H, A, key=key(1)))
    found = _module(net, {"": ("custom", 0)}, y=numbers(B, T, A, seed=2))
    return found._replace(function=jax.vmap(net))


def _haiku(forward, x, y, layers, time_major=True):
    transformed = hk.without_apply_rng(hk.transform(forward))
    params = transformed.init(jax.random.PRNGKey(0), *map(jnp.asarray, x))
    return Program(rl.jax.model(transformed, params), x, y, lambda x: transformed.apply(params, *x), layers, time_major)


@program
def haiku_rnn():
    def forward(x):
        core = hk.LSTM(H)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(A))(outputs)

    return _haiku(forward, (numbers(T, B, D, seed=1),), numbers(T, B, A, seed=2), {"lstm.linear": ("lstm", 0)})


@program
def haiku_gru_vanilla():
    def forward(x):
        gru, vanilla = hk.GRU(H), hk.VanillaRNN(H)
        outputs, _ = hk.dynamic_unroll(gru, x, gru.initial_state(x.shape[1]))
        outputs, _ = hk.dynamic_unroll(vanilla, outputs, vanilla.initial_state(x.shape[1]))
        return outputs

    layers = {"gru": ("gru", 0), "vanilla_rnn": ("simple_rnn", 1)}
    return _haiku(forward, (numbers(T, B, D, seed=1),), numbers(T, B, H, seed=2), layers)


@program
def haiku_impala():
    """A core that is reset where an episode ends."""

    def forward(x, resets):
        core = hk.ResetCore(hk.LSTM(H))
        outputs, _ = hk.dynamic_unroll(core, (x, resets), core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(A))(outputs)

    x = (numbers(T, B, D, seed=1), RESETS)
    return _haiku(forward, x, numbers(T, B, A, seed=2), {"lstm.linear": ("lstm", 0)})


@program
def dreamer_rssm():
    """A deterministic and a stochastic state: the second is sampled, with gradients straight through."""
    draw = functools.partial(numbers, seed=5)
    params = {"rssm": {"in": 0.4 * draw(A + H, H), "u": 0.4 * draw(H, 3 * H), "w": 0.4 * draw(H, 3 * H)}}
    params["rssm"] |= {"stoch": 0.4 * draw(H, A), "head": 0.4 * draw(H, A)}

    def apply(params, actions):
        p = jax.tree.map(jnp.asarray, params["rssm"])

        def step(carry, action):
            random, sub = jax.random.split(carry["key"])
            x = jnp.tanh(jnp.concatenate([carry["stoch"], action], -1) @ p["in"])
            reset, update, cand = jnp.split(x @ p["w"], 3, -1)
            h_reset, h_update, h_cand = jnp.split(carry["deter"] @ p["u"], 3, -1)
            gate = jax.nn.sigmoid(update + h_update - 1)
            deter = gate * jnp.tanh(cand + jax.nn.sigmoid(reset + h_reset) * h_cand) + (1 - gate) * carry["deter"]
            soft = jax.nn.softmax(deter @ p["stoch"], -1)
            hard = jax.nn.one_hot(jax.random.categorical(sub, jnp.log(soft)), A)
            stoch = hard + soft - jax.lax.stop_gradient(soft)
            return {"key": random, "deter": deter, "stoch": stoch}, (deter @ p["head"], stoch)

        samples = actions.shape[0]
        start = {"key": jax.random.key(3), "deter": jnp.zeros((samples, H)), "stoch": jnp.zeros((samples, A))}
        return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(actions, 0, 1))[1][0], 0, 1)

    return Program(
        rl.jax.model(apply, params),
        numbers(B, T, H, seed=1),
        numbers(B, T, A, seed=2),
        lambda x: apply(params, x),
        {"rssm": ("custom", 0)},
    )


@program
def computation_thru_dynamics():
    """A vanilla network of plain arrays, one sample at a time, vectorised by the user."""
    draw = functools.partial(numbers, seed=5)
    params = {"h0": draw(H), "wI": 0.5 * draw(H, D), "wR": 0.4 * draw(H, H), "bR": draw(H), "wO": draw(A, H)}

    def one(params, xs):
        def step(h, x):
            h = jnp.tanh(params["wI"] @ x + params["wR"] @ h + params["bR"])
            return h, h

        return jax.lax.scan(step, jnp.asarray(params["h0"]), xs)[1] @ params["wO"].T

    apply = jax.vmap(one, in_axes=(None, 0))
    names = {f"jax_programs.py:{one.__code__.co_firstlineno + 5}": "rnn"}
    return Program(
        rl.jax.model(apply, params, names=names),
        numbers(B, T, D, seed=1),
        numbers(B, T, A, seed=2),
        lambda x: apply(params, x),
        {"rnn": ("simple_rnn", 0)},
    )


@program
def jaxley_cable():
    """A neuron of coupled compartments: gates and voltages in a dictionary, voltages by an implicit step of a cable.

    The tridiagonal system of each time step is solved by loops over the compartments.
    """
    draw = functools.partial(numbers, H, seed=5)
    params = {"gNa": 1.0 + 0.2 * draw(), "gLeak": 0.3 + 0.1 * draw() ** 2, "axial": 0.5 + 0.1 * numbers(seed=6)}

    def solve(diagonal, off, right):
        def eliminate(before, row):
            d, r = row[0] - off**2 / before[0], row[1] - off * before[1] / before[0]
            return (d, r), (d, r)

        first = (diagonal[0], right[0])
        _, (d, r) = jax.lax.scan(eliminate, first, (diagonal[1:], right[1:]))
        last = r[-1] / d[-1]
        back = lambda v, row: ((new := (row[1] - off * v) / row[0]), new)  # noqa: E731
        rows = (jnp.append(first[0], d[:-1]), jnp.append(first[1], r[:-1]))
        return jnp.append(jax.lax.scan(back, last, rows, reverse=True)[1], last)

    def simulate(params, stimulus):
        p, dt = jax.tree.map(jnp.asarray, params), 0.4
        neighbours = jnp.full(H, 2.0).at[jnp.array([0, H - 1])].set(1.0)

        def step(state, current):
            v = state["v"]
            m = state["m"] + dt * (jax.nn.sigmoid(2 * v) - state["m"]) / (1 + v**2)
            h = state["h"] + dt * 0.5 * (jax.nn.sigmoid(-3 * v) - state["h"])
            conductance = p["gNa"] * m**3 * h
            right = v + dt * (conductance * 1.5 - p["gLeak"] * 0.6)
            right = right.at[: len(current)].add(dt * current)
            diagonal = 1 + dt * (conductance + p["gLeak"] + p["axial"] * neighbours)
            v = solve(diagonal, -dt * p["axial"], right)
            return {"h": h, "m": m, "v": v}, v[:A]

        start = {"h": jnp.full(H, 0.6), "m": jnp.full(H, 0.1), "v": jnp.full(H, -0.5)}
        return jax.lax.scan(step, start, stimulus)[1]

    apply = jax.vmap(simulate, in_axes=(None, 0))
    return Program(
        rl.jax.model(apply, params),
        numbers(B, T, D, seed=1),
        numbers(B, T, A, seed=2),
        lambda x: apply(params, x),
        {"": ("custom", 0)},
    )


@program
def recurrentgemma_linear_scan():
    """A diagonal recurrence whose decay follows from the input: the sequential form of RG-LRU."""
    draw = functools.partial(numbers, seed=5)
    params = {"rg_lru": {"a": draw(H), "gate": 0.5 * draw(D, H), "x": 0.5 * draw(D, H)}}

    def apply(params, x):
        p = jax.tree.map(jnp.asarray, params["rg_lru"])
        log_a = -8.0 * jax.nn.sigmoid(x @ p["gate"]) * jax.nn.softplus(p["a"])
        a = jnp.exp(log_a)
        inputs = jnp.sqrt(1 - a**2) * (x @ p["x"])
        step = lambda h, ax: ((new := ax[0] * h + ax[1]), new)  # noqa: E731
        start = jnp.zeros((x.shape[0], H))
        return jnp.swapaxes(jax.lax.scan(step, start, (jnp.swapaxes(a, 0, 1), jnp.swapaxes(inputs, 0, 1)))[1], 0, 1)

    return Program(
        rl.jax.model(apply, params),
        numbers(B, T, D, seed=1),
        numbers(B, T, H, seed=2),
        lambda x: apply(params, x),
        {"": ("custom", 0)},
    )


def lru(params, x):
    p = jax.tree.map(jnp.asarray, params["lru"])
    decay = jnp.exp(-jnp.exp(p["nu"]) + 1j * jnp.exp(p["theta"]))

    def one(xs):
        inputs = xs @ p["B"]
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs))
        return (states @ p["C"]).real

    return jax.vmap(one)(x)


def lru_params():
    draw = functools.partial(numbers, seed=5)
    complex_draw = lambda *shape: draw(*shape) + 1j * numbers(*shape, seed=6)  # noqa: E731
    return {"lru": {"nu": 0.1 * draw(H), "theta": 0.1 * draw(H), "B": complex_draw(D, H), "C": complex_draw(H, A)}}


def lru_in_steps(params, x, taps):
    """Return the output of ``lru`` by a loop over steps, and its states plus ``taps`` (real, imaginary)."""
    p = jax.tree.map(jnp.asarray, params["lru"])
    decay = jnp.exp(-jnp.exp(p["nu"]) + 1j * jnp.exp(p["theta"]))
    states = in_steps(decay, x @ p["B"], taps)
    return (states @ p["C"]).real, states


def in_steps(decay, inputs, taps):
    """Return the states of a diagonal recurrence, (sample, time, unit)."""
    state, states = jnp.zeros_like(inputs[:, 0]), []
    for t in range(inputs.shape[1]):
        state = decay * state + inputs[:, t] + taps[:, t, :H] + 1j * taps[:, t, H:]
        states.append(state)
    return jnp.stack(states, 1)


def s5(params, x):
    """A layer of S5: steps of its own for every unit, held inputs, and pairs of conjugate states."""
    decay, inputs, p = _s5(params, x)

    def one(inputs):
        combine = lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1])  # noqa: E731
        return jax.lax.associative_scan(combine, (decay * jnp.ones((inputs.shape[0], 1)), inputs))[1]

    return _s5_readout(jax.vmap(one)(inputs), x, p)


def s5_in_steps(params, x, taps):
    """Return the output of ``s5`` by a loop over steps, and its states; ``taps`` as for ``lru_in_steps``."""
    decay, inputs, p = _s5(params, x)
    states = in_steps(decay, inputs, taps)
    return _s5_readout(states, x, p), states


def _s5(params, x):
    p = jax.tree.map(jnp.asarray, params["s5"])
    eigenvalues, steps = -jnp.exp(p["re"]) + 1j * p["im"], jnp.exp(p["log_step"])
    decay = jnp.exp(eigenvalues * steps)
    return decay, x @ (p["B"] * (decay - 1) / eigenvalues), p


def _s5_readout(states, x, p):
    return jax.nn.gelu(2 * (states @ p["C"]).real + x @ p["D"])


def s5_params():
    draw = functools.partial(numbers, seed=7)
    complex_draw = lambda *shape: draw(*shape) + 1j * numbers(*shape, seed=8)  # noqa: E731
    made = {"re": 0.2 * draw(H) - 1, "im": 1 + numbers(H, seed=9), "log_step": 0.1 * numbers(H, seed=10)}
    return {"s5": made | {"B": complex_draw(D, H), "C": complex_draw(H, A), "D": draw(D, A)}}
