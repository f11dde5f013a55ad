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
from ...verbs.weight_layout import label_cell, label_plain, outside_cells, weights_of_layer
from ...vocabulary import DIRECTION, SAMPLE, TIME, UNIT
from ..batches import DIRECT, Batch
from ..records import TrainingRecord, missing_quantities, norms_of_weights, summary
from ..weight_updates import trained_shares
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
        weight_gradients: WeightGradients,
        *,
        step: int,
        scale: float = 1.0,
        passes: int = 1,
        notes: Iterable[str] = (),
    ) -> None:
        self._model = model
        self._calls = calls
        self._gradients = weight_gradients
        self.step, self.scale, self.passes = step, scale, passes
        self.loss: float | None = None
        self.epoch = 0
        self.counted_weights: frozenset[int] | None = None
        self.notes = [*notes]
        if passes > 1:
            self.notes.append(
                f"Weight gradients are accumulated over {passes} backward passes; states and gradients are those of "
                "the last."
            )
        if any(len(call.backward_ids) > 1 for call in calls):
            self.notes.append("Several backward passes went through this forward; gradients are their sum.")
        if scale != 1.0:
            self.notes.append(f"The loss was scaled by {scale:g}; the gradients are divided by it.")

    @cached_property
    def direct(self) -> Trace:
        """Outputs and direct gradients captured in the training step, as a trace."""
        adapter, selection = adapter_for(self._model), TraceSelection.of(None, DIRECT, True)
        provenance = adapter.facts(self._model).provenance
        infos = {info.name: info for info in adapter.known_layers(self._model)}
        capture = Capture(direct_calls(self._calls, self.scale))
        datasets, _ = recurrent_datasets(infos, capture, selection, provenance, None)
        return Trace(datasets, loss=self.loss, quantities=sorted(DIRECT), provenance=provenance, notes=self.notes)

    @property
    def has_calls(self) -> bool:
        """Whether any recurrent layer of the step can be recorded; :attr:`notes` names those that cannot."""
        return bool(self._calls)

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
            If the calls cannot be replayed: dropout between stacked layers on a GPU, a subclass with its own forward,
            or no layer that batch mode records.
        """
        return self.traced()

    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """Return a trace like :attr:`trace`, restricted to some layers and quantities."""
        if not self.has_calls:
            raise UnsupportedError(
                f"No layer of batch {self.step} was recorded.",
                got=" ".join(self.notes),
                hint="rl.torch.watch(model, probe=(x, y), loss=...)",
            )
        replay = CallReplay(self._calls, self.scale)
        with options(certify="never"):
            replayed_trace = trace(
                replay, np.zeros((1, 1)), loss=replay.loss, training=True, layers=layers, quantities=quantities
            )
        return Trace(
            {name: replayed_trace.dataset(name) for name in replayed_trace},
            loss=self.loss,
            quantities=replayed_trace.quantities,
            provenance=adapter_for(self._model).facts(self._model).provenance,
            notes=[*replayed_trace.notes, *self.notes],
            checks=[*replayed_trace.checks, Check("training step", "all layers", replay.deviation, replay.allowed)],
        )

    @cached_property
    def weights(self) -> Weights:
        """Weights of the recurrent layers before the update, and the gradients of this batch: ``kernel_grad``.

        ``kernel_grad_accumulated`` includes earlier backward passes, ``kernel_grad_applied`` is the gradient passed to
        the optimizer after clipping. All are divided by the loss scale.
        """
        adapter = adapter_for(self._model)
        provenance = adapter.facts(self._model).provenance
        layers_before = adapter.weights(CallReplay(self._calls))
        labelled_weights = {
            name: label_cell({direction: cell.weights() for direction, cell in layer.cells.items()}, layer.cells)
            if layer.cells
            else label_plain(outside_cells(layer))
            for name, layer in layers_before.items()
        }
        for stage, suffix in (("own", "_grad"), ("accumulated", "_grad_accumulated"), ("applied", "_grad_applied")):
            for name, by_direction in self._gradients.by_layer(stage).items():
                if name not in labelled_weights:
                    continue
                cells = layers_before[name].cells
                if set(by_direction) == set(cells):
                    labelled_weights[name] |= label_cell(by_direction, cells, suffix=suffix)
                elif not cells:  # the weights of a user's own cell
                    gradients = label_plain({f"{key}_grad": grad for key, grad in by_direction["forward"].items()})
                    labelled_weights[name] |= {
                        key.removesuffix("_grad") + suffix: value for key, value in gradients.items()
                    }
        datasets = {name: weights_of_layer(name, variables, provenance) for name, variables in labelled_weights.items()}
        return Weights(datasets, loss=self.loss, provenance=provenance, notes=self.notes)

    @property
    def clipped(self) -> bool:
        """True if the gradients passed to the optimizer differ from the accumulated ones."""
        return self._gradients.clipped()

    def norms(self) -> dict[str, float]:
        """Return norms of the counting optimizer's weight gradients before and after clipping, by scalar."""
        return self._gradients.norms(self.counted_weights)

    def weight_norms(self) -> dict[str, float]:
        """Return the norms of the recurrent weights before the update, by the name of a scalar."""
        return norms_of_weights(CallReplay(self._calls), list(self.weights))

    def trained_shares(self) -> dict[str, float]:
        """Return which share of the weights of each layer is trained, by the name of a scalar."""
        return trained_shares(self._model, self.layers)

    def __repr__(self) -> str:
        layers = ", ".join(self.layers)
        return f"<rnnlens WatchedBatch> batch {self.step}, layers {layers}; .trace and .weights have the values"


