"""Convolutions over spatial axes, their adjoints and the gradients of their kernels, for any array namespace.

Channels are last: x (..., *space, n), kernel (*window, n, m), result (..., *space, m), with any axes in front. A
convolution is computed as a sum of matrix products, one per position in the window (Dumoulin, Visin 2016,
arXiv:1603.07285, chapters 2 and 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ..typing import Array, Namespace


@dataclass(frozen=True)
class Window:
    """Strides, dilation and padding of a convolution, one number per spatial axis.

    ``padding`` is ``"valid"`` or ``"same"``. ``"same"`` pads with zeros so that the result has size
    ceil(size / stride); an odd zero is added at the end, as in Keras and TensorFlow.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Literal["valid", "same"] = "valid"

    def pads(self, sizes: Sequence[int], window: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many zeros are padded before and after each spatial axis."""
        if self.padding == "valid":
            return [(0, 0)] * len(sizes)
        found = []
        for size, width, stride, dilation in zip(sizes, window, self.strides, self.dilation, strict=True):
            missing = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
            found.append((missing // 2, missing - missing // 2))
        return found

    def places(
        self, sizes: Sequence[int], window: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Return each position in the window with the part of the padded input that it is multiplied with."""
        padded = [size + sum(pad) for size, pad in zip(sizes, self.pads(sizes, window), strict=True)]
        axes = list(zip(padded, window, self.strides, self.dilation, strict=True))
        counts = [(size - (width - 1) * dilation - 1) // stride + 1 for size, width, stride, dilation in axes]
        for at in product(*(range(width) for width in window)):
            starts = [place * dilation for place, dilation in zip(at, self.dilation, strict=True)]
            ends = [(count - 1) * stride + 1 for count, stride in zip(counts, self.strides, strict=True)]
            spans = zip(starts, ends, self.strides, strict=True)
            yield at, tuple(slice(start, start + end, stride) for start, end, stride in spans)


def convolve(x: Array, kernel: Array, window: Window, xp: Namespace) -> Array:
    """Convolve x (..., *space, n) with a kernel (*window, n, m)."""
    rank = kernel.ndim - 2
    padded, parts = _padded(x, kernel, window, xp), window.places(x.shape[-1 - rank : -1], kernel.shape[:rank])
    products = (padded[(..., *part, slice(None))] @ kernel[at] for at, part in parts)
    first = next(products)
    return sum(products, start=first)


def convolve_back(dz: Array, kernel: Array, sizes: Sequence[int], window: Window, xp: Namespace) -> Array:
    """Pull cotangents dz (..., *space, m) of :func:`convolve` back to its input (..., *sizes, n)."""
    rank, lead = kernel.ndim - 2, tuple(dz.shape[: dz.ndim - kernel.ndim + 1])
    pads = window.pads(sizes, kernel.shape[:rank])
    wide = [size + sum(pad) for size, pad in zip(sizes, pads, strict=True)]
    padded = xp.zeros((*lead, *wide, kernel.shape[-2]), dtype=dz.dtype, device=getattr(dz, "device", None))
    for at, part in window.places(sizes, kernel.shape[:rank]):
        padded[(..., *part, slice(None))] += dz @ kernel[at].T
    inside = [slice(before, before + size) for (before, _), size in zip(pads, sizes, strict=True)]
    return padded[(..., *inside, slice(None))]


def kernel_gradient(x: Array, dz: Array, kernel: Array, window: Window, by_time: bool, xp: Namespace) -> Array:
    """Return the gradient of the kernel in :func:`convolve`, summed over samples, and over time unless ``by_time``.

    x : (sample, time, *space, n); dz : (sample, time, *space, m). The gradient has the kernel's shape, with a leading
    time axis if ``by_time``.
    """
    rank = kernel.ndim - 2
    if by_time:
        steps = range(x.shape[1])
        each = [kernel_gradient(x[:, t : t + 1], dz[:, t : t + 1], kernel, window, False, xp) for t in steps]
        return xp.stack(each)
    padded, flat = _padded(x, kernel, window, xp), xp.reshape(dz, (-1, dz.shape[-1]))
    found = xp.zeros_like(kernel)
    for at, part in window.places(x.shape[2:-1], kernel.shape[:rank]):
        found[at] = xp.reshape(padded[(..., *part, slice(None))], (-1, x.shape[-1])).T @ flat
    return found


def _padded(x: Array, kernel: Array, window: Window, xp: Namespace) -> Array:
    """Pad the spatial axes of x with zeros."""
    rank = kernel.ndim - 2
    first = x.ndim - 1 - rank
    for axis, pads in enumerate(window.pads(x.shape[first:-1], kernel.shape[:rank]), start=first):
        shape = list(x.shape)
        zeros = [
            xp.zeros((*shape[:axis], n, *shape[axis + 1 :]), dtype=x.dtype, device=getattr(x, "device", None))
            for n in pads
        ]
        x = xp.concat([zeros[0], x, zeros[1]], axis=axis) if any(pads) else x
    return x
