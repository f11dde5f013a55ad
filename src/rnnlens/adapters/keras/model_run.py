"""Runs of a Keras model: what is recorded, by the taps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..protocol import Batch, Capture, Cotangents, Outputs, Port, ReferenceRun, Run, Taps
from ..shared.registered_cells import run_with_composed
from . import losses
from . import reference_run as reference
from .capture import capture
from .dialect import dialect_of
from .inputs import by_key
from .pullback import KerasPullback, registered_weight_finder


def run(model: Any, batch: Batch, taps: Taps) -> Run:
    """Run a model once: see :meth:`rnnlens.adapters.protocol.Adapter.run`."""
    if taps.record == "ports":
        if taps.cotangents and not any(port.kind == "weight" for port in taps.wrt):
            return KerasPullback(model, batch, taps.of, taps.wrt, cotangents=taps.cotangents)

        def pull_back(of: Sequence[Port], wrt: Sequence[Port]) -> Run:
            return KerasPullback(model, batch, of, wrt, taps.cut)

        return run_with_composed(pull_back, taps.of, taps.wrt, registered_weight_finder(model))
    return _UntouchedRun(model, batch, taps) if taps.record == "nothing" else _RecordedRun(model, batch, taps)


class _RecordedRun(Run):
    """Run whose outputs, or calls with their gradients, are recorded as soon as they are read."""

    def __init__(self, model: Any, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps
        if taps.record != "outputs" or taps.needs_loss:
            self.capture: Capture = capture(model, batch, taps)

    @property
    def returned(self) -> Any:
        """Outputs as the model returned them, as arrays."""
        if self._taps.record != "outputs":
            return self.capture.outputs
        keras = dialect_of(self._model)
        return by_key(keras.tree.map_structure(keras.value_of, self.outputs.tree["outputs"]))

    @cached_property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the model, with their masks."""
        return losses.outputs_of(self._model, self._batch)


class _UntouchedRun(Run):
    """The user's model as it stands, differentiated by its engine alone, for a certificate."""

    def __init__(self, model: Any, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the model and differentiate its loss, or its outputs by their cotangents."""
        taps = self._taps
        return reference.reference_run(
            self._model, self._batch, cotangents, gradients=taps.gradients, regularised=taps.regularised
        )

    def coarsest_dtype(self) -> str:
        """Run the model; return the coarsest float dtype of its operations."""
        return reference.coarsest_dtype(self._model, self._batch)
