"""``rl.torch``: what only torch users need.

>>> import rnnlens as rl  # doctest: +SKIP
>>> with rl.torch.cell(model.memory):  # doctest: +SKIP
...     trace = rl.trace(model, x, y, loss=loss)
"""

from __future__ import annotations

import weakref

from torch import nn

from ...errors import InputError, message
from ...recurrence.cells import registered

__all__ = ["cell"]

#: modules that a user called cells; nothing is written on the module and none is kept alive.
_NAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Named:
    """What :func:`cell` returns: ends the naming as a context manager, or never where it is not used as one."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._fresh = [weakref.ref(module) for module in modules if module not in _NAMED]
        for module in modules:
            _NAMED.add(module)

    def __enter__(self) -> _Named:
        return self

    def __exit__(self, *exc: object) -> None:
        for reference in self._fresh:
            module = reference()
            if module is not None:
                _NAMED.discard(module)


def cell(*modules: nn.Module) -> _Named:
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
    return _Named(tuple(getattr(module, "_orig_mod", module) for module in modules))


def named_cell(module: nn.Module) -> nn.Module | None:
    """``module`` if the user called it a cell, or registered its class as one, else None."""
    return module if module in _NAMED or registered(module) is not None else None
