"""Probe mode: a fixed batch is traced between two steps of training, without hooks in the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..settings import options
from ..verbs.trace import trace
from ..verbs.weights import weight_norms
from .records import TrainingRecord, summary

#: Quantities from which the profiles and scalars of a record are computed.
NEEDED = ("hidden", "hidden_grad", "gates", "mask")


@dataclass(frozen=True)
class Probe:
    """A held-out batch, and the layers and quantities to record of it.

    Attributes
    ----------
    x, y, sample_weight
        As in :func:`rnnlens.trace`.
    layers
        Names of the layers; all recurrent ones where None.
    keep
        Quantities that are recorded as whole arrays, such as ``"hidden_grad"``.
    loss
        As in :func:`rnnlens.trace`.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    layers: Sequence[str] | None = None
    keep: tuple[str, ...] = ()
    loss: str | Callable[..., Any] | None = None

    def record(self, model: Any, step: int, epoch: int) -> TrainingRecord:
        """Trace the batch with the current weights in evaluation mode; return the record. The model is restored."""
        with options(certify="first"):
            found = trace(
                model,
                self.x,
                self.y,
                layers=self.layers,
                quantities=None if self.keep else wanted(self.y is not None or self.loss is not None),
                loss=self.loss,
                sample_weight=self.sample_weight,
            )
        scalars, layers = summary(found, keep=self.keep)
        return TrainingRecord(
            step, epoch, "probe", scalars | norms_of_weights(model, list(found)), layers, tuple(found.notes)
        )


def wanted(has_loss: bool) -> list[str]:
    """Return the names of the quantities that a record needs; without a loss there is no ``hidden_grad``."""
    return [name for name in NEEDED if has_loss or name != "hidden_grad"]


def norms_of_weights(model: Any, layers: Sequence[str]) -> dict[str, float]:
    """Return the Frobenius norm of each weight of ``layers`` by name: ``"lstm/weight_norm/kernel"``."""
    names = dict.fromkeys(layer.partition("#")[0] for layer in layers)
    rows = weight_norms(model, layers=[*names])
    found = {}
    for name, norm in rows.data_vars.items():
        layer, _, weight = str(name).rpartition("/")
        found[f"{layer}/weight_norm/{weight}"] = float(norm.values[-1])
    return found
