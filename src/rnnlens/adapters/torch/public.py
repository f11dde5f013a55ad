"""``rl.torch``: functions for PyTorch models only.

>>> import rnnlens as rl  # doctest: +SKIP
>>> with rl.torch.cell(model.memory):  # doctest: +SKIP
...     trace = rl.trace(model, x, y, loss=loss)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...arguments import checked
from ...errors import InputError
from ...recurrence.cells import registered

__all__ = ["cell", "scan", "step"]

#: Recorder of ``step`` calls while rnnlens runs a model in this thread; None at all other times.
LISTENER: ContextVar[Callable[..., Any] | None] = ContextVar("steps of loops", default=None)

#: Recorder of ``scan`` calls while rnnlens runs a model in this thread; None at all other times.
SCANS: ContextVar[Callable[..., Any] | None] = ContextVar("declared scans", default=None)

#: In a set of requested layers: every declared scan.
ANY_SCAN = "*scan"

#: Declared scans that each model has run so far: axes and sizes of the state, by name.
SCANS_RUN: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[tuple[str, int], ...]]] = weakref.WeakKeyDictionary()

#: Modules that a user declared cells, by weak references: the modules are not changed and not kept in memory.
DECLARED_CELLS: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: Modules that may be cells and ran: whether they passed a state from call to call, and so are cells.
RAN_AS_CELL: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

#: Names of the states of custom cells and loops that each model has run so far, by layer.
STATES_RUN: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()

#: Loops that each model has run so far: sizes of the first state, by name. No function is stored.
LOOPS_RUN: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


#: Names of the arguments that are the state of a declared cell, where the user gave them.
STATE_ARGUMENTS: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()

#: Declared cells that keep their state in attributes: the method that computes a step, and the attributes' names.
KEPT_STATES: weakref.WeakKeyDictionary[nn.Module, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()


class _Declaration(ExitStack):
    """Declaration of cells, which ends with the ``with`` block that it is used in."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be called: a declaration is no module."""
        raise InputError(
            "rl.torch.cell declares a module a cell; it does not return one.",
            got="a call of what rl.torch.cell returned",
            expected="rl.torch.cell(module) on a line of its own, and calls of the module itself",
        )


@checked()
def cell(
    *modules: nn.Module, method: str = "forward", state: str | Sequence[str] = ()
) -> AbstractContextManager[object]:
    """Declare ``modules`` to be recurrent cells: their calls map inputs and a state to the next state, and outputs.

    This is needed where rnnlens cannot detect a cell: one called only once per forward pass, or one that contains a
    torch cell and is to be treated as a whole. The declaration lasts as long as the module, or to the end of a ``with``
    block. The module itself is not changed.

    Parameters
    ----------
    modules
        The cells. The state of a call is what the next call receives of the tensors that it returned.
    method
        Name of the method that computes one step, for a cell that keeps its state in its attributes.
    state
        Names of the arguments of ``forward`` that are the state, for a cell that is called only once; the new states
        are then its last results. Or names of attributes in which the cell keeps its state, such as the membrane
        potential of a spiking neuron: ``state=("mem", "v")``, or ``"self.mem"`` where an argument has that name, too.
        By default all arguments but the first, in any nesting of ``(sample, ...)`` tensors.

    Raises
    ------
    InputError
        For anything that is not a ``torch.nn.Module``, and for a name that is neither an argument of its ``forward``
        nor an attribute; for a ``method`` that it does not have, or that is given without attributes.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> class Cell(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = torch.nn.Linear(6, 4)
    ...     def forward(self, u, h):
    ...         return torch.tanh(self.linear(torch.cat([u, h], 1)))
    >>> class Once(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell = Cell()
    ...     def forward(self, x):
    ...         return self.cell(x[:, 0], x.new_zeros(len(x), 4))
    >>> model = Once()
    >>> with rl.torch.cell(model.cell, state="h"):
    ...     rl.trace(model, torch.randn(3, 1, 2))["cell"].hidden.shape
    (3, 1, 4)
    """
    names, is_kept = (state,) if isinstance(state, str) else tuple(state), dict[nn.Module, bool]()
    for module in modules or (None,):
        if not isinstance(module, nn.Module):
            raise InputError("A cell must be a torch module.", got=type(module).__name__, expected="a torch.nn.Module")
        if not callable(getattr(module, method, None)):
            raise InputError(f"A {type(module).__name__} has no such method.", got=f"method={method!r}")
        arguments = list(inspect.signature(getattr(module, method)).parameters) if names else []
        attributes = tuple(name.removeprefix("self.") for name in names if name not in arguments)
        is_kept[module] = (
            bool(names) and len(attributes) == len(names) and all(map(partial(hasattr, module), attributes))
        )
        unknown = [name for name in names if name not in arguments]
        if unknown and not is_kept[module]:
            expected = f"among the arguments {', '.join(arguments)}; or only attributes that the cell has"
            raise InputError(f"state= names arguments of the cell's {method}.", got=repr(unknown[0]), expected=expected)
        if method != "forward" and not is_kept[module]:
            message = "method= is for a cell that keeps its state in attributes; other methods are found as they run."
            raise InputError(message, got=f"method={method!r}", expected="state= with the names of attributes")
    declared = _Declaration()  # without a with block it is never closed, and the declaration stays
    for module in (getattr(module, "_orig_mod", module) for module in modules):
        if module not in DECLARED_CELLS:
            DECLARED_CELLS.add(module)
            declared.callback(DECLARED_CELLS.discard, module)
        if is_kept.get(module):
            KEPT_STATES[module] = method, tuple(name.removeprefix("self.") for name in names)
            declared.callback(KEPT_STATES.pop, module, None)
        elif names:
            STATE_ARGUMENTS[module] = names
            declared.callback(STATE_ARGUMENTS.pop, module, None)
    return declared


