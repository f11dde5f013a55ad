"""Arrays of NumPy or torch, as far as both are alike, and the namespaces of their functions.

What only one of the two has is asked for in :mod:`rnnlens.recurrence.inplace` alone, and where a type says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from array_api_compat import array_namespace


class Array(Protocol):
    """What code that knows no library asks of an array, besides what it asks of its namespace.

    Indexing and arithmetic return arrays of the same library; in-place arithmetic writes to the array itself.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers along each axis."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def dtype(self) -> Any:
        """Of the library's own kind."""

    @property
    def T(self) -> Self:  # noqa: N802
        """A matrix, turned."""

    def sum(self, axis: int = ..., /) -> Self:
        """Over one axis, or over all."""

    def any(self, axis: int = ..., /) -> Self:
        """Over one axis, or over all."""

    def all(self) -> Self:
        """Over all axes."""

    def __getitem__(self, key: Any, /) -> Self: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __iter__(self) -> Iterator[Self]: ...
    def __len__(self) -> int: ...
    def __float__(self) -> float: ...
    def __bool__(self) -> bool: ...
    def __neg__(self) -> Self: ...
    def __invert__(self) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __radd__(self, other: Any, /) -> Self: ...
    def __iadd__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __rsub__(self, other: Any, /) -> Self: ...
    def __isub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __imul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __rtruediv__(self, other: Any, /) -> Self: ...
    def __pow__(self, other: Any, /) -> Self: ...
    def __matmul__(self, other: Any, /) -> Self: ...
    def __and__(self, other: Any, /) -> Self: ...
    def __or__(self, other: Any, /) -> Self: ...
    def __eq__(self, other: Any, /) -> Self: ...  # type: ignore[override]
    def __ne__(self, other: Any, /) -> Self: ...  # type: ignore[override]
    def __lt__(self, other: Any, /) -> Self: ...
    def __le__(self, other: Any, /) -> Self: ...
    def __gt__(self, other: Any, /) -> Self: ...
    def __ge__(self, other: Any, /) -> Self: ...


class Namespace(Protocol):
    """Functions of the array-API standard, of one library: all but these return arrays."""

    linalg: Any
    finfo: Any
    float32: Any
    float64: Any
    int8: Any
    int64: Any
    nn: Any
    no_grad: Any
    __name__: str

    def __getattr__(self, name: str, /) -> Callable[..., Array]: ...


def namespace(*arrays: Array) -> Namespace:
    """The functions of the arrays' library."""
    found: Namespace = array_namespace(*arrays)
    return found
