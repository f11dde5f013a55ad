"""Rules for every figure: new or given Axes, input left unchanged, checked keywords, errors with a suggestion."""

import copy
import subprocess
import sys
from inspect import Parameter, signature

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tests.unit.plot.runs import make_run

import rnnlens as rl
from rnnlens.errors import InputError
from rnnlens.plot._axes import short_number


@pytest.fixture(scope="module")
def cases(
    attention,
    comparison,
    gradient,
    layer,
    weights,
    jacobian,
    diagnosis,
    fixed_points,
    initial_jacobian,
    weights_by_time,
):
    """Return, by name of the figure, its arguments, a misspelt keyword and the correction to be proposed."""
    history = {"lstm/kernel": [3.0, 2.0, 1.0], "lstm/bias": [1.0, 1.5, 2.0]}
    return {
        "curves": ([gradient()], "linewdith", "linewidth"),
        "heatmap": ([gradient()], "interpolaton", "interpolation"),
        "maps": ([np.arange(240.0).reshape(2, 5, 3, 4, 2)], "interpolaton", "interpolation"),
        "points": ([gradient().isel(time=-1)], "markr", "marker"),
        "histogram": ([gradient()], "facecolr", "facecolor"),
        "weights_heatmap": ([weights()], "cmapp", "cmap"),
        "weights_histogram": ([weights()], "edgecolr", "edgecolor"),
        "gates": ([layer()], "markr", "marker"),
        "gradient_flow": ([{"a": layer(), "b": layer()}], "linestile", "linestyle"),
        "weight_norms": ([history], "markersiz", "markersize"),
        "time_jacobian": ([jacobian()], "cmapp", "cmap"),
        "lag_profile": ([jacobian()], "linewidht", "linewidth"),
        "diagnosis": ([diagnosis()], "linewdith", "linewidth"),
        "how_far_back": ([diagnosis()], "edgecolr", "edgecolor"),
        "fixed_points": ([fixed_points()], "markr", "marker"),
        "film": ([make_run()], "edgecolr", "edgecolor"),
        "timeline": ([make_run()], "linewdith", "linewidth"),
        "jacobian_margins": ([jacobian()], "cmapp", "cmap"),
        "gates_over_time": ([layer()], "linewdith", "linewidth"),
        "saturation_arrows": ([layer(), layer()], "colr", "color"),
        "memory_lifetime": ([layer(), initial_jacobian()], "markr", "marker"),
        "weight_lags": ([weights_by_time()], "linewdith", "linewidth"),
        "input_map": ([gradient(), gradient()], "linewdith", "linewidth"),
        "unit_over_text": ([gradient(), "words"], "cmapp", "cmap"),
        "gradient_carriers": ([gradient(), [1.0, 2.0, 3.0]], "markr", "marker"),
        "eigenvalues": ([np.array([[0.5, 0.2j]])], "markr", "marker"),
        "norm_history": ([{0: gradient(), 1: gradient()}], "cmapp", "cmap"),
        "before_after": ([gradient(), gradient() * 2], "cmapp", "cmap"),
        "total_and_frozen": ([jacobian(), jacobian()], "cmapp", "cmap"),
        "hidden_attention": ([attention()], "cmapp", "cmap"),
        "trajectories": ([gradient()], "linewidht", "linewidth"),
        "scorecard": ([comparison()], "edgecolr", "edgecolor"),
        "decay_by_lag": ([abs(gradient())], "cmapp", "cmap"),
    }


FIGURES = tuple(name for name in rl.plot.__all__ if name != "style")


def test_the_cases_cover_every_figure(cases):
    assert set(cases) == set(FIGURES)


@pytest.fixture
def panel_count(name, cases):
    """Return the number of panels of the figure of this name."""
    return len(getattr(rl.plot, name)(*cases[name][0]))


