"""``rl.torch``: what only torch users need.

>>> import rnnlens as rl  # doctest: +SKIP
>>> with rl.torch.cell(model.memory):  # doctest: +SKIP
...     trace = rl.trace(model, x, y, loss=loss)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from ...errors import InputError, message
from ...recurrence.cells import registered

__all__ = ["cell", "step"]


#: What notes the steps of loops while a model is looked at in this thread; None at all other times.
LISTENER: ContextVar[Callable[..., Any] | None] = ContextVar("steps of loops", default=None)


#: modules that a user called cells; nothing is written on the module and none is kept alive.
_NAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


#: Loops that were seen in a model while it ran: names, and sizes of the first state. No function is kept.
_LOOPS: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


def note_loop(model: nn.Module, name: str, units: int) -> None:
    """Remember a loop of a model."""
    _LOOPS.setdefault(model, {})[name] = units


def loops_of(model: nn.Module) -> dict[str, int]:
    """Loops that were seen when the model last ran under rnnlens, and the sizes of their first states."""
    return dict(_LOOPS.get(model, {}))


class _NamedCells:
    """What :func:`cell` returns: ends the naming as a context manager, or never where it is not used as one."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._fresh = [weakref.ref(module) for module in modules if module not in _NAMED]
        for module in modules:
            _NAMED.add(module)

    def __enter__(self) -> _NamedCells:
        return self

    def __exit__(self, *exc: object) -> None:
        for reference in self._fresh:
            module = reference()
            if module is not None:
                _NAMED.discard(module)


def cell(*modules: nn.Module) -> _NamedCells:
    """Say that ``modules`` are recurrent cells: their calls map (input, state) to state or to (output, state).

    Needed where rnnlens cannot see it by itself: a cell called once per forward pass, or one that holds a torch cell
    inside and is meant as a whole. The name holds until the module is gone, or within a ``with`` block only. The module
    itself is not touched.

    Parameters
    ----------
    modules
        The cells. The first argument of a call is the input ``(sample, feature)``; the rest is the state, any nesting
        of ``(sample, ...)`` tensors.

    Raises
    ------
    InputError
        For anything that is not a ``torch.nn.Module``.
    """
    for module in modules or (None,):
        if not isinstance(module, nn.Module):
            raise InputError(
                message("Only a module can be a cell.", got=type(module).__name__, expected="a torch.nn.Module")
            )
    return _NamedCells(tuple(getattr(module, "_orig_mod", module) for module in modules))


def step(function: Callable[..., Any], x: Tensor, *state: Any, name: str | None = None) -> Any:
    """``function(x, *state)``: one step of a loop that has no module for it, made visible.

    Write ``h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h)`` in place of
    ``h = torch.tanh(x[:, t] @ W + h @ U)``. Everywhere but in a call of rnnlens this is the call of the function and no
    more. The loop shows as a layer of a cell of one's own; ``rl.layers`` and names know it once the model ran.

    Parameters
    ----------
    function
        From the input (sample, feature) and the states (sample, ...) to the new states, or to (output, states). It has
        to be the same function at every step: what changes from step to step is input or state.
    name
        Of the layer in results; ``"loop"`` by default, ``"loop_1"`` for the second loop of a model.

    Raises
    ------
    InputError
        If ``function`` cannot be called, or there is no state.
    """
    if not callable(function) or not state:
        raise InputError(
            message(
                "rl.torch.step takes a function, its input and its state.",
                got=f"{type(function).__name__} and {len(state)} states",
                expected="rl.torch.step(lambda x, h: ..., x[:, t], h)",
            )
        )
    listener = LISTENER.get()
    return function(x, *state) if listener is None else listener(function, x, state, name)


def named_cell(module: nn.Module) -> nn.Module | None:
    """``module`` if the user called it a cell, or registered its class as one, else None."""
    return module if module in _NAMED or registered(module) is not None else None
