"""What is read off a traced program, without running it: cells by their equations, axes, names, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnlens as rl
import rnnlens.adapters.jax as adapter_jax
from rnnlens.adapters.jax import bound, program
from rnnlens.adapters.registry import adapter_for

B, T, D, H = 3, 5, 4, 2


def params(seed=0):
    draw = lambda *shape: np.random.default_rng(seed).normal(size=shape).astype("float32")  # noqa: E731
    return {"rnn": {"W": draw(D, 4 * H), "U": draw(H, 4 * H), "b": draw(4 * H), "p": draw(H)}}


def gates(p, x, h):
    return jnp.split(x @ p["W"] + h @ p["U"] + p["b"], 4, axis=-1)


def lstm(p, x, h, c):
    i, f, g, o = gates(p, x, h)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def peephole(p, x, h, c):
    i, f, g, o = gates(p, x, h)
    c = jax.nn.sigmoid(f + p["p"] * c) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def normalised(p, x, h, c):
    i, f, g, o = gates(p, x, h / (1 + jnp.abs(h).sum(-1, keepdims=True)))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def without_tanh(p, x, h, c):
    i, f, g, o = gates(p, x, h)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * c, c


def coupled(p, x, h, c):
    _, f, g, o = gates(p, x, h)
    c = jax.nn.sigmoid(f) * c + (1 - jax.nn.sigmoid(f)) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def fed_by_two(p, x, h, c):
    """An LSTM whose input is a product of a layer before it."""
    return lstm(p, jnp.tanh(x) * x, h, c)


def scanned(step, *, time_major=False, reset=False, mask=False):
    def apply(p, x, flags=None):
        samples = x.shape[1] if time_major else x.shape[0]
        start = (jnp.zeros((samples, H)),) * 2

        def body(carry, inputs):
            x_t, flag = inputs
            h, c = carry
            if reset:
                h, c = (jnp.where(flag[:, None], 0.0, s) for s in (h, c))
            new = step(p["rnn"], x_t, h, c)
            if mask:
                new = tuple(jnp.where(flag[:, None], a, b) for a, b in zip(new, carry, strict=True))
            return new, new[0]

        xs = x if time_major else jnp.swapaxes(x, 0, 1)
        flags = jnp.zeros((xs.shape[0], samples), bool) if flags is None else flags
        return jax.lax.scan(body, start, (xs, flags))[1]

    return apply


def layers_of(function, *data, names=None):
    model = rl.jax.model(function, params(), names=names)
    example = data if len(data) > 1 else data[0]
    return adapter_for(model).bind(model, example).program.layers


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lstm, "lstm"),
        (fed_by_two, "lstm"),
        (peephole, "custom"),
        (normalised, "custom"),
        (without_tanh, "custom"),
        (coupled, "custom"),
    ],
)
def test_a_cell_is_known_only_if_its_equations_are_those_of_the_cell(step, kind):
    (layer,) = layers_of(scanned(step), np.zeros((B, T, D), "float32"))
    assert (layer.name, layer.kind, layer.samples, layer.steps) == ("rnn", kind, B, T)


def test_weights_are_those_of_the_user_in_the_order_of_the_cell():
    p = params()
    model = rl.jax.model(scanned(lstm), p, example=np.zeros((B, T, D), "float32"))
    found, w = rl.weights(model)["rnn"], p["rnn"]
    np.testing.assert_array_equal(found.kernel, w["W"].reshape(D, 4, H))
    np.testing.assert_array_equal(found.recurrent_kernel, w["U"].reshape(H, 4, H))
    np.testing.assert_array_equal(found.bias, w["b"].reshape(4, H))


@pytest.mark.parametrize("condition", ["reset", "mask"])
def test_conditions_within_the_step_belong_to_the_cell(condition):
    flags = np.zeros((T, B), bool)
    (layer,) = layers_of(scanned(lstm, time_major=True, **{condition: True}), np.zeros((T, B, D), "float32"), flags)
    assert layer.kind == "lstm"
    assert (layer.cell.reset is not None, layer.cell.mask is not None) == (condition == "reset", condition == "mask")
    assert getattr(layer.cell, condition).value is True


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(("samples", "steps"), [(3, 5), (4, 4), (2, 4), (1, 5)])
def test_axes_are_told_apart_also_where_sizes_are_equal(time_major, samples, steps):
    shape = (steps, samples, D) if time_major else (samples, steps, D)
    (layer,) = layers_of(scanned(lstm, time_major=time_major), np.zeros(shape, "float32"))
    assert (layer.samples, layer.steps, layer.roles.sample[layer.state_variables[0]]) == (samples, steps, 0)


@pytest.mark.parametrize("steps", [T, D, B])
def test_channels_before_steps(steps):
    """Data with axes sample, channel, step, as most packages for time series have them."""

    def apply(p, x):
        states = jax.lax.scan(
            lambda s, x_t: (lstm(p["rnn"], x_t, *s),) * 2, (jnp.zeros((len(x), H)),) * 2, jnp.transpose(x, (2, 0, 1))
        )
        return states[0][0]

    x = np.random.default_rng(0).normal(size=(B, D, steps)).astype("float32")
    model = rl.jax.model(apply, params())
    jacobian = rl.jacobian(model, x)
    of_one = jax.vmap(jax.jacobian(lambda one: apply(params(), one[None])[0]))(x)
    assert jacobian.sizes == {"sample": B, "out_unit": H, "in_time": steps, "in_feature": D}
    np.testing.assert_allclose(jacobian.transpose("sample", "out_unit", "in_feature", "in_time"), of_one, atol=1e-5)
    assert rl.gradients(model, x, of="output", reduce="sum", wrt="input").dims == ("sample", "time", "feature")


def test_one_sequence_without_an_axis_of_samples():
    def one(p, x):
        return jax.lax.scan(lambda s, x_t: (lstm(p["rnn"], x_t, *s),) * 2, (jnp.zeros(H),) * 2, x)[1][0]

    (layer,) = layers_of(one, np.zeros((T, D), "float32"))
    assert (layer.kind, layer.samples, layer.steps) == ("lstm", 1, T)


def test_a_number_of_samples_that_the_function_fixes_is_refused():
    def fixed(p, x):
        start = (jnp.zeros((B, H)),) * 2
        return jax.lax.scan(lambda s, x_t: (lstm(p["rnn"], x_t, *s), None), start, jnp.swapaxes(x, 0, 1))[0][0]

    with pytest.raises(rl.errors.InputError, match="works for this number only"):
        layers_of(fixed, np.zeros((B, T, D), "float32"))


def test_a_loop_without_paths_is_named_by_its_line_and_can_be_renamed():
    def apply(w, x):
        return jax.lax.scan(lambda h, x_t: (jnp.tanh(x_t @ w + h), None), jnp.zeros((x.shape[1], H)), x)[0]

    x = np.zeros((T, B, D), "float32")
    line = f"test_programs_traced.py:{apply.__code__.co_firstlineno + 1}"
    for names, expected in (({}, line), ({line: "mine"}, "mine")):
        model = rl.jax.model(apply, np.ones((D, H), "float32"), names=names, example=x)
        assert [info.name for info in rl.layers(model)] == [expected]


def test_loops_with_weights_of_one_path_have_names_of_their_own():
    def apply(p, x):
        first = scanned(lstm)(p, x)
        return scanned(lstm, time_major=True)({"rnn": {**p["rnn"], "W": jnp.ones((H, 4 * H))}}, first)

    first, second = layers_of(apply, np.zeros((B, T, D), "float32"))
    assert (first.name, second.name, first.kind, second.kind) == ("rnn", "rnn_2", "lstm", "lstm")


def test_a_first_trace_compiles_its_program_and_the_users_own_alone():
    """Recorded arrays are read by NumPy, and data are copied: an operation of JAX outside of a program compiles one."""
    numbers = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("float32")  # noqa: E731
    compiled, params = [], {"w": jnp.asarray(numbers(3, 7)), "u": jnp.asarray(0.3 * numbers(7, 7))}

    def apply(params, x):
        def step(h, x_t):
            h = jnp.tanh(x_t @ params["w"] + h @ params["u"])
            return h, h

        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros((x.shape[0], 7)), jnp.swapaxes(x, 0, 1))[1], 0, 1)

    def listen(event, _seconds, **details):
        if event.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    loss = lambda output, target: jnp.mean((output - target) ** 2)  # noqa: E731
    trace = rl.trace(rl.jax.model(apply, params), numbers(11, 13, 3), numbers(11, 13, 7), loss=loss)
    assert trace.certificate.state == "passed"
    assert len(compiled) == 2, compiled


def test_the_users_function_is_traced_once_for_each_size_and_once_for_the_reference(monkeypatch):
    """The program with a loss continues the one without; axes that count samples and steps take two more sizes."""
    random = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("float32")  # noqa: E731
    sizes, opened, params = [], [], {"w": random(D, H), "u": 0.3 * random(H, H)}

    def apply(params, x):
        sizes.append(x.shape)
        step = lambda h, x_t: ((new := jnp.tanh(x_t @ params["w"] + h @ params["u"])), new)  # noqa: E731
        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros((x.shape[0], H)), jnp.swapaxes(x, 0, 1))[1], 0, 1)

    for module in (adapter_jax, bound, program):
        original = module.open_model
        monkeypatch.setattr(module, "open_model", lambda *a, o=original, **k: opened.append(a) or o(*a, **k))
    model, x, y = rl.jax.model(apply, params), random(B, T, D), random(B, T, H)
    loss = lambda output, target: jnp.mean((output - target) ** 2)  # noqa: E731
    assert rl.trace(model, x, y, loss=loss).certificate.state == "passed"
    assert sorted(sizes) == [(B, T, D), (B, T, D), (B, T + 1, D), (B + 1, T, D)]
    opened.clear()
    rl.trace(model, x, y, loss=loss)
    assert len(sizes) == 4
    assert len(opened) <= 5  # its fingerprint, its run, its dtype, its reference, and the places of its weights


def test_a_mask_with_an_axis_of_one_entry_is_recognised():
    random = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("float32")  # noqa: E731
    mask = np.arange(T)[:, None, None] < np.array([5, 3, 1])[:, None]

    def apply(params, x):
        def step(h, slices):
            x_t, mask_t = slices
            h = jnp.where(mask_t, jnp.tanh(x_t @ params["w"] + h @ params["u"]), h)
            return h, h

        mask_t = jnp.abs(x[..., :1]) > 0
        return jax.lax.scan(step, jnp.zeros((x.shape[1], H)), (x, mask_t))[1]

    params, x, y = {"w": random(D, H), "u": random(H, H)}, random(T, B, D) * mask, random(T, B, H)
    model = rl.jax.model(apply, params)
    (layer,) = adapter_for(model).bind(model, x).program.layers
    assert layer.kind == "simple_rnn"
    assert layer.cell.mask is not None
    loss = lambda output, target: jnp.mean((output - target) ** 2)  # noqa: E731
    trace = rl.trace(model, x, y, loss=loss)
    assert trace.certificate.state == "passed"
