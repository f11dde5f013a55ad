"""``DropoutWrapper`` with each option around each cell: recognised if nothing is dropped, else exact or refused."""

from itertools import product

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

cells = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS = 3, 5, 4, 4
X = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))
KINDS = {"gru": cells.GRUCell, "lstm": cells.LSTMCell, "simple_rnn": cells.BasicRNNCell}
WRAPPINGS = {
    "alone": lambda make: make(),
    "stack": lambda make: cells.MultiRNNCell([make(), make()]),
    "residual": lambda make: cells.ResidualWrapper(make()),
    "stack of residual": lambda make: cells.MultiRNNCell([make(), cells.ResidualWrapper(make())]),
}
#: Which of input, state and output are dropped.
DROPPED = [d for d in product((False, True), repeat=3) if any(d)]


def build_net(kind, wrapping, dropped, variational, keep):
    """Return x, outputs, loss, session and TensorFlow's gradients by x and variables, built before any run."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES], name="x")
    names = [f"{name}_keep_prob" for name in ("input", "state", "output")]
    options = {name: keep for name, is_dropped in zip(names, dropped, strict=True) if is_dropped}

    def make():
        cell = KINDS[kind](UNITS)
        return cells.DropoutWrapper(
            cell, **options, variational_recurrent=variational, input_size=FEATURES, dtype=tf.float64
        )

    lengths = tf.constant([5, 3, 4])
    outputs, state = tf.nn.dynamic_rnn(WRAPPINGS[wrapping](make), x, sequence_length=lengths, dtype=tf.float64)
    weights = tf.constant(np.random.default_rng(1).normal(size=(SAMPLES, STEPS, UNITS)))
    loss = tf.reduce_sum(weights * outputs) + tf.add_n([tf.reduce_sum(s**2) for s in tf.nest.flatten(state)])
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, [x, *variables])
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    return x, outputs, loss, session, dict(zip(["x", *(v.op.name for v in variables)], gradients, strict=True))


CASES = list(product(KINDS, WRAPPINGS, DROPPED, (False, True)))
#: One case of each kind of option for every run; the whole product runs with the tests marked ``full``.
QUICK_CASES = [
    *(("gru", "alone", (True, True, False), variational) for variational in (False, True)),
    ("lstm", "stack", (True, True, True), False),
    ("lstm", "residual", (False, True, False), True),
    ("simple_rnn", "stack of residual", (False, True, True), False),
]


def check_all_kept(kind, wrapping, dropped, variational):
    """Check that with keep probabilities of 1 a cell has gates and its own input, and TensorFlow's gradients."""
    keep = tf.placeholder(tf.float64, [], name="keep")
    x, outputs, loss, session, gradients = build_net(kind, wrapping, dropped, variational, keep)
    net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss, feed={keep: 1.0})
    layers = [row.name for row in rl.layers(net)]
    assert [row.cell for row in rl.layers(net)] == [kind] * (2 if "stack" in wrapping else 1)
    trace = rl.trace(net, X)
    assert trace.certificate.state == "passed"
    truth = session.run(gradients, {x: X, keep: 1.0})
    for layer in layers:
        assert "gates" in trace[layer]
        assert trace[layer].input_grad.shape == X.shape
    if wrapping == "alone":
        np.testing.assert_allclose(trace[layers[0]].input_grad, truth["x"], rtol=1e-10, atol=1e-12)
    by_weight = rl.gradients(net, X, of="loss", wrt="weights")
    kernel_grad = truth[next(name for name in truth if name.endswith("kernel"))]
    actual = by_weight[f"{layers[0]}/kernel"].values
    assert np.abs(np.sort(actual[:, 0 if actual.ndim == 2 else slice(None)].ravel())).sum() > 0
    assert np.isclose(np.abs(actual).sum(), np.abs(input_rows(kind, truth, kernel_grad)).sum(), rtol=1e-10)


def input_rows(kind, truth, kernel_grad):
    """Return the rows of the first cell's kernels that multiply its input."""
    if kind != "gru":
        return kernel_grad[:FEATURES]
    scope = next(name for name in truth if name.endswith("gates/kernel")).removesuffix("gates/kernel")
    return np.concatenate(
        [truth[f"{scope}{kernel_name}/kernel"][:FEATURES] for kernel_name in ("gates", "candidate")], 1
    )


