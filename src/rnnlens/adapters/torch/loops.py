"""Records custom cells and loops that the user's own code calls step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import InputError, UnsupportedError
from ...recurrence.cells import StepCell, registered
from .cells import CellForm, TorchStepCell, tensor_leaves
from .discover import input_argument
from .lineage import Continuation, upstream_nodes
from .public import LOOPS_RUN, is_declared_cell
from .record import (
    CallOwner,
    CallRecorder,
    autocast_around,
    differentiable,
    refuse_transformed,
)
from .restore import borrowed_model

#: Function from an input and state tensors to the arguments of the user's cell.
Arguments = Callable[[Tensor, Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


class LoopStep(nn.Module):  # type: ignore[misc]
    """Module around a user's step function in ``model``; its parameters are those of the model that it used."""

    model: nn.Module

    def __init__(self, function: Callable[..., Any], names: dict[int, str], model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a submodule: the function may use a part of it only
        self.function, self._parameter_names = function, names
        self._used_parameters: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *state: Any) -> Any:
        """Call the function, and collect from its graph the parameters that it used."""
        output = self.function(x, *state)
        # What is behind the arguments is not the function's.
        argument_nodes = {tensor.grad_fn for tensor in tensor_leaves((x, state))}
        nodes = upstream_nodes([tensor.grad_fn for tensor in reversed(tensor_leaves(output))], argument_nodes)
        parameters = [node.variable for node in nodes if hasattr(node, "variable")]
        self._used_parameters |= {
            self._parameter_names[id(leaf)]: leaf for leaf in parameters if id(leaf) in self._parameter_names
        }
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that the function used, by their names in the model."""
        return iter(self._used_parameters.items())


class StepListener:
    """Recorder of ``rl.torch.step`` calls during one pass."""

    def __init__(self, recorder: CallRecorder, model: nn.Module, requested: Sequence[str] | None) -> None:
        self.recorder, self.model = recorder, model
        self.requested = None if requested is None else {name.partition("#")[0] for name in requested}
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.hooks: dict[Any, CellHook] = {}

    def __call__(self, function: Callable[..., Any], x: Tensor, state: Sequence[Any], name: str | None) -> Any:
        """Call the user's step and record it as the call of a cell."""
        if self.recorder.paused:
            return function(x, *state)
        key: Any = name or getattr(function, "__code__", id(function))
        if key not in self.hooks:
            self.hooks[key] = self._loop_hook(function, name)
        hook = self.hooks[key]
        if self.requested is not None and hook.owner.name not in self.requested:
            return function(x, *state)
        module = hook.module
        module.function = function
        replaced = hook.pre_forward(module, (x, *state), {})
        args, kwargs = ((x, *state), {}) if replaced is None else replaced
        output = module(*args, **kwargs)
        user_output = hook.post_forward(module, args, kwargs, output)
        LOOPS_RUN.setdefault(self.model, {})[hook.owner.name] = int(tensor_leaves(output)[0].flatten(1).shape[1])
        return output if user_output is None else user_output

    def _loop_hook(self, function: Callable[..., Any], name: str | None) -> CellHook:
        loop_count = sum(hook.owner.name.startswith("loop") for hook in self.hooks.values())
        name = name or (f"loop_{loop_count}" if loop_count else "loop")
        if name in dict(self.model.named_modules()):
            message = f"rl.torch.step(..., name={name!r}): a module has that name."
            raise InputError(message, expected="a different name for each loop")
        hook = CellHook(self.recorder, name, LoopStep(function, self.parameter_names, self.model))
        # The same key in every pass over the model: ``never_rowwise`` is passed on from pass to pass.
        hook.owner.key, hook.owner.is_declared = hash((name, id(self.model))), True
        return hook


class _NotACellError(Exception):
    """Reason why a call cannot be a step of a recurrence."""


class EnteredCall:
    """One call between its pre-hook and its hook: the user's input and states, and their substitutes ``initial``."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> None:
        argument_leaves, self._spec = pytree.tree_flatten((args, kwargs))
        x = args[position] if len(args) > position else kwargs.get(name)
        if not isinstance(x, Tensor) or x.dim() not in (2, 3, 4, 5) or not x.is_floating_point():
            raise _NotACellError("its input is not a floating tensor (sample, feature) or (sample, channel, *space)")
        self.x: Tensor = x
        self._input_positions = [i for i, leaf in enumerate(argument_leaves) if leaf is x]
        self._state_positions = [
            i for i, leaf in enumerate(argument_leaves) if isinstance(leaf, Tensor) and leaf is not x
        ]
        # Of other leaves only values that are no tensors are stored, so that the forward pass is not kept in memory.
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in argument_leaves]
        self.user_initial = [argument_leaves[i] for i in self._state_positions]
        for state in self.user_initial:
            if not state.is_floating_point() or state.dim() < 2 or state.shape[0] != self.x.shape[0]:
                raise _NotACellError("one of its state tensors is not floating, or not of shape (sample, ...)")
        if x.dim() > 2 and (
            not self.user_initial or any(state.shape[2:] != x.shape[2:] for state in self.user_initial)
        ):
            raise _NotACellError("its states are not (sample, channel, *space) in the space of its input")
        self.initial: list[Tensor] = []
        self.continuation: Continuation | None = None

    def arguments(self) -> Arguments:
        """Return a function (x, states) that rebuilds a cell call's arguments with these; it keeps no tensor alive."""
        constants = self._constants
        input_positions = self._input_positions
        state_positions = self._state_positions
        spec = self._spec

        def rebuild(x: Tensor, state: Sequence[Tensor]) -> Any:
            tensors = dict.fromkeys(input_positions, x) | dict(zip(state_positions, state, strict=True))
            return pytree.tree_unflatten([tensors.get(i, leaf) for i, leaf in enumerate(constants)], spec)

        return rebuild


