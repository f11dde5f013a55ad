"""Decides which call continues which: a call that starts from the state its predecessor returned is the next step.

The same state means the same values and an unchanged gradient path. The state returned to the user and the state inside
the recurrence are two tensors of the graph, so the gradient at the former is the direct gradient only. This is correct
if the user passes the state on unchanged, or keeps the earlier state for some samples (a mask, or a batch that shrinks
as short sequences end). Equal values are checked first. Then a random cotangent is pulled back, to check that the path
leaves gradients unchanged. A detached, scaled or mixed state fails one of the two checks and starts a new recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...autodiff.torch import pull_gradients

States = tuple[Tensor, ...]


@dataclass
class StateLink:
    """Initial and final states of one call, and the call before it in the same recurrence.

    ``user_initial``: states that the user passed in. ``initial``: equal states that the layer computed on, connected to
    the ``final`` of the call before in the graph. ``final``: states that the layer returned. ``user_final``: states
    that the user got, and may change in place. ``recorded_final``: originals of ``user_final``, which the user's code
    cannot reach. ``output``: output (time, sample, unit) of a layer's call, whose last step is its (upper) hidden
    state; None for a cell.
    """

    user_initial: States
    initial: States
    final: States
    user_final: States
    recorded_final: States
    continuation: Continuation | None = None
    output: Tensor | None = None

    def __post_init__(self) -> None:
        self._versions = tuple(tensor._version for tensor in self.user_final)
        #: States of the recurrence, initial state first; one list shared by all of its calls.
        self.history: list[States] = (
            [self.user_initial] if self.continuation is None else self.continuation.link.history
        )
        self.history.append(self.recorded_final)
        self.step = len(self.history) - 1
        #: Index in ``history`` of each sample's state in ``user_initial``; None if all have the last one.
        self.source_steps: Tensor | None = None if self.continuation is None else self.continuation.source_steps

    def continuation_for(self, user_states: States, *, rowwise: bool) -> Continuation | None:
        """Return how a call with the state ``user_states`` continues this one; None if it does not.

        With ``rowwise``, some samples may have kept their state from before this call, and the last samples may have
        left the batch.
        """
        if len(user_states) != len(self.recorded_final):
            return None
        if self.is_unchanged(user_states):
            return Continuation(self.final, None, self)
        moved_rows: Tensor | None = None
        for index in range(len(user_states)):
            unchanged = self.unchanged_samples(user_states[index], index, rowwise)
            if unchanged is None or (moved_rows is not None and not torch.equal(moved_rows, unchanged)):
                return None
            moved_rows = unchanged
        if moved_rows is None or all(
            state is earlier for state, earlier in zip(user_states, self.user_initial, strict=True)
        ):
            return None  # the previous call started from this state too: a branch, not a step
        samples = user_states[0].shape[0]
        if bool(moved_rows.all()) and samples == self.final[0].shape[0]:
            return Continuation(self.final, None, self)
        moved_masks = [moved_rows.reshape(-1, *[1] * (new_state.dim() - 1)) for new_state in self.final]
        state_parts = zip(moved_masks, self.final, self.initial, strict=True)
        return Continuation(
            tuple(
                torch.where(is_moved, new_state[:samples], earlier[:samples])
                for is_moved, new_state, earlier in state_parts
            ),
            moved_rows,
            self,
        )

    def is_unchanged(self, user_states: States) -> bool:
        """Return whether ``user_states`` are the tensors that this call returned, with their values and gradient path.

        Without a path, which a call under ``torch.no_grad`` does not leave, they start a recurrence of their own.
        """
        if torch.is_grad_enabled() and not all(state.requires_grad for state in user_states):
            return False
        same_tensors = zip(user_states, self.user_final, self._versions, self.recorded_final, strict=False)
        # Compare values too: a write through ``.data`` does not change a tensor's version.
        return len(user_states) == len(self.user_final) and all(
            state is earlier and state._version == version and _all_equal(state, recorded)
            for state, earlier, version, recorded in same_tensors
        )

    def unchanged_samples(self, state: Tensor, index: int, rowwise: bool) -> Tensor | None:
        """Return the samples (sample,) for which ``state`` is this call's state unchanged.

        All other samples must have kept their state from before the call; else the result is None.
        """
        final, user_initial, samples = self.recorded_final[index], self.user_initial[index], state.shape[0]
        if (
            not state.requires_grad
            or state.shape[1:] != final.shape[1:]
            or samples > final.shape[0]
            or state.dtype != final.dtype
        ):
            return None
        if not rowwise and (samples != final.shape[0] or not _all_equal(state, final)):
            return None
        equals_final = _rows_equal(state, final[:samples])
        equals_initial = _rows_equal(state, self.initial[index][:samples])
        if not bool((equals_final | equals_initial).all()):
            return None
        # The earlier states that samples may still have if they did not move on.
        steps = {self.step - 1} if self.source_steps is None else set(self.source_steps.tolist())
        earlier_states = [self.history[int(step)][index] for step in sorted(steps)]
        # Recent sources first: the cost of autograd grows with the age of the oldest source.
        for sources in ([user_initial], [user_initial, *earlier_states]):
            unchanged = self._unchanged_by_gradient(state, index, sources, equals_final, equals_initial)
            if unchanged is not None:
                return unchanged
        return None

    def _unchanged_by_gradient(
        self, state: Tensor, index: int, sources: list[Tensor], equals_final: Tensor, equals_initial: Tensor
    ) -> Tensor | None:
        """Return in which samples ``state`` is this call's new state unchanged: a bool tensor (sample,).

        A random cotangent is pulled back from ``state``: it arrives unchanged at the call's new state, or at a state
        from before the call (``sources``) of a sample that the call left out. None if in any sample it does neither.
        ``equals_final`` and ``equals_initial`` (sample,) are where the values are those after and before the call.
        """
        samples, probe = state.shape[0], probe_like(state)
        pulled = _source_gradients(state, [self.recorded_final[index], *sources], probe)
        final_grad, *source_grads = (torch.zeros_like(probe) if grad is None else grad[:samples] for grad in pulled)
        final_grad = final_grad + self._output_gradient(state, index, probe)
        is_moved = equals_final & _rows_equal(final_grad, probe)
        reaches_source = torch.zeros_like(equals_initial)
        for source_grad in source_grads:
            reaches_source = reaches_source | _rows_equal(source_grad, probe)
        if not self.history[0][index].requires_grad:  # a constant initial state has no gradient to compare
            reaches_source = reaches_source | (self._filled_source_steps(samples, state.device) == 0)
        is_kept = equals_initial & reaches_source & ~_nonzero_rows(final_grad)
        return is_moved if bool((is_moved | is_kept).all()) else None

    def _output_gradient(self, state: Tensor, index: int, probe: Tensor) -> Tensor | float:
        """Pull ``probe`` at ``state`` back to the last step of the layer's output.

        Returns NaN if earlier steps receive it.
        """
        if index or self.output is None or len(self.recorded_final[0]) > 1:
            return 0.0
        (output_grad,) = pull_gradients([state], [self.output], [probe], retain_graph=True)
        if output_grad is None:
            return 0.0
        return output_grad[-1:] if not bool((output_grad[:-1] != 0).any()) else torch.full_like(probe, torch.nan)

    def _filled_source_steps(self, count: int, device: torch.device) -> Tensor:
        if self.source_steps is None:
            return torch.full((count,), self.step - 1, device=device)
        return self.source_steps[:count]


@dataclass
class Continuation:
    """States that the next call starts from.

    ``moved_rows`` (sample,) is False where a sample keeps its earlier state; None if no sample does.
    """

    states: States
    moved_rows: Tensor | None
    link: StateLink

    @property
    def source_steps(self) -> Tensor | None:
        """Number of the step whose state each sample continues from, (sample,); None if it is the last step for all."""
        if self.moved_rows is None:
            return None
        device = self.moved_rows.device
        return torch.where(
            self.moved_rows, self.link.step, self.link._filled_source_steps(len(self.moved_rows), device)
        )


def upstream_nodes(nodes: Iterable[Any], visited: set[Any]) -> Iterator[Any]:
    """Yield autograd nodes and all nodes that they depend on, each once.

    Nodes in ``visited`` are left out, new ones added.
    """
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            pending.extend(parent for parent, _ in node.next_functions)


def depends_on(states: States, link: StateLink, visited: set[Any] | None = None) -> bool:
    """Return whether states depend on states or outputs of an earlier call, by nodes of the autograd graph.

    ``visited`` is the set of nodes that were searched without success; it is extended.
    """
    end_nodes = {tensor.grad_fn for tensor in (*link.recorded_final, *([] if link.output is None else [link.output]))}
    return any(
        node in end_nodes for node in upstream_nodes([t.grad_fn for t in states], set() if visited is None else visited)
    )


def reset_rows(states: States, link: StateLink) -> tuple[Tensor, bool]:
    """Return which samples, (sample,) of bool, start a call with states that do not depend on the call before it.

    The second result is True if all other samples start with the states that the call before returned, unchanged.
    """
    sample_axis = 0 if link.output is None else 1  # a layer's states and output have the samples on the second axis
    samples = states[0].shape[sample_axis]
    sources = [*link.recorded_final, *([] if link.output is None else [link.output])]
    is_reset, is_unchanged = (torch.ones(samples, dtype=torch.bool, device=states[0].device) for _ in range(2))

    def sample_rows(tensor: Tensor) -> Tensor:
        return tensor.movedim(sample_axis, 0)[:samples]

    for index, state in enumerate(states):
        if not state.requires_grad:
            is_unchanged = torch.zeros_like(is_unchanged)
            continue
        probe = probe_like(state)
        pulled = _source_gradients(state, sources, probe)
        for grad in pulled:
            is_reset = is_reset if grad is None else is_reset & ~_nonzero_rows(sample_rows(grad))
        is_equal = _rows_equal(sample_rows(state), sample_rows(link.recorded_final[index]))
        own_grad = pulled[index]
        is_unchanged = (
            is_unchanged
            & is_equal
            & (False if own_grad is None else _rows_equal(sample_rows(own_grad), sample_rows(probe)))
        )
    return is_reset, bool((is_reset | is_unchanged).all())


def probe_like(tensor: Tensor) -> Tensor:
    """Return fixed random numbers between 0.5 and 1.5 of the tensor's shape, without using torch's global generator."""
    generator = torch.Generator().manual_seed(tensor.numel())
    random_values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return random_values.to(tensor)


def _source_gradients(value: Tensor, sources: list[Tensor], cotangent: Tensor) -> list[Tensor | None]:
    """Pull the cotangent of ``value`` back to each source; None without a path."""
    differentiable = [source for source in sources if source.requires_grad]
    grads = iter(pull_gradients([value], differentiable, [cotangent], retain_graph=True))
    return [next(grads) if source.requires_grad else None for source in sources]


def _rows_equal(a: Tensor, b: Tensor) -> Tensor:
    return _equal_entries(a, b).reshape(a.shape[0], -1).all(dim=1)


def _all_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(_equal_entries(a, b).all()))


def _equal_entries(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal; NaN equals NaN, because a NaN state is passed on all the same."""
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def _nonzero_rows(a: Tensor) -> Tensor:
    return (a != 0).reshape(a.shape[0], -1).any(dim=1)
