"""Classes for the recurrences found in the copy of a graph: loops, their boundaries and their cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from posixpath import commonpath
from typing import Any, Literal

from rnnlens.errors import message
from rnnlens.recurrence.cells import Cell


@dataclass(frozen=True)
class LoopBoundary:
    """A tensor at the boundary of a loop: an input, an output or a state."""

    #: A sequence (time, sample, ...); unrolled, one (sample, ...) per step in the order of the run. Or one state.
    tensors: tuple[Any, ...]
    #: For each tensor: the pairs (operation, number of its input) by which this loop reads it; empty for outputs.
    readers: tuple[tuple[tuple[Any, int], ...], ...] = ()
    #: Whether the tensor has time as its first axis.
    is_sequence: bool = False
    #: For an output: whether the layer returns only the last step of the run, (sample, unit).
    last_only: bool = False


@dataclass(frozen=True)
class Convolution:
    """Strides and dilation by spatial axis, and padding ("valid" or "same"), of a convolution with channels last."""

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str


@dataclass(frozen=True)
class Block:
    """Block ``variable[..., rows, columns] + added_constant`` of a variable, by the name of the variable's operation.

    ``rows`` is None for a vector, and a number for one row as a vector. ``added_constant`` is a constant that the
    graph adds, such as the forget bias. ``window`` has the spatial sizes of a convolution kernel, all of which belong
    to the block; ``convolution`` is the operation that uses it.
    """

    variable: str
    rows: tuple[int, int] | int | None = None
    columns: tuple[int, Any] = (0, None)
    added_constant: float = 0.0
    window: tuple[int, ...] = ()
    convolution: Convolution | None = None

    @property
    def is_whole(self) -> bool:
        """True for the whole variable."""
        return self.rows is None and self.columns == (0, None)

    @property
    def width(self) -> int:
        """Number of columns of the variable that the block contains."""
        return int(self.columns[1] - self.columns[0])

    @property
    def is_vector(self) -> bool:
        """True for a vector, or a single row of a matrix, such as a bias of shape (1, unit)."""
        return not isinstance(self.rows, tuple) or self.rows[1] - self.rows[0] == 1

    @property
    def vector(self) -> Block:
        """The single row of a matrix as a vector; a vector unchanged."""
        return replace(self, rows=self.rows[0]) if isinstance(self.rows, tuple) else self

    def columns_of(self, start: int, stop: int) -> Block:
        """Return the part of the block in its columns ``start:stop``."""
        return replace(self, columns=(self.columns[0] + start, self.columns[0] + stop))

    def select_from(self, variable: Any) -> Any:
        """Return the block of an array or tensor of the variable's shape; leading axes are kept."""
        if self.is_whole:
            return variable
        columns, rows = slice(*self.columns), slice(*self.rows) if isinstance(self.rows, tuple) else self.rows
        return variable[..., columns] if rows is None else variable[..., rows, columns]


@dataclass(frozen=True)
class Condition:
    """Condition for a recognised cell: in the run ``tensor`` must have this value, for example a dropout rate of 0."""

    tensor: Any
    value: float
    #: Error text of a run in which the tensor has another value.
    error_text: str


@dataclass(frozen=True)
class LoopCell:
    """Cell of a loop: a known cell, a body of unknown equations, or a refused one."""

    #: Name of the cell in results: ``"gru"``, or the scope of an unknown cell.
    kind: str
    #: Size of the first state.
    units: int
    #: Known cell: its class, and its options that are no weights (``activation``, ...).
    cell: type[Cell] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Known cell: by weight name, the blocks of variables that are concatenated along the last axis.
    weights: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    #: Conditions that a run must meet for the cell to be valid.
    conditions: tuple[Condition, ...] = ()
    #: Cell of unknown equations: its step, a ``StepGraph``, and what in it is not supported.
    body: Any = None
    unknown_reason: str = ""
    #: Error text if the cell cannot be captured at all; empty otherwise.
    refusal: str = ""

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the cell reads."""
        if self.body is not None:
            return frozenset(self.body.variables)
        return frozenset(block.variable for blocks in self.weights.values() for block in blocks)


@dataclass(frozen=True)
class Loop:
    """One recurrence of a graph: one direction of one layer."""

    #: Scope of the layer: ``"lstm_model/rnn"``; both directions of a bidirectional layer have the same.
    name: str
    #: Control flow v1 (Enter, Exit) or v2 (While), or unrolled.
    kind: Literal["v1", "v2", "unrolled"]
    cell: LoopCell
    #: States before the first and after the last step, in the order of the cell's class (h, then c).
    initial: tuple[LoopBoundary, ...]
    final: tuple[LoopBoundary, ...]
    #: Input and output of the cell at every step, in the order of the run; no output if it is not read.
    input: LoopBoundary
    output: LoopBoundary | None
    #: (sample,) of int: number of real steps of each sample; padding has zero output and keeps the state. None for all.
    lengths: Any = None
    #: (time, sample) of bool in the order of the run, False at masked steps; None if there is no mask.
    mask: Any = None
    #: Unrolled: every state after each step, one tensor per step.
    states: tuple[LoopBoundary, ...] = ()
    #: Unrolled, with the output fed back as input: every state but the last, as the next step reads it.
    carried_states: tuple[LoopBoundary, ...] = ()
    #: Output of the loop at a masked step: the state, the previous output, or zero.
    masked_output: Literal["state", "output", "zero"] = "zero"
    #: ``"backward"`` if the input is reversed in time before the loop.
    direction: Literal["forward", "backward"] = "forward"
    #: Backward: (sample,) number of steps of each sample that are reversed, later steps stay; None for all.
    reversed_lengths: Any = None
    #: Whether it is one direction of a bidirectional layer; the loop of the other one has the same name.
    bidirectional: bool = False
    #: Whether the user's input and output tensors have time as the first axis.
    time_major: bool = False
    #: Scope of the variables of the cell: ``"lstm_model/rnn/gru_cell"``.
    scope: str = ""
    #: Substitutes for tensors of the user's graph, by name, that the loops computed into which this one was split.
    replaced_tensors: Mapping[str, Any] = field(default_factory=dict)
    #: Whether these loops draw random numbers, which then differ from those of the user's loop.
    is_redrawn: bool = False

    @property
    def layer(self) -> str:
        """Name of the layer, without the number of the call."""
        return self.name.partition("#")[0]


def uncapturable_loop(scope: str, problem: str, *, name: str = "", units: int = 0, **details: str) -> Loop:
    """Create the ``Loop`` of a recurrence of which no step can be read, with the text and details of the error."""
    cell = LoopCell("unknown", units, refusal=message(problem, **details))
    return Loop(name or scope, "unrolled", cell, (), (), LoopBoundary(()), None, scope=scope)


def common_scope(names: Iterable[str]) -> str:
    """Return the longest common name scope; "" if the names share none."""
    return commonpath([name.rpartition("/")[0] for name in names] or [""])