def check_some_dropped(kind, wrapping, dropped, variational):
    """Check that a mask per step is traced for inputs and outputs, and refused for states, with a workaround."""
    x, outputs, loss, session, _ = build_net(kind, wrapping, dropped, variational, 0.6)
    net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss)
    _, drops_state, _ = dropped
    if drops_state and not variational:
        with pytest.raises(rl.errors.UnsupportedError, match="random numbers that are drawn anew") as refusal:
            rl.trace(net, X)
        assert "keep probability of 1" in str(refusal.value)
        return
    if wrapping == "stack of residual" and dropped == (True, False, True) and not variational:
        # The mask of the lower cell's output is a part of both cells' steps, and two runs would draw two masks.
        with pytest.raises(rl.errors.UnsupportedError, match="random numbers that are used in several places"):
            rl.trace(net, X)
        return
    trace = rl.trace(net, X)
    assert trace.certificate.state != "failed"
    for row in rl.layers(net):
        assert trace[row.name].input_grad.shape == X.shape
        if "unknown cell" in row.options:
            assert drops_state
            assert any(row.options["unknown cell"] in note for note in trace.notes)
        else:
            assert row.cell == kind


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_known_where_all_is_kept(case):
    check_all_kept(*case)


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_exact_or_refused_where_some_is_dropped(case):
    check_some_dropped(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", [check_all_kept, check_some_dropped])
def test_all_options(check, case):
    check(*case)


class Leaky(cells.BasicRNNCell):
    """Custom cell with h' = (h + tanh(W [x, h])) / 2."""

    def call(self, x, h):
        new = (h + super().call(x, h)[0]) / 2
        return new, new


@pytest.mark.parametrize("wrapping", ["alone", "stack"])
def test_a_cell_of_ones_own_where_all_is_kept(wrapping, monkeypatch):
    """A custom cell with dropout wrappers is traced at keep probabilities of 1 and refused at 0.5."""
    monkeypatch.setitem(KINDS, "own", Leaky)
    keep = tf.placeholder_with_default(tf.constant(0.5, tf.float64), [], name="keep")
    x, outputs, loss, session, gradients = build_net("own", wrapping, (True, True, True), False, keep)
    net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss, feed={keep: 1.0})
    trace = rl.trace(net, X)
    assert trace.certificate.state == "passed"
    np.testing.assert_allclose(
        trace["rnn"].input_grad, session.run(gradients["x"], {x: X, keep: 1.0}), rtol=1e-10, atol=1e-12
    )
    with pytest.raises(rl.errors.UnsupportedError, match="random numbers that are drawn anew"):
        rl.trace(rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss), X)


def test_another_value_is_another_cell():
    """If nets of one graph feed different keep probabilities, each is recognised by its own value."""
    keep = tf.placeholder(tf.float64, [], name="keep")
    x, outputs, loss, session, _ = build_net("gru", "alone", (True, True, False), True, keep)
    kinds = []
    for value in (1.0, 0.6, 0.999, 1.0):
        net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss, feed={keep: value})
        kinds.append(rl.layers(net)[0].cell)
        assert rl.trace(net, X).certificate.state != "failed"
    assert kinds == ["gru", "rnn/gru_cell", "rnn/gru_cell", "gru"]


def test_a_rate_in_a_variable_is_read_at_every_call():
    """With the keep probability in a variable, a net has gates at 1 and is refused as soon as it is set to 0.5."""
    keep = tf.get_variable("keep", [], tf.float64, tf.ones_initializer(), trainable=False)
    x, outputs, loss, session, _ = build_net("gru", "alone", (True, True, False), False, keep)
    net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss)
    assert "gates" in rl.trace(net, X)["rnn"]
    keep.load(0.5, session)
    with pytest.raises(rl.errors.UnsupportedError, match="random numbers that are drawn anew"):
        rl.trace(net, X)
    keep.load(1.0, session)
    assert "gates" in rl.trace(net, X)["rnn"]
