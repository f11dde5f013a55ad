"""Checks of arguments: the decorator ``checked``, and checks of numbers, switches, names and paths.

A check is a function of an argument's name and its value, and returns the value that the function receives.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..errors import CallError, FileError, InputError, RnnlensError, did_you_mean, has_attribute, shape_of, short_repr
from ..settings import parse_memory

#: Most items that are read from an iterator, which may be endless.
_MAX_ITEMS = 1_000_000
#: Longest file name that common file systems accept.
_LONGEST_NAME = 255

P = ParamSpec("P")
R = TypeVar("R")

#: ``check(name, value)`` returns the value, converted where needed, or raises InputError.
Check = Callable[[str, Any], Any]


#: What users of sessions and placeholders are told, whose adapter is a distribution of its own.
GRAPHS_HINT = (
    'net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, targets=labels, '
    "feed={keep_prob: 1.0}), of the package rnnlens-tf1; then rl.trace(net, x, y)"
)

#: Arguments of other libraries that users may expect, each with a hint what to use instead.
_FOREIGN_ARGUMENTS = {
    **dict.fromkeys(("layer_name", "layer_names", "_id"), 'layers=["lstm"], or wrt="lstm.weights" of gradients'),
    "input_data": "x",
    "mode": 'rl.gradients(..., wrt="weights") for "weights"; rl.trace(model, x, y)[layer].output_grad for "outputs"',
    "params": 'wrt= of rl.gradients, such as wrt=["lstm.weights"]',
    **dict.fromkeys(("as_dict", "as_tensors"), "leave it out: results are labelled arrays, found by name"),
    "inputs": "x",
    "labels": "y",
    "targets": "y",
    "target": "y",
    "learning_phase": "training=True",
    "criterion": "loss=",
    "loss_fn": "loss=",
    "output": "of=",
    "batch_size": "rl.gradients(model, data, batch_size=...), which goes through a data set; this takes one batch",
    "figsize": "figure=matplotlib.figure.Figure(figsize=(width, height))",
    "feed_dict": GRAPHS_HINT,
}


def anything(name: str, value: Any) -> Any:
    """Accept and return any value: the check of an argument that the function checks itself."""
    return value


def checked(**table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a table of checks validates and converts its arguments; defaults are not checked.

    The table has a check for each parameter, except one that collects further keywords (``**line``).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        unknown = table.keys() - signature.parameters.keys()
        assert not unknown, f"{function.__name__} has no {unknown}"

        @functools.wraps(function)
        def with_checks(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _call_error(function, signature, args, kwargs, error) from None
            for name, value in bound.arguments.items():
                if name in table and value is not signature.parameters[name].default:
                    bound.arguments[name] = table[name](name, value)
            return function(*bound.args, **bound.kwargs)

        with_checks.table = table  # type: ignore[attr-defined]
        return with_checks

    return decorate


def _call_error(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
) -> CallError:
    """Return the error for arguments that a function does not have, or misses."""
    parameters = [p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD and n != "self"]
    parameter_names = [p.name for p in parameters]
    unknown_name = next((name for name in kwargs if name not in parameter_names), None)
    function_name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    argument_texts = [f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
    hint = (
        f"{function_name}({', '.join(argument_texts)})"
        if unknown_name is None
        else did_you_mean(unknown_name, parameter_names)
    )
    if unknown_name in _FOREIGN_ARGUMENTS:
        hint = _FOREIGN_ARGUMENTS[unknown_name]
    if function_name == "diagnose" and any(type(value).__name__ == "TrainingRun" for value in args):
        hint = f"run.findings are those of a followed training; of the model itself: {hint}"
    return CallError(f"{function_name} cannot be called like this: {error}.", hint=hint)


def switch(name: str, value: Any) -> bool:
    """Check that ``value`` is True or False, of Python or NumPy, and return a Python bool."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name}= is a switch.", got=short_repr(value), expected="True or False")
    return bool(value)


