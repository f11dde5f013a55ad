"""Wrong calls on a graph are refused by name, with what to do instead; tensors are accepted wherever names are."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

X, Y = np.random.default_rng(0).normal(size=(2, 4, 3)), np.random.default_rng(1).normal(size=(2, 2))


@pytest.fixture
def network(graph):
    """Provide session, x, y, state, output and loss of a GRU."""
    x, y = tf.placeholder(tf.float64, [None, None, 3], name="x"), tf.placeholder(tf.float64, [None, 2], name="y")
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(2), x, dtype=tf.float64)
    out = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(out - y))
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    yield sess, x, y, state, out, loss
    sess.close()


def test_tensors_and_their_names_are_the_same(network):
    sess, _x, _y, state, out, loss = network
    net = rl.tf1.graph(sess, inputs={"x": "x:0"}, outputs={"out": out.name}, loss=loss.name, targets="y")
    by_object = rl.gradients(net, X, of=state, reduce="sum", wrt="weights")
    by_name = rl.gradients(net, X, of=state.name, reduce="sum", wrt="weights")
    by_port = rl.gradients(net, X, of="rnn.final_hidden", reduce="sum", wrt="weights")
    for key in ("rnn/kernel", "rnn/bias"):
        np.testing.assert_allclose(by_object[key], by_name[key], rtol=0)
        np.testing.assert_allclose(by_object[key], by_port[key], rtol=1e-12)
    assert by_object.disconnected["head/kernel"].code == "not_on_path"


def test_a_loss_of_the_graph_by_object(network):
    sess, x, y, _state, out, loss = network
    net = rl.tf1.graph(sess, inputs=x, outputs=out, targets=y)
    assert rl.trace(net, X, Y, loss=loss).loss == pytest.approx(sess.run(loss, {x: X, y: Y}))


def test_a_loss_as_a_function_is_built_in_our_copy(network):
    sess, x, y, _state, out, loss = network
    version = sess.graph.version
    net = rl.tf1.graph(sess, inputs=x, outputs=out)
    trace = rl.trace(net, X, Y, loss=lambda truth, output: tf.reduce_mean(tf.square(output - truth)))
    assert trace.loss == pytest.approx(sess.run(loss, {x: X, y: Y}))
    assert trace.certificate.state == "passed"
    assert sess.graph.version == version


def test_a_session_alone_shows_its_layers(network):
    sess, *_ = network
    assert [info.name for info in rl.layers(sess)] == ["rnn"]


def test_what_is_wrong_with_a_net(network):
    sess, x, _y, _state, out, loss = network
    with pytest.raises(rl.errors.InputError, match="This is no session"):
        rl.tf1.graph(out)
    with pytest.raises(rl.errors.LayerNotFoundError, match="hed/BiasAdd:0") as caught:
        rl.tf1.graph(sess, outputs={"out": "hed/BiasAdd:0"})
    assert "head/BiasAdd" in str(caught.value)
    with pytest.raises(rl.errors.LayerNotFoundError, match="no tensor of the graph"):
        rl.tf1.graph(sess, loss="\udcff")
    with pytest.raises(rl.errors.InputError, match="A loss is one number"):
        rl.tf1.graph(sess, loss=out)
    with tf.Graph().as_default(), pytest.raises(rl.errors.InputError, match="another graph"):
        rl.tf1.graph(sess, inputs=tf.constant(1.0))
    net = rl.tf1.graph(sess, inputs=x, outputs=out, loss=loss)
    with pytest.raises(rl.errors.InputError, match=r"targets=labels"):
        rl.trace(net, X, Y)
    with pytest.raises(rl.errors.UnsupportedError, match=r"feed=\{phase: True\}"):
        rl.trace(net, X, training=True)


def test_a_placeholder_that_is_not_fed_is_named(network):
    sess, x, _y, _state, out, _loss = network
    rate = tf.placeholder(tf.float64, [], name="rate")
    net = rl.tf1.graph(sess, inputs=x, outputs=out * rate)
    with pytest.raises(rl.errors.InputError, match="'rate' is not fed"):
        rl.trace(net, X)


def test_a_session_without_a_net(network):
    """A verb called on a session, with data or ``feed_dict=``, raises an error that shows how to make a net."""
    sess, x, y, *_ = network
    calls = {
        rl.errors.CallError: lambda: rl.trace(sess, feed_dict={x: X, y: Y}),
        rl.errors.InputError: lambda: rl.trace(sess, X, Y),
    }
    for error, call in calls.items():
        with pytest.raises(error, match=r"net = rl\.tf1\.graph\(session, inputs="):
            call()


def test_a_loss_that_needs_no_target(network):
    sess, x, _y, state, out, _loss = network
    net = rl.tf1.graph(sess, inputs=x, outputs=out, loss=tf.reduce_sum(state**2))
    trace = rl.trace(net, X)
    np.testing.assert_allclose(trace["rnn"].hidden_grad[:, -1], 2 * trace["rnn"].hidden[:, -1], rtol=1e-12)
    assert trace.certificate.state == "passed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feed": {"x": "one"}}, "holds no numbers"),
        ({"loss": tf.int32}, "no floating number"),
        ({"loss": "head/BiasAd"}, "did you mean 'head/BiasAdd'"),
    ],
)
def test_wrong_parts_of_a_net(network, options, message):
    sess, x, _y, _state, out, _loss = network
    options = {key: tf.constant(1) if value is tf.int32 else value for key, value in options.items()}
    with pytest.raises(rl.errors.RnnlensError, match=message):
        rl.trace(rl.tf1.graph(sess, **{"inputs": x, "outputs": out, **options}), X)


def test_variables_without_values(network):
    _sess, x, _y, _state, out, _loss = network
    with tf.Session() as fresh_session, pytest.raises(rl.errors.ModelError, match="no value in this session"):
        rl.trace(rl.tf1.graph(fresh_session, inputs=x, outputs=out), X)


def test_a_queue_is_neither_emptied_nor_waited_for(graph):
    queue = tf.FIFOQueue(3, [tf.float64], shapes=[[2, 4, 3]])
    batch = queue.dequeue(name="batch")
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicRNNCell(2), batch, dtype=tf.float64)
    enqueue = queue.enqueue(X)
    with tf.Session() as sess:
        sess.run([tf.global_variables_initializer(), enqueue])
        unfed_net = rl.tf1.graph(sess, inputs=tf.placeholder(tf.float64, [2, 4, 3]), outputs=state)
        with pytest.raises(rl.errors.UnsupportedError, match="batch tensor itself can be fed"):
            rl.trace(unfed_net, X)
        net = rl.tf1.graph(sess, inputs={"batch": batch}, outputs=state)
        assert rl.trace(net, X)["rnn"].hidden.shape == (2, 4, 2)
        assert sess.run(queue.size()) == 1


def test_initial_states_are_given_by_layer(network):
    sess, x, y, _state, out, loss = network
    net = rl.tf1.graph(sess, inputs=x, outputs=out, loss=loss, targets=y)
    h = np.random.default_rng(2).normal(size=(2, 2))
    with_state = rl.trace(net, X, Y, initial_state={"rnn": [h]})["rnn"]
    without_state = rl.trace(net, X, Y)["rnn"]
    assert not np.allclose(with_state.hidden[:, 0], without_state.hidden[:, 0])


def test_several_batches_are_one(network):
    sess, x, y, _state, out, loss = network
    net = rl.tf1.graph(sess, inputs=x, outputs=out, loss=loss, targets=y)
    one_batch = rl.gradients(net, X, of="output", reduce="sum", wrt="rnn/kernel")
    in_batches = rl.gradients(net, X, of="output", reduce="sum", wrt="rnn/kernel", batch_size=1)
    np.testing.assert_allclose(in_batches, one_batch, rtol=1e-12)


def test_a_variable_in_no_scope_is_no_layer_to_look_into(network):
    sess, x, y, state, _out, _loss = network
    weight = tf.get_variable("alone", [2, 2], tf.float64)
    sess.run(weight.initializer)
    net = rl.tf1.graph(
        sess, inputs=x, outputs=state @ weight, loss=tf.reduce_mean((state @ weight - y) ** 2), targets=y
    )
    assert not rl.find_nonfinite(net, X, Y)
    broken = X.copy()
    broken[1, 2, 0] = np.nan
    finding = rl.find_nonfinite(net, broken, Y)
    assert (finding.layer, finding.sample, finding.step) == ("input", 1, 2)
    with pytest.raises(rl.errors.LayerNotFoundError, match="one of: 'rnn', 'variables'"):
        rl.trace(net, X, Y, layers="nope")


def test_a_loop_that_is_refused_is_left_out_of_a_search_and_named(network):
    sess, x, *_ = network

    def step(state, x_t):  # a state whose axes are not (sample, unit)
        hidden, summed = tf.unstack(state)
        hidden = tf.tanh(x_t[:, :2] + hidden)
        return tf.stack([hidden, summed + hidden])

    states = tf.scan(step, tf.transpose(x, [1, 0, 2]), tf.zeros([2, 2, 2], tf.float64))
    net = rl.tf1.graph(sess, inputs=x, outputs=states[-1])
    assert "refused" in rl.layers(net)[0].options
    finding = rl.find_nonfinite(net, X)
    assert not finding
    assert any(note.startswith("Not looked into") for note in finding.notes)


def test_what_a_graph_is_fed_wrongly_is_one_error(network):
    sess, x, y, _state, out, loss = network
    net = rl.tf1.graph(sess, inputs=x, outputs=out, loss=loss, targets=y)
    with pytest.raises(rl.errors.InputError, match="x is empty"):
        rl.trace(net, X[:0], Y[:0])
    with pytest.raises(rl.errors.UserCodeError, match="Incompatible shapes"):
        rl.trace(net, X, Y[[0, 1, 1]])
    with pytest.raises(rl.errors.InputError, match="feed= is given by tensor"):
        rl.tf1.graph(sess, inputs=x, feed=[1])
    with pytest.raises(rl.errors.CallError, match="did you mean 'inputs'"):
        rl.tf1.graph(sess, input=x)
    sess.close()
    with pytest.raises(rl.errors.InputError, match="The session is closed"):
        rl.trace(net, X, Y)


@pytest.mark.parametrize("verb", [rl.trace, rl.diagnose, rl.lyapunov, rl.step_eigenvalues, rl.fixed_points])
def test_a_variable_of_the_graph_is_no_data(network, verb):
    sess, x, _y, _state, out, _loss = network
    net, variable = rl.tf1.graph(sess, inputs=x, outputs=out), tf.get_variable("data", (4, 6, 3))
    with pytest.raises(rl.errors.InputError, match="x is a variable of a graph, without a value") as error:
        verb(net, variable)
    assert "session.run(x)" in str(error.value)
