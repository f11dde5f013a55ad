"""Gradients of weights: what arrived through the framework, and what our sweeps left on a layer's own cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...adapters.protocol import LayerWeights, Port
from ...recurrence.trajectory import Adjoint
from ...results.schema import to_host
from ...typing import Array
from ..inside import Half
from ..names import Catalogue, TensorName, uncalled
from ..weight_keys import Source, assemble, sources

#: Boundary -> gradient that arrived there, with one leading axis K; None where no path leads there.
Arrived = Mapping[Port, Array | None]


class WeightGradients:
    """Puts gradients of weights together, of the batch or of every sample.

    Parameters
    ----------
    ports
        The weights asked about, each with the adapter's weights that it is made of.
    """

    def __init__(self, known: Catalogue, ports: Mapping[TensorName, Sequence[Port]], *, per_sample: bool) -> None:
        self.known, self.ports, self.per_sample = known, ports, per_sample
        self._layers = {str(name.layer) for name in ports}
        self._swept: dict[tuple[str, str], list[Array]] = {}

    @property
    def size(self) -> int:
        """Numbers in all weights asked about."""
        shapes = [self.known.weights[str(port.layer)].values[port.key].shape for port in self._distinct()]
        return sum(int(np.prod(shape, dtype=int)) for shape in shapes)

    def _distinct(self) -> dict[Port, None]:
        return dict.fromkeys(port for ports in self.ports.values() for port in ports)

    def add_swept(self, layer: str, half: Half, swept: Adjoint) -> None:
        """Take in what a sweep through one call of a layer left on the weights of its cell."""
        name = uncalled(layer, self.known.weights)
        if name not in self._layers:
            return
        direction = half.call.direction if half.call.bidirectional else ""
        for key, grad in half.weight_gradients(swept, per_sample=self.per_sample).items():
            self._swept.setdefault((name, f"{direction}/{key}".lstrip("/")), []).append(grad)

    def of(self, name: TensorName, arrived: Arrived, rows: slice = slice(None)) -> Array | None:
        """The gradient of one weight; of every sample in ``rows``, by as many cotangents, where that is asked for."""
        weights = self.known.weights[str(name.layer)]
        found = sources(weights)[name.key]
        framework = self._arrived(name, arrived, found, weights)
        own = self._own(name, found, weights, rows)
        parts = [part for part in (framework, own) if part is not None]
        if not parts:
            return None
        total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return total if self.per_sample else total[0]

    def _arrived(
        self, name: TensorName, arrived: Arrived, found: Sequence[Source], weights: LayerWeights
    ) -> Array | None:
        """What the framework brought, with a leading axis."""
        parts = [arrived.get(port) for port in self.ports[name]]
        count = next((part.shape[0] for part in parts if part is not None), None)
        if count is None:
            return None
        shapes = [tuple(weights.values[source.key].shape) for source in found]
        filled = [np.zeros((count, *s)) if p is None else to_host(p) for p, s in zip(parts, shapes, strict=True)]
        return assemble(filled, found, name.key, weights, 1)

    def _own(self, name: TensorName, found: Sequence[Source], weights: LayerWeights, rows: slice) -> Array | None:
        """What sweeps left on a layer's own weights, laid out as shown, with a leading axis."""
        by_direction = [self._swept_by(name, source, several=len(found) > 1) for source in found]
        present = next((part for part in by_direction if part is not None), None)
        if present is None:
            return None
        filled = [np.zeros_like(present) if part is None else part for part in by_direction]
        whole = [Source(source.key, source.direction) for source in found]
        own = assemble(filled, whole, name.key, weights, 1 if self.per_sample else 0)
        return own[rows] if self.per_sample else own[None]

    def _swept_by(self, name: TensorName, source: Source, *, several: bool) -> Array | None:
        by_direction = [f"{source.direction}/{name.key}"] if several or "/" in source.key else []
        for key in (*by_direction, name.key):
            if (str(name.layer), key) in self._swept:
                total: Array = np.sum(self._swept[str(name.layer), key], axis=0)
                return total
        return None
