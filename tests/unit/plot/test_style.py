"""``rl.plot.style``: size and type for papers, dark ground; matplotlib's settings are as before."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import rgb_to_hsv, to_rgb

import rnnlens as rl
from rnnlens.errors import InputError


@pytest.mark.parametrize(("width", "inches"), [("column", 3.4), ("page", 7.0), (5, 5.0)])
def test_a_paper_figure_has_the_width_of_the_column_and_small_type(width, inches, gradient, render):
    before = dict(mpl.rcParams)
    with rl.plot.style("paper", width=width):
        axes = rl.plot.heatmap(gradient())
    assert dict(mpl.rcParams) == before
    figure = render(axes)  # after the block: ticks are made while it is drawn
    assert figure.get_figwidth() == pytest.approx(inches)
    assert figure._suptitle.get_fontsize() == 7.0
    sizes = {label.get_fontsize() for ax in figure.axes for label in ax.get_yticklabels()}
    assert max(sizes) <= 7.0
    assert rl.plot.heatmap(gradient()).figure._suptitle.get_fontsize() == 10.0


def test_a_dark_figure_is_light_on_dark_and_its_map_is_unchanged(gradient, render):
    plain = rl.plot.heatmap(gradient()).mark(2)
    with rl.plot.style("dark"):
        dark = rl.plot.heatmap(gradient()).mark(2)
    for _ in range(2):  # a second drawing does not exchange the colours again
        figure = render(dark)
        ground = rgb_to_hsv(to_rgb(figure.get_facecolor()))[2]
        assert ground < 0.2
        inks = [figure._suptitle.get_color(), dark[0].spines["left"].get_edgecolor(), dark[0].yaxis.label.get_color()]
        inks += [label.get_color() for label in dark[0].get_yticklabels()]
        assert min(rgb_to_hsv(to_rgb(ink))[2] for ink in inks) > 0.8
    render(plain)
    np.testing.assert_array_equal(*(ax.images[0].to_rgba(ax.images[0].get_array()) for ax in (plain[0], dark[0])))


@pytest.mark.parametrize("arguments", [{"name": "papr"}, {"width": "colum"}, {"width": 0.2}, {"width": True}])
def test_unknown_styles_and_widths_are_refused_by_name(arguments):
    with pytest.raises(InputError, match=f"{next(iter(arguments))}="), rl.plot.style(**arguments):
        pass
