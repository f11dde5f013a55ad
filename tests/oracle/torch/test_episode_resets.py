"""Whether a policy is reset where an episode begins, against torch's own gradient across the border."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError, UnsupportedError

SAMPLES, STEPS, FEATURES = 5, 14, 3
CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}
MODES = ("aligned", "early", "late", "missing")


class Policy(nn.Module):
    """A cell in a loop that is reset by the episode starts, in one of several ways, and logits of actions."""

    def __init__(self, cell="gru", mode="aligned", detached=False):
        super().__init__()
        self.cell, self.logits = CELLS[cell](FEATURES, 6), nn.Linear(6, 2)
        self.mode, self.detached = mode, detached

    def forward(self, x, starts):
        starts = torch.as_tensor(starts).to(x.dtype)
        if self.mode == "early":
            starts = torch.cat([starts[:, 1:], torch.zeros_like(starts[:, :1])], dim=1)
        state = [x.new_zeros(len(x), 6)] * (2 if isinstance(self.cell, nn.LSTMCell) else 1)
        outputs = []
        for t in range(x.shape[1]):
            keep = 1 - starts[:, t, None]
            if self.mode in ("aligned", "early"):
                state = [part * keep for part in state]
            if self.detached:
                state = [part * keep + (part * (1 - keep)).detach() for part in state]
            new = self.cell(x[:, t], tuple(state) if len(state) > 1 else state[0])
            state = list(new) if isinstance(new, tuple) else [new]
            outputs.append(self.logits(state[0]))
            if self.mode == "late":
                state = [part * keep for part in state]
        return torch.stack(outputs, dim=1)


def rollout(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, STEPS, FEATURES)).astype("float32")
    starts = np.zeros((SAMPLES, STEPS), dtype=bool)
    for row in starts:
        row[[int(rng.integers(3, 6)), int(rng.integers(9, 12))]] = True
    return x, starts


def gradient_crosses(policy, x, starts, sample, step):
    """Return whether the outputs from a step on have a gradient by the inputs before it."""
    inputs = torch.tensor(x, requires_grad=True)
    ends = [int(t) for t in np.flatnonzero(starts[sample]) if t > step + 1] + [STEPS]
    (gradient,) = torch.autograd.grad(policy(inputs, starts)[sample, step : ends[0]].sum(), inputs)
    return bool(gradient[sample, :step].any())


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("mode", MODES)
def test_the_verdict_is_that_of_the_gradient_across_each_border(cell, mode):
    torch.manual_seed(0)
    policy = Policy(cell, mode)
    x, starts = rollout()
    result = rl.episode_resets(lambda observations: policy(observations, starts), torch.tensor(x), starts)
    assert result.verdict == mode
    assert result.borders.sizes == {"border": 2 * SAMPLES, "offset": 3}
    for i in range(2 * SAMPLES):
        border = result.borders.isel(border=i)
        sample, step = int(border["sample"]), int(border["step"])
        assert starts[sample, step]
        crosses = [gradient_crosses(policy, x, starts, sample, step + offset) for offset in (-1, 0, 1)]
        assert (border["change"].values > 1e-5).tolist() == crosses
        assert (border["change"].values == 0).tolist() == [not crossing for crossing in crosses]


def test_done_flags_in_place_of_starts_reset_one_step_too_early():
    """The commonest off by one: done[t] says that step t is the last of its episode."""
    torch.manual_seed(0)
    policy = Policy()
    x, starts = rollout()
    done = np.concatenate([starts[:, 1:], np.zeros((SAMPLES, 1), bool)], axis=1)
    result = rl.episode_resets(lambda observations: policy(observations, done), torch.tensor(x), starts)
    assert result.verdict == "early"
    assert "start[:, t] = done[:, t - 1]" in str(result)


def test_a_state_that_is_detached_and_carried_on_is_not_reset():
    torch.manual_seed(0)
    policy = Policy(mode="", detached=True)
    x, starts = rollout()
    result = rl.episode_resets(lambda observations: policy(observations, starts), torch.tensor(x), starts)
    step = int(np.flatnonzero(starts[0])[0])
    assert not gradient_crosses(policy, x, starts, 0, step)
    assert result.verdict == "missing"


def test_a_policy_without_memory_and_one_that_is_reset_twice():
    x, starts = rollout()
    assert rl.episode_resets(lambda observations: observations, x, starts).verdict == "unknown"
    torch.manual_seed(0)
    twice = Policy(mode="late")
    both = starts.copy()
    both[:, 1:] |= starts[:, :-1]

    def policy(observations):
        twice.mode = "aligned"
        return twice(torch.tensor(observations), both)

    result = rl.episode_resets(policy, x, starts)
    assert result.verdict == "mixed"
    assert set(result.borders["verdict"].values) == {"other"}


def test_one_environment_in_two_is_reset():
    torch.manual_seed(0)
    policy = Policy()
    x, starts = rollout()
    used = starts.copy()
    used[::2] = False
    result = rl.episode_resets(lambda observations: policy(observations, used), torch.tensor(x), starts)
    assert result.verdict == "mixed"
    assert result.sentence == "Of 10 examined borders of episodes: 6 missing, 4 aligned."


def test_fewer_borders_are_examined_on_request():
    torch.manual_seed(0)
    policy = Policy()
    x, starts = rollout()
    result = rl.episode_resets(lambda observations: policy(observations, starts), torch.tensor(x), starts, most=3)
    assert result.borders.sizes["border"] == 3
    assert "3 borders examined" in result.sentence


def test_what_cannot_be_examined_is_refused_by_name():
    torch.manual_seed(0)
    policy = Policy()
    x, starts = rollout()
    with pytest.raises(InputError, match="No border between two episodes can be examined"):
        rl.episode_resets(lambda observations: policy(observations, starts), torch.tensor(x), np.zeros_like(starts))
    with pytest.raises(InputError, match="x and starts do not fit"):
        rl.episode_resets(policy, x[:1], starts[:1])
    with pytest.raises(InputError, match="returns no outputs of each step"):
        rl.episode_resets(lambda observations: policy(observations, starts)[:, -1], torch.tensor(x), starts)
    drop = nn.Dropout(0.5)
    with pytest.raises(UnsupportedError, match="Two calls of the model with the same inputs differ"):
        rl.episode_resets(lambda observations: drop(policy(observations, starts)), torch.tensor(x), starts)
