"""Names of layers and their weights: from scopes, or from the Keras model that built the graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rnnlens.adapters.protocol import LayerInfo
from rnnlens.errors import message

from .recurrences import Loop


@dataclass(frozen=True)
class KerasRecurrence:
    """One recurrent Keras layer, or one direction of a bidirectional layer.

    ``variables``: names of the operations of its cell's variables. ``is_built``: whether it has variables; a layer
    that was never called has none. ``refusal``: why it cannot be captured, or "". ``dropout_refusal``: why its dropout
    of states prevents a capture unless its cell is recognised without dropout, or "". ``is_stack``: whether it has
    several cells.
    """

    name: str
    direction: Literal["forward", "backward"]
    bidirectional: bool
    variables: frozenset[str]
    returns_sequences: bool
    is_built: bool = True
    refusal: str = ""
    dropout_refusal: str = ""
    is_stack: bool = False
    info: LayerInfo | None = field(default=None, compare=False)


@dataclass(frozen=True)
class KerasNames:
    """Description of a tf_keras model by names of tensors, so that no Keras object is kept alive.

    ``owners``: layer and weight key by the variable's operation. ``outputs``: output tensors by layer, one per call.
    ``learning_phase``: its placeholder, or its fixed value. ``weights``: placeholders of sample weights.
    ``added_losses``: losses that the layers add. ``masks``: mask of each output. ``loss``: loss of the compiled model.
    ``scales``: loss weight of each output; None if any of them is a tensor.
    """

    recurrences: tuple[KerasRecurrence, ...]
    owners: tuple[tuple[str, tuple[str, str]], ...]
    outputs: tuple[tuple[str, tuple[str, ...]], ...]
    learning_phase: str | bool | None = None
    weights: tuple[str, ...] = ()
    added_losses: tuple[str, ...] = ()
    masks: tuple[str | None, ...] = ()
    optimizer: str = field(default="", compare=False)
    loss: Any = field(default=None, compare=False)
    scales: tuple[float, ...] | None = ()

    def uncalled_layers(self, used_variables: Container[str]) -> list[str]:
        """Return the recurrent layers without any of ``used_variables``, those that outputs and loss depend on."""
        idle_recurrences = [
            recurrence
            for recurrence in self.recurrences
            if not recurrence.is_built
            or (recurrence.variables and not any(name in used_variables for name in recurrence.variables))
        ]
        called_names = {recurrence.name for recurrence in self.recurrences if recurrence not in idle_recurrences}
        return list(
            dict.fromkeys(recurrence.name for recurrence in idle_recurrences if recurrence.name not in called_names)
        )

    def refusals(self, loops: Sequence[Loop], used_variables: Container[str]) -> dict[str, str]:
        """Return the reason for each recurrent layer that cannot be captured, by name; unused layers are left out."""
        found_layers = {loop.layer for loop in loops}
        recognised_layers = found_layers - {loop.layer for loop in loops if loop.cell.cell is None}
        uncalled = self.uncalled_layers(used_variables)
        cell_variables = defaultdict[tuple[str, str], set[frozenset[str]]](set)
        for loop in loops:
            cell_variables[loop.layer, loop.direction].add(loop.cell.variables)
        stacked_layers = {layer for (layer, _), variable_sets in cell_variables.items() if len(variable_sets) > 1}
        reasons: dict[str, str] = {}
        for recurrence in self.recurrences:
            problem, reason = f"Layer {recurrence.name!r} cannot be traced", recurrence.refusal
            if not reason and (recurrence.is_stack or recurrence.name not in recognised_layers):
                reason = recurrence.dropout_refusal
            if not reason and recurrence.name in stacked_layers:
                hint = "unroll=False, which computes the same; or run eagerly"
                reason = message(f"{problem}: it stacks cells, and its steps are unrolled.", hint=hint)
            if not reason and recurrence.name not in found_layers:
                hint = "unroll=False; or a cell of Keras' own"
                reason = message(f"{problem}: its steps were not found in the graph.", hint=hint)
            if reason and recurrence.name not in uncalled:
                reasons.setdefault(recurrence.name, reason)
        return reasons


def rename_loops(loops: Sequence[Loop], names: KerasNames | None) -> tuple[Loop, ...]:
    """Name loops after the Keras layers whose variables they read; several calls of a layer are numbered."""
    if names is None:
        return _number_calls(loops)
    loop_recurrences = [(loop, _keras_recurrence_of(loop, names)) for loop in loops]
    call_counts = Counter(
        (recurrence.name, recurrence.direction) for _, recurrence in loop_recurrences if recurrence is not None
    )
    call_numbers, renamed_loops = Counter[tuple[str, str]](), []
    for loop, recurrence in loop_recurrences:
        if recurrence is None:
            renamed_loops.append(loop)
            continue
        key = (recurrence.name, recurrence.direction)
        name = recurrence.name if call_counts[key] == 1 else f"{recurrence.name}#{call_numbers[key]}"
        call_numbers[key] += 1
        output = loop.output
        if output is not None and not recurrence.returns_sequences and (output.is_sequence or len(output.tensors) > 1):
            output = replace(output, last_only=True)
        # The steps of an unrolled loop are in the order of the run; its direction is an attribute of the layer.
        direction = recurrence.direction if loop.kind == "unrolled" else loop.direction
        renamed_loops.append(
            replace(loop, name=name, bidirectional=recurrence.bidirectional, output=output, direction=direction)
        )
    return tuple(renamed_loops)


def _number_calls(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Name loops that run the same cell as calls of one layer, rnn#0 and rnn#1, as in a siamese network."""
    chains = [[loop for loop in loops if loop.name == name] for name in dict.fromkeys(loop.name for loop in loops)]
    calls: dict[Any, list[list[Loop]]] = {}
    for chain in chains:
        cell_weights = [loop.cell.weights.items() if loop.cell.body is None else loop.cell.variables for loop in chain]
        cells = [(loop.direction, sorted(map(str, blocks))) for loop, blocks in zip(chain, cell_weights, strict=True)]
        if all(cell_weights for _, cell_weights in cells) and len({direction for direction, _ in cells}) < len(cells):
            calls.setdefault(str(cells[0]), []).extend([loop] for loop in chain)
        else:
            calls.setdefault(
                str(sorted(cells)) if all(cell_weights for _, cell_weights in cells) else id(chain), []
            ).append(chain)
    names: dict[int, str] = {}
    for layer_calls in calls.values():
        for i, chain in enumerate(layer_calls):
            name = layer_calls[0][0].name if len(layer_calls) == 1 else f"{layer_calls[0][0].name}#{i}"
            names |= {id(loop): name for loop in chain}
    return tuple(replace(loop, name=names[id(loop)]) for loop in loops)


def _keras_recurrence_of(loop: Loop, names: KerasNames) -> KerasRecurrence | None:
    """Return the Keras layer with the loop's variables, preferably one named in the loop's scope; None without any."""
    cell_variables = loop.cell.variables
    fitting_recurrences = [
        recurrence for recurrence in names.recurrences if cell_variables and cell_variables <= recurrence.variables
    ]
    fitting_recurrences = [
        recurrence for recurrence in fitting_recurrences if recurrence.direction == loop.direction
    ] or fitting_recurrences
    named_recurrences = [
        recurrence for recurrence in fitting_recurrences if recurrence.name.rpartition("/")[2] in loop.name
    ]
    return next(iter(named_recurrences or fitting_recurrences), None)
