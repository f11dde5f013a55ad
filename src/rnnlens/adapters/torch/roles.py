"""Finds which arguments of a step are its state: those that are computed from what the call before returned."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...vocabulary import field_of
from .lineage import upstream_nodes

#: Number of autograd nodes that are searched behind an argument for a returned tensor.
_SEARCHED_NODES = 2000


@dataclass(frozen=True)
class StepRoles:
    """State among the arguments and results of a step.

    ``arguments``: positions of the states among the leaves of a call of the form ``spec``. ``returned``: positions of
    the new states among the tensors that it returns, in the same order. ``templates``: such states (sample, ...), for
    their shape, type and device.
    """

    spec: Any
    arguments: tuple[int, ...]
    returned: tuple[int, ...]
    templates: tuple[Tensor, ...]
    #: Whether the name or place of an argument decided between states and fed back outputs.
    is_guessed: bool = False


@dataclass
class LastCall:
    """Last call of a module: the tensors that it ``returned``, its first argument, and the number of its calls."""

    returned: Sequence[Tensor] = ()
    argument: Any = None
    count: int = 0


def find_roles(
    call: tuple[tuple[Any, ...], dict[str, Any]],
    last: LastCall,
    default_input: Any,
    *,
    is_same_line: bool,
    is_named_state: bool = False,
    declared: Collection[int] = (),
    find_readouts: Callable[[Mapping[int, int]], Collection[int]] = lambda states: (),
) -> StepRoles | None:
    """Return the roles of a call's arguments, from the tensors that the call before it returned.

    An argument is a state if it is a returned tensor, has the values of one, or is computed from one, the nearest in
    the autograd graph. Of several, those that ``find_readouts`` names are outputs that are fed back as inputs. Where it
    names none, what is fed back in the place of the input ``default_input`` is an input if the call has another state,
    unless ``is_named_state`` and another tensor is an input; else it is a state if both calls were made from the same
    line. A call without other tensors has a state if it is fed back as :func:`fed_back_roles` says. Arguments at the
    positions ``declared`` by the user are the states without question. Return None if the call has no state.
    """
    returned = last.returned
    leaves, spec = pytree.tree_flatten(call)
    floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Links from an argument to a returned tensor, by the distance between them.
    links: list[tuple[int, bool, int, int]] = []
    for i in floating:
        is_input = leaves[i] is default_input
        # States may have equal values, as two that start from zero: a tensor itself counts before its values.
        same = [j for j, tensor in enumerate(returned) if leaves[i] is tensor]
        same = same or [j for j, tensor in enumerate(returned) if _is_handed_on(leaves[i], tensor)]
        if same:
            links.append((0, is_input, i, same[-1]))
        else:
            distances = _distances(leaves[i], returned)
            links += [(distance, is_input, i, j) for j, distance in distances.items()]
    states: dict[int, int] = {}
    computed: set[int] = set()
    for distance, _, i, j in sorted(links):
        if i not in states and j not in states.values():
            states[i] = j
            computed |= {i} if distance else set()
    outputs: Collection[int] = ()
    if declared:
        outputs = states.keys() - declared
    elif len(states) > 1:
        outputs = find_readouts(states)
    states = {i: j for i, j in states.items() if i not in outputs}
    fed_back = [] if declared or outputs else [i for i in states if leaves[i] is default_input]
    has_input = any(isinstance(leaf, Tensor) and i not in states for i, leaf in enumerate(leaves))
    is_beside_states = 0 < len(fed_back) < len(states)
    is_loop = is_same_line and not computed
    if (is_beside_states and not (is_named_state and has_input)) or (fed_back and not is_beside_states and not is_loop):
        states = {i: j for i, j in states.items() if i not in fed_back}
    others = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in states]
    if not others:
        return fed_back_roles(call, returned, last.argument)
    if not states:
        return None
    arguments = tuple(sorted(states))
    templates = tuple(returned[states[i]].detach() for i in arguments)
    first = next(iter((*call[0], *call[1].values())))
    is_first_fed_back = len(states) > 1 and not (declared or outputs) and any(leaves[i] is first for i in states)
    return StepRoles(
        spec, arguments, tuple(states[i] for i in arguments), templates, is_beside_states or is_first_fed_back
    )


def readouts(
    call: tuple[tuple[Any, ...], dict[str, Any]], returned: Sequence[Tensor], states: Mapping[int, int]
) -> set[int]:
    """Return the ``states`` of a call that are outputs fed back as inputs, as the scores of a decoder are.

    A call computes such an output from another new state, and from no state that it was given but by way of that one:
    all that the next call needs of the past is in the others. A call without any input has one of its outputs as input:
    the last that it computes of its states. Parts of one argument stay together.
    """
    leaves = pytree.tree_leaves(call)
    given = {leaves[i].grad_fn for i in states}
    if None in given:
        return set()  # what is computed from a tensor without a graph cannot be seen
    edges = {i: (returned[j].grad_fn, returned[j].output_nr) for i, j in states.items()}

    def computed_from_others(given: Collection[Any]) -> set[int]:
        return {i for i in states if _leads_to(edges[i], {edges[k] for k in states if k != i}, given)}

    has_input = any(isinstance(leaf, Tensor) and i not in states for i, leaf in enumerate(leaves))
    found = computed_from_others(given) or (set() if has_input else computed_from_others(()))
    arguments = [n for n, argument in enumerate((*call[0], *call[1].values())) for _ in pytree.tree_leaves(argument)]
    kept = {arguments[i] for i in states if i not in found}
    return {i for i in found if arguments[i] not in kept}


def _leads_to(edge: Any, sources: Collection[Any], given: Collection[Any]) -> bool:
    """Return whether an edge of the autograd graph leads to ``sources``, and else to no node in ``given``."""
    pending, visited, has_source = [edge], set[Any](), False
    while pending:
        node, _ = reached = pending.pop()
        if node is None or reached in visited:
            continue
        if node in given:
            return False
        visited.add(reached)
        if reached in sources:
            has_source = True
        else:
            pending.extend(node.next_functions)
    return has_source


def fed_back_roles(call: Any, returned: Sequence[Tensor], previous_input: Any) -> StepRoles | None:
    """Return the roles of a call in a loop over depth: its first tensor is its state, and the rest are no states.

    That tensor is what the call before ``returned``, or its sum with what does not depend on that call's own argument
    ``previous_input``, as a signal of the step or an injected input. Return None for any other call.
    """
    leaves, spec = pytree.tree_flatten(call)
    position = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    if position is None or torch._C._functorch.is_functorch_wrapped_tensor(leaves[position]):
        return None
    for j, tensor in enumerate(returned):
        has_form = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape == leaves[position].shape
        if has_form and (
            _is_handed_on(leaves[position], tensor) or _is_sum_with(leaves[position], tensor, previous_input)
        ):
            return StepRoles(spec, (position,), (j,), (tensor.detach(),))
    return None


def turn_roles(call: Any, path: str, last_calls: Mapping[str, LastCall]) -> StepRoles | None:
    """Return the roles of a call of the module ``path`` in a loop of several modules that are called in turn.

    The first tensor is what another module returned, which was called on what a third one returned, and so on back to
    what the module itself returned at its last call; in between there may be sums as in :func:`fed_back_roles`, and
    what the others read may be concatenated with an injected input. Return None for any other call.
    """
    leaves, spec = pytree.tree_flatten(call)
    position = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    own = last_calls[path]
    if position is None or sum(leaf is leaves[position] for leaf in leaves) > 1:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(leaves[position]):
        return None
    j = next((j for j, t in enumerate(own.returned) if t.dim() > 1 and t.shape == leaves[position].shape), None)
    if j is None or not own.returned[j].is_floating_point():
        return None
    others = {other: last for other, last in last_calls.items() if not _is_nested(path, other)}
    argument, joins = leaves[position], _SUMS

    def is_computed_from(tensors: Sequence[Tensor]) -> bool:
        return any(argument is t or _is_sum_with(argument, t, own.argument, joins) for t in tensors)

    while others:
        source = next((other for other, last in others.items() if is_computed_from(last.returned)), None)
        if source is None:
            return None
        argument, joins = others.pop(source).argument, (*_SUMS, "CatBackward0")
        if not isinstance(argument, Tensor):
            return None
        if is_computed_from(own.returned[j : j + 1]):
            return StepRoles(spec, (position,), (j,), (own.returned[j].detach(),))
    return None


def _is_nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


#: Autograd nodes of sums, and of copies of a tensor.
_SUMS: tuple[str, ...] = ("AddBackward0", "CloneBackward0", "AliasBackward0")


def _is_sum_with(argument: Tensor, returned: Tensor, previous_input: Any, joins: Collection[str] = _SUMS) -> bool:
    """Return whether ``argument`` is ``returned`` plus tensors that do not depend on ``previous_input``."""
    if returned.grad_fn is None or getattr(previous_input, "grad_fn", None) is None:
        return False
    terms, others = [argument.grad_fn], []
    has_returned = False
    while terms:
        node = terms.pop()
        if node is returned.grad_fn:
            has_returned = True
        elif node is not None and node.name() in joins:
            terms += [parent for parent, _ in node.next_functions]
        else:
            others.append(node)
    return has_returned and previous_input.grad_fn not in set(upstream_nodes(others, {returned.grad_fn}))


def declared_roles(
    call: tuple[tuple[Any, ...], dict[str, Any]], function: Callable[..., Any], names: Collection[str]
) -> StepRoles:
    """Return roles in which the arguments of ``function`` with these names are states, and its last results the new."""
    leaves, spec = pytree.tree_flatten(call)
    positions = pytree.tree_unflatten(list(range(len(leaves))), spec)
    arguments = inspect.signature(function).bind(*positions[0], **positions[1]).arguments
    states = tuple(
        i for name in names for i in pytree.tree_leaves(arguments.get(name, ())) if isinstance(leaves[i], Tensor)
    )
    return StepRoles(spec, states, tuple(range(-len(states), 0)), tuple(leaves[i] for i in states))


def as_written(args: tuple[Any, ...], kwargs: dict[str, Any], roles: StepRoles | None) -> Any:
    """Return a call's arguments with its states as in the call that showed ``roles``, where here they are one tensor.

    The states are along its first axis. Return None for any other call.
    """
    if roles is None or pytree.tree_structure((args, kwargs)) == roles.spec:
        return None
    positions, keywords = pytree.tree_unflatten(list(range(roles.spec.num_leaves)), roles.spec)
    if len(positions) != len(args) or keywords.keys() != kwargs.keys():
        return None

    def write(argument: Any, places: Any) -> Any:
        leaves, spec = pytree.tree_flatten(places)
        is_stack = isinstance(argument, Tensor) and argument.dim() > 2 and len(argument) == len(leaves)
        return pytree.tree_unflatten(argument.unbind(0), spec) if is_stack and len(leaves) > 1 else argument

    written = (
        tuple(map(write, args, positions)),
        {name: write(argument, keywords[name]) for name, argument in kwargs.items()},
    )
    return written if pytree.tree_structure(written) == roles.spec else None


def state_fields(call: tuple[tuple[Any, ...], dict[str, Any]], positions: Sequence[int]) -> tuple[str | None, ...]:
    """Return the fields in which the arguments of a call hold the leaves at ``positions``; None where there is none.

    Fields are those of named tuples, registered dataclasses and other registered classes, and keys of dicts. Nested
    ones are joined, as in ``soma_voltage``, and followed by positions in tuples: ``memory_0``.
    """
    paths = [path[1:] for argument in (*call[0], *call[1].values()) for path in _leaf_paths((argument,))]
    return tuple(field_of(paths[position]) for position in positions)


def _leaf_paths(tree: Any) -> list[tuple[str | int, ...]]:
    """Return for every leaf of a tree the fields, keys and positions that lead to it."""
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(tree))
    if node is None:
        return [()]
    parts, _ = node.flatten_fn(tree)
    if node.flatten_with_keys_fn is not None:
        keys = [_key(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    else:  # a class registered without names for its parts: attributes of it
        attributes = {id(value): name for name, value in getattr(tree, "__dict__", {}).items()}
        keys = [attributes.get(id(part), i) for i, part in enumerate(parts)]
    return [(key, *path) for key, part in zip(keys, parts, strict=True) for path in _leaf_paths(part)]


def _key(key: Any) -> str | int:
    """Return a key of torch's paths as a field, or as a position in a sequence."""
    if isinstance(key, pytree.SequenceKey):
        return int(key.idx)
    return str(key.name if isinstance(key, pytree.GetAttrKey) else getattr(key, "key", key))


def _is_handed_on(argument: Tensor, returned: Tensor) -> bool:
    """Return whether an argument is a returned tensor, or has its values, as a detached state does."""
    if argument is returned:
        return True
    return argument.shape == returned.shape and bool(argument.any()) and torch.equal(argument, returned)


def _distances(argument: Tensor, returned: Sequence[Tensor]) -> dict[int, int]:
    """Return the distances in the autograd graph from an argument to those returned tensors that it is computed from.

    The search ends at returned tensors, so that one is not found behind another.
    """
    ends = {tensor.grad_fn: j for j, tensor in enumerate(returned) if tensor.grad_fn is not None}
    found: dict[int, int] = {}
    pending, visited = deque([(argument.grad_fn, 1)]), set[Any]()
    while pending and len(visited) < _SEARCHED_NODES:
        node, distance = pending.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node not in ends:
            pending.extend((parent, distance + 1) for parent, _ in node.next_functions)
        elif returned[ends[node]].shape == argument.shape:
            found.setdefault(ends[node], distance)
    return found
