"""Every error that rnnlens raises on purpose. Each says what went wrong, what was got, what was expected, what to try.

Catch ``RnnlensError`` to catch them all; each class also derives from the built-in a caller would expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RnnlensError(Exception):
    """Base of all errors of rnnlens."""


class InputError(RnnlensError, ValueError):
    """The data or an argument does not fit: rank, feature count, empty batch, no target, unknown quantity."""


class ModelError(RnnlensError, ValueError):
    """The model cannot be looked into as it is: not built, not compiled, no recurrent layer, no adapter."""


class UnsupportedError(RnnlensError, NotImplementedError):
    """A named option or layer that rnnlens refuses rather than getting it wrong."""


class LayerNotFoundError(RnnlensError, KeyError):
    """No layer or tensor of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class QuantityNotFoundError(RnnlensError, AttributeError, KeyError):
    """No variable of that name in the result."""

    def __str__(self) -> str:
        return str(self.args[0])


class DisconnectedError(RnnlensError, ValueError):
    """The one gradient that was asked for does not exist; ``reason`` says why and what to ask for instead."""

    reason: object = None


class FileError(RnnlensError, OSError):
    """A file that cannot be read, is not ours, or was written by a newer rnnlens."""


class TooLargeError(RnnlensError, MemoryError):
    """A result that would not fit the memory granted; raised before computing."""


class MissingDependencyError(RnnlensError, ImportError):
    """An optional package is needed for this call and is not installed."""


class SelfCheckWarning(UserWarning):
    """A residual that travels with a result is larger than its dtype explains."""


def message(what: str, *, got: object = None, expected: object = None, hint: str | None = None) -> str:
    """One error text in the form that every error of ours has.

    >>> print(message("Batch is empty.", got="x of shape (0, 5, 2)", expected="at least 1 sample"))
    Batch is empty.
      got:      x of shape (0, 5, 2)
      expected: at least 1 sample
    """
    lines = [what]
    if got is not None:
        lines.append(f"  got:      {got}")
    if expected is not None:
        lines.append(f"  expected: {expected}")
    if hint is not None:
        lines.append(f"  try:      {hint}")
    return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, then all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listing = ", ".join(repr(k) for k in known) or "none"
    return f"did you mean {close[0]!r}? Known: {listing}" if close else f"one of: {listing}"
