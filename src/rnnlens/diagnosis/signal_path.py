"""Gradient of the examined output by one input step, through the whole untouched model, and why it is 0.

State transfer and adjoint describe recurrent layers. Whether a training signal reaches an input is decided here, by the
framework's own differentiation of the user's model from the output to that input.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, Port, Taps
from ..autodiff import Cut, record_cuts
from ..errors import CertificateError, DisconnectedError, RnnlensError
from ..results.schema import to_host
from ..settings import options
from ..typing import Array
from ..verbs.gradients import gradients
from .experiment import MOST_CAPTURED, Experiment
from .layers import draw_projection, reorder_by_lag

#: Share of the largest gradient below which a gradient that then is 0 has decayed below the smallest number.
DECAYED = 1e-20
#: Root mean square of the inputs at which a saturated network is tested.
_SMALL = 1e-2
#: Size of a perturbation of all weights, by their root mean square.
_LITTLE = 1e-2
#: Largest number of lines of code that are named as causes.
_MOST_LINES = 3


@dataclass(frozen=True)
class Cause:
    """Why no gradient reaches an input: a word for it, a sentence, what to do, and the lines of code.

    ``by_recurrence``: whether a recurrence that forgets would have the same effect, since later steps are read.
    """

    code: str
    sentence: str
    remedy: str
    cuts: tuple[Cut, ...] = ()
    by_recurrence: bool = False


@dataclass(frozen=True)
class SignalPath:
    """Gradient of the examined output by the input ``lag`` steps before the examined step.

    Attributes
    ----------
    by_lag : (sample, lag)
        Norm over features of the gradient of a random projection of the output; NaN before the first step.
    lag
        The lag that is asked about.
    cause
        Why the gradient is exactly 0 at ``lag`` in every sample; None if it is not, or if it decayed on its way.
    is_saturated
        Whether the gradient is 0 because units are saturated: with small inputs it is not 0.
    gradient : (sample, time, ...)
        The gradient itself; of a model of token ids by their embedding.
    """

    by_lag: Array
    lag: int
    gradient: Array
    cause: Cause | None = None
    is_saturated: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether the gradient at the lag is exactly 0, or missing, in every sample."""
        return not np.nan_to_num(self.by_lag[:, self.lag]).any()

    @cached_property
    def share(self) -> float:
        """Gradient at the lag by the sample's largest over lags, median over samples that have a gradient."""
        peaks = np.nan_to_num(self.by_lag).max(axis=1)
        values = (self.by_lag[:, self.lag] / np.where(peaks > 0, peaks, 1.0))[peaks > 0]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else 0.0


def measure_path(experiment: Experiment, lag: int) -> SignalPath | str:
    """Differentiate the examined output by the input at ``lag``; where it is 0, find out why.

    Returns a sentence on why the model could not be differentiated, in place of the path, where it could not.
    """
    try:
        cuts: list[Cut] = []
        gradient = _gradient(experiment, lag, cuts=cuts)
    except (CertificateError, RnnlensError) as error:
        return str(error).partition("\n")[0]
    by_lag = norms_by_lag(experiment, gradient)
    path = SignalPath(by_lag, lag, gradient)
    if not path.is_zero or _has_decayed(by_lag, lag):
        return path
    responds = _responds(experiment, lag)
    constants = [cut for cut in cuts if cut.kind != "selection"]
    if not (responds and constants) and _is_saturated(experiment, lag):
        return replace(path, is_saturated=True)
    cause = _find_cause(experiment, lag, cuts, responds=responds)
    if cause.code == "unread" and _is_open_with_other_weights(experiment, lag):
        cause = Cause(
            "zero_weights",
            "Weights between it and the output are exactly 0; with these perturbed the gradient is not 0.",
            "draw weights that start at 0 at random, and check pruning and masks of weights.",
            by_recurrence=True,
        )
    return replace(path, cause=cause)


