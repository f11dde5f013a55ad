"""``rl.lyapunov``, ``rl.step_eigenvalues`` and ``rl.fixed_points``: the dynamics of one recurrent layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, CaptureRequest
from ..adapters.registry import adapter_for
from ..arguments import anything, as_numbers, checked, number, one_batch, text, whole
from ..arguments import seed as random_seed
from ..autodiff.tensors import like
from ..errors import InputError, LayerNotFoundError, ModelError, did_you_mean, has_attribute, shown
from ..measures.dynamics import find_points, iterate, lyapunov_spectrum, step_map
from ..measures.dynamics import step_eigenvalues as eigenvalues_of_steps
from ..measures.transfer import refuse_changed_states
from ..recurrence.replay import Replay
from ..results.diagnosis import FixedPoints
from ..results.schema import to_host
from ..typing import Array
from ..verbs.axes import InputCoordinates, an_axes_table
from ..verbs.request import in_turn
from ..vocabulary import SAMPLE, TIME
from .experiment import in_numpy
from .samples import Orientation, refuse_without_time

#: Largest number of step evaluations in one round of the search: starts times period.
MOST_STEPS = 2**15
#: With more states than this, starts are drawn with replacement.
_MANY = 10**6


def _numbers_or_words(name: str, value: Any) -> Any:
    """Convert arrays to numbers; return strings, mappings and results unchanged, to be checked later."""
    return value if isinstance(value, str | Mapping) or has_attribute(value, "dataset") else as_numbers(name, value)


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    count=whole(least=1),
    samples=whole(least=1),
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
        attractor.

    Raises
    ------
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Vogt et al. 2022, arXiv:2006.14123, algorithm 1. Kaplan, Yorke 1979, doi:10.1007/BFb0064319.
    """
    name, run, _ = _run(model, x, layer, samples, axes)
    width = sum(int(s.shape[-1]) for s in run.states)
    if count is not None and count > width:
        raise InputError("count= is beyond the states.", got=f"count={count}", expected=f"at most {width}")
    found = lyapunov_spectrum(run, count=count, seed=seed)
    words = {"units": "1 / step"}
    return xr.Dataset(
        {
            "exponent": ("index", found.exponents, {"long_name": "Lyapunov exponent", **words}),
            "stderr": ("index", found.stderr, {"long_name": "standard error", **words}),
            "kaplan_yorke": ((), found.kaplan_yorke, {"long_name": "Kaplan-Yorke dimension", "units": "1"}),
        },
        attrs={"layer": name, "steps": int(run.input.shape[1]), "samples": int(run.input.shape[0])},
    )


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    steps=whole(least=1),
    samples=whole(least=1),
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
    with eigenvalues near the unit circle are kept, near 0 forgotten, and outside amplified.

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
        ``eigenvalue_real`` and ``eigenvalue_imag`` (sample, time, mode), largest modulus first.

    Raises
    ------
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, section 2.1.
    """
    name, run, labels = _run(model, x, layer, samples, axes)
    length = int(run.input.shape[1])
    chosen = sorted({round(step) for step in np.linspace(length - 1, 0, min(steps, length))})
    values = eigenvalues_of_steps(run, chosen)
    coords: dict[str, Any] = {"time": ("time", chosen, {"long_name": "time step"})}
    if (of_steps := labels[TIME]) is not None:
        coords["time"] = of_steps[chosen]
    if (of_samples := labels[SAMPLE]) is not None:
        coords["sample"] = of_samples[:samples]
    dims, words = ("sample", "time", "mode"), {"units": "1"}
    return xr.Dataset(
        {
            "eigenvalue_real": (dims, values.real, {"long_name": "real part of the eigenvalue", **words}),
            "eigenvalue_imag": (dims, values.imag, {"long_name": "imaginary part of the eigenvalue", **words}),
        },
        coords=coords,
        attrs={"layer": name, "steps": length, "state_sizes": [int(s.shape[-1]) for s in run.states]},
    )


@checked(
    model=anything,
    x=one_batch,
    layer=text,
    input=_numbers_or_words,
    starts=_numbers_or_words,
    period=whole(least=1),
    most=whole(least=1),
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
        The constant input (feature,): an array, ``"mean"`` over the batch, or ``"zero"``.
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
        (lines and rings of marginal points), ``stable``, ``fixed``, ``data`` (speed, number of starts). Known cells are
        solved in float64, custom cells in the precision of the framework.

    Raises
    ------
    InputError
        If x is missing, the search is too large, or the input or the starts do not fit the layer.
    LayerNotFoundError
        If no recurrent layer has that name, or there are several and none is named.

    References
    ----------
    Sussillo, Barak 2013, doi:10.1162/NECO_a_00409; Katz, Reggia 2018, doi:10.1109/TNNLS.2017.2718528 (Newton's method).
    """
    if x is None:
        raise InputError(
            "fixed_points needs a batch to run the layer once.", got="x=None", hint="rl.fixed_points(model, x)"
        )
    if period * most > MOST_STEPS:
        got = f"period={period}, most={most}"
        raise InputError("The search is too large.", got=got, expected=f"period * most <= {MOST_STEPS}")
    name, run, _ = _run(model, x, layer, 64, axes)
    constant = _input(input, run)
    begin = _starts(starts, name, run, most, noise, seed)
    given = like(constant, run.input) if run.cell.by_framework else constant
    found = find_points(iterate(step_map(run.cell, given, xp=run.xp), period), begin, tolerance=tolerance)
    sizes = [int(s.shape[-1]) for s in run.states]
    dataset = xr.Dataset(
        {
            "states": (("point", "state"), found.states, {"long_name": "states side by side", "units": "1"}),
            "speed": ("point", found.speed, {"long_name": "|F(s) - s|^2 / 2", "units": "1"}),
            "fixed": ("point", found.fixed, {"long_name": "fixed, not merely slow", "units": "1"}),
            "stable": ("point", found.stable, {"long_name": "stable", "units": "1"}),
            "curve": ("point", found.curve, {"long_name": "curve of marginal points, -1 for none", "units": "1"}),
            "starts": ("point", found.starts, {"long_name": "starts that ended here", "units": "1"}),
            "eigenvalue_real": (("point", "mode"), found.eigenvalues.real, {"long_name": "eigenvalue", "units": "1"}),
            "eigenvalue_imag": (("point", "mode"), found.eigenvalues.imag, {"long_name": "eigenvalue", "units": "1"}),
            "eigenvector_real": (("point", "state", "mode"), found.eigenvectors.real),
            "eigenvector_imag": (("point", "state", "mode"), found.eigenvectors.imag),
            "trajectory": (("start", "state"), begin, {"long_name": "states to start from", "units": "1"}),
        },
        attrs={
            "layer": name,
            "period": period,
            "input": constant.tolist(),
            "state_sizes": sizes,
            "curves": ", ".join(found.curves),
        },
    )
    return FixedPoints({name: dataset}, provenance=adapter_for(model).provenance(model))