def one_of(*choices: str) -> Check:
    """Return a check that accepts only the given words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InputError(f"{name}= is not understood.", got=short_repr(value), hint=did_you_mean(value, choices))
        return str(value)

    return check


def integer(*, least: int | None = None, most: int | None = None) -> Check:
    """Return a check that accepts integers from ``least`` to ``most``, without True and False."""

    def check(name: str, value: Any) -> int:
        try:
            number = None if isinstance(value, bool | np.bool_) else operator.index(value)
        except Exception:
            number = None
        if number is None or (least is not None and number < least) or (most is not None and number > most):
            bounds = [f"{name} >= {least}"] * (least is not None) + [f"{name} <= {most}"] * (most is not None)
            expected = ", ".join(["a whole number", *bounds])
            raise InputError(f"{name}= is a whole number.", got=short_repr(value), expected=expected)
        return number

    return check


def number(
    *, least: float = -math.inf, below: float = math.inf, above: float | None = None, what: str = "is a number"
) -> Check:
    """Return a check that accepts finite real numbers with ``least <= number < below`` and ``number > above``."""
    lower_bound = f"{least:g} <= " if math.isfinite(least) else "" if above is None else f"{above:g} < "
    condition = f"{lower_bound}{{name}}" + (f" < {below:g}" if math.isfinite(below) else "")

    def check(name: str, value: Any) -> float:
        is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        try:
            converted = float(value) if is_real else math.nan
        except OverflowError:
            converted = math.nan
        if not math.isfinite(converted) or not least <= converted < below or (above is not None and converted <= above):
            expected = "a finite number" if condition == "{name}" else condition.format(name=name)
            raise InputError(f"{name}= {what}.", got=short_repr(value), expected=expected)
        return converted

    return check


def shares(name: str, value: Any) -> tuple[float, ...]:
    """Check one or several shares, 0 <= share <= 1, and return them as a tuple."""
    values = [value] if isinstance(value, int | float) else as_list(value)
    checked = tuple(number(least=0)(name, share) for share in values or ())
    if not checked or max(checked) > 1:
        raise InputError(f"{name}= has shares.", got=short_repr(value), expected="0.5, or (0.5, 0.25): 0 to 1")
    return checked


def as_name(value: Any) -> Any:
    """Return the name of a TensorFlow graph tensor; return any other value unchanged."""
    if not has_attribute(value, "name") or not has_attribute(value, "op"):
        return value
    return value.name if isinstance(value.name, str) and value.op is not None else value


def text(name: str, value: Any) -> str:
    """Check an argument that is a name, and return it: a string that is not empty, or a graph tensor's name."""
    value = as_name(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name}= is a name.", got=short_repr(value), expected="a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        expected = "text that can be written to a file"
        raise InputError(f"{name}= holds half a character.", got=short_repr(value), expected=expected) from None
    return str(value)


def names(name: str, value: Any) -> str | tuple[str, ...]:
    """Check one name or a collection of distinct names; return a string, or a tuple in the order given."""
    value = as_name(value)
    if isinstance(value, str):
        return text(name, value)
    items = as_list(value)
    items = None if items is None else list(map(as_name, items))
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        got = "no names" if items is not None and not items else short_repr(value)
        called = value.name if has_attribute(value, "name") else None
        hint = f"{name}={called!r}" if isinstance(called, str) else None
        if hint is None and name == "layers":
            hint = "a name that rl.layers(model) lists, such as layers='lstm'"
        raise InputError(f"{name}= names nothing.", got=got, expected="a name, or a list of names", hint=hint)
    counts = Counter(map(str, items))
    if duplicate := next((item for item, count in counts.items() if count > 1), None):
        raise InputError(f"{name}= names {duplicate!r} twice.", got=short_repr(items), expected="each name once")
    return tuple(counts)


