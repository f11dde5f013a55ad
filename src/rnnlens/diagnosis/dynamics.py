"""``rl.lyapunov``, ``rl.step_eigenvalues`` and ``rl.fixed_points``: the dynamics of one recurrent layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, Taps
from ..adapters.registry import adapter_for
from ..arguments import anything, as_numbers, checked, integer, number, one_batch, text
from ..arguments import seed as random_seed
from ..autodiff.tensors import converted_like
from ..errors import InputError, LayerNotFoundError, ModelError, did_you_mean, has_attribute, short_repr
from ..measures.dynamics import find_points, iterate, lyapunov_spectrum, step_map
from ..measures.dynamics import step_eigenvalues as eigenvalues_of_steps
from ..measures.transfer import refuse_changed_states
from ..recurrence.replay import Replay
from ..results.diagnosis import FixedPoints
from ..results.schema import concat_directions, to_host
from ..typing import Array
from ..verbs.axes import InputCoordinates, an_axes_table
from ..verbs.request import in_turn
from ..vocabulary import SAMPLE, TIME
from .experiment import call_in_numpy
from .samples import Orientation, refuse_without_time

#: Largest number of step evaluations in one round of the search: starts times period.
MOST_STEPS = 2**15
#: With more states than this, starts are drawn with replacement.
_MOST_PERMUTED = 10**6


def _numbers_or_text(name: str, value: Any) -> Any:
    """Convert arrays to numbers; return strings, mappings and results unchanged, to be checked later."""
    return value if isinstance(value, str | Mapping) or has_attribute(value, "dataset") else as_numbers(name, value)


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    count=integer(least=1),
    samples=integer(least=1),
    seed=random_seed,
    axes=an_axes_table,
)
@in_turn
def lyapunov(
    model: Any,
    x: Any,
    *,
    layer: str | None = None,
    count: int | None = None,
    samples: int = 16,
    seed: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Compute the finite-time Lyapunov spectrum of a recurrent layer along its trajectories.

    The two directions of a bidirectional layer are two recurrences, and each has a spectrum.

    Parameters
    ----------
    model, x
        As for :func:`rnnlens.trace`.
    layer
        Name of the recurrent layer; the only one by default.
    count
        Number of exponents, the largest first; all by default.
    samples
        Largest number of trajectories.
    seed
        Seed of the initial directions.
    axes
        As for :func:`rnnlens.trace`.

    Returns
    -------
    Dataset
        ``exponent (index,)`` in 1 / step, descending; ``stderr (index,)``; ``kaplan_yorke``, the dimension of the
        attractor. Of a bidirectional layer each has a first axis ``direction``: forward, backward.

    Raises
    ------
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Vogt et al. 2022, arXiv:2006.14123, algorithm 1. Kaplan, Yorke 1979, doi:10.1007/BFb0064319.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> spectrum = rl.lyapunov(model, x)
    >>> spectrum["exponent"].sizes["index"]
    8
    """
    name, runs, _ = _replay_layer(model, x, layer, samples, axes)
    return concat_directions([_spectrum_dataset(name, run, count, seed) for run in runs])


