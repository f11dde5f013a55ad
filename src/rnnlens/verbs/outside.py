"""Tensors outside of recurrent layers: as the framework has them, and with every axis by its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..adapters.protocol import Port
from ..layout import Layout, dims_of
from ..typing import Array
from ..vocabulary import SAMPLE, TIME
from .axes import Layouts


class Outside:
    """Opens and closes the tensors of one batch of so many samples."""

    def __init__(self, axes: Layouts, samples: int) -> None:
        self.axes, self.samples = axes, samples

    def layout(self, port: Port, array: Any, lead: int = 0) -> Layout:
        """How a tensor lies, of an array with ``lead`` axes in front."""
        integer = np.asarray(array).dtype.kind in "iu"
        return self.axes.layout(port, array.shape[lead:], integer=integer)

    def opened(self, port: Port, array: Array, lead: int = 0) -> tuple[Array, tuple[str, ...]]:
        """The tensor with every name on an axis of its own, in the framework's order, and the names."""
        layout = self.layout(port, array, lead)
        return layout.opened(array, self.samples, lead), layout.names

    def closed(self, port: Port, whole: xr.DataArray) -> Array:
        """What the framework has in place of an opened tensor."""
        layout = self.axes.stated.get(port, self.axes.found.get(port))
        return whole.values if layout is None else layout.closed(whole.values)

    def is_here(self, port: Port) -> bool:
        """Whether the tensor lies as the framework has it, and not as a recurrent layer's: samples first."""
        return port.layer is None or port in self.axes.found or port in self.axes.stated

    def named_result(
        self,
        result: Array,
        pull: Callable[[Array], Sequence[Array]],
        ports: Sequence[Port | None],
        arrays: Sequence[Array],
    ) -> xr.DataArray:
        """The value of a function of tensors, with those axes named along which it goes with what it was made of."""
        if result.ndim == 0 or self.axes.samples_first:
            return xr.DataArray(result, dims=self.axes.rule.layout(Port("output"), result.shape).names)
        opened = []
        for port, array in zip(ports, arrays, strict=True):
            names = dims_of(array.shape) if port is None else self.layout(port, array).names
            opened.append((names, None if port is None else self.layout(port, array)))

        def arrives(cotangent: Array, name: str) -> Array | None:
            """Where, along the axis of that name of what the function was made of, anything arrives."""
            found = None
            for grad, (names, layout) in zip(pull(cotangent), opened, strict=True):
                if name in names and np.any(grad):
                    whole = grad if layout is None else layout.opened(grad, self.samples)
                    at = names.index(name)
                    hit = np.any(whole != 0, axis=tuple(i for i in range(whole.ndim) if i != at))
                    found = hit if found is None or len(found) != len(hit) else found | hit
            return found

        return xr.DataArray(result, dims=_followed(result, arrives))


def _followed(result: Array, arrives: Callable[[Array, str], Array | None]) -> tuple[str, ...]:
    """Names of the axes of a value: those along which each half leads to its own half, and nowhere else."""
    names = [f"axis_{i}" for i in range(result.ndim)]
    for name in (SAMPLE, TIME):
        fitting = [
            axis
            for axis in range(result.ndim)
            if names[axis].startswith("axis_") and _fits(result, axis, name, arrives)
        ]
        if len(fitting) == 1 or (fitting and name == SAMPLE and result.shape[fitting[0]] == 1):
            names[fitting[0]] = name
    rest = [axis for axis in range(result.ndim) if names[axis].startswith("axis_")]
    if rest and rest[-1] == result.ndim - 1 and result.ndim > 1:
        names[-1] = "unit"
    return tuple(names)


def _fits(result: Array, axis: int, name: str, arrives: Callable[[Array, str], Array | None]) -> bool:
    size = result.shape[axis]
    noise = np.random.default_rng(0).normal(size=result.shape).astype(result.dtype)
    seen = False
    for pattern in patterns(size):
        mask = pattern.reshape(-1, *[1] * (result.ndim - axis - 1))
        found = arrives(noise * mask, name)
        if found is not None:
            if len(found) != size or bool((found & ~pattern).any()):
                return False
            seen = True
    return seen


def patterns(size: int) -> np.ndarray[Any, Any]:
    """Rows of bool: on where bit i of the index is set, and on where it is not; any two indices are told apart."""
    if size == 1:
        return np.ones((1, 1), dtype=bool)
    bits = (np.arange(size)[None, :] >> np.arange((size - 1).bit_length())[:, None]) & 1
    return np.concatenate([bits, 1 - bits]).astype(bool)
