"""Float64 Keras models that compute a part in float32: the dtype of that part is detected on each engine."""

import numpy as np
import pytest
from spoken_keras import engine as engine_name
from spoken_keras import keras

import rnnlens as rl
from rnnlens.autodiff import engine

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.compiled]

L, ops = keras.layers, keras.ops


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_coarsest_dtype_of_an_operation_is_found(dtype):
    x = ops.convert_to_tensor(np.ones((2, 3)), dtype="float64")
    coarsest = engine(engine_name()).coarsest_dtype(lambda x: ops.cast(ops.cast(x, dtype) * 2, "float64"), (x,))
    assert coarsest == dtype


@pytest.mark.one_engine("jax", "torch")
def test_a_part_in_float32_is_no_fault_of_the_gradients():
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((3, 2)), L.LSTM(4, return_sequences=True), L.LayerNormalization(), L.GRU(3)])
    model.compile("sgd", "mse")
    x, y = rng.normal(size=(7, 3, 2)), rng.normal(size=(7, 3))
    for sizes in ({}, {"batch_size": 5}):
        grads = rl.gradients(model, x, y, wrt="weights", **sizes)
        assert grads.certificate.state == "passed", grads.certificate