def as_list(value: Any, most: int = _MAX_ITEMS) -> list[Any] | None:
    """Return the items of an iterable as a list; None for strings, mappings, or more than ``most`` items."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection | Iterator):
        return None  # a data loader is neither of the two
    try:
        items = list(islice(value, most + 1))
    except Exception:
        return None
    return items if len(items) <= most else None


def memory(name: str, value: Any) -> int:
    """Convert an amount of memory, such as ``"2 GiB"`` or a number, to bytes."""
    return parse_memory(value)


#: Check of a random seed; frameworks accept 32 bits.
seed = integer(least=0, most=2**32 - 1)


def seed_or_none(name: str, value: Any) -> int | None:
    """Check a random seed of 32 bits. None is accepted and leaves the random generators unseeded."""
    return None if value is None else seed(name, value)


def refuse_without_order(name: str, value: Any) -> None:
    """Raise InputError for a set, a dict or an iterator, which give no order or can be read only once."""
    if isinstance(value, Set | Mapping | Iterator):
        kind, expected = type(value).__name__, "an int, a list of int, a slice"
        hint = "sorted(...)" if isinstance(value, Set) else "list(...)"
        raise InputError(f"{name}= takes numbers in an order.", got=f"a {kind}", expected=expected, hint=hint)


def kept_steps(name: str, value: Any) -> int | slice | list[int]:
    """Check time steps: an integer, a non-empty collection of integers, or a slice."""
    whole_number = integer()
    if isinstance(value, slice):
        for bound in (value.start, value.stop, value.step):
            if bound is not None:
                whole_number(name, bound)
        if value.step is not None and operator.index(value.step) == 0:
            raise InputError(f"{name}= is a slice with step 0.", got=short_repr(value))
        return value
    refuse_without_order(name, value)
    plain_value = value.tolist() if has_attribute(value, "tolist") and np.ndim(value) <= 1 else value
    if isinstance(plain_value, int):
        return int(whole_number(name, plain_value))
    steps = as_list(plain_value)
    if not steps or any(isinstance(step, bool | np.bool_) or not has_attribute(step, "__index__") for step in steps):
        got = "no steps" if steps is not None and not steps else short_repr(value)
        raise InputError(f"{name}= names no steps.", got=got, expected="an int, a list of int, a slice")
    return [int(whole_number(name, step)) for step in steps]


def path(name: str, value: Any) -> str:
    """Check the path of a file, and return it as a string."""
    try:
        path_text = os.fspath(value)
    except Exception:
        path_text = None
    if not isinstance(path_text, str) or not path_text.strip() or "\0" in path_text:
        raise InputError(f"{name}= is the path of a file.", got=short_repr(value), expected="a string or a Path")
    if max(map(len, map(os.fsencode, path_text.split(os.sep)))) > _LONGEST_NAME:
        expected = f"no part longer than {_LONGEST_NAME} letters"
        raise FileError(f"{name}= is too long for a file's name.", got=short_repr(value), expected=expected)
    return path_text


def loss(name: str, value: Any) -> Any:
    """Check a loss: a callable, the name of a loss, or a list or dict of these, one per model output."""
    if isinstance(value, Mapping | list | tuple) and value:
        for single_loss in value.values() if isinstance(value, Mapping) else value:
            if single_loss is not None:
                _check_loss(name, single_loss)
        return value
    return _check_loss(name, value)


def _check_loss(name: str, value: Any) -> Any:
    value = as_name(value)
    if isinstance(value, type):
        raise InputError(
            f"{name}= is a class, not an instance of it.",
            got=value.__name__,
            expected="an instance of it, or a function",
            hint=f"{name}={value.__name__}()",
        )
    if isinstance(value, str) and value.strip():
        return str(value)
    if isinstance(value, str) or not callable(value):
        expected = "a function of the target and the output, in the framework's order, or the name of a loss"
        hint = "pass the function, not its value: loss=criterion, not loss=criterion(model(x), y)"
        is_value = shape_of(value) is not None or isinstance(value, int | float)
        raise InputError(
            f"{name}= cannot be called.", got=short_repr(value), expected=expected, hint=hint if is_value else None
        )
    return value


def class_weights(name: str, value: Any) -> dict[int, float]:
    """Check a dict from class index to weight, such as ``{0: 1.0, 1: 5.0}``."""
    if not isinstance(value, Mapping) or not value:
        expected = "a dict from class to weight, such as {0: 1.0, 1: 5.0}"
        raise InputError(f"{name}= has no entry.", got=short_repr(value), expected=expected)
    check_label, check_weight = integer(least=0), number(least=0)
    return {
        check_label(f"{name} (a class)", key): check_weight(f"{name}[{key!r}]", class_weight)
        for key, class_weight in value.items()
    }


def axes_by_name(name: str, value: Any) -> dict[str, Any]:
    """Check a dict with dimension names as keys and any values, such as ``{"time": 10, "unit": [0, 1]}``."""
    if not isinstance(value, Mapping) or not all(isinstance(dim, str) for dim in value):
        expected = 'a dict by dimension, such as {"time": 10, "unit": [0, 1]}'
        raise InputError(f"{name}= selects by dimension.", got=short_repr(value), expected=expected)
    return dict(value)


def either(*checks: Check, expected: str, what: str = "is not understood") -> Check:
    """Return a check that applies several checks in turn, and returns the result of the first that passes."""

    def check(name: str, value: Any) -> Any:
        for candidate in checks:
            try:
                return candidate(name, value)
            except RnnlensError:
                continue
        raise InputError(f"{name}= {what}.", got=short_repr(value), expected=expected)

    return check


def callable_value(name: str, value: Any) -> Any:
    """Check that ``value`` is a callable object and not a class."""
    if not callable(value) or isinstance(value, type):
        raise InputError(f"{name}= cannot be called.", got=short_repr(value), expected="a function")
    return value
