"""Cells of the user's own in a training step: which calls form a loop, their direct gradients, and the loop run again.

A module proves to be a cell when a call gets a tensor that its call before returned: the state. That is known in the
forward pass, before any gradient arrives. Of modules that contain such a cell nothing is recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import UnsupportedError
from ..protocol import RecurrentCall
from .cells import CellForm, TorchStepCell, at_least_float32, tensor_leaves
from .discover import input_argument, is_state_name
from .roles import readouts


@dataclass
class CellArguments:
    """Arguments of successive calls of a cell, as leaves and their form.

    ``states``: by the position of each state among the leaves, its position among the tensors that a call returns. From
    the second call on the leaves have None there, since the states are what the call before returned.
    """

    states: dict[int, int] = field(default_factory=dict)
    #: Fields in which the user's code holds the states, in the order of their positions.
    fields: tuple[str | None, ...] = ()
    leaves: list[list[Any]] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)
    #: Whether all arguments are known: False if one was changed in place before its module proved to be a cell.
    is_whole: bool = True
    #: Tensors that were not copied, since their module had not proved to be a cell, and their versions.
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def add(self, leaves: Sequence[Any], spec: Any, states: Mapping[int, int], *, copied: bool) -> None:
        """Store the arguments of a call whose states have the positions ``states``."""
        self.specs.append(spec)
        stored = [None if i in states else leaf for i, leaf in enumerate(leaves)]
        tensors = {i: leaf.detach() for i, leaf in enumerate(stored) if isinstance(leaf, Tensor)}
        for i, tensor in tensors.items():
            is_copied = copied or tensor.is_inference()  # such a tensor has no version
            stored[i] = tensor.clone() if is_copied else tensor
            self._versions += [] if is_copied else [(tensor, tensor._version)]
        self.leaves.append(stored)

    def copy_tensors(self) -> None:
        """Copy the tensors that were not copied when their call was stored."""
        self.is_whole = all(leaf._version == version for leaf, version in self._versions)
        self._versions = []
        self.leaves = [
            [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call_leaves] for call_leaves in self.leaves
        ]

    def outputs(self, count: int) -> list[int]:
        """Return the positions of a call's ``count`` returned tensors that are no states."""
        return [i for i in range(count) if i not in self.states.values()]

    def run(self, cell: nn.Module) -> list[Tensor]:
        """Run a cell over the stored arguments; return each returned tensor as (sample, time, ...)."""
        steps: list[list[Tensor]] = []
        for leaves, spec in zip(self.leaves, self.specs, strict=True):
            given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for position, index in self.states.items() if steps else ():
                given[position] = steps[-1][index]
            args, kwargs = pytree.tree_unflatten(given, spec)
            steps.append(returned_tensors(cell(*args, **kwargs)))
        return [torch.stack(values, 1) for values in zip(*steps, strict=True)]


def returned_tensors(output: Any) -> list[Tensor]:
    """Return the floating tensors (sample, ...) that a call returned, each once."""
    tensors = {
        id(t): t for t in tensor_leaves(output) if t.is_floating_point() and t.dim() > 1 and not t.is_inference()
    }
    return list(tensors.values())


def without_fed_back_outputs(
    module: nn.Module, args: Any, kwargs: Any, returned: Sequence[Tensor], states: Mapping[int, int]
) -> dict[int, int]:
    """Return the states of a call among what the call before returned: outputs that are fed back are inputs.

    As in ``roles.find_roles`` the graph decides, and the arguments' names and places where it leaves that open.
    """
    outputs = readouts((args, kwargs), returned, states) if len(states) > 1 else set()
    if outputs:
        return {i: index for i, index in states.items() if i not in outputs}
    position, name = input_argument(module)
    given = args[position] if len(args) > position else kwargs.get(name)
    leaves = pytree.tree_leaves((args, kwargs))
    others = {i: index for i, index in states.items() if leaves[i] is not given}
    has_input = any(isinstance(leaf, Tensor) and i not in states for i, leaf in enumerate(leaves))
    return others if others and not (is_state_name(name) and has_input) else dict(states)


def replayed_cell(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a user's cell with the weights of the step."""
    try:
        cell = copy.deepcopy(module)
    except Exception as error:  # of a user's module
        raise UnsupportedError(
            f"The cell cannot be copied, so that its step is not run again: {type(error).__name__}: {error}",
            got=type(module).__name__,
            expected="a module that copy.deepcopy copies",
            hint="the direct gradients of the step are right; probe mode records the rest",
        ) from error
    tensors = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    with torch.no_grad():
        for name, value in weights.items():
            tensors[name].copy_(value)
            tensors[name].grad = None
    return cell


def direct_call(
    name: str,
    module: nn.Module,
    arguments: CellArguments,
    returned: Sequence[Tensor],
    grads: Mapping[int, Tensor],
) -> RecurrentCall:
    """Return the call of a loop with its direct gradients; input and initial states are placeholders.

    ``returned``: tensors (sample, time, ...) of all steps, ``grads`` their direct gradients by position.
    """
    states = [index for _, index in sorted(arguments.states.items())]
    outputs = arguments.outputs(len(returned))

    def beside(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([at_least_float32(value).flatten(2) for value in values], 2)

    def grad(index: int) -> Tensor:
        return grads[index] if index in grads else torch.zeros_like(returned[index])

    shown = outputs or states[:1]
    output, output_grad = beside([returned[i] for i in shown]), beside([grad(i) for i in shown])
    shapes = tuple(tuple(returned[i].shape[2:]) for i in states)
    form = CellForm(lambda x, state: ((x, *state), {}), shapes, (0,), tuple(states), tuple(outputs))
    cell = TorchStepCell(module, form, tuple(output.shape[2:]), returned[0].dtype)
    cell.name_states(arguments.fields)
    finals = [beside([grad(i)])[:, -1] for i in states]
    if not outputs:
        finals[0] = torch.zeros_like(finals[0])  # the last output is that state
    last = tuple(beside([returned[i]])[:, -1] for i in states)
    return RecurrentCall(
        layer=name,
        direction="forward",
        cell=cell,
        input=output.new_zeros(*output.shape[:2], 0),
        initial_state=tuple(map(torch.zeros_like, last)),
        output=output,
        output_grad=output_grad,
        final_state=last,
        final_state_grad=tuple(finals),
        stepwise=True,
    )
