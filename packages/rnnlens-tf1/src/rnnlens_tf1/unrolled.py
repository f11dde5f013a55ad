"""Recurrences without a loop operation, as of a Python loop over a cell or ``tf.nn.static_rnn``.

A recurrence is a chain of at least two steps with the same weights, where the new states of one step are the previous
states of the next. Steps of unknown cells are only named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tensorflow.python.ops.control_flow_util import IsInWhileLoop

from rnnlens.errors import message

from .blocks import CONVOLUTIONS, NO_LOOP, block_of, transitive_closure, value_source
from .cells import Match, matching_steps
from .probe import Key, Probe
from .recurrences import Block, Loop, LoopBoundary, common_scope, uncapturable_loop
from .while_loops import CONDITIONS, WHILES, ancestors, in_built_order

_MAKES_A_STATE = frozenset(
    {"Add", "AddV2", "AddN", "Sub", "Mul", "MatMul", "Maximum", "Minimum", "ClipByValue", "BiasAdd", "Tanh", "Sigmoid"}
    | {"Relu", "Relu6", "Elu", "Selu", "Softplus", "Softsign", "LeakyRelu"}
)
#: Operations of a step by which a new cell state becomes the new output.
_TO_AN_OUTPUT = _MAKES_A_STATE | {"ConcatV2", "Identity", "ReadVariableOp", "Split", "SplitV", "StridedSlice", "Unpack"}

#: Pairs (operation, number of its input) by which a step reads a tensor.
Readers = tuple[tuple[Any, int], ...]


def unrolled_loops(end_tensors: Iterable[Any]) -> list[Loop]:
    """Return the unrolled recurrences among the ancestors of some tensors: chains of at least two equal steps."""
    end_tensors = list(end_tensors)
    ops = [op for op in ancestors(end_tensors) if not IsInWhileLoop(op)]
    probe, groups = Probe([], NO_LOOP), defaultdict[str, list[Match]](list)
    for op in (*ops, *_unread_operations(ops)):
        if op.type in _MAKES_A_STATE and len(op.outputs) == 1 and _may_be_state(op.outputs[0]):
            probe.value_of(op.outputs[0])
    read_ops = set(ops)
    for step in matching_steps(probe):
        if any(t.op in read_ops for state_key in step.new_states for t in probe.tensors[state_key]):
            cell = step.cell
            same_cell = repr((cell.cell, sorted(cell.options.items(), key=str), sorted(cell.weights.items())))
            groups[same_cell].append(step)
    chains = [chain for steps in groups.values() for chain in _group_chains(steps)]
    loops = [loop for chain in chains if (loop := _chain_loop(probe, chain, end_tensors)) is not None]
    scopes = defaultdict(set)
    for loop in loops:
        scopes[loop.name].add(loop.scope)
    # Cells that stand side by side in the scope of one layer are named by their own scopes.
    loops = [replace(loop, name=loop.scope) if len(scopes[loop.name]) > 1 else loop for loop in loops]
    return [*loops, *_conditional_loops(probe, ops, {loop.scope for loop in loops}, groups.values())]


def _conditional_loops(
    probe: Probe, ops: Sequence[Any], captured_scopes: set[str], groups: Iterable[Sequence[Match]]
) -> list[Loop]:
    """Return a ``Loop`` that cannot be captured for steps that a condition skips: ``static_rnn(sequence_length=)``."""
    names: dict[str, int] = {}
    for steps in groups:
        scope = steps[0].scope
        conditional_steps = [
            step
            for step in steps
            if any(t.op.type in ("Merge", "Switch") for state in step.previous_states for t in probe.tensors[state])
        ]
        conditional_states = {step.new_states[0] for step in conditional_steps}
        if scope not in captured_scopes and len(conditional_states) > 1:
            names[scope] = steps[0].cell.units
    conditions = [op for op in ops if op.type in CONDITIONS]
    for op in conditions:
        widths = {int(t.shape[-1]) for t in op.outputs if _may_be_state(t) and t.shape[-1]}
        if widths and any(value_source(t).op in conditions for t in op.inputs if _may_be_state(t)):
            names.setdefault(op.name.partition("/")[0], max(widths))
    outermost_names = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    return [
        uncapturable_loop(
            scope,
            f"The steps of {scope!r} are unrolled, and passed by under a condition.",
            name=scope.rpartition("/")[0],
            units=names[scope],
            got="tf.nn.static_rnn(sequence_length=), or a Python loop with tf.cond",
            expected="steps that are all run",
            hint="tf.nn.dynamic_rnn(sequence_length=), or static_rnn without sequence_length",
        )
        for scope in outermost_names
    ]


def left_out_reasons(end_tensors: Iterable[Any], loops: Sequence[Loop]) -> dict[str, str]:
    """Return the scopes of unrolled recurrences that are not among the loops, and the reason for each.

    A recurrence is a kernel that multiplies or convolves what depends on its own products, states of the loops apart.
    """
    states = {id(t) for loop in loops for state in loop.states for t in state.tensors}
    variables = frozenset[str]().union(*(loop.cell.variables for loop in loops))
    refused_prefixes = tuple(f"{loop.scope}/" for loop in loops if loop.cell.refusal)
    kernels_behind: dict[Any, frozenset[Block]] = {}  # by operation, the kernels whose products it depends on
    recurrent_kernels: dict[Block, frozenset[Block]] = {}
    for op in ancestors(end_tensors):
        if IsInWhileLoop(op) or op.type in WHILES or op.type == "StopGradient":
            continue
        input_kernels = frozenset[Block]().union(
            *(kernels_behind.get(t.op, ()) for t in op.inputs if id(t) not in states)
        )
        kernel = _multiplied_kernel(op)
        if (
            kernel in input_kernels
            and kernel.variable not in variables
            and not kernel.variable.startswith(refused_prefixes)
        ):
            recurrent_kernels[kernel] = input_kernels | recurrent_kernels.get(kernel, frozenset())
        kernels_behind[op] = input_kernels if kernel is None else input_kernels | {kernel}
    # Kernels whose products depend on each other belong to one recurrence, those of an upper cell to another.
    cells = {
        frozenset(
            other_kernel.variable
            for other_kernel in recurrent_kernels
            if other_kernel in input_kernels and kernel in recurrent_kernels[other_kernel]
        )
        for kernel, input_kernels in recurrent_kernels.items()
    }
    scopes = sorted({common_scope(cell) or min(cell) for cell in cells})
    return {
        scope: message(
            f"The steps of {scope!r} are unrolled, and their equations are unknown.",
            expected="a while loop, or a static_rnn or Python loop over a cell of known equations",
            hint="tf.nn.dynamic_rnn with the same cell",
        )
        for scope in scopes
    }


def _multiplied_kernel(op: Any) -> Block | None:
    """Return the block of a variable with which an operation multiplies or convolves; None if it does neither."""
    if op.type not in CONVOLUTIONS and (op.type != "MatMul" or op.get_attr("transpose_b")):
        return None  # products of a gradient have transposed kernels
    kernel = op.inputs[1]
    return block_of(kernel.op.inputs[0] if kernel.op.type == "ExpandDims" else kernel, NO_LOOP)


def _may_be_state(tensor: Any) -> bool:
    """Return whether a tensor has the shape of a state: (sample, unit), with axes of space between them."""
    return bool(tensor.dtype.is_floating and tensor.shape.rank in (2, 3, 4, 5))


def _unread_operations(ops: Iterable[Any]) -> list[Any]:
    """Return the operations that nothing reads and that compute outputs of steps, such as the last output."""
    known_ops, unread = set(ops), list[Any]()
    waiting_ops = list(ops)
    while waiting_ops:
        for reader in (op for tensor in waiting_ops.pop().outputs for op in tensor.consumers()):
            inputs_known = (t.op in known_ops or t.op.type == "Const" for t in reader.inputs)
            if (
                reader.type in _TO_AN_OUTPUT
                and reader not in known_ops
                and not IsInWhileLoop(reader)
                and all(inputs_known)
            ):
                known_ops.add(reader)
                unread.append(reader)
                waiting_ops.append(reader)
    return in_built_order(unread)


def _group_chains(steps: Sequence[Match]) -> list[list[Match]]:
    """Group steps into chains, where each step's new states are the next step's states. A step belongs to one chain."""
    step_by_state = {step.new_states: step for step in steps}
    next_steps: dict[tuple[Key, ...], Match] = {}
    for step in steps:
        if step.previous_states in step_by_state and step_by_state[step.previous_states] is not step:
            next_steps.setdefault(step.previous_states, step)
    chains = []
    for first_step in steps:
        if first_step.previous_states not in step_by_state and first_step.new_states in next_steps:
            chain = [first_step]
            while chain[-1].new_states in next_steps:
                chain.append(next_steps[chain[-1].new_states])
            chains.append(chain)
    return chains


def _chain_loop(probe: Probe, chain: Sequence[Match], end_tensors: Iterable[Any]) -> Loop | None:
    tensor_groups = [probe.tensors[key] for key in (*(step.source for step in chain), *chain[0].previous_states)]
    if not all(tensor_groups):
        return None
    sources, start_tensors = (
        [tensors[0] for tensors in groups] for groups in (tensor_groups[: len(chain)], tensor_groups[len(chain) :])
    )
    step_readers = [_step_readers(probe, step) for step in chain]
    states = [
        LoopBoundary(tuple(probe.tensors[step.new_states[i]][0] for step in chain)) for i in range(len(start_tensors))
    ]
    scope, cell = chain[0].scope, chain[0].cell
    carried_states: tuple[LoopBoundary, ...] = ()
    hidden_ids = {id(t) for t in states[0].tensors}
    other_ids = {id(t) for boundary in states[1:] for t in boundary.tensors}
    is_fed_back = any(id(t) in hidden_ids for t in _ancestor_tensors(sources))
    if is_fed_back and any(id(t) in other_ids for t in _ancestor_tensors(sources, hidden_ids)):
        text = message(
            f"The steps of {scope!r} are fed what was computed from a state that is not their output.",
            expected="feedback of what the cell returns",
            hint="rl.gradients by inputs and weights",
        )
        cell = replace(cell, refusal=text)
    # Or a cell state is read outside.
    if is_fed_back or any(id(t) in other_ids for t in _ancestor_tensors(list(end_tensors), hidden_ids | other_ids)):
        carried_states = tuple(
            LoopBoundary(
                state.tensors[:-1],
                tuple(
                    readers_by_key[step.previous_states[i]]
                    for step, readers_by_key in zip(chain[1:], step_readers[1:], strict=True)
                ),
            )
            for i, state in enumerate(states)
        )
    return Loop(
        scope.rpartition("/")[0] or scope,
        "unrolled",
        cell,
        tuple(
            LoopBoundary((start_tensor,), (readers,))
            for start_tensor, readers in zip(start_tensors, _start_readers(chain[0], step_readers[0]), strict=True)
        ),
        tuple(LoopBoundary((state.tensors[-1],)) for state in states),
        LoopBoundary(
            tuple(sources),
            tuple(readers_by_key[step.source] for readers_by_key, step in zip(step_readers, chain, strict=True)),
        ),
        states[0],
        states=tuple(states),
        carried_states=carried_states,
        time_major=True,
        scope=scope,
    )


def _ancestor_tensors(tensors: Sequence[Any], stop_ids: Container[int] = ()) -> list[Any]:
    """Return some tensors and all tensors that they are computed from, up to tensors given by id."""
    return transitive_closure(tensors, lambda tensor: () if id(tensor) in stop_ids else tensor.op.inputs)


def _start_readers(step: Match, step_readers: dict[Key, Readers]) -> list[Readers]:
    """Return, for each initial state, the operations (with input numbers) of the first step that read it."""
    readers = [step_readers[key] for key in step.previous_states]
    if len(set(step.previous_states)) < len(readers):  # one tensor is both states of an LSTM: matrix products read h
        products = tuple(reader for reader in readers[0] if reader[0].type in ("MatMul", "ConcatV2"))
        readers = [products, tuple(reader for reader in readers[0] if reader not in products)]
    return readers


def _step_readers(probe: Probe, step: Match) -> dict[Key, Readers]:
    """Return, for the input and each previous state of an unrolled step, the (operation, input number) that read it."""
    boundary = {id(t): key for key in (step.source, *step.previous_states) for t in probe.tensors[key]}
    readers_by_key: dict[Key, list[tuple[Any, int]]] = {key: [] for key in boundary.values()}

    def inner_inputs(op: Any) -> list[Any]:
        return [t.op for t in op.inputs if id(t) not in boundary and block_of(t, NO_LOOP) is None]

    for op in transitive_closure([probe.tensors[key][0].op for key in step.new_states], inner_inputs):
        for index, tensor in enumerate(op.inputs):
            if id(tensor) in boundary:
                readers_by_key[boundary[id(tensor)]].append((op, index))
    return {key: tuple(readers) for key, readers in readers_by_key.items()}
