"""Recognition of known cells (SimpleRNN, GRU, LSTM) by the equations of their state updates.

Gates that read the same input and state are put into the equations of each cell, at the random numbers of a
:class:`.probe.Probe`; where tensors of the graph have the results, these are the cell's new states. Names are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from ...recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, PeepholeLSTM, SimpleRNN
from .probe import ACTIVATIONS, Affine, Key, Probe, Value, activated, key_of
from .recurrences import Block, LoopCell, common_scope

Weights = dict[str, tuple[Block, ...]]

#: The convolutional LSTM by number of spatial axes.
_CONV_LSTMS: Mapping[int, type[Cell]] = {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D}


@dataclass(frozen=True)
class Match:
    """One step of a recognised cell: its input, and its states before and after it in the order of the class."""

    cell: LoopCell
    before: tuple[Key, ...]
    after: tuple[Key, ...]
    source: Key

    @property
    def scope(self) -> str:
        """Common name scope of the weight variables of the recognised cell."""
        return common_scope(self.cell.variables)


def _cell(kind: type[Cell], units: int, options: Mapping[str, Any], weights: Weights) -> LoopCell:
    """Create the ``LoopCell`` of a known kind of cell; options that are None are left out."""
    return LoopCell(kind.kind, units, kind, {k: v for k, v in options.items() if v is not None}, weights)


def steps_in(probe: Probe) -> Iterator[Match]:
    """Yield every step of a known cell that the probed tensors may compute: LSTMs, then GRUs, then SimpleRNNs."""
    groups = [
        (source, state, list(gates.values()))
        for sources, gates in probe.gates.items()
        if len(sources) == 2
        for source, state in permutations(sources)  # either may be the state
    ]
    for recognise in (_lstms, _grus, _simple):
        for source, state, gates in groups:
            products = [gate.products.values() for gate in map(_gate, gates)]
            if recognise is _lstms or not any(block.convolution for blocks in products for block in blocks):
                yield from recognise(probe, source, state, gates)


def _simple(probe: Probe, source: Key, state: Key, gates: Sequence[Value]) -> Iterator[Match]:
    """Yield the SimpleRNN steps among probed tensors: h' = act(W x + U h + b)."""
    for value in gates:
        gate, biases = _gate(value), _biases([value])
        if not gate.peepholes and biases is not None:
            weights = _kernels([gate.products[source]], [gate.products[state]]) | biases
            cell = _cell(SimpleRNN, gate.width, {"activation": value.activation}, weights)
            yield Match(cell, (state,), (value.key,), source)


def _grus(probe: Probe, source: Key, state: Key, gates: Sequence[Value]) -> Iterator[Match]:
    """Yield the GRU steps among probed tensors: h' = u h + (1 - u) n, n = act(W x + U (r h)) or act(W x + r (U h))."""
    before = probe.by_key[state].numbers
    for u, r in permutations(_factors(probe, gates), 2):
        if u.activation != r.activation or u.width != r.width or _gate(u).peepholes or _gate(r).peepholes:
            continue
        for name, n, rest, weights in (
            *_reset_before(probe, u, r, source, state),
            *_reset_after(probe, u, r, source, state),
        ):
            after = probe.found(u.numbers * before + (1 - u.numbers) * n) if n.shape == before.shape else None
            if after is not None:
                options = {"activation": name, "recurrent_activation": u.activation, **rest}
                yield Match(_cell(GRU, u.width, options, weights), (state,), (after.key,), source)


_Candidate = tuple[str, Any, dict[str, Any], Weights]


def _reset_before(probe: Probe, u: Value, r: Value, source: Key, state: Key) -> Iterator[_Candidate]:
    """Yield the forms act(W x + U (r h) + b) that a GRU's candidate state may have, with their weights."""
    before = probe.by_key[state].numbers
    reset = key_of(r.numbers * before) if r.numbers.shape == before.shape else b""
    for n in probe.gates.get(frozenset({source, reset}), {}).values():
        gates, biases = [_gate(u), _gate(r), _gate(n)], _biases([u, r, n])
        if biases is not None and n.width == u.width and not gates[2].peepholes:
            recurrent = [gates[0].products[state], gates[1].products[state], gates[2].products[reset]]
            kernels = _kernels([gate.products[source] for gate in gates], recurrent)
            yield n.activation, n.numbers, {"reset_after": False}, kernels | biases


