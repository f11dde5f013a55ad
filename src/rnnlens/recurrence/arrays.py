"""Arrays of NumPy or torch: one step of many, their namespace, and in-place arithmetic.

A sweep repeats the same few operations hundreds of times on the same shapes, so that allocating results would cost more
than computing them. The operations of :class:`Workspace` write to memory of the caller. Only this class uses functions
that a single library has.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_namespace, is_torch_namespace

from ..typing import Array, Namespace
from .parallel import for_each, row_parts


def at_step(values: Array, samples: slice, t: int) -> Array:
    """Return values (sample or 1, time or 1, ...) of some samples at step t, without the time axis, as a view."""
    at = values[:, 0 if values.shape[1] == 1 else t]
    return at if at.shape[0] == 1 else at[samples]


def namespace(*arrays: Array) -> Namespace:
    """Return the array-API namespace of the arrays' library."""
    return array_namespace(*arrays)


def without_subnormal(values: Array, xp: Namespace) -> Array:
    """Return an array of NumPy with subnormal numbers set to 0, as arithmetic with them is slow; any other unchanged.

    Subnormal numbers of less than 32 bits are kept, because they are not small.
    """
    if not is_numpy_namespace(xp) or values.dtype.itemsize < 4:
        return values
    small = np.abs(values) < np.finfo(values.dtype).smallest_normal
    return values * ~small if small.any() else values


@dataclass(frozen=True)
class Workspace:
    """Allocation and in-place arithmetic for arrays with the library, dtype and device of ``like``."""

    xp: Namespace
    like: Array

    #: Whether arrays are of NumPy, or of torch; bytes per number.
    is_numpy: bool = field(init=False, repr=False, compare=False)
    is_torch: bool = field(init=False, repr=False, compare=False)
    itemsize: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtype = self.like.dtype
        size = getattr(dtype, "itemsize", None) or np.dtype(str(dtype).rpartition(".")[2]).itemsize
        for name, value in (("is_numpy", is_numpy_namespace), ("is_torch", is_torch_namespace)):
            object.__setattr__(self, name, bool(value(self.xp)))
        object.__setattr__(self, "itemsize", int(size))

    def empty(self, *shape: int) -> Array:
        """Return an uninitialised array."""
        return self.xp.empty(shape, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def zeros(self, *shape: int) -> Array:
        """Return an array of zeros; the operating system allocates its memory on the first write."""
        return self.xp.zeros(shape, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def eye(self, n: int) -> Array:
        """Return the identity matrix."""
        return self.xp.eye(n, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def asarray(self, values: Any) -> Array:
        """Convert numbers of any library to an array of this dtype on this device."""
        if not self.is_torch and hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        return self.xp.asarray(values, dtype=self.like.dtype, device=getattr(self.like, "device", None))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Compute ``out = a @ b``, batched over the first axis. ``out`` must not overlap ``a`` or ``b``."""
        if self.is_numpy:
            for_each(
                lambda rows: np.matmul(a[:, rows], b, out=out[:, rows]), row_parts(a.shape, b.shape[-1]), xp=self.xp
            )
        else:
            self.xp.bmm(a, b, out=out)

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        """Compute ``out = a * b``, broadcast."""
        if self.is_numpy:
            np.multiply(a, b, out=out)
        else:
            self.xp.mul(a, b, out=out)

    def add_product(self, target: Any, a: Any, b: Any) -> None:
        """Compute ``target += a * b``, broadcast."""
        if self.is_torch:
            target.addcmul_(a, b)
        else:  # NumPy reuses the memory that it freed last for the product; it is still in the processor's cache.
            np.add(target, a * b, out=target)

    def diagonal_add(self, matrices: Any, values: Any) -> None:
        """Add values (..., n) to the diagonals of matrices (..., n, n), in place."""
        diagonal = np.einsum("...ii->...i", matrices) if self.is_numpy else self.xp.diagonal(matrices, dim1=-2, dim2=-1)
        diagonal += values

    @cached_property
    def negligible(self) -> float:
        """Magnitude below which a sweep sets numbers to 0, as subnormal arithmetic is slow; 1e-30 in float32."""
        return float(self.xp.finfo(self.like.dtype).smallest_normal) * 1e8

    def flush(self, values: Any) -> None:
        """Set negligible numbers to zero, in place."""
        if self.is_torch:
            values.copy_(self.xp.nn.functional.hardshrink(values, self.negligible))
        else:
            values[self.xp.abs(values) < self.negligible] = 0

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy an array to NumPy on the host."""
        if self.is_torch:
            host = array.detach().cpu()
            # NumPy does not have bfloat16.
            return np.asarray(host.float() if "bfloat16" in str(host.dtype) else host)
        return np.asarray(array)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Disable torch's autograd within the block."""
        return self.xp.no_grad() if self.is_torch else contextlib.nullcontext()
