"""The tensors of a finished forward pass that a port stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Boundary:
    """The tensors behind a port, and the linear way from them (or their gradients) to the port's own layout.

    ``start`` makes the port's value where that is put together in another way than the gradient is.
    """

    tensors: list[Tensor]
    gather: Callable[[Sequence[Tensor]], Tensor]
    start: Callable[[], Tensor] | None = None

    @property
    def value(self) -> Tensor:
        """The port's value, inside the graph."""
        return self.gather(self.tensors) if self.start is None else self.start()


def single(tensor: Tensor) -> Boundary:
    """A port that is one tensor as it is."""
    return Boundary([tensor], lambda parts: parts[0])
