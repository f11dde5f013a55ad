"""A TensorFlow-1 network: Conv1D, batch normalisation, GRU with dropout over sequences of any length, dense head."""

import tensorflow.compat.v1 as tf

BATCH, FEATURES, UNITS = 5, 6, 8


class Graph:
    """The network's graph, with placeholders for data, phase and dropout rate, and any number of steps."""

    def __init__(self, wrapped=True, units=UNITS, dtype=tf.float64, features=FEATURES, batch=BATCH):
        self.units, self.batch, self.wrapped = units, batch, wrapped
        self.phase = tf.placeholder(tf.bool, [], name="phase_train")
        self.dropout = tf.placeholder(dtype, [], name="dropout")
        shape = [batch, None, features]
        self.inputs_train = tf.placeholder(dtype, shape, name="inputs_train")
        self.inputs_devel = tf.placeholder(dtype, shape, name="inputs_devel")
        self.labels_train = tf.placeholder(dtype, [batch, None, 2], name="labels_train")
        self.labels_devel = tf.placeholder(dtype, [batch, None, 2], name="labels_devel")
        self.initial_state = tf.placeholder(dtype, [None, units], name="initial_state")
        inputs = tf.cond(self.phase, lambda: self.inputs_train, lambda: self.inputs_devel)
        labels = tf.cond(self.phase, lambda: self.labels_train, lambda: self.labels_devel)
        self.output, self.new_state = self.model(inputs)
        self.loss = tf.reduce_mean(tf.square(self.output - labels))

    def model(self, inputs):
        is_real = tf.sign(tf.reduce_max(tf.abs(inputs), axis=2))
        length = tf.cast(tf.reduce_sum(is_real, axis=1), tf.int32)
        with tf.variable_scope("layer_cell"):
            hidden = tf.layers.conv1d(inputs, 2 * self.units, 5, padding="same", name="conv1d")
            hidden = tf.layers.batch_normalization(hidden, training=self.phase, name="batch_normalization")
            hidden = tf.nn.relu(hidden)
        with tf.variable_scope("lstm_model"):
            cell = tf.nn.rnn_cell.GRUCell(self.units)
            if self.wrapped:
                cell = tf.nn.rnn_cell.DropoutWrapper(cell, input_keep_prob=1.0 - self.dropout)
            outputs, state = tf.nn.dynamic_rnn(cell, hidden, sequence_length=length, initial_state=self.initial_state)
        with tf.variable_scope("output"):
            flat = tf.reshape(outputs, [-1, self.units])
            output = tf.layers.dense(flat, 2, name="dense")
            output = tf.reshape(output, [self.batch, -1, 2]) * is_real[:, :, None]
        return output, state
