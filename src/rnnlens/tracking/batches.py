"""``Batch`` and ``TrainedBatch``: a batch of training with captured or recomputed layer quantities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from ..adapters.registry import adapter_for
from ..results.gradients import Gradients, Weights
from ..results.nonfinite import NonFinite
from ..results.schema import labelled_layer
from ..results.trace import Trace
from ..settings import options
from ..verbs.find_nonfinite import find_nonfinite
from ..verbs.gradients import gradients
from ..verbs.trace import trace
from ..verbs.weights import weights
from .records import TrainingRecord, norms_of_weights, summary, summary_quantities
from .watch_arguments import names_tuple
from .weight_updates import trained_shares

#: Quantities captured in the training step, without a replay.
DIRECT = frozenset({"output", "output_grad", "final_state_grad"})


class Batch(ABC):
    """One batch of training before its update: ``batch["lstm"].output_grad`` and all quantities of ``rl.trace``.

    Attributes
    ----------
    step, epoch
        Number of the batch in this training, and its epoch.
    notes
        Sentences on how to read the numbers.
    """

    step: int
    epoch: int
    notes: list[str]

    @property
    @abstractmethod
    def direct(self) -> Trace | None:
        """Outputs and direct gradients captured in the training step; None where none were captured."""

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """States, gates, direct and total gradients of the batch."""

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """Weights before the update by gate and direction, and their gradients."""

    @abstractmethod
    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """Return a trace like :attr:`trace`, restricted to some layers and quantities."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers in the trace of the batch."""
        return list(self.trace)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True  # __len__ would compute the trace

    def __contains__(self, name: object) -> bool:
        return name in self.layers or name in self.trace

    def __getitem__(self, name: str) -> LayerOfBatch:
        return LayerOfBatch(self, name)


class LayerOfBatch:
    """One layer of a :class:`Batch`; a variable that was not captured is computed on access."""

    def __init__(self, batch: Batch, name: str) -> None:
        self._batch, self.name = batch, name

    def __getattr__(self, name: str) -> xr.DataArray:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> xr.DataArray:
        direct = self._batch.direct
        if direct is not None and name in DIRECT and self.name in direct and name in direct[self.name]:
            return direct[self.name][name]
        return self._batch.trace[self.name][name]

    def __repr__(self) -> str:
        return repr(self._batch.trace[self.name])


T = TypeVar("T")


