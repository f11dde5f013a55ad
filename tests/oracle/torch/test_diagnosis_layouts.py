"""``rl.diagnose`` on layouts of models and data found in practice, with shift registers of known memory."""

from __future__ import annotations

import ast

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.registry import adapter_for
from rnnlens.diagnosis.samples import Orientation
from rnnlens.errors import InputError, RnnlensError, UnsupportedError

STEPS, SAMPLES = 24, 256


def white_noise(samples=SAMPLES, steps=STEPS, features=1, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, steps, features)).astype("float32")


def shift_register(units, *, features=1, batch_first=True):
    """Return an almost linear nn.RNN whose units store the last inputs, scaled by 0.01."""
    rnn = nn.RNN(features, units, batch_first=batch_first)
    with torch.no_grad():
        for weight in rnn.parameters():
            weight.zero_()
        rnn.weight_hh_l0.copy_(torch.diag(torch.ones(units - 1), -1))
        rnn.weight_ih_l0[0, 0] = 0.01
    return rnn


def linear_readout(taps, units):
    """Return a linear layer with one (unit, weight) pair per output."""
    head = nn.Linear(units, len(taps))
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        for row, (tap, weight) in enumerate(taps):
            head.weight[row, tap] = 100 * weight
    return head


class TimeFirst(nn.Module):
    """A model with inputs and outputs (time, sample, ...), the default layout of ``nn.RNN``."""

    def __init__(self, lag, *, sequence=False):
        super().__init__()
        self.rnn, self.head = shift_register(lag + 2, batch_first=False), linear_readout([(lag, 1.0)], lag + 2)
        self.sequence = sequence

    def forward(self, x):
        h = self.rnn(x)[0]
        return self.head(h if self.sequence else h[-1])


@pytest.mark.parametrize("sequence", [False, True])
def test_time_may_come_first(sequence):
    x = white_noise()
    y = np.zeros_like(x)
    y[:, 5:] = x[:, :-5]
    target = y.transpose(1, 0, 2) if sequence else y[:, -1]
    d = rl.diagnose(TimeFirst(5, sequence=sequence), x.transpose(1, 0, 2), target)
    assert (float(d["model"].memory), int(d["model"].steps)) == (6, STEPS)
    assert float(d["model"].skill) > 0.99
    # The head reads the input of lag 5, so the adjoint is non-zero for lags 0 to 5 and zero from lag 6 on.
    assert d["rnn"].adjoint.values.argmin() == 6


def test_batches_with_time_first_are_read_as_such():
    x = white_noise(200)
    batches = [(x[i : i + 50].transpose(1, 0, 2), x[i : i + 50, -4]) for i in range(0, 200, 50)]
    d = rl.diagnose(TimeFirst(3), iter(batches))
    assert (float(d["model"].memory), d["model"].sizes["sample"]) == (4, 200)


def test_a_target_has_the_axes_of_its_output_where_sizes_do_not_tell():
    square = white_noise(STEPS * 3, STEPS * 3)
    net = TimeFirst(5, sequence=True)
    y = np.zeros_like(square)
    y[:, 5:] = square[:, :-5]
    inputs, target = square.transpose(1, 0, 2), y.transpose(1, 0, 2)
    for axes in (None, {"y": ("time", "sample", "unit")}):
        assert float(rl.diagnose(net, inputs, target, axes=axes)["model"].memory) == 6


@pytest.mark.parametrize("features", [1, 2, 3])
def test_one_pass_shows_that_samples_come_first_and_one_the_axis_of_steps(features):
    net, passes = nn.LSTM(features, 4, batch_first=True), []
    net.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    assert Orientation(adapter_for(net), net, white_noise(8, features=features), None).inputs is None
    assert len(passes) == 2


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_as_many_samples_as_a_short_run_has_steps(samples):
    x = white_noise(samples).transpose(1, 0, 2)
    net = TimeFirst(5)
    layouts = Orientation(adapter_for(net), net, x, None).inputs
    assert [layout.names[:2] for layout in layouts] == [("time", "sample")]


