"""A weight moved a little, for experiments: in our copy, where variables get their values at every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..protocol import Port
from .opened import NUDGES, opened
from .public import Net
from .weights import layers_of


@contextmanager
def nudged(net: Net, port: Port, size: float) -> Iterator[bool]:
    """See :meth:`Adapter.perturbed_port`; only weights can be moved, all of the variables that they lie in."""
    found = opened(net)
    layer = layers_of(found).get(str(port.layer)) if port.kind == "weight" else None
    pieces = () if layer is None else layer.weights.get(port.key, ())
    names = list(dict.fromkeys(piece.variable for piece in pieces))
    if not names:
        yield False
        return
    moves = {}
    for name, value in found.read(names).items():
        spread = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) or 1.0
        pattern = np.random.default_rng(0).normal(size=value.shape)
        moves[net.graph, name] = (size * spread * pattern).astype(value.dtype)
    token = NUDGES.set({**NUDGES.get(), **moves})
    try:
        yield True
    finally:
        NUDGES.reset(token)
