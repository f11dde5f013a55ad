"""Trajectories lie in the principal components of the states, on one scale, with fixed points where they are."""

import numpy as np
import pytest
import xarray as xr

import rnnlens as rl
from rnnlens.errors import InputError

RNG = np.random.default_rng(0)
STATES = np.cumsum(RNG.normal(size=(6, 9, 5)) * [3.0, 2.0, 1.0, 0.5, 0.1], axis=1)


def paths_of(axes):
    paths = []
    for collection in axes[0].collections:
        if collection.get_gid() == "trajectory":
            segments = np.array(collection.get_segments())
            paths.append(np.concatenate([segments[:, 0], segments[-1:, 1]]))
    return np.array(paths)


def artists(axes, gid):
    return axes[0].findobj(lambda artist: artist.get_gid() == gid)


def test_paths_are_the_scores_of_a_singular_value_decomposition():
    axes = rl.plot.trajectories(STATES)
    centred = STATES.reshape(-1, 5) - STATES.reshape(-1, 5).mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    scores = (left * values)[:, :2].reshape(6, 9, 2)
    paths = paths_of(axes)
    assert np.allclose(np.abs(paths), np.abs(scores), atol=1e-9)
    shares = values**2 / (values**2).sum()
    assert axes[0].get_xlabel() == f"component 1 ({shares[0]:.0%} of the variance)"
    assert axes[0].get_ylabel() == f"component 2 ({shares[1]:.0%} of the variance)"
    third = paths_of(rl.plot.trajectories(STATES, components=(3, 1)))
    assert np.allclose(np.abs(third[..., 0]), np.abs((left * values)[:, 2].reshape(6, 9)), atol=1e-9)


def test_three_components_are_seen_from_one_side():
    drawing = rl.plot.trajectories(STATES, components=(1, 2, 3), color=[0, 1] * 3, color_label="context")
    centred = STATES.reshape(-1, 5) - STATES.reshape(-1, 5).mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    scores = (left * values)[:, :3].reshape(6, 9, 3)
    coordinates = np.array([path["at"] for path in drawing.scene["paths"]]) * np.abs(scores).max() / 1000
    assert np.allclose(np.abs(coordinates), np.abs(scores), atol=np.abs(scores).max() / 1900)
    azimuth, elevation = np.deg2rad([-60.0, 30.0])  # the view that matplotlib's own three axes begin with
    turned = coordinates @ [
        [-np.sin(azimuth), -np.sin(elevation) * np.cos(azimuth)],
        [np.cos(azimuth), -np.sin(elevation) * np.sin(azimuth)],
        [0, np.cos(elevation)],
    ]
    assert np.allclose(paths_of(drawing), turned, atol=np.abs(scores).max() / 500)
    shares = values**2 / (values**2).sum()
    assert drawing.scene["labels"] == [f"component {i + 1} ({shares[i]:.0%})" for i in range(3)]
    assert drawing.scene["paths"][3]["name"] == "sample 3, context 1"
    (ax,) = drawing
    assert ax.get_aspect() == 1
    assert np.diff(ax.get_xlim()) == pytest.approx(np.diff(ax.get_ylim()))


def test_the_view_of_three_axes_is_kept_as_a_page_and_as_a_picture(tmp_path):
    basis = np.eye(5)[:, :3]
    drawing = rl.plot.trajectories(STATES, basis=basis, readout=np.eye(5)[:, :1])
    assert drawing.scene["arrows"] == [{"to": [1000, 0, 0], "name": "readout"}]
    drawing.save(tmp_path / "states.html")
    page = (tmp_path / "states.html").read_text("utf-8")
    assert "first given axis" in page
    assert "http" not in page.replace("http-equiv", "")
    drawing.save(tmp_path / "states.png")
    assert (tmp_path / "states.png").stat().st_size > 1000
    bundle = drawing._repr_mimebundle_()
    assert {"text/html", "image/png"} <= set(bundle)
    assert drawing[:0]._repr_mimebundle_() == {}
    with pytest.raises(rl.errors.FileError, match="cannot be written"):
        drawing.save(tmp_path / "no" / "states.html")


def test_long_paths_are_thinned_in_the_page_and_not_in_the_picture():
    states = np.cumsum(RNG.normal(size=(50, 900, 3)), axis=1)
    drawing = rl.plot.trajectories(states, components=(1, 2, 3))
    assert len(drawing.scene["steps"]) == 400
    assert drawing.scene["steps"][0] == 0
    assert drawing.scene["steps"][-1] == 899
    assert paths_of(drawing).shape == (50, 900, 2)


def test_fixed_points_in_three_axes(fixed_points):
    points = fixed_points()
    locations = points.data["states"].values
    states = locations.mean(axis=0) + RNG.normal(size=(4, 7, locations.shape[1]))
    drawing = rl.plot.trajectories(states, components=(1, 2, 3), fixed_points=points)
    placed = [mark for mark in drawing.scene["marks"] if "at" in mark]
    assert len(placed) == len(locations)
    assert all(len(mark["at"]) == 3 for mark in placed)


def test_the_signs_of_components_do_not_depend_on_the_order_of_samples():
    assert np.allclose(paths_of(rl.plot.trajectories(STATES[::-1]))[::-1], paths_of(rl.plot.trajectories(STATES)))


