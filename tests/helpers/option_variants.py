"""Variants of a recurrent layer of Keras: each cell with each combination of options that changes what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

#: Class and options of each cell.
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_rnn": ("SimpleRNN", {}),
    "lstm": ("LSTM", {}),
    "gru_after": ("GRU", {"reset_after": True}),
    "gru_before": ("GRU", {"reset_after": False}),
}
DIRECTIONS, STARTS = ("forward", "backward", "bidirectional"), ("zeros", "stateful", "given", "stateful_given")


@dataclass(frozen=True)
class Variant:
    """A cell with or without bias, in one or two directions, that returns all steps or the last, from a start."""

    cell: str
    bias: bool
    direction: str
    sequences: bool
    start: str

    @property
    def name(self) -> str:
        bias = "bias" if self.bias else "nobias"
        return "-".join(map(str, (self.cell, bias, self.direction, self.sequences, self.start)))

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.direction == "bidirectional" else (self.direction,)

    @property
    def returns_state(self) -> bool:
        """Return whether the layer returns its state; Keras cannot build a stateful bidirectional layer that does."""
        return not (self.direction == "bidirectional" and "stateful" in self.start)

    def layer(self, layers: Any, units: int, unroll: bool, **more: Any) -> Any:
        """Return the layer, of the module ``layers`` of one Keras package."""
        class_name, options = CELLS[self.cell]
        layer = getattr(layers, class_name)(
            units,
            use_bias=self.bias,
            return_sequences=self.sequences,
            return_state=self.returns_state,
            stateful="stateful" in self.start,
            go_backwards=self.direction == "backward",
            unroll=unroll,
            name=self.name,
            **options,
            **more,
        )
        return layers.Bidirectional(layer, name=self.name) if self.direction == "bidirectional" else layer


def all_variants(cell: str) -> list[Variant]:
    """Return the 48 variants of a cell."""
    return [Variant(cell, *options) for options in product((True, False), DIRECTIONS, (True, False), STARTS)]
