"""Programs of JAX's users, as they are written: every number against copies unrolled in Python."""

import json

import jax
import jax_programs
import numpy as np
import pytest
from jax_programs import PROGRAMS, A, B, D, H, T, mse, numbers
from unrolled_jax import difference, scans_in_python, unrolled

import rnnlens as rl

BOUNDS = {"float64": 1e-12, "float32": 1e-5}
GATES = {
    "lstm": ("input", "forget", "candidate", "output"),
    "gru": ("update", "reset", "candidate"),
    "simple_rnn": ("candidate",),
    "custom": (),
}
#: Programs whose loops another function vectorises: their states have no sample axis that a tap could follow.
VECTORISED = {"equinox_train_rnn", "equinox_lstm", "feedbax_controller", "computation_thru_dynamics", "jaxley_cable"}


def traced(program):
    loss = None if program.returns_loss else mse
    return rl.trace(program.model, program.x, program.y, loss=loss)


def value_of(program):
    output = program.function(program.x if isinstance(program.x, tuple) else jax.numpy.asarray(program.x))
    return output if program.returns_loss else mse(output, program.y)


@pytest.fixture(scope="module", params=["float64", pytest.param("float32", marks=pytest.mark.full)])
def precision(request):
    return request.param


@pytest.fixture
def bound(precision):
    return BOUNDS[precision]


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def case(request, precision):
    with jax.enable_x64(precision == "float64"):
        program = PROGRAMS[request.param]()
        return request.param, program, traced(program)


def test_trace_is_certified_and_its_cells_are_recognised(case, bound):
    name, program, trace = case
    assert trace.certificate.state == "passed", trace.certificate
    assert max(check.residual for check in trace.certificate.checks) < bound
    wanted = {layer for layer in program.layers if layer}
    assert wanted <= set(trace), (name, list(trace))
    for layer, (kind, _) in program.layers.items():
        found = trace[layer or next(iter(trace))]
        assert (tuple(found.gate.values) if "gates" in found else ()) == GATES[kind]


def test_states_and_total_and_direct_gradients_are_those_of_the_unrolled_copy(case, bound):
    name, program, trace = case
    if name in VECTORISED:
        check_vectorised(name, program, trace, bound)
        return
    states, totals = unrolled(lambda: value_of(program))
    for layer, (kind, number) in program.layers.items():
        found = trace[layer or next(iter(trace))]
        h, in_time = output_of(found, states[number])
        state = states_of(found)[0]
        assert difference(found[state], in_time(states[number][h])) < bound
        assert difference(found[f"{state}_grad"], in_time(totals[number][h])) < bound
        if "output_grad" in found:
            _, direct = unrolled(lambda: value_of(program), cut=number)
            assert difference(found.output_grad, in_time(direct[number][h])) < bound
        if kind == "lstm":
            assert difference(found.cell_grad, in_time(totals[number][1 - h])) < bound


def states_of(found):
    """Return the names of a layer's states, the output first: those of its cell, or of the program's carry."""
    return json.loads(found.dataset.attrs["details"])["states"] or [
        name for name in ("hidden", "cell") if name in found
    ]


def output_of(found, states):
    """Return the number of the loop's state that is the layer's output, and the function that orders it by time."""

    def forward(steps):
        return np.moveaxis(steps, 0, 1)

    def backward(steps):  # a loop over flipped inputs
        return np.moveaxis(steps, 0, 1)[:, ::-1]

    first = found[states_of(found)[0]]
    candidates = [
        (np.abs(in_time(state) - first.values).max(), h, in_time)
        for h, state in enumerate(states)
        for in_time in (forward, backward)
        if in_time(state).shape == first.shape
    ]
    _, h, in_time = min(candidates, key=lambda candidate: candidate[0])
    return h, in_time