def input_gradient(experiment: Experiment) -> Array | None:
    """Return the gradient of the examined output by the input, (sample, time, ...); None if there is none."""
    try:
        return _gradient(experiment, 0)
    except Exception:  # of a model that runs forward only: the other measures hold without it
        return None


def norms_by_lag(experiment: Experiment, gradient: Array) -> Array:
    """Return the norm of the gradient of the examined output by the input, (sample, lag)."""
    norms = np.linalg.norm(gradient.reshape(*gradient.shape[:2], -1).astype(np.float64), axis=-1)
    return reorder_by_lag(norms, range(norms.shape[1])[::-1], experiment.examined_lengths[: len(norms)] - 1)


def _has_ids(experiment: Experiment) -> bool:
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    return leaf.dtype.kind != "f" and bool(experiment.embeddings)


def _gradient(experiment: Experiment, lag: int, scale: float = 1.0, cuts: list[Cut] | None = None) -> Array:
    """Return the gradient (sample, time, ...); append to ``cuts`` the lines at which that of ``lag`` ends."""
    if not _has_ids(experiment):
        return _input_gradient(experiment, lag, scale, cuts)
    gradient = _embedding_gradient(experiment)
    if cuts is not None and not np.nan_to_num(norms_by_lag(experiment, gradient)[:, lag]).any():
        _input_gradient(experiment, lag, scale, cuts)
    return gradient


def _input_gradient(experiment: Experiment, lag: int, scale: float, cuts: list[Cut] | None) -> Array:
    """Differentiate the user's model by its framework; append the lines at which the gradient of ``lag`` ends."""
    samples, model_x = experiment.samples, experiment.first_inputs
    if scale != 1.0:
        model_x = data.map_leaves(
            lambda leaf: (leaf * scale).astype(leaf.dtype) if leaf.dtype.kind == "f" else leaf, model_x
        )
    projection = draw_projection(experiment).transpose(*experiment.layout.names).values
    later_lags = range(lag)
    entries, later = (
        data.leaves_of(experiment.in_model_order(_entries_at(experiment, lags))) for lags in ([lag], later_lags)
    )

    with nullcontext() if cuts is None else record_cuts(experiment.adapter.engine) as recorder:

        def cotangents(values: Sequence[Array]) -> list[Array | None]:
            if cuts is not None and recorder is not None and not cuts:
                cuts.extend(recorder.find(data.leaves_of(model_x), entries, later))
            selected = experiment.output_index
            return [
                projection.reshape(value.shape).astype(value.dtype) if i == selected else None
                for i, value in enumerate(values)
            ]

        batch = Batch(model_x, seed=experiment.seed)
        run = experiment.adapter.run(experiment.model, batch, Taps.nothing()).reference(cotangents)
    position = samples.sequences[0]
    leaves = iter(
        np.zeros(leaf.shape) if i >= len(run.input_grads) or run.input_grads[i] is None else to_host(run.input_grads[i])
        for i, leaf in enumerate(data.leaves_of(model_x))
    )
    canonical = samples.orientation.canonical_input(data.map_leaves(lambda _: next(leaves), model_x))
    return np.asarray(data.leaves_of(canonical)[position])


def _embedding_gradient(experiment: Experiment) -> Array:
    """Differentiate the examined output by the embedded ids, (sample, time, feature); zeros without a path."""
    try:
        gradient = _output_gradient(experiment, f"{experiment.embeddings[0]}.output")
    except DisconnectedError:
        return np.zeros((min(MOST_CAPTURED, experiment.samples.count), experiment.samples.steps, 1))
    if "time" not in gradient.dims:  # of a loop over depth, whose steps are no axis of the embedding
        return np.asarray(gradient.values)
    return np.asarray(gradient.transpose("sample", "time", ...).values)


