"""Programs of JAX's users, as they are written: every number against copies unrolled in Python."""

import jax
import jax_programs
import numpy as np
import pytest
from jax_programs import PROGRAMS, A, B, D, H, T, lru, lru_params, mse, numbers
from unrolled_jax import difference, unrolled

import rnnlens as rl

BOUND = 1e-12
GATES = {
    "lstm": ("input", "forget", "candidate", "output"),
    "gru": ("update", "reset", "candidate"),
    "simple_rnn": ("candidate",),
    "custom": (),
}
#: Programs whose loops another function vectorises: their states have no sample axis that a tap could follow.
VECTORISED = {"equinox_train_rnn", "equinox_lstm", "feedbax_controller", "computation_thru_dynamics"}


def traced(program):
    loss = None if program.returns_loss else mse
    return rl.trace(program.model, program.x, program.y, loss=loss)


def value_of(program):
    output = program.function(program.x if isinstance(program.x, tuple) else jax.numpy.asarray(program.x))
    return output if program.returns_loss else mse(output, program.y)


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def case(request):
    with jax.enable_x64(True):
        program = PROGRAMS[request.param]()
        return request.param, program, traced(program)


def test_trace_is_certified_and_its_cells_are_recognised(case):
    name, program, trace = case
    assert trace.certificate.state == "passed", trace.certificate
    assert max(check.residual for check in trace.certificate.checks) < BOUND
    wanted = {layer for layer in program.layers if layer}
    assert wanted <= set(trace), (name, list(trace))
    for layer, (kind, _) in program.layers.items():
        found = trace[layer or next(iter(trace))]
        assert (tuple(found.gate.values) if "gates" in found else ()) == GATES[kind]


def test_states_and_total_and_direct_gradients_are_those_of_the_unrolled_copy(case):
    name, program, trace = case
    if name in VECTORISED:
        check_vectorised(name, program, trace)
        return
    states, totals = unrolled(lambda: value_of(program))
    for layer, (kind, number) in program.layers.items():
        found = trace[layer or next(iter(trace))]
        h, in_time = output_of(found, states[number])
        assert difference(found.hidden, in_time(states[number][h])) < BOUND
        if name == "dreamer_rssm":  # h_t is also read within the step
            continue
        assert difference(found.hidden_grad, in_time(totals[number][h])) < BOUND
        if "output_grad" in found:
            _, direct = unrolled(lambda: value_of(program), cut=number)
            assert difference(found.output_grad, in_time(direct[number][h])) < BOUND
        if kind == "lstm":
            c = 1 - h
            hidden, cell = states[number][h], np.tanh(states[number][c])
            within = totals[number][h] * hidden / cell * (1 - cell**2)  # h_t = o tanh(c_t)
            assert difference(found.cell_grad, in_time(totals[number][c] + within)) < BOUND


def output_of(found, states):
    """Return the number of the loop's state that is the layer's output, and the function that orders it by time."""

    def forward(steps):
        return np.moveaxis(steps, 0, 1)

    def backward(steps):  # a loop over flipped inputs
        return np.moveaxis(steps, 0, 1)[:, ::-1]

    candidates = [
        (np.abs(in_time(state) - found.hidden.values).max(), h, in_time)
        for h, state in enumerate(states)
        for in_time in (forward, backward)
        if in_time(state).shape == found.hidden.shape
    ]
    _, h, in_time = min(candidates, key=lambda candidate: candidate[0])
    return h, in_time


def check_vectorised(name, program, trace):
    """Sample by sample: the loop of one sample has no sample axis."""
    for layer in program.layers:
        found = trace[layer or next(iter(trace))]
        for i in range(B):
            states, totals = unrolled(lambda i=i: one_sample(name, program, i))
            h = int(
                np.argmin(
                    [
                        np.abs(s - found.hidden.values[i]).max() if s.shape == found.hidden.shape[1:] else np.inf
                        for s in states[0]
                    ]
                )
            )
            assert difference(found.hidden[i], states[0][h]) < BOUND
            if name in ("equinox_train_rnn", "computation_thru_dynamics"):
                assert difference(found.hidden_grad[i], totals[0][h]) < BOUND


def one_sample(name, program, i):
    """Return the loss of one sample's output, weighted as in the mean over all samples."""
    x, y = program.x[i], program.y[i]
    if name == "computation_thru_dynamics":
        output = program.model.source.__wrapped__(program.model.params, jax.numpy.asarray(x))
    else:
        output = program.model(jax.numpy.asarray(x))
    return jax.numpy.mean((output - y) ** 2) / B


@pytest.mark.parametrize(
    "name", ["nnx_lstm", "purejaxrl_ppo_rnn", "flax_seq2seq", "equinox_train_rnn", "feedbax_controller"]
)
def test_time_jacobian_is_jacrev_of_the_users_function(name):
    program = PROGRAMS[name]()
    x = tuple(map(jax.numpy.asarray, program.x)) if isinstance(program.x, tuple) else jax.numpy.asarray(program.x)
    jacobian = rl.jacobian(program.model, program.x, wrt="input[0]" if name == "flax_seq2seq" else "input")
    assert jacobian.certificate.state == "passed", jacobian.certificate
    first = x[0] if isinstance(x, tuple) else x
    run = lambda a: jax.tree.leaves(program.function((a, *x[1:]) if isinstance(x, tuple) else a))[0]  # noqa: E731
    full = np.asarray(jax.jacrev(run)(first))
    if program.time_major:
        full = np.stack([full[:, b][:, :, :, b] for b in range(B)])
    else:
        full = np.stack([full[b][..., b, :, :] for b in range(B)])
    if full.ndim == jacobian.ndim - 1:
        full = full[:, None]
    assert difference(jacobian, full.reshape(jacobian.shape)) < BOUND


def test_lru_by_associative_scan_has_states_and_leaves_the_users_function_alone():
    params, x, y = lru_params(), numbers(B, T, D, seed=1), numbers(B, T, A, seed=2)
    user = jax.jit(lru)
    before = np.asarray(user(params, x))
    trace = rl.trace(rl.jax.model(user, params), x, y, loss=mse)
    assert trace.certificate.state == "passed", trace.certificate
    (name,) = trace
    decay = np.exp(-np.exp(params["lru"]["nu"]) + 1j * np.exp(params["lru"]["theta"]))
    state, states = np.zeros((B, H), complex), []
    for t in range(T):
        state = decay * state + x[:, t] @ params["lru"]["B"]
        states.append(state)
    expected = np.stack(states, 1)
    states = [trace[name][state].values for state in ("hidden", "state_1")]  # the powers of the decay, and the states
    found = min(states, key=lambda a: np.abs(a - np.concatenate([expected.real, expected.imag], -1)).max())
    assert difference(found, np.concatenate([expected.real, expected.imag], -1)) < BOUND
    np.testing.assert_array_equal(user(params, x), before)
    assert jax.lax.associative_scan.__module__.startswith("jax")


def test_helpers_know_all_sizes():
    assert len({B, T, D, H, A}) == 5
    assert jax_programs.RESETS.any()