@pytest.mark.parametrize("name", FIGURES)
def test_returns_axes_of_one_figure_of_its_own_and_leaves_its_input(name, cases, render):
    """Figures of read-only arrays are drawn: no input is modified, even temporarily."""
    data = cases[name][0]
    before = copy.deepcopy(data)
    for argument in data:
        for variable in arrays_of(argument):
            variable.flags.writeable = False
    axes = getattr(rl.plot, name)(*data)
    assert isinstance(axes, np.ndarray)
    assert axes.ndim == 1
    assert all(isinstance(ax, Axes) for ax in axes)
    figure = render(axes)
    assert {ax.get_figure(root=True) for ax in axes} == {figure}
    assert plt.get_fignums() == []
    for left, right in zip(data, before, strict=True):
        assert_identical(left, right)


@pytest.mark.parametrize("name", FIGURES)
def test_draws_into_a_given_figure(name, cases):
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = getattr(rl.plot, name)(*cases[name][0], figure=figure)
    assert {ax.get_figure(root=True) for ax in axes} == {figure}


@pytest.mark.product
@pytest.mark.parametrize("name", FIGURES)
def test_draws_into_a_subfigure_beside_other_things(name, cases):
    figure = Figure(figsize=(14, 7), layout="constrained")
    left, right = figure.subfigures(1, 2)
    left.subplots().plot([1, 2])
    axes = getattr(rl.plot, name)(*cases[name][0], figure=right)
    figure.draw_without_rendering()
    assert {ax.figure for ax in axes} == {right}