_DIRECT_PROFILE_ATTRS = {
    "long_name": "direct gradient of the layer's output by step",
    "units": "loss",
    "definition": "RMS over units and samples of the gradient of the loss by y_t",
}


def record_of(batch: WatchedBatch, plan: WatchPlan) -> TrainingRecord:
    """Build the record of a batch from its captured quantities, and from a replay if more are needed."""
    scalars, layers = direct_profiles(batch.direct)
    notes = list(batch.notes)
    if plan.is_only_direct:
        for name in layers:
            layers[name] |= {quantity: batch.direct.dataset(name)[quantity] for quantity in plan.keep}
    else:
        try:
            replayed_trace = batch.traced(layers=plan.layers, quantities=plan.recorded_quantities)
        except UnsupportedError as error:  # captured quantities are recorded in any case
            notes.append(" ".join(str(error).split()))
        else:
            notes += missing_quantities(replayed_trace, plan.keep)
            replayed_scalars, replayed_profiles = summary(replayed_trace, keep=tuple(plan.keep))
            scalars |= {**replayed_scalars, **batch.weight_norms()}
            layers = {
                name: {**layers.get(name, {}), **layer_profiles} for name, layer_profiles in replayed_profiles.items()
            }
    if batch.loss is not None:
        scalars = {"loss": batch.loss, **scalars}
    scalars |= {**batch.norms(), **batch.trained_shares(), "backward_passes": float(batch.passes)}
    return TrainingRecord(batch.step, batch.epoch, "batch", scalars, layers, tuple(notes))


def direct_profiles(direct_trace: Trace) -> tuple[dict[str, float], dict[str, dict[str, xr.DataArray]]]:
    """Return the RMS of direct gradients per layer as ``lstm/direct``, and per step as ``direct_profile``."""
    scalars: dict[str, float] = {}
    layers: dict[str, dict[str, xr.DataArray]] = {}
    for name in direct_trace:
        layers[name] = {}
        grad: Any = direct_trace.dataset(name).get("output_grad")
        if grad is None:
            continue
        grad_float64 = grad.astype(np.float64)  # squares of float32 vanish below 1e-22
        mean_square: Any = (grad_float64 * grad_float64).mean([dim for dim in (SAMPLE, UNIT) if dim in grad.dims])
        directions = (
            [None] if DIRECTION not in mean_square.dims else [str(label) for label in mean_square[DIRECTION].values]
        )
        for direction in directions:
            direction_square = mean_square if direction is None else mean_square.sel({DIRECTION: direction})
            prefix = name if direction is None else f"{name}/{direction}"
            scalars[f"{prefix}/direct"] = float(np.sqrt(direction_square.mean()))
        if TIME in grad.dims:
            layers[name]["direct_profile"] = np.sqrt(mean_square).assign_attrs(_DIRECT_PROFILE_ATTRS)
    return scalars, layers
