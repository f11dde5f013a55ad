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

    def __init__(self, layer=nn.GRU, features=2, outputs=1, units=6, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = layer(features, units, batch_first=True, **options)
        self.head = nn.Linear(units * (1 + options.get("bidirectional", False)), outputs)

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


def with_kernels(draw_kernel, layer=nn.RNN, **options):
    """Return a network with recurrent kernels of another draw, and without biases."""
    model = Net(layer, **options)
    with torch.no_grad():
        for name, weight in model.rnn.named_parameters():
            if "weight_hh" in name:
                weight.copy_(draw_kernel(weight.shape))
            elif "bias" in name:
                weight.zero_()
    return model


def halves(layer):
    """Return the suffixes of the weights of each half of a layer, and whether it runs backwards."""
    return [("_l0", False), ("_l0_reverse", True)] if layer.bidirectional else [("_l0", False)]


def states_by_hand(layer, x, suffix, *, is_backward, first=None):
    """Unroll an nn.RNN in double precision; return its states in the order in which they are computed."""
    act = torch.tanh if layer.nonlinearity == "tanh" else torch.relu
    named = {name: weight.detach().double() for name, weight in layer.named_parameters()}
    w_in, w, b = named[f"weight_ih{suffix}"], named[f"weight_hh{suffix}"], named[f"bias_ih{suffix}"]
    x = torch.as_tensor(x).double()
    state = torch.zeros(len(x), len(w), dtype=torch.float64) if first is None else first
    states = []
    for step in x.flip(1).unbind(1) if is_backward else x.unbind(1):
        state = act(step @ w_in.T + state @ w.T + b + named[f"bias_hh{suffix}"])
        states.append(state.requires_grad_())
    return states


GROWING = {
    "tanh": {},
    "relu": {"nonlinearity": "relu"},
    "both halves": {"bidirectional": True},
}


@pytest.mark.parametrize("options", GROWING.values(), ids=GROWING)
def test_gradients_grow_by_the_decades_that_the_sentence_says(options):
    model = with_kernels(lambda shape: torch.rand(shape) * 0.8, **options)
    x, y = data()
    x *= np.float32(1e-3)
    found = [f.sentence for f in rl.diagnose(model, x, y, loss=MSE).findings if f.code == "EXPLODING"]
    assert len(found) == len(halves(model.rnn))
    for text, (suffix, is_backward) in zip(found, halves(model.rnn), strict=True):
        half = "Backward half: " if is_backward else "Forward half: " if len(found) == 2 else ""
        assert text.startswith(f"{half}Gradients by the state, in units of its spread, grow")
        decades, steps = numbers(text)
        start = torch.zeros(32, 6, dtype=torch.float64, requires_grad=True)
        states = states_by_hand(model.rnn, x[:32], suffix, is_backward=is_backward, first=start)
        spread = torch.stack(states).detach().flatten(0, 1).std(0)
        logs = []
        for seed in range(32):
            cotangent = torch.randn(32, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            grads = torch.autograd.grad((states[-1] * cotangent / spread).sum(), [start, *states], retain_graph=True)
            logs.append(torch.stack([(g * spread).norm(dim=1) for g in grads]).log10() - cotangent.norm(dim=1).log10())
        assert decades == pytest.approx(float(torch.stack(logs).mean(0).median(1).values.max()), abs=0.2)
        assert steps == 12


@pytest.mark.parametrize("bidirectional", [False, True])
def test_small_differences_grow_as_fast_as_the_sentence_says(bidirectional):
    steps, units = 60, 64
    torch.manual_seed(0)
    options = {"units": units, "features": 1, "bidirectional": bidirectional}
    model = with_kernels(lambda shape: torch.randn(shape) * 2.5 / units**0.5, **options)
    x = 0.3 * np.random.default_rng(0).normal(size=(192, steps, 1)).astype("float32")
    found = [f.sentence for f in rl.diagnose(model, x, x[:, -3], loss=MSE).findings if f.code == "CHAOTIC"]
    assert len(found) == len(halves(model.rnn))
    for text, (suffix, is_backward) in zip(found, halves(model.rnn), strict=True):
        factor, within, n, exponent, error = numbers(text.replace("+- ", ""))
        assert n == steps
        assert factor == pytest.approx(np.exp(exponent), rel=1e-2)
        assert within == pytest.approx(np.exp(exponent * steps), rel=0.1)
        start = torch.zeros(32, units, dtype=torch.float64)
        moved = start + 1e-10 * torch.randn(start.shape, dtype=torch.float64)
        one, other = (
            torch.stack(states_by_hand(model.rnn, x[:32], suffix, is_backward=is_backward, first=h)).detach()
            for h in (start, moved)
        )
        apart = (one - other).norm(dim=-1).log().mean(1)
        assert float(apart[-1] - apart[5]) / (steps - 6) == pytest.approx(exponent, abs=2 * error)
        assert float(one[-1].norm(dim=-1).mean()) < 3 * float(one[steps // 4].norm(dim=-1).mean())


class Coupled(nn.Module):
    """Two layers, the second of which sees the first through a factor."""

    def __init__(self, factor, *, bidirectional=False):
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.RNN(2, 6, batch_first=True, bidirectional=bidirectional)
        self.high = nn.RNN(6 * (1 + bidirectional), 6, batch_first=True)
        self.head, self.factor = nn.Linear(6, 1), factor

    def forward(self, x):
        return self.head(self.high(self.factor * self.low(x)[0])[0][:, -1])


@pytest.mark.parametrize("factor", [1e-6, 1e-9])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_has_a_gradient_as_many_decades_smaller_as_the_sentence_says(factor, bidirectional):
    model, (x, y) = Coupled(factor, bidirectional=bidirectional), data()
    found = [f for f in rl.diagnose(model, x, y, loss=MSE).findings if f.code == "UNEQUAL_LAYERS"]
    (decades,) = numbers(found[0].sentence)
    assert (found[0].layer, "that of high." in found[0].sentence) == ("low", True)
    sizes = {"high": [], "low": []}
    low = [states_by_hand(model.low, x[:32], suffix, is_backward=back) for suffix, back in halves(model.low)]
    merged = torch.cat([torch.stack(s[::-1] if i else s, 1) for i, s in enumerate(low)], -1)
    high = []
    state = torch.zeros(32, 6, dtype=torch.float64)
    cell = {name: weight.detach().double() for name, weight in model.high.named_parameters()}
    for step in (factor * merged).unbind(1):
        state = torch.tanh(
            step @ cell["weight_ih_l0"].T + state @ cell["weight_hh_l0"].T + cell["bias_ih_l0"] + cell["bias_hh_l0"]
        )
        high.append(state)
    output = (state @ model.head.weight.detach().double().T).sum()
    for name, runs in (("high", [high]), ("low", low)):
        for run in runs:
            norms = torch.stack([g.norm(dim=1) for g in torch.autograd.grad(output, run, retain_graph=True)])
            sizes[name].append(float(norms.amax(0).median()))
    assert decades == pytest.approx(np.log10(max(sizes["high"]) / min(sizes["low"])), abs=0.06)


STATEFUL = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "both halves": (nn.GRU, {"bidirectional": True}),
}


def states_of(layer, x):
    """Return the states of each half of a torch layer at all steps, from the calls of one step each by torch."""
    x, found = torch.as_tensor(x), []
    for half, (_, is_backward) in enumerate(halves(layer)):
        one_way = type(layer)(layer.input_size, layer.hidden_size, batch_first=True)
        own = list(layer.parameters())[4 * half : 4 * half + 4]
        for weight, value in zip(one_way.parameters(), own, strict=True):
            weight.data = value.data
        state, states = None, []
        for t in range(x.shape[1])[:: -1 if is_backward else 1]:
            state = one_way(x[:, t : t + 1], state)[1]
            states.append(torch.cat(state if isinstance(state, tuple) else (state,), -1)[0])
        found.append(torch.stack(states, 1).detach().numpy())
    return found


@pytest.mark.parametrize(("layer", "options"), STATEFUL.values(), ids=STATEFUL)
def test_as_many_states_are_not_finite_as_the_sentence_says(layer, options):
    x, y = data()
    x[3, 7, 0], x[5, 2, 1] = np.nan, np.inf
    x[190, 0, 0] = np.nan
    model = Net(layer, **options)
    found = [f.sentence for f in rl.diagnose(model, x, y, loss=MSE).findings if f.code == "NONFINITE"]
    said = [numbers(text) for text in found]
    counts = [[np.isnan(s).sum(), s.size, np.isinf(s).sum()] for s in states_of(model.rnn, x[:32])]
    assert said == counts


def test_as_many_predictions_are_not_finite_as_the_sentence_says():
    x, y = data()
    x[[40, 77, 150], -1] = np.inf
    text = sentence(Net(), x, y, "NONFINITE")
    is_finite = np.isfinite(Net()(torch.as_tensor(x)).detach().numpy())[:, 0]
    assert numbers(text) == [(~is_finite).sum(), len(x), is_finite.argmin()] == [3, 192, 40]


@pytest.mark.parametrize(("layer", "options"), STATEFUL.values(), ids=STATEFUL)
def test_as_much_of_the_state_is_subnormal_as_the_sentence_says(layer, options):
    x, y = data()
    model = Net(layer, **options)
    with torch.no_grad():
        for weight in model.rnn.parameters():
            weight.mul_(0.01 if weight.ndim == 2 else 0)
        x[:, 1:] = 0
        x[:, 0] *= 1e-36 / 0.02
    found = [f.sentence for f in rl.diagnose(model, x, y, loss=MSE).findings if f.code == "UNDERFLOW"]
    shares = [100 * np.mean((s != 0) & (np.abs(s) < np.finfo("float32").tiny)) for s in states_of(model.rnn, x[:32])]
    assert [numbers(text)[0] for text in found] == pytest.approx(shares, abs=0.51)


class TwoInputs(nn.Module):
    """Two recurrent layers, each with an input of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.GRU(2, 6, batch_first=True), nn.GRU(3, 6, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, a, b):
        return self.head(torch.cat([self.one(a)[0][:, -1], self.other(b)[0][:, -1]], 1))


class Words(nn.Module):
    """A tagger of token ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.rnn, self.head = nn.Embedding(9, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


def test_the_input_of_as_many_samples_is_static_as_the_sentence_says():
    x, y = data()
    x[: round(0.97 * len(x))] = x[: round(0.97 * len(x)), :1]
    (share,) = numbers(sentence(Net(), x, y, "STATIC_INPUT"))
    assert share == pytest.approx(100 * np.mean((x == x[:, :1]).all((1, 2))), abs=0.51)
    assert sentence(TwoInputs(), (x, data(features=3)[0]), y, "STATIC_INPUT") == ""
    ids = np.random.default_rng(0).integers(0, 9, (192, 12))
    ids[:40] = ids[:40, :1]
    assert sentence(Words(), ids, ids[:, -3], "STATIC_INPUT", functional.cross_entropy) == ""
    ids[:] = ids[:, :1]
    assert numbers(sentence(Words(), ids, ids[:, -3], "STATIC_INPUT", functional.cross_entropy)) == [100]


def test_as_many_input_features_are_constant_as_the_sentence_says():
    x, y = data(features=3)
    x[..., [0, 2]] = 0.7
    assert numbers(sentence(Net(features=3), x, y, "CONSTANT_INPUT")) == [(np.ptp(x, (0, 1)) == 0).sum(), 3]
    assert numbers(sentence(TwoInputs(), (x[..., :2], x), y, "CONSTANT_INPUT")) == [3, 5]
    ids, words = np.random.default_rng(0).integers(0, 9, (192, 12)), Words()
    with torch.no_grad():
        words.embedding.weight[:, 3] = 0.5
    assert sentence(words, ids, ids[:, -3], "CONSTANT_INPUT", functional.cross_entropy) == ""


class Latch(Net):
    """Units that keep the sign of a strong input: between two stable states nearly no gradient passes."""

    def __init__(self):
        super().__init__(nn.RNN, 1)
        with torch.no_grad():
            self.rnn.weight_ih_l0.fill_(5.0), self.rnn.weight_hh_l0.copy_(1.5 * torch.eye(6))
            self.rnn.bias_ih_l0.zero_(), self.rnn.bias_hh_l0.zero_()
            self.head.weight.fill_(1 / 6)


class Skipped(Net):
    """A saturated effect of the last input beside weak ones of all inputs, which pass by the recurrent layer."""

    def forward(self, x):
        return torch.tanh(30 * x[:, -1]) + 0.03 * x.sum(1) + 1e-3 * super().forward(x)


@pytest.mark.parametrize("kind", [Latch, Skipped])
def test_gradients_are_attributed_to_the_steps_that_the_sentence_says(kind):
    rng, steps = np.random.default_rng(0), 30
    model = Latch() if kind is Latch else Skipped(features=1)
    x = rng.normal(size=(512, steps, 1)).astype("float32")
    if kind is Latch:
        x *= 0.02
        x[np.arange(512), rng.integers(0, 12, 512)] = rng.choice([-1.0, 1.0], 512)[:, None]
    inputs = torch.as_tensor(x).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs)
    output = model(torch.as_tensor(x)).detach()
    text = sentence(model, x, output.numpy(), "GRADIENT_MEMORY_DISAGREE")
    attributed, used, _ = numbers(text)
    scores = gradient[:32, :, 0].numpy() ** 2
    shares = np.cumsum(scores[:, ::-1], 1) / scores.sum(1, keepdims=True)
    assert attributed == np.median((shares >= 0.95).argmax(1) + 1)
    exchanged = x[rng.permutation(512)]

    def change(kept):
        """Return the change of the output by an exchange of all but the last steps, by its variance."""
        mixed = torch.as_tensor(np.concatenate([exchanged[:, : steps - kept], x[:, steps - kept :]], 1))
        return float((model(mixed).detach() - output).square().mean() / (2 * output.var()))

    used = int(used)
    assert change(min(used + 2, steps)) < 0.06 < change(max(used - 2, 0)) + 0.02
    saturated = gradient.abs().numpy()[:, :12] if kind is Latch else gradient.abs().numpy()[:, -1:]
    assert np.median(saturated.max(1)) < 0.05
