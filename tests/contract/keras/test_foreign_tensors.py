"""Batches of torch tensors and data loaders for a Keras model on any engine are read as by ``fit``."""

import keras
import numpy as np
import pytest
import torch

import rnnlens as rl

pytestmark = pytest.mark.op_by_op

RNG = np.random.default_rng(0)
X, Y, WEIGHT = RNG.normal(size=(7, 5, 3)), RNG.integers(0, 3, size=7), RNG.uniform(size=7)


@pytest.fixture
def model():
    layers = [keras.Input((5, 3)), keras.layers.SimpleRNN(4, name="rnn"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential(layers)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def assert_same(actual, expected):
    for layer in expected:
        for key in expected[layer].dataset:
            np.testing.assert_allclose(actual[layer][key], expected[layer][key], rtol=1e-9, atol=1e-12)


def test_a_loader_is_a_data_set(model):
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(dataset, batch_size=3)
    gradients = rl.gradients(model, loader, wrt="weights")
    assert_same(gradients, rl.gradients(model, X, Y, wrt="weights"))
    assert gradients.certificate.state == "passed"


def test_tensors_are_arrays(model):
    batch = torch.tensor(X, requires_grad=True), torch.tensor(Y)
    gradients = rl.gradients(model, *batch, sample_weight=torch.tensor(WEIGHT), wrt="weights")
    assert_same(gradients, rl.gradients(model, X, Y, sample_weight=WEIGHT, wrt="weights"))
    assert batch[0].grad is None
    assert batch[0].requires_grad