def _spectrum_dataset(name: str, run: Replay, count: int | None, seed: int) -> xr.Dataset:
    """Compute and label the Lyapunov spectrum of one direction of a layer."""
    state_size = sum(int(s.shape[-1]) for s in run.states)
    if count is not None and count > state_size:
        raise InputError("count= is beyond the states.", got=f"count={count}", expected=f"at most {state_size}")
    spectrum = lyapunov_spectrum(run, count=count, seed=seed)
    units = {"units": "1 / step"}
    return xr.Dataset(
        {
            "exponent": ("index", spectrum.exponents, {"long_name": "Lyapunov exponent", **units}),
            "stderr": ("index", spectrum.stderr, {"long_name": "standard error", **units}),
            "kaplan_yorke": ((), spectrum.kaplan_yorke, {"long_name": "Kaplan-Yorke dimension", "units": "1"}),
        },
        attrs={"layer": name, "steps": int(run.input.shape[1]), "samples": int(run.input.shape[0])},
    )


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    steps=integer(least=1),
    samples=integer(least=1),
    axes=an_axes_table,
)
@in_turn
def step_eigenvalues(
    model: Any,
    x: Any,
    *,
    layer: str | None = None,
    steps: int = 8,
    samples: int = 16,
    axes: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Compute the eigenvalues of a recurrent layer's step Jacobians along its trajectories.

    A_t = ds_t/ds_(t-1) maps a small change of the state, with all states of a cell concatenated, over one step. Modes
    with eigenvalues near the unit circle are kept, near 0 forgotten, and outside amplified. The two directions of a
    bidirectional layer are two recurrences, and each has its own eigenvalues.

    Parameters
    ----------
    model, x
        As for :func:`rnnlens.trace`.
    layer
        Name of the recurrent layer; the only one by default.
    steps
        Largest number of time steps; they are evenly spaced and include the last.
    samples
        Largest number of trajectories.
    axes
        As for :func:`rnnlens.trace`.

    Returns
    -------
    Dataset
        ``eigenvalue_real`` and ``eigenvalue_imag`` (sample, time, mode), largest modulus first. Of a bidirectional
        layer both have a first axis ``direction``: forward, backward.

    Raises
    ------
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, section 2.1.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> eigenvalues = rl.step_eigenvalues(model, x)
    >>> eigenvalues.sizes["time"]  # from each state to the next
    8
    """
    name, runs, labels = _replay_layer(model, x, layer, samples, axes)
    length = int(runs[0].input.shape[1])
    step_indices = sorted({round(step) for step in np.linspace(length - 1, 0, min(steps, length))})
    coords: dict[str, Any] = {"time": ("time", step_indices, {"long_name": "time step"})}
    if (step_labels := labels[TIME]) is not None:
        coords["time"] = step_labels[step_indices]
    if (sample_labels := labels[SAMPLE]) is not None:
        coords["sample"] = sample_labels[:samples]
    return concat_directions([_eigenvalue_dataset(name, run, step_indices, coords) for run in runs])


def _eigenvalue_dataset(name: str, run: Replay, step_indices: list[int], coords: Mapping[str, Any]) -> xr.Dataset:
    """Compute and label the eigenvalues of the step Jacobians of one direction of a layer."""
    eigenvalues = eigenvalues_of_steps(run, step_indices)
    dims, units = ("sample", "time", "mode"), {"units": "1"}
    state_sizes = [int(s.shape[-1]) for s in run.states]
    return xr.Dataset(
        {
            "eigenvalue_real": (dims, eigenvalues.real, {"long_name": "real part of the eigenvalue", **units}),
            "eigenvalue_imag": (dims, eigenvalues.imag, {"long_name": "imaginary part of the eigenvalue", **units}),
        },
        coords=coords,
        attrs={"layer": name, "steps": int(run.input.shape[1]), "state_sizes": state_sizes},
    )


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    input=_numbers_or_text,
    direction=text,
    starts=_numbers_or_text,
    period=integer(least=1),
    most=integer(least=1),
    noise=number(),
    tolerance=number(),
    seed=random_seed,
    axes=an_axes_table,
)
@in_turn
def fixed_points(
    model: Any,
    x: Any = None,
    *,
    layer: str | None = None,
    input: Any = "mean",
    direction: str | None = None,
    starts: Any = None,
    period: int = 1,
    most: int = 512,
    noise: float = 0.0,
    tolerance: float = 1e-3,
    seed: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> FixedPoints:
    """Find the fixed points F(s, x) = s of a recurrent layer under a constant input, and classify them.

    Parameters
    ----------
    model
        A Keras model or ``torch.nn.Module``; it is not changed.
    x
        A batch, from which starts and the mean input are taken. It is needed also if ``starts=`` is given.
    layer
        Name of the recurrent layer; the only one by default.
    input
        The constant input (feature,): an array, ``"mean"`` over the batch, or ``"zero"``. Of several (input, feature)
        the points are found for each, from the same starts, and stand one input after another.
    direction
        Half of a bidirectional layer: ``"forward"``, the default, or ``"backward"``. A note names the other one.
    starts
        States to start from (start, state), with all states of a cell concatenated, or a trace; by default the states
        along the batch. Every second start is moved to a random point between two of them, where saddles lie.
    period
        Length of cycles to find: fixed points of F applied this many times. ``period * most`` is limited to 32768.
    most
        Largest number of starts, drawn at random.
    noise
        Standard deviation of the noise added to the starts, in units of their spread.
    tolerance
        Points nearer than this, relative to the spread of the starts, count as one.
    seed
        Seed of the starts and their noise.
    axes
        As for :func:`rnnlens.trace`.

    Returns
    -------
    FixedPoints
        ``states``, ``eigenvalues``, ``eigenvectors``, ``kinds`` (stable, saddle, repeller, marginal, slow), ``curves``
        (lines and rings of marginal points, and slow ones), ``stable``, ``fixed``, ``data`` (speed, number of starts;
        in ``attrs`` the ``direction`` that was examined; of several inputs the ``input_index`` of each point). Known
        cells are solved in float64, custom cells in the precision of the framework.

    Raises
    ------
    InputError
        If x is missing, the search is too large, the layer has no such half, or input or starts do not fit the layer.
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Sussillo, Barak 2013, doi:10.1162/NECO_a_00409; Katz, Reggia 2018, doi:10.1109/TNNLS.2017.2718528 (Newton's method).

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> points = rl.fixed_points(model, x, seed=0)
    >>> points.states.sizes["state"]  # hidden and cell
    8
    """
    if x is None:
        raise InputError(
            "fixed_points needs a batch to run the layer once.", got="x=None", hint="rl.fixed_points(model, x)"
        )
    if period * most > MOST_STEPS:
        received = f"period={period}, most={most}"
        raise InputError("The search is too large.", got=received, expected=f"period * most <= {MOST_STEPS}")
    name, runs, _ = _replay_layer(model, x, layer, 64, axes)
    run, other_runs = _half(name, runs, direction)
    inputs = _constant_inputs(input, run)
    start_states = _start_states(starts, name, run, most, noise, seed)
    datasets = [_points_dataset(run, values, start_states, period, tolerance) for values in np.atleast_2d(inputs)]
    dataset = datasets[0] if inputs.ndim == 1 else _by_input(datasets, inputs)
    dataset = dataset.assign_attrs(layer=name, direction=run.order, input=inputs.tolist())
    notes = [f"The {other.order} half of {name!r} was not examined: direction={other.order!r}." for other in other_runs]
    return FixedPoints({name: dataset}, provenance=adapter_for(model).facts(model).provenance, notes=notes)


def _half(name: str, runs: list[Replay], direction: str | None) -> tuple[Replay, list[Replay]]:
    """Return the run of one direction of a layer, the first by default, and the runs of the other."""
    directions = [str(run.order) for run in runs]
    if direction is not None and direction not in directions:
        raise InputError(
            f"{name!r} has no such half.", got=f"direction={direction!r}", expected=" or ".join(directions)
        )
    run = runs[0 if direction is None else directions.index(direction)]
    return run, [other for other in runs if other is not run]


def _points_dataset(
    run: Replay, constant_input: Array, start_states: Array, period: int, tolerance: float
) -> xr.Dataset:
    """Find and label the points under one constant input."""
    framework_input = converted_like(constant_input, run.input) if run.cell.by_framework else constant_input
    points = find_points(
        iterate(step_map(run.cell, framework_input, xp=run.xp), period), start_states, tolerance=tolerance
    )
    state_sizes = [int(s.shape[-1]) for s in run.states]
    return xr.Dataset(
        {
            "states": (("point", "state"), points.states, {"long_name": "states side by side", "units": "1"}),
            "speed": ("point", points.speed, {"long_name": "|F(s) - s|^2 / 2", "units": "1"}),
            "fixed": ("point", points.fixed, {"long_name": "fixed, not merely slow", "units": "1"}),
            "stable": ("point", points.stable, {"long_name": "stable", "units": "1"}),
            "curve": ("point", points.curve, {"long_name": "curve of marginal points, -1 for none", "units": "1"}),
            "starts": ("point", points.starts, {"long_name": "starts that ended here", "units": "1"}),
            "eigenvalue_real": (("point", "mode"), points.eigenvalues.real, {"long_name": "eigenvalue", "units": "1"}),
            "eigenvalue_imag": (("point", "mode"), points.eigenvalues.imag, {"long_name": "eigenvalue", "units": "1"}),
            "eigenvector_real": (("point", "state", "mode"), points.eigenvectors.real),
            "eigenvector_imag": (("point", "state", "mode"), points.eigenvectors.imag),
            "trajectory": (("start", "state"), start_states, {"long_name": "states to start from", "units": "1"}),
        },
        attrs={
            "period": period,
            "state_sizes": state_sizes,
            "curves": ", ".join(points.curves),
        },
    )


def _by_input(datasets: list[xr.Dataset], inputs: Array) -> xr.Dataset:
    """Join the points under several inputs, one input after another, with the index of its input for each point."""
    curves = [dataset.attrs["curves"] for dataset in datasets]
    first_curves = np.cumsum([0, *(len(text.split(", ")) if text else 0 for text in curves)])
    shifted = [
        dataset.drop_vars("trajectory").assign(
            curve=dataset["curve"].where(dataset["curve"] < 0, dataset["curve"] + first_curve),
            input_index=("point", np.full(dataset.sizes["point"], i), {"long_name": "index of the input"}),
        )
        for i, (dataset, first_curve) in enumerate(zip(datasets, first_curves, strict=False))
    ]
    joined = xr.concat(shifted, dim="point", combine_attrs="override")
    return joined.assign(
        trajectory=datasets[0]["trajectory"], inputs=(("input", "feature"), inputs, {"long_name": "constant inputs"})
    ).assign_attrs(curves=", ".join(text for text in curves if text))


def _replay_layer(
    model: Any, x: Any, layer: str | None, max_samples: int, axes: Mapping[str, Any] | None
) -> tuple[str, list[Replay], dict[str, Array | None]]:
    """Replay a recurrent layer on the first ``max_samples`` samples.

    Return its name, a replay of each of its directions, the forward one first, and labels of samples and steps.
    """
    adapter = adapter_for(model)
    refuse_without_time(x, least=1)
    orientation = Orientation(adapter, model, x, axes)
    ordered_x, _ = orientation.in_canonical_order(x, None)
    first_samples = orientation.as_given(data.select(ordered_x, slice(max_samples)))
    calls = adapter.run(model, Batch(first_samples), Taps.states()).capture.calls
    names = list(dict.fromkeys(call.layer for call in calls))
    if not names:
        raise ModelError("No recurrent layer ran in this forward pass.", hint="rl.layers(model)")
    layer_calls = [call for call in calls if layer in (None, call.layer)]
    if not layer_calls or (layer is None and len(names) > 1):
        raise LayerNotFoundError("Which recurrent layer?", got=f"layer={layer!r}", hint=did_you_mean(str(layer), names))
    name = layer_calls[0].layer
    runs = [Replay.from_call(call_in_numpy(call)) for call in layer_calls]
    for run in runs:
        if not all(np.isfinite(to_host(values)).all() for values in (run.input, *run.states)):
            hint = "rl.find_nonfinite(model, x) finds the first one"
            raise InputError(f"The inputs or states of {name!r} are not finite.", got="NaN or infinity", hint=hint)
        refuse_changed_states(run)
    coordinates = InputCoordinates(x, orientation.axes)
    sizes = {SAMPLE: data.sample_count(ordered_x), TIME: int(runs[0].input.shape[1])}
    return name, runs, {role: coordinates.find(role, size) for role, size in sizes.items()}


def _constant_inputs(requested: Any, run: Replay) -> Array:
    n_features = int(run.input.shape[2])
    values = np.asarray(to_host(run.input))
    if isinstance(requested, str):
        if requested not in ("mean", "zero"):
            raise InputError("input= is not understood.", got=repr(requested), expected='"mean", "zero" or an array')
        return values.mean(axis=(0, 1)) if requested == "mean" else np.zeros(n_features, dtype=values.dtype)
    is_array = has_attribute(requested, "__array__") or has_attribute(requested, "__dlpack__")
    if isinstance(requested, Mapping) or not is_array:
        raise InputError("The input does not fit.", got=short_repr(requested), expected=f"({n_features},) numbers")
    array = np.asarray(as_numbers("input", requested), dtype=values.dtype)
    if array.ndim not in (1, 2) or array.shape[-1] != n_features or not len(array):
        expected = f"({n_features},), or (input, {n_features}) for several"
        raise InputError("The input does not fit.", got=f"shape {array.shape}", expected=expected)
    if not np.isfinite(array).all():
        raise InputError("The input is not finite.", got="NaN or infinity in input=")
    return array


def _start_states(starts: Any, name: str, run: Replay, max_starts: int, noise: float, seed: int) -> Array:
    state_size = sum(int(s.shape[-1]) for s in run.states)
    arrays_given = run.states if starts is None else _states_from_trace(starts, name, run)
    arrays = [np.atleast_2d(np.asarray(to_host(s))) for s in arrays_given]
    shapes = ", ".join(str(array.shape) for array in arrays) or "nothing"
    if sum(array.shape[-1] for array in arrays) != state_size or len({array.shape[:-1] for array in arrays}) > 1:
        raise InputError("The shape of starts differs from the states'.", got=shapes, expected=f"(start, {state_size})")
    sample_shape = arrays[0].shape[:-1]
    count = math.prod(sample_shape)
    if not count:
        raise InputError("There are no starts.", got=shapes)

    def states(indices: Array) -> Array:
        positions = np.unravel_index(indices, sample_shape)
        return np.concatenate([array[positions] for array in arrays], axis=1).astype(np.float64)

    rng = np.random.default_rng(seed)
    start_states = states(
        rng.permutation(count)[:max_starts]
        if count < _MOST_PERMUTED
        else rng.integers(count, size=min(max_starts, _MOST_PERMUTED))
    )
    if not np.isfinite(start_states).all():
        raise InputError("The starts are not finite.", got="NaN or infinity among them")
    # Saddles lie between attractors, so every second start is a random point between two states.
    moved_states, fraction = start_states[::2], rng.uniform(size=(len(start_states[::2]), 1))
    start_states[::2] = fraction * moved_states + (1 - fraction) * states(rng.integers(count, size=len(moved_states)))
    return start_states + noise * start_states.std() * rng.normal(size=start_states.shape)


def _states_from_trace(starts: Any, name: str, run: Replay) -> list[Any]:
    """Return starting states of a layer, from a trace or a mapping like one; any other value as the only array."""
    if not isinstance(starts, Mapping):
        return [starts]
    layer_result: Any = starts.get(name)
    dataset = getattr(layer_result, "dataset", layer_result)
    names = run.cell.state_names
    if not isinstance(dataset, xr.Dataset) or not all(state in dataset for state in names):
        received = ", ".join(map(str, starts if not isinstance(dataset, xr.Dataset) else dataset.data_vars))
        message = f"There are no states of {name!r} among the starts."
        raise InputError(message, got=received or "nothing", expected=f"a trace with {' and '.join(names)}")
    if "direction" in dataset.dims:
        dataset = dataset.sel(direction=run.order)
    return [dataset[state] for state in names]
