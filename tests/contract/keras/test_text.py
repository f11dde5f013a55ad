"""A model that looks words up itself takes tensors of strings, and is traced as the model behind the look-up."""

from __future__ import annotations

import numpy as np
import pytest
from spoken_keras import keras

import rnnlens as rl
from rnnlens.errors import InputError

pytestmark = pytest.mark.only_on("tensorflow")

WORDS = ["one two three", "two one", "three three one two", "one"]
Y = np.array([[0.0], [1.0], [1.0], [0.0]])


def texts():
    import tensorflow as tf

    return tf.constant(WORDS)


def network():
    keras.utils.set_random_seed(1)
    lookup = keras.layers.TextVectorization(max_tokens=8)
    lookup.adapt(texts())
    embedding = keras.layers.Embedding(8, 3, mask_zero=True)
    model = keras.Sequential([lookup, embedding, keras.layers.GRU(4, name="gru"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model(texts())
    return model


def test_strings_give_what_their_ids_give():
    model = network()
    ids, behind = np.asarray(model.layers[0](texts())), keras.Sequential(model.layers[1:])
    behind(ids)
    trace = rl.trace(model, texts(), Y)
    expected = rl.trace(behind, ids, Y, loss="mse")
    assert trace.certificate.state == "passed"
    np.testing.assert_array_equal(trace["gru"].hidden_grad.values, expected["gru"].hidden_grad.values)
    assert "gru" in rl.weights(model)
    assert not rl.find_nonfinite(model, texts(), Y)


def test_what_needs_steps_in_the_input_refuses_strings_with_the_model_behind_the_look_up():
    with pytest.raises(InputError, match=r"inner = keras.Sequential\(model.layers\[1:\]\)"):
        rl.diagnose(network(), texts(), Y)
    with pytest.raises(InputError, match=r"ids = model.layers\[0\]\(x\)"):
        rl.trace(network(), np.array(WORDS), Y)


@pytest.mark.full
def test_a_watch_of_a_model_of_strings_changes_nothing(tmp_path):
    watch = rl.keras.Watch(tmp_path / "run.zarr", probe=(texts(), Y), every=1)
    watched, unwatched = network(), network()
    watched.fit(texts(), Y, epochs=2, verbose=0, callbacks=[watch])
    unwatched.fit(texts(), Y, epochs=2, verbose=0)
    assert watch.gaps == []
    assert rl.open(tmp_path / "run.zarr").steps.values.tolist() == [0, 1, 2]
    for weight, expected in zip(watched.get_weights(), unwatched.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