class CellHook:
    """Forward pre-hook and forward hook of one candidate for a cell.

    A candidate that proves not to be a cell runs unchanged and is no longer recorded. If the user declared it a cell,
    ``UnsupportedError`` with the reason is raised instead.
    """

    def __init__(self, recorder: CallRecorder, path: str, module: Any) -> None:
        self.recorder, self.module = recorder, module
        self.owner = CallOwner(id(module), path, StepCell, is_declared=is_declared_cell(module))
        self.owner.module = module if registered(module) is not None else None
        self.position, self.name = input_argument(module)
        self.is_active = True
        self.entered_call: EnteredCall | None = None

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the states passed to a cell by the recorded tensors that it continues from (forward pre-hook)."""
        self.entered_call = None
        if not self.is_active or self.recorder.paused:
            return None
        try:
            call = EnteredCall(args, kwargs, self.position, self.name)
        except _NotACellError as reason:
            return self._give_up(reason)
        refuse_transformed(self.owner.name, [call.x, *call.user_initial])
        call.continuation = self.recorder.find_continuation(self.owner, call.user_initial)
        call.initial = list(self.recorder.start_states(call.user_initial, call.continuation))
        call.x, self.entered_call = self.recorder.layer_input(call.x), call
        return call.arguments()(call.x, call.initial)

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Record the returned tensors and return copies of them (forward hook)."""
        call, self.entered_call = self.entered_call, None
        if call is None or not self.is_active or self.recorder.paused:
            return None
        try:
            return self._record(call if call.user_initial else self._call_from_zeros(args, kwargs, output), output)
        except _NotACellError as reason:
            return self._give_up(reason)

    def _record(self, call: EnteredCall, output: Any) -> Any:
        output_leaves, spec = pytree.tree_flatten(output)
        returned = [leaf for leaf in output_leaves if isinstance(leaf, Tensor)]
        states = _states_of(returned, call)
        tracked = {id(leaf): differentiable(leaf) for leaf in returned}
        first_output = returned[0]
        if self.owner.step_cell is None:
            shapes = tuple(tuple(state.shape[1:]) for state in states)
            form = CellForm(call.arguments(), shapes, len(states) == len(returned), tuple(call.x.shape[1:]))
            self.owner.step_cell = TorchStepCell(
                self.module,
                form,
                tuple(first_output.shape[1:]),
                first_output.dtype,
                autocast_around(first_output),
                self.module.model if isinstance(self.module, LoopStep) else None,
            )
        user_copies = self.recorder.add_step(
            self.owner,
            call.x,
            (call.user_initial, call.initial, call.continuation),
            [tracked[id(leaf)] for leaf in returned],
            [tracked[id(state)] for state in states],
            {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad},
        )
        copies = {key: user_copies[id(tensor)] for key, tensor in tracked.items()}
        return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in output_leaves], spec)

    def _call_from_zeros(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> EnteredCall:
        """Describe a call without a state as one with zero states, if calling the cell with zeros returns the same.

        The state stands in place of the first None, or after the input. A returned pair may be (output, state)
        or a state of two tensors.
        """
        candidates = [output[1], output] if isinstance(output, tuple) and len(output) == 2 else [output]
        argument_leaves, spec = pytree.tree_flatten((args, kwargs))
        state_position = next((i for i, leaf in enumerate(argument_leaves) if leaf is None), None)
        for candidate in candidates if state_position is not None or self.position == 0 else ():
            zeros = pytree.tree_map(
                lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, candidate
            )
            arguments = ((*args, zeros), kwargs)
            if state_position is not None:
                arguments = pytree.tree_unflatten(
                    [zeros if i == state_position else leaf for i, leaf in enumerate(argument_leaves)], spec
                )
            if self._returns_same(output, *arguments):
                call = EnteredCall(*arguments, self.position, self.name)
                call.initial = [differentiable(state) for state in call.user_initial]
                return call
        raise _NotACellError("its first state is not zero and is created inside; pass the first state to it")

    def _returns_same(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Call the cell once more with these arguments; return whether it returns ``output``."""
        self.recorder.paused = True
        try:
            with borrowed_model(self.module), torch.no_grad():
                repeated = self.module(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # the cell does not accept a state of this form
        finally:
            self.recorder.paused = False
        pairs = list(zip(tensor_leaves(output), tensor_leaves(repeated), strict=False))
        return len(pairs) == len(tensor_leaves(output)) and all(torch.equal(a, b) for a, b in pairs)

    def _give_up(self, reason: Exception) -> None:
        if self.owner.is_declared:
            raise UnsupportedError(
                f"Module {self.owner.name!r} was declared a cell but cannot be recorded as one: {reason}.",
                expected="calls that map (input, state) to state or to (output, state)",
            )
        self.is_active = False
        self.recorder.recurrences = [
            recurrence for recurrence in self.recorder.recurrences if recurrence.owner is not self.owner
        ]


def _states_of(returned: list[Tensor], call: EnteredCall) -> list[Tensor]:
    """Return those returned tensors that are the state; at most one tensor before them is the output."""
    output_count = len(returned) - len(call.initial)
    if output_count not in (0, 1) or not call.initial:
        raise _NotACellError(f"it takes {len(call.initial)} state tensors and returns {len(returned)} tensors")
    states = returned[output_count:]
    if [s.shape for s in states] != [s.shape for s in call.initial]:
        raise _NotACellError("the states that it returns differ in shape from those that it takes")
    first_returned = returned[0]
    if not first_returned.is_floating_point() or first_returned.dim() < 2 or first_returned.shape[0] != call.x.shape[0]:
        raise _NotACellError("its output is not a floating tensor (sample, ...)")
    return states
