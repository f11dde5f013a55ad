"""Array operations that write into memory the caller owns, on NumPy, torch and any other array namespace.

A sweep runs the same few operations hundreds of times on the same shapes; allocating their results would cost more than
computing them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace, is_torch_namespace

from .arrays import Array, Namespace
from .parallel import for_each, row_parts


@dataclass(frozen=True)
class Workspace:
    """Allocation and in-place arithmetic for arrays like ``like`` (same namespace, dtype, device)."""

    xp: Namespace
    like: Array

    @property
    def is_numpy(self) -> bool:
        """Whether arrays are NumPy's."""
        return bool(is_numpy_namespace(self.xp))

    @property
    def is_torch(self) -> bool:
        """Whether arrays are torch's."""
        return bool(is_torch_namespace(self.xp))

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        size = getattr(self.like.dtype, "itemsize", None)
        return int(size) if size is not None else int(np.dtype(str(self.like.dtype).rpartition(".")[2]).itemsize)

    def empty(self, *shape: int) -> Array:
        """Uninitialised array."""
        return self.xp.empty(shape, dtype=self.like.dtype, device=self._device)

    def zeros(self, *shape: int) -> Array:
        """Array of zeros; memory that is never touched is never paid for."""
        return self.xp.zeros(shape, dtype=self.like.dtype, device=self._device)

    def eye(self, n: int) -> Array:
        """Identity matrix."""
        return self.xp.eye(n, dtype=self.like.dtype, device=self._device)

    def asarray(self, values: Any) -> Array:
        """Numbers from anywhere, in this dtype and on this device."""
        if not self.is_torch and hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        return self.xp.asarray(values, dtype=self.like.dtype, device=self._device)

    @property
    def _device(self) -> Any:
        return getattr(self.like, "device", None)

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """``out = a @ b``, batched over the first axis. ``out`` must not overlap ``a`` or ``b``."""
        if self.is_numpy:
            for_each(
                lambda rows: np.matmul(a[:, rows], b, out=out[:, rows]), row_parts(a.shape, b.shape[-1]), xp=self.xp
            )
        elif self.is_torch:
            self.xp.bmm(a, b, out=out)
        else:
            out[...] = self.xp.matmul(a, b)

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        """``out = a * b``, broadcast."""
        if self.is_numpy:
            np.multiply(a, b, out=out)
        elif self.is_torch:
            self.xp.mul(a, b, out=out)
        else:
            out[...] = a * b

    def add_product(self, target: Any, a: Any, b: Any) -> None:
        """``target += a * b``, broadcast."""
        if self.is_torch:
            target.addcmul_(a, b)
        elif self.is_numpy:
            # NumPy takes the product's memory from what it freed last, which is still in the processor's cache.
            np.add(target, a * b, out=target)
        else:
            target[...] = target + a * b

    def diagonal_add(self, matrices: Any, values: Any) -> None:
        """Add (..., n) to the diagonals of (..., n, n), in place."""
        if self.is_numpy:
            diagonal = np.einsum("...ii->...i", matrices)
            diagonal += values
        elif self.is_torch:
            diagonal = self.xp.diagonal(matrices, dim1=-2, dim2=-1)
            diagonal += values
        else:
            matrices[...] = matrices + values[..., None] * self.eye(int(values.shape[-1]))

    @cached_property
    def negligible(self) -> float:
        """Magnitude below which a sweep takes a number for zero: 1e8 times the smallest normal one (1e-30 in float32).

        Below the smallest normal number processors compute many times slower, and vanishing gradients end up there.
        """
        return float(self.xp.finfo(self.like.dtype).smallest_normal) * 1e8

    def flush(self, values: Any) -> None:
        """Set negligible numbers to zero, in place."""
        if self.is_torch:
            values.copy_(self.xp.nn.functional.hardshrink(values, self.negligible))
        else:
            values[self.xp.abs(values) < self.negligible] = 0

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """As NumPy, on the host."""
        if self.is_torch:
            host = array.detach().cpu()
            # NumPy has no bfloat16.
            return np.asarray(host.float() if "bfloat16" in str(host.dtype) else host)
        return np.asarray(array)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Keep torch from recording what happens inside."""
        return self.xp.no_grad() if self.is_torch else contextlib.nullcontext()
