"""``rl.compare(..., scorecard=True)``: each number is that of the verb it names, and what is not defined says why."""

from __future__ import annotations

import numpy as np
import pytest
import scan_models
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError, UnsupportedError

UNITS, STEPS, SAMPLES = 6, 10, 128


class Around(nn.Module):
    """A recurrent layer between two linear ones, which reads the last step."""

    def __init__(self, layer):
        super().__init__()
        self.into, self.layer, self.head = nn.Linear(2, UNITS), layer, nn.Linear(UNITS, 1)

    def forward(self, x):
        outputs = self.layer(self.into(x))
        return self.head((outputs[0] if isinstance(outputs, tuple) else outputs)[:, -1])


class Scan(nn.Module):
    """Decays of complex numbers, as in an LRU."""

    def __init__(self):
        super().__init__()
        self.rate, self.angle = nn.Parameter(torch.rand(UNITS)), nn.Parameter(torch.rand(UNITS))

    def forward(self, x):
        decay = torch.exp(torch.complex(-self.rate, self.angle)).expand(*x.shape)
        return rl.torch.scan(decay, x.to(decay.dtype), name="lru").real


class Loop(nn.Module):
    """A block that is called on its own output, six times."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(6):
            state = self.block(state, x)
        return state


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2 * UNITS, UNITS)

    def forward(self, state, x):
        return torch.tanh(self.mix(torch.cat([state.roll(1, dims=1), x], -1)))


class OfIds(nn.Module):
    """A Mamba of Hugging Face with a number at the end."""

    def __init__(self):
        super().__init__()
        self.body, self.head = scan_models.build("mamba", num_hidden_layers=2), nn.Linear(scan_models.VOCABULARY, 1)

    def forward(self, x):
        return self.head(self.body(x).logits[:, -1])


def make(name):
    torch.manual_seed(0)
    if name == "mamba":
        return OfIds().eval()
    layers = {"lstm": lambda: nn.LSTM(UNITS, UNITS, batch_first=True), "lru": Scan, "depth": Loop}
    return Around(layers[name]()).eval()


def data_of(name, model):
    x = scan_models.tokens(SAMPLES, STEPS) if name == "mamba" else torch.randn(SAMPLES, STEPS, 2)
    with torch.no_grad():
        return x, model(x) + 0.1 * torch.randn(SAMPLES, 1)


def loss(outputs, y):
    return nn.functional.mse_loss(outputs, y)


@pytest.fixture(scope="module")
def cards():
    """Return, by name, the model, its data, and its scorecard."""
    cards = {}
    for name in ("lstm", "lru", "depth", "mamba"):
        model = make(name)
        x, y = data_of(name, model)
        cards[name] = model, x, y, rl.compare({name: model}, x, y, loss=loss, scorecard=True)
    return cards


@pytest.mark.parametrize("name", ["lstm", "lru", "depth", "mamba"])
def test_each_number_is_that_of_its_verb(name, cards):
    model, x, y, comparison = cards[name]
    card = comparison.scorecard.sel(name=name)
    expected, layers = {}, [info.name for info in rl.layers(model, x)]
    expected["weights"] = sum(p.numel() for p in model.parameters())
    diagnosis = rl.diagnose(model, x, y, loss=loss)
    with torch.no_grad():
        np.testing.assert_allclose(diagnosis["model"].loss, float(loss(model(x), y)), rtol=1e-5)
    expected["loss"] = float(diagnosis["model"].loss)
    for row in diagnosis.how_far_back:
        expected[row.measure] = max(row.steps, expected.get(row.measure, 0))
    trace = rl.trace(model, x[:64], at={"time": [-1]})
    last = {layer: trace[layer].dataset.get("state", trace[layer].dataset.get("hidden")) for layer in layers}
    if name == "lstm":
        last["layer"] = np.concatenate([trace["layer"].hidden, trace["layer"].cell], axis=-1)
    flat = [np.asarray(array).reshape(64, -1) for array in last.values()]
    flat = [np.concatenate([a.real, a.imag], axis=1) if np.iscomplexobj(a) else a for a in flat]
    expected["state dimensions"] = max(rl.measures.effective_rank(a - a.mean(0)) for a in flat)
    if name in ("lstm", "depth"):
        layer = layers[0]
        expected["leading exponent"] = float(rl.lyapunov(model, x, layer=layer, count=1).exponent[0])
        steps = rl.step_eigenvalues(model, x, layer=layer)
        expected["spectral radius"] = float(np.hypot(steps.eigenvalue_real, steps.eigenvalue_imag).max("mode").mean())
    else:
        expected["leading exponent"] = max(float(diagnosis[layer].lambda_1) for layer in layers)
    if name == "mamba":
        weights = rl.weights(model, x[:64], y[:64], loss=loss)
        first = [weights[layer].token_influence.values[0] for layer in layers]
        expected["influence of first step"] = np.max(first)
        expected["effective state size"] = max(float(weights[layer].state_size.mean()) for layer in layers)
        shares = (0.125, 0.25, 0.5, 0.75, 1.0)
        pruned = rl.weights(model, x, y, loss=loss, keep=shares)
        losses = [pruned[layer].loss_after_pruning.values for layer in layers]
        kept = [min(s for i, s in enumerate(shares) if (a[i:] <= 1.05 * a[-1]).all()) for a in losses]
        expected["state to keep"] = max(kept)
    for measure, number in expected.items():
        np.testing.assert_allclose(float(card.value.sel(measure=measure)), number, rtol=1e-6, err_msg=measure)
    extra = {"lru": {"influence of first step", "state to keep"}}.get(name, set())
    defined = {str(measure) for measure in card.measure.values if np.isfinite(card.value.sel(measure=measure))}
    assert defined == set(expected) | extra
    for measure in card.measure.values:
        entry = card.sel(measure=measure)
        assert bool(str(entry.reason.values)) != bool(np.isfinite(entry.value))
        if np.isfinite(entry.interval).all():
            assert entry.interval[0] <= entry.value <= entry.interval[1]


def test_reasons_name_what_is_missing(cards):
    reasons = {name: cards[name][3].scorecard.sel(name=name).reason for name in cards}
    assert str(reasons["lstm"].sel(measure="effective state size").values).startswith("only of whole-sequence layers")
    assert str(reasons["mamba"].sel(measure="spectral radius").values) == "only of layers that have a step function"
    carried = {name: str(reason.sel(measure="state carries").values) for name, reason in reasons.items()}
    assert carried["lstm"] == ""
    assert carried["mamba"] == "whole-sequence layers cannot start from another state"
    assert carried["depth"] == "a loop over depth does not run over the steps of the data"
    assert "layer.block is called on its own output, over depth" in str(cards["depth"][3].diagnoses["depth"])


def test_side_by_side_saved_and_opened(cards, tmp_path):
    model, x, y, comparison = cards["lstm"]
    diagnosis = comparison.diagnoses["lstm"]
    both = rl.compare(
        {"measured": model, "finished": diagnosis, "none": lambda: 1 / 0}, x, y, loss=loss, scorecard=True
    )
    card = both.scorecard
    assert card.sel(name="measured", drop=True).equals(comparison.scorecard.sel(name="lstm", drop=True))
    finished = card.sel(name="finished")
    assert float(finished.value.sel(measure="loss")) == float(diagnosis["model"].loss)
    assert str(finished.reason.sel(measure="weights").values) == "the model is not here, only its diagnosis"
    assert set(card.reason.sel(name="none").values) == {"ZeroDivisionError: division by zero"}
    assert both.scorecard.value.to_pandas().shape == (3, 12)
    both.save(tmp_path / "both.nc")
    assert str(rl.open(tmp_path / "both.nc")) == str(both)


def test_what_a_scorecard_needs(cards):
    model, x, y, _ = cards["lstm"]
    with pytest.raises(UnsupportedError, match="scorecard= needs arrays in memory"):
        rl.compare([model], torch.utils.data.DataLoader(list(zip(x, y, strict=True))), scorecard=True)
    with pytest.raises(InputError, match=r"no scorecard(.|\n)*scorecard=True"):
        _ = rl.compare({"a": rl.diagnose(model, x, y)}).scorecard


def test_the_state_transfer_of_a_complex_scan_counts_both_parts():
    """Units that turn at angles of their own and decay at one rate: the size falls by that rate alone."""
    model = Around(Scan()).eval()
    torch.nn.init.constant_(model.layer.rate, 0.2)
    x = torch.randn(SAMPLES, STEPS, 2)
    diagnosis = rl.diagnose(model, x, model(x).detach(), loss=loss)
    np.testing.assert_allclose(diagnosis["lru"].kappa, np.exp(-0.2 * np.arange(STEPS + 1)), rtol=1e-5)
    np.testing.assert_allclose(diagnosis["lru"].lambda_1, -0.2, rtol=1e-5)
