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
#: Keras' gates in torch's order.
KERAS_GATES = {"lstm": (0, 1, 2, 3), "gru": (1, 0, 2), "simple_rnn": (0,)}


class Model(nn.Module):
    def __init__(self, kind, both):
        super().__init__()
        self.rnn = kind(F, H, batch_first=True, bidirectional=both)
        self.head = nn.Linear(H * (1 + both), 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def keras_weights(module, cell, suffix):
    """Kernel, recurrent kernel and bias as Keras holds them, from torch's tensors."""

    def reordered(name):
        value = getattr(module, f"{name}_l0{suffix}").detach().numpy()
        parts = np.split(value, len(KERAS_GATES[cell]))
        return np.concatenate([parts[i] for i in KERAS_GATES[cell]])

    bias, recurrent_bias = reordered("bias_ih"), reordered("bias_hh")
    both = np.stack([bias, recurrent_bias]) if cell == "gru" else bias + recurrent_bias
    return [reordered("weight_ih").T, reordered("weight_hh").T, both]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("cell", KINDS)
def test_one_trace(cell, both):
    torch.manual_seed(0)
    kind, name, options = KINDS[cell]
    computed = Model(kind, both)
    layer = getattr(keras.layers, name)(H, return_sequences=True, **options)
    layer = keras.layers.Bidirectional(layer, name="rnn") if both else layer
    layer.name = "rnn"
    reference = keras.Sequential([keras.Input((T, F)), layer, keras.layers.Dense(2, name="head")])
    weights = keras_weights(computed.rnn, cell, "")
    layer.set_weights([*weights, *keras_weights(computed.rnn, cell, "_reverse")] if both else weights)
    head = [computed.head.weight.detach().numpy().T, computed.head.bias.detach().numpy()]
    reference.get_layer("head").set_weights(head)
    reference.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(B, T, F)).astype("float32"), rng.normal(size=(B, T, 2)).astype("float32")
    a, b = rl.trace(computed, x, y, loss=mse), rl.trace(reference, x, y)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert list(a) == list(b) == ["rnn"]
    shared = set(a["rnn"].dataset) & set(b["rnn"].dataset)
    assert {"hidden", "gates", "gate_preactivation", "hidden_grad", "gate_grad", "input_grad", "output_grad"} <= shared
    for quantity in sorted(shared):
        one, other = a["rnn"][quantity], b["rnn"][quantity]
        assert one.dims == other.dims, quantity
        assert {k: v.values.tolist() for k, v in one.coords.items()} == {
            k: v.values.tolist() for k, v in other.coords.items()
        }, quantity
        np.testing.assert_allclose(one.values, other.values, atol=1e-6, err_msg=quantity)