def check_vectorised(name, program, trace, bound):
    """Sample by sample: the loop of one sample has no sample axis."""
    for layer in program.layers:
        found = trace[layer or next(iter(trace))]
        first, *others = states_of(found)
        for i in range(B):
            states, totals = unrolled(lambda i=i: one_sample(name, program, i))
            _, direct = unrolled(lambda i=i: one_sample(name, program, i), cut=0)
            numbers_found = set()
            for quantity in (first, *others):
                ours = found[quantity].values[i]
                distances = [np.abs(s - ours).max() if s.shape == ours.shape else np.inf for s in states[0]]
                number = int(np.argmin(distances))
                numbers_found.add(number)
                assert difference(ours, states[0][number]) < bound
                assert difference(found[f"{quantity}_grad"][i], totals[0][number]) < bound
                if quantity == first and "output_grad" in found:
                    assert difference(found.output_grad[i], direct[0][number]) < bound
            assert len(numbers_found) == len(states[0])


def one_sample(name, program, i):
    """Return the loss of one sample's output, weighted as in the mean over all samples."""
    x, y = program.x[i], program.y[i]
    if name in ("computation_thru_dynamics", "jaxley_cable"):
        output = program.model.source.__wrapped__(program.model.params, jax.numpy.asarray(x))
    else:
        output = program.model(jax.numpy.asarray(x))
    return jax.numpy.mean((output - y) ** 2) / B


def test_time_jacobian_is_jacrev_of_the_users_function(case, bound):
    name, program, _ = case
    if program.returns_loss:  # a loss has no steps; the program is that of purejaxrl_ppo_rnn
        return
    x = tuple(map(jax.numpy.asarray, program.x)) if isinstance(program.x, tuple) else jax.numpy.asarray(program.x)
    wrt = "input[0]" if isinstance(program.x, tuple) and name != "haiku_rnn" else "input"
    jacobian = rl.jacobian(program.model, program.x, wrt=wrt)
    assert jacobian.certificate.state == "passed", jacobian.certificate
    first = x[0] if isinstance(x, tuple) else x

    def run(first):
        with scans_in_python():
            return jax.tree.leaves(program.function((first, *x[1:]) if isinstance(x, tuple) else first))[0]

    full = np.asarray(jax.jit(jax.jacrev(run))(first))
    if program.time_major:
        full = np.stack([full[:, b][:, :, :, b] for b in range(B)])
    else:
        full = np.stack([full[b][..., b, :, :] for b in range(B)])
    assert difference(jacobian, full.reshape(jacobian.shape)) < bound


@pytest.mark.parametrize("name", ["lru", "s5"])
def test_an_associative_scan_has_the_numbers_of_a_loop_and_the_users_function_is_left_alone(name, precision, bound):
    """States, total gradients and the time Jacobian of diagonal recurrences of complex numbers."""
    function, in_steps = getattr(jax_programs, name), getattr(jax_programs, f"{name}_in_steps")
    params, x, y = getattr(jax_programs, f"{name}_params")(), numbers(B, T, D, seed=1), numbers(B, T, A, seed=2)
    user = jax.jit(function)
    before = np.asarray(user(params, x))
    model = rl.jax.model(user, params)
    trace, jacobian = rl.trace(model, x, y, loss=mse), rl.jacobian(model, x)
    assert [result.certificate.state for result in (trace, jacobian)] == ["passed", "passed"]
    found = trace[next(iter(trace))]
    taps = jax.numpy.zeros((B, T, 2 * H))
    grads = jax.grad(lambda taps: mse(in_steps(params, x, taps)[0], y))(taps)
    states = np.asarray(in_steps(params, x, taps)[1])
    assert difference(found.hidden, np.concatenate([states.real, states.imag], -1)) < bound
    assert difference(found.hidden_grad, grads) < bound
    full = np.asarray(jax.jit(jax.jacrev(lambda x: in_steps(params, x, taps)[0]))(jax.numpy.asarray(x)))
    assert difference(jacobian, np.stack([full[b][:, :, b] for b in range(B)])) < bound
    np.testing.assert_array_equal(user(params, x), before)
    assert jax.lax.associative_scan.__module__.startswith("jax")


def test_helpers_know_all_sizes():
    assert len({B, T, D, H, A}) == 5
    assert jax_programs.RESETS.any()
