"""Calls in spawned processes of a pool give the same numbers as in this process, to the last bit."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

X = np.random.default_rng(0).normal(size=(3, 6, 3)).astype("f4")


def numbers(seed):
    """Return the hidden gradients, the norms of the time Jacobian and the certificate's state of a small model."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.LSTM(3, 4, batch_first=True)
    trace = rl.trace(model, X, loss=lambda output: output[0].square().mean())
    layer = trace[trace.layers[0]]
    return (
        layer.hidden_grad.values,
        rl.jacobian(model, X, of="output[0]", measure="norm").values,
        trace.certificate.state,
    )


def run_in_pool(seeds):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(numbers, seeds))


@pytest.mark.full
def test_numbers_of_other_processes_are_those_of_this_one():
    for (gradient, jacobian, state), (expected_gradient, expected_jacobian, _) in zip(
        run_in_pool([0, 1, 2]), map(numbers, [0, 1, 2]), strict=True
    ):
        np.testing.assert_array_equal(gradient, expected_gradient)
        np.testing.assert_array_equal(jacobian, expected_jacobian)
        assert state == "passed"
