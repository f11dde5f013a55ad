"""Records custom cells and loops that the user's own code calls step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import InputError, UnsupportedError
from ...recurrence.cells import StepCell, registered
from .cells import CellForm, TorchStepCell, leaves
from .discover import input_argument
from .lineage import Continuation, upstream
from .public import LOOPS_RUN, is_declared_cell
from .record import (
    CallOwner,
    CallRecorder,
    autocast_around,
    differentiable,
    refuse_transformed,
)

#: Function from an input and state tensors to the arguments of the user's cell.
Arguments = Callable[[Tensor, Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


class LoopStep(nn.Module):  # type: ignore[misc]
    """Module around a user's step function; its parameters are those of the model that the function used."""

    def __init__(self, function: Callable[..., Any], names: dict[int, str]) -> None:
        super().__init__()
        self.function, self._names = function, names
        self._used: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *state: Any) -> Any:
        """Call the function, and collect from its graph the parameters that it used."""
        output = self.function(x, *state)
        given = {tensor.grad_fn for tensor in leaves((x, state))}  # what is behind the arguments is not the function's
        nodes = upstream([tensor.grad_fn for tensor in reversed(leaves(output))], given)
        used = [node.variable for node in nodes if hasattr(node, "variable")]
        self._used |= {self._names[id(leaf)]: leaf for leaf in used if id(leaf) in self._names}
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that the function used, by their names in the model."""
        return iter(self._used.items())


class StepListener:
    """Recorder of ``rl.torch.step`` calls during one pass."""

    def __init__(self, recorder: CallRecorder, model: nn.Module, asked: Sequence[str] | None) -> None:
        self.recorder, self.model = recorder, model
        self.asked = None if asked is None else {name.partition("#")[0] for name in asked}
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.hooks: dict[Any, CellHook] = {}

    def __call__(self, function: Callable[..., Any], x: Tensor, state: Sequence[Any], name: str | None) -> Any:
        """Call the user's step and record it as the call of a cell."""
        if self.recorder.paused:
            return function(x, *state)
        key: Any = name or getattr(function, "__code__", id(function))
        if key not in self.hooks:
            self.hooks[key] = self._hook(function, name)
        hook = self.hooks[key]
        if self.asked is not None and hook.owner.name not in self.asked:
            return function(x, *state)
        module = hook.module
        module.function = function
        fed = hook.before(module, (x, *state), {})
        args, kwargs = ((x, *state), {}) if fed is None else fed
        output = module(*args, **kwargs)
        handed = hook.after(module, args, kwargs, output)
        LOOPS_RUN.setdefault(self.model, {})[hook.owner.name] = int(leaves(output)[0].flatten(1).shape[1])
        return output if handed is None else handed

    def _hook(self, function: Callable[..., Any], name: str | None) -> CellHook:
        count = sum(hook.owner.name.startswith("loop") for hook in self.hooks.values())
        name = name or (f"loop_{count}" if count else "loop")
        if name in dict(self.model.named_modules()):
            what = f"rl.torch.step(..., name={name!r}): a module has that name."
            raise InputError(what, expected="a different name for each loop")
        hook = CellHook(self.recorder, name, LoopStep(function, self.names))
        # The same key in every pass over the model: ``never_by_row`` is passed on from pass to pass.
        hook.owner.key, hook.owner.named = hash((name, id(self.model))), True
        return hook


class _NotACellError(Exception):
    """Reason why a call cannot be a step of a recurrence."""


class EnteredCall:
    """One call between its pre-hook and its hook: the user's input and states, and their substitutes ``fed``."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> None:
        flat, self._spec = pytree.tree_flatten((args, kwargs))
        x = args[position] if len(args) > position else kwargs.get(name)
        if not isinstance(x, Tensor) or x.dim() not in (2, 3, 4, 5) or not x.is_floating_point():
            raise _NotACellError("its input is not a floating tensor (sample, feature) or (sample, channel, *space)")
        self.x: Tensor = x
        self._inputs = [i for i, leaf in enumerate(flat) if leaf is x]
        self._places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf is not x]
        # Of other leaves only values that are no tensors are stored, so that the forward pass is not kept in memory.
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        self.given = [flat[i] for i in self._places]
        for state in self.given:
            if not state.is_floating_point() or state.dim() < 2 or state.shape[0] != self.x.shape[0]:
                raise _NotACellError("one of its state tensors is not floating, or not of shape (sample, ...)")
        if x.dim() > 2 and (not self.given or any(state.shape[2:] != x.shape[2:] for state in self.given)):
            raise _NotACellError("its states are not (sample, channel, *space) in the space of its input")
        self.fed: list[Tensor] = []
        self.before: Continuation | None = None

    def arguments(self) -> Arguments:
        """Return a function that puts other tensors in place of a call's input and states; it refers to no tensor."""
        constants, inputs, places, spec = self._constants, self._inputs, self._places, self._spec

        def again(x: Tensor, state: Sequence[Tensor]) -> Any:
            tensors = dict.fromkeys(inputs, x) | dict(zip(places, state, strict=True))
            return pytree.tree_unflatten([tensors.get(i, leaf) for i, leaf in enumerate(constants)], spec)

        return again


