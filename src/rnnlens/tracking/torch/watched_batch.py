"""``WatchedBatch``: one captured training step, as the results of ``rl.trace`` and ``rl.weights``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import Capture
from ...adapters.registry import adapter_for
from ...adapters.torch.training_calls import CallReplay, TrainingCall, direct_calls
from ...adapters.torch.training_capture import WeightGradients
from ...errors import UnsupportedError
from ...results.checks import Check
from ...results.gradients import Weights
from ...results.trace import Trace
from ...settings import options
from ...verbs.trace import trace
from ...verbs.traced_layers import TraceSelection, recurrent_datasets
from ...verbs.weight_layout import label_cell, weights_of_layer
from ...vocabulary import DIRECTION, SAMPLE, TIME, UNIT
from ..batches import DIRECT, Batch
from ..records import TrainingRecord, norms_of_weights, summary
from .plan import WatchPlan


class WatchedBatch(Batch):
    """One batch of training before its update: ``batch["lstm"].output_grad`` and all quantities of ``rl.trace``.

    Direct gradients are captured in the training step. All other quantities are computed on first access by a replay of
    the recurrent calls alone, with the weights, inputs, states and dropout of that step.

    Attributes
    ----------
    step, epoch
        Number of the batch in this training, and its epoch.
    loss
        Loss of the batch; None if the training loop did not set it.
    scale
        Loss scale of a GradScaler; all gradients are divided by it.
    passes
        Number of backward passes accumulated for this step; the batch is that of the last one.
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
        self.notes = [*notes]
        if passes > 1:
            self.notes.append(
                f"Weight gradients are accumulated over {passes} backward passes; states and gradients are those of "
                "the last."
            )
        if any(len(call.backwards) > 1 for call in calls):
            self.notes.append("Several backward passes went through this forward; gradients are their sum.")
        if scale != 1.0:
            self.notes.append(f"The loss was scaled by {scale:g}; the gradients are divided by it.")

    @cached_property
    def direct(self) -> Trace:
        """Outputs and direct gradients captured in the training step, as a trace."""
        adapter, wanted = adapter_for(self._model), TraceSelection.of(None, DIRECT, True)
        provenance = adapter.provenance(self._model)
        described = {info.name: info for info in adapter.describe(self._model)}
        capture = Capture(direct_calls(self._calls, self.scale))
        datasets, _ = recurrent_datasets(described, capture, wanted, provenance, None)
        return Trace(datasets, loss=self.loss, quantities=sorted(DIRECT), provenance=provenance, notes=self.notes)

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose direct gradients were captured."""
        return list(self.direct)

    @cached_property
    def trace(self) -> Trace:
        """States, gates, direct and total gradients of the batch, computed by a replay of the recurrent calls.

        Raises
        ------
        UnsupportedError
            If the calls cannot be replayed: dropout between stacked layers on a GPU, a subclass with its own forward.
        """
        return self.traced()

    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """Return a trace like :attr:`trace`, restricted to some layers and quantities."""
        again = CallReplay(self._calls, self.scale)
        with options(certify="never"):
            found = trace(again, np.zeros((1, 1)), loss=again.loss, training=True, layers=layers, quantities=quantities)
        return Trace(
            {name: found.dataset(name) for name in found},
            loss=self.loss,
            quantities=found.quantities,
            provenance=adapter_for(self._model).provenance(self._model),
            notes=[*found.notes, *self.notes],
            checks=[*found.checks, Check("training step", "all layers", again.deviation, again.allowed)],
        )

    @cached_property
    def weights(self) -> Weights:
        """Weights of the recurrent layers before the update, and the gradients of this batch: ``kernel_grad``.

        ``kernel_grad_accumulated`` includes earlier backward passes, ``kernel_grad_applied`` is the gradient passed to
        the optimizer after clipping. All are divided by the loss scale.
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
        datasets = {name: weights_of_layer(name, variables, provenance) for name, variables in labelled.items()}
        return Weights(datasets, loss=self.loss, provenance=provenance, notes=self.notes)

    @property
    def clipped(self) -> bool:
        """True if the gradients passed to the optimizer differ from the accumulated ones."""
        return self._gradients.clipped()

    def norms(self) -> dict[str, float]:
        """Return norms of the counting optimizer's weight gradients before and after clipping, by scalar."""
        return self._gradients.norms(self.moved)

    def weight_norms(self) -> dict[str, float]:
        """Return the norms of the recurrent weights before the update, by the name of a scalar."""
        return norms_of_weights(CallReplay(self._calls), list(self.weights))

    def __repr__(self) -> str:
        layers = ", ".join(self.layers)
        return f"<rnnlens WatchedBatch> batch {self.step}, layers {layers}; .trace and .weights have the values"


_WORDS = {
    "long_name": "direct gradient of the layer's output by step",
    "units": "loss",
    "definition": "RMS over units and samples of the gradient of the loss by y_t",
}


def record_of(batch: WatchedBatch, plan: WatchPlan) -> TrainingRecord:
    """Build the record of a batch from its captured quantities, and from a replay if more are needed."""
    scalars, layers = direct_profiles(batch.direct)
    notes = list(batch.notes)
    if plan.only_direct:
        for name in layers:
            layers[name] |= {key: batch.direct.dataset(name)[key] for key in plan.keep}
    else:
        try:
            replayed = batch.traced(layers=plan.layers, quantities=plan.recorded)
        except UnsupportedError as error:  # captured quantities are recorded in any case
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
    """Return the RMS of direct gradients per layer as ``lstm/direct``, and per step as ``direct_profile``."""
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
