"""Loops of cells, against the same loops with every cell written out in plain operations."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch_loop_models as zoo
from torch_loops import close, loss, nodes, over_time, pull, rows, states_of, written

import rnnlens as rl
from rnnlens.errors import DisconnectedError

MODELS = {
    "lstm": (zoo.Plain, "lstm"),
    "gru": (zoo.Plain, "gru"),
    "rnn": (zoo.Plain, "rnn"),
    "last_cell": (zoo.LastCell,),
    "cells_read": (zoo.CellsRead,),
    "two_layers": (zoo.TwoLayers,),
    "upper_first": (zoo.UpperFirst,),
    "fed_back": (zoo.FedBack,),
    "fed_back_gru": (zoo.FedBack, "gru"),
    "attention": (zoo.Attention,),
    "input_feeding": (zoo.Attention, True),
    **{change: (zoo.Between, change) for change in ("detach", "restart", "restart_hidden", "scale", "norm", "squash")},
    **{change: (zoo.Between, change) for change in ("zoneout", "residual")},
    "siamese": (zoo.Siamese,),
    "both_ways": (zoo.BothWays,),
    "attribute": (zoo.Attribute,),
    "own": (zoo.OwnLoop,),
    "own_last": (zoo.OwnLoop, False),
    "forced": (zoo.Forced,),
    "forced_by_its_own": (zoo.Forced, True),
}


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random.seed(1)
        yield


def oracle(name):
    model, x = zoo.build(*MODELS[name]), zoo.batch()
    twin, taps = written(model)
    source = x.clone().requires_grad_()
    random.seed(0)  # the seed that every verb starts from
    output = twin(source)
    random.seed(1)
    return model, x, source, output, taps


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    """Of the loss and of the output, by states and input; a trace says the same."""
    model, x, source, output, taps = oracle(name)
    trace = rl.trace(model, x, loss=loss)
    for node, path, calls in nodes(model, taps):
        for state in states_of(taps[path]):
            expected = over_time(pull(loss(output), taps[path].zeros[state][calls]))
            close(trace[node][f"{state}_grad"], expected, f"trace of {node}.{state}")
    for target, value, options in (("loss", loss(output), {"loss": loss}), ("output", output.sum(), {"reduce": "sum"})):
        state_names = [f"{node}.{s}" for node, path, _ in nodes(model, taps) for s in states_of(taps[path])]
        gradients = rl.gradients(model, x, of=target, wrt=["input", *state_names], **options)
        close(gradients["model"]["input"], pull(value, [source])[0], f"{target} by input")
        for node, path, calls in nodes(model, taps):
            for state in states_of(taps[path]):
                expected = over_time(pull(value, taps[path].zeros[state][calls]))
                if not expected.any():
                    assert f"{node}.{state}" in gradients.disconnected
                    continue
                close(gradients[node][state], expected, f"{target} by {node}.{state}")


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_states(name):
    """Of each recurrence's last hidden state, by every state, the input and all weights."""
    model, x, source, _output, taps = oracle(name)
    parameters = dict(model.named_parameters())
    for node, path, calls in nodes(model, taps):
        value = taps[path].values["hidden"][calls][-1].sum()
        gradients = rl.gradients(model, x, of=f"{node}.final_hidden", reduce="sum", wrt=["input", "weights"])
        expected = pull(value, [source])[0]
        if expected.abs().sum():
            close(gradients["model"]["input"], expected, f"{node} by input")
        for state in states_of(taps[path]):
            expected = over_time(pull(value, taps[path].zeros[state][calls]))
            state_grad = rl.gradients(model, x, of=f"{node}.final_hidden", reduce="sum", wrt=f"{node}.{state}")
            close(state_grad, expected, f"{node} by {state}")
        for key, expected in zip(parameters, pull(value, list(parameters.values())), strict=True):
            layer, _, weight = key.rpartition(".")
            compare_weight(gradients, layer, weight, expected, parameters[key])


def compare_weight(gradients, layer, weight, expected, parameter):
    names = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel"}
    if weight in names:
        array = gradients[layer][names[weight]] if layer in gradients else None
        if array is None or not expected.abs().any():
            return
        gates = array.sizes["gate"]
        expected = expected.T.reshape(-1, gates, len(expected) // gates).numpy()
        if gates == 3:
            expected = expected[:, [1, 0, 2]]
        close(array, expected, f"{layer}.{weight}")
    elif weight in ("weight", "bias") and expected.abs().any():
        close(gradients[layer][weight], expected.reshape(parameter.shape), f"{layer}.{weight}")


@pytest.mark.parametrize("name", MODELS)
def test_time_jacobian(name):
    """Of the output by the input and by every state, and of every state by the input and by itself."""
    model, x, source, output, taps = oracle(name)
    has_steps = output.dim() == 3

    def compare(of, wrt, value, tensors, timed=True):
        expected = rows(value, tensors)
        if not expected.any():
            with pytest.raises(DisconnectedError):
                rl.jacobian(model, x, of=of, wrt=wrt)
            return
        jacobian = rl.jacobian(model, x, of=of, wrt=wrt)
        dims = ["sample", *(["out_time"] if timed else []), "out_unit", "in_time", "in_feature"]
        close(jacobian.transpose(*dims), expected, f"{of} by {wrt}")

    output_by_input = rows(output, [source])[..., 0, :, :]
    jacobian = rl.jacobian(model, x)
    close(jacobian, output_by_input, "output by input")
    for node, path, calls in nodes(model, taps):
        tap = taps[path]
        for state in states_of(tap):
            if any(g.abs().sum() for g in pull(output.sum(), tap.zeros[state][calls])):
                compare("output", f"{node}.{state}", output, tap.zeros[state][calls], has_steps)
            values = torch.stack(tap.values[state][calls], 1)
            compare(f"{node}.{state}", f"{node}.hidden", values, tap.zeros["hidden"][calls])
            by_input = rows(values, [source])[..., 0, :, :]
            close(rl.jacobian(model, x, of=f"{node}.{state}"), by_input, f"{node}.{state} by input")
