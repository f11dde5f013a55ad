"""Facts that an adapter reads in a model without running it."""

import numpy as np
import pytest
from tested_adapter import specimens

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.registry import adapter_for

pytestmark = pytest.mark.op_by_op

#: Facts of a model that is not prepared for training, whatever its attributes are called.
UNTRAINED = {"loss": None, "optimizer": "", "clipping": None, "loss_scale": 1.0}


def bound(model, x, y=None, loss=None):
    """Return the adapter of a model, the model as the adapter takes it for these data, and a batch of them."""
    adapter = adapter_for(model)
    return adapter, adapter.bind(model, x), Batch(x, y, loss=loss)


def facts_of(declared):
    adapter, model, batch = bound(declared.model, **declared.data)
    return adapter.facts(model, batch)


@pytest.fixture
def declared():
    return specimens.declared()


def test_layers_have_the_roles_of_what_they_are(declared):
    facts = facts_of(declared)
    assert set(facts.submodules) == declared.submodules
    for role in ("embedding", "dropout", "relu"):
        assert set(facts.having(role)) == declared.roles.get(role, set()), role


def test_a_model_has_names_of_its_own_and_no_training(declared):
    facts = facts_of(declared)
    expected = UNTRAINED | declared.facts
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.reduction(None) is None


def test_tables_and_statistics_are_told_from_other_weights(declared):
    adapter, model, _ = bound(declared.model, **declared.data)
    weights = adapter.weights(model)
    assert {name: set(layer.tables) for name, layer in weights.items() if layer.tables} == declared.tables
    assert {name: set(layer.statistics) for name, layer in weights.items() if layer.statistics} == declared.statistics


def test_locations_of_weights_are_names_of_a_reference_run(declared):
    prepare, _ = next(iter(specimens.TRAININGS.values()))
    prepare(declared.model)
    adapter, model, batch = bound(declared.model, **declared.data)
    facts, reference = adapter.facts(model, batch), adapter.run(model, batch, Taps.nothing()).reference()
    names = set()
    for layer, weights in adapter.weights(model).items():
        for key in (key for key, is_trained in weights.trainable.items() if is_trained):
            names.add(facts.weight_location(layer, next(iter(weights.cells), None), key).name)
    assert len(names) > 2
    assert names <= set(reference.weight_grads)


def test_an_optimizer_steps_a_copy_of_the_weights(declared):
    adapter, model, batch = bound(declared.model, **declared.data)
    facts = adapter.facts(model, batch)
    assert facts.optimizer_step(None, {}) is None
    if declared.optimizer is None:
        with pytest.raises(rl.errors.UnsupportedError, match="Optimizers of this framework are not read"):
            facts.optimizer_step("sgd", {})
        return
    (optimizer, beginning), weights = declared.optimizer, adapter.weights(model)
    befores = {name: change.before for name, change in facts.optimizer_step(optimizer, {}).items()}
    stepped = {name for name in befores if name.startswith(beginning)}
    without_gradient = min(stepped)
    gradients = {name: before + 1 for name, before in befores.items() if name != without_gradient}
    for name, change in facts.optimizer_step(optimizer, {**gradients, without_gradient: None}).items():
        np.testing.assert_array_equal(change.before, befores[name])
        if name in stepped:
            expected = befores[name] - (0 if name == without_gradient else 0.5 * gradients[name])
            np.testing.assert_allclose(change.after, expected, rtol=1e-6, atol=1e-7)
        else:
            assert change.after is None
    for layer, kept in adapter.weights(model).items():
        for key, value in kept.values.items():
            np.testing.assert_array_equal(value, weights[layer].values[key])


@pytest.mark.parametrize("training", specimens.TRAININGS)
def test_how_it_is_trained(declared, training):
    prepare, facts = specimens.TRAININGS[training]
    prepare(declared.model)
    assert {name: getattr(facts_of(declared), name) for name in facts} == facts


def test_attributes_of_the_users_own_layers_are_left_alone():
    users_model, x, relus = specimens.guarded()
    adapter, model, batch = bound(users_model, x)
    assert set(adapter.facts(model, batch).having("relu")) == relus
