"""``rl.gradients`` equals the weight change of one training step, for losses as in training and any data source."""

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.verbs.recurrent_layers import ReplayedCall

B, T = 6, 4
# No id occurs twice: TensorFlow clips each looked-up row before it adds rows of one id.
X = np.random.default_rng(0).permutation(np.arange(1, 1 + B * T)).reshape(B, T).astype("int32")
X[2, 3:] = 0
Y = np.random.default_rng(1).integers(0, 2, (B, 1)).astype("float32")
layers = keras.layers


def build(optimizer, dropout=0.0):
    """Return a model of a masked embedding, a regularised GRU, a bidirectional layer and a head.

    The GRU has both biases in one variable.
    """
    keras.utils.set_random_seed(0)
    regularizer = keras.regularizers.L2(0.1)
    gru = layers.GRU(2, kernel_regularizer=regularizer, bias_initializer="random_normal", dropout=dropout)
    model = keras.Sequential(
        [
            keras.Input((T,), dtype="int32"),
            layers.Embedding(1 + B * T, 3, mask_zero=True, name="embedding"),
            layers.Bidirectional(gru, name="gru"),
            layers.Dense(1, activation="sigmoid", bias_regularizer=keras.regularizers.L1(0.01), name="head"),
        ]
    )
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    return model


def training_step_change(model, **options):
    """Return the weight change of one training step with learning rate 1, in the layout of ``rl.gradients``."""
    before = rl.weights(model)
    model.train_on_batch(X, Y, **options)
    after = rl.weights(model)
    pairs = [("embedding", "embeddings"), ("head", "kernel"), ("head", "bias")]
    pairs += [("gru", key) for key in ("kernel", "recurrent_kernel", "bias", "recurrent_bias")]
    return {f"{layer}/{key}": before[layer][key].values - after[layer][key].values for layer, key in pairs}


def assert_close(g, expected):
    for name, expected_grad in expected.items():
        np.testing.assert_allclose(g[name].values, expected_grad, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.product
@pytest.mark.parametrize(
    ("clip", "options"),
    [
        ({"global_clipnorm": 0.05}, {"sample_weight": np.linspace(0, 2, B)}),
        ({"clipnorm": 0.03}, {"class_weight": {0: 0.5, 1: 3.0}}),
        ({"clipvalue": 0.01}, {}),
    ],
)
def test_regularised_weighted_masked_and_clipped_as_a_training_step_is(clip, options):
    model = build(keras.optimizers.SGD(1.0, **clip))
    g = rl.gradients(model, X, Y, clip="optimizer", **options)
    assert g.clip["kind"] == next(iter(clip))
    assert_close(g.clipped, training_step_change(model, **options))
    unclipped_model = build(keras.optimizers.SGD(1.0))
    assert_close(rl.gradients(unclipped_model, X, Y, **options), training_step_change(unclipped_model, **options))
    # In one case the first sample has weight 0, so its rows do not change.
    touched_rows = np.count_nonzero(X) - (T if "sample_weight" in options else 0)
    assert g["embedding/embeddings"].attrs["touched_rows"] == touched_rows


@pytest.mark.one_engine
def test_clipping_needs_an_optimizer_that_clips():
    with pytest.raises(rl.errors.ModelError) as caught:
        rl.gradients(build("sgd"), X, Y, wrt="head.weights", clip="optimizer")
    assert str(caught.value) == (
        "The optimizer of this model does not clip gradients.\n"
        "  got:      SGD\n"
        "  expected: a compiled Keras model whose optimizer has clipvalue, clipnorm or global_clipnorm\n"
        '  try:      state the clipping: clip={"global_clipnorm": 1.0}; torch clips in the training loop, not in its '
        "optimizers"
    )


def test_dropout_follows_the_seed_and_the_models_own_generator_stays():
    model = build("sgd", dropout=0.5)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]
    options = {"training": True, "wrt": ["gru.hidden", "embedding/embeddings"]}
    first, same_seed, other_seed = (rl.gradients(model, X, Y, seed=seed, **options) for seed in (3, 3, 4))
    without_dropout = rl.gradients(model, X, Y, wrt=options["wrt"])
    for name in first.tensors:
        np.testing.assert_array_equal(first[name].values, same_seed[name].values)
        assert not np.allclose(first[name].values, other_seed[name].values)
        assert not np.allclose(first[name].values, without_dropout[name].values)
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, keras.ops.convert_to_numpy(variable))