class Packed(nn.Module):
    """A model that packs by sample lengths and returns all outputs or the last one."""

    def __init__(self, lag, *, sequence=False):
        super().__init__()
        self.rnn, self.head, self.sequence = shift_register(lag + 2), linear_readout([(lag, 1.0)], lag + 2), sequence

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, last = self.rnn(packed)
        if self.sequence:
            return self.head(nn.utils.rnn.pad_packed_sequence(h, batch_first=True)[0])
        return self.head(last[-1])


@pytest.mark.parametrize("longest", [STEPS, STEPS - 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_packed_samples_count_from_their_own_end(longest, sequence):
    x, lengths = white_noise(), np.random.default_rng(1).integers(9, longest + 1, SAMPLES)
    y = x[np.arange(SAMPLES), lengths - 5] if not sequence else np.roll(x, 4, axis=1)
    d = rl.diagnose(Packed(4, sequence=sequence), (x, lengths), y)
    assert float(d["model"].memory) == 5
    assert float(d["model"].skill) > 0.99
    assert "MISSED_DEPENDENCY" not in d.codes


def test_kappa_starts_at_the_step_that_is_looked_at():
    """Kappa of one tanh unit, counted back from the chosen step, is the product of w (1 - h_t^2) over the steps."""
    torch.manual_seed(0)
    rnn, head, w = nn.RNN(1, 1, batch_first=True), nn.Linear(1, 1), 0.8
    with torch.no_grad():
        rnn.weight_hh_l0.fill_(w)

    class Every(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = rnn, head

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    net, x = Every(), white_noise()
    # The inputs decay with time, so kappa depends on the step that it starts from.
    x *= np.linspace(3, 0, STEPS)[None, :, None].astype("float32")
    with torch.no_grad():
        h, y = rnn(torch.as_tensor(x))[0].numpy()[:32, :, 0], net(torch.as_tensor(x)).numpy()
    for step in (7, STEPS - 1):
        d = rl.diagnose(net, x, y, step=step)
        gains = np.abs(w * (1 - h[:, : step + 1] ** 2))[:, ::-1]
        expected = np.median(np.cumprod(gains, axis=1), axis=0)
        np.testing.assert_allclose(d["rnn"].kappa.values, [1, *expected], rtol=1e-4)
        peaks = np.cumprod(np.concatenate([np.ones((32, 1)), gains[:, :-1]], axis=1), axis=1)
        np.testing.assert_allclose(d["rnn"].adjoint.values, np.median(peaks, axis=0), rtol=1e-4)


class Several(nn.Module):
    """A model with a dict of two outputs; the second one reads an older input."""

    def __init__(self):
        super().__init__()
        self.rnn, self.near, self.far = (
            shift_register(12),
            linear_readout([(1, 1.0)], 12),
            linear_readout([(1, 1.0), (9, 0.5)], 12),
        )

    def forward(self, x):
        h = self.rnn(x)[0][:, -1]
        return {"near": self.near(h), "far": self.far(h)}


def test_one_of_several_outputs_is_asked_for():
    x = white_noise()
    y = {"near": x[:, -2], "far": np.concatenate([x[:, -2], 0.5 * x[:, -10]], axis=1)}
    net = Several()
    memories = [float(rl.diagnose(net, x, y, output=i)["model"].memory) for i in (0, 1, "near", "far")]
    assert memories == [2, 10, 2, 10]
    reversed_targets = dict(reversed(y.items()))
    assert float(rl.diagnose(net, x, reversed_targets, output="far")["model"].skill) > 0.99
    with pytest.raises(InputError, match="the targets need the same names"):
        rl.diagnose(net, x, tuple(y.values()))
    with pytest.raises(InputError, match="'near', 'far'"):
        rl.diagnose(net, x, y, output="middle")
    with pytest.raises(InputError, match="output= exceeds the number of outputs"):
        rl.diagnose(net, x, y, output=2)
    with pytest.raises(InputError, match="step= is beyond the output"):
        rl.diagnose(TimeFirst(3, sequence=True), x.transpose(1, 0, 2), None, step=STEPS)


def test_directions_have_seen_parts_of_different_length():
    """At step 5, kappa covers the steps up to 5 in the forward direction and those from 5 on in the backward one."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(1, 4, batch_first=True, bidirectional=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    torch.manual_seed(0)
    net, x = Both().eval(), white_noise()
    with torch.no_grad():
        y = net(torch.as_tensor(x)).numpy()
    d = rl.diagnose(net, x, y, step=5)
    kappa = d["rnn"].kappa.values
    assert kappa.shape == (2, STEPS - 5 + 1)
    assert np.isfinite(kappa[0, :7]).all()
    assert np.isnan(kappa[0, 7:]).all()
    assert np.isfinite(kappa[1]).all()


class Pooled(nn.Module):
    """The mean over time of a layer with short memory: every step reaches the output without the recurrence."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = shift_register(2), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0].mean(dim=1))


def test_a_pooled_layer_needs_no_recurrence_to_hear_of_an_early_step():
    torch.manual_seed(0)
    x = white_noise()
    d = rl.diagnose(Pooled(), x, x[:, 3])
    assert {"MISSED_DEPENDENCY", "PATH_OPEN"} <= set(d.codes)
    assert "VANISHING" not in d.codes


def test_a_gradient_that_is_larger_where_the_output_reads_more_is_no_explosion():
    """The output reads the state 8 steps back with 1000 times the weight of the last one; this is not EXPLODING."""

    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = shift_register(12), linear_readout([(1, 1.0)], 12)

        def forward(self, x):
            h = self.rnn(x)[0]
            return self.head(h[:, -9] + 1e-3 * h[:, -1])

    x = white_noise()
    d = rl.diagnose(Uneven(), x, x[:, -10])
    assert float(d["rnn"].growth) > 2.5
    assert "EXPLODING" not in d.codes
    assert float(d["model"].memory) == 10


def test_the_last_step_missed_is_no_matter_of_time():
    x = white_noise()
    d = rl.diagnose(TimeFirst(5), x.transpose(1, 0, 2), x[:, -6] + x[:, -1])
    assert [f.evidence.get("lag") for f in d.findings if f.code == "MISSED_DEPENDENCY"] == [0]
    assert "The input at the last step would explain" in str(d)
    assert "window" not in str(d)


class Every(nn.Module):
    """Outputs (sample, class, time), as ``nn.CrossEntropyLoss`` expects them, or one number per step."""

    def __init__(self, lag, form):
        super().__init__()
        self.rnn, self.form = shift_register(lag + 2), form
        self.head = linear_readout(
            [(lag, -20.0), (lag, 20.0), (0, 0.0)] if form == "classes first" else [(lag, 1.0)], lag + 2
        )

    def forward(self, x):
        out = self.head(self.rnn(x)[0])
        return out.transpose(1, 2) if self.form == "classes first" else out.squeeze(-1)


@pytest.mark.parametrize("step", [-1, 9])
def test_outputs_of_every_step_may_lie_as_they_like(step):
    x = white_noise()
    past = np.roll(x[:, :, 0], 4, axis=1)
    for form, y in (("classes first", (past > 0).astype("int64")), ("no units", past)):
        d = rl.diagnose(Every(4, form), x, y, step=step)
        assert (float(d["model"].memory), int(d["model"].steps)) == (5, STEPS if step == -1 else 10)
        assert float(d["model"].skill) > 0.8
        assert d["rnn"].adjoint.values.argmax() <= 4


def test_logits_of_a_binary_target_are_told_from_values():
    x = white_noise()
    y = (x[:, -4] > 0).astype("float32")
    net = TimeFirst(3)
    with torch.no_grad():
        net.head.weight *= 8
    d = rl.diagnose(net, x.transpose(1, 0, 2), y)
    assert float(d["model"].skill) > 0.7
    assert "NO_SKILL" not in d.codes


def test_packed_data_are_refused_by_name():
    x = nn.utils.rnn.pack_padded_sequence(torch.as_tensor(white_noise(4)), torch.tensor([5, 4, 3, 2]), batch_first=True)
    with pytest.raises(UnsupportedError, match="packed sequence"):
        rl.diagnose(nn.RNN(1, 2, batch_first=True), x, np.zeros(4))
    with pytest.raises(UnsupportedError, match="packed sequence"):
        rl.diagnose(nn.RNN(1, 2, batch_first=True), white_noise(4), y=x)


def test_what_is_no_number_is_said_and_nothing_else():
    net = TimeFirst(3)
    with torch.no_grad():
        net.rnn.weight_hh_l0[0, 0] = float("nan")
    x = white_noise()
    d = rl.diagnose(net, x.transpose(1, 0, 2), x[:, -4])
    assert d.codes == ("NONFINITE",)
    assert "Memory in use unknown" in str(d)
    with_inf = white_noise()
    with_inf[200, 3] = np.inf
    d = rl.diagnose(TimeFirst(3), with_inf.transpose(1, 0, 2), white_noise()[:, -4])
    assert d.codes[0] == "NONFINITE"


def test_errors_of_the_model_keep_their_own_words():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = shift_register(3)

        def forward(self, x):
            raise KeyError("no such thing")

    with pytest.raises(RnnlensError, match="no such thing"):
        rl.diagnose(Wrong(), white_noise(), white_noise()[:, 0])


class Folded(nn.Module):
    """A model of the lag-5 task that folds steps and samples of its scores, and of its input if ``state_given``."""

    def __init__(self, *, batch_first=False, state_given=False):
        super().__init__()
        self.rnn, self.head = shift_register(7, batch_first=batch_first), linear_readout([(5, 1.0), (5, -1.0)], 7)
        self.state_given = state_given

    def forward(self, x, *state):
        if self.state_given:
            x = x.reshape(-1, len(state[0]), 1)
        return self.head(self.rnn(x, *(h[None] for h in state))[0]).reshape(-1, 2)


def lagged_signs(x, lag=5):
    """Return the class 0 where the input ``lag`` steps earlier was positive, else 1, (sample, time)."""
    return (np.roll(x[..., 0], lag, axis=1) < 0).astype("int64")


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets.reshape(-1))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("axes", [None, "written"])
def test_targets_folded_like_the_scores(batch_first, axes):
    x = white_noise()
    classes, net = lagged_signs(x), Folded(batch_first=batch_first)
    fold = ("sample", "time") if batch_first else ("time", "sample")
    axes = axes and {"y": (fold,), "output": (fold, "unit")}
    inputs, targets = (x, classes) if batch_first else (x.transpose(1, 0, 2).copy(), classes.T)
    folded = rl.diagnose(net, inputs, targets.reshape(-1), loss=cross_entropy, axes=axes)
    unfolded = rl.diagnose(net, inputs, targets, loss=cross_entropy)
    assert float(folded["model"].memory) == 6
    assert float(folded["model"].skill) > 0.5
    assert str(folded) == str(unfolded)


@pytest.mark.parametrize("axes", [None, {"input[0]": (("time", "sample"), "feature"), "y": (("time", "sample"),)}])
def test_an_input_may_fold_steps_and_samples_too(axes):
    x = white_noise()
    net, state = Folded(state_given=True), np.zeros((SAMPLES, 7), dtype="float32")
    inputs = (x.transpose(1, 0, 2).reshape(-1, 1), state)
    d = rl.diagnose(net, inputs, lagged_signs(x).T.reshape(-1), loss=cross_entropy, axes=axes)
    assert (float(d["model"].memory), int(d["model"].steps), d["model"].sizes["sample"]) == (6, STEPS, SAMPLES)
    assert float(d["model"].skill) > 0.5


class ImageRows(nn.Module):
    """A model that reads images (sample, channel, row, column) row by row."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = shift_register(7), linear_readout([(5, 1.0)], 7)

    def forward(self, x):
        return self.head(self.rnn(x.reshape(-1, STEPS, 1))[0][:, -1])


@pytest.mark.parametrize("axes", [None, {"input": ("sample", "axis_1", "time", "feature")}])
def test_images_are_read_by_rows(axes):
    images = white_noise()[:, None]
    d = rl.diagnose(ImageRows(), images, images[:, 0, -6], axes=axes)
    assert (float(d["model"].memory), int(d["model"].steps)) == (6, STEPS)
    assert float(d["model"].skill) > 0.99


def test_a_report_of_folded_scores_has_the_time_jacobian(tmp_path):
    x = white_noise(8)
    targets = lagged_signs(x).T.reshape(-1)
    path = tmp_path / "report.html"
    rl.report(Folded(), x.transpose(1, 0, 2), targets, loss=cross_entropy, path=path, diagnosis=False)
    page = path.read_text("utf-8")
    assert "No time Jacobian" not in page
    assert "of=&#34;output&#34;" in page


class Loss(nn.Module):
    """A loss that flattens the scores (time, sample, class) itself."""

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.reshape(-1, 2), targets)


class Unfolded(Folded):
    def forward(self, x):
        return self.head(self.rnn(x)[0])


def test_the_axes_of_each_hint_work_when_typed():
    """Flat targets beside unfolded scores may lie in either order, so the hint names both; one of them has skill."""
    x = white_noise()
    inputs, targets = x.transpose(1, 0, 2).copy(), lagged_signs(x).T.reshape(-1)
    with pytest.raises(InputError, match="which axis of y counts samples") as refusal:
        rl.diagnose(Unfolded(), inputs, targets, loss=Loss())
    hints = str(refusal.value).partition("name the axes: ")[2].split(" or ")
    skills = []
    for hint in hints:
        axes = ast.literal_eval(hint.strip().removeprefix("axes="))
        skills.append(float(rl.diagnose(Unfolded(), inputs, targets, loss=Loss(), axes=axes)["model"].skill))
    assert len(skills) == 2
    assert skills[0] > 0.5 > skills[1]
    with pytest.raises(InputError, match="which axis of y counts samples") as refusal:
        rl.gradients(Folded(), inputs, targets, loss=cross_entropy, wrt="input", batch_size=64)
    hint = str(refusal.value).partition("name the axes: ")[2].split(" or ")[0]
    axes = ast.literal_eval(hint.removeprefix("axes="))
    cut = rl.gradients(Folded(), inputs, targets, loss=cross_entropy, wrt="input", batch_size=64, axes=axes)
    whole = rl.gradients(Folded(), inputs, targets, loss=cross_entropy, wrt="input")
    np.testing.assert_allclose(cut.values, whole.values, rtol=1e-4, atol=1e-9)


def flat_cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)


def test_steps_that_the_loss_ignores_are_not_examined():
    """Each sample's last real target counts; a sample without one is left out, which a note says."""
    x = white_noise()
    lengths = np.random.default_rng(1).integers(12, STEPS + 1, SAMPLES)
    targets = np.where(np.arange(STEPS) < lengths[:, None], lagged_signs(x), -100)
    targets[:3] = -100
    net = Unfolded(batch_first=True)
    d = rl.diagnose(net, x, targets, loss=flat_cross_entropy)
    assert (float(d["model"].memory), d["model"].sizes["sample"]) == (6, SAMPLES - 3)
    assert "3 samples were left out" in " ".join(d.notes)
    rows = np.arange(3, SAMPLES)
    scores = net(torch.tensor(x)).detach().numpy()[rows, lengths[rows] - 1]
    log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    classes = targets[rows, lengths[rows] - 1]
    shares = np.bincount(classes) / len(classes)
    skill = 1 - np.mean(log_p[np.arange(len(rows)), classes]) / np.sum(shares * np.log(shares))
    np.testing.assert_allclose(float(d["model"].skill), skill, rtol=1e-5)
    padded = np.where(targets == -100, 1, targets)
    declared = nn.CrossEntropyLoss(ignore_index=-7)
    with pytest.raises(InputError, match="ignores all targets"):
        rl.diagnose(net, x, np.full_like(padded, -7), loss=declared)


class BothHalvesAsSamples(nn.Module):
    """One cell over the steps in both orders: the reversed sequences are further samples of its loop."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(10, 2)

    def forward(self, x):
        both = torch.cat([x, x.flip(1)])
        h, states = both.new_zeros(len(both), 5), []
        for t in range(x.shape[1]):
            h = self.cell(both[:, t], h)
            states.append(h)
        forward, backward = torch.stack(states, 1).chunk(2)
        return self.head(torch.cat([forward, backward.flip(1)], 2))


@pytest.mark.parametrize("samples", [4, 40])
def test_a_layer_may_have_more_samples_than_the_data(samples):
    torch.manual_seed(0)
    model, x, y = BothHalvesAsSamples(), torch.randn(samples, 7, 3), torch.randn(samples, 7, 2)
    diagnosis = rl.diagnose(model, x, y, loss="mse", step=3)
    assert np.isfinite(diagnosis["cell"]["kappa"]).all()
    assert diagnosis["cell"]["kappa"].sizes["lag"] == 5
