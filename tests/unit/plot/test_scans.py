"""Figures of whole-sequence layers: drawn values and titles."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import xarray as xr
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import FileError, InputError
from rnnlens.results.array import LabelledArray

MAP = ("sample", "out_time", "in_time")


def two_maps():
    """Return a total map (sample, out_time, in_time), and a frozen one: half of it at lag 0, a tenth at lag 3."""
    lag = np.arange(4)[:, None] - np.arange(4)[None, :]
    total = np.where(lag >= 0, 2.0, 0.0) * np.array([1.0, 3.0])[:, None, None]
    share = np.where(lag == 0, 0.5, np.where(lag == 3, 0.1, 0.3))
    return xr.DataArray(total, dims=MAP), xr.DataArray(total * share, dims=MAP)


def whole_sequence_layer(with_output=True):
    """Return a layer of 3 samples, 7 steps, 4 channels and 2 state units, as a trace of Mamba has it."""
    rng, dims = np.random.default_rng(0), ("sample", "time", "channel", "state_unit")
    states = {name: (dims, rng.normal(size=(3, 7, 4, 2))) for name in ("state", "state_grad")}
    output = {"output_grad": (dims[:3], rng.normal(size=(3, 7, 4)))} if with_output else {}
    return xr.Dataset({**states, **output}, attrs={"layer": "mixer"})


@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize("options", [None, {"quantity": "state_grad"}], ids=["one", "two networks"])
def test_the_flow_of_a_whole_sequence_layer_is_refused_with_a_call_that_works(with_output, options):
    layer = whole_sequence_layer(with_output)
    with pytest.raises(InputError, match=r"draws gradients over \(sample, time, unit\)") as caught:
        rl.plot.gradient_flow(layer) if options is None else rl.plot.gradient_flow({"a": layer, "b": layer}, **options)
    assert "state_grad (sample, time, channel, state_unit) of mixer" in str(caught.value)
    code = re.search(r"rl\.plot\.curves\(.*log=True\)", str(caught.value))[0]
    assert len(eval(code, {"rl": rl, "trace": {"mixer": layer}})) == 1


def test_the_flow_of_layers_says_which_is_not_drawn():
    over_units = whole_sequence_layer().output_grad.rename(channel="unit")
    layers = {"mixer": whole_sequence_layer(), "lstm": xr.Dataset({"hidden_grad": over_units})}
    axes = rl.plot.gradient_flow(layers["lstm"])
    assert "mixer" not in suptitle(axes)
    axes = rl.plot.gradient_flow(xr.DataTree.from_dict(layers))
    assert [ax.get_title().partition(":")[0] for ax in axes] == ["lstm"]
    assert "mixer is not drawn: its gradients are not over (sample, time, unit)" in suptitle(axes)


def test_total_and_frozen_share_a_scale_and_are_compared_by_lag():
    axes = rl.plot.total_and_frozen(*two_maps())
    total, frozen = (ax.images[0] for ax in axes)
    assert np.allclose(total.get_array()[3, 0], 4.0)  # the mean of 2 and 6
    assert np.allclose(frozen.get_array()[3, 0], 0.4)
    assert total.norm.vmax == frozen.norm.vmax == 4.0
    assert "held coefficients show 50 % (lag 0) to 10 % (lag 3) of the influence" in suptitle(axes)
    assert "show 10 % (lag 3) of the influence" in suptitle(rl.plot.total_and_frozen(*two_maps(), from_lag=3))


def test_maps_of_other_shapes_are_refused():
    total, frozen = two_maps()
    with pytest.raises(InputError, match=r"frozen=True"):
        rl.plot.total_and_frozen(total, frozen.isel(out_time=slice(2)))


def test_maps_that_are_zero_have_a_plain_title():
    total, _ = two_maps()
    assert "total and frozen map" in suptitle(rl.plot.total_and_frozen(total * 0, total * 0))


def test_hidden_attention_draws_held_and_total_side_by_side_by_channel(attention):
    axes = rl.plot.hidden_attention(attention(), sample=1)
    titles = [ax.get_title().rpartition("\n")[2] for ax in axes]
    assert titles[0] == "channel 0 · coefficients held"
    assert titles[1:] == [f"channel {c} · {kind}" for c in (0, 4, 9) for kind in ("coefficients held", "total")][1:]
    for held, total, sign in zip(axes[::2], axes[1::2], (1, -1, 1), strict=True):
        held, total = (ax.images[0] for ax in (held, total))
        assert np.allclose(total.get_array()[4], sign * 0.5 ** np.arange(4.0, -1, -1))  # each by its own largest
        assert np.allclose(held.get_array(), total.get_array() / 2)
        assert held.norm.vmin == total.norm.vmin == -1.0  # both signs, though each map has one
    assert "held coefficients leave out 50 % of the total" in suptitle(axes)
    assert "sample 1" in suptitle(axes)


def test_hidden_attention_writes_words_and_selects_channels(attention):
    axes = rl.plot.hidden_attention(attention(), tokens=list("abcde"), max_rows=1)
    assert [text.get_text() for text in axes[0].get_xticklabels()] == list("abcde")
    assert [text.get_text() for text in axes[1].get_yticklabels()] == list("abcde")
    assert "1 of 3 channels" in suptitle(axes)
    with pytest.raises(InputError, match="tokens"):
        rl.plot.hidden_attention(attention(), tokens=list("abc"))


def test_hidden_attention_is_a_page_of_channels(attention):
    scene = rl.plot.hidden_attention(attention(), sample=1, tokens=list("abcde")).scene
    assert [channel["name"] for channel in scene["channels"]] == ["0", "4", "9"]
    held, total = (np.reshape(numbers, (5, 5)) for numbers in scene["channels"][1]["maps"])
    assert np.allclose(total[4], -2 * 0.5 ** np.arange(4.0, -1, -1), rtol=5e-3)
    assert np.allclose(held, total / 2, rtol=5e-3)
    assert scene["channels"][1]["largest"] == 2
    assert scene["words"] == list("abcde")


def test_a_hidden_attention_saves_itself_as_a_page(attention, tmp_path):
    array = LabelledArray(attention().assign_attrs(provenance="{}"))
    array.save(tmp_path / "attention.html")
    assert '"kind": "attention"' in (tmp_path / "attention.html").read_text("utf-8")
    with pytest.raises(FileError, match=r"\.nc or \.zarr"):
        array.sel(map="frozen").save(tmp_path / "frozen.html")
    assert {"text/html", "image/png"} <= array._repr_mimebundle_().keys()


def test_a_page_of_a_long_hidden_attention_leaves_channels_out(attention, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["rnnlens.plot.hidden_attention"], "_MOST_CELLS", 101)
    assert len(rl.plot.hidden_attention(attention()).scene["channels"]) == 2
    monkeypatch.setattr(sys.modules["rnnlens.plot.hidden_attention"], "_MOST_CELLS", 49)
    with pytest.raises(InputError, match="has no page"):
        rl.plot.hidden_attention(attention()).save(tmp_path / "attention.html")


def test_other_arrays_are_no_hidden_attention(attention):
    with pytest.raises(InputError, match=r"rl\.plot\.hidden_attention\(rl\.hidden_attention\(model, x\)\)"):
        rl.plot.hidden_attention(attention().sel(map="frozen"))
    with pytest.raises(InputError, match="0 to 1"):
        rl.plot.hidden_attention(attention(), sample=2)


def test_decay_by_lag_draws_powers_sorted_by_half_life():
    decay = np.broadcast_to([0.9, 0.5, 1.0], (2, 6, 3))
    (ax,) = rl.plot.decay_by_lag(decay, lags=4)
    powers = ax.images[0].get_array()
    assert np.allclose(powers, np.array([0.5, 0.9, 1.0]) ** np.arange(5)[:, None])
    assert ax.get_ylim()[0] < ax.get_ylim()[1]  # lag upward
    (line,) = [line for line in ax.lines if line.get_gid() == "half-life"]
    assert np.allclose(line.get_ydata()[:3], [1.0, 4.0, 4.0])  # 6.6 and infinity are drawn at the last lag
    assert "half-life: 6.6 steps (1 to endless)" in suptitle([ax])


def test_decays_that_are_none_are_refused():
    with pytest.raises(InputError, match="draws decays"):
        rl.plot.decay_by_lag(np.full((1, 3, 2), -0.5))


def test_a_row_of_a_time_jacobian_is_an_input_map():
    total, _ = two_maps()
    row = total.isel(out_time=[3]).assign_coords(out_time=[3])
    (ax,) = rl.plot.input_map(row.copy(data=row.values * np.arange(4)), sample=1)
    (line,) = [line for line in ax.lines if line.get_gid() == "sensitivity"]
    assert np.allclose(line.get_ydata(), 6 * np.arange(4))
    assert "output step 3" in suptitle([ax])
    with pytest.raises(InputError, match=r"plot\.time_jacobian"):
        rl.plot.input_map(total)


def test_a_text_asks_each_output_step_and_its_picture_is_of_the_last():
    total, _ = two_maps()
    numbered = total * np.arange(1, 17).reshape(4, 4)
    drawing = rl.plot.input_map(numbered, tokens=list("abcd"), sample=1)
    (tokens,) = [artist for artist in drawing[0].collections if artist.get_gid() == "tokens"]
    assert np.allclose(tokens.get_array(), np.arange(13, 17) / 16)
    rows = drawing.scene["rows"]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    for row, expected in zip(rows, numbered.values[1], strict=True):
        assert np.allclose(row["values"], expected)
    one = rl.plot.input_map(numbered.isel(out_time=[2]).assign_coords(out_time=[2]), tokens=list("abcd"))
    assert [row["step"] for row in one.scene["rows"]] == ["2"]
