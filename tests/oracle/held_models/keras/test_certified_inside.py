"""Certificates of time Jacobians from or to a layer inside a chain, by a separate run of these layers."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl
from rnnlens.verbs.time_jacobian import network
from rnnlens.verbs.time_jacobian.segments import Segment

IDS = np.random.default_rng(0).integers(1, 9, size=(3, 5)).astype("int32")


def reader(stateful=False, mask_zero=False):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,), batch_size=3, dtype="int32"),
            layers.Embedding(9, 4, mask_zero=mask_zero, name="words"),
            layers.GRU(4, return_sequences=True, stateful=stateful, activity_regularizer="l2", name="lower"),
            layers.LSTM(3, return_sequences=True, name="upper"),
            layers.Dense(2, "tanh", name="head"),
        ]
    )


def certified_jacobian(model=None, **options):
    with rl.options(certify="always"):
        return rl.jacobian(model or reader(), IDS, **options)


OPTIONS = {
    "output by words": {"wrt": "words.output"},
    "norms of a layer by words": {"of": "lower.output", "wrt": "words.output", "measure": "norm"},
    "output by a recurrent layer": {"wrt": "lower.output", "at": {"out_time": [4, 1]}},
}


@pytest.mark.one_engine
@pytest.mark.parametrize("case", OPTIONS)
def test_it_passes(case):
    jacobian = certified_jacobian(**OPTIONS[case])
    assert str(jacobian.attrs["certificate"]).startswith("certified against"), jacobian.attrs["certificate"]


@pytest.mark.one_engine
def test_a_planted_fault_is_named(monkeypatch):
    for name in ("apply", "at_every_step"):
        original = getattr(Segment, name)
        monkeypatch.setattr(Segment, name, lambda *args, original=original: original(*args) * 1.01)
    with pytest.warns(rl.errors.SelfCheckWarning, match="differ from the reference run of the model"):
        certified_jacobian(wrt="words.output")


@pytest.mark.one_engine
def test_states_within_a_fused_layer_of_a_model_of_ids_are_not_certified():
    assert "lies inside the model" in str(certified_jacobian(of="upper.cell", wrt="words.output").attrs["certificate"])


def nested_reader():
    return keras.Sequential([reader(), layers.Dense(1)])


NO_CHAINS = {
    "a mask": (lambda: reader(mask_zero=True), {"wrt": "words.output"}),
    "a model in a model": (nested_reader, {"wrt": "words.output"}),
    "states that are the output": (reader, {"of": "upper.hidden", "wrt": "words.output"}),
}


@pytest.mark.one_engine
@pytest.mark.parametrize("case", NO_CHAINS)
def test_ends_in_no_chain_of_layers_are_certified_by_a_pull_back_between_them(case, monkeypatch):
    make, options = NO_CHAINS[case]
    model = make()
    if len(model.layers) == 2:
        options = {"wrt": f"{model.layers[0].name}/words.output"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jacobian = certified_jacobian(model, **options)
    assert "Certified: random combinations of its rows" in str(jacobian.attrs["certificate"])
    monkeypatch.setattr(network, "Port", swap_layers(network.Port))
    with pytest.warns(rl.errors.SelfCheckWarning, match="differ from the reference run of the model"):
        certified_jacobian(model, **options)


def swap_layers(port):
    """Return a fault that exchanges the tensors of the embedding and of the lower layer."""
    swapped = {"words": "lower", "lower": "words"}

    def swapped_port(kind, layer, index):
        path, _, name = str(layer).rpartition("/")
        return port(kind, f"{path}/{swapped[name]}".lstrip("/") if name in swapped else layer, index)

    return swapped_port


@pytest.mark.one_engine
def test_the_model_is_left_as_found():
    model = reader(stateful=True)
    model(IDS)
    states = [keras.ops.convert_to_numpy(v).copy() for v in model.get_layer("lower").states]
    losses, nodes = len(model.losses), [len(layer._inbound_nodes) for layer in model.layers]
    certified_jacobian(model, wrt="words.output")
    after = [keras.ops.convert_to_numpy(v) for v in model.get_layer("lower").states]
    assert all(np.array_equal(a, b) for a, b in zip(states, after, strict=True))
    assert len(model.losses) == losses
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes
