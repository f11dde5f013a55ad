"""Findings on everyday bugs: on networks that have one, and not on healthy ones; each says what torch computes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from everyday_bugs import BUGS, HEALTHY, draw
from torch.nn import functional

import rnnlens as rl

FAULTS = {*BUGS, "NO_PATH", "VANISHING", "PATH_OPEN", "MISSED_DEPENDENCY", "NO_SKILL"}


def diagnosed(bug, seed):
    case = draw(bug, seed)
    return case, rl.diagnose(case.model, case.x, case.y, loss=case.loss, optimizer=case.optimizer)


def evidence_of(diagnosis, code):
    (finding,) = [f for f in diagnosis.findings if f.code == code]
    return finding.evidence


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug):
    _, d = diagnosed(bug, 2)
    assert bug in d.codes
    assert not {*BUGS} & set(d.codes) - {bug}


@pytest.mark.parametrize("seed", [i for i, name in enumerate(HEALTHY) if name != "untrained"])
def test_a_healthy_network_is_not_accused(seed):
    _, d = diagnosed("", seed)
    assert not FAULTS & set(d.codes)


def test_samples_that_are_mixed_depend_on_each_other_by_autograd():
    case, d = diagnosed("SAMPLES_MIXED", 0)
    evidence = evidence_of(d, "SAMPLES_MIXED")
    x = torch.as_tensor(case.x[:8]).requires_grad_()
    (gradient,) = torch.autograd.grad(case.model(x)[evidence["sample"]].sum(), x)
    assert float(gradient[evidence["other"]].abs().max()) > 0
    assert "batch_first" in d.findings[0].remedy
    assert not d["model"].attrs["known"]
    with pytest.raises(rl.errors.InputError, match="samples are mixed"):
        rl.plot.diagnosis(d)


def test_a_model_with_time_first_is_not_accused():
    class TimeFirst(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = torch.nn.GRU(2, 6), torch.nn.Linear(6, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    x = np.random.default_rng(0).normal(size=(12, 96, 2)).astype("float32")
    d = rl.diagnose(TimeFirst(), x, np.roll(x[..., :1], 1, 0), loss=functional.mse_loss)
    assert "SAMPLES_MIXED" not in d.codes


def test_weights_without_gradient_are_those_of_autograd():
    case, d = diagnosed("WEIGHTS_WITHOUT_GRADIENT", 0)
    case.loss(case.model(torch.as_tensor(case.x)), torch.as_tensor(case.y)).backward()
    without = {name for name, p in case.model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name.partition(".")[0] for name in without} == {"rnn"}
    assert {name.partition("/")[0] for name in evidence_of(d, "WEIGHTS_WITHOUT_GRADIENT")["weights"]} == {"rnn"}


def test_the_loss_of_uniform_output_is_ln_c():
    _, d = diagnosed("UNIFORM_OUTPUT", 0)
    evidence = evidence_of(d, "UNIFORM_OUTPUT")
    assert evidence["loss"] == pytest.approx(math.log(evidence["classes"]), abs=0.02)


def test_a_finding_without_skill_says_what_was_ruled_out():
    _, d = diagnosed("INPUT_SCALE", 1)
    ruled_out = evidence_of(d, "NO_SKILL")["ruled_out"]
    assert "mixed samples" in ruled_out
    assert "weights without gradient" in ruled_out
    assert "badly scaled inputs" not in ruled_out
    assert all(text in str(d) for text in ruled_out)


@pytest.mark.parametrize("bug", ["UPDATES_TOO_SMALL", "UPDATES_TOO_LARGE"])
def test_the_update_is_that_of_the_users_own_step(bug):
    case, d = diagnosed(bug, 5)
    before = copy.deepcopy(case.optimizer.state_dict())
    twin, optimizer = copy.deepcopy((case.model, case.optimizer))
    optimizer.zero_grad()
    case.loss(twin(torch.as_tensor(case.x[:32])), torch.as_tensor(case.y[:32])).backward()
    optimizer.step()
    weights, stepped = case.model.state_dict(), twin.state_dict()
    for name, ratio in evidence_of(d, bug)["by_weight"].items():
        change = float((stepped[name] - weights[name]).norm() / weights[name].norm())
        assert ratio == pytest.approx(change, rel=1e-2)
    torch.testing.assert_close(case.optimizer.state_dict(), before, rtol=0, atol=0)


def test_weights_outside_of_the_optimizer_are_named():
    case = draw("", 5)
    optimizer = torch.optim.Adam(case.model.head.parameters())
    d = rl.diagnose(case.model, case.x, case.y, loss=case.loss, optimizer=optimizer)
    assert {name.partition(".")[0] for name in evidence_of(d, "UPDATES_TOO_SMALL")["left_out"]} == {"rnn"}


def test_an_optimizer_that_evaluates_the_loss_is_refused():
    case = draw("", 5)
    optimizer = torch.optim.LBFGS(case.model.parameters())
    with pytest.raises(rl.errors.UnsupportedError, match="takes no step"):
        rl.diagnose(case.model, case.x, case.y, loss=case.loss, optimizer=optimizer)
    with pytest.raises(rl.errors.InputError, match="no optimizer"):
        rl.diagnose(case.model, case.x, case.y, loss=case.loss, optimizer="adam")


def test_exchanged_arguments_of_the_loss_are_found():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 6, 2)).astype("float32")
    y = np.eye(3, dtype="float32")[rng.integers(0, 3, 128)]
    model = Classifier(3, torch.nn.Softmax(-1))

    def cross_entropy(output, y):
        return -(y * output.clamp_min(1e-7).log()).sum(1).mean()

    def exchanged(output, y):
        return cross_entropy(y, output)

    d = rl.diagnose(model, x, y, loss=exchanged, task="classes")
    evidence = evidence_of(d, "TARGET_SHAPE")
    p = model(torch.as_tensor(x[:32])).detach()
    assert evidence["loss"] == pytest.approx(float(exchanged(p, torch.as_tensor(y[:32]))), rel=1e-4)
    assert evidence["loss_exchanged"] == pytest.approx(float(cross_entropy(p, torch.as_tensor(y[:32]))), rel=1e-4)
    assert "TARGET_SHAPE" not in rl.diagnose(model, x, y, loss=cross_entropy, task="classes").codes


class Classifier(torch.nn.Module):
    """GRU of two inputs, with an activation after the head."""

    def __init__(self, outputs=1, activation=None):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = torch.nn.GRU(2, 6, batch_first=True), torch.nn.Linear(6, outputs)
        self.activation = activation or torch.nn.Identity()

    def forward(self, x):
        return self.activation(self.head(self.rnn(x)[0][:, -1]))


BINARY_LOSSES = {
    "logits": lambda output, y: functional.binary_cross_entropy_with_logits(output, y),
    "converts logits": lambda output, y: functional.binary_cross_entropy(output.sigmoid(), y),
}


@pytest.mark.parametrize("loss", BINARY_LOSSES)
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_logits_between_0_and_1_are_not_taken_for_probabilities(loss, offset):
    x = np.random.default_rng(0).normal(size=(128, 6, 2)).astype("float32")
    model = Classifier()
    with torch.no_grad():
        model.head.weight.mul_(0.2), model.head.bias.fill_(offset)
    d = rl.diagnose(model, x, (x[:, -2, :1] > 0).astype("float32"), loss=BINARY_LOSSES[loss])
    assert "OUTPUT_FORM" not in d.codes


def test_a_second_sigmoid_is_found():
    x = np.random.default_rng(0).normal(size=(128, 6, 2)).astype("float32")
    model = Classifier(activation=torch.nn.Sigmoid())
    with torch.no_grad():
        model.head.weight.mul_(20)
    d = rl.diagnose(model, x, (x[:, -2, :1] > 0).astype("float32"), loss=BINARY_LOSSES["logits"])
    assert evidence_of(d, "OUTPUT_FORM")["takes"] == "logits"


@pytest.mark.parametrize("given", ["one-hot", "column", "indices"])
def test_classes_in_the_other_form_are_found(given):
    rng = np.random.default_rng(0)
    x, index = rng.normal(size=(128, 6, 2)).astype("float32"), rng.integers(0, 3, 128)
    y = {"one-hot": np.eye(3, dtype="int64")[index], "column": index[:, None], "indices": index}[given]
    model = Classifier(3)
    d = rl.diagnose(model, x, y, loss=functional.cross_entropy)
    if given == "indices":
        assert "TARGET_SHAPE" not in d.codes
        return
    expected = functional.cross_entropy(model(torch.as_tensor(x[:32])), torch.as_tensor(index[:32])).detach()
    assert evidence_of(d, "TARGET_SHAPE")["loss_reshaped"] == pytest.approx(float(expected), rel=1e-4)


class Reader(torch.nn.Module):
    """A GRU, trained or frozen, and a head on its last step."""

    def __init__(self, is_frozen):
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(2, 16, batch_first=True), torch.nn.Linear(16, 1)
        self.rnn.requires_grad_(not is_frozen)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_missed_step_that_a_frozen_layer_explains_names_that_finding(is_frozen):
    torch.manual_seed(0)
    model, x = Reader(is_frozen), torch.randn(512, 12, 2)
    y = x[:, -1, :1] + x[:, -4, 1:]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 2e-2)
    for _ in range(150 if is_frozen else 10):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    d = rl.diagnose(model, x, y, loss=functional.mse_loss)
    assert ("FROZEN" in d.codes) == is_frozen
    (path,) = [finding for finding in d.findings if finding.code == "PATH_OPEN"]
    assert ("FROZEN" in path.remedy) == is_frozen
    assert ("the cause is not visible in the network" in path.remedy) != is_frozen
