"""``rl.hidden_attention``: frozen maps are products of coefficients; total ones those of torch through a plain loop.

The model's own function rounds to float32 within, also in a float64 model, so that it is compared within 1e-5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.scan_models import build, tokens
from transformers.models.mamba import modeling_mamba

import rnnlens as rl
from rnnlens.adapters.torch import scans

STEPS = 9
LAYER = "layers.0.mixer"


@pytest.fixture(scope="module")
def model():
    return build("mamba").double()


@pytest.fixture(scope="module")
def ids():
    return tokens(2, STEPS)


@pytest.fixture(scope="module")
def maps(model, ids):
    return rl.hidden_attention(model, ids, LAYER, at={"channel": [0, 7]})


def coefficients(mixer, x):
    """Return time step, A, B and C of a mixer for the input (sample, time, channel) of its scan; arXiv:2312.00752."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    low_rank, write, read = torch.split(mixer.x_proj(x), sizes, dim=-1)
    step = torch.nn.functional.softplus(low_rank @ mixer.dt_proj.weight.T + mixer.dt_proj.bias.float())
    return step, -torch.exp(mixer.A_log.float()).double(), write, read


@pytest.fixture(scope="module")
def scan_input(model, ids):
    """Return the input of the scan, as the untouched model computes it."""
    seen = []
    hook = model.backbone.layers[0].mixer.x_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0]


def own_scan(mixer, x):
    """Return the readout (sample, time, channel) of the model's own scan function, without skip connection and gate."""
    step, rate, write, read = coefficients(mixer, x)
    return modeling_mamba.mamba_selective_scan(x.mT, step.mT, rate, write.mT, read.mT).mT


