"""Batch mode: the very batch that was trained on, with the weights from before its update and its own dropout masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ..adapters.registry import adapter_for
from ..results.gradients import Gradients
from ..results.nonfinite import NonFinite
from ..results.schema import layer_dataset
from ..results.trace import Trace
from ..results.weights import Weights
from ..settings import options
from ..verbs.find_nonfinite import find_nonfinite
from ..verbs.gradients import gradients
from ..verbs.trace import trace
from ..verbs.weights import weights
from .asked import listed
from .batches import Batch
from .probe import norms_of_weights, wanted
from .records import Record
from .summary import summary

T = TypeVar("T")


class TrainedBatch(Batch):
    """One batch that was trained on: ``batch["lstm"].output_grad``. What it is asked for is computed then, and kept.

    The model is run once more on the batch in training mode, with its variables as they were before the step (weights,
    statistics, states, the random generators of dropout), so that the masks are the same; afterwards it has its new
    weights back.

    Attributes
    ----------
    step, epoch
        It was the ``step``-th batch of this training, in ``epoch``.
    x, y, sample_weight
        As the step was fed them; class weights are among the sample weights.
    notes
        What a reader of the numbers must know: gradient accumulation, which batches can be had.
    """

    def __init__(
        self,
        model: Any,
        data: tuple[Any, Any, Any],
        moment: tuple[int, int],
        before: Callable[[], AbstractContextManager[None]],
        *,
        loss: str | Callable[..., Any] | None = None,
        notes: Sequence[str] = (),
        heard: Trace | None = None,
    ) -> None:
        self.x, self.y, self.sample_weight = data
        self.step, self.epoch = moment
        self.notes = list(notes)
        self._model, self._before, self._loss, self._heard = model, before, loss, heard

    @property
    def direct(self) -> Trace | None:
        """Outputs and direct gradients of the layers that ``direct=`` named, where the step told them."""
        return self._heard

    @cached_property
    def trace(self) -> Trace:
        """All of :func:`rnnlens.trace`: direct gradients (``output_grad``), total ones (``hidden_grad``), gates."""
        return self.traced()

    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """As :attr:`trace`, of some layers and quantities; what the step itself told is not computed anew."""
        told, of, names = self._heard, listed(layers) or (), listed(quantities) or ()
        if told is not None and of and names and set(of) <= set(told) and set(names) <= set(told.quantities or ()):
            return _part(told, of, names)
        return self._asked(trace, layers=layers, quantities=quantities)  # type: ignore[no-any-return]

    @cached_property
    def weights(self) -> Weights:
        """The weights before the update by gate and direction, and their gradients: see :func:`rnnlens.weights`."""
        return self._asked(weights)  # type: ignore[no-any-return]

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient of the loss with respect to every weight, before clipping; ``.clipped`` as the optimizer clips.

        Both are of the unscaled loss of this batch alone.
        """
        clips = adapter_for(self._model).facts(self._model).clipping is not None
        return self.differentiated(clip="optimizer" if clips else None)  # type: ignore[no-any-return]

    @cached_property
    def nonfinite(self) -> NonFinite:
        """The first number that was not finite in this step: see :func:`rnnlens.find_nonfinite`."""
        return self._asked(find_nonfinite)  # type: ignore[no-any-return]

    def with_variables_before(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns while the model has the variables that it had on this batch."""
        with self._before():
            return ask()

    def differentiated(self, *, wrt: str | Sequence[str] = "weights", **question: Any) -> Any:
        """:func:`rnnlens.gradients` of this batch: ``wrt``, ``of``, ``at``, ``reduce``, ``measure``, ``clip``."""
        return self._asked(gradients, wrt=wrt, **question)

    def _asked(self, verb: Callable[..., Any], **question: Any) -> Any:
        """A verb, at the weights and random numbers of the step."""
        with options(certify="first"), self._before():
            return verb(
                self._model,
                self.x,
                self.y,
                loss=self._loss,
                sample_weight=self.sample_weight,
                training=True,
                seed=None,
                **question,
            )

    def record(self, *, layers: Sequence[str] | None = None, keep: Sequence[str] = ()) -> Record:
        """Scalars and profiles of this batch, with the norm of its weight gradients before and after clipping."""
        has_loss = self.y is not None or self._loss is not None
        found = self.traced(layers=layers, quantities=None if keep else wanted(has_loss))
        scalars, profiles = summary(found, keep=keep)
        scalars |= _norms(self.gradients, list(found))
        with self._before():
            scalars |= norms_of_weights(self._model, list(found))
        notes = (*self.notes, *found.notes)
        return Record(self.step, self.epoch, "batch", scalars, profiles, notes)

    def __repr__(self) -> str:
        done = [name for name in ("trace", "weights", "gradients") if name in vars(self)]
        lines = [f"<rnnlens TrainedBatch> step {self.step}, epoch {self.epoch}"]
        lines += [f"  computed  {', '.join(done) or 'nothing yet: .trace, .weights, .gradients'}"]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])


def _part(found: Trace, layers: Sequence[str], names: Sequence[str]) -> Trace:
    """Some layers and variables of a trace."""
    return Trace(
        {layer: found.dataset(layer)[list(names)] for layer in layers},
        loss=found.loss,
        quantities=sorted(names),
        provenance=found.provenance,
        notes=found.notes,
    )


def direct_trace(model: Any, arrays: Mapping[str, Mapping[str, Any]], loss: float | None) -> Trace | None:
    """Outputs and direct gradients that a step of training told, as a trace; None where it told nothing.

    Parameters
    ----------
    arrays
        By layer: ``output`` and ``output_grad``, chronological.
    """
    if not arrays:
        return None
    adapter = adapter_for(model)
    infos, provenance = {info.name: info for info in adapter.describe(model)}, adapter.provenance(model)
    datasets = {name: layer_dataset(found, info=infos[name], provenance=provenance) for name, found in arrays.items()}
    note = "As the step of training computed them: nothing was run again."
    return Trace(datasets, loss=loss, quantities=["output", "output_grad"], provenance=provenance, notes=[note])


def _norms(found: Gradients, layers: Sequence[str]) -> dict[str, float]:
    """Norm of all weight gradients, before and after clipping, and of each weight of ``layers``."""
    scalars = {"grad_norm": _norm(found)}
    if found.clipped is not None:
        scalars["grad_norm_clipped"] = _norm(found.clipped)
    for name in found.tensors:
        layer, _, weight = name.rpartition("/")
        if layer in layers:
            scalars[f"{layer}/weight_grad_norm/{weight}"] = _norm({name: found[name]})
    return scalars


def _norm(found: Gradients | Mapping[str, Any]) -> float:
    names = found.tensors if isinstance(found, Gradients) else tuple(found)
    squares = [float(np.sum(np.asarray(found[name].values, dtype=np.float64) ** 2)) for name in names]
    return float(np.sqrt(sum(squares)))
