"""Options for a thread or a ``with`` block, memory sizes such as "2 GiB", and a progress bar for long jobs."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, ParamSpec, Self, get_args

import numpy as np

from .errors import CallError, InputError, TooLargeError, did_you_mean, short_repr

P = ParamSpec("P")
Certify = Literal["auto", "always", "first", "never"]

#: Seconds after which a job shows a progress bar.
PATIENCE_S = 2.0

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True)
class Settings:
    """Values of all options.

    Attributes
    ----------
    memory
        Bytes that a single call may use for its working arrays and result, where rnnlens can choose.
    progress
        True or False; ``"auto"`` shows a bar only in a terminal or a notebook.
    certify
        Which results are compared with a reference run of the model; see :class:`options`.
    compiled
        Number of compiled runs that are cached per model.
    """

    memory: int = 2 * 1024**3
    progress: bool | Literal["auto"] = "auto"
    certify: Certify = "auto"
    compiled: int = 128


_CURRENT: ContextVar[Settings] = ContextVar("rnnlens_settings", default=Settings())  # noqa: B039 - it is frozen


def current() -> Settings:
    """Return the settings of the current thread or asyncio task."""
    return _CURRENT.get()


def _known_options(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function of options to name the one that does not exist, and the closest that does."""

    @functools.wraps(function)
    def with_check(*args: P.args, **kwargs: P.kwargs) -> None:
        names = [setting.name for setting in fields(Settings)]
        for name in kwargs:
            if name not in names:
                raise CallError("There is no such option.", got=f"{name}=", hint=did_you_mean(name, names))
        function(*args, **kwargs)

    return with_check


class options:  # noqa: N801 - called like a function
    """Setter of options, from the call on or for the length of a ``with`` block.

    Options apply to the current thread or asyncio task.

    Parameters
    ----------
    memory
        Bytes that a single call may use for its working arrays and result, where rnnlens can choose: a text such as
        ``"2 GiB"``, the default, or a number.
    progress
        Whether long jobs show a progress bar. ``"auto"``, the default: only in a terminal or a notebook.
    certify
        Which results are certified by a reference run, which costs one forward and backward pass of the model.
        ``"always"``: all, with all samples. ``"first"``: per request, model and data shapes until a call passed, whose
        certificate later calls repeat; later traces also omit the check of weight gradients. ``"never"``: none.
        ``"auto"``, the default: all results, but time Jacobians as ``"first"``, since a small one takes less time than
        preparing a reference run; traces after the first on one model and data shape with a sixteenth of the samples,
        another one at each call.
    compiled
        Number of compiled runs that are cached per model (TensorFlow, JAX); 128 by default. Each combination of
        sequence length, batch size and request needs one to three; the least recently used is dropped first. A loop
        over more combinations than are cached compiles at every call.

    Raises
    ------
    InputError
        If a value is invalid; no option is changed then.

    Examples
    --------
    >>> with options(memory="1 GiB"):
    ...     current().memory
    1073741824
    >>> current().memory
    2147483648
    """

    @_known_options
    def __init__(
        self,
        *,
        memory: str | int | None = None,
        progress: bool | Literal["auto"] | None = None,
        certify: Certify | None = None,
        compiled: int | None = None,
    ) -> None:
        new_values: dict[str, Any] = {}
        if memory is not None:
            new_values["memory"] = parse_memory(memory)
        if progress is not None:
            if not isinstance(progress, bool | np.bool_) and not (isinstance(progress, str) and progress == "auto"):
                raise InputError("progress= is a switch.", got=short_repr(progress), expected="True, False or 'auto'")
            new_values["progress"] = progress if isinstance(progress, str) else bool(progress)
        if certify is not None:
            if not isinstance(certify, str) or certify not in get_args(Certify):
                choices = ", ".join(map(repr, get_args(Certify)))
                raise InputError("certify= is no such switch.", got=short_repr(certify), expected=f"one of {choices}")
            new_values["certify"] = certify
        if compiled is not None:
            if isinstance(compiled, bool) or not isinstance(compiled, int | np.integer) or compiled < 1:
                expected = "a whole number of compiled runs, at least 1"
                raise InputError("compiled= must be a whole number.", got=short_repr(compiled), expected=expected)
            new_values["compiled"] = int(compiled)
        self._new_values = new_values
        #: Settings to restore, one entry per ``with`` block entered; creating this object counts as the first.
        self._earlier_settings = [current()]
        self._is_new = True
        _CURRENT.set(replace(current(), **new_values))

    def __enter__(self) -> Settings:
        if not self._is_new:
            self._earlier_settings.append(current())
        self._is_new = False
        _CURRENT.set(replace(current(), **self._new_values))
        return current()

    def __exit__(self, *exc: object) -> None:
        _CURRENT.set(self._earlier_settings.pop())


