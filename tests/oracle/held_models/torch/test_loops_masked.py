"""Loops that hold ended samples back, against the same loops with every cell written out in plain operations."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch_loop_models as zoo
from torch_loops import close, loss, over_time, pull, rows, written

import rnnlens as rl

MODELS = {
    **{hold: (zoo.Masked, hold) for hold in ("where", "blend", "assign")},
    **{f"{hold}_all": (zoo.Masked, hold, "all") for hold in ("where", "blend")},
}
REAL = np.arange(zoo.T)[None, :] < zoo.LENGTHS.numpy()[:, None]


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def oracle(*arguments):
    model, x = zoo.build(*arguments), zoo.batch()
    twin, taps = written(model)
    source = x.clone().requires_grad_()
    return model, x, source, twin(source), taps["cell"]


def carry_last_state(steps):
    """States with that of the last real step held."""
    states = np.array(over_time(steps))
    for t in range(1, zoo.T):
        states[~REAL[:, t], t] = states[~REAL[:, t], t - 1]
    return states


@pytest.mark.parametrize("name", MODELS)
def test_states_of_ended_samples_are_those_they_hold(name):
    """At the last step as at any other."""
    model, x, source, output, tap = oracle(*MODELS[name])
    trace = rl.trace(model, x, loss=loss)
    assert list(trace) == ["cell"]
    assert trace["cell"].mask.values.tolist() == REAL.tolist()
    for state in ("hidden", "cell"):
        close(trace["cell"][state], carry_last_state(tap.values[state]), state)
        expected = over_time(pull(loss(output), tap.zeros[state]))
        close(np.where(REAL[..., None], trace["cell"][f"{state}_grad"], 0), expected, f"trace of {state}")
        for target, value, options in (
            ("loss", loss(output), {"loss": loss}),
            ("output", output.sum(), {"reduce": "sum"}),
        ):
            gradient = rl.gradients(model, x, of=target, wrt=f"cell.{state}", **options)
            close(
                np.where(REAL[..., None], gradient, 0), over_time(pull(value, tap.zeros[state])), f"{target} by {state}"
            )
    close(rl.gradients(model, x, loss=loss, wrt="input"), pull(loss(output), [source])[0], "loss by input")


@pytest.mark.parametrize("name", MODELS)
def test_what_a_sample_ends_with(name):
    """The last state of a sample is that of its own last step: as a target, and by it."""
    model, x, source, output, tap = oracle(*MODELS[name])
    for state in ("hidden", "cell"):
        last = torch.stack([tap.values[state][int(n) - 1][i] for i, n in enumerate(zoo.LENGTHS)])
        gradients = rl.gradients(model, x, of=f"cell.final_{state}", reduce="sum", wrt=["input", "cell.hidden"])
        close(gradients["model"]["input"], pull(last.sum(), [source])[0], f"final {state} by input")
        expected = over_time(pull(last.sum(), tap.zeros["hidden"]))
        close(np.where(REAL[..., None], gradients["cell"]["hidden"], 0), expected, f"final {state} by hidden")
        close(
            rl.jacobian(model, x, of=f"cell.final_{state}"), rows(last, [source])[..., 0, :, :], f"J of final {state}"
        )
    for state in ("hidden", "cell"):
        grads = pull(loss(output), tap.zeros[state])
        expected = torch.stack([grads[int(n) - 1][i] for i, n in enumerate(zoo.LENGTHS)])
        close(rl.gradients(model, x, loss=loss, wrt=f"cell.final_{state}"), expected, f"loss by final {state}")


@pytest.mark.parametrize("name", MODELS)
def test_time_jacobian(name):
    model, x, source, output, tap = oracle(*MODELS[name])
    close(rl.jacobian(model, x), rows(output, [source])[..., 0, :, :], "output by input")
    for state in ("hidden", "cell"):
        jacobian = rl.jacobian(model, x, wrt=f"cell.{state}").values
        expected = rows(output, tap.zeros[state])
        leading_axes = (slice(None), *[None] * (expected.ndim - 3))
        close(np.where(REAL[(*leading_axes, slice(None), None)], jacobian, 0), expected, f"output by {state}")


def test_outputs_that_read_the_candidate():
    """What the cell proposed is read, what the mask left of it goes on: no step is a masked one then."""
    model, x, source, output, tap = oracle(zoo.CandidateRead)
    trace = rl.trace(model, x, loss=loss)
    for quantity, expected in (("hidden", over_time(tap.values["hidden"])), ("hidden_grad", None)):
        actual = np.concatenate([trace[node][quantity].values for node in trace], axis=1)
        close(actual, over_time(pull(loss(output), tap.zeros["hidden"])) if expected is None else expected, quantity)
    close(rl.jacobian(model, x), rows(output, [source])[..., 0, :, :], "output by input")
    actual = rl.gradients(model, x, of="output", reduce="sum", wrt=[f"{node}.hidden" for node in trace])
    joined = np.concatenate([actual[node]["hidden"].values for node in trace], axis=1)
    close(joined, over_time(pull(output.sum(), tap.zeros["hidden"])), "output by hidden")
    last_node = list(trace)[-1]
    actual = rl.gradients(model, x, of=f"{last_node}.final_hidden", reduce="sum", wrt="input")
    close(actual, pull(tap.values["hidden"][-1].sum(), [source])[0], "last state by input")


def test_an_output_gathered_at_the_last_real_step_is_no_mask():
    """The recurrence runs on through the padding: its states there are what it computed."""

    class Gathered(zoo.Plain):
        def forward(self, x):
            h, c = zoo.zeros(x, zoo.H, zoo.H)
            last_hidden = torch.zeros_like(h)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                last_hidden = torch.where((t == lengths - 1)[:, None], h, last_hidden)
            return self.head(last_hidden)

    lengths = torch.tensor([zoo.T, zoo.T - 1])
    model, x, source, output, tap = oracle(Gathered)
    trace = rl.trace(model, x, loss=loss)
    assert "mask" not in trace["cell"].dataset
    close(trace["cell"].hidden, over_time(tap.values["hidden"]), "hidden")
    close(trace["cell"].hidden_grad, over_time(pull(loss(output), tap.zeros["hidden"])), "hidden gradient")
    close(rl.jacobian(model, x), rows(output, [source])[..., 0, :, :], "output by input")
