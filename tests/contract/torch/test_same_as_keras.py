"""The same weights in Keras and in torch give the same trace, under the same names (Keras on any engine)."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H = 3, 6, 4, 5
mse = nn.functional.mse_loss
KINDS = {
    "lstm": (nn.LSTM, "LSTM", {}),
    "gru": (nn.GRU, "GRU", {"reset_after": True}),
    "simple_rnn": (nn.RNN, "SimpleRNN", {}),
}
#: For each gate in Keras' order, its position in torch's.
KERAS_GATES = {"lstm": (0, 1, 2, 3), "gru": (1, 0, 2), "simple_rnn": (0,)}


class Model(nn.Module):
    def __init__(self, kind, bidirectional):
        super().__init__()
        self.rnn = kind(F, H, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(H * (1 + bidirectional), 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def keras_weights(module, cell, suffix):
    """Return kernel, recurrent kernel and bias in Keras' layout, from torch's tensors."""

    def reordered(name):
        value = getattr(module, f"{name}_l0{suffix}").detach().numpy()
        gates = np.split(value, len(KERAS_GATES[cell]))
        return np.concatenate([gates[i] for i in KERAS_GATES[cell]])

    bias, recurrent_bias = reordered("bias_ih"), reordered("bias_hh")
    biases = np.stack([bias, recurrent_bias]) if cell == "gru" else bias + recurrent_bias
    return [reordered("weight_ih").T, reordered("weight_hh").T, biases]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", KINDS)
def test_one_trace(cell, bidirectional):
    torch.manual_seed(0)
    kind, name, options = KINDS[cell]
    torch_model = Model(kind, bidirectional)
    layer = getattr(keras.layers, name)(H, return_sequences=True, **options)
    layer = keras.layers.Bidirectional(layer, name="rnn") if bidirectional else layer
    layer.name = "rnn"
    keras_model = keras.Sequential([keras.Input((T, F)), layer, keras.layers.Dense(2, name="head")])
    weights = keras_weights(torch_model.rnn, cell, "")
    layer.set_weights([*weights, *keras_weights(torch_model.rnn, cell, "_reverse")] if bidirectional else weights)
    head_weights = [torch_model.head.weight.detach().numpy().T, torch_model.head.bias.detach().numpy()]
    keras_model.get_layer("head").set_weights(head_weights)
    keras_model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(B, T, F)).astype("float32"), rng.normal(size=(B, T, 2)).astype("float32")
    torch_trace, keras_trace = rl.trace(torch_model, x, y, loss=mse), rl.trace(keras_model, x, y)
    assert torch_trace.loss == pytest.approx(keras_trace.loss, rel=1e-6)
    assert list(torch_trace) == list(keras_trace) == ["rnn"]
    shared = set(torch_trace["rnn"].dataset) & set(keras_trace["rnn"].dataset)
    assert {"hidden", "gates", "gate_preactivation", "hidden_grad", "gate_grad", "input_grad", "output_grad"} <= shared
    for quantity in sorted(shared):
        torch_array, keras_array = torch_trace["rnn"][quantity], keras_trace["rnn"][quantity]
        assert torch_array.dims == keras_array.dims, quantity
        assert {k: v.values.tolist() for k, v in torch_array.coords.items()} == {
            k: v.values.tolist() for k, v in keras_array.coords.items()
        }, quantity
        np.testing.assert_allclose(torch_array.values, keras_array.values, atol=1e-6, err_msg=quantity)
