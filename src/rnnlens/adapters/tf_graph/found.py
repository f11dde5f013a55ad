"""What is found in a graph: its loops, and the cell within each of them.

All tensors are those of *our copy* of the user's graph. The finder (``loops``, ``match``, ``unrolled``, ``body``)
makes these; everything else of the adapter reads them, so that how a loop was written, or with which control flow, is
known to the finder alone:

    find(graph, ends) -> list[Loop]

``ends``: the tensors whose ancestors count (outputs and loss); loops that lead to none of them are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...recurrence.cells import Cell, StepCell
from ...typing import Array


@dataclass(frozen=True)
class LoopBoundary:
    """A tensor at the boundary of a loop.

    Attributes
    ----------
    tensors
        One tensor (time, sample, ...) that holds all steps, or one (sample, ...) per step, in the order in which they
        are run, of an unrolled loop. Of a state: one tensor (sample, unit).
    readers
        By tensor: the pairs (operation, number of its input) by which this loop, and nobody else, reads it. Empty for
        what a loop puts out.
    stacked
        Whether the one tensor has an axis of time in front.
    last
        Of what a loop puts out: whether the layer returns the last step of the run alone, (sample, unit).
    """

    tensors: tuple[Any, ...]
    readers: tuple[tuple[tuple[Any, int], ...], ...] = ()
    stacked: bool = False
    last: bool = False


@dataclass(frozen=True)
class WeightPiece:
    """A block of a variable: ``variable[rows, columns] + plus``; a vector has columns only.

    ``variable`` is the name of the operation that holds it (``"rnn/gru_cell/gates/kernel"``). ``plus``: a constant that
    the graph adds to the variable (the forget bias), not a part of it.
    """

    variable: str
    rows: slice | int | None = None
    columns: slice = field(default_factory=lambda: slice(None))
    plus: float = 0.0


@dataclass(frozen=True)
class Body:
    """The step of a cell of unknown equations.

    Attributes
    ----------
    outer
        The tensors outside of the loop that the body reads, weights included; they are fetched in the same run.
    variables
        Those of them that are the values of variables: name of the operation of the variable to the tensor in
        ``outer``.
    make
        From the values of ``outer``, in that order, and names for ``variables`` to the cell, whose weights they name.
    state_sizes
        Sizes of the states, in the order of :attr:`Loop.initial`.
    output_size
        Size of what a step puts out.
    """

    outer: tuple[Any, ...]
    variables: Mapping[str, Any]
    make: Callable[[list[Array], list[str]], StepCell]
    state_sizes: tuple[int, ...]
    output_size: int


@dataclass(frozen=True)
class Condition:
    """What a cell is known by: that ``tensor``, which the user may feed, has this value in the run (a rate of 0).

    ``otherwise``: why the layer is refused in a run in which it has another, in the words of ``errors.message``.
    """

    tensor: Any
    value: float
    otherwise: str


@dataclass(frozen=True)
class FoundCell:
    """The cell of a loop: known, native, or refused.

    Attributes
    ----------
    kind
        What it is called in results: ``"gru"``, or the scope of an unknown cell.
    units
        Size of the first state.
    cell, options
        Known: its class of :mod:`rnnlens.recurrence.cells`, and the options that are no weights (``activation``, ...).
    weights
        Known: each weight of ours by the blocks of variables that it is made of, joined along the last axis.
        A weight that the graph does not have is absent.
    conditions
        What has to hold in a run, so that it is what it is said to be.
    body
        Native: its step.
    unknown
        Native: what of its step is in no cell that rnnlens knows.
    refused
        Why it can be neither, in the words of :func:`rnnlens.errors.message`; empty for the others.
    """

    kind: str
    units: int
    cell: type[Cell] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, tuple[WeightPiece, ...]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    body: Body | None = None
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
        How it is run: control flow v1 (Enter, Exit), v2 (While), or unrolled.
    cell
        What it does at each step.
    initial
        The states where they enter, in the order of the cell's own class (h, then c).
    final
        The states where they leave, in the same order.
    states
        Unrolled: every state after each step, one tensor per step; empty of a loop.
    carried
        Unrolled, and what the cell returned is fed to it again: every state but the last, as the next step reads it.
    input
        What the cell is fed at every step, as the loop reads it: turned round where the loop runs backwards.
    output
        What it puts out at every step, in the order in which the loop runs; None where nobody reads it.
    lengths
        (sample,) of int: steps of each sample; what lies behind is padding: zero output, state carried. None: all.
    mask
        (time, sample) of bool in the order of the run, where steps are left out otherwise; None for none.
    masked_output
        What the loop puts out at such a step.
    steps
        Number of steps if the graph says it.
    direction
        ``"backward"`` where the input is turned round before the loop.
    turned_by
        Backward: (sample,) steps of each sample that are turned round, what lies behind stays; None for all.
    bidirectional
        Whether it is one half of a layer; its sibling has the same name.
    time_major
        Whether the user's input and output tensors have time first.
    outer
        Loop invariants: tensor within the body to the tensor outside that it is.
    scope
        Scope of the variables of the cell: ``"lstm_model/rnn/gru_cell"``.
    replaced
        A loop of several cells, or with dropout or a projection around a cell, is run as several loops in the copy.
        Tensors of the user's graph that nobody computes any more, by name, to those that have their values now.
    redrawn
        Whether that draws random numbers, others than the loop of the user's graph would.
    """

    name: str
    kind: Literal["v1", "v2", "unrolled"]
    cell: FoundCell
    initial: tuple[LoopBoundary, ...]
    final: tuple[LoopBoundary, ...]
    input: LoopBoundary
    output: LoopBoundary | None
    lengths: Any = None
    mask: Any = None
    states: tuple[LoopBoundary, ...] = ()
    carried: tuple[LoopBoundary, ...] = ()
    masked_output: Literal["state", "output", "zero"] = "zero"
    steps: int | None = None
    direction: Literal["forward", "backward"] = "forward"
    turned_by: Any = None
    bidirectional: bool = False
    time_major: bool = False
    outer: Mapping[Any, Any] = field(default_factory=dict)
    scope: str = ""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    redrawn: bool = False
