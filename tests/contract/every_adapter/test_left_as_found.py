"""Model, data, generators and flags are left as found, after success and after errors at every stage."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from tested_adapter import ADAPTER, specimens

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Port, Taps
from rnnlens.adapters.registry import adapter_for

pytestmark = pytest.mark.op_by_op


def trace(specimen, x, y, loss, training):
    rl.trace(specimen.model, x, y, loss=loss, training=training, seed=3)


def gradients(specimen, x, y, loss, training):
    wrt = ["weights", "input", f"{specimen.layer}.hidden"]
    rl.gradients(specimen.model, x, y, loss=loss, wrt=wrt, training=training, seed=3)


def pull_back(specimen, x, y, loss, training):
    adapter, layer = adapter_for(specimen.model), specimen.layer
    wrt = [Port("input"), Port("output", layer), Port("weight", layer, key="kernel")]
    batch = Batch(x, y, loss=loss, training=training)
    with adapter.run(adapter.bind(specimen.model, x, y), batch, Taps.ports([Port("loss")], wrt)) as pullback:
        assert all(np.asarray(gradient).any() for gradient in pullback.pull({Port("loss"): np.ones(1)}).values())


#: What is raised, and where. A graph of TensorFlow 1 runs no Python.
ENDINGS = {"success": ("", None)}
KEPT = ["success-pull_back-first call-False", "success-trace-later call-False"]
if ADAPTER == "tf1":
    ENDINGS["wrong x"] = ("x", rl.errors.InputError)
    KEPT += ["wrong x-gradients-first call-False"]
else:
    if "keras" not in ADAPTER:  # the engine raises its own error there
        ENDINGS["no number"] = ("result", ValueError)
        KEPT += ["no number-trace-first call-True"]
    for stage in ("forward", "loss"):
        ENDINGS |= {f"{stage} raises": (stage, ZeroDivisionError), f"{stage} interrupted": (stage, KeyboardInterrupt)}
    KEPT += ["success-gradients-later call-True", "forward raises-trace-first call-True"]
    KEPT += ["loss interrupted-pull_back-first call-True", "loss raises-trace-later call-True"]
    KEPT += ["forward interrupted-gradients-later call-True"]


def prepared(specimen, ending):
    """Return x, y and loss with which a call ends so, and the error that it raises."""
    (x, y), loss = specimen.data(2, 4).values(), specimen.loss
    stage, error = ENDINGS[ending]

    def failing_loss(*_):
        if stage == "result":
            return "no number"
        raise error

    if stage == "forward":
        specimen.trap.raised = error
    return (x[:, :, :2] if stage == "x" else x, y, failing_loss if stage in ("loss", "result") else loss), error


@pytest.mark.product(keep=KEPT)
@pytest.mark.parametrize("training", [False] if ADAPTER == "tf1" else [False, True])
@pytest.mark.parametrize("call", ["first call", "later call"])
@pytest.mark.parametrize("verb", [trace, gradients, pull_back])
@pytest.mark.parametrize("ending", ENDINGS)
def test_everything(verb, ending, training, call):
    specimen = specimens.stateful()
    if call == "later call":
        for _ in range(2):
            verb(specimen, *specimen.data(2, 4).values(), specimen.loss, training)
    (x, y, loss), error = prepared(specimen, ending)
    before = specimens.state_of(specimen.model, x, y)
    with nullcontext() if error is None else pytest.raises(error):
        verb(specimen, x, y, loss, training)
    after = specimens.state_of(specimen.model, x, y)
    for name, value in before.items():
        assert after[name] == value, name


def test_by_the_other_verbs():
    specimen = specimens.stateful()
    x, y = specimen.data(2, 4).values()
    before = specimens.state_of(specimen.model, x, y)
    rl.layers(specimen.model, x)
    rl.weights(specimen.model, x, y, loss=specimen.loss)
    rl.jacobian(specimen.model, x, of=f"{specimen.layer}.output", wrt=f"{specimen.layer}.input")
    assert specimens.state_of(specimen.model, x, y) == before


def test_results_do_not_follow_the_users_weights_and_data():
    specimen = specimens.stateful()
    x, y = specimen.data(2, 4).values()
    traced = rl.trace(specimen.model, x, y, loss=specimen.loss)[specimen.layer].dataset
    before = {name: values.values.copy() for name, values in traced.items()}
    specimens.change(specimen.model, x)
    for name, values in before.items():
        np.testing.assert_array_equal(traced[name].values, values)


@pytest.mark.parametrize("verb", [trace, pull_back])
@pytest.mark.parametrize("ending", [*ENDINGS][:2])
def test_nothing_keeps_the_model_alive(verb, ending):
    specimen = specimens.stateful()
    verb(specimen, *specimen.data(2, 4).values(), specimen.loss, False)
    arguments, error = prepared(specimen, ending)
    with nullcontext() if error is None else pytest.raises(error):
        verb(specimen, *arguments, False)
    reference = weakref.ref(specimen.model)
    del specimen, arguments
    specimens.forget()
    gc.collect()
    assert reference() is None