def _run(
    model: Any, x: Any, layer: str | None, most: int, axes: Mapping[str, Any] | None
) -> tuple[str, Replay, dict[str, Array | None]]:
    """Replay a recurrent layer on the first ``most`` samples; return its name, the replay, sample and step labels."""
    adapter = adapter_for(model)
    refuse_without_time(x, least=1)
    orientation = Orientation(adapter, model, x, axes)
    turned, _ = orientation.turned(x, None)
    few = orientation.as_given(data.map_leaves(lambda leaf: leaf[:most], turned))
    calls = adapter.capture(model, Batch(few), CaptureRequest(gradients=False, weight_grads=False)).calls
    names = list(dict.fromkeys(call.layer for call in calls))
    if not names:
        raise ModelError("No recurrent layer ran in this forward pass.", hint="rl.layers(model)")
    chosen = [call for call in calls if layer in (None, call.layer)]
    if not chosen or (layer is None and len(names) > 1):
        raise LayerNotFoundError("Which recurrent layer?", got=f"layer={layer!r}", hint=did_you_mean(str(layer), names))
    run = Replay.from_call(in_numpy(chosen[0]))
    if not all(np.isfinite(to_host(values)).all() for values in (run.input, *run.states)):
        name, hint = chosen[0].layer, "rl.find_nonfinite(model, x) finds the first one"
        raise InputError(f"The inputs or states of {name!r} are not finite.", got="NaN or infinity", hint=hint)
    refuse_changed_states(run)
    given = InputCoordinates(x, orientation.axes)
    sizes = {SAMPLE: data.len_of(turned), TIME: int(run.input.shape[1])}
    return chosen[0].layer, run, {role: given.find(role, size) for role, size in sizes.items()}


