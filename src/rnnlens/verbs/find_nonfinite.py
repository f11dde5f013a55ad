"""``rl.find_nonfinite``: locate the first value that is not finite by layer, gate, step and sample, and its source.

The backward pass is searched here: output gradients, layers from top to bottom, steps from last to first, weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from .. import arguments as check
from ..adapters.protocol import NOT_LOOKED_INTO, Batch, Port
from ..adapters.registry import adapter_for
from ..errors import RnnlensError, UserCodeError
from ..layout import with_space
from ..recurrence.cells.cell import has_gates
from ..recurrence.nonfinite import NonfiniteValue, find_nonfinite_value, first_nonfinite_backward, magnitude_by_step
from ..recurrence.trajectory import Adjoint
from ..results.nonfinite import NonFinite, Origin
from ..results.schema import to_host
from ..typing import Array
from ..vocabulary import SAMPLE, TIME, UNIT
from .axes import an_axes_table
from .nonfinite_forward import find_output_gradient, forward_origins, loss_origins, origin_of
from .observed_run import ObservedCall, ObservedRun, find_data_origins, find_weight_origins, name_of_input
from .recurrent_layers import sweep
from .request import in_turn


def backward_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield where gradients are first not finite, layer by layer from the top, from the last step on."""
    if not has_nonfinite_gradient(observed):
        return
    output_origin = observed.attempt(lambda: find_output_gradient(observed))
    if output_origin is not None:
        yield output_origin
    layer_above, is_recurrent = "the loss", False
    for node in reversed(observed.nodes):
        for replayed in node.directions:
            yield from _recurrence_origins(replayed, _gradient_source(node.name, layer_above, is_recurrent))
        for plain_call in node.plain_calls:
            grad = None if plain_call.output_grad is None else to_host(plain_call.output_grad)
            nonfinite = (
                None
                if grad is None
                else observed.first_nonfinite(Port("output", plain_call.layer), "output_grad", grad)
            )
            if nonfinite is not None and grad is not None:
                cause = _gradient_source(plain_call.layer, layer_above, is_recurrent)
                output = to_host(plain_call.output)
                if output.shape == grad.shape:
                    position = tuple(np.argwhere(~np.isfinite(grad))[0])
                    cause += f", where the output is {float(output[position]):.3g}"
                yield Origin(
                    "backward", plain_call.layer, "output_grad", nonfinite.value, nonfinite.index, fed_by=cause
                )
        for replayed in node.directions:
            yield from _weight_gradient_origins(replayed)
        layer_above, is_recurrent = node.name, bool(node.directions)
    yield from _boundary_origins(observed, _gradient_source("the input", layer_above, is_recurrent))


def _gradient_source(layer: str, layer_above: str, is_recurrent: bool) -> str:
    """Name the source of a gradient at a layer; ``is_recurrent``: the layer above is, and its gradients are finite."""
    return (
        f"the backward pass between {layer} and {layer_above}"
        if is_recurrent
        else f"the backward pass of {layer_above}"
    )


def has_nonfinite_gradient(observed: ObservedRun) -> bool:
    """Return whether any gradient of the run is not finite."""
    capture = observed.capture
    tensors: list[Any] = [*capture.input_grads, *capture.outside_weight_grads.values()]
    for call in capture.calls:
        tensors += [call.output_grad, *(call.final_state_grad or ()), *(call.weight_grads or {}).values()]
    tensors += [plain_call.output_grad for plain_call in capture.other_calls]
    if any(grad is not None and not np.all(np.isfinite(to_host(grad))) for grad in tensors):
        return True
    # The replay also shows values beyond the range of half precision, and gradients between steps only.
    return any(
        _first_nonfinite_gradient(replayed) is not None for node in observed.nodes for replayed in node.directions
    )


def _sweep_call(replayed: ObservedCall) -> Adjoint | None:
    call = replayed.call
    if call.output_grad is None:
        return None
    return sweep(call, replayed.run, call.output_grad, call.final_state_grad, call.state_grad)


def _first_nonfinite_gradient(replayed: ObservedCall) -> NonfiniteValue | None:
    """Return the first non-finite gradient of one recurrence: a direct one, else one of its sweep; else None."""
    call = replayed.call
    if call.output_grad is None:
        return None
    direct_grads = {"output_grad": to_host(call.output_grad)}
    dims = with_space((SAMPLE, UNIT), call.cell.space)
    if not call.returns_sequences:
        nonfinite = find_nonfinite_value("output_grad", direct_grads.pop("output_grad"), dims, replayed.limit)
        if nonfinite is not None:
            return nonfinite
    for name, grad in zip(call.cell.state_names, call.final_state_grad or (), strict=False):
        nonfinite = find_nonfinite_value(f"final_{name}_grad", to_host(grad), dims, replayed.limit)
        if nonfinite is not None:
            return nonfinite
    swept = _sweep_call(replayed)
    return None if swept is None else first_nonfinite_backward(replayed.run, swept, direct_grads, replayed.limit)


