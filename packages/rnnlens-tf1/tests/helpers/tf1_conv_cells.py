"""Convolutional cells as in user code for TensorFlow 1, because ``tf.contrib`` no longer exists."""

import tensorflow.compat.v1 as tf

rnn_cell = tf.nn.rnn_cell
CONVOLUTIONS = {1: tf.nn.conv1d, 2: tf.nn.conv2d, 3: tf.nn.conv3d}


def convolve(args, window, channels, bias=True):
    """Return the convolution of concatenated tensors with one kernel, plus a bias."""
    depth, rank = sum(int(a.shape[-1]) for a in args), len(args[0].shape)
    kernel = tf.get_variable("kernel", [*window, depth, channels], args[0].dtype)
    strides = 1 if rank == 3 else [1] * rank
    convolution = CONVOLUTIONS[rank - 2](tf.concat(args, rank - 1), kernel, strides, padding="SAME")
    return convolution + tf.get_variable("biases", [channels], args[0].dtype) if bias else convolution


class ConvLSTMCell(rnn_cell.RNNCell):
    """A convolutional LSTM with one kernel for input and state; gates i, g, f, o."""

    def __init__(self, input_shape, channels, window, *, bias=True, skip=False, forget_bias=1.0, peepholes=False):
        super().__init__(name="conv_lstm_cell")
        self.shape, self.channels, self.window = list(input_shape), channels, list(window)
        self.bias, self.skip, self.forget_bias, self.peepholes = bias, skip, forget_bias, peepholes
        output_channels = channels + input_shape[-1] if skip else channels
        self._output_size = tf.TensorShape([*input_shape[:-1], output_channels])
        self._state_size = rnn_cell.LSTMStateTuple(tf.TensorShape([*input_shape[:-1], channels]), self._output_size)

    state_size = property(lambda self: self._state_size)
    output_size = property(lambda self: self._output_size)

    def call(self, inputs, state, scope=None):
        c, h = state
        gates = convolve([inputs, h], self.window, 4 * self.channels, self.bias)
        i, g, f, o = tf.split(gates, 4, axis=len(self.shape))
        if self.peepholes:
            f += c * tf.get_variable("peephole", [*self.shape[:-1], self.channels], c.dtype)
        c = tf.sigmoid(f + self.forget_bias) * c
        c += tf.sigmoid(i) * tf.tanh(g)
        output = tf.tanh(c) * tf.sigmoid(o)
        if self.skip:
            output = tf.concat([output, inputs], axis=-1)
        return output, rnn_cell.LSTMStateTuple(c, output)
