"""Sentences of findings are true: each number and fact in them is computed again, by torch or NumPy alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from everyday_bugs import MSE, draw
from torch import nn
from torch.nn import functional

import rnnlens as rl

SEEDS = (0, 3, 6)


class Net(nn.Module):
    """A recurrent layer, read at its last step."""

    def __init__(self, layer=nn.GRU, features=2, outputs=1, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = layer(features, 6, batch_first=True, **options)
        self.head = nn.Linear(6 * (1 + options.get("bidirectional", False)), outputs)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class StartsFrom(Net):
    """A GRU whose first state is made by a function of the number of samples."""

    def __init__(self, make_start):
        super().__init__()
        self.learned, self.make_start = nn.Parameter(torch.randn(1, 1, 6)), make_start

    def forward(self, x):
        return self.head(self.rnn(x, self.make_start(self, len(x)).contiguous())[0][:, -1])


def data(samples=192, features=2):
    x = np.random.default_rng(0).normal(size=(samples, 12, features)).astype("float32")
    return x, x[:, -3, :1].copy()


def sentence(model, x, y, code, loss=MSE, **options):
    """Return the sentence of a finding; an empty one if there is none of this code."""
    found = [f for f in rl.diagnose(model, x, y, loss=loss, **options).findings if f.code == code]
    return found[0].sentence if found else ""


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", text)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leaked_feature_is_the_target(seed):
    case = draw("LEAK", seed)
    text = sentence(case.model, case.x, case.y, "LEAK")
    feature, r_squared = re.search(r"Feature (\d+) .* is the target itself.*correlation ([\d.]+)\)", text).groups()
    last = case.x[:, -1, int(feature)]
    assert float(r_squared) == pytest.approx(np.corrcoef(last, case.y[:, 0])[0, 1] ** 2, abs=1e-5)


def test_a_leak_of_a_part_of_the_target_is_not_the_target_itself():
    x, y = data()
    text = sentence(Net(outputs=2), x, np.concatenate([y, 3 - 2 * x[:, -1, 1:]], 1), "LEAK")
    assert "Feature 1 of the input at the examined step is number 1 of the target" in text


@pytest.mark.parametrize(("leaked", "said"), [("class", "the target itself"), ("one", "whether the class is 2")])
def test_a_leak_of_a_class_says_which(leaked, said):
    x, _ = data()
    classes = np.random.default_rng(1).integers(0, 4, len(x))
    x[:, -1, 0] = classes if leaked == "class" else classes == 2
    text = sentence(Net(outputs=4), x, classes, "LEAK", functional.cross_entropy)
    assert f"is {said}, up to scale" in text


def test_what_does_not_vary_is_no_leak():
    x, y = data()
    x, y = np.float64(x), np.concatenate([np.float64(y), np.full((len(y), 1), 0.7)], 1)
    x[..., 1] = 0.1
    assert sentence(Net(outputs=2).double(), x, y, "LEAK") == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_frozen_layer_has_no_trained_weight(seed):
    case = draw("FROZEN", seed)
    (name,) = re.search(r"No weight of (\S+) is trained", sentence(case.model, case.x, case.y, "FROZEN")).groups()
    assert not any(p.requires_grad for p in case.model.get_submodule(name).parameters())
    next(case.model.rnn.parameters()).requires_grad_()
    assert sentence(case.model, case.x, case.y, "FROZEN") == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_carried_state_differs_between_samples_and_stays_with_its_place(seed):
    case = draw("STATE_CARRIED", seed)
    text = sentence(case.model, case.x, case.y, "STATE_CARRIED")
    assert "differs between samples, and stays the same if the samples change places" in text
    starts = []
    case.model.rnn.register_forward_pre_hook(lambda _, inputs: starts.append(inputs[1]))
    x = torch.as_tensor(case.x[:32])
    case.model(x), case.model(x.flip(0))
    first, exchanged = (start[0] if isinstance(start, tuple) else start for start in starts)
    assert torch.equal(first, exchanged)
    assert not torch.equal(first[:, 0], first[:, 1])


STARTS = {
    "learned": lambda self, count: self.learned.expand(1, count, 6),
    "random": lambda _, count: torch.randn(1, count, 6),
    "of the samples": lambda _, count: torch.zeros(1, count, 6),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_that_no_batch_left_is_not_called_carried(start):
    x, y = data()
    assert sentence(StartsFrom(STARTS[start]), x, y, "STATE_CARRIED") == ""


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("scale", [40.0, 3e3])
def test_badly_scaled_inputs_have_their_size_and_their_saturated_gates(layer, scale):
    x, y = data()
    x *= np.float32(scale)
    model = Net(layer)
    text = sentence(model, x, y, "INPUT_SCALE")
    size, share = numbers(text)
    assert size == pytest.approx(np.sqrt(np.mean(np.float64(x) ** 2)), rel=5e-3)
    values = gates_of(model.rnn, torch.as_tensor(x[:32]))
    if layer is nn.RNN:
        assert "values of the state" in text
        saturated = np.mean(np.abs(values) > 0.98)
    else:
        assert "gate values" in text
        saturated = np.mean((values < 0.02) | (values > 0.98))
    assert share == pytest.approx(100 * saturated, abs=0.51)


@torch.no_grad()
def gates_of(layer, x):
    """Return the sigmoid gates of a torch layer at all steps by its equations; the states of an nn.RNN."""
    out, _ = layer(x)
    if isinstance(layer, nn.RNN):
        return out.numpy()
    before = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
    z = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + before @ layer.weight_hh_l0.T + layer.bias_hh_l0
    kept = (0, 1) if isinstance(layer, nn.GRU) else (0, 1, 3)  # r, z of r, z, n; i, f, o of i, f, g, o
    return torch.stack([z[..., 6 * i : 6 * i + 6].sigmoid() for i in kept]).numpy()


@pytest.mark.parametrize("seed", SEEDS)
def test_small_inputs_have_their_size(seed):
    x, y = data()
    x *= np.float32(10.0 ** -(4 + seed % 3))
    assert numbers(sentence(Net(), x, y, "INPUT_SCALE")) == pytest.approx(
        [np.sqrt(np.mean(np.float64(x) ** 2))], rel=5e-3
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_probability_is_farther_from_uniform_than_the_sentence_says(seed):
    case = draw("UNIFORM_OUTPUT", seed)
    text = sentence(case.model, case.x, case.y, "UNIFORM_OUTPUT", case.loss)
    _, classes, within, loss, count, guess = numbers(text)
    raw = case.model(torch.as_tensor(case.x)).detach().double()
    assert classes == count == raw.shape[1]
    assert float((raw.softmax(-1) - 1 / classes).abs().max()) <= within
    assert loss == pytest.approx(float(case.loss(raw, torch.as_tensor(case.y))), abs=1e-3)
    assert guess == pytest.approx(np.log(classes), abs=1e-3)


@pytest.mark.parametrize("seed", [0, 2])
def test_the_output_has_no_gradient_by_other_states_of_the_backward_half(seed):
    case = draw("BACKWARD_HALF_AT_ITS_FIRST_STEP", seed)
    text = sentence(case.model, case.x, case.y, "BACKWARD_HALF_AT_ITS_FIRST_STEP")
    seen, steps, others = numbers(text)
    assert (seen, steps, others) == (1, case.x.shape[1], 0)
    x = torch.as_tensor(case.x[:8]).requires_grad_()
    kept = []
    case.model.rnn.register_forward_hook(lambda *call: kept.append(call[2][0]))
    output = case.model(x).sum()
    kept[0].retain_grad()
    output.backward()
    read = kept[0].grad[..., case.model.units :].abs().amax((0, 2))
    assert read[-1] > 0
    assert not read[:-1].any()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_weight_changes_by_its_own_size_after_the_steps_that_the_sentence_says(seed):
    case = draw("UPDATES_TOO_SMALL", seed)
    text = sentence(case.model, case.x, case.y, "UPDATES_TOO_SMALL", optimizer=case.optimizer)
    ratio, _, steps = numbers(text)
    assert steps * ratio == pytest.approx(1, rel=0.4)
    assert "steps in one direction" in text


def test_a_dead_unit_varies_as_little_as_the_sentence_says():
    x, y = data()
    model = Net()
    with torch.no_grad():
        for weight in (model.rnn.weight_ih_l0, model.rnn.weight_hh_l0):
            weight[[2, 8, 14]] = weight[[2, 8, 14]] * 1e-6
        model.rnn.bias_ih_l0.zero_(), model.rnn.bias_hh_l0.zero_()
    text = sentence(model, x, y, "DEAD_UNITS")
    (count, units, share) = numbers(text)
    spread = model.rnn(torch.as_tensor(x[:32]))[0].detach().double().flatten(0, 1).std(0)
    assert (count, units) == (1, 6)
    assert 0 < float(spread.min()) <= share * float(spread.median())


def test_a_model_of_the_last_step_changes_as_little_as_the_sentence_says():
    rng = np.random.default_rng(0)
    x, model = rng.normal(size=(512, 8, 2)).astype("float32"), Net(nn.RNN)
    with torch.no_grad():
        model.rnn.weight_hh_l0.mul_(0.2)
    y = model(torch.as_tensor(x)).detach().numpy()
    text = sentence(model, x, y, "LAST_STEP_ONLY")
    (share,) = numbers(text)
    changed = np.concatenate([x[rng.permutation(512)][:, :-1], x[:, -1:]], 1)
    change = model(torch.as_tensor(changed)).detach().numpy() - y
    assert share == pytest.approx(100 * np.mean(change**2) / (2 * y.var()), rel=0.3)
    assert share > 0.1


@pytest.mark.parametrize("end", ["start", "end"])
def test_steps_that_repeat_are_counted_and_not_called_padding(end):
    x, y = data()
    x[:, -9:] = 0
    x = x[:, ::-1].copy() if end == "start" else x
    text = sentence(Net(), x, y + x[:, 1, :1], "PADDING_DOMINATES")
    (share,) = numbers(text)
    repeats = (x[:, 1:] == x[:, :-1]).all(-1)
    assert share == pytest.approx(100 * repeats.sum(1).mean() / x.shape[1], abs=0.51)
    assert "repeat their neighbour" in text