def _input(given: Any, run: Replay) -> Array:
    features = int(run.input.shape[2])
    values = np.asarray(to_host(run.input))
    if isinstance(given, str):
        if given not in ("mean", "zero"):
            raise InputError("input= is not understood.", got=repr(given), expected='"mean", "zero" or an array')
        return values.mean(axis=(0, 1)) if given == "mean" else np.zeros(features, dtype=values.dtype)
    is_array = has_attribute(given, "__array__") or has_attribute(given, "__dlpack__")
    if isinstance(given, Mapping) or not is_array:
        raise InputError("The input does not fit.", got=shown(given), expected=f"({features},) numbers")
    array = np.asarray(as_numbers("input", given), dtype=values.dtype)
    if array.shape != (features,):
        raise InputError("The input does not fit.", got=f"shape {array.shape}", expected=f"({features},)")
    if not np.isfinite(array).all():
        raise InputError("The input is not finite.", got="NaN or infinity in input=")
    return array


def _starts(starts: Any, name: str, run: Replay, most: int, noise: float, seed: int) -> Array:
    width = sum(int(s.shape[-1]) for s in run.states)
    given = run.states if starts is None else _states_of(starts, name, len(run.states))
    parts = [np.atleast_2d(np.asarray(to_host(s))) for s in given]
    shapes = ", ".join(str(part.shape) for part in parts) or "nothing"
    if sum(part.shape[-1] for part in parts) != width or len({part.shape[:-1] for part in parts}) > 1:
        raise InputError("The shape of starts differs from the states'.", got=shapes, expected=f"(start, {width})")
    lead = parts[0].shape[:-1]
    count = math.prod(lead)
    if not count:
        raise InputError("There are no starts.", got=shapes)

    def states(chosen: Array) -> Array:
        at = np.unravel_index(chosen, lead)
        return np.concatenate([part[at] for part in parts], axis=1).astype(np.float64)

    rng = np.random.default_rng(seed)
    chosen = states(rng.permutation(count)[:most] if count < _MANY else rng.integers(count, size=min(most, _MANY)))
    if not np.isfinite(chosen).all():
        raise InputError("The starts are not finite.", got="NaN or infinity among them")
    # Saddles lie between attractors, so every second start is a random point between two states.
    half, share = chosen[::2], rng.uniform(size=(len(chosen[::2]), 1))
    chosen[::2] = share * half + (1 - share) * states(rng.integers(count, size=len(half)))
    return chosen + noise * chosen.std() * rng.normal(size=chosen.shape)


def _states_of(starts: Any, name: str, count: int) -> list[Any]:
    """Return starting states of a layer, from a trace or a mapping like one; any other value as the only array."""
    if not isinstance(starts, Mapping):
        return [starts]
    node: Any = starts.get(name)
    if not has_attribute(node, "data_vars"):
        got = ", ".join(map(str, starts)) or "nothing"
        raise InputError(f"There are no states of {name!r} among the starts.", got=got, expected="a trace")
    return [node[quantity] for quantity in ("hidden", "cell") if quantity in node][:count]
