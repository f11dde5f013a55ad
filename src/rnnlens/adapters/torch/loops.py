"""Records custom cells and loops that the user's own code calls step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import InputError, UnsupportedError
from ...recurrence.cells import StepCell, registered
from ...vocabulary import renamed_states
from .cells import RECORDED_FORMS, CellForm, TorchStepCell, tensor_leaves
from .discover import RequestedLayers, input_argument, is_state_name
from .lineage import Continuation, upstream_nodes
from .public import LOOPS_RUN, STATE_ARGUMENTS, is_declared_cell
from .record import (
    CallOwner,
    CallRecorder,
    RunAgainError,
    are_transformed,
    autocast_around,
    call_site,
    differentiable,
    refuse_transformed,
)
from .restore import borrowed_model
from .roles import (
    LastCall,
    StepRoles,
    as_written,
    declared_roles,
    fed_back_roles,
    find_roles,
    readouts,
    state_fields,
    turn_roles,
)

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and collect from its graph the parameters that it used."""
        output = self.function(*args, **kwargs)
        # What is behind the arguments is not the function's.
        argument_nodes = {tensor.grad_fn for tensor in tensor_leaves((args, kwargs))}
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
        self.recorder.in_declared_step = True
        try:
            output = hook.run(module, x, *state)
        finally:
            self.recorder.in_declared_step = False
        LOOPS_RUN.setdefault(self.model, {})[hook.owner.name] = int(tensor_leaves(output)[0].flatten(1).shape[1])
        return output

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


@dataclass(frozen=True)
class _Part:
    """Tensor among the inputs of a call: its positions among the arguments' leaves, its shape and type.

    ``is_rounded``: the numbers are integers or booleans, which are recorded as floats.
    """

    positions: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_rounded(self) -> bool:
        return not self.dtype.is_floating_point


class EnteredCall:
    """One call between its pre-hook and its hook: the user's input and states, and their substitutes ``initial``.

    All arguments that are no state are inputs: tensors (sample, ...) side by side in ``x``, others constants. Without
    ``roles``, every tensor but the input is a state.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], default_input: Any, roles: StepRoles | None
    ) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        #: The roles of the arguments, if this call is written as the one that showed them.
        self.roles = roles if roles is not None and roles.spec == self._spec else None
        #: Whether zeros replace None or an empty tensor among the states.
        self.starts_empty = False
        if roles is None:
            states = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf is not default_input]
        else:
            states = [] if self.roles is None else list(roles.arguments)
            self.starts_empty = any(_is_empty(leaves[i]) for i in states)
            _grow_states(leaves, states, roles.templates)
        self.state_positions = states
        self.user_initial = [leaves[i] for i in states]
        self._parts = _input_parts(leaves, states)
        if not self._parts and self.roles is None:
            raise _NotACellError("it takes no input (sample, feature) beside its state")
        self.constants = _constants(leaves, {*states, *(i for part in self._parts for i in part.positions)})
        tensors = [leaves[part.positions[0]] for part in self._parts]
        rounded = [part for part in self._parts if part.is_rounded]
        #: The user's integers and booleans by position, which are recorded as floats.
        self.originals = {i: leaves[part.positions[0]] for part in rounded for i in part.positions}
        self._check(tensors)
        self.x: Tensor = tensors[0] if self._is_plain else _side_by_side(tensors, self.user_initial)
        self.initial: list[Tensor] = []
        self.continuation: Continuation | None = None

    @property
    def _is_plain(self) -> bool:
        """Whether the input is one floating tensor (sample, feature, ...)."""
        return len(self._parts) == 1 and not self._parts[0].is_rounded and bool(self._parts[0].shape)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Raise ``_NotACellError`` unless input and states are (sample, feature) or (sample, channel, *space).

        States of nodes, (sample, position, unit), may have other units than their input has features.
        """
        x = (inputs or self.user_initial)[0]
        for state in self.user_initial:
            if not state.is_floating_point() or state.dim() < 2 or state.shape[0] != x.shape[0]:
                raise _NotACellError("one of its state tensors is not floating, or not of shape (sample, ...)")
        if not inputs:
            return
        if any(len(tensor) != len(x) for tensor in inputs):
            raise _NotACellError("its inputs do not all count samples first")
        if self.roles is None and not self._is_plain and self.user_initial:
            raise _NotACellError("its input is not a floating tensor (sample, feature) or (sample, channel, *space)")
        if x.dim() > 5:
            raise _NotACellError("its input has more axes than (sample, channel, *space)")
        are_nodes = x.dim() == 3 and all(state.shape[1:-1] == x.shape[1:-1] for state in self.user_initial)
        are_in_space = all(state.shape[2:] == x.shape[2:] for state in self.user_initial)
        if x.dim() > 2 and not (self.user_initial and (are_nodes or are_in_space)):
            raise _NotACellError(
                f"its input {tuple(x.shape)} is a whole sequence (rl.torch.scan), or its states are not in the space "
                "(sample, channel, *space) of the input, nor of its positions (sample, position, feature)"
            )

    @property
    def inputs(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs, without the axis of samples."""
        return [part.shape for part in self._parts]

    def arguments(self) -> Arguments:
        """Return a function (x, states) that rebuilds a cell call's arguments with these; it keeps no tensor alive."""
        constants, parts, spec, state_positions = self.constants, self._parts, self._spec, self.state_positions
        is_plain = self._is_plain

        def rebuild(x: Tensor, state: Sequence[Tensor]) -> Any:
            tensors = dict(zip(state_positions, state, strict=True))
            pieces = [x] if is_plain else x.split([math.prod(part.shape) for part in parts], 1) if parts else ()
            for part, piece in zip(parts, pieces, strict=True):
                if not is_plain:
                    piece = (piece.round() if part.is_rounded else piece).reshape(-1, *part.shape)
                    piece = piece.to(part.dtype) if part.is_rounded else piece
                tensors |= dict.fromkeys(part.positions, piece)
            return pytree.tree_unflatten([tensors.get(i, leaf) for i, leaf in enumerate(constants)], spec)

        return rebuild


def _grow_states(leaves: list[Any], states: Sequence[int], templates: Sequence[Tensor]) -> None:
    """Replace first states that grow by broadcasting, or are empty, by tensors of the shape of those that follow."""
    others = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in states]
    counts = [len(leaf) for leaf in others if leaf.dim()]
    for i, template in zip(states, templates, strict=False):
        leaves[i] = _grown(leaves[i], template, *counts[:1])


