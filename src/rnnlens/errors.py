"""Every error that rnnlens raises on purpose. Each says what went wrong, what was got, what was expected, what to try.

Catch ``RnnlensError`` to catch them all; each class also derives from the built-in a caller would expect.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RnnlensError(Exception):
    """Base class of all errors of rnnlens."""


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


class CallError(InputError, TypeError):
    """A public function was called with an argument that it does not have, or without one that it needs."""


class UserCodeError(RnnlensError):
    """The user's own model, loss or function raised. The message names which; ``__cause__`` is what it raised.

    What is caught also belongs to the class of the original, so that ``except ZeroDivisionError`` still catches one.
    """


class CertificateError(RnnlensError):
    """A result that cannot be compared with the reference run, and why; never leaves rnnlens."""


class SelfCheckWarning(UserWarning):
    """A residual that travels with a result is larger than its dtype explains."""


class TrackingWarning(UserWarning):
    """A warning of a watch: nothing was recorded, a record failed, or another process writes."""


def message(what: str, *, got: object = None, expected: object = None, hint: str | None = None) -> str:
    """One error text in the form that every error of ours has.

    >>> print(message("Batch is empty.", got="x of shape (0, 5, 2)", expected="at least 1 sample"))
    Batch is empty.
      got:      x of shape (0, 5, 2)
      expected: at least 1 sample
    """
    lines = [_cut(what)]
    if got is not None:
        lines.append(f"  got:      {_cut(got)}")
    if expected is not None:
        lines.append(f"  expected: {_cut(expected)}")
    if hint is not None:
        lines.append(f"  try:      {hint}")
    return "\n".join(lines)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, then all of them.

    >>> did_you_mean("lstn", ["lstm", "gru"])
    "did you mean 'lstm'? Known: 'lstm', 'gru'"
    """
    known = list(known)
    close = difflib.get_close_matches(name[:_LONGEST], known, n=1, cutoff=0.5) if isinstance(name, str) else []
    listing = ", ".join([*(repr(k) for k in known[:_MOST]), *(["..."] if len(known) > _MOST else [])]) or "none"
    return f"did you mean {close[0]!r}? Known: {listing}" if close else f"one of: {listing}"


def shown(value: object) -> str:
    """A value in few words for an error message, whatever it is: large, or unable to print itself.

    >>> shown("lstm"), shown(list(range(1000)))
    ("'lstm'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    shape = shape_of(value)
    return _SHORT.repr(value) if shape is None else f"{type(value).__name__} of shape {shape}"


def shape_of(value: object) -> tuple[int, ...] | None:
    """The shape of an array of any framework; None of anything else."""
    try:
        return tuple(int(size) for size in value.shape)  # type: ignore[attr-defined]
    except Exception:  # some tensors raise errors of their own when asked for their shape
        return None


@contextmanager
def raised_by(whose: str) -> Iterator[None]:
    """Turn errors of user code that runs within the block into one of ours that names ``whose`` code it was.

    Errors of ours, KeyboardInterrupt and SystemExit pass as they are.

    Raises
    ------
    UserCodeError
        For any other exception.
    """
    try:
        yield
    except RnnlensError:
        raise
    except Exception as error:
        raise _also_of_its_class(error, whose) from error


def _also_of_its_class(error: Exception, whose: str) -> UserCodeError:
    """An error of ours that is also one of the class of ``error``, where Python can make such a class."""
    kind = type(error)
    text = message(f"{whose} raised {kind.__name__}.", got=_said(error), hint="the first traceback shows where")
    if isinstance(error, StopIteration):  # within a generator it would mean its end
        return UserCodeError(text)
    try:
        both = type(kind.__name__, (UserCodeError, kind), {"__str__": lambda self: text, "__module__": kind.__module__})
        made: UserCodeError = both.__new__(both, *error.args)
        made.args = error.args
        vars(made).update(vars(error))
    except Exception:  # some classes cannot be joined, or not made from their arguments
        return UserCodeError(text)
    return made


def _said(error: Exception) -> str:
    """The beginning of what an error says."""
    try:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    except Exception:
        lines = []
    return " ".join(lines[:4]) or "no message"


class _Short(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:
        """Its own words, unless it has none."""
        try:
            return super().repr_instance(x, level)
        except Exception:
            return f"a {type(x).__name__}"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 3

#: Letters of a name that are compared, names that are listed, letters of what was got that are shown.
_LONGEST, _MOST, _FULL = 200, 60, 1000


def _cut(got: object) -> str:
    text = got if isinstance(got, str) else str(got)
    return text if len(text) <= _FULL else f"{text[:_FULL]} ..."


@contextmanager
def runs_again(cell: str) -> Iterator[None]:
    """Turn errors of a user's cell that runs apart from its model, on captured steps, into one of ours.

    Raises
    ------
    UnsupportedError
        For what the cell raises then: it ran within the model, so it needs more than its input and state.
    """
    try:
        yield
    except RnnlensError:
        raise
    except Exception as error:
        raise UnsupportedError(no_function_of_its_own(cell, f"{type(error).__name__}: {_said(error)}")) from error


def two_layers_called(name: str) -> str:
    """Return the message for a model with two layers of one name."""
    return message(
        f"Two different layers are called {name!r}.",
        expected="a name of its own for each layer",
        hint="pass name= when making the layers",
    )


def no_function_of_its_own(cell: str, got: str) -> str:
    """Return the message for a cell that reads state which only exists while its model runs."""
    return message(
        f"{cell}, run again on its own input and state, does not do what it did within the model.",
        got=got,
        expected="a cell whose step is a function of its input, its state and its weights",
        hint="hand it what it reads as a part of its input or state; or rl.gradients by inputs and weights",
    )
