"""A batch that was trained on, whichever framework trained: its layers by name, as heard or else computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import xarray as xr

from ..results.trace import LayerTrace, Trace
from ..results.weights import Weights

#: What a step tells without being run again.
DIRECT = frozenset({"output", "output_grad", "final_state_grad"})


class Batch(ABC):
    """One batch as it was trained on, before the update: ``batch["lstm"].output_grad`` and all that ``rl.trace`` has.

    Attributes
    ----------
    step, epoch
        It was the ``step``-th batch of this training, in ``epoch``.
    notes
        What a reader of the numbers must know.
    """

    step: int
    epoch: int
    notes: list[str]

    @property
    @abstractmethod
    def direct(self) -> Trace | None:
        """Outputs and direct gradients as the step itself computed them; None where it told nothing."""

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """States, gates, direct and total gradients of the batch."""

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The weights before the update by gate and direction, and their gradients."""

    @abstractmethod
    def traced(
        self, *, layers: str | Iterable[str] | None = None, quantities: str | Iterable[str] | None = None
    ) -> Trace:
        """As :attr:`trace`, of some layers and quantities."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return list(self.trace)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True  # without anything being computed for it

    def __contains__(self, name: object) -> bool:
        return name in self.layers or name in self.trace

    def __getitem__(self, name: str) -> LayerOfBatch:
        return LayerOfBatch(self, name)


class LayerOfBatch:
    """One layer of a :class:`Batch`: a variable is what was heard, or else found when it is asked for."""

    def __init__(self, batch: Batch, name: str) -> None:
        self._batch, self.name = batch, name

    def __getattr__(self, name: str) -> xr.DataArray:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> xr.DataArray:
        return self._layer(name)[name]

    def _layer(self, quantity: str) -> LayerTrace:
        direct = self._batch.direct
        if direct is not None and quantity in DIRECT and self.name in direct and quantity in direct[self.name]:
            return direct[self.name]
        return self._batch.trace[self.name]

    def __repr__(self) -> str:
        return repr(self._batch.trace[self.name])