def _input_parts(leaves: Sequence[Any], states: Sequence[int]) -> list[_Part]:
    """Return the inputs among the arguments: tensors (sample, ...) beside the states, each one once."""
    first = leaves[states[0]] if states else None
    samples = len(first) if first is not None and first.dim() else None
    positions: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and i not in states:
            if leaf.dim() and (samples is None or len(leaf) == samples):
                positions.setdefault(id(leaf), []).append(i)
            elif leaf.requires_grad:
                raise _NotACellError(f"its input of shape {tuple(leaf.shape)} does not count samples first")
    return [_Part(tuple(at), tuple(leaves[at[0]].shape[1:]), leaves[at[0]].dtype) for at in positions.values()]


def _constants(leaves: Sequence[Any], used: Collection[int]) -> list[Any]:
    """Return the arguments that are neither inputs nor states, with None in place of those.

    Tensors among them are the same for all samples; others are not stored, so that memory is freed.
    """
    return [
        None if i in used else leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        for i, leaf in enumerate(leaves)
    ]


def _side_by_side(tensors: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """Return several inputs (sample, ...) as one floating tensor (sample, feature); without inputs, of no features."""
    if not tensors:
        return states[0].detach().new_zeros(len(states[0]), 0)
    floats = [tensor.dtype for tensor in [*states, *tensors] if tensor.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()
    parts = [tensor.reshape(len(tensor), -1).to(dtype) for tensor in tensors]
    if any(
        not torch.equal(part.to(tensor.dtype).reshape(tensor.shape), tensor)
        for part, tensor in zip(parts, tensors, strict=True)
        if not tensor.is_floating_point()
    ):
        raise _NotACellError("its integers are too large to be recorded as floating numbers")
    return torch.cat(parts, 1)


def _is_empty(state: Any) -> bool:
    """Return whether a first state is None or an empty tensor."""
    return state is None or (isinstance(state, Tensor) and not state.numel())


def _grown(state: Any, template: Tensor, samples: int = 0) -> Any:
    """Return a first state that grows by broadcasting, such as a number, in the shape of those that follow.

    An empty state is returned as zeros.
    """
    shape = (samples or len(template), *template.shape[1:])
    if isinstance(state, Tensor) and state.shape in (shape, template.shape):
        return state
    if _is_empty(state):
        return template.new_zeros(shape)
    try:
        return torch.as_tensor(state).to(template).expand(shape)
    except (RuntimeError, TypeError, ValueError):
        raise _NotACellError("its first state has another shape than the states that follow") from None


class CellHook:
    """Forward pre-hook and forward hook of one candidate for a cell.

    Which arguments are the state is known when the next call comes (``roles.py``). Until then calls are recorded as of
    (input, state) to state or (output, state). Other calls run unchanged; ``settle_roles`` decides after the pass. If
    the user declared the module a cell, ``UnsupportedError`` with the reason is raised there.
    """

    def __init__(self, recorder: CallRecorder, path: str, module: Any) -> None:
        self.recorder, self.module = recorder, module
        self.owner = CallOwner(id(module), path, StepCell, is_declared=is_declared_cell(module))
        self.owner.module = module if registered(module) is not None else None
        self.position, self.name = input_argument(module)
        self.is_active = True
        self.entered_call: EnteredCall | None = None
        self._returned: list[Tensor] = []
        self._previous_input: Any = None
        self._site: Any = None
        self._is_hooked = False
        self._constants: list[Any] | None = None
        self._input_shapes: list[tuple[int, ...]] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` between the hooks."""
        replaced = self.pre_forward(self.module, args, kwargs)
        args, kwargs = (args, kwargs) if replaced is None else replaced
        self._is_hooked = False
        output = function(*args, **kwargs)
        user_output = self.post_forward(self.module, args, kwargs, output)
        return output if user_output is None else user_output

    def run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``forward``, between the hooks unless torch called them already."""
        is_hooked, self._is_hooked = self._is_hooked, False
        if is_hooked or self.recorder.paused or self.recorder.in_declared_step or self.entered_call is not None:
            return forward(*args, **kwargs)
        return self.run(forward, *args, **kwargs)

    @property
    def _roles(self) -> StepRoles | None:
        return self.recorder.rules.roles.get(self.owner.key)

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the states passed to a cell by the recorded tensors that it continues from (forward pre-hook)."""
        self.entered_call = None
        if self.recorder.paused:
            return None
        self._is_hooked = True
        self.recorder.entered[self.owner.name] += 1
        default_input = args[self.position] if len(args) > self.position else kwargs.get(self.name)
        self._look_for_roles(args, kwargs, default_input)
        if not self.is_active:
            return None
        try:
            roles = self._roles or self._declared_roles(args, kwargs)
            written_args, written_kwargs = as_written(args, kwargs, roles) or (args, kwargs)
            call = EnteredCall(written_args, written_kwargs, default_input, roles)
            self._check_constants(call)
            if call.starts_empty or written_args is not args:
                with self._trial(self.module):
                    output = self.module(*args, **kwargs)
                if not self._returns_same(output, *call.arguments()(call.x, call.user_initial)):
                    reason = "empty, and does not stand for zeros" if call.starts_empty else "written in another way"
                    raise _NotACellError(f"its first state is {reason}; pass that state to it")
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
        if self.recorder.paused:
            return None
        user_output = output
        if call is not None and self.is_active:
            try:
                call = call if call.user_initial else self._call_from_zeros(args, kwargs, output)
                user_output = self._record(call, output)
            except _NotACellError as reason:
                self._give_up(reason)
        given = {id(leaf) for leaf in tensor_leaves((args, kwargs))}
        # A call that hands on what it was given computes no state that a next one could start from.
        is_handed_on = all(id(leaf) in given for leaf in tensor_leaves(output))
        self._returned = [] if is_handed_on else tensor_leaves(user_output)
        return None if user_output is output else user_output

    def _declared_roles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepRoles | None:
        names = STATE_ARGUMENTS.get(self.module)
        return None if names is None else declared_roles((args, kwargs), self.module.forward, names)

    def forget(self) -> None:
        """Forget what the last call returned: the next one does not continue it."""
        self._returned = []

    def _look_for_roles(self, args: tuple[Any, ...], kwargs: dict[str, Any], default_input: Any) -> None:
        """Find the roles of a call's arguments, if they are not known and those assumed are others."""
        site, is_open = call_site(), self._roles is None and self.owner.key not in self.recorder.found_roles
        returned, is_same_line = self._returned, site == self._site
        self._returned, self._site = [], site
        previous_input, self._previous_input = self._previous_input, default_input
        if not (is_open and returned) or are_transformed([*returned, *tensor_leaves((args, kwargs))]):
            return
        declared = self._declared_roles(args, kwargs)
        is_step = isinstance(self.module, LoopStep)
        are_stated = (is_step and self.owner.is_declared) or registered(self.module) is not None
        roles = find_roles(
            (args, kwargs),
            LastCall(returned, previous_input),
            default_input,
            is_same_line=is_same_line,
            is_named_state=is_state_name(self.name),
            declared=() if declared is None else declared.arguments,
            find_readouts=lambda states: () if are_stated else self._readouts(args, kwargs, states),
        )
        if roles is None:
            return
        if not self.is_active or not _is_assumed(roles, args, kwargs, default_input, returned):
            self.recorder.found_roles[self.owner.key] = roles
        elif roles.is_guessed:
            self._note_guess()

    def _readouts(self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Mapping[int, int]) -> Collection[int]:
        """Call the cell once more; return its ``states`` that are outputs fed back as inputs."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        copies = [differentiable(leaf.detach()).clone() if i in states else leaf for i, leaf in enumerate(leaves)]
        call = pytree.tree_unflatten(copies, spec)
        try:
            with self._trial(self.module, with_gradients=True):
                returned = tensor_leaves(self.module(*call[0], **call[1]))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return ()  # the user's own call, which follows, raises it
        return readouts(call, returned, states) if max(states.values()) < len(returned) else ()

    def _note_guess(self) -> None:
        note = (
            f"{self.owner.name}: several arguments are what the call before returned; by the names and places of the "
            f"arguments it was decided which are states. rl.torch.cell(model.{self.owner.name}, state=...) with the "
            "names of the states decides it instead."
        )
        if note not in self.recorder.notes:
            self.recorder.notes.append(note)

    def _check_constants(self, call: EnteredCall) -> None:
        """Raise ``_NotACellError`` if shapes of inputs, or arguments that are no inputs, change from step to step."""
        if self._input_shapes is None:
            self._input_shapes = call.inputs
        if call.inputs != self._input_shapes:
            raise _NotACellError(f"its inputs change from step to step: {self._input_shapes}, then {call.inputs}")
        if call.roles is None:
            return
        if self._constants is None:
            self._constants = call.constants
        if not all(map(_is_same_constant, self._constants, call.constants)):
            raise _NotACellError("an argument that is no tensor (sample, ...) changes from step to step")

    def _record(self, call: EnteredCall, output: Any) -> Any:
        output_leaves, spec = pytree.tree_flatten(output)
        returned = [leaf for leaf in output_leaves if isinstance(leaf, Tensor)]
        form = self._form(call, returned)
        tracked = {id(leaf): differentiable(leaf) for leaf in returned if leaf.is_floating_point()}
        originals = [tracked.get(id(leaf), leaf) for leaf in returned]
        results = form.results(originals)
        states = results[-len(form.states) :]
        if self.owner.step_cell is None:
            RECORDED_FORMS[self.module] = form
            self.owner.step_cell = TorchStepCell(
                self.module,
                form,
                tuple(results[0].shape[1:]),
                results[0].dtype,
                autocast_around(results[0]),
                self.module.model if isinstance(self.module, LoopStep) else None,
            )
            fields = self._state_fields(call)
            self.owner.step_cell.name_states(fields)
            parts = _parts_of(call, form, returned, dict(zip(self.owner.step_cell.state_names, fields, strict=True)))
            self.recorder.notes += [f"{self.owner.name}: {part}." for part in parts]
            if call.roles is not None and call.roles.is_guessed:
                self._note_guess()
        user_copies = self.recorder.add_step(
            self.owner,
            call.x,
            (call.user_initial, call.initial, call.continuation),
            results,
            states,
            {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad},
        )
        if len(form.outputs) > 1:
            outputs = [originals[position] for position in form.outputs]
            pieces = user_copies[id(results[0])].split([part[0].numel() for part in outputs], 1)
            user_copies |= {id(part): piece.reshape(part.shape) for part, piece in zip(outputs, pieces, strict=True)}
        copies = {key: user_copies.get(id(tensor), tensor) for key, tensor in tracked.items()}
        return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in output_leaves], spec)

    def _state_fields(self, call: EnteredCall) -> tuple[str | None, ...]:
        """Return the fields in which the user's code holds the states; None for a state that is in no field."""
        return state_fields(call.arguments()(call.x, call.initial), call.state_positions)

    def _form(self, call: EnteredCall, returned: list[Tensor]) -> CellForm:
        """Return which returned tensors are the states of a call, and which are its outputs."""
        count = len(call.initial)
        if call.roles is None:
            if len(returned) - count not in (0, 1) or not call.initial:
                raise _NotACellError(f"it takes {count} state tensors and returns {len(returned)} tensors")
            positions = tuple(range(len(returned) - count, len(returned)))
        else:
            positions = call.roles.returned
        if max(positions) >= len(returned):
            raise _NotACellError(f"it returns {len(returned)} tensors, and more in other calls")
        states = [returned[position] for position in positions]
        if [s.shape for s in states] != [s.shape for s in call.initial]:
            raise _NotACellError("the states that it returns differ in shape from those that it takes")
        state_ids = {id(state) for state in states}
        # Integers and constants that are not (sample, ...) have no gradient: they go to the user's code as they are.
        outputs = tuple(
            i
            for i, leaf in enumerate(returned)
            if id(leaf) not in state_ids
            and leaf.is_floating_point()
            and (leaf.requires_grad or leaf.shape[:1] == call.x.shape[:1])
        )
        for leaf in [*(returned[i] for i in outputs), states[0]]:
            if not leaf.is_floating_point() or leaf.dim() < 2 or leaf.shape[0] != call.x.shape[0]:
                raise _NotACellError("its output is not a floating tensor (sample, ...)")
        shapes = tuple(tuple(state.shape[1:]) for state in states)
        return CellForm(call.arguments(), shapes, tuple(call.x.shape[1:]), positions, outputs)

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
                default_input = args[self.position] if len(args) > self.position else kwargs.get(self.name)
                call = EnteredCall(*arguments, default_input, self._roles)
                call.initial = [differentiable(state) for state in call.user_initial]
                return call
        raise _NotACellError(
            self._declaration_of_kept_states({len(tensor) for tensor in tensor_leaves((args, kwargs)) if tensor.dim()})
            or "its first state is not zero and is created inside; pass the first state to it"
        )

    def _declaration_of_kept_states(self, samples: Collection[int]) -> str:
        """Return the line that declares the attributes in which a module keeps what a call computed; empty if none.

        ``samples``: numbers of samples that such a tensor may have.
        """
        module = self.module
        kept = [
            f"self.{name}"
            for name, value in {**vars(module), **module._buffers}.items()
            if isinstance(value, Tensor) and value.requires_grad and value.dim() > 1 and len(value) in samples
        ]
        states = repr(kept[0] if len(kept) == 1 else tuple(kept))
        return f"it keeps a state in itself: rl.torch.cell(model.{self.owner.name}, state={states})" if kept else ""

    def _returns_same(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Call the cell once more with these arguments; return whether it returns ``output``."""
        try:
            with self._trial(self.module):
                repeated = self.module(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False  # the cell does not accept a state of this form
        pairs = list(zip(tensor_leaves(output), tensor_leaves(repeated), strict=False))
        return len(pairs) == len(tensor_leaves(output)) and all(torch.equal(a, b) for a, b in pairs)

    @contextmanager
    def _trial(self, module: nn.Module, *, with_gradients: bool = False) -> Iterator[None]:
        """Record nothing of the calls in the block, and undo all that they change in a module."""
        self.recorder.paused = True
        try:
            with borrowed_model(module), torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
                yield
        finally:
            self.recorder.paused = False

    def _give_up(self, reason: Exception) -> None:
        """Stop to record the calls; a module whose roles are not known yet is still watched for them."""
        self.recorder.reasons[self.owner.name] = str(reason)
        self.is_active = False
        self.recorder.recurrences = [
            recurrence for recurrence in self.recorder.recurrences if recurrence.owner is not self.owner
        ]


class RepeatedModuleHook:
    """Pair of hooks of a module that has not the arguments of a cell, which look for calls on what it returned.

    Such a module is recorded as a cell in the next pass, and so is one that others are called in turn with, unless
    ``takes_turns`` is False.
    """

    def __init__(self, recorder: CallRecorder, path: str, module: nn.Module, *, takes_turns: bool) -> None:
        self.recorder, self.path, self.key, self.takes_turns = recorder, path, id(module), takes_turns
        self._last = LastCall()

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for the module's last results among the arguments of a call (forward pre-hook)."""
        if self.recorder.paused or self.recorder.in_declared_step:
            return
        call = (args, kwargs)
        if self._last.returned and self.key not in self.recorder.found_roles:
            roles = fed_back_roles(call, self._last.returned, self._last.argument)
            if roles is not None:
                self.recorder.found_roles[self.key] = roles
            elif self.takes_turns and self.path not in self.recorder.roles_in_turn:
                roles = turn_roles(call, self.path, self.recorder.last_calls)
                if roles is not None:
                    self.recorder.roles_in_turn[self.path] = (self.key, roles)
        self._last.argument = next(iter([*args, *kwargs.values()]), None)

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Store the tensors that a call returned (forward hook)."""
        self._last.returned = tensor_leaves(output)
        if self.takes_turns:
            self._last.count += 1
            self.recorder.last_calls[self.path] = self._last


class KeptStateHook(CellHook):
    """Recorder of the steps of a declared cell that keeps its state in attributes, computed by one of its methods.

    Each call is recorded as one of a function from the states, as its first argument, and the user's arguments.
    """

    def __init__(self, recorder: CallRecorder, path: str, cell: nn.Module, method: str, names: tuple[str, ...]) -> None:
        self.cell, self.names, self.compute = cell, names, getattr(cell, method)
        step = LoopStep(self._step, {id(p): name for name, p in cell.named_parameters()}, cell)
        super().__init__(recorder, path, step)
        self.owner.key, self.owner.is_declared = hash((method, id(cell))), True
        position, self.name = input_argument(cell, method)
        self.position = position + 1
        self._is_running = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as a step from the states that the attributes hold, and store the new ones there."""
        if self._is_running or self.recorder.paused or self.recorder.in_declared_step:
            return self.compute(*args, **kwargs)
        self._is_running = True
        try:
            output, states = self.run(self.module, self._first_states(args, kwargs), *args, **kwargs)
        finally:
            self._is_running = False
        self._store(states)
        return output

    def _step(self, states: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        self._store(states)
        output = self.compute(*args, **kwargs)
        return output, tuple(getattr(self.cell, name) for name in self.names)

    def _store(self, states: Sequence[Any]) -> None:
        for name, state in zip(self.names, states, strict=True):
            setattr(self.cell, name, state)

    def _first_states(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the states in the attributes; those that a step replaces by others of its own shape in that shape.

        Such first states, as None, 0 or an empty tensor, are numbers that grow by broadcasting, or zeros, if the step
        then computes the same.
        """
        states = tuple(getattr(self.cell, name) for name in self.names)
        if self.owner.step_cell is not None:
            return states
        with self._trial(self.cell):
            output, new_states = self._step(states, *args, **kwargs)
        if not all(isinstance(new, Tensor) for new in new_states):
            return states
        first_states = []
        for state, new in zip(states, new_states, strict=True):
            try:
                first_states.append(_grown(state, new))
            except _NotACellError:
                first_states.append(torch.zeros_like(new))
        with self._trial(self.cell):
            repeated = self._step(first_states, *args, **kwargs)
        pairs = list(zip(tensor_leaves((output, new_states)), tensor_leaves(repeated), strict=False))
        return tuple(first_states) if all(torch.equal(a, b) for a, b in pairs) else states

    def _declared_roles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepRoles:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        count = len(self.names)
        return StepRoles(spec, tuple(range(count)), tuple(range(-count, 0)), tuple(leaves[:count]))

    def _state_fields(self, call: EnteredCall) -> tuple[str | None, ...]:
        return self.names

    def _look_for_roles(self, args: tuple[Any, ...], kwargs: dict[str, Any], default_input: Any) -> None:
        """Look for nothing: the roles are declared."""


class MethodHook:
    """Recorder of the calls of a module's method that may be a step: a state and an input are among its arguments.

    In a first pass the calls are only watched; ``settle_roles`` has the pass repeated if they pass a state on. Calls
    within a step of the module that another of its ``hooks`` records, to which this one is added, and those that
    contain recorded calls, are not recorded.
    """

    def __init__(
        self, recorder: CallRecorder, model: nn.Module, path: str, module: nn.Module, method: str, hooks: list[CellHook]
    ) -> None:
        self.recorder, self.model, self.hooks = recorder, model, hooks
        self.step = LoopStep(getattr(module, method), {id(p): name for name, p in module.named_parameters()}, module)
        self.hook = CellHook(recorder, path, self.step)
        self.hook.owner.key = hash((method, id(module)))
        self.hook.position, self.hook.name = input_argument(module, method)
        self.hook.is_active = self.hook.owner.key in recorder.rules.roles
        hooks.append(self.hook)
        self._is_running = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as a step."""
        is_within_cell = any(hook.entered_call is not None for hook in self.hooks)
        if self._is_running or self.recorder.paused or self.recorder.in_declared_step or is_within_cell:
            return self.step.function(*args, **kwargs)
        self._is_running, count, is_recorded = True, self.recorder.call_count, self.hook.is_active
        try:
            output = self.hook.run(self.step if is_recorded else self.step.function, *args, **kwargs)
        finally:
            self._is_running = False
        if not is_recorded and self.recorder.call_count > count:
            self.hook.forget()
        if self.hook.owner.step_cell is not None:
            LOOPS_RUN.setdefault(self.model, {})[self.hook.owner.name] = self.hook.owner.step_cell.state_sizes[0]
        return output


def settle_roles(recorder: CallRecorder, requested: RequestedLayers) -> None:
    """Raise ``RunAgainError`` if a pass found other roles of a cell's arguments than it assumed; they become rules.

    Raise ``UnsupportedError`` for a declared cell that cannot be recorded.
    """
    outermost = [
        found
        for path, found in recorder.roles_in_turn.items()
        if not any(path.startswith(f"{other}.") for other in recorder.roles_in_turn)
    ]
    if recorder.found_roles or outermost:
        recorder.rules.roles |= recorder.found_roles or dict(outermost)
        raise RunAgainError
    for path, module in requested.cells:
        if path in recorder.reasons and is_declared_cell(module):
            raise UnsupportedError(
                f"Module {path!r} was declared a cell but cannot be recorded as one: {recorder.reasons[path]}.",
                expected="calls that map inputs (sample, feature) and a state (sample, unit) to the next state, "
                "and outputs",
            )


def _is_assumed(
    roles: StepRoles, args: tuple[Any, ...], kwargs: dict[str, Any], default_input: Any, returned: Sequence[Tensor]
) -> bool:
    """Return whether a call that is recorded without roles has these."""
    leaves = pytree.tree_leaves((args, kwargs))
    states = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf is not default_input)
    last = tuple(range(len(returned) - len(states), len(returned)))
    same_tensors = len(roles.returned) == len(last) and all(
        returned[a] is returned[b] for a, b in zip(roles.returned, last, strict=True)
    )
    return roles.arguments == states and same_tensors


def _is_same_constant(first: Any, later: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(later, Tensor):
        return bool(torch.equal(first, later))
    try:
        return first is later or bool(first == later)
    except (RuntimeError, TypeError, ValueError):
        return False


def _parts_of(
    call: EnteredCall, form: CellForm, returned: Sequence[Tensor], fields: Mapping[str, str | None]
) -> Iterator[str]:
    """Say what the input and output of a cell consist of, and which states have not the names of their ``fields``."""
    if len(call.inputs) > 1:
        yield f"input has the arguments of {', '.join(map(str, call.inputs))} features side by side"
    if len(form.outputs) > 1:
        shapes = ", ".join(str(tuple(returned[i].shape[1:])) for i in form.outputs)
        yield f"output has the returned tensors of {shapes} units side by side"
    if text := renamed_states(fields.keys(), fields.values()):
        yield text
