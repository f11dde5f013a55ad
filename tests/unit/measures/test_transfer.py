"""Measures of whole-sequence layers against closed forms."""

from __future__ import annotations

import numpy as np

from rnnlens.measures import transfer as transfers


def test_half_life_of_a_constant_decay_is_its_definition():
    decay = np.full((2, 50, 3), 1.0)
    decay[..., 0], decay[..., 1] = 0.5, 0.5 ** (1 / 8)
    assert np.allclose(transfers.decay_half_life(decay)[:2], [1.0, 8.0], rtol=1e-12)
    assert np.isinf(transfers.decay_half_life(decay)[2])


def test_resets_do_not_count_as_decay():
    decay = np.full((1, 20, 1), 0.5 ** (1 / 4))
    decay[0, [3, 9]] = 0.0
    assert np.allclose(transfers.decay_half_life(decay), 4.0, rtol=1e-12)


def test_effective_state_size_counts_used_directions():
    rng = np.random.default_rng(0)
    decay, read = np.full((40, 1), 0.9) * np.ones(6), rng.normal(size=(40, 6))
    basis = rng.normal(size=(2, 6))
    write = rng.normal(size=(40, 2)) @ basis  # all write vectors lie in a plane
    assert transfers.effective_state_size(decay, write, read, 20) == 2
    assert transfers.effective_state_size(decay, rng.normal(size=(40, 6)), read, 20) == 6
    assert transfers.effective_state_size(decay, rng.normal(size=(40, 6)), read, 3) == 3  # limited by 3 past steps


def test_effective_state_size_is_the_rank_of_the_block():
    rng = np.random.default_rng(1)
    decay, write, read = rng.uniform(0.2, 1, (9, 4)), rng.normal(size=(9, 4)), rng.normal(size=(9, 4))
    block = np.array(
        [[(read[t] * decay[k + 1 : t + 1].prod(0) * write[k]).sum() for k in range(5)] for t in range(5, 9)]
    )
    values = np.linalg.svd(block, compute_uv=False)
    assert transfers.effective_state_size(decay, write, read, 5) == (values > 1e-3 * values[0]).sum()


def test_effective_state_size_of_a_delta_rule_is_the_rank_of_the_block():
    """In A_t = (I - beta k k^T) diag(a) with beta = 1, a second write to the same key replaces the first."""
    rng = np.random.default_rng(3)
    decay, read, keys = rng.uniform(0.5, 1, (12, 2, 5)), rng.normal(size=(12, 2, 5)), rng.normal(size=(12, 2, 5))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    keys[6:, 1] = keys[5, 1]  # head 1: a single key from step 5 on
    beta = np.ones((12, 2, 1))
    for head in range(2):
        step = [
            (np.eye(5) - np.outer(beta[t, head] * keys[t, head], keys[t, head])) @ np.diag(decay[t, head])
            for t in range(12)
        ]
        transition = lambda first, last: np.linalg.multi_dot([np.eye(5), np.eye(5), *step[first : last + 1][::-1]])  # noqa: E731, B023
        block = [[read[t, head] @ transition(k + 1, t) @ keys[k, head] for k in range(6)] for t in range(6, 12)]
        values = np.linalg.svd(np.array(block), compute_uv=False)
        sizes = transfers.effective_state_size(decay, beta * keys, read, 6, left=beta * keys, right=keys)
        assert sizes[head] == (values > 1e-3 * values[0]).sum()