def _reset_after(probe: Probe, u: Value, r: Value, source: Key, state: Key) -> Iterator[_Candidate]:
    """Yield the forms act(W x + b + r (U h + b')) that a GRU's candidate state may have, with their weights."""
    plains = [v for v in probe.gates.get(frozenset({source}), {}).values() if _is_line(v, u.width)]
    for inner in probe.cofactors[r.key].values():
        if not _is_line(inner, u.width) or _gate(inner).products.keys() != {state}:
            continue
        for plain in plains:
            line, two = plain.numbers + r.numbers * inner.numbers, [_gate(u), _gate(r)]
            biases = _both_biases(two, _gate(plain), _gate(inner))
            if biases is None or probe.found(line) is None:
                continue
            kernels = _kernels(
                [gate.products[source] for gate in (*two, _gate(plain))],
                [gate.products[state] for gate in (*two, _gate(inner))],
            )
            for name in ACTIVATIONS:
                yield name, activated(name, line), {"reset_after": True}, kernels | biases


def _is_line(value: Value, width: int) -> bool:
    """Return whether a probed value is an affine map ``W s + b`` of ``width`` units, without an activation."""
    gate = value.gate
    bare = gate is not None and value.activation == "linear" and not gate.peepholes and not gate.constant
    return bare and value.width == width


def _both_biases(two: Sequence[Affine], plain: Affine, recurrent: Affine) -> Weights | None:
    """Return input and recurrent bias of a GRU, as the candidate's biases show; None if those of the gates differ."""
    if any(gate.constant for gate in two):
        return None
    if not plain.vectors and not recurrent.vectors:
        return {} if not any(gate.vectors for gate in two) else None
    if len(plain.vectors) != 1 or len(recurrent.vectors) != 1 or any(len(gate.vectors) != 2 for gate in two):
        return None
    found: Weights = {}
    for key, own in (("bias", plain.vectors[0]), ("recurrent_bias", recurrent.vectors[0])):
        same = [[v for v in g.vectors if (v.variable, v.rows) == (own.variable, own.rows)] for g in two]
        if any(len(vectors) != 1 for vectors in same):
            return None
        found[key] = _joined(block.vector for block in (same[0][0], same[1][0], own))
    return found


def _lstms(probe: Probe, source: Key, state: Key, gates: Sequence[Value]) -> Iterator[Match]:
    """Yield the LSTM steps among probed tensors: c' = f c + i g and h' = o act(c'), also clipped or projected."""
    factors = _factors(probe, gates)
    for f in factors:
        cells = [c for c in probe.cofactors[f.key].values() if c.numbers.shape == f.numbers.shape]
        for c in cells:
            for i, g in permutations([v for v in factors if v is not f and v.width == f.width], 2):
                if i.activation == f.activation and (
                    line := probe.found(f.numbers * c.numbers + i.numbers * g.numbers)
                ):
                    for new in (line, *probe.clips[line.key]):
                        for o in factors:
                            if o.activation == f.activation and o.width == f.width and o not in (f, i, g):
                                yield from _outputs(probe, (i, f, g, o), c, new, source, state)


