"""Recognition of known cells (SimpleRNN, GRU, LSTM) by the equations of their state updates.

Gates that read the same input and state are put into the equations of each cell, at the random numbers of a
:class:`.probe.Probe`; where tensors of the graph have the results, these are the cell's new states. Names are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from rnnlens.recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, PeepholeLSTM, SimpleRNN

from .probe import ACTIVATIONS, Affine, Key, Probe, ProbedValue, apply_activation, numbers_key
from .recurrences import Block, LoopCell, common_scope

Weights = dict[str, tuple[Block, ...]]

#: The convolutional LSTM by number of spatial axes.
_CONV_LSTMS: Mapping[int, type[Cell]] = {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D}


@dataclass(frozen=True)
class Match:
    """One step of a recognised cell: its input, and its states before and after it in the order of the class."""

    cell: LoopCell
    previous_states: tuple[Key, ...]
    new_states: tuple[Key, ...]
    source: Key

    @property
    def scope(self) -> str:
        """Common name scope of the weight variables of the recognised cell."""
        return common_scope(self.cell.variables)


def _make_cell(kind: type[Cell], units: int, options: Mapping[str, Any], weights: Weights) -> LoopCell:
    """Create the ``LoopCell`` of a known kind of cell; options that are None are left out."""
    return LoopCell(kind.kind, units, kind, {k: v for k, v in options.items() if v is not None}, weights)


def matching_steps(probe: Probe) -> Iterator[Match]:
    """Yield every step of a known cell that the probed tensors may compute: LSTMs, then GRUs, then SimpleRNNs."""
    groups = [
        (source, state, list(gates.values()))
        for sources, gates in probe.gates.items()
        if len(sources) == 2
        for source, state in permutations(sources)  # either may be the state
    ]
    for recognise in (_lstm_steps, _gru_steps, _simple_rnn_steps):
        for source, state, gates in groups:
            gate_blocks = [gate.products.values() for gate in map(_gate_map, gates)]
            if recognise is _lstm_steps or not any(block.convolution for blocks in gate_blocks for block in blocks):
                yield from recognise(probe, source, state, gates)


def _simple_rnn_steps(probe: Probe, source: Key, state: Key, gates: Sequence[ProbedValue]) -> Iterator[Match]:
    """Yield the SimpleRNN steps among probed tensors: h' = act(W x + U h + b)."""
    for value in gates:
        gate, biases = _gate_map(value), _bias_weights([value])
        if not gate.peepholes and biases is not None:
            weights = _kernel_weights([gate.products[source]], [gate.products[state]]) | biases
            cell = _make_cell(SimpleRNN, gate.width, {"activation": value.activation}, weights)
            yield Match(cell, (state,), (value.key,), source)


def _gru_steps(probe: Probe, source: Key, state: Key, gates: Sequence[ProbedValue]) -> Iterator[Match]:
    """Yield the GRU steps among probed tensors: h' = u h + (1 - u) n, n = act(W x + U (r h)) or act(W x + r (U h))."""
    previous_numbers = probe.by_key[state].numbers
    for u, r in permutations(_multiplied_gates(probe, gates), 2):
        if u.activation != r.activation or u.width != r.width or _gate_map(u).peepholes or _gate_map(r).peepholes:
            continue
        for activation, n, candidate_options, weights in (
            *_reset_before_candidates(probe, u, r, source, state),
            *_reset_after_candidates(probe, u, r, source, state),
        ):
            new_state = (
                probe.find_value(u.numbers * previous_numbers + (1 - u.numbers) * n)
                if n.shape == previous_numbers.shape
                else None
            )
            if new_state is not None:
                options = {"activation": activation, "recurrent_activation": u.activation, **candidate_options}
                yield Match(_make_cell(GRU, u.width, options, weights), (state,), (new_state.key,), source)


_Candidate = tuple[str, Any, dict[str, Any], Weights]


def _reset_before_candidates(
    probe: Probe, u: ProbedValue, r: ProbedValue, source: Key, state: Key
) -> Iterator[_Candidate]:
    """Yield the forms act(W x + U (r h) + b) that a GRU's candidate state may have, with their weights."""
    previous_numbers = probe.by_key[state].numbers
    reset_key = numbers_key(r.numbers * previous_numbers) if r.numbers.shape == previous_numbers.shape else b""
    for n in probe.gates.get(frozenset({source, reset_key}), {}).values():
        gates, biases = [_gate_map(u), _gate_map(r), _gate_map(n)], _bias_weights([u, r, n])
        if biases is not None and n.width == u.width and not gates[2].peepholes:
            recurrent = [gates[0].products[state], gates[1].products[state], gates[2].products[reset_key]]
            kernels = _kernel_weights([gate.products[source] for gate in gates], recurrent)
            yield n.activation, n.numbers, {"reset_after": False}, kernels | biases


