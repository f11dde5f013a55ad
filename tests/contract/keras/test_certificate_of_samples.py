"""Later traces of a Keras model are certified with part of the samples, or with all if that part's values differ."""

import numpy as np
import pytest
from spoken_keras import keras

import rnnlens as rl

pytestmark = pytest.mark.one_engine("torch", "tf_keras")

SAMPLES = 32


def token_model():
    """Return a model of padded token ids, a masked bidirectional LSTM and a GRU that returns its last step."""
    return keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            keras.layers.Embedding(12, 3, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
            keras.layers.GRU(3),
            keras.layers.Dense(2),
        ]
    )


def sequence_model():
    """Return a model with float inputs and an output at every step."""
    return keras.Sequential(
        [keras.Input((9, 3)), keras.layers.SimpleRNN(4, return_sequences=True), keras.layers.Dense(2)]
    )


@keras.saving.register_keras_serializable("rnnlens_tests")
class Centred(keras.Model):
    """A model whose samples depend on each other: the mean over the batch is subtracted."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = keras.layers.GRU(3), keras.layers.Dense(2)

    def call(self, x):
        return self.head(self.rnn(x - keras.ops.mean(x, axis=0, keepdims=True)))


def data_of(make):
    rng = np.random.default_rng(0)
    if make is token_model:
        ids = rng.integers(1, 12, (SAMPLES, 9)) * (np.arange(9) < rng.integers(3, 10, (SAMPLES, 1)))
        return ids.astype("int32"), rng.standard_normal((SAMPLES, 2)).astype("float32")
    shape = (SAMPLES, 9, 2) if make is sequence_model else (SAMPLES, 2)
    return rng.standard_normal((SAMPLES, 9, 3)).astype("float32"), rng.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("make", [token_model, sequence_model])
def test_later_traces_compare_a_part_of_the_samples(make):
    keras.utils.set_random_seed(0)
    model, (x, y) = make(), data_of(make)
    model.compile(loss="mse")
    weight = np.linspace(0.5, 1.5, SAMPLES)
    weight = weight[:, None] if make is sequence_model else weight
    first, *later = (rl.trace(model, x, y, sample_weight=weight) for _ in range(3))
    assert (first.certificate.state, first.certificate.samples) == ("passed", "")
    for trace in later:
        assert trace.certificate.state == "passed"
        assert trace.certificate.samples.endswith(f"of {SAMPLES}")
        assert "reference weight gradients" in {check.name for check in trace.certificate.checks}
        for name in first:
            for key, values in first[name].dataset.data_vars.items():
                np.testing.assert_allclose(trace[name].dataset[key].values, values.values, rtol=1e-5, atol=1e-7)


def test_a_model_that_mixes_samples_is_certified_with_all_of_them():
    keras.utils.set_random_seed(0)
    model, (x, y) = Centred(), data_of(Centred)
    model.compile(loss="mse")
    model(x)
    certificates = [rl.trace(model, x, y).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_a_fault_in_a_later_trace_is_found(monkeypatch):
    from rnnlens.verbs import recurrent_layers

    keras.utils.set_random_seed(0)
    model, (x, y) = sequence_model(), data_of(sequence_model)
    model.compile(loss="mse")
    rl.trace(model, x, y)
    adjoint = recurrent_layers.adjoint

    def faulty_adjoint(*args, **options):
        gradients = adjoint(*args, **options)
        gradients.gate_grad[...] *= 1.01
        return gradients

    monkeypatch.setattr(recurrent_layers, "adjoint", faulty_adjoint)
    certificate = rl.trace(model, x, y).certificate
    assert (certificate.state, certificate.samples) == ("failed", "")


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_a_cross_entropy_is_computed_as_keras_does(activation):
    """The loss of saturated outputs equals Keras' own, which it clips for probabilities but not for their logits."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(1)
    units = 4 if activation == "softmax" else 1
    model = keras.Sequential(
        [keras.Input((6, 3)), keras.layers.LSTM(4), keras.layers.Dense(units, activation=activation)]
    )
    model.layers[-1].kernel.assign(400 * model.layers[-1].kernel)
    x, y = rng.standard_normal((SAMPLES, 6, 3)).astype("float32"), rng.integers(0, units + 1, SAMPLES) % max(units, 2)
    loss = "sparse_categorical_crossentropy" if activation == "softmax" else "binary_crossentropy"
    model.compile(loss=loss)
    y = y.astype("int32") if activation == "softmax" else y[:, None].astype("float32")
    expected = model.evaluate(x, y, batch_size=SAMPLES, verbose=0)
    for _ in range(3):  # certified with all samples, then with a part of them
        trace = rl.trace(model, x, y)
        assert trace.certificate.state == "passed"
        assert float(trace.loss) == pytest.approx(expected, rel=1e-5)