def step(function: Callable[..., Any], x: Tensor, *state: Any, name: str | None = None) -> Any:
    """Compute ``function(x, *state)`` as one recorded step of a loop that has no module.

    Write ``h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h)`` in place of
    ``h = torch.tanh(x[:, t] @ W + h @ U)``. Outside of rnnlens this only calls the function. Within rnnlens the loop is
    recorded as a layer with a custom cell. ``rl.layers(model, x)`` lists the loop.

    Parameters
    ----------
    function
        Function from the input (sample, feature) and the states (sample, ...) to the new states, or to (output,
        states). It must be the same at every step: everything that changes from step to step must be an input or a
        state.
    name
        Name of the layer in results; ``"loop"`` by default, ``"loop_1"`` for the second loop of a model.

    Raises
    ------
    InputError
        If ``function`` is not callable, or no state is given.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> W, U = torch.randn(4, 2), torch.randn(4, 4)
    >>> class Loop(torch.nn.Module):
    ...     def forward(self, x):
    ...         h = x.new_zeros(len(x), 4)
    ...         for t in range(x.shape[1]):
    ...             h = rl.torch.step(lambda u, h: torch.tanh(u @ W.T + h @ U.T), x[:, t], h, name="loop")
    ...         return h
    >>> rl.trace(Loop(), torch.randn(3, 9, 2))["loop"].hidden.shape
    (3, 9, 4)
    """
    if not callable(function) or not state:
        raise InputError(
            "rl.torch.step takes a function, its input and its state.",
            got=f"{type(function).__name__} and {len(state)} states",
            expected="rl.torch.step(lambda x, h: ..., x[:, t], h)",
        )
    listener = LISTENER.get()
    return function(x, *state) if listener is None else listener(function, x, state, name)


def scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None = None,
    *,
    function: Callable[..., Tensor] | None = None,
    name: str | None = None,
) -> Tensor:
    """Compute the states s_t = a_t s_{t-1} + b_t of all steps, as one recorded diagonal recurrence.

    For minGRU, an LRU, S5 or a scan of your own, parallel or sequential, of real or complex numbers. Outside of rnnlens
    this is ``function(a, b)``, or a loop over the steps. Within rnnlens the states and the gradients of states, a and b
    are recorded as a whole-sequence layer, in time linear in the steps, and the states are compared with ``function``.
    ``rl.layers(model, x)`` lists the scan.

    Parameters
    ----------
    a, b : (sample, time, unit) or (sample, time, head, channel)
        Decay of each state, and what each step adds to it. Gradients of complex numbers z are dL/dRe z + i dL/dIm z,
        as in torch.
    initial : (sample, unit) or (sample, head, channel)
        State before the first step; zero by default.
    function
        Your own implementation, called as ``function(a, b)``, or ``function(a, b, initial)`` with an initial state.
    name
        Name of the layer in results; ``"scan"`` by default, ``"scan_1"`` for the second scan of a model.

    Returns
    -------
    Tensor
        States after every step, shaped as ``b``.

    Raises
    ------
    InputError
        If the tensors do not have one shape, or less than three axes.

    Examples
    --------
    >>> import torch, rnnlens as rl
    >>> rl.torch.scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)).flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dim() in (3, 4)):
        shapes = " and ".join(str(tuple(getattr(t, "shape", ()))) for t in (a, b))
        expected = "a and b (sample, time, unit) or (sample, time, head, channel)"
        raise InputError("rl.torch.scan takes two tensors of one shape.", got=shapes, expected=expected)
    if initial is not None and tuple(initial.shape) != (b.shape[0], *b.shape[2:]):
        expected = f"{(b.shape[0], *b.shape[2:])}"
        raise InputError("initial= is one state.", got=str(tuple(initial.shape)), expected=expected)
    listener = SCANS.get()
    if listener is not None:
        return listener(a, b, initial, function, name)
    if function is not None:
        return function(a, b) if initial is None else function(a, b, initial)
    return scan_by_steps(a, b, initial)


def scan_by_steps(a: Tensor, b: Tensor, initial: Tensor | None = None) -> Tensor:
    """Compute s_t = a_t s_{t-1} + b_t step by step; the states (sample, time, ...)."""
    state, states = b.new_zeros(b.shape[0], *b.shape[2:]) if initial is None else initial, []
    for decay, write in zip(a.unbind(1), b.unbind(1), strict=True):
        state = decay * state + write
        states.append(state)
    return torch.stack(states, 1)


def is_declared_cell(module: nn.Module) -> bool:
    """Return whether the user declared a module a cell, or registered its class."""
    return module in DECLARED_CELLS or registered(module) is not None
