"""Loops of cells, compared with autograd of the same loops with every cell written out in plain operations."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch_loop_models as zoo
from torch_loops import (
    assert_close,
    gradients_or_zero,
    jacobian_rows,
    recurrences_of,
    stack_steps,
    states_of,
    weighted_loss,
    write_out_cells,
)

import rnnlens as rl
from rnnlens.errors import DisconnectedError

MODELS = {
    "lstm": (zoo.PlainLoop, "lstm"),
    "gru": (zoo.PlainLoop, "gru"),
    "rnn": (zoo.PlainLoop, "rnn"),
    "last_cell": (zoo.LastCell,),
    "cells_read": (zoo.CellsRead,),
    "two_layers": (zoo.TwoLayers,),
    "upper_first": (zoo.UpperFirst,),
    "fed_back": (zoo.FedBack,),
    "fed_back_gru": (zoo.FedBack, "gru"),
    "attention": (zoo.Attention,),
    "input_feeding": (zoo.Attention, True),
    **{
        change: (zoo.ChangesState, change)
        for change in ("detach", "restart", "restart_hidden", "scale", "norm", "squash")
    },
    **{change: (zoo.ChangesState, change) for change in ("zoneout", "residual")},
    "siamese": (zoo.Siamese,),
    "both_ways": (zoo.BidirectionalLoop,),
    "attribute": (zoo.StateInAttribute,),
    "own": (zoo.OwnLoop,),
    "own_last": (zoo.OwnLoop, False),
    "forced": (zoo.TeacherForced,),
    "forced_by_its_own": (zoo.TeacherForced, True),
}


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random.seed(1)
        yield


def oracle(name):
    model, x = zoo.build(*MODELS[name]), zoo.batch()
    twin, taps = write_out_cells(model)
    source = x.clone().requires_grad_()
    random.seed(0)  # the seed that every verb starts from
    output = twin(source)
    random.seed(1)
    return model, x, source, output, taps


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    """Gradients of loss and output with respect to states and input equal autograd's, also in a trace."""
    model, x, source, output, taps = oracle(name)
    trace = rl.trace(model, x, loss=weighted_loss)
    for node, path, calls in recurrences_of(model, taps):
        for state in states_of(taps[path]):
            expected = stack_steps(gradients_or_zero(weighted_loss(output), taps[path].zeros[state][calls]))
            assert_close(trace[node][f"{state}_grad"], expected, f"trace of {node}.{state}")
    for target, value, options in (
        ("loss", weighted_loss(output), {"loss": weighted_loss}),
        ("output", output.sum(), {"reduce": "sum"}),
    ):
        state_names = [f"{node}.{s}" for node, path, _ in recurrences_of(model, taps) for s in states_of(taps[path])]
        gradients = rl.gradients(model, x, of=target, wrt=["input", *state_names], **options)
        assert_close(gradients["model"]["input"], gradients_or_zero(value, [source])[0], f"{target} by input")
        for node, path, calls in recurrences_of(model, taps):
            for state in states_of(taps[path]):
                expected = stack_steps(gradients_or_zero(value, taps[path].zeros[state][calls]))
                if not expected.any():
                    assert f"{node}.{state}" in gradients.disconnected
                    continue
                assert_close(gradients[node][state], expected, f"{target} by {node}.{state}")


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_states(name):
    """Gradients of each final hidden state with respect to every state, the input and all weights equal autograd's."""
    model, x, source, _output, taps = oracle(name)
    parameters = dict(model.named_parameters())
    for node, path, calls in recurrences_of(model, taps):
        value = taps[path].values["hidden"][calls][-1].sum()
        gradients = rl.gradients(model, x, of=f"{node}.final_hidden", reduce="sum", wrt=["input", "weights"])
        expected = gradients_or_zero(value, [source])[0]
        if expected.abs().sum():
            assert_close(gradients["model"]["input"], expected, f"{node} by input")
        for state in states_of(taps[path]):
            expected = stack_steps(gradients_or_zero(value, taps[path].zeros[state][calls]))
            state_grad = rl.gradients(model, x, of=f"{node}.final_hidden", reduce="sum", wrt=f"{node}.{state}")
            assert_close(state_grad, expected, f"{node} by {state}")
        for key, expected in zip(parameters, gradients_or_zero(value, list(parameters.values())), strict=True):
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
        assert_close(array, expected, f"{layer}.{weight}")
    elif weight in ("weight", "bias") and expected.abs().any():
        assert_close(gradients[layer][weight], expected.reshape(parameter.shape), f"{layer}.{weight}")


@pytest.mark.parametrize("name", MODELS)
def test_time_jacobian(name):
    """Jacobians of the output by input and states, and of each state by input and hidden state, equal autograd's."""
    model, x, source, output, taps = oracle(name)
    has_steps = output.dim() == 3

    def compare(of, wrt, value, tensors, timed=True):
        expected = jacobian_rows(value, tensors)
        if not expected.any():
            with pytest.raises(DisconnectedError):
                rl.jacobian(model, x, of=of, wrt=wrt)
            return
        jacobian = rl.jacobian(model, x, of=of, wrt=wrt)
        dims = ["sample", *(["out_time"] if timed else []), "out_unit", "in_time", "in_feature"]
        assert_close(jacobian.transpose(*dims), expected, f"{of} by {wrt}")

    output_by_input = jacobian_rows(output, [source])[..., 0, :, :]
    jacobian = rl.jacobian(model, x)
    assert_close(jacobian, output_by_input, "output by input")
    for node, path, calls in recurrences_of(model, taps):
        tap = taps[path]
        for state in states_of(tap):
            if any(g.abs().sum() for g in gradients_or_zero(output.sum(), tap.zeros[state][calls])):
                compare("output", f"{node}.{state}", output, tap.zeros[state][calls], has_steps)
            values = torch.stack(tap.values[state][calls], 1)
            compare(f"{node}.{state}", f"{node}.hidden", values, tap.zeros["hidden"][calls])
            by_input = jacobian_rows(values, [source])[..., 0, :, :]
            assert_close(rl.jacobian(model, x, of=f"{node}.{state}"), by_input, f"{node}.{state} by input")