class CellHook:
    """Forward pre-hook and forward hook of one candidate for a cell.

    A candidate that proves not to be a cell runs unchanged and is no longer recorded. If the user declared it a cell,
    ``UnsupportedError`` with the reason is raised instead.
    """

    def __init__(self, recorder: CallRecorder, path: str, module: Any) -> None:
        self.recorder, self.module = recorder, module
        self.owner = CallOwner(id(module), path, StepCell, named=is_declared_cell(module))
        self.owner.module = module if registered(module) is not None else None
        self.position, self.name = input_argument(module)
        self.active = True
        self.entered: EnteredCall | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the states passed to a cell by the recorded tensors that it continues from (forward pre-hook)."""
        self.entered = None
        if not self.active or self.recorder.paused:
            return None
        try:
            entered = EnteredCall(args, kwargs, self.position, self.name)
        except _NotACellError as reason:
            return self._give_up(reason)
        refuse_transformed(self.owner.name, [entered.x, *entered.given])
        entered.before = self.recorder.continued(self.owner, entered.given)
        entered.fed = list(self.recorder.started(entered.given, entered.before))
        entered.x, self.entered = self.recorder.fed(entered.x), entered
        return entered.arguments()(entered.x, entered.fed)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Record the returned tensors and return copies of them (forward hook)."""
        entered, self.entered = self.entered, None
        if entered is None or not self.active or self.recorder.paused:
            return None
        try:
            return self._note(entered if entered.given else self._started_from_zero(args, kwargs, output), output)
        except _NotACellError as reason:
            return self._give_up(reason)

    def _note(self, entered: EnteredCall, output: Any) -> Any:
        flat, spec = pytree.tree_flatten(output)
        returned = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        states = _states_of(returned, entered)
        raw = {id(leaf): differentiable(leaf) for leaf in returned}
        first = returned[0]
        if self.owner.step_cell is None:
            shapes = tuple(tuple(s.shape[1:]) for s in states)
            form = CellForm(entered.arguments(), shapes, len(states) == len(returned), tuple(entered.x.shape[1:]))
            self.owner.step_cell = TorchStepCell(
                self.module, form, tuple(first.shape[1:]), first.dtype, autocast_around(first)
            )
        handed = self.recorder.add_step(
            self.owner,
            entered.x,
            (entered.given, entered.fed, entered.before),
            [raw[id(leaf)] for leaf in returned],
            [raw[id(state)] for state in states],
            {name: p for name, p in self.module.named_parameters() if p.requires_grad},
        )
        copies = {key: handed[id(tensor)] for key, tensor in raw.items()}
        return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in flat], spec)

    def _started_from_zero(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> EnteredCall:
        """Describe a call without a state as one with zero states, if calling the cell with zeros returns the same.

        The state stands in place of the first None, or after the input. A returned pair may be (output, state)
        or a state of two tensors.
        """
        guesses = [output[1], output] if isinstance(output, tuple) and len(output) == 2 else [output]
        flat, spec = pytree.tree_flatten((args, kwargs))
        empty = next((i for i, leaf in enumerate(flat) if leaf is None), None)
        for guess in guesses if empty is not None or self.position == 0 else ():
            zeros = pytree.tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, guess)
            whole = ((*args, zeros), kwargs)
            if empty is not None:
                whole = pytree.tree_unflatten([zeros if i == empty else leaf for i, leaf in enumerate(flat)], spec)
            if self._returns(output, *whole):
                entered = EnteredCall(*whole, self.position, self.name)
                entered.fed = [differentiable(state) for state in entered.given]
                return entered
        raise _NotACellError("its first state is not zero and is created inside; pass the first state to it")

    def _returns(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Call the cell once more with these arguments; return whether it returns ``output``."""
        self.recorder.paused = True
        try:
            with torch.no_grad():
                again = self.module(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # the cell does not accept a state of this form
        finally:
            self.recorder.paused = False
        pairs = list(zip(leaves(output), leaves(again), strict=False))
        return len(pairs) == len(leaves(output)) and all(torch.equal(a, b) for a, b in pairs)

    def _give_up(self, reason: Exception) -> None:
        if self.owner.named:
            raise UnsupportedError(
                f"Module {self.owner.name!r} was declared a cell but cannot be recorded as one: {reason}.",
                expected="calls that map (input, state) to state or to (output, state)",
            )
        self.active = False
        self.recorder.runs = [run for run in self.recorder.runs if run.owner is not self.owner]


def _states_of(returned: list[Tensor], entered: EnteredCall) -> list[Tensor]:
    """Return those returned tensors that are the state; at most one tensor before them is the output."""
    extra = len(returned) - len(entered.fed)
    if extra not in (0, 1) or not entered.fed:
        raise _NotACellError(f"it takes {len(entered.fed)} state tensors and returns {len(returned)} tensors")
    states = returned[extra:]
    if [s.shape for s in states] != [s.shape for s in entered.fed]:
        raise _NotACellError("the states that it returns differ in shape from those that it takes")
    first = returned[0]
    if not first.is_floating_point() or first.dim() < 2 or first.shape[0] != entered.x.shape[0]:
        raise _NotACellError("its output is not a floating tensor (sample, ...)")
    return states