def _reset_after_candidates(
    probe: Probe, u: ProbedValue, r: ProbedValue, source: Key, state: Key
) -> Iterator[_Candidate]:
    """Yield the forms act(W x + b + r (U h + b')) that a GRU's candidate state may have, with their weights."""
    input_maps = [v for v in probe.gates.get(frozenset({source}), {}).values() if _is_affine(v, u.width)]
    for state_map in probe.cofactors[r.key].values():
        if not _is_affine(state_map, u.width) or _gate_map(state_map).products.keys() != {state}:
            continue
        for input_map in input_maps:
            candidate, gate_maps = input_map.numbers + r.numbers * state_map.numbers, [_gate_map(u), _gate_map(r)]
            biases = _reset_after_biases(gate_maps, _gate_map(input_map), _gate_map(state_map))
            if biases is None or probe.find_value(candidate) is None:
                continue
            kernels = _kernel_weights(
                [gate.products[source] for gate in (*gate_maps, _gate_map(input_map))],
                [gate.products[state] for gate in (*gate_maps, _gate_map(state_map))],
            )
            for activation in ACTIVATIONS:
                yield activation, apply_activation(activation, candidate), {"reset_after": True}, kernels | biases


def _is_affine(value: ProbedValue, width: int) -> bool:
    """Return whether a probed value is an affine map ``W s + b`` of ``width`` units, without an activation."""
    gate = value.gate
    is_affine = gate is not None and value.activation == "linear" and not gate.peepholes and not gate.constant
    return is_affine and value.width == width


def _reset_after_biases(gates: Sequence[Affine], input_map: Affine, state_map: Affine) -> Weights | None:
    """Return input and recurrent bias of a GRU, as the candidate's biases show; None if those of the gates differ."""
    if any(gate.constant for gate in gates):
        return None
    if not input_map.vectors and not state_map.vectors:
        return {} if not any(gate.vectors for gate in gates) else None
    if len(input_map.vectors) != 1 or len(state_map.vectors) != 1 or any(len(gate.vectors) != 2 for gate in gates):
        return None
    biases: Weights = {}
    for key, candidate_vector in (("bias", input_map.vectors[0]), ("recurrent_bias", state_map.vectors[0])):
        matching_vectors = [
            [v for v in g.vectors if (v.variable, v.rows) == (candidate_vector.variable, candidate_vector.rows)]
            for g in gates
        ]
        if any(len(vectors) != 1 for vectors in matching_vectors):
            return None
        biases[key] = _merge_blocks(
            block.vector for block in (matching_vectors[0][0], matching_vectors[1][0], candidate_vector)
        )
    return biases


def _lstm_steps(probe: Probe, source: Key, state: Key, gates: Sequence[ProbedValue]) -> Iterator[Match]:
    """Yield the LSTM steps among probed tensors: c' = f c + i g and h' = o act(c'), also clipped or projected."""
    factors = _multiplied_gates(probe, gates)
    for f in factors:
        cell_states = [c for c in probe.cofactors[f.key].values() if c.numbers.shape == f.numbers.shape]
        for c in cell_states:
            for i, g in permutations([v for v in factors if v is not f and v.width == f.width], 2):
                if i.activation == f.activation and (
                    unclipped_cell := probe.find_value(f.numbers * c.numbers + i.numbers * g.numbers)
                ):
                    for new_cell in (unclipped_cell, *probe.clips[unclipped_cell.key]):
                        for o in factors:
                            if o.activation == f.activation and o.width == f.width and o not in (f, i, g):
                                yield from _lstm_output_steps(probe, (i, f, g, o), c, new_cell, source, state)