def _output_gradient(experiment: Experiment, wrt: str) -> xr.DataArray:
    """Differentiate a random projection of the examined output by one tensor of the model."""
    has_several = len(data.leaves_of(experiment.capture.outputs)) > 1
    target = f"output[{experiment.output_index}]" if has_several else "output"
    with options(certify="never"):
        gradient = gradients(
            experiment.model,
            experiment.first_inputs,
            of=target,
            reduce=draw_projection(experiment),
            wrt=wrt,
            axes=experiment.axes_of(target),
        )
    assert isinstance(gradient, xr.DataArray)
    return gradient


def _entries_at(experiment: Experiment, lags: Sequence[int]) -> Any:
    """Return masks shaped like the first inputs, samples first: True at the examined step minus one of ``lags``."""
    samples = experiment.samples
    last_steps = experiment.examined_lengths[:MOST_CAPTURED] - 1
    is_entry = np.isin(last_steps[:, None] - np.arange(samples.steps)[None, :], list(lags))
    leaf_index = iter(range(len(data.leaves_of(samples.x))))

    def mask(leaf: Array) -> Array:
        shape = leaf[:MOST_CAPTURED].shape
        if next(leaf_index) != samples.sequences[0]:
            return np.zeros(shape, dtype=bool)
        return np.broadcast_to(is_entry.reshape(*is_entry.shape, *(1,) * (len(shape) - 2)), shape)

    return data.map_leaves(mask, samples.x)


def _responds(experiment: Experiment, lag: int) -> bool:
    """Return whether the examined output changes at all if the input at ``lag`` alone comes from another sample."""
    entries = _entries_at(experiment, [lag])
    first = data.select(experiment.samples.x, slice(MOST_CAPTURED))
    masks = iter(data.leaves_of(entries))
    exchanged = data.map_leaves(lambda leaf: np.where(next(masks), np.roll(leaf, 1, axis=0), leaf), first)
    return not np.array_equal(experiment.outputs(first), experiment.outputs(exchanged))


def _has_decayed(by_lag: Array, lag: int) -> bool:
    """Return whether the gradient shrank step by step towards 0 before the lag at which it is 0."""
    norms = np.nan_to_num(by_lag)
    peak, nearer = norms.max(), norms[:, :lag].max(axis=0)
    nonzero = nearer[nearer > 0]
    return bool(len(nonzero) and nonzero[-1] < DECAYED * peak)


def _is_saturated(experiment: Experiment, lag: int) -> bool:
    """Return whether the gradient at ``lag`` is not 0 any more if the inputs are scaled down."""
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    size = float(np.sqrt(np.mean(np.square(leaf, dtype=np.float64)))) if leaf.dtype.kind == "f" else 0.0
    if size <= _SMALL:
        return False
    by_lag = norms_by_lag(experiment, _gradient(experiment, lag, _SMALL / size))
    return bool(np.nan_to_num(by_lag[:, lag]).any())


def _is_open_with_other_weights(experiment: Experiment, lag: int) -> bool:
    """Return whether the gradient at ``lag`` is not 0 with all weights perturbed by a hundredth of their size."""
    with ExitStack() as stack:
        for layer, weights in experiment.adapter.weights(experiment.model).items():
            for key in weights.values:
                stack.enter_context(
                    experiment.adapter.perturbed_port(experiment.model, Port("weight", layer, key=key), _LITTLE)
                )
        by_lag = norms_by_lag(experiment, _gradient(experiment, lag))
    return bool(np.nan_to_num(by_lag[:, lag]).any())


def _find_cause(experiment: Experiment, lag: int, cuts: Sequence[Cut], *, responds: bool) -> Cause:
    """Name the operation, or the part of the model, by which the gradient at ``lag`` is exactly 0."""
    constants = [c for c in cuts if c.kind == "constant"] or [c for c in cuts if c.kind == "discrete"]
    chosen = [c for c in cuts if c.kind == "selection"][:_MOST_LINES]
    if responds or (constants and not chosen):
        return _constant_cause(constants[:_MOST_LINES], responds=responds)
    if chosen:
        left_out = ", then ".join(
            f"{cut.index or cut.operation} of a tensor {cut.shape} ({cut.place})" for cut in chosen
        )
        return Cause(
            "selection",
            f"Nor does its value reach the output: it is left out by {left_out}.",
            "read the step that has seen the whole input ([:, -1], or the final state), and pass the layer all steps.",
            tuple(chosen),
            by_recurrence=all(cut.passes_other and not cut.takes_input for cut in chosen),
        )
    return _structural_cause(experiment, lag)