@pytest.mark.one_engine
def test_every_source_and_batch_size_gives_the_same(tmp_path):
    import tensorflow as tf
    import zarr

    model = build("sgd")
    zarr_array = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(3, T), dtype="i4")
    zarr_array[:] = X
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)
    wrt = ["weights", "gru.hidden", "embedding.output"]
    reference = rl.gradients(model, X, Y, wrt=wrt)
    sources = {
        "pieces": ((X, Y), {"batch_size": 3}),
        "tf.data": ((dataset,), {}),
        "zarr": ((zarr_array, Y), {}),
        "generator": (((pair for pair in [(X[:3], Y[:3]), (X[3:], Y[3:])]),), {}),
    }
    for source, (data, options) in sources.items():
        g = rl.gradients(model, *data, wrt=wrt, **options)
        assert g.tensors == reference.tensors
        for name in reference.tensors:
            np.testing.assert_allclose(
                g[name].values, reference[name].values, rtol=1e-4, atol=1e-7, err_msg=f"{source} {name}"
            )


def test_the_loss_scale_of_mixed_precision_is_undone():
    def network(policy, optimizer):
        keras.utils.set_random_seed(0)
        first, last = layers.Dense(4, dtype=policy, name="first"), layers.Dense(1, dtype=policy, name="last")
        model = keras.Sequential([keras.Input((3,)), first, last])
        model.compile(optimizer, loss=lambda y, p: 1e-7 * keras.ops.mean(keras.ops.cast(p, "float32") - y))
        return model

    x, y = np.full((2, 3), 0.01, "float32"), np.zeros((2, 1), "float32")
    in_float32 = rl.gradients(network("float32", "sgd"), x, y)
    in_float16 = rl.gradients(
        network("mixed_float16", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), x, y
    )
    assert not in_float16.disconnected
    unscaled = rl.gradients(network("mixed_float16", "sgd"), x, y)
    assert {reason.code for reason in unscaled.disconnected.values()} == {"underflow"}
    for name in in_float32.tensors:
        np.testing.assert_allclose(in_float16[name].values, in_float32[name].values, rtol=2e-2, err_msg=name)


@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "of"), [("LSTM", "rnn.hidden"), ("GRU", "rnn.output")])
def test_a_stream_of_states_is_swept_once_and_gives_the_numbers_of_one_batch(kind, of, monkeypatch):
    keras.utils.set_random_seed(0)
    embedding = layers.Embedding(30, 3, embeddings_initializer="random_normal", name="embedding")
    model = keras.Sequential(
        [keras.Input((T,), dtype="int32"), embedding, getattr(layers, kind)(5, return_sequences=True, name="rnn")]
    )
    sweeps = []
    sweep = ReplayedCall.sweep
    monkeypatch.setattr(ReplayedCall, "sweep", lambda call, *args: sweeps.append(0) or sweep(call, *args))
    ids = np.random.default_rng(0).integers(0, 30, (9, T)).astype("int32")
    options = {"of": of, "reduce": "mean", "wrt": "embedding.output", "per_sample": True}
    reference = rl.gradients(model, ids, **options)
    sweeps.clear()
    stream = rl.gradients(model, ids, batch_size=2, **options)
    np.testing.assert_allclose(stream.values, reference.values, rtol=1e-4, atol=1e-7)
    # Where the engine compiles, only the first of five batches is swept, and the last one, which is shorter.
    expected_sweeps = 5 if keras.backend.backend() == "torch" else 2
    assert len(sweeps) == (expected_sweeps if of == "rnn.hidden" else 0)
    assert np.abs(reference.values).max() > 1e-3
