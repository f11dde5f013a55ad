"""Facts that the adapter reports about a Keras model without running it."""

import keras
import pytest

from rnnlens.adapters.keras import adapter, reference_run
from rnnlens.adapters.registry import adapter_for

LAYERS = keras.layers


@pytest.fixture
def model():
    ids = keras.Input((4,), dtype="int32", name="ids")
    inner = keras.Sequential([keras.Input((4, 3)), LAYERS.Dense(3, activation="relu", name="hidden")], name="block")
    x = inner(LAYERS.Embedding(7, 3, name="table")(ids))
    x = LAYERS.Bidirectional(LAYERS.GRU(2, return_sequences=True), name="both")(x)
    x = LAYERS.SpatialDropout1D(0.5, name="drop")(LAYERS.BatchNormalization(name="norm")(x))
    x = LAYERS.ReLU(negative_slope=0.1, name="leaky")(LAYERS.ReLU(name="relu")(x))
    outputs = {"tag": LAYERS.Dense(2, name="tag")(x), "all": LAYERS.Activation("relu", name="act")(x)}
    return keras.Model(ids, outputs)


def test_roles_names_and_weights(model):
    facts, weights = adapter.facts(model), adapter.weights(model)
    assert facts.having("embedding") == ("table",)
    assert facts.having("dropout") == ("drop",)
    assert set(facts.having("relu")) == {"block/hidden", "relu", "act"}
    assert {"both", "block", "leaky", "norm"} <= set(facts.submodules)
    assert (facts.inputs, facts.outputs) == (("ids",), ("all", "tag"))
    assert weights["table"].tables == {"embeddings"}
    assert weights["norm"].statistics == {"moving_mean", "moving_variance"}
    assert not weights["tag"].tables | weights["tag"].statistics


def test_it_is_asked_what_runs_it(model):
    assert adapter_for(model) is adapter
    assert adapter.engine == keras.backend.backend()


@pytest.mark.parametrize(
    ("options", "clipping"),
    [
        ({}, None),
        ({"clipnorm": 0.5}, ("clipnorm", 0.5)),
        ({"global_clipnorm": 2}, ("global_clipnorm", 2.0)),
        ({"clipvalue": 0.1}, ("clipvalue", 0.1)),
    ],
)
def test_how_it_is_trained(model, options, clipping):
    assert (adapter.facts(model).loss, adapter.facts(model).optimizer) == (None, "")
    model.compile(keras.optimizers.Adam(**options), {"tag": "mse"})
    facts = adapter.facts(model)
    assert (facts.optimizer, facts.clipping, facts.loss) == ("Adam", clipping, {"tag": "mse"})
    assert facts.clips_lookups_apart == (keras.backend.backend() == "tensorflow")
    assert facts.loss_scale == 1.0


def test_the_scale_of_the_loss_is_that_of_the_outer_optimizer(model):
    inner = keras.optimizers.SGD(clipnorm=3.0)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0), {"tag": "mse"})
    facts = adapter.facts(model)
    assert (facts.optimizer, facts.clipping, facts.loss_scale) == ("SGD", ("clipnorm", 3.0), 64.0)


class Private(keras.layers.Layer):
    """A user's layer with a property ``activation`` that raises an error."""

    @property
    def activation(self):
        raise ValueError("not here")

    def call(self, x):
        return x


def test_attributes_of_the_users_own_layers_are_left_alone():
    layers = [keras.Input((4, 3)), LAYERS.SimpleRNN(2, activation="relu", name="rnn"), Private(name="private")]
    assert adapter.facts(keras.Sequential(layers)).having("relu") == ("rnn",)


def test_names_and_ties_of_variables_are_read_once_for_all_weights(model, monkeypatch):
    walks, tied = [], reference_run.tied_variables
    monkeypatch.setattr(reference_run, "tied_variables", lambda model: walks.append(1) or tied(model))
    facts, names = adapter.facts(model), {variable.path for variable in model.variables}
    locations = [
        facts.weight_location(layer, None, key)
        for layer, weights in adapter.weights(model).items()
        for key in weights.values
    ]
    assert len(locations) > 2
    assert {location.name for location in locations if location is not None} <= names
    assert walks == [1]
