"""``rl.diagnose`` on torch networks whose memory is known in closed form, and on networks with one known fault."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.diagnosis.prediction import read_target
from rnnlens.errors import InputError, UnsupportedError

pytestmark = pytest.mark.check

STEPS, SAMPLES = 40, 512


class Net(nn.Module):
    def __init__(self, rnn, head, *, sequence=False):
        super().__init__()
        self.rnn, self.head, self.sequence = rnn, head, sequence

    def forward(self, x):
        h = self.rnn(x)[0]
        return self.head(h if self.sequence else h[:, -1])


def white_noise(samples=SAMPLES, steps=STEPS, features=1, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, steps, features)).astype("float32")


def shift_register(taps, *, sequence=False):
    """Return an almost linear network whose units store the last inputs and whose head reads some of them."""
    units = max(taps) + 1
    rnn, head = nn.RNN(1, units, batch_first=True), nn.Linear(units, 1)
    with torch.no_grad():
        for weight in (*rnn.parameters(), *head.parameters()):
            weight.zero_()
        rnn.weight_hh_l0.copy_(torch.diag(torch.ones(units - 1), -1))
        rnn.weight_ih_l0[0, 0] = 0.01
        for tap, weight in taps.items():
            head.weight[0, tap] = 100 * weight
    return Net(rnn, head, sequence=sequence).eval()


def model_output(net, x):
    with torch.no_grad():
        return net(torch.as_tensor(x)).numpy()


@pytest.mark.parametrize("lag", [0, 1, 5, 17, 38])
def test_memory_of_a_shift_register_is_exact(lag):
    net, x = shift_register({lag: 1.0}), white_noise()
    d = rl.diagnose(net, x, x[:, STEPS - 1 - lag])
    assert float(d["model"].memory) == lag + 1
    assert d["model"].memory_interval.values.tolist() == [lag + 1, lag + 1]
    assert float(d["model"].skill) > 0.99
    assert not {"MISSED_DEPENDENCY", "VANISHING", "NO_SKILL", "CHAOTIC", "EXPLODING"} & set(d.codes)


def test_memory_to_the_first_step_is_censored():
    net, x = shift_register({STEPS - 1: 1.0}), white_noise()
    d = rl.diagnose(net, x, x[:, 0])
    assert d["model"].attrs["censored"]
    assert f"all {STEPS} steps" in next(iter(d.sentences.values()))


def test_a_little_variance_counts_at_one_percent_only():
    net, x = shift_register({1: 1.0, 20: 0.15}), white_noise()  # 2.2 % of the variance is from 20 steps back
    d = rl.diagnose(net, x, model_output(net, x))
    assert (float(d["model"].memory), float(d["model"].memory_1_percent)) == (2, 21)
    assert "21 at 1 % of the variance" in str(d)


def test_without_skill_no_memory_is_spoken_of():
    net, x = shift_register({5: 1.0}), white_noise()
    d = rl.diagnose(net, x, white_noise(seed=9)[:, 0])
    assert "NO_SKILL" in d.codes
    assert "Memory in use unknown" in str(d)
    assert not d["model"].attrs["known"]


def test_what_is_missed_is_named_and_the_way_there_judged():
    x = white_noise()
    y = 0.5 * x[:, -2] + 0.5 * x[:, -31]
    wide = rl.diagnose(shift_register({1: 0.5, 30: 1e-3, 38: 0.0}), x, y)  # stores 38 inputs, nearly reads one
    assert wide.findings[0].evidence["lag"] == 30
    assert {"MISSED_DEPENDENCY", "PATH_OPEN"} <= set(wide.codes)
    unread = rl.diagnose(shift_register({1: 0.5, 38: 0.0}), x, y)  # its readout of that input is exactly 0
    assert {f.code: f.evidence.get("cause") for f in unread.findings}["NO_PATH"] == "zero_weights"
    short = rl.diagnose(shift_register({1: 0.5}), x, y)
    assert {"MISSED_DEPENDENCY", "VANISHING"} <= set(short.codes)
    assert "No sign" not in str(short)


def test_the_samples_that_an_effect_of_ten_percent_needs_are_said_and_suffice():
    """10 % of the target is one input that the network leaves unused; the rest is noise."""

    def diagnosed(samples):
        net, x = shift_register({0: 1.0}), white_noise(samples)
        noise = np.random.default_rng(1).normal(size=(samples, 1))
        d = rl.diagnose(net, x, (np.sqrt(0.1) * x[:, STEPS - 21] + np.sqrt(0.9) * noise).astype("float32"))
        return d, [re.search(r"for 10 % it needs about (\d+) samples", note) for note in d.notes]

    d, notes = diagnosed(64)
    assert "MISSED_DEPENDENCY" not in d.codes
    (needed,) = [int(note.group(1)) for note in notes if note]
    threshold, by_lag = float(d["model"].missed_threshold), d["model"].missed.values
    assert needed == int(np.ceil(64 * (threshold - np.median(by_lag)) / 0.1)) > 64
    d, notes = diagnosed(round(2.5 * needed))
    assert next(f for f in d.findings if f.code == "MISSED_DEPENDENCY").evidence["lag"] == 20
    assert not any(notes)


def test_a_latch_is_memory_and_no_vanishing():
    net = Net(nn.RNN(1, 4, batch_first=True), nn.Linear(4, 1))
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(2.5 * torch.eye(4))
        net.rnn.weight_ih_l0.fill_(5)
        net.rnn.bias_hh_l0.zero_()
        net.rnn.bias_ih_l0.zero_()
        net.head.weight.fill_(0.25)
        net.head.bias.zero_()
    x = 0.02 * white_noise()
    x[:, 0, 0] = np.where(np.random.default_rng(1).uniform(size=SAMPLES) < 0.5, -1, 1)
    d = rl.diagnose(net.eval(), x, np.sign(x[:, 0]))
    assert d["model"].attrs["censored"]
    assert float(d["rnn"].kappa[-1]) < 1e-6
    assert {"VANISHING", "MISSED_DEPENDENCY"} & set(d.codes) == set()


def test_sequence_outputs_are_probed_at_one_step():
    net, x = shift_register({3: 1.0}, sequence=True), white_noise()
    y = model_output(net, x)
    assert float(rl.diagnose(net, x, y)["model"].memory) == 4
    early = rl.diagnose(net, x, y, step=9)
    assert (float(early["model"].memory), int(early["model"].steps)) == (4, 10)


@pytest.mark.slow
def test_classes_by_integer_one_hot_and_probability_are_one_thing():
    x = white_noise()
    logits = shift_register({4: 5.0})

    class TwoClasses(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.net, self.form = logits, form

        def forward(self, x):
            z = torch.cat([-self.net(x), self.net(x)], dim=1)
            return {"logits": z, "probabilities": z.softmax(1), "log": z.log_softmax(1)}[self.form]

    labels = (x[:, -5, 0] > 0).astype("int64")
    datasets = {
        (form, name): rl.diagnose(TwoClasses(form), x, y)["model"]
        for form in ("logits", "probabilities", "log")
        for name, y in {"integer": labels, "one-hot": np.eye(2)[labels]}.items()
    }
    first = datasets["logits", "integer"]
    assert float(first.memory) == 5
    for model in datasets.values():
        np.testing.assert_allclose(model.use, first.use, rtol=1e-4)
        np.testing.assert_allclose(model.skill, first.skill, rtol=1e-4)


def test_exploding_and_dead_units():
    rnn = nn.RNN(1, 6, batch_first=True, nonlinearity="relu")
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(1.25 * torch.eye(6))
        rnn.weight_ih_l0.fill_(0.1)
        rnn.bias_ih_l0.zero_()
        rnn.bias_hh_l0.zero_()
        rnn.weight_ih_l0[4:] = 0
        rnn.bias_ih_l0[4:] = -1
        rnn.weight_hh_l0[4:] = 0
    net = Net(rnn, nn.Linear(6, 1)).eval()
    x = np.abs(white_noise())
    d = rl.diagnose(net, x, model_output(net, x))
    assert {"EXPLODING", "DEAD_UNITS"} <= set(d.codes)
    assert "CHAOTIC" not in d.codes
    assert next(f for f in d.findings if f.code == "DEAD_UNITS").evidence["which"] == [4, 5]


@pytest.mark.parametrize(
    ("layer", "gates"), [(nn.LSTM, ["input", "forget", "output"]), (nn.GRU, ["update", "reset"]), (nn.RNN, None)]
)
def test_a_proposal_for_the_state_is_no_gate_that_is_shut(layer, gates):
    rnn = layer(1, 3, batch_first=True)
    with torch.no_grad():
        for name, weight in rnn.named_parameters():
            weight.fill_(-3.0 if name.startswith("bias") else 0.001)  # all gates near 0, all candidates near -1
    net, x = Net(rnn, nn.Linear(3, 1)).eval(), white_noise(128, 8)
    measures = rl.diagnose(net, x, x[:, -1])["rnn"]
    if gates is None:
        assert "stuck_shut" not in measures
    else:
        assert measures.gate.values.tolist() == gates
        assert measures.stuck_shut.all()
        assert not measures.stuck_open.any()


def test_a_cell_names_its_proposals(monkeypatch):
    monkeypatch.setattr(rl.cells.LSTM, "proposals", ("candidate", "output"))
    net, x = Net(nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 1)).eval(), white_noise(128, 8)
    assert rl.diagnose(net, x, x[:, -1])["rnn"].gate.values.tolist() == ["input", "forget"]


class MeanOfBoth(nn.Module):
    """A bidirectional LSTM with a head on the mean over its steps; the backward half can be dead, or read faintly."""

    def __init__(self, *, dead=False, faint=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(1, 3, batch_first=True, bidirectional=True), nn.Linear(6, 1)
        with torch.no_grad():
            for name, weight in self.lstm.named_parameters():
                weight *= 0.0 if dead and name.endswith("_reverse") else 1.0
            self.head.weight[:, 3:] *= faint

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


@pytest.fixture(scope="module")
def half_dead():
    net, x = MeanOfBoth(dead=True).eval(), white_noise(128, 8)
    return rl.diagnose(net, x, model_output(net, x))


def test_a_finding_about_one_half_says_which(half_dead):
    (finding,) = [finding for finding in half_dead.findings if finding.code == "DEAD_UNITS"]
    assert finding.layer == "lstm"
    assert finding.sentence == (
        "Backward half: 3 of 3 units are dead: their values do not vary, or less than 0.0001 of the other units'."
    )


def test_measures_of_both_halves_have_their_labels(half_dead, tmp_path):
    half_dead.save(tmp_path / "d.nc")
    for d in (half_dead, rl.open(tmp_path / "d.nc")):
        assert d["lstm"].dead.sel(direction="forward").values.tolist() == [False] * 3
        assert d["lstm"].dead.sel(direction="backward").values.tolist() == [True] * 3


def test_measures_of_both_halves_are_in_the_json(half_dead):
    measures = json.loads(half_dead.to_json())["measures"]["lstm"]
    assert measures["growth"] == dict(zip(["forward", "backward"], half_dead["lstm"].growth.values, strict=True))


def test_unequal_halves_of_a_layer_are_told_apart():
    net, x = MeanOfBoth(faint=1e-6).eval(), white_noise(128, 8)
    (finding,) = [f for f in rl.diagnose(net, x, model_output(net, x)).findings if f.code == "UNEQUAL_LAYERS"]
    assert finding.layer == "lstm"
    assert finding.sentence.startswith("Backward half: Its total gradient is ")
    assert finding.sentence.endswith("smaller than that of lstm, forward half.")


def test_facts_about_the_data():
    net = Net(nn.GRU(2, 4, batch_first=True), nn.Linear(4, 1)).eval()
    x = white_noise(features=2)
    x[:, :, 1] = 0.1
    x[:, : STEPS * 3 // 4] = 0
    x[:, : STEPS * 3 // 4, 1] = 0.1
    codes = rl.diagnose(net, x, model_output(net, x)).codes
    assert {"CONSTANT_INPUT", "PADDING_DOMINATES"} <= set(codes)
    static_input = np.repeat(white_noise(steps=1), STEPS, axis=1)
    assert "STATIC_INPUT" in rl.diagnose(shift_register({0: 1.0}), static_input, static_input[:, -1]).codes


def test_each_layer_of_several_carries_its_part():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = shift_register({2: 1.0}, sequence=True), shift_register({6: 1.0})

        def forward(self, x):
            return self.high(self.low(x))

    net, x = Two().eval(), white_noise()
    d = rl.diagnose(net, x, x[:, -9])
    assert float(d["model"].memory) == 9
    carried_memories = {name: int(d[name].carried_memory) for name in d if name != "model"}
    assert carried_memories == {"low.rnn": 9, "high.rnn": 7}


def test_the_first_layer_may_embed_ids():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.net = nn.Embedding(2, 1), shift_register({6: 1.0})
            with torch.no_grad():
                self.embedding.weight.copy_(torch.tensor([[-1.0], [1.0]]))

        def forward(self, ids):
            return self.net(self.embedding(ids))

    ids = np.random.default_rng(0).integers(0, 2, (SAMPLES, STEPS))
    net = Ids().eval()
    d = rl.diagnose(net, ids, 2.0 * ids[:, -7] - 1)
    assert float(d["model"].memory) == 7
    missed = rl.diagnose(net, ids, 2.0 * ids[:, -20] - 1)
    assert missed.findings[0].evidence["lag"] == 19


def test_baseline_is_shown_and_not_judged():
    torch.manual_seed(0)
    net, x = shift_register({7: 1.0}), white_noise()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    d = rl.diagnose(net, x, x[:, -8], baseline="init")
    assert "re-initialised: " in str(d)
    assert d["model"].memory_before.long_name == "memory in use of the re-initialised model, n at 5 %"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    diagnosis = rl.diagnose(net, x, x[:, -8], baseline=shift_register({2: 1.0}))
    assert float(diagnosis["model"].memory_before) == 3
    assert diagnosis["model"].memory_before.long_name == "memory in use of the baseline model, n at 5 %"
    assert diagnosis["model"].use_before.long_name == "use of older inputs by the baseline model"


def test_a_model_that_cannot_be_made_anew_says_so():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = shift_register({1: 1.0}), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.net(x) * self.scale

    with pytest.raises(UnsupportedError, match="cannot be re-initialised"):
        rl.diagnose(Own(), white_noise(), white_noise()[:, -2], baseline="init")


def test_a_loader_is_read_as_far_as_needed():
    net, x = shift_register({3: 1.0}), white_noise()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(x[:, -4])), batch_size=100
    )
    d = rl.diagnose(net, loader, samples=300)
    assert float(d["model"].memory) == 4
    assert d["model"].sizes["sample"] == 300


def test_few_samples_are_no_ground_to_speak_on():
    net, x = shift_register({3: 1.0}), white_noise(40)
    d = rl.diagnose(net, x, x[:, -4])
    assert "40 samples are too few" in str(d)
    assert "FEW_SAMPLES" in d.codes


@pytest.mark.parametrize("samples", [20, 63, 64])
def test_samples_are_counted_before_prefixes_are_exchanged(samples):
    """The number of samples is known beforehand: too few cost no pass for a memory that would not be told."""
    net, x, passes = shift_register({3: 1.0}), white_noise(samples), []
    net.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    d = rl.diagnose(net, x, x[:, -4])
    is_exchanged = d["model"].sizes["context"] > 0
    assert (len(passes) > 12, is_exchanged) == (samples == 64, samples == 64)
    assert [finding.evidence["samples"] for finding in d.findings if finding.code == "FEW_SAMPLES"] == [samples]


def test_targets_of_a_large_vocabulary_take_no_square_of_it():
    labels, scores = np.array([0, 3_999, 7]), np.zeros((3, 4_000))
    tracemalloc.start()
    try:
        target = read_target(labels, scores, None, "classes", None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(np.argwhere(target.values), [[0, 0], [1, 3_999], [2, 7]])
    assert peak < 20 * scores.nbytes  # an identity matrix alone has 1,333 times that


@pytest.mark.slow
def test_saved_and_opened_it_says_the_same(tmp_path):
    net, x = shift_register({3: 1.0}), white_noise()
    d = rl.diagnose(net, x, x[:, -4], baseline=shift_register({2: 1.0}))
    d.save(tmp_path / "d.nc")
    reopened = rl.open(tmp_path / "d.nc")
    assert str(reopened) == str(d)
    assert reopened.findings == d.findings
    assert json.loads(reopened.to_json()) == json.loads(d.to_json())


@pytest.mark.slow
def test_compared_side_by_side():
    x = white_noise()
    near, far = (rl.diagnose(shift_register({lag: 1.0}), x, x[:, STEPS - 1 - lag]) for lag in (2, 12))
    c = rl.compare({"near": near, "far": far})
    assert c.table.difference.values.tolist() == [0, 10]
    assert c.table.difference_interval.values[1].tolist() == [10, 10]
    assert "memory +10 against near" in repr(c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "regression"}, "task= is not understood"),
        ({"x": np.zeros((100,), "float32")}, "no earlier time step"),
        ({"x": white_noise()[:1]}, "no other sample to compare with"),
        ({"y": np.zeros((3, 1))}, "The target does not fit"),
        ({"baseline": "start"}, "baseline= is not understood"),
        ({"samples": 1}, "samples= is too small"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(change, message):
    arguments = {"x": white_noise(), "y": white_noise()[:, 0], **change}
    with pytest.raises(InputError, match=message):
        rl.diagnose(shift_register({1: 1.0}), arguments.pop("x"), arguments.pop("y"), **arguments)


def test_the_dynamics_of_one_sample():
    net, x = shift_register({3: 1.0}), white_noise()
    two_samples, one_sample = (rl.step_eigenvalues(net, x[:count]) for count in (2, 1))
    np.testing.assert_allclose(two_samples.eigenvalue_real[:1], one_sample.eigenvalue_real, atol=1e-12)


def test_the_model_is_left_as_found():
    net, x = shift_register({3: 1.0}).train(), white_noise()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    rl.diagnose(net, x, x[:, -4])
    rl.fixed_points(net, x)
    rl.lyapunov(net, x, samples=2)
    assert net.training
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Spring(nn.RNNCellBase):
    """A custom cell of two units, h' = h + p (1 - h), with its fixed point at 1."""

    def __init__(self):
        super().__init__(1, 2, False, num_chunks=1)
        self.pull = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, h):
        return h + self.pull * (1 - h) + 0 * x


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = Spring(), nn.Linear(2, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), 2)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def test_fixed_points_of_a_cell_of_ones_own():
    points = rl.fixed_points(Loop(), white_noise(8, 12), layer="cell")
    np.testing.assert_allclose(points.states, [[1, 1]], atol=1e-6)
    np.testing.assert_allclose(points.eigenvalues, [[0.5, 0.5]], atol=1e-6)
    assert bool(points.stable.all())
