"""A record: what one moment of training looks like. And what is done with records: sinks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import xarray as xr

#: Of a fixed held-out batch, between two steps of training; or of the very batch that is trained on.
Kind = Literal["probe", "batch"]
KINDS = ("probe", "batch")


@dataclass(frozen=True)
class Record:
    """One moment of training.

    Attributes
    ----------
    step
        Batches trained on so far. A probe of step 0 is of the weights before training; a batch record of step n is of
        the n-th batch and of the weights *before* its update.
    epoch
        The epoch that step lies in, from 0.
    kind
        ``"probe"`` or ``"batch"``.
    scalars
        Numbers by name: ``"loss"``; ``"lstm/reach"``, ``"lstm/decay"``, ``"lstm/adjoint"``, ``"lstm/dead_units"``,
        ``"lstm/forget/near_0"``, ``"lstm/forget/near_1"``, ``"lstm/weight_norm/kernel"``. In a bidirectional layer the
        direction stands behind the layer: ``"bi/forward/reach"``.
    layers
        Labelled arrays by layer and name: ``adjoint_profile``, ``lag_profile`` and ``gates`` (over time), and tensors
        kept on request. No ``step`` dimension: this is one step.
    notes
        Sentences that a reader of these numbers must know.
    time
        Seconds since 1970.
    """

    step: int
    epoch: int
    kind: Kind
    scalars: Mapping[str, float]
    layers: Mapping[str, Mapping[str, xr.DataArray]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    time: float = field(default_factory=time.time)


@runtime_checkable
class Sink(Protocol):
    """Where records go: the store of a run, a logger, an alert."""

    def write(self, record: Record) -> None:
        """Take one record; it is complete when this returns."""

    def close(self, reason: str) -> None:
        """No more records come; ``reason`` says why: ``"finished"``, ``"interrupted"``, the name of an error."""