def _outputs(
    probe: Probe, gates: tuple[Value, ...], before: Value, cell: Value, source: Key, state: Key
) -> Iterator[Match]:
    """Yield LSTM steps with these gates and cell state, one for each tensor that may be the new h."""
    i, f, g, o = gates
    affines, peepholes, biases = [_gate(v) for v in gates], _peepholes(gates, before, cell), _biases(gates)
    squashed = probe.found(o.numbers * activated(g.activation, cell.numbers))
    products = _products(affines, source, state)
    if squashed is None or peepholes is None or biases is None or products is None:
        return
    hidden: list[tuple[Value, Block | None]] = [(squashed, None)]
    for projected in probe.gates.get(frozenset({squashed.key}), {}).values():
        line = _gate(projected)
        if projected.activation == "linear" and len(line.blocks) == 1 and not line.constant:
            clipped = (projected, *probe.clips[projected.key])
            hidden += [(value, line.products[squashed.key]) for value in clipped]
    for value, block in hidden:
        weights = _kernels([a.products[source] for a in affines], [a.products[state] for a in affines])
        weights |= biases | peepholes
        if block is not None:
            weights["projection"] = (block,)
        kind, convolution = products
        options: dict[str, Any] = {"activation": g.activation, "recurrent_activation": f.activation, **convolution}
        if kind is not LSTM and (peepholes or cell.clip or value.clip or block is not None):
            return
        if peepholes or cell.clip or value.clip:
            kind, options = PeepholeLSTM, options | {"cell_clip": cell.clip, "projection_clip": value.clip}
        match = _cell(kind, i.width, options, weights)
        yield Match(match, (state, before.key), (value.key, cell.key), source)


def _products(gates: Sequence[Affine], source: Key, state: Key) -> tuple[type[Cell], dict[str, Any]] | None:
    """Return the LSTM class for gates of matrix products or of convolutions, and options; None if the gates differ."""
    pairs = [(gate.products[source], gate.products[state]) for gate in gates]
    used = {tuple((block.window, block.convolution) for block in pair) for pair in pairs}
    (window, of_input), (of_window, of_state) = used.pop()
    if used or len(window) != len(of_window):
        return None
    if of_input is None or of_state is None:
        return LSTM, {}
    options = {"strides": of_input.strides, "dilation": of_input.dilation, "padding": of_input.padding}
    keeps_size = of_state.padding == "same" and {*of_state.strides, *of_state.dilation} == {1}
    return (_CONV_LSTMS[len(window)], options) if keeps_size else None


def _peepholes(gates: Sequence[Value], before: Value, after: Value) -> Weights | None:
    """Return an LSTM's peepholes, c_{t-1} in input and forget gate, c_t in the output gate; None for other forms."""
    found: Weights = {}
    for gate, name, cell in zip(gates, ("input", "forget", "", "output"), (before, before, before, after), strict=True):
        peepholes = _gate(gate).peepholes
        if peepholes:
            if not name or list(peepholes) != [cell.key]:
                return None
            found[f"peephole_{name}"] = (peepholes[cell.key].vector,)
    return found


def _gate(value: Value) -> Affine:
    assert value.gate is not None
    return value.gate


def _factors(probe: Probe, gates: Sequence[Value]) -> list[Value]:
    """Return the gates that are multiplied by another tensor, in the order of their columns in the weight variables."""
    factors = [value for value in gates if value.key in probe.cofactors]
    return sorted(factors, key=lambda value: min(block.columns[0] for block in _gate(value).products.values()))


def _joined(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Merge blocks of one variable that are next to each other, whatever operations use them."""
    joined: list[Block] = []
    for block in blocks:
        block = replace(block, window=(), convolution=None)
        last = joined[-1] if joined else block
        merged = replace(last, columns=(last.columns[0], block.columns[1]))
        if joined and last.columns[1] == block.columns[0] and replace(block, columns=merged.columns) == merged:
            joined[-1] = merged
        else:
            joined.append(block)
    return tuple(joined)


def _kernels(inputs: Iterable[Block], recurrent: Iterable[Block]) -> Weights:
    return {"kernel": _joined(inputs), "recurrent_kernel": _joined(recurrent)}


def _biases(gates: Sequence[Value]) -> Weights | None:
    """Return the biases of gates, constants included; {} if no gate has one, None if not every gate has exactly one."""
    affines = [_gate(value) for value in gates]
    counts = {len(gate.vectors) for gate in affines}
    if counts == {0}:
        return {} if not any(gate.constant for gate in affines) else None
    if counts != {1}:
        return None
    return {"bias": _joined(replace(gate.vectors[0].vector, plus=gate.constant) for gate in affines)}