def test_steps_fade_in_and_the_last_is_marked():
    axes = rl.plot.trajectories(STATES, color=["a", "b"] * 3)
    opacity = artists(axes, "trajectory")[0].get_colors()[:, 3]
    assert (np.diff(opacity) > 0).all()
    ends = np.array([dot.get_xydata()[0] for dot in artists(axes, "last step")])
    assert np.allclose(ends, paths_of(axes)[:, -1])


def test_one_scale_and_a_component_without_variance_is_flat():
    line = np.zeros((3, 8, 4))
    line[..., 1] = np.linspace(-1, 1, 8) * [[1.0], [2.0], [3.0]]
    line[..., 2] = 1e-9 * RNG.normal(size=(3, 8))
    for states in (STATES, line):
        (ax,) = rl.plot.trajectories(states)
        assert ax.get_aspect() == 1
        assert np.diff(ax.get_xlim()) == pytest.approx(np.diff(ax.get_ylim()))
    (ax,) = rl.plot.trajectories(line)
    assert ax.get_ylabel() == "component 2 (0% of the variance)"
    assert np.ptp(paths_of([ax])[..., 1]) < 1e-6 * np.ptp(ax.get_ylim())


def test_conditions_have_colours():
    axes = rl.plot.trajectories(STATES, color=[0, 0, 1, 1, 2, 2], color_label="class")
    colours = [tuple(path.get_colors()[0, :3]) for path in artists(axes, "trajectory")]
    assert colours[::2] == colours[1::2]
    assert len(set(colours)) == 3
    legend = axes[0].get_legend()
    assert legend.get_title().get_text() == "class"
    assert [text.get_text() for text in legend.get_texts()] == ["0", "1", "2"]
    ramp = rl.plot.trajectories(STATES, color=[-0.4, -0.2, -0.1, 0.1, 0.2, 0.4])
    reds = [path.get_colors()[0, 0] for path in artists(ramp, "trajectory")]
    assert reds == sorted(reds)
    assert len(set(reds)) == 6


def test_both_states_of_an_lstm_are_joined():
    both = paths_of(rl.plot.trajectories((STATES, STATES[..., :2])))
    joined = paths_of(rl.plot.trajectories(np.concatenate([STATES, STATES[..., :2]], axis=-1)))
    assert np.array_equal(both, joined)


def test_given_axes_are_made_orthonormal():
    basis = np.zeros((5, 2))
    basis[0, 0], basis[:2, 1] = 2.0, 1.0
    centred = STATES - STATES.mean(axis=(0, 1))
    assert np.allclose(paths_of(rl.plot.trajectories(STATES, basis=basis)), centred[..., :2])


def test_fixed_points_and_readout_lie_in_the_plane_of_the_states(fixed_points):
    points = fixed_points()
    size = points.states.shape[1]
    states = RNG.normal(size=(4, 7, size))
    basis = np.eye(size)[:, :2]
    axes = rl.plot.trajectories(states, fixed_points=points, basis=basis, readout=np.eye(size)[:, 1])
    mean = states.mean(axis=(0, 1))
    kinds = np.array(points.kinds)
    for kind in set(points.kinds):
        drawn = np.concatenate([line.get_xydata() for line in artists(axes, kind)])
        assert np.allclose(drawn, (points.states.values[kinds == kind] - mean)[:, :2])
    unstable = np.isin(kinds, ("saddle", "repeller", "slow"))[:, None] & (abs(points.eigenvalues.values) > 1)
    assert len(artists(axes, "mode")) == unstable.sum() > 0
    (arrow,) = [text for text in axes[0].texts if text.get_gid() == "readout" and not text.get_text()]
    assert arrow.xy[0] == 0
    assert arrow.xy[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"color": [0, 1]}, "color= has another number of samples."),
        ({"components": (1, 1)}, "components= are two or three principal components."),
        ({"components": (1, 2, 3, 4)}, "components= are two or three principal components."),
        ({"components": (1, 9)}, "There are not as many components."),
        ({"basis": np.ones((5, 2))}, "basis= are two or three axes."),
        ({"basis": np.eye(4)[:, :2]}, "basis= has another number of states."),
        ({"readout": np.ones(3)}, "readout= has another number of states."),
        ({"fixed_points": 3}, "fixed_points= are those of one input."),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(InputError) as caught:
        rl.plot.trajectories(STATES, **options)
    assert str(caught.value).startswith(message)


def test_fixed_points_of_another_state_say_how_to_join(fixed_points):
    with pytest.raises(InputError, match="states=\\(h, c\\)"):
        rl.plot.trajectories(RNG.normal(size=(2, 3, 9)), fixed_points=fixed_points())


def test_both_directions_are_refused_with_a_selection_that_works():
    states = xr.DataArray(
        np.random.default_rng(0).normal(size=(3, 5, 2, 4)), dims=("sample", "time", "direction", "unit")
    )
    states = states.assign_coords(direction=["forward", "backward"])
    with pytest.raises(InputError) as caught:
        rl.plot.trajectories(states)
    assert "dimensions sample, time, direction, unit" in str(caught.value)
    for call in ('.sel(direction="forward")', '.stack(unit_of_both=("direction", "unit"))'):
        assert call in str(caught.value)
        axes = rl.plot.trajectories(eval(f"states{call}"))
        assert axes.figure.get_suptitle().startswith("3 trajectories of 5 steps")
    assert rl.plot.trajectories(states[:1, :1, 0]).figure.get_suptitle().startswith("1 trajectory of 1 step\n")