class TrainedBatch(Batch):
    """One batch of training: ``batch["lstm"].output_grad``. Quantities are computed on first access and cached.

    The model is run again on the batch in training mode, with its variables of before the step (weights, statistics,
    states, random generators of dropout), so that dropout masks are the same. Afterwards the new weights are restored.

    Attributes
    ----------
    step, epoch
        Number of the batch in this training, and its epoch.
    x, y, sample_weight
        Data of the step; class weights are included in the sample weights.
    notes
        Sentences on how to read the numbers: gradient accumulation, available batches.
    """

    def __init__(
        self,
        model: Any,
        data: tuple[Any, Any, Any],
        step_and_epoch: tuple[int, int],
        variables_before: Callable[[], AbstractContextManager[None]],
        *,
        loss: str | Callable[..., Any] | None = None,
        notes: Sequence[str] = (),
        direct: Trace | None = None,
    ) -> None:
        self.x, self.y, self.sample_weight = data
        self.step, self.epoch = step_and_epoch
        self.notes = list(notes)
        self._model, self._variables_before, self._loss, self._direct = model, variables_before, loss, direct

    @property
    def direct(self) -> Trace | None:
        """Captured outputs and direct gradients of the layers of ``direct=``; None where none were captured."""
        return self._direct

    @cached_property
    def trace(self) -> Trace:
        """Result of :func:`rnnlens.trace`: direct gradients (``output_grad``), total ones (``hidden_grad``), gates."""
        return self.traced()

    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """Return a trace of some layers and quantities; captured quantities are not recomputed."""
        direct, layer_names, names = self._direct, names_tuple(layers) or (), names_tuple(quantities) or ()
        if (
            direct is not None
            and layer_names
            and names
            and set(layer_names) <= set(direct)
            and set(names) <= set(direct.quantities or ())
        ):
            return Trace(
                {layer: direct.dataset(layer)[list(names)] for layer in layer_names},
                loss=direct.loss,
                quantities=sorted(names),
                provenance=direct.provenance,
                notes=direct.notes,
            )
        return self._call_verb(trace, layers=layers, quantities=quantities)  # type: ignore[no-any-return]

    @cached_property
    def weights(self) -> Weights:
        """Weights before the update by gate and direction, and their gradients: see :func:`rnnlens.weights`."""
        return self._call_verb(weights)  # type: ignore[no-any-return]

    @cached_property
    def gradients(self) -> Gradients:
        """Gradients of the loss with respect to all weights before clipping.

        ``.clipped`` has the gradients after the optimizer's clipping.

        Both are gradients of the unscaled loss of this batch alone.
        """
        has_clipping = adapter_for(self._model).facts(self._model).clipping is not None
        return self.differentiated(clip="optimizer" if has_clipping else None)  # type: ignore[no-any-return]

    @cached_property
    def nonfinite(self) -> NonFinite:
        """First number that was not finite in this step: see :func:`rnnlens.find_nonfinite`."""
        return self._call_verb(find_nonfinite)  # type: ignore[no-any-return]

    def with_variables_before(self, function: Callable[[], T]) -> T:
        """Call ``function`` while the model temporarily has its variables from before the update; return its result."""
        with self._variables_before():
            return function()

    def differentiated(self, *, wrt: str | Sequence[str] = "weights", **arguments: Any) -> Any:
        """Call :func:`rnnlens.gradients` on this batch.

        Accepts ``wrt``, ``of``, ``at``, ``reduce``, ``measure``, ``clip``.
        """
        return self._call_verb(gradients, wrt=wrt, **arguments)

    def _call_verb(self, verb: Callable[..., Any], **arguments: Any) -> Any:
        """Call a verb of rnnlens on this batch, with the weights and random states from before the update."""
        with options(certify="first"), self._variables_before():
            return verb(
                self._model,
                self.x,
                self.y,
                loss=self._loss,
                sample_weight=self.sample_weight,
                training=True,
                seed=None,
                **arguments,
            )

    def record(self, *, layers: Sequence[str] | None = None, keep: Sequence[str] = ()) -> TrainingRecord:
        """Build the record of this batch: scalars, profiles, and weight gradient norms before and after clipping."""
        has_loss = self.y is not None or self._loss is not None
        batch_trace = self.traced(layers=layers, quantities=None if keep else summary_quantities(has_loss))
        scalars, profiles = summary(batch_trace, keep=keep)
        scalars |= _gradient_norms(self.gradients, list(batch_trace))
        with self._variables_before():
            scalars |= norms_of_weights(self._model, list(batch_trace))
            scalars |= trained_shares(self._model, list(batch_trace))
        notes = (*self.notes, *batch_trace.notes)
        return TrainingRecord(self.step, self.epoch, "batch", scalars, profiles, notes)

    def __repr__(self) -> str:
        computed_names = [name for name in ("trace", "weights", "gradients") if name in vars(self)]
        lines = [f"<rnnlens TrainedBatch> step {self.step}, epoch {self.epoch}"]
        lines += [f"  computed  {', '.join(computed_names) or 'nothing yet: .trace, .weights, .gradients'}"]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])


def direct_trace(model: Any, arrays: Mapping[str, Mapping[str, Any]], loss: float | None) -> Trace | None:
    """Build a trace from ``output`` and ``output_grad`` of layers by name, captured in a step; None without any."""
    if not arrays:
        return None
    adapter = adapter_for(model)
    infos, provenance = {info.name: info for info in adapter.known_layers(model)}, adapter.facts(model).provenance
    datasets = {
        name: labelled_layer(layer_arrays, info=infos[name], provenance=provenance)
        for name, layer_arrays in arrays.items()
    }
    note = "Recorded in the training step itself, without a second pass."
    return Trace(datasets, loss=loss, quantities=["output", "output_grad"], provenance=provenance, notes=[note])


def _gradient_norms(weight_gradients: Gradients, layers: Sequence[str]) -> dict[str, float]:
    """Return the norm of all weight gradients, before and after clipping, and of each weight of ``layers``."""

    def norm(tensors: Gradients, names: Sequence[str]) -> float:
        squares = [float(np.sum(np.asarray(tensors[name].values, dtype=np.float64) ** 2)) for name in names]
        return float(np.sqrt(sum(squares)))

    scalars = {"grad_norm": norm(weight_gradients, weight_gradients.tensors)}
    if weight_gradients.clipped is not None:
        scalars["grad_norm_clipped"] = norm(weight_gradients.clipped, weight_gradients.clipped.tensors)
    for name in weight_gradients.tensors:
        layer, _, weight = name.rpartition("/")
        if layer in layers:
            scalars[f"{layer}/weight_grad_norm/{weight}"] = norm(weight_gradients, [name])
    return scalars
