"""``rl.diagnose`` where a plausible statement is wrong: overfitted, mis-scaled, forecasting, counting networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

MISSED = {"MISSED_DEPENDENCY", "PATH_OPEN", "VANISHING"}


class Gru(nn.Module):
    def __init__(self, units, outputs, scale=1.0):
        super().__init__()
        self.rnn, self.head, self.scale = nn.GRU(1, units, batch_first=True), nn.Linear(units, outputs), scale

    def forward(self, x):
        return self.scale * self.head(self.rnn(x)[0][:, -1])


def noisy_recall(count, seed, steps=12):
    """Return noise inputs, and as targets the fifth-last input plus noise of standard deviation 0.7."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, steps, 1)).astype("float32")
    return x, (x[:, -5] + 0.7 * rng.normal(size=(count, 1))).astype("float32")


def train(net, x, y, loss, iterations):
    optimizer, x, y = torch.optim.Adam(net.parameters(), 1e-2), torch.as_tensor(x), torch.as_tensor(y)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net.eval()


def ridge_tap(lag, units, scale=1.0):
    """Return an almost linear network whose output is ``scale`` times the input ``lag`` steps back."""
    net = Gru(1, 1)
    net.rnn, net.head = nn.RNN(1, units, batch_first=True), nn.Linear(units, 1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
        net.rnn.weight_hh_l0.copy_(torch.diag(torch.ones(units - 1), -1))
        net.rnn.weight_ih_l0[0, 0] = 0.01
        net.head.weight[0, lag] = 100 * scale
    return net.eval()


@pytest.mark.parametrize("seed", [0, 1])
def test_an_overfitted_network_is_not_told_to_train_longer(seed):
    torch.manual_seed(seed)
    net = train(Gru(16, 1), *noisy_recall(256, seed), nn.MSELoss(), 200)
    d = rl.diagnose(net, *noisy_recall(512, 100 + seed))
    assert "MISCALIBRATED" in d.codes
    assert not MISSED & set(d.codes)
    assert "the model is overfitted" in str(d)
    assert "train longer" not in str(d)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_that_learned_noise_by_heart_has_no_skill_and_misses_nothing(seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    draws = [
        (rng.normal(size=(n, 12, 1)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")) for n in (96, 512)
    ]
    net = train(Gru(24, 1), *draws[0], nn.MSELoss(), 150)
    d = rl.diagnose(net, *draws[1])
    assert "NO_SKILL" in d.codes
    assert not MISSED & set(d.codes)


@pytest.mark.parametrize("scale", [1.3, 1.7])
def test_outputs_on_a_wrong_scale_are_miscalibrated_and_miss_nothing(scale):
    x, y = noisy_recall(512, 0, steps=20)
    d = rl.diagnose(ridge_tap(4, 12, scale), x, y)
    assert "MISCALIBRATED" in d.codes
    assert not MISSED & set(d.codes)
    model = d["model"]
    assert float(model.skill_recalibrated) == pytest.approx(1 / 1.49, abs=0.05)
    assert float(model.memory) == 5


def test_what_is_missed_on_a_wrong_scale_is_missed_all_the_same():
    x, _ = noisy_recall(512, 0, steps=20)
    y = x[:, -5] + 0.6 * x[:, -10]
    d = rl.diagnose(ridge_tap(4, 12, 1.5), x, y)
    assert {"MISSED_DEPENDENCY", "MISCALIBRATED"} <= set(d.codes)
    assert d.findings[0].evidence["lag"] == 9


@pytest.mark.parametrize("form", ["binary", "classes"])
def test_a_classifier_of_weighted_classes_has_skill(form):
    """Optimal logits for the input 3 steps back, shifted by a class weight of 60, are MISCALIBRATED, not NO_SKILL."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = ridge_tap(3, 12, 4.0)

        def forward(self, x):
            logit = self.net(x) - 6.0 + 4.1
            return logit if form == "binary" else torch.cat([torch.zeros_like(logit), logit], dim=1)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 20, 1)).astype("float32")
    y = (rng.uniform(size=512) < 1 / (1 + np.exp(6.0 - 4.0 * x[:, -4, 0]))).astype("int64")
    loss = nn.BCEWithLogitsLoss() if form == "binary" else nn.CrossEntropyLoss()
    d = rl.diagnose(Weighted().eval(), x, y if form == "classes" else y[:, None].astype("float32"), loss=loss)
    assert float(d["model"].skill) < 0.1
    assert "MISCALIBRATED" in d.codes
    assert "NO_SKILL" not in d.codes
    assert not MISSED & set(d.codes)
    assert d["model"].attrs["known"]


def autoregressive(rho, seed, count, steps, horizon):
    rng = np.random.default_rng(seed)
    series = rng.normal(size=count + steps + horizon + 300)
    for t in range(1, len(series)):
        series[t] += rho * series[t - 1]
    series = series[300:].astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(series, steps)[:count]
    return windows[:, :, None].copy(), series[steps + horizon - 1 :][:count, None].copy()


@pytest.mark.parametrize("order", ["as cut", "shuffled", "scaled"])
@pytest.mark.parametrize("rho", [0.9, 0.97])
def test_the_best_forecaster_of_overlapping_windows_misses_nothing(rho, order):
    horizon = 5
    for seed in range(6):
        x, y = autoregressive(rho, seed, 512, 24, horizon)
        net = ridge_tap(0, 4, rho**horizon)
        if order == "shuffled":
            permutation = np.random.default_rng(seed).permutation(len(x))
            x, y = x[permutation], y[permutation]
        if order == "scaled":  # input and target have other scales; the forecast is still the best one
            x = x * 0.5 + 3
            net = ridge_tap(0, 4, 2 * rho**horizon)
            y = y + 6 * rho**horizon
        d = rl.diagnose(net, x, y)
        assert not MISSED & set(d.codes), seed
        assert any("overlapping windows" in note for note in d.notes)


class Forecast(nn.Module):
    """A three-step forecast; its steps read the inputs 2, 3 and 4 steps before the last."""

    def __init__(self):
        super().__init__()
        self.rnn = ridge_tap(2, 12).rnn

    def forward(self, x):
        return 100 * self.rnn(x)[0][:, -1, 2:5, None]


@pytest.mark.parametrize("step", [0, 1, -2, -1])
def test_a_step_of_a_forecast_has_seen_all_of_the_data(step):
    x = np.random.default_rng(0).normal(size=(256, 20, 1)).astype("float32")
    y = np.stack([x[:, -3 - i] for i in range(3)], axis=1)
    model = rl.diagnose(Forecast().eval(), x, y, step=step)["model"]
    assert int(model.steps) == 20
    assert float(model.memory) == 3 + step % 3


def test_the_later_steps_that_a_backward_direction_uses_are_named():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.past, self.future = ridge_tap(3, 8).rnn, ridge_tap(2, 8).rnn

        def forward(self, x):
            later = self.future(x.flip(1))[0].flip(1)
            return 100 * (self.past(x)[0][..., 3:4] + later[..., 2:3])

    x = np.random.default_rng(0).normal(size=(256, 20, 1)).astype("float32")
    y = np.roll(x, 3, axis=1) + np.roll(x, -2, axis=1)
    d = rl.diagnose(Both().eval(), x, y, step=9)
    assert (float(d["model"].memory), int(d["model"].later_steps_used)) == (4, 2)
    assert "It also depends on 2 of the 10 later steps." in str(d)


def test_a_network_that_counts_steps_does_not_use_the_last_step_only():
    class Counter(nn.Module):
        """The last input plus 0.1 times the number of real steps, which the recurrence counts."""

        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(1, 2, batch_first=True, nonlinearity="relu")
            with torch.no_grad():
                for weight in self.rnn.parameters():
                    weight.zero_()
                self.rnn.weight_hh_l0[0, 0] = 1
                self.rnn.bias_hh_l0[0] = 0.1
                self.rnn.weight_ih_l0[1, 0] = 1

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.rnn(packed)[1][-1].sum(dim=1, keepdim=True)

    rng = np.random.default_rng(0)
    x, lengths = np.abs(rng.normal(size=(256, 24, 1))).astype("float32"), rng.integers(9, 25, 256)
    y = x[np.arange(256), lengths - 1] + 0.1 * lengths[:, None]
    d = rl.diagnose(Counter().eval(), (x, lengths), y)
    assert "The number of steps before the last also changes its output" in str(d)
    assert "LAST_STEP_ONLY" not in d.codes


def test_a_heads_memory_is_not_credited_to_the_layer():
    class Flatten(nn.Module):
        """A layer with zero recurrent weights, and a head that reads the output of every step."""

        def __init__(self):
            super().__init__()
            self.rec, self.head = nn.RNN(1, 4, batch_first=True), nn.Linear(120, 1)
            torch.nn.init.zeros_(self.rec.weight_hh_l0)

        def forward(self, x):
            return self.head(self.rec(x)[0].flatten(1))

    torch.manual_seed(0)
    net = Flatten().eval()
    x = np.random.default_rng(0).normal(size=(256, 30, 1)).astype("float32")
    with torch.no_grad():
        y = net(torch.as_tensor(x)).numpy()
    d = rl.diagnose(net, x, y)
    assert float(d["model"].memory) > 20
    assert d.sentences["the model"].startswith("The model depends on")
    assert d.sentences["rec"].startswith("rec: the state carries nothing from one step to the next")


def test_one_layer_that_carries_everything_says_so():
    x = np.random.default_rng(0).normal(size=(256, 20, 1)).astype("float32")
    d = rl.diagnose(ridge_tap(6, 12), x, x[:, -7])
    assert int(d["rnn"].carried_memory) == 7


def test_logits_within_0_and_1_are_logits_where_the_loss_says_so():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.3, 0.9, size=(512, 12, 1)).astype("float32")
    y = (rng.uniform(size=(512, 1)) < 1 / (1 + np.exp(-x[:, -3]))).astype("float32")
    net = ridge_tap(2, 6)
    skills = {}
    for name, loss in {
        "class": nn.BCEWithLogitsLoss(),
        "function": nn.functional.binary_cross_entropy_with_logits,
        "lambda": lambda o, t: nn.functional.binary_cross_entropy_with_logits(o, t),
        "probabilities": nn.BCELoss(),
    }.items():
        skills[name] = float(rl.diagnose(net, x, y, loss=loss)["model"].skill)
    p = 1 / (1 + np.exp(-x[:, -3]))
    entropy = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    mean = y.mean()
    expected = 1 + entropy / (mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    for name in ("class", "function", "lambda"):
        assert skills[name] == pytest.approx(expected, abs=2e-3), name
    assert skills["probabilities"] < skills["class"] - 0.01


def test_what_is_lost_is_a_share_of_a_bounded_score():
    """If an older input decides 4 % of the classes, twice as much skill is lost, as half are right by chance."""

    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = ridge_tap(0, 12).rnn

        def forward(self, x):
            h = 100 * self.rnn(x)[0][:, -1]
            logit = 100 * (h[:, :1] + 0.1 * h[:, 9:10])
            return torch.cat([-logit, logit], dim=1)

    x = np.random.default_rng(0).normal(size=(512, 20, 1)).astype("float32")
    y = (x[:, -1, 0] + 0.1 * x[:, -10, 0] > 0).astype("int64")
    d = rl.diagnose(Sure().eval(), x, y)
    performance_lost = float(d["model"].benefit.sel(context=9))
    permutation = np.random.default_rng(1).permutation(512)
    changed_share = np.mean((x[:, -1, 0] + 0.1 * x[permutation, -10, 0] > 0) != y)
    assert performance_lost == pytest.approx(2 * changed_share, abs=0.03)  # half of the answers are right by chance


def test_the_skill_stands_beside_the_memory():
    x = np.random.default_rng(0).normal(size=(256, 20, 1)).astype("float32")
    d = rl.diagnose(ridge_tap(6, 12), x, x[:, -7])
    assert "the last 7 of 20 steps (95 % CI 7-7; skill 1.00)" in str(d)


def test_the_state_of_a_cell_of_ones_own_is_exchanged_where_the_model_takes_one_length_only():
    class Leaky(nn.RNNCellBase):
        """A cell h' = 0.65 h + x."""

        def __init__(self):
            super().__init__(1, 3, False, num_chunks=1)
            self.rate = nn.Parameter(torch.tensor(0.65))

        def forward(self, x, h):
            return self.rate * h + x

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Leaky(), nn.Linear(3 * 16, 1)

        def forward(self, x):
            h, states = x.new_zeros(len(x), 3), []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                states.append(h)
            return self.head(torch.cat(states, dim=1))

    torch.manual_seed(0)
    net, x = Loop().eval(), np.random.default_rng(0).normal(size=(256, 16, 1)).astype("float32")
    with torch.no_grad():
        y = net(torch.as_tensor(x)).numpy()
    d = rl.diagnose(net, x, y)
    # 0.4225**k of the variance is due to the state k steps ago: below 5 % from the fourth step on.
    assert int(d["cell"].carried_memory) == 4
    assert "its own later states" in str(d) or "its own last state" in str(d)
