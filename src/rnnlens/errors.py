"""Errors that rnnlens raises on purpose.

Each message states the problem, the value given, the value expected and a hint.

All classes derive from ``RnnlensError``, most also from a built-in exception such as ValueError.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _Message(str):
    """Text of an error, with its parts as attributes; None for a line that it does not have."""

    problem: str
    got: str | None = None
    expected: str | None = None
    hint: str | None = None

    def __new__(cls, text: str) -> _Message:
        """Create the message of a text whose parts are not known."""
        new = super().__new__(cls, text)
        new.problem = text
        return new


class RnnlensError(Exception):
    """Base class of all errors of rnnlens, whose text has the problem, the value given, the value expected and a hint.

    Attributes
    ----------
    problem : str
    got, expected, hint : str or None
        The parts of the text; None where it has no such line.
    """

    problem: str
    got: str | None
    expected: str | None
    hint: str | None

    def __init__(self, what: str = "", *, got: object = None, expected: object = None, hint: str | None = None) -> None:
        text = what
        if not isinstance(what, _Message):
            is_text = got is None and expected is None and hint is None and "\n" in what
            text = _Message(what) if is_text else message(what, got=got, expected=expected, hint=hint)
        super().__init__(text)
        vars(self).update(vars(text))


class InputError(RnnlensError, ValueError):
    """Error for data or an argument that does not fit: rank, features, empty batch, no target, unknown quantity."""


class ModelError(RnnlensError, ValueError):
    """Error for a model that cannot be analysed: not built, not compiled, no recurrent layer, no adapter."""


class UnbuiltModelError(ModelError):
    """Error for a model, or a layer in it, whose weights are created at its first call."""


class UnsupportedError(RnnlensError, NotImplementedError):
    """Error for an option or a layer that rnnlens does not support."""


class LayerNotFoundError(RnnlensError, KeyError):
    """Error for a layer or tensor name that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


class QuantityNotFoundError(RnnlensError, AttributeError, KeyError):
    """Error for a variable name that a result does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class DisconnectedError(RnnlensError, ValueError):
    """Error for a requested gradient that does not exist; ``reason`` has the cause and an alternative."""

    reason: object = None


class FileError(RnnlensError, OSError):
    """Error for a file that cannot be read, is not from rnnlens, or was written by a newer rnnlens."""


class TooLargeError(RnnlensError, MemoryError):
    """Error for a result that would not fit into the memory granted; raised before computing."""

    def __new__(cls, *args: object, **options: object) -> TooLargeError:
        """Create an empty error, also where Dask rebuilds one, since ``MemoryError.__new__`` refuses this class."""
        return Exception.__new__(cls, *args)


class MissingDependencyError(RnnlensError, ImportError):
    """Error for a call that needs an optional package that is not installed."""


class CallError(InputError, TypeError):
    """Error for a call of a public function with an unknown argument, or without a required one."""


class UserCodeError(RnnlensError):
    """Error for an exception in the user's own model, loss or function, which is in ``__cause__``.

    It is also an instance of the original exception's class, so that ``except ZeroDivisionError`` still works.
    """


class CertificateError(RnnlensError):
    """Error for a result that cannot be compared with the reference run; used within rnnlens only."""


class SelfCheckWarning(UserWarning):
    """Warning that a self-check has a larger mismatch than rounding explains for its dtype, or could not be made."""


class TrackingWarning(UserWarning):
    """Warning of a watch: nothing was recorded, a record failed, or another process writes the run."""


#: What stands before each part of a message.
_LABELS = {"problem": "", "got": "  got:      ", "expected": "  expected: ", "hint": "  try:      "}


def message(problem: str, *, got: object = None, expected: object = None, hint: str | None = None) -> _Message:
    """Format an error message with the problem, the value given, the value expected and a hint.

    >>> print(message("Batch is empty.", got="x of shape (0, 5, 2)", expected="at least 1 sample"))
    Batch is empty.
      got:      x of shape (0, 5, 2)
      expected: at least 1 sample
    """
    parts = {
        "problem": _shortened(problem),
        "got": None if got is None else _shortened(got),
        "expected": None if expected is None else _shortened(expected),
        "hint": hint,
    }
    text = _Message("\n".join(f"{_LABELS[name]}{part}" for name, part in parts.items() if part is not None))
    vars(text).update(parts)
    return text


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return a hint with the closest known name, if there is one, and the list of known names.

    >>> did_you_mean("lstn", ["lstm", "gru"])
    "did you mean 'lstm'? Known: 'lstm', 'gru'"
    """
    names = list(names)
    closest = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=1, cutoff=0.5) if isinstance(name, str) else []
    listing = (
        ", ".join([*(repr(k) for k in names[:_MOST_NAMES]), *(["..."] if len(names) > _MOST_NAMES else [])]) or "none"
    )
    return f"did you mean {closest[0]!r}? Known: {listing}" if closest else f"one of: {listing}"


