"""Classes for the recurrences found in a graph: loops, their boundaries and their cells.

All tensors are those of the *copy* of the user's graph. ``discover`` creates these objects, and the rest of the adapter
reads them. Only the modules behind ``discover`` depend on how a loop was written, or on its kind of control flow. The
entry point is

    find(graph, ends) -> list[Loop]

``ends`` are the outputs and the loss; loops that these do not depend on are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...recurrence.cells import Cell


@dataclass(frozen=True)
class LoopBoundary:
    """A tensor at the boundary of a loop: an input, an output or a state.

    Attributes
    ----------
    tensors
        A sequence: one tensor (time, sample, ...) with all steps; for an unrolled loop one (sample, ...) per step, in
        the order of the run. An initial or final state: one tensor (sample, unit).
    readers
        For each tensor: the pairs (operation, number of its input) by which this loop reads it. Empty for outputs.
    stacked
        Whether the tensor has time as its first axis.
    last
        For an output: whether the layer returns only the last step of the run, (sample, unit).
    """

    tensors: tuple[Any, ...]
    readers: tuple[tuple[tuple[Any, int], ...], ...] = ()
    stacked: bool = False
    last: bool = False


@dataclass(frozen=True)
class WeightPiece:
    """Block of a variable: ``variable[..., rows, columns] + plus``; a vector has columns only.

    ``variable`` is the name of the variable's operation (``"rnn/gru_cell/gates/kernel"``). ``plus`` is a constant that
    the graph adds to the variable, such as the forget bias.
    """

    variable: str
    rows: slice | int | None = None
    columns: slice = field(default_factory=lambda: slice(None))
    plus: float = 0.0


@dataclass(frozen=True)
class Condition:
    """Condition for a recognised cell: in the run ``tensor`` must have this value, for example a dropout rate of 0.

    ``otherwise`` is the error text of a run in which the tensor has another value.
    """

    tensor: Any
    value: float
    otherwise: str


@dataclass(frozen=True)
class LoopCell:
    """Cell of a loop: a known cell, a body of unknown equations, or a refused one.

    Attributes
    ----------
    kind
        Name of the cell in results: ``"gru"``, or the scope of an unknown cell.
    units
        Size of the first state.
    cell, options
        Known cell: its class of :mod:`rnnlens.recurrence.cells`, and the options that are no weights (``activation``,
        ...).
    weights
        Known cell: by weight name, the blocks of variables that are concatenated along the last axis. A weight that the
        graph does not have is absent.
    conditions
        Conditions that a run must meet for the cell to be valid.
    body
        Cell of unknown equations: its step, a ``StepGraph`` of :mod:`.step_graph`.
    unknown
        Cell of unknown equations: text on what in its step is not supported.
    refused
        Error text if the cell cannot be captured at all; empty otherwise.
    """

    kind: str
    units: int
    cell: type[Cell] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, tuple[WeightPiece, ...]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    body: Any = None
    unknown: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Loop:
    """One recurrence of a graph: one direction of one layer.

    Attributes
    ----------
    name
        The scope of the layer: ``"lstm_model/rnn"``; both directions of a bidirectional layer have the same.
    kind
        Control flow v1 (Enter, Exit) or v2 (While), or unrolled.
    cell
        The cell that is run at each step.
    initial
        The initial states, in the order of the cell's class (h, then c).
    final
        The final states, in the same order.
    states
        Unrolled: every state after each step, one tensor per step; empty for a while loop.
    carried
        Unrolled, with the output fed back as input: every state but the last, as the next step reads it.
    input
        The input of the cell at every step, in the order of the run: reversed in time if the loop runs backward.
    output
        The output at every step, in the order of the run; None if it is not read.
    lengths
        (sample,) of int: number of real steps of each sample; padding has zero output and keeps the state. None for
        all.
    mask
        (time, sample) of bool in the order of the run, False at masked steps; None if there is no mask.
    masked_output
        Output of the loop at a masked step: the state, the previous output, or zero.
    direction
        ``"backward"`` if the input is reversed in time before the loop.
    turned_by
        Backward: (sample,) number of steps of each sample that are reversed, later steps stay; None for all.
    bidirectional
        Whether it is one direction of a bidirectional layer; the loop of the other one has the same name.
    time_major
        Whether the user's input and output tensors have time as the first axis.
    scope
        Scope of the variables of the cell: ``"lstm_model/rnn/gru_cell"``.
    replaced
        Substitutes for tensors of the user's graph, by name. A loop of several cells, or with dropout or a projection
        around a cell, is rewritten as several loops in the copy; these compute the substitutes.
    redrawn
        Whether the rewritten loops draw random numbers, which then differ from those of the user's loop.
    """

    name: str
    kind: Literal["v1", "v2", "unrolled"]
    cell: LoopCell
    initial: tuple[LoopBoundary, ...]
    final: tuple[LoopBoundary, ...]
    input: LoopBoundary
    output: LoopBoundary | None
    lengths: Any = None
    mask: Any = None
    states: tuple[LoopBoundary, ...] = ()
    carried: tuple[LoopBoundary, ...] = ()
    masked_output: Literal["state", "output", "zero"] = "zero"
    direction: Literal["forward", "backward"] = "forward"
    turned_by: Any = None
    bidirectional: bool = False
    time_major: bool = False
    scope: str = ""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    redrawn: bool = False

    @property
    def layer(self) -> str:
        """Name of the layer, without the number of the call."""
        return self.name.partition("#")[0]

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the cell reads."""
        if self.cell.body is not None:
            return frozenset(self.cell.body.variables)
        return frozenset(piece.variable for pieces in self.cell.weights.values() for piece in pieces)


def common_scope(names: Iterable[str]) -> str:
    """Return the longest common name scope; "" if the names share none."""
    paths = [name.split("/")[:-1] for name in names]
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)
