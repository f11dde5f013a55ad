"""Loops that mask ended samples, compared with autograd of the same loops with every cell written out."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch_loop_models as zoo
from torch_loops import assert_close, gradients_or_zero, jacobian_rows, stack_steps, weighted_loss, write_out_cells

import rnnlens as rl

MODELS = {
    **{hold: (zoo.MaskedLoop, hold) for hold in ("where", "blend", "assign")},
    **{f"{hold}_all": (zoo.MaskedLoop, hold, "all") for hold in ("where", "blend")},
}
REAL = np.arange(zoo.T)[None, :] < zoo.LENGTHS.numpy()[:, None]


@pytest.fixture(autouse=True)
def _warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def oracle(*arguments):
    model, x = zoo.build(*arguments), zoo.batch()
    twin, taps = write_out_cells(model)
    source = x.clone().requires_grad_()
    return model, x, source, twin(source), taps["cell"]


def carry_last_state(steps):
    """Return states (sample, time, unit) that repeat each sample's last real state after its end."""
    states = np.array(stack_steps(steps))
    for t in range(1, zoo.T):
        states[~REAL[:, t], t] = states[~REAL[:, t], t - 1]
    return states


@pytest.mark.parametrize("name", MODELS)
def test_states_of_ended_samples_are_those_they_hold(name):
    """States after a sample's end repeat its last real state; gradients at real steps equal autograd's."""
    model, x, source, output, tap = oracle(*MODELS[name])
    trace = rl.trace(model, x, loss=weighted_loss)
    assert list(trace) == ["cell"]
    assert trace["cell"].mask.values.tolist() == REAL.tolist()
    for state in ("hidden", "cell"):
        assert_close(trace["cell"][state], carry_last_state(tap.values[state]), state)
        expected = stack_steps(gradients_or_zero(weighted_loss(output), tap.zeros[state]))
        assert_close(np.where(REAL[..., None], trace["cell"][f"{state}_grad"], 0), expected, f"trace of {state}")
        for target, value, options in (
            ("loss", weighted_loss(output), {"loss": weighted_loss}),
            ("output", output.sum(), {"reduce": "sum"}),
        ):
            gradient = rl.gradients(model, x, of=target, wrt=f"cell.{state}", **options)
            assert_close(
                np.where(REAL[..., None], gradient, 0),
                stack_steps(gradients_or_zero(value, tap.zeros[state])),
                f"{target} by {state}",
            )
    assert_close(
        rl.gradients(model, x, loss=weighted_loss, wrt="input"),
        gradients_or_zero(weighted_loss(output), [source])[0],
        "loss by input",
    )


@pytest.mark.parametrize("name", MODELS)
def test_what_a_sample_ends_with(name):
    """The final state of a sample is that of its own last step, as target and as ``wrt=``."""
    model, x, source, output, tap = oracle(*MODELS[name])
    for state in ("hidden", "cell"):
        last = torch.stack([tap.values[state][int(n) - 1][i] for i, n in enumerate(zoo.LENGTHS)])
        gradients = rl.gradients(model, x, of=f"cell.final_{state}", reduce="sum", wrt=["input", "cell.hidden"])
        assert_close(gradients["model"]["input"], gradients_or_zero(last.sum(), [source])[0], f"final {state} by input")
        expected = stack_steps(gradients_or_zero(last.sum(), tap.zeros["hidden"]))
        assert_close(np.where(REAL[..., None], gradients["cell"]["hidden"], 0), expected, f"final {state} by hidden")
        assert_close(
            rl.jacobian(model, x, of=f"cell.final_{state}"),
            jacobian_rows(last, [source])[..., 0, :, :],
            f"J of final {state}",
        )
    for state in ("hidden", "cell"):
        grads = gradients_or_zero(weighted_loss(output), tap.zeros[state])
        expected = torch.stack([grads[int(n) - 1][i] for i, n in enumerate(zoo.LENGTHS)])
        assert_close(
            rl.gradients(model, x, loss=weighted_loss, wrt=f"cell.final_{state}"), expected, f"loss by final {state}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_time_jacobian(name):
    model, x, source, output, tap = oracle(*MODELS[name])
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")
    for state in ("hidden", "cell"):
        jacobian = rl.jacobian(model, x, wrt=f"cell.{state}").values
        expected = jacobian_rows(output, tap.zeros[state])
        leading_axes = (slice(None), *[None] * (expected.ndim - 3))
        assert_close(np.where(REAL[(*leading_axes, slice(None), None)], jacobian, 0), expected, f"output by {state}")


def test_outputs_that_read_the_candidate():
    """If outputs read the new state before it is masked, no step is masked: states and gradients equal autograd's."""
    model, x, source, output, tap = oracle(zoo.CandidateRead)
    trace = rl.trace(model, x, loss=weighted_loss)
    for quantity, expected in (("hidden", stack_steps(tap.values["hidden"])), ("hidden_grad", None)):
        actual = np.concatenate([trace[node][quantity].values for node in trace], axis=1)
        assert_close(
            actual,
            stack_steps(gradients_or_zero(weighted_loss(output), tap.zeros["hidden"]))
            if expected is None
            else expected,
            quantity,
        )
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")
    actual = rl.gradients(model, x, of="output", reduce="sum", wrt=[f"{node}.hidden" for node in trace])
    joined = np.concatenate([actual[node]["hidden"].values for node in trace], axis=1)
    assert_close(joined, stack_steps(gradients_or_zero(output.sum(), tap.zeros["hidden"])), "output by hidden")
    last_node = list(trace)[-1]
    actual = rl.gradients(model, x, of=f"{last_node}.final_hidden", reduce="sum", wrt="input")
    assert_close(actual, gradients_or_zero(tap.values["hidden"][-1].sum(), [source])[0], "last state by input")


def test_an_output_gathered_at_the_last_real_step_is_no_mask():
    """If only the output is gathered at the last real step, there is no mask: states in the padding are as computed."""

    class Gathered(zoo.PlainLoop):
        def forward(self, x):
            h, c = zoo.zeros(x, zoo.H, zoo.H)
            last_hidden = torch.zeros_like(h)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                last_hidden = torch.where((t == lengths - 1)[:, None], h, last_hidden)
            return self.head(last_hidden)

    lengths = torch.tensor([zoo.T, zoo.T - 1])
    model, x, source, output, tap = oracle(Gathered)
    trace = rl.trace(model, x, loss=weighted_loss)
    assert "mask" not in trace["cell"].dataset
    assert_close(trace["cell"].hidden, stack_steps(tap.values["hidden"]), "hidden")
    assert_close(
        trace["cell"].hidden_grad,
        stack_steps(gradients_or_zero(weighted_loss(output), tap.zeros["hidden"])),
        "hidden gradient",
    )
    assert_close(rl.jacobian(model, x), jacobian_rows(output, [source])[..., 0, :, :], "output by input")