def missing_attribute(owner: str, name: str, names: Iterable[str], prefix: str = "", other: str | None = None) -> str:
    """Return the message for an attribute that does not exist, with the closest one, or ``other``, to type.

    >>> print(missing_attribute("module 'rnnlens'", "gradient", ["gradients", "trace"], "rl."))
    module 'rnnlens' has no attribute 'gradient'.
      try:      rl.gradients
    """
    names = list(names)
    closest = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=1, cutoff=0.6)
    listing = ", ".join(names)
    hint = other or (f"{prefix}{closest[0]}" if closest else f"one of: {listing}")
    return message(f"{owner} has no attribute {name!r}.", hint=hint)


def short_repr(value: object) -> str:
    """Return a short description of any value for an error message, also of a large one or one whose repr fails.

    >>> short_repr("lstm"), short_repr(list(range(1000)))
    ("'lstm'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    shape = shape_of(value)
    return _SHORT_REPR.repr(value) if shape is None else f"{type(value).__name__} of shape {shape}"


def shape_of(value: object) -> tuple[int, ...] | None:
    """Return the shape of an array of any framework; None for a value without a readable shape."""
    try:
        return tuple(int(size) for size in value.shape)  # type: ignore[attr-defined]
    except Exception:  # the shape property of some tensors raises other errors
        return None


def has_attribute(value: object, name: str) -> bool:
    """Return whether an attribute exists and can be read, also for objects whose attributes raise other errors."""
    try:
        getattr(value, name)
    except Exception:
        return False
    return True


class Explanation(NamedTuple):
    """Likely cause of an exception of user code: the problem, what user code was called with, and what to type."""

    problem: str
    got: str | None = None
    expected: str | None = None
    hint: str = "the first traceback shows where"


@contextmanager
def raised_by(subject: str, explain: Callable[[Exception], Explanation | None] | None = None) -> Iterator[None]:
    """Convert exceptions of user code within the block to UserCodeError, with a message that starts with ``subject``.

    RnnlensError, KeyboardInterrupt and SystemExit are not converted. ``explain`` returns the likely cause of an
    exception, or None.

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
        raise _user_code_error(error, subject, explain) from error


def _user_code_error(
    error: Exception, subject: str, explain: Callable[[Exception], Explanation | None] | None
) -> UserCodeError:
    """Return a UserCodeError that is also an instance of the class of ``error``, if such a class can be created."""
    kind = type(error)
    try:
        explanation = explain(error) if explain is not None else None
    except Exception:  # an explanation reads values of the user, and must not hide the exception
        explanation = None
    problem, values, expected, hint = explanation or Explanation("")
    text = message(
        f"{subject} raised {kind.__name__}{f': {problem}' if problem else ''}.",
        got=_short_message(error) if values is None else f"{values}: {_short_message(error)}",
        expected=expected,
        hint=hint,
    )
    if isinstance(error, StopIteration):  # within a generator it would end the generator
        return UserCodeError(text)
    try:
        error_class = type(
            kind.__name__, (UserCodeError, kind), {"__str__": lambda self: text, "__module__": kind.__module__}
        )
        user_error: UserCodeError = error_class.__new__(error_class, *error.args)
        user_error.args = error.args
        vars(user_error).update(vars(text) | vars(error))
    except Exception:  # some classes cannot be a second base class, or not be created from their arguments
        return UserCodeError(text)
    return user_error


def _short_message(error: Exception) -> str:
    """Return the first four lines of an exception's message, joined; "no message" if it is empty."""
    try:
        plain_text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Keras sets words in bold type
        lines = [line.strip() for line in plain_text.splitlines() if line.strip()]
    except Exception:
        lines = []
    return " ".join(lines[:4]) or "no message"


class _ShortRepr(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:
        """Return the shortened repr of an object; "a <class>" if its repr raises."""
        try:
            return super().repr_instance(x, level)
        except Exception:
            return f"a {type(x).__name__}"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 120
_SHORT_REPR.maxlevel = 3

#: Maximal characters of a name that are compared, names that are listed, characters of a value that are shown.
_LONGEST_NAME, _MOST_NAMES, _LONGEST_VALUE = 200, 60, 1000


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


@contextmanager
def cell_rerun_errors(cell: str) -> Iterator[None]:
    """Convert exceptions of a user's cell, run outside its model on captured steps, to UnsupportedError.

    Raises
    ------
    UnsupportedError
        For any exception of the cell. It ran within the model, so it depends on more than its input and state.
    """
    try:
        yield
    except RnnlensError:
        raise
    except Exception as error:
        raise UnsupportedError(impure_cell_message(cell, f"{type(error).__name__}: {_short_message(error)}")) from error


def duplicate_name_message(name: str) -> str:
    """Return the error message for a model with two layers of one name."""
    return message(
        f"Two different layers are called {name!r}.",
        expected="a different name for each layer",
        hint="pass name= when creating the layers",
    )


def impure_cell_message(cell: str, got: str) -> str:
    """Return the error message for a cell that reads state which only exists while its model runs."""
    return message(
        f"{cell}, called again with its recorded input and state, returns other values than in the model.",
        got=got,
        expected="a cell whose step depends only on its input, its state and its weights",
        hint="pass everything it reads as part of its input or state; or rl.gradients by inputs and weights",
    )


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = [known for known, value in globals().items() if isinstance(value, type) and value.__module__ == __name__]
    public_names = [known for known in names if known.endswith(("Error", "Warning"))]
    raise AttributeError(missing_attribute(f"module {__name__!r}", name, public_names, "rl.errors."))