def _lstm_output_steps(
    probe: Probe,
    gates: tuple[ProbedValue, ...],
    previous_cell: ProbedValue,
    new_cell: ProbedValue,
    source: Key,
    state: Key,
) -> Iterator[Match]:
    """Yield LSTM steps with these gates and cell state, one for each tensor that may be the new h."""
    i, f, g, o = gates
    affines = [_gate_map(v) for v in gates]
    peepholes = _peephole_weights(gates, previous_cell, new_cell)
    biases = _bias_weights(gates)
    hidden_value = probe.find_value(o.numbers * apply_activation(g.activation, new_cell.numbers))
    products = _lstm_class(affines, source, state)
    if hidden_value is None or peepholes is None or biases is None or products is None:
        return
    hidden_candidates: list[tuple[ProbedValue, Block | None]] = [(hidden_value, None)]
    for projected in probe.gates.get(frozenset({hidden_value.key}), {}).values():
        projection = _gate_map(projected)
        if projected.activation == "linear" and len(projection.blocks) == 1 and not projection.constant:
            clip_variants = (projected, *probe.clips[projected.key])
            hidden_candidates += [(value, projection.products[hidden_value.key]) for value in clip_variants]
    for value, block in hidden_candidates:
        weights = _kernel_weights([a.products[source] for a in affines], [a.products[state] for a in affines])
        weights |= biases | peepholes
        if block is not None:
            weights["projection"] = (block,)
        kind, convolution = products
        options: dict[str, Any] = {"activation": g.activation, "recurrent_activation": f.activation, **convolution}
        if kind is not LSTM and (peepholes or new_cell.clip or value.clip or block is not None):
            return
        if peepholes or new_cell.clip or value.clip:
            kind, options = PeepholeLSTM, options | {"cell_clip": new_cell.clip, "projection_clip": value.clip}
        lstm_cell = _make_cell(kind, i.width, options, weights)
        yield Match(lstm_cell, (state, previous_cell.key), (value.key, new_cell.key), source)


def _lstm_class(gates: Sequence[Affine], source: Key, state: Key) -> tuple[type[Cell], dict[str, Any]] | None:
    """Return the LSTM class for gates of matrix products or of convolutions, and options; None if the gates differ."""
    block_pairs = [(gate.products[source], gate.products[state]) for gate in gates]
    block_kinds = {tuple((block.window, block.convolution) for block in pair) for pair in block_pairs}
    (input_window, input_conv), (state_window, state_conv) = block_kinds.pop()
    if block_kinds or len(input_window) != len(state_window):
        return None
    if input_conv is None or state_conv is None:
        return LSTM, {}
    options = {
        "strides": input_conv.strides,
        "dilation": input_conv.dilation,
        "padding": input_conv.padding,
    }
    keeps_size = state_conv.padding == "same" and {*state_conv.strides, *state_conv.dilation} == {1}
    return (_CONV_LSTMS[len(input_window)], options) if keeps_size else None


def _peephole_weights(
    gates: Sequence[ProbedValue], previous_cell: ProbedValue, new_cell: ProbedValue
) -> Weights | None:
    """Return an LSTM's peepholes, c_{t-1} in input and forget gate, c_t in the output gate; None for other forms."""
    weights: Weights = {}
    for gate, name, cell in zip(
        gates, ("input", "forget", "", "output"), (previous_cell, previous_cell, previous_cell, new_cell), strict=True
    ):
        peepholes = _gate_map(gate).peepholes
        if peepholes:
            if not name or list(peepholes) != [cell.key]:
                return None
            weights[f"peephole_{name}"] = (peepholes[cell.key].vector,)
    return weights


def _gate_map(value: ProbedValue) -> Affine:
    assert value.gate is not None
    return value.gate


def _multiplied_gates(probe: Probe, gates: Sequence[ProbedValue]) -> list[ProbedValue]:
    """Return the gates that are multiplied by another tensor, in the order of their columns in the weight variables."""
    factors = [value for value in gates if value.key in probe.cofactors]
    return sorted(factors, key=lambda value: min(block.columns[0] for block in _gate_map(value).products.values()))


def _merge_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Merge blocks of one variable that are next to each other, whatever operations use them."""
    merged_blocks: list[Block] = []
    for block in blocks:
        block = replace(block, window=(), convolution=None)
        last_block = merged_blocks[-1] if merged_blocks else block
        merged = replace(last_block, columns=(last_block.columns[0], block.columns[1]))
        if (
            merged_blocks
            and last_block.columns[1] == block.columns[0]
            and replace(block, columns=merged.columns) == merged
        ):
            merged_blocks[-1] = merged
        else:
            merged_blocks.append(block)
    return tuple(merged_blocks)


def _kernel_weights(input_blocks: Iterable[Block], recurrent_blocks: Iterable[Block]) -> Weights:
    return {"kernel": _merge_blocks(input_blocks), "recurrent_kernel": _merge_blocks(recurrent_blocks)}


def _bias_weights(gates: Sequence[ProbedValue]) -> Weights | None:
    """Return the biases of gates, constants included; {} if no gate has one, None if not every gate has exactly one."""
    affines = [_gate_map(value) for value in gates]
    counts = {len(gate.vectors) for gate in affines}
    if counts == {0}:
        return {} if not any(gate.constant for gate in affines) else None
    if counts != {1}:
        return None
    return {"bias": _merge_blocks(replace(gate.vectors[0].vector, added_constant=gate.constant) for gate in affines)}
