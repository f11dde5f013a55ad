"""What was heard of one training step, as the results that ``rl.trace`` and ``rl.weights`` give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import Capture
from ...adapters.registry import adapter_for
from ...adapters.torch.training_replay import CallReplay, direct_calls
from ...adapters.torch.training_weights import TrainingCall, WeightGradients
from ...errors import UnsupportedError
from ...results.checks import Check
from ...results.trace import Trace
from ...results.weights import Weights
from ...settings import options
from ...verbs.trace import trace
from ...verbs.tracing.datasets import recurrent_datasets
from ...verbs.tracing.request import TraceRequest
from ...verbs.weight_layout import label_cell, node_dataset
from ...vocabulary import DIRECTION, SAMPLE, TIME, UNIT
from ..batches import DIRECT, Batch
from ..probe import norms_of_weights
from ..records import TrainingRecord, summary
from .plan import Plan


class WatchedBatch(Batch):
    """One batch as it was trained on, before the update: ``batch["lstm"].output_grad`` and all that ``rl.trace`` has.

    The direct gradients are those that the step itself computed. Everything else is found when it is first asked for,
    by a replay of the recurrent calls alone, with the weights, inputs, states and dropout of that step.

    Attributes
    ----------
    step, epoch
        It was the ``step``-th batch of this training, in ``epoch``.
    loss
        Of the batch, where the training told it.
    scale
        That a GradScaler had put on the loss; it is divided out everywhere.
    passes
        Backward passes whose gradients were accumulated for this step; the batch is the last of them.
    """

    def __init__(
        self,
        model: Any,
        calls: Sequence[TrainingCall],
        weights: WeightGradients,
        *,
        step: int,
        scale: float = 1.0,
        passes: int = 1,
        notes: Iterable[str] = (),
    ) -> None:
        self._model = model
        self._calls = calls
        self._gradients = weights
        self.step, self.scale, self.passes = step, scale, passes
        self.loss: float | None = None
        self.epoch = 0
        self.moved: frozenset[int] | None = None
        self.notes = [*notes, *_notes(self._calls, scale, passes)]

    @cached_property
    def direct(self) -> Trace:
        """Outputs and direct gradients, as the step computed them: a trace of these quantities."""
        adapter = adapter_for(self._model)
        wanted = TraceRequest.of(None, DIRECT, True)
        capture = Capture(direct_calls(self._calls, self.scale))
        provenance = adapter.provenance(self._model)
        datasets, _ = recurrent_datasets(adapter.describe(self._model), capture, wanted, provenance, None)
        return Trace(datasets, loss=self.loss, quantities=sorted(DIRECT), provenance=provenance, notes=self.notes)

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose direct gradients were heard."""
        return list(self.direct)

    @cached_property
    def trace(self) -> Trace:
        """States, gates, direct and total gradients of the batch: what ``rl.trace`` would have given in that step.

        Raises
        ------
        UnsupportedError
            Where the calls cannot be run again: dropout between stacked layers on a GPU, a subclass with a forward of
            its own.
        """
        return self.traced()

    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """As :attr:`trace`, of some layers and quantities."""
        again = CallReplay(self._calls, self.scale)
        with options(certify="never"):
            found = trace(again, np.zeros((1, 1)), loss=again.loss, training=True, layers=layers, quantities=quantities)
        return Trace(
            {name: found.dataset(name) for name in found},
            loss=self.loss,
            quantities=found.quantities,
            provenance=adapter_for(self._model).provenance(self._model),
            notes=[*found.notes, *self.notes],
            checks=[*found.checks, _as_check(again)],
        )

    @cached_property
    def weights(self) -> Weights:
        """Weights of the recurrent layers before the update, and the gradients of this batch: ``kernel_grad``.

        Also ``kernel_grad_accumulated``, with the backward passes before it, and ``kernel_grad_applied``, what the
        optimizer was given after clipping; as torch has them, any loss scale divided out.
        """
        adapter = adapter_for(self._model)
        provenance = adapter.provenance(self._model)
        before = adapter.weights(CallReplay(self._calls))
        labelled = {
            name: label_cell({side: cell.weights() for side, cell in entry.cells.items()}, entry.cells)
            for name, entry in before.items()
        }
        for which, suffix in (("own", "_grad"), ("accumulated", "_grad_accumulated"), ("applied", "_grad_applied")):
            for name, by_direction in self._gradients.by_layer(which).items():
                if name in labelled and set(by_direction) == set(before[name].cells):
                    labelled[name] |= label_cell(by_direction, before[name].cells, suffix=suffix)
        datasets = {name: node_dataset(name, variables, provenance) for name, variables in labelled.items()}
        return Weights(datasets, loss=self.loss, provenance=provenance, notes=self.notes)

    @property
    def clipped(self) -> bool:
        """Whether the optimizer was given other gradients than were accumulated."""
        return self._gradients.clipped()

    def norms(self) -> dict[str, float]:
        """Norms of the weight gradients, before and after clipping, by the name of a scalar.

        ``grad_norm`` is of the weights that the optimizer moved: what another left at those of its own is not in it.
        """
        return self._gradients.norms(self.moved)

    def weight_norms(self) -> dict[str, float]:
        """Norms of the recurrent weights before the update, by the name of a scalar."""
        return norms_of_weights(CallReplay(self._calls), list(self.weights))

    def __repr__(self) -> str:
        layers = ", ".join(self.layers)
        return f"<rnnlens WatchedBatch> batch {self.step}, layers {layers}; .trace and .weights have all"