def _constant_cause(cuts: Sequence[Cut], *, responds: bool) -> Cause:
    if not cuts:
        return Cause(
            "constant",
            "Its value reaches the output and its gradient does not: an operation in between has no gradient "
            "(stop_gradient, detach, rounding, or a kernel).",
            "remove stop_gradient or detach from the steps that should learn, or detach only between batches.",
        )
    operations = ", then ".join(f"{cut.operation} ({cut.place})" for cut in cuts)
    remedy = "remove it there, or detach only between batches."
    if any("no_grad" in cut.operation for cut in cuts):
        remedy = "run that line outside of torch.no_grad()."
    elif cuts[0].kind == "discrete":
        remedy = "use a differentiable operation there (softmax, a straight-through estimator, arXiv:1308.3432)."
    return Cause(
        "no_grad" if any("no_grad" in cut.operation for cut in cuts) else cuts[0].operation,
        f"{'Its value reaches the output and its gradient does not: it' if responds else 'The gradient'} ends at "
        f"{operations}.",
        remedy,
        tuple(cuts),
    )


def _structural_cause(experiment: Experiment, lag: int) -> Cause:
    """Name what the captured pass shows: a layer that gets fewer steps, a mask, a reset, a backward half."""
    steps = experiment.samples.steps
    position = int(experiment.examined_lengths.max()) - 1 - lag
    for call, _ in experiment.replays:
        layer_steps = int(call.input.shape[1])
        if layer_steps < steps and layer_steps > 1:
            return Cause(
                "steps",
                f"Nor does its value reach the output: layer {call.layer!r} gets {layer_steps} of the {steps} steps.",
                "pass the layer all steps.",
            )
    for call, _ in experiment.replays:
        if call.mask is not None and not to_host(call.mask)[:, position].any():
            return Cause(
                "mask",
                f"Nor does its value reach the output: layer {call.layer!r} masks that step in every sample.",
                "check the mask, and the value that it takes for padding.",
            )
        reset = None if call.reset is None else to_host(call.reset)
        if reset is not None and reset[:, position + 1 :].any(axis=1).all():
            return Cause(
                "reset",
                f"Nor does its value reach the output: the state of layer {call.layer!r} is set anew after that step.",
                "reset the state at the start of an episode only, or use longer windows.",
            )
    read = _steps_read(experiment)
    if read is not None and len(read) and len(read) <= 3 and read.max() < steps - 1:
        listing = ", ".join(map(str, read))
        return Cause(
            "step",
            f"Nor does its value reach the output, which reads only step {listing} of the last layer.",
            "read the last step ([:, -1], or return_sequences=False).",
        )
    return Cause(
        "unread",
        "Nor does its value reach the output: replacing it changes nothing.",
        "check which step of the recurrent layer the output reads, slices of the input, and masks.",
        by_recurrence=True,
    )


def _steps_read(experiment: Experiment) -> Array | None:
    """Return the steps of the last recurrent layer's output by which the examined output has a gradient."""
    call, _ = experiment.replays[-1] if experiment.replays else (None, None)
    if call is None or not call.returns_sequences or call.input.shape[1] != experiment.samples.steps:
        return None
    try:
        gradient = _output_gradient(experiment, f"{call.layer}.output")
    except RnnlensError:
        return None
    if "time" not in gradient.dims:
        return None
    return np.flatnonzero((gradient != 0).any([dim for dim in gradient.dims if dim != "time"]).values)