def _recurrence_origins(replayed: ObservedCall, source: str) -> Iterator[Origin]:
    nonfinite = _first_nonfinite_gradient(replayed)
    if nonfinite is None:
        return
    if nonfinite.quantity in ("output_grad", *(f"final_{name}_grad" for name in replayed.call.cell.state_names)):
        cause = source
    else:
        cause = _next_step_text(replayed, nonfinite)
    yield replace(origin_of(replayed, nonfinite, "backward"), fed_by=cause)


def _next_step_text(replayed: ObservedCall, nonfinite: NonfiniteValue) -> str:
    """Return text on the sizes of the state gradients of the next step, and of the recurrent kernel."""
    swept, run, sample, t = _sweep_call(replayed), replayed.run, nonfinite.index[SAMPLE], nonfinite.index[TIME]
    assert swept is not None
    next_step = t + 1 if run.order == "forward" else t - 1
    parts = []
    if 0 <= next_step < run.input.shape[1]:
        for name, grad in zip(run.cell.state_names, swept.state_grads, strict=True):
            size = np.max(np.abs(to_host(grad)[sample, next_step]), initial=0.0)
            parts.append(f"{name}_grad up to {size:.3g} at step {next_step}")
    kernel = run.cell.weights().get("recurrent_kernel")
    if kernel is not None:
        parts.append(f"recurrent_kernel up to {np.max(np.abs(to_host(kernel)), initial=0.0):.3g}")
    return ", ".join(parts)


def _weight_gradient_origins(replayed: ObservedCall) -> Iterator[Origin]:
    """Yield origins of non-finite weight gradients of a recurrent layer whose adjoints are finite."""
    cell = replayed.call.cell
    for key, grad in (replayed.call.weight_grads or {}).items():
        array, dims = to_host(grad), tuple(f"axis_{i}" for i in range(len(grad.shape)))
        if key in cell.parameters:
            dims = tuple(cell.parameters[key].dims)
            gated = has_gates(cell.parameters[key])
            array = array.reshape(*array.shape[:-1], len(cell.gates), -1) if gated else array
        nonfinite = find_nonfinite_value(f"{key}_grad", array, dims, np.inf)
        if nonfinite is not None:
            cause = "a sum over samples and steps of numbers that are finite"
            yield replace(origin_of(replayed, nonfinite, "backward"), fed_by=cause)


def _boundary_origins(observed: ObservedRun, source: str) -> Iterator[Origin]:
    for i, grad in enumerate(observed.capture.input_grads):
        nonfinite = (
            None if grad is None else observed.first_nonfinite(Port("input", index=i), "input_grad", to_host(grad))
        )
        if nonfinite is not None:
            yield Origin(
                "backward", name_of_input(observed, i), "input_grad", nonfinite.value, nonfinite.index, fed_by=source
            )
    for name, grad in observed.capture.outside_weight_grads.items():
        array = None if grad is None else to_host(grad)
        nonfinite = (
            None
            if array is None
            else find_nonfinite_value("gradient", array, [f"axis_{i}" for i in range(array.ndim)], np.inf)
        )
        if nonfinite is not None:
            yield Origin(
                "backward", name, "gradient", nonfinite.value, nonfinite.index, fed_by="finite gradients at the outputs"
            )


def nonfinite_results(observed: ObservedRun) -> Mapping[str, bool]:
    """Return, for outputs, loss and gradients, whether they have non-finite values."""
    has_nonfinite = {"outputs": any(not _is_finite(array) for array in observed.returned_outputs)}
    if observed.capture.loss is not None:
        has_nonfinite["loss"] = not np.isfinite(observed.capture.loss)
        grads = [*observed.capture.input_grads, *observed.capture.outside_weight_grads.values()]
        grads += [g for call in observed.capture.calls for g in (call.weight_grads or {}).values()]
        has_nonfinite["gradients"] = any(grad is not None and not _is_finite(to_host(grad)) for grad in grads)
    return has_nonfinite


def _is_finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.all(np.isfinite(array)))