def _as_check(again: CallReplay) -> Check:
    return Check("training step", "all layers", again.deviation, 1e-4)


def _notes(calls: Sequence[TrainingCall], scale: float, passes: int) -> list[str]:
    found = []
    if passes > 1:
        found.append(
            f"Weight gradients are accumulated over {passes} backward passes; states and gradients are of the last."
        )
    if any(len(call.backwards) > 1 for call in calls):
        found.append("Several backward passes went through this forward; gradients are their sum.")
    if scale != 1.0:
        found.append(f"The loss was scaled by {scale:g}; it is divided out.")
    return found


_WORDS = {
    "long_name": "direct gradient of the layer's output by step",
    "units": "loss",
    "definition": "RMS over units and samples of the gradient of the loss by y_t",
}


def record_of(batch: WatchedBatch, plan: Plan) -> TrainingRecord:
    """What the batch computed by itself, and the replay where more is asked for."""
    scalars, layers = direct_profiles(batch.direct)
    notes = list(batch.notes)
    if plan.only_direct:
        for name in layers:
            layers[name] |= {key: batch.direct.dataset(name)[key] for key in plan.keep}
    else:
        try:
            replayed = batch.traced(layers=plan.layers, quantities=plan.recorded)
        except UnsupportedError as error:  # what the step computed by itself is recorded all the same
            notes.append(" ".join(str(error).split()))
        else:
            more, profiles = summary(replayed, keep=tuple(plan.keep))
            scalars |= {**more, **batch.weight_norms()}
            layers = {name: {**layers.get(name, {}), **found} for name, found in profiles.items()}
    if batch.loss is not None:
        scalars = {"loss": batch.loss, **scalars}
    scalars |= {**batch.norms(), "backward_passes": float(batch.passes)}
    return TrainingRecord(batch.step, batch.epoch, "batch", scalars, layers, tuple(notes))


def direct_profiles(found: Trace) -> tuple[dict[str, float], dict[str, dict[str, xr.DataArray]]]:
    """``lstm/direct``, the RMS of all direct gradients of a layer, and ``direct_profile``, that of every step."""
    scalars: dict[str, float] = {}
    layers: dict[str, dict[str, xr.DataArray]] = {}
    for name in found:
        layers[name] = {}
        grad: Any = found.dataset(name).get("output_grad")
        if grad is None:
            continue
        wide = grad.astype(np.float64)  # squares of float32 vanish below 1e-22
        square: Any = (wide * wide).mean([dim for dim in (SAMPLE, UNIT) if dim in grad.dims])
        sides = [None] if DIRECTION not in square.dims else [str(side) for side in square[DIRECTION].values]
        for side in sides:
            half = square if side is None else square.sel({DIRECTION: side})
            prefix = name if side is None else f"{name}/{side}"
            scalars[f"{prefix}/direct"] = float(np.sqrt(half.mean()))
        if TIME in grad.dims:
            layers[name]["direct_profile"] = np.sqrt(square).assign_attrs(_WORDS)
    return scalars, layers
