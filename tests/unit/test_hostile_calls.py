"""Figures, files, options and results, called with arbitrary arguments, return a result or raise one clear error."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import xarray as xr
from hostile import Target, constant, faults, run_calls
from matplotlib.figure import Figure
from matplotlib.image import imread

import rnnlens as rl
from rnnlens.errors import FileError, InputError, LayerNotFoundError, UserCodeError, did_you_mean, raised_by, short_repr
from rnnlens.results.gradients import Gradients
from rnnlens.settings import current

RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(2, 5, 3))
GATES = RNG.random((2, 5, 4, 3))
JACOBIAN = RNG.normal(size=(2, 5, 2, 5, 3))
WEIGHTS = {
    "kernel": RNG.normal(size=(3, 4, 2)),
    "recurrent_kernel": RNG.normal(size=(2, 4, 2)),
    "bias": RNG.normal(size=(4, 2)),
}
LAYER = xr.Dataset(
    {"hidden_grad": (("sample", "time", "unit"), STATES), "output_grad": (("sample", "unit"), STATES[:, 0])},
    attrs={"layer": "lstm"},
)
BOTH_DIRECTIONS = xr.DataArray(
    RNG.normal(size=(2, 5, 2, 3)),
    dims=("sample", "time", "direction", "unit"),
    coords={"direction": ["forward", "backward"]},
)
FIGURE_ARGUMENTS = {
    "heatmap": {"data": STATES},
    "curves": {"data": STATES},
    "histogram": {"data": STATES},
    "gradient_flow": {"trace": LAYER},
    "lag_profile": {"jacobian": JACOBIAN},
    "points": {"data": STATES[:, 0]},
    "time_jacobian": {"jacobian": JACOBIAN},
    "weight_norms": {"history": {"a/k": [1.0, 2.0], "b/k": [2.0, 3.0]}},
    "weights_heatmap": {"weights": WEIGHTS},
    "weights_histogram": {"weights": WEIGHTS},
    "before_after": {"before": STATES, "after": STATES},
    "gates": {"layer": GATES},
    "jacobian_margins": {"jacobian": JACOBIAN},
    "gates_over_time": {"layer": GATES},
    "saturation_arrows": {"before": GATES, "after": GATES},
    "input_map": {"gradient": STATES, "x": STATES},
    "unit_over_text": {"hidden": STATES, "tokens": "words"},
    "gradient_carriers": {"gradient": STATES, "losses": [1.0, 2.0]},
    "eigenvalues": {"values": STATES},
    "norm_history": {"history": {0: STATES, 1: STATES}},
    "total_and_frozen": {"total": JACOBIAN, "frozen": JACOBIAN},
    "decay_by_lag": {"decay": np.abs(STATES)},
}
DATA = {
    "bidirectional": constant(BOTH_DIRECTIONS),
    "states": constant(STATES),
    "weights": constant(WEIGHTS),
    "layer": constant(LAYER),
    "jacobian": constant(JACOBIAN),
    "gates": constant(GATES),
    "steps of one sample": lambda: xr.DataArray(STATES[0], dims=("time", "unit")),
    "one unit": lambda: xr.DataArray(STATES[:, :, 0], dims=("sample", "time")),
    "a sequence": lambda: xr.DataArray(STATES[0, :, 0], dims="time"),
    "two times": lambda: xr.DataArray(JACOBIAN[:, :, 0, :, 0], dims=("sample", "out_time", "in_time")),
    "a number": lambda: xr.DataArray(3.0),
    "other names": lambda: xr.DataArray(STATES, dims=("a", "b", "c")),
    "one name twice": lambda: xr.DataArray(np.ones((2, 2)), dims=("time", "time")),
    "missing": lambda: STATES * np.nan,
    "by name": lambda: {"x": STATES, "y": STATES},
    "zeros": lambda: STATES * 0,
    "large": lambda: STATES * 1e300,
    "tiny": lambda: STATES * 1e-320,
    "layers": lambda: {"lstm": LAYER},
    "tree": lambda: xr.DataTree.from_dict({"/a": LAYER}),
}
KEYWORDS = {
    "color": ["red", "nonsense", 3],
    "label": ["a", None],
    "cmap": ["viridis", "no", 7],
    "alpha": [0.5, "a", 5],
    "linewidth": [2, "x", -1],
    "gid": ["z"],
    "zorder": ["a", 3],
    "transform": [3],
    "vmin": [0, "a"],
    "norm": ["log", 3],
    "interpolation": ["nearest", "zzz"],
    "marker": ["o", "zz"],
    "visible": [False],
    "nothing": [1],
}
DIMENSIONS = {name: constant(name) for name in ("sample", "unit", "time", "gate", "direction")}
NEAR = {
    "keyword": {f"{name} {value}": constant({name: value}) for name, values in KEYWORDS.items() for value in values},
    "ax": {"one": lambda: Figure().subplots(), "two": lambda: Figure().subplots(2)},
    "figure": {"one": Figure, "a part": lambda: Figure().subfigures(1)},
    "dims": {
        "right": constant(("sample", "time", "unit")),
        "twice": constant(("time",) * 3),
        "others": constant(("a", "b", "c")),
    },
    "panel": DIMENSIONS | {"two": lambda: ["sample", "unit"]},
    "x": DIMENSIONS,
    "y": DIMENSIONS,
    "overlay": DIMENSIONS,
    "mask": {"all": lambda: np.ones((2, 5), bool), "none": lambda: np.zeros((2, 5), bool)},
    "samples": {"panels": constant("panels")},
    "clip_peaks": {"many": constant(10**6)},
    "title": {"no formula": constant("$\\frac{")},
}


def figures() -> list[Target]:
    """Return a target for each figure with all its arguments; ``keyword`` is one that is passed on to matplotlib."""
    targets = []
    for name, arguments in FIGURE_ARGUMENTS.items():
        function = getattr(rl.plot, name)
        argument_names = [
            p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD
        ]
        good = {argument: constant(value) for argument, value in arguments.items()}
        near = {**NEAR, **dict.fromkeys(arguments, DATA)}
        targets.append(Target(name, _with_keywords(function), good, (*argument_names, "keyword"), near))
    return targets


def _with_keywords(function):
    def drawing(keyword=None, **arguments):
        keywords = keyword if isinstance(keyword, dict) and all(isinstance(name, str) for name in keyword) else {}
        return function(**{**keywords, **arguments})

    return drawing


def others(folder) -> list[Target]:
    """Return targets that save and open files, set options, index results and save drawings."""
    array = xr.DataArray(STATES, dims=("sample", "time", "unit"), attrs={"tensor": "lstm.hidden"})
    result = Gradients({"lstm": xr.Dataset({"hidden": array})})
    picture = rl.plot.heatmap(STATES[:1])
    paths = {
        "netCDF": constant(folder / "a.nc"),
        "Zarr": constant(folder / "a.zarr"),
        "picture": constant(folder / "a.png"),
        "nowhere": constant(folder / "no" / "a.nc"),
        "a folder": constant(folder),
        "unknown": constant(folder / "a.xyz"),
        "long": constant(folder / f"{'a' * 300}.nc"),
        "device": constant("/dev/null"),
        "not to be written": constant("/proc/a.nc"),
    }
    near = {"path": paths}
    return [
        Target("drawing.save", picture.save, {"path": paths["picture"]}, ("path",), near),
        Target("result.save", result.save, {"path": paths["netCDF"]}, ("path",), near),
        Target("open", rl.open, {"path": paths["netCDF"]}, ("path", "lazy", "memory"), near),
        Target("options", _options, {}, ("memory", "progress", "certify")),
        Target("result[...]", lambda name: result[name], {"name": constant("lstm")}, ("name",)),
        Target("layer[...]", lambda name: result["lstm"][name], {"name": constant("hidden")}, ("name",)),
        Target("did_you_mean", lambda name: did_you_mean(name, ["lstm"]), {"name": constant("lstn")}, ("name",)),
    ]


def _options(**keywords):
    with rl.options(**keywords):
        return current()


@pytest.mark.linux
@pytest.mark.slow
def test_every_figure_is_drawn_or_refused_in_words():
    outcomes = run_calls(figures(), {}, 150, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > 15


@pytest.mark.linux
def test_files_options_and_results_answer_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not faults(run_calls(others(tmp_path), {}, 400, 0))
    assert current().memory == 2 * 1024**3


@pytest.mark.linux
@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_so_do_thousands(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not faults(run_calls([*figures(), *others(tmp_path)], {}, 2000, seed))


def test_a_drawing_of_two_directions_is_saved_whole_and_shows_itself(tmp_path):
    drawing = rl.plot.heatmap(BOTH_DIRECTIONS)
    drawing.save(tmp_path / "whole.png", dpi=40)
    drawing[0].figure.savefig(tmp_path / "idiom.png", dpi=40)
    saved, idiom_saved = (imread(tmp_path / f"{name}.png") for name in ("whole", "idiom"))
    assert saved.shape == idiom_saved.shape
    assert (saved[:, : saved.shape[1] // 2] < 1).any()
    assert (saved[:, saved.shape[1] // 2 :] < 1).any()
    assert drawing._repr_png_().startswith(b"\x89PNG")
    assert drawing[:1].figure is drawing.figure
    assert list(drawing) == [drawing[i] for i in range(len(drawing))]
    with pytest.raises(InputError, match="'xyz' is not supported"):
        drawing.save(tmp_path / "whole.xyz")
    with pytest.raises(FileError, match="cannot be written"):
        drawing.save(tmp_path / "nowhere" / "whole.png")


def test_points_are_coloured_by_value_where_a_map_is_given():
    (ax,) = rl.plot.points(STATES[:, 0], cmap="viridis")
    (points,) = (collection for collection in ax.collections if collection.get_gid() == "points")
    assert points.get_cmap().name == "viridis"
    np.testing.assert_array_equal(points.get_array(), STATES[:, 0].ravel())


def test_points_over_time_are_told_what_they_have_too_much():
    with pytest.raises(InputError) as caught:
        rl.plot.points(xr.DataArray(STATES, dims=("sample", "time", "unit")))
    assert str(caught.value).splitlines()[:3] == [
        "plot.points draws values without time.",
        "  got:      dimensions (sample, time, unit)",
        "  expected: no time among them",
    ]


@pytest.mark.parametrize("keyword", [{"label": "mine"}, {"gid": "mine"}])
@pytest.mark.parametrize("name", ["lag_profile", "gradient_flow", "weight_norms"])
def test_a_label_or_an_id_of_ones_own_is_used(name, keyword):
    (data,) = FIGURE_ARGUMENTS[name].values()
    axes = getattr(rl.plot, name)(data, **keyword)
    labels = [line.get_label() if "label" in keyword else line.get_gid() for ax in axes for line in ax.lines]
    assert "mine" in labels


def test_weights_may_be_named_by_numbers():
    for draw in (rl.plot.weights_histogram, rl.plot.weights_heatmap):
        (ax,) = draw({1: np.ones((3, 4))})
        assert ax.get_title() == "1"


def test_the_room_of_figures_lists_figures_only():
    assert dir(rl.plot) == sorted(rl.plot.__all__)


def test_options_can_be_entered_again_and_within_themselves():
    before = current()
    small = rl.options(memory=1000)
    for _ in range(2):
        with small:
            assert current().memory == 1000
            with rl.options(memory=7), small:
                assert current().memory == 1000
            assert current().memory == 1000
        assert current() == before


def test_a_result_is_asked_by_name():
    result = Gradients({"lstm": LAYER[[]]})
    with pytest.raises(LayerNotFoundError, match=r"Entries of the .* are found by name"):
        result[0]


def test_values_are_shown_in_few_words():
    assert short_repr(np.zeros((3, 2))) == "ndarray of shape (3, 2)"
    assert len(short_repr("x" * 10_000)) < 200
    assert len(short_repr([list(range(100))] * 100)) < 400


def test_an_error_that_cannot_be_joined_with_ours_is_ours_alone():
    with pytest.raises(UserCodeError) as caught, raised_by("Your loss"):
        raise _LastError("gone")
    assert isinstance(caught.value.__cause__, _LastError)


class _LastError(Exception):
    def __init_subclass__(cls):
        raise TypeError("final")


@pytest.mark.parametrize(
    "call",
    [
        lambda: rl.plot.input_map(STATES, x=STATES, shape=np.broadcast_to(0, (10**9, 9, 3))),
        lambda: rl.plot.heatmap(STATES, ax=np.broadcast_to(0.0, (10**9, 9, 3))),
        lambda: rl.plot.before_after(STATES, STATES, limit=1e308),
        lambda: rl.plot.gates(GATES, mask=np.broadcast_to(0.0, (10**9, 9, 3))),
    ],
    ids=["shape", "ax", "limit", "mask"],
)
def test_numbers_without_bounds_are_refused_before_they_are_read(call):
    with pytest.raises(InputError):
        call()