@check.checked(
    model=check.anything,
    x=check.one_batch,
    y=check.examples,
    loss=check.loss,
    sample_weight=check.plain_weights,
    class_weight=check.class_weights,
    training=check.switch,
    initial_state=check.states,
    seed=check.seed_or_none,
    axes=an_axes_table,
)
@in_turn
def find_nonfinite(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = 0,
    axes: Mapping[str, Any] | None = None,
) -> NonFinite:
    """Find the first value that is not finite, or exceeds its dtype's range, and the values it was computed from.

    The search follows the order of computation: weights and data; layers in the order of their calls, recurrent ones
    step by step (pre-activations, gates, states); outputs; loss; then the backward pass: direct gradients, adjoints
    from the last step to the first, gradients of weights. Recurrences are replayed, so that values inside fused kernels
    are found.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; it is not changed.
    x
        One batch, as the model takes it.
    y
        Target. Without it, and without a ``loss`` that needs none, only the forward pass is searched.
    loss
        Keras: ``loss(y_true, y_pred)``, a Keras loss or its name; the compiled loss by default.
        torch: ``loss(output, target)``.
    sample_weight, class_weight
        As in training.
    training
        Run in training mode, with dropout. State, statistics and random state are restored.
    initial_state
        Initial states by layer name, one (sample, unit) array each.
    seed
        Seed of random numbers such as dropout; None continues with the present state of the generators.
    axes
        Roles of the axes of a tensor, if they cannot be found out, as in :func:`rnnlens.trace`.

    Returns
    -------
    NonFinite
        False if every value is finite. Otherwise it has ``.layer .quantity .gate .step .unit .sample .value .fed_by
        .phase``, and prints as a sentence.

    Raises
    ------
    InputError, ModelError, UnsupportedError
        As :func:`rnnlens.trace`.

    Notes
    -----
    A non-finite value in the data that affects no result, such as NaN in masked padding, is only noted. Where the model
    or the loss raises an exception because of it, it is the result, and the exception is noted. A loss scale is not
    applied, as the optimizer skips steps that overflow because of it.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> x[1, 4, 0] = float("nan")
    >>> found = rl.find_nonfinite(model, x)
    >>> found.phase, found.sample, found.step
    ('data', 1, 4)
    """
    adapter = adapter_for(model)
    has_loss = y is not None or loss is not None
    batch = Batch(x, y, sample_weight, class_weight, loss, training, initial_state, seed)
    observed = ObservedRun(adapter, model, batch, has_loss, axes)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # threads of the recurrence have error states of their own
        origin, notes = _first_origin(observed)
        reached = {} if origin is None else _reached_results(observed)
        dataset = {} if origin is None else _magnitude_datasets(observed, origin)
        capture_notes = observed.attempt(lambda: observed.capture.notes) or []
    return NonFinite(
        dataset,
        origin=origin,
        reaches=tuple(name for name, is_nonfinite in reached.items() if is_nonfinite),
        looked_at=("data", "weights", "forward", *(("loss", "backward") if has_loss else ())),
        provenance=observed.facts.provenance,
        notes=[
            *notes,
            *_unclear_steps(observed, origin),
            *(note for note in capture_notes if note.startswith(NOT_LOOKED_INTO)),
        ],
    )


def _first_origin(observed: ObservedRun) -> tuple[Origin | None, list[str]]:
    """Return the origin of the first non-finite number, and notes on non-finite data that affect no result."""
    weight_origin = next(find_weight_origins(observed), None)
    if weight_origin is not None:
        return weight_origin, []
    origin = next(find_data_origins(observed), None)
    if origin is None:
        return next(_computed_origins(observed), None), []
    try:
        is_reached = any(nonfinite_results(observed).values())
    except UserCodeError as error:  # as torch's distributions do, which validate their parameters
        if not observed.runs_on_finite_data():
            raise
        return origin, [f"{str(error).splitlines()[0]} It does not with finite numbers in place of those in the data."]
    if is_reached:
        return origin, []
    note = (
        f"{origin.layer} holds {origin.value} ({origin.sentence}), which does not affect the output: it is masked, "
        "not used, or cast to an integer, as the ids of an embedding are."
    )
    return next(_computed_origins(observed), None), [note]


def _unclear_steps(observed: ObservedRun, origin: Origin | None) -> list[str]:
    """Return a note, with the ``axes=`` to type, on an input whose steps were not told from its other axes."""
    if origin is None or origin.phase != "data":
        return []
    inputs = (i for i in range(len(observed.inputs)) if name_of_input(observed, i) == origin.layer)
    choices = filter(None, map(observed.steps_to_type, inputs))
    return [f"Axes with numbers follow the steps of recurrent layers: say {text}." for text in choices]


def _reached_results(observed: ObservedRun) -> Mapping[str, bool]:
    """Return which results are not finite, or that there are none because code of the user's raises an exception."""
    try:
        return nonfinite_results(observed)
    except UserCodeError:
        return {"exception": True}
    except RnnlensError:
        return {}


def _computed_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in the order of computation: forward pass, loss, backward pass."""
    yield from forward_origins(observed)
    if observed.has_loss:
        yield from loss_origins(observed)
        yield from backward_origins(observed)


def _magnitude_datasets(observed: ObservedRun, origin: Origin) -> dict[str, xr.Dataset]:
    """Return the largest magnitude of the origin's quantity at each step of its sample, as a dataset of the layer."""
    sample = origin.index.get("sample")
    if origin.phase not in ("forward", "backward") or sample is None:
        return {}
    for node in observed.nodes:
        for replayed in node.directions:
            if node.name == origin.layer and origin.direction in ("", replayed.call.direction):
                attributes = {
                    "long_name": f"largest magnitude in {node.name} of sample {sample}",
                    "units": "1",
                    "definition": "maximum over gates and units of the pre-activations; of the state where the cell "
                    "has no gates",
                }
                magnitude = xr.Variable(("time",), magnitude_by_step(replayed.run, sample), attributes)
                return {
                    node.name: xr.Dataset({"magnitude": magnitude}, coords={"time": np.arange(magnitude.sizes["time"])})
                }
    return {}