def plain_scan(mixer, x):
    """Return the same in a loop over the steps."""
    step, rate, write, read = coefficients(mixer, x)
    state, outputs = x.new_zeros(len(x), *rate.shape), []
    for t in range(x.shape[1]):
        state = torch.exp(step[:, t, :, None] * rate) * state + (step * x)[:, t, :, None] * write[:, t, None]
        outputs.append((state * read[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def test_frozen_maps_are_products_of_the_coefficients(model, maps, scan_input):
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        step, rate, write, read = coefficients(mixer, scan_input)
        y, own_y = (scan(mixer, scan_input).numpy() for scan in (plain_scan, own_scan))
    for position, channel in enumerate([0, 7]):
        decay = torch.exp(step[..., channel, None] * rate[channel]).numpy()
        alpha = np.zeros((2, STEPS, STEPS))
        for i in range(STEPS):
            for j in range(i + 1):
                kept = decay[:, j + 1 : i + 1].prod(1)
                alpha[:, i, j] = (read[:, i].numpy() * kept * write[:, j].numpy()).sum(-1) * step[:, j, channel].numpy()
        frozen = maps.sel(map="frozen", channel=channel).values
        assert np.allclose(frozen, alpha, rtol=1e-11, atol=1e-15)
        sums = np.einsum("sij,sj->si", frozen, scan_input[..., channel].numpy())
        assert np.allclose(sums, y[..., channel], rtol=1e-9, atol=1e-14)
        assert np.allclose(sums, own_y[..., channel], atol=1e-5 * abs(own_y).max())
        assert list(maps.channel.values) == [0, 7]
        assert np.array_equal(maps.isel(channel=position).sel(map="frozen"), frozen)


@pytest.mark.parametrize(("scan", "tolerance"), [(plain_scan, 1e-12), (own_scan, 1e-5)])
def test_total_maps_are_those_of_torch(model, maps, scan_input, scan, tolerance):
    mixer = model.backbone.layers[0].mixer
    for sample in range(2):
        one = scan_input[sample : sample + 1]
        full = torch.autograd.functional.jacobian(lambda x: scan(mixer, x), one)[0, :, :, 0]
        for channel in (0, 7):
            expected = full[:, channel, :, channel].numpy()
            total = maps.sel(map="total", channel=channel).isel(sample=sample).values
            assert np.allclose(total, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
    assert not np.allclose(maps.sel(map="total"), maps.sel(map="frozen"), rtol=0.1)


def test_the_self_check_compares_the_sum_with_the_scan(maps, model, ids, monkeypatch):
    (check,) = (check for check in maps.checks if check.name == "hidden attention")
    assert check.ok
    verb = __import__("sys").modules["rnnlens.verbs.hidden_attention"]
    pulled = verb._pulled
    monkeypatch.setattr(verb, "_pulled", lambda *args, **options: 1.01 * pulled(*args, **options))
    with pytest.warns(rl.errors.SelfCheckWarning, match=r"sum of alpha\[i, j\] x_j differs"):
        rl.hidden_attention(model, ids, LAYER, at={"channel": [0]})


def test_the_certificate_compares_the_differentiated_scan_with_the_model(maps, model, ids, monkeypatch):
    certificate = maps.certificate
    assert certificate.state == "passed"
    names = ("outputs through the differentiated scan", "gradients of the layer's weights")
    assert (certificate.certified, certificate.resting) == (names, ("frozen and total maps",))
    compared = {check.layer for check in certificate.checks if check.name == "reference weight gradients"}
    parts = ("", ".conv1d", ".in_proj", ".x_proj", ".dt_proj", ".out_proj")
    assert compared == {f"backbone.{LAYER}{part}" for part in parts}
    with rl.options(certify="never"):
        assert rl.hidden_attention(model, ids, LAYER, at={"channel": [0]}).certificate.state == "off"


def test_a_wrong_gradient_of_the_scan_fails_the_certificate_though_the_sum_is_right(model, ids, monkeypatch):
    backward = scans._Scan.backward

    def without_decay(ctx, *grads):
        """Lose the gradient by the time step in the decay; the frozen maps need the one by what is written only."""
        named = zip(ctx.names, backward(ctx, *grads)[3:], strict=True)
        return (None, None, None, *(0 * grad if name == "decay_0" else grad for name, grad in named))

    monkeypatch.setattr(scans._Scan, "backward", staticmethod(without_decay))
    with pytest.warns(rl.errors.SelfCheckWarning, match="weight gradients differ from the reference run"):
        maps = rl.hidden_attention(model, ids, LAYER, at={"channel": [0]})
    assert [check.ok for check in maps.checks if check.name == "hidden attention"] == [True]
    assert maps.certificate.state == "failed"


def test_without_trained_weights_the_total_maps_are_not_certified(ids):
    model = build("mamba").double().requires_grad_(False)
    certificate = rl.hidden_attention(model, ids, LAYER, at={"channel": [0]}).certificate
    assert certificate.state == "passed"
    assert certificate.resting == ("frozen maps",)
    assert certificate.uncertified == ("the total maps, as no weight of the layer is trained",)


def test_positions_select_before_and_after_the_pull(model, ids, maps):
    some = rl.hidden_attention(model, ids, LAYER, at={"channel": [7], "out_time": [-1, 2], "in_time": slice(0, 3)})
    assert dict(some.sizes) == {"map": 2, "sample": 2, "channel": 1, "out_time": 2, "in_time": 3}
    assert some.out_time.values.tolist() == [2, 8]
    expected = maps.sel(channel=[7], out_time=[2, 8], in_time=[0, 1, 2])
    assert np.allclose(some, expected, rtol=1e-12, atol=1e-16)


def test_channels_with_the_largest_output_are_chosen(model, ids, scan_input):
    with torch.no_grad():
        squares = plain_scan(model.backbone.layers[0].mixer, scan_input).square().mean((0, 1))
    chosen = rl.hidden_attention(model, ids, "backbone.layers.0.mixer", at={"out_time": [-1]}).channel.values
    assert set(chosen.tolist()) == set(squares.argsort(descending=True)[:4].tolist())


@pytest.mark.parametrize("name", ["jamba", "zamba"])
def test_further_families_and_several_scans_of_a_layer(name, ids):
    model = build(name).double()
    layer = rl.layers(model)[0].name + ("#1" if name == "zamba" else "")
    maps = rl.hidden_attention(model, ids, layer, at={"out_time": [-1]})
    assert maps.checks[0].ok
    frozen, total = (maps.sel(map=kind).values for kind in ("frozen", "total"))
    assert not np.allclose(frozen, total, rtol=0.01)


def test_a_model_without_trained_weights_has_the_same_maps(ids, maps):
    model = build("mamba").double().requires_grad_(False)
    assert np.allclose(rl.hidden_attention(model, ids, LAYER, at={"channel": [0, 7]}), maps, rtol=1e-12, atol=1e-16)
    assert not any(weight.requires_grad for weight in model.parameters())


class Copied(torch.nn.Module):
    """A selective scan whose own input is another tensor than that of its coefficients."""

    def __init__(self):
        super().__init__()
        self.d_inner, self.d_state = 3, 2
        self.project = torch.nn.Linear(3, 3 + 2 * 2)

    def selective_scan(self, x, delta, A, B, C, D):
        states = torch.zeros(len(x), 3, 2, dtype=x.dtype)
        outputs = []
        for t in range(x.shape[1]):
            states = torch.exp(delta[:, t, :, None] * A) * states + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
            outputs.append((states * C[:, t, None]).sum(-1))
        return torch.stack(outputs, 1) + D * x

    def forward(self, x):
        delta, write, read = self.project(x).split([3, 2, 2], -1)
        rate = -torch.ones(3, 2, dtype=x.dtype)
        return self.selective_scan(x.clone(), torch.nn.functional.softplus(delta), rate, write, read, 0.5)


def test_a_scan_that_reads_another_tensor_is_refused():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Copied()), torch.randn(2, 5, 3)
    with pytest.raises(rl.errors.UnsupportedError, match="not computed from the scan's input"):
        rl.hidden_attention(model, x)


def test_refusals_name_what_would_work(model, ids):
    lstm = torch.nn.LSTM(3, 4, batch_first=True)
    cases = {
        "This model has no whole-sequence layer": lambda: rl.hidden_attention(lstm, torch.randn(1, 4, 3)),
        'of="backbone.layers.0.mixer.output"': lambda: rl.hidden_attention(build("mamba2"), ids, LAYER),
        'layer="backbone.layers.0.mixer"': lambda: rl.hidden_attention(model, ids),
        "one of backbone.layers.0.mixer, backbone.layers.1.mixer": lambda: rl.hidden_attention(model, ids, "mixers"),
        "has no 'unit'": lambda: rl.hidden_attention(model, ids, LAYER, at={"unit": [0]}),
        "lies outside": lambda: rl.hidden_attention(model, ids, LAYER, at={"channel": [99]}),
        "has no scan of its own": lambda: rl.hidden_attention(model, ids, f"{LAYER}#3"),
    }
    for text, call in cases.items():
        with pytest.raises(rl.errors.RnnlensError) as caught:
            call()
        assert text in str(caught.value)


def test_the_result_is_kept_in_a_file(maps, tmp_path):
    maps.save(tmp_path / "maps.nc")
    reopened = rl.open(tmp_path / "maps.nc")
    assert np.array_equal(reopened, maps)
    assert reopened.checks == maps.checks