def parse_memory(amount: str | int | float) -> int:
    """Convert an amount such as ``"2 GiB"``, ``"500 MB"`` or a number to bytes.

    >>> parse_memory("1.5 KiB"), parse_memory("2GB"), parse_memory(4096)
    (1536, 2000000000, 4096)

    Raises
    ------
    InputError
        If the amount is not positive or cannot be read.
    """
    if isinstance(amount, bool) or not isinstance(amount, str | int | float | np.integer | np.floating):
        expected = 'such as "2 GiB", "500 MB" or a number of bytes'
        raise InputError("This is not an amount of memory.", got=short_repr(amount), expected=expected)
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([a-z]*)\s*", str(amount)[:100], re.IGNORECASE)
    unit = None if match is None else _unit_bytes(match[2])
    try:
        size = int(float(match[1]) * unit) if match and unit else 0
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        expected = 'such as "2 GiB", "500 MB" or a number of bytes'
        raise InputError("This is not an amount of memory.", got=short_repr(amount), expected=expected)
    return size


def format_memory(size: int | float) -> str:
    """Format a number of bytes in binary units.

    >>> format_memory(1536), format_memory(3 * 1024**3)
    ('1.5 KiB', '3 GiB')
    """
    value = float(size)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def must_fit(problem: str, size: float, hint: str | None, *, got: str = "{}", limit: int | None = None) -> None:
    """Raise TooLargeError with the message ``problem`` if ``size`` bytes exceed the memory granted.

    ``limit`` is the memory granted, by default that of ``rl.options``. ``got`` is text on the size, with ``{}`` for
    the bytes.
    """
    memory_limit = current().memory if limit is None else limit
    if size > memory_limit:
        option = "rl.options(memory=...)" if limit is None else "memory="
        expected = f"at most {format_memory(memory_limit)} ({option})"
        raise TooLargeError(problem, got=got.format(format_memory(size)), expected=expected, hint=hint)


def _unit_bytes(unit_name: str) -> int | None:
    """Return the bytes of a unit in any capitalisation, None if unknown; K, M, G and T alone are binary."""
    unit_name = unit_name.lower() or "b"
    sizes = {unit.lower(): size for unit, size in _BYTES.items()}
    return sizes.get(f"{unit_name}ib" if unit_name in "kmgt" else unit_name)


class Progress:
    """A progress bar on standard error, shown once a job has run for two seconds and removed when the job ends.

    Examples
    --------
    >>> with Progress("time Jacobian", total=10) as progress:
    ...     for _ in range(10):
    ...         progress.advance()
    """

    def __init__(self, description: str, total: float | None = None, *, patience: float = PATIENCE_S) -> None:
        self._description = description
        self._total = total
        self._patience = patience
        self._completed = 0.0
        self._bar: Any = None
        self._task: Any = None

    def advance(self, amount: float = 1.0) -> None:
        """Report that ``amount`` more of ``total`` is done."""
        self._completed += amount
        if self._bar is None and self._is_enabled and time.monotonic() - self._start >= self._patience:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._completed)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._description, total=self._total)
        self._bar.start()

    def __enter__(self) -> Self:
        is_enabled = current().progress
        if is_enabled == "auto":
            is_enabled = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._is_enabled = is_enabled
        self._start = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
