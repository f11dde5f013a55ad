"""``rl.find_nonfinite``: locate the first value that is not finite by layer, gate, step and sample, and its source."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .. import arguments as check
from ..adapters.protocol import NOT_LOOKED_INTO, Batch
from ..adapters.registry import adapter_for
from ..recurrence.nonfinite import magnitude_by_step
from ..results.nonfinite import NonFinite, Origin
from .axes import an_axes_table
from .nonfinite.backward import in_the_backward_pass, reaches
from .nonfinite.forward import in_the_forward_pass, in_the_loss
from .nonfinite.observe import ObservedRun, in_the_data, in_the_weights
from .request import in_turn


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
    A non-finite value in the data that affects no result, such as NaN in masked padding, is only noted. A loss scale is
    not applied, as the optimizer skips steps that overflow because of it.
    """
    adapter = adapter_for(model)
    has_loss = y is not None or loss is not None
    batch = Batch(x, y, sample_weight, class_weight, loss, training, initial_state, seed)
    observed = ObservedRun(adapter, model, batch, has_loss, axes)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # threads of the recurrence have error states of their own
        origin, notes = _first(observed)
        reached = {} if origin is None else observed.attempt(lambda: reaches(observed)) or {}
        dataset = {} if origin is None else _way_there(observed, origin)
        captured = observed.attempt(lambda: observed.capture.notes) or []
    return NonFinite(
        dataset,
        origin=origin,
        reaches=tuple(name for name, is_sick in reached.items() if is_sick),
        looked_at=("data", "weights", "forward", *(("loss", "backward") if has_loss else ())),
        provenance=adapter.provenance(model),
        notes=[*notes, *(note for note in captured if note.startswith(NOT_LOOKED_INTO))],
    )


def _first(observed: ObservedRun) -> tuple[Origin | None, list[str]]:
    """Return the origin of the first non-finite number, and notes on non-finite data that affect no result."""
    weights = next(in_the_weights(observed), None)
    if weights is not None:
        return weights, []
    given = next(in_the_data(observed), None)
    if given is None:
        return next(_computed(observed), None), []
    if any(reaches(observed).values()):
        return given, []
    note = (
        f"{given.layer} holds {given.value} ({given.sentence}), which does not affect the output: it is masked, "
        "or not used."
    )
    return next(_computed(observed), None), [note]


def _computed(observed: ObservedRun) -> Iterator[Origin]:
    """Yield origins in the order of computation, from the forward pass on."""
    yield from in_the_forward_pass(observed)
    if observed.has_loss:
        yield from in_the_loss(observed)
        yield from in_the_backward_pass(observed)


def _way_there(observed: ObservedRun, origin: Origin) -> dict[str, xr.Dataset]:
    """Return the largest magnitude at every step of the origin's sample, as a dataset of its recurrent layer."""
    sample = origin.index.get("sample")
    if origin.phase not in ("forward", "backward") or sample is None:
        return {}
    for node in observed.nodes:
        for replayed in node.directions:
            if node.name == origin.layer and origin.direction in ("", replayed.call.direction):
                words = {
                    "long_name": f"largest magnitude in {node.name} of sample {sample}",
                    "units": "1",
                    "definition": "maximum over gates and units of the pre-activations; of the state where the cell "
                    "has no gates",
                }
                size = xr.Variable(("time",), magnitude_by_step(replayed.run, sample), words)
                return {node.name: xr.Dataset({"magnitude": size}, coords={"time": np.arange(size.sizes["time"])})}
    return {}