@pytest.mark.parametrize("name", FIGURES)
def test_draws_into_given_axes(name, cases, panel_count):
    figure = Figure(figsize=(12, 9), layout="constrained")
    panel_axes = figure.subplots(-(-panel_count // 4), min(panel_count, 4), squeeze=False).reshape(-1)[:panel_count]
    axes = getattr(rl.plot, name)(*cases[name][0], ax=panel_axes[0] if panel_count == 1 else panel_axes)
    assert list(axes) == list(panel_axes)
    assert all(ax.has_data() for ax in axes)


@pytest.mark.parametrize("name", FIGURES)
def test_wrong_number_of_axes_is_one_clear_error(name, cases, panel_count):
    too_many_axes = list(Figure().subplots(1, panel_count + 1))
    with pytest.raises(InputError) as caught:
        getattr(rl.plot, name)(*cases[name][0], ax=too_many_axes)
    assert str(caught.value) == (
        f"plot.{name} needs one Axes per panel in ax=.\n"
        f"  got:      {panel_count + 1} of type Axes\n"
        f"  expected: {panel_count} matplotlib Axes\n"
        "  try:      pass figure= (a Figure or SubFigure) and let the panels be made, or select fewer panels"
    )


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_is_none_is_refused(name, cases):
    with pytest.raises(InputError, match="figure= that is none"):
        getattr(rl.plot, name)(*cases[name][0], figure="fig.png")


@pytest.mark.parametrize("name", FIGURES)
def test_misspelt_matplotlib_keyword_is_refused_with_the_right_one(name, cases):
    data, misspelt, proposed = cases[name]
    with pytest.raises(InputError) as caught:
        getattr(rl.plot, name)(*data, **{misspelt: 1})
    assert f"got:      {misspelt}=" in str(caught.value)
    assert f"did you mean {proposed!r}?" in str(caught.value)


def arrays_of(result):
    if hasattr(result, "tree"):
        return [variable.values for node in result.tree.subtree for variable in node.data_vars.values()]
    if hasattr(result, "data_vars"):
        return [variable.values for variable in result.data_vars.values()]
    return [result.values] if hasattr(result, "identical") else [result] if isinstance(result, np.ndarray) else []


def assert_identical(left, right):
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_identical(left[key], right[key])
    elif hasattr(left, "tree"):
        assert left.tree.identical(right.tree)
    elif hasattr(left, "identical"):
        assert left.identical(right)
    else:
        np.testing.assert_array_equal(left, right)


@pytest.mark.product
@pytest.mark.parametrize("name", FIGURES)
def test_own_title_replaces_the_made_one_and_all_text_stays_on_the_canvas(name, cases, text_of):
    axes = getattr(rl.plot, name)(*cases[name][0], title="a title that is far longer than the figure is wide " * 5)
    assert "a title that is far longer" in text_of(axes)
    figure = axes[0].get_figure(root=True)
    figure.draw_without_rendering()
    canvas = figure.bbox.padded(1.0)
    for text in [figure._suptitle, figure._supxlabel, figure._supylabel, *(ax.title for ax in axes)]:
        if text is not None and text.get_text():
            box = text.get_window_extent()
            assert canvas.x0 <= box.x0
            assert box.x1 <= canvas.x1
            assert box.y1 <= canvas.y1


def test_a_notebook_shows_the_figure(gradient):
    assert rl.plot.curves(gradient())[0].figure._repr_png_().startswith(b"\x89PNG")


def test_importing_rnnlens_loads_no_matplotlib_and_plot_loads_no_pyplot():
    code = (
        "import sys, rnnlens as rl; assert 'matplotlib' not in sys.modules; "
        "rl.plot.curves; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("name", ["curves", "heatmap", "points", "histogram"])
def test_a_whole_layer_is_refused_and_its_variables_are_named(name, layer):
    with pytest.raises(InputError) as caught:
        getattr(rl.plot, name)(layer())
    assert str(caught.value) == (
        f"plot.{name} draws one variable.\n"
        "  got:      a whole layer with hidden_grad, output_grad, gates\n"
        "  expected: a DataArray or an array\n"
        '  try:      pass one of them, such as trace["lstm"].hidden_grad'
    )


@pytest.mark.parametrize("name", ["curves", "heatmap", "points", "histogram", "gates", "time_jacobian", "lag_profile"])
@pytest.mark.parametrize("bad", [np.array("text"), np.array([[1j]]), np.empty((0, 3)), np.zeros((1,) * 7)])
def test_what_cannot_be_drawn_is_one_clear_error(name, bad):
    with pytest.raises(InputError, match=f"plot.{name}"):
        getattr(rl.plot, name)(bad)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "bool"])
def test_every_real_dtype_is_drawn(dtype, render):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for name in ("curves", "heatmap", "histogram"):
        render(getattr(rl.plot, name)(values))
    render(rl.plot.points(values[:, -1]))


def test_torch_tensors_with_gradients_are_drawn(render):
    torch = pytest.importorskip("torch")
    render(rl.plot.heatmap(torch.ones(2, 3, 4, requires_grad=True, dtype=torch.bfloat16)))


@pytest.mark.parametrize("scale", [1e-306, 1e-320])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("heatmap", (2, 5, 3)), ("curves", (2, 5, 3)), ("points", (2, 3)), ("time_jacobian", (2, 5, 2, 5, 3))],
)
def test_the_smallest_of_numbers_have_a_logarithmic_scale(tmp_path, name, shape, scale):
    values = np.random.default_rng(0).normal(size=shape) * scale
    getattr(rl.plot, name)(values, log=True).save(tmp_path / "tiny.png", dpi=40)


class RaisesAtEverything:
    """Object that raises OSError on access to any unknown attribute."""

    def __getattr__(self, name):
        raise OSError(name)


def test_a_layer_whose_attributes_raise_is_refused(layer):
    with pytest.raises(InputError):
        rl.plot.saturation_arrows(layer(), RaisesAtEverything())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_refuses_an_object_whose_attributes_raise(name):
    required = [
        parameter
        for parameter in signature(getattr(rl.plot, name)).parameters.values()
        if parameter.default is Parameter.empty
    ]
    with pytest.raises(InputError):
        getattr(rl.plot, name)(*[RaisesAtEverything() for _ in required])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.01, "0.01"), (-0.01, "-0.01"), (1e-4, "1e-4"), (-1e-4, "-1e-4"), (100.0, "100"), (2e-7, "2e-7")],
)
def test_negative_numbers_are_written_like_positive_ones(value, expected):
    assert short_number(value) == expected
