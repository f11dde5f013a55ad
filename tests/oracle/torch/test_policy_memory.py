"""Memory in use without a target: of policies whose action distribution depends on a known number of observations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.measures.intervention import DistributionDifference, donors

pytestmark = pytest.mark.check

STEPS, SAMPLES, ACTIONS = 32, 256, 3


class Policy(nn.Module):
    """Policy: its first logit follows the observation ``lag`` steps back, and all logits one at ``shared``."""

    def __init__(self, lag: int, shared: int = 0, scale: float = 0.0, head: nn.Module | None = None) -> None:
        super().__init__()
        units = max(lag, shared) + 1
        self.memory, self.logits, self.head = nn.RNN(1, units, batch_first=True), nn.Linear(units, ACTIONS), head
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()
            self.memory.weight_hh_l0.copy_(torch.diag(torch.ones(units - 1), -1))
            self.memory.weight_ih_l0[0, 0] = 0.01  # almost linear
            self.logits.weight[:, shared] += 100 * scale
            self.logits.weight[0, lag] += 200

    def forward(self, observations):
        logits = self.logits(self.memory(observations)[0])
        return logits if self.head is None else self.head(logits)


def observations(samples=SAMPLES):
    return np.random.default_rng(0).normal(size=(samples, STEPS, 1)).astype("float32")


@pytest.mark.parametrize("task", ["classes", "binary", "values"])
@pytest.mark.parametrize("lag", [0, 4, 17])
def test_memory_of_a_policy_is_exact_without_a_target(lag, task):
    d = rl.diagnose(Policy(lag).eval(), observations(), task=task)
    assert d["model"].attrs["known"]
    assert float(d["model"].memory) == lag + 1
    assert d["model"].memory_interval.values.tolist() == [lag + 1, lag + 1]
    assert d.how_far_back[0].steps == lag + 1
    assert ("Jensen-Shannon" in d.sentences["the model"]) == (task != "values")
    assert "Without a target it is not known whether that helps." in d.sentences["the model"]


def test_what_moves_all_logits_alike_is_no_memory_of_the_action():
    policy, x = Policy(lag=3, shared=20, scale=5.0).eval(), observations()
    of_actions, of_logits = rl.diagnose(policy, x, task="classes"), rl.diagnose(policy, x, task="values")
    assert (float(of_actions["model"].memory), float(of_logits["model"].memory)) == (4, 21)
    (state,) = [row for row in of_actions.how_far_back if row.measure == "state carries"]
    assert state.steps == 4


def test_probabilities_are_told_by_their_sum_and_logits_by_the_loss():
    x = observations()
    of_probabilities = rl.diagnose(Policy(3, 20, 5.0, nn.Softmax(-1)).eval(), x)
    of_logits = rl.diagnose(Policy(3, 20, 5.0).eval(), x, loss=nn.CrossEntropyLoss())
    for d in (of_probabilities, of_logits):
        assert float(d["model"].memory) == 4
        assert d["model"].use.attrs["units"] == "share of divergence"
    np.testing.assert_allclose(of_probabilities["model"].use, of_logits["model"].use, atol=1e-5)


def test_use_is_the_share_of_the_divergence_of_unrelated_samples():
    torch.manual_seed(0)
    x = torch.randn(128, 8, 2, dtype=torch.float64)
    gru, head = nn.GRU(2, 5, batch_first=True).double(), nn.Linear(5, 4).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = gru, head

        def forward(self, x):
            return 5 * self.head(self.gru(x)[0])

    def log_probability(x):
        with torch.no_grad():
            return torch.log_softmax(net(x)[:, -1], -1)

    def divergence(p, q):
        middle = ((p.exp() + q.exp()) / 2).log()
        return sum(nn.functional.kl_div(middle, own, reduction="none", log_target=True).sum(-1) for own in (p, q)) / 2

    net = Net().eval()
    d = rl.diagnose(net, x, task="classes")["model"]
    own, lender = log_probability(x), donors(128)
    between = np.mean([divergence(own, own.roll(shift, 0)).mean().item() for shift in range(128)])
    for k in d.context.values:
        exchanged = divergence(own, log_probability(torch.cat([x[lender, : 8 - k], x[:, 8 - k :]], 1)))
        np.testing.assert_allclose(d.change.sel(context=k), exchanged, rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(d.use.sel(context=k), exchanged.mean().item() / between, rtol=1e-8)
    assert (d.use_interval[:, 0] <= d.use).all()
    assert (d.use <= d.use_interval[:, 1]).all()


def test_a_policy_without_memory_and_one_that_never_changes_say_so():
    x = observations()
    assert "LAST_STEP_ONLY" in rl.diagnose(Policy(0).eval(), x, task="classes").codes
    constant = Policy(0, shared=9, scale=5.0)
    nn.init.zeros_(constant.logits.weight[:1])
    with torch.no_grad():
        constant.logits.weight[0] = constant.logits.weight[1]
    d = rl.diagnose(constant.eval(), x, task="classes")
    assert d.sentences["the model"] == "Memory in use unknown: the prediction does not vary over the samples."


def test_many_events_take_the_first_samples_as_pairs():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(20_000), size=200)
    some = DistributionDifference(p)
    assert some.resampled(np.full((1, 200), 1 / 200))[0] == pytest.approx(some.between_samples)
    pair = DistributionDifference(p[:2]).between_samples * 2  # of the mean, half is each sample with itself
    assert some.between_samples == pytest.approx(pair, rel=0.05)
