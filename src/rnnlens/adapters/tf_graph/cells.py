"""Recognition of known cells (SimpleRNN, GRU, LSTM) by the equations of their state updates.

Names are not used. TensorFlow's own cells, the layers of tf_keras and cells written by hand are recognised by the same
rules. A step that differs in any detail is not matched; its equations are then unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from ...recurrence.cells import GRU, LSTM, Cell, PeepholeLSTM, SimpleRNN
from .blocks import Block
from .forms import Atom, TensorForm
from .graph_forms import Forms
from .recurrences import WeightPiece

#: Forms of a state before and after a step.
Pair = tuple[TensorForm, TensorForm]


@dataclass(frozen=True)
class Match:
    """One recognised cell: its class, states, input, options and weights.

    Attributes
    ----------
    states
        Numbers of the pairs that are its states, in the order of the class (h, then c).
    source
        The form of its input.
    """

    cell: type[Cell]
    states: tuple[int, ...]
    source: TensorForm
    units: int
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, tuple[WeightPiece, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Affine:
    """Affine map of a gate: ``sum(form @ block) + sum(vectors) + sum(vector * form) + constant``."""

    products: Mapping[TensorForm, Block]
    vectors: tuple[Block, ...]
    peepholes: Mapping[Any, Block]
    constant: float

    @property
    def width(self) -> int:
        """Number of units."""
        return next(iter(self.products.values())).width


def recognised(forms: Forms, pairs: Sequence[Pair]) -> list[Match]:
    """Find known cells among states, given as pairs of forms before and after the step.

    Each state belongs to one cell at most.
    """
    found: list[Match] = []
    free = set(range(len(pairs)))
    for h, c in permutations(range(len(pairs)), 2):
        if {h, c} <= free and (match := _lstm(forms, pairs, h, c)) is not None:
            found.append(match)
            free -= {h, c}
    for h in sorted(free):
        match = _gru(forms, pairs[h], h) or _simple(forms, pairs[h], h)
        if match is not None:
            found.append(match)
    return found


def affine_of(form: TensorForm) -> Affine | None:
    """Return a form as the affine input of a gate's activation; None if it is not affine."""
    products: dict[TensorForm, Block] = {}
    vectors: list[Block] = []
    peepholes: dict[Any, Block] = {}
    for product, factor in form.terms.items():
        kinds = sorted(atom[0] for atom in product)
        if not product:
            continue
        if factor != 1.0:
            return None
        if kinds == ["matmul"] and product[0][1] not in products:
            products[product[0][1]] = product[0][2]
        elif kinds == ["block"]:
            vectors.append(product[0][1])
        elif len(product) == 2 and "block" in kinds and "matmul" not in kinds:
            vector, seen = product if product[0][0] == "block" else product[::-1]
            peepholes[_alone(seen)] = vector[1]
        else:
            return None
    if not products or len({block.width for block in (*products.values(), *vectors)}) != 1:
        return None
    if not all(_is_vector(block) for block in (*vectors, *peepholes.values())):
        return None
    return Affine(products, tuple(vectors), peepholes, form.terms.get((), 0.0))


def factor_of(form: TensorForm) -> Atom:
    """Return the atom that represents a form as a factor of a product."""
    return form.atom if form.atom is not None else ("sum", form)


def _alone(atom: Atom) -> TensorForm | Any:
    """Return the key of a peephole's factor: the sum inside an atom, or the atom itself."""
    return atom[1] if atom[0] == "sum" else atom


def _activated(atom: Atom) -> tuple[str, Affine] | None:
    """Return the name of an atom's activation and its affine input.

    None if it has another form. A plain sum has the activation "linear".
    """
    if atom[0] == "act":
        name, inner = atom[1], affine_of(atom[2])
    elif atom[0] == "sum":
        name, inner = "linear", affine_of(atom[1])
    else:
        return None
    return None if inner is None else (name, inner)


def _two_sides(gates: Sequence[Affine], state: TensorForm) -> TensorForm | None:
    """Return the input shared by all gates, besides the state; None if they differ."""
    sources = {frozenset(gate.products) - {state} for gate in gates}
    if any(state not in gate.products for gate in gates) or len(sources) != 1:
        return None
    (source,) = sources
    return next(iter(source)) if len(source) == 1 else None


# Weights from blocks of variables.


def _piece(block: Block, plus: float = 0.0) -> WeightPiece:
    rows = slice(*block.rows) if isinstance(block.rows, tuple) else block.rows
    return WeightPiece(block.variable, rows, slice(*block.columns), plus)


def _vector(block: Block, plus: float = 0.0) -> WeightPiece:
    """Return a block as a vector weight. A single row of a matrix, such as a bias of shape (1, unit), is one."""
    rows = block.rows[0] if isinstance(block.rows, tuple) else block.rows
    return WeightPiece(block.variable, rows, slice(*block.columns), plus)


def _is_vector(block: Block) -> bool:
    return not isinstance(block.rows, tuple) or block.rows[1] - block.rows[0] == 1


def _joined(pieces: Sequence[WeightPiece]) -> tuple[WeightPiece, ...]:
    """Merge neighbouring blocks of one variable."""
    out: list[WeightPiece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if (
            last is not None
            and (last.variable, last.rows, last.plus) == (piece.variable, piece.rows, piece.plus)
            and last.columns.stop == piece.columns.start
        ):
            out[-1] = WeightPiece(last.variable, last.rows, slice(last.columns.start, piece.columns.stop), last.plus)
        else:
            out.append(piece)
    return tuple(out)


def _kernels(gates: Sequence[Affine], source: TensorForm, state: TensorForm) -> dict[str, tuple[WeightPiece, ...]]:
    return {
        "kernel": _joined([_piece(gate.products[source]) for gate in gates]),
        "recurrent_kernel": _joined([_piece(gate.products[state]) for gate in gates]),
    }


def _biases(gates: Sequence[Affine]) -> dict[str, tuple[WeightPiece, ...]] | None:
    """Return the biases of the gates with any constant that is added to them.

    None if they are not one per gate. Without any bias the mapping is empty.
    """
    counts = {len(gate.vectors) for gate in gates}
    if counts == {0}:
        return {} if not any(gate.constant for gate in gates) else None
    if counts != {1}:
        return None
    return {"bias": _joined([_vector(gate.vectors[0], gate.constant) for gate in gates])}


# Steps outside of a loop: which tensors are states is not known there.


def steps_to(forms: Forms, form: TensorForm) -> Iterator[tuple[Match, tuple[Pair, ...]]]:
    """Yield each cell of which a form may be the first new state, with its states before and after the step."""
    for after in _cells_within(form):
        for c in _in_products(forms, after):
            for h in _sources(after):
                match = _lstm(forms, [(h, form), (c, after)], 0, 1)
                if match is not None:
                    yield match, ((h, form), (c, after))
    for h in _in_products(forms, form):
        if (match := _gru(forms, (h, form), 0)) is not None:
            yield match, ((h, form),)
    inner = form.atom[2] if form.atom is not None and form.atom[0] == "act" else form
    gate = affine_of(inner)
    for h in () if gate is None else gate.products:
        if (match := _simple(forms, (h, form), 0)) is not None:
            yield match, ((h, form),)


def _cells_within(form: TensorForm) -> list[TensorForm]:
    """Return candidates for c' in the LSTM output o * act(c'), with or without projection."""
    form, _ = _unclipped(form)
    if form.atom is not None and form.atom[0] == "matmul":
        form = form.atom[1]
    if len(form.terms) != 1:
        return []
    atoms = [atom for product in form.terms for atom in product]
    found = [atom[2] if atom[0] == "act" else atom[1] for atom in atoms if atom[0] in ("act", "sum")]
    return [cell for cell in found if len(_unclipped(cell)[0].terms) == 2]


def _in_products(forms: Forms, form: TensorForm) -> list[TensorForm]:
    """Return candidates for the state in a product of two factors, such as u * h or f * c."""
    inner, _ = _unclipped(form)
    atoms = {atom for product in inner.terms if len(product) == 2 for atom in product}
    return [atom[1] if atom[0] == "sum" else forms.single(atom) for atom in atoms]


def _sources(cell: TensorForm) -> list[TensorForm]:
    inner, _ = _unclipped(cell)
    atoms = {atom for product in inner.terms for atom in product}
    gates = [gate for gate in map(_activated, atoms) if gate is not None]
    return list({source: None for _, gate in gates for source in gate.products})


# One function for each kind of cell.


def _simple(forms: Forms, pair: Pair, index: int) -> Match | None:
    before, after = pair
    atom = after.atom
    found = _activated(atom) if atom is not None and atom[0] == "act" else None
    if found is None and (inner := affine_of(after)) is not None:
        found = "linear", inner
    if found is None or found[1].peepholes:
        return None
    name, gate = found
    source, biases = _two_sides([gate], before), _biases([gate])
    if source is None or biases is None:
        return None
    weights = _kernels([gate], source, before) | biases
    return Match(SimpleRNN, (index,), source, gate.width, {"activation": name}, weights)


def _gru(forms: Forms, pair: Pair, index: int) -> Match | None:
    """Match the new state u * h + n - u * n of a GRU; None if it has another form."""
    before, after = pair
    if len(after.terms) != 3:
        return None
    state = factor_of(before)
    kept = [p for p, c in after.terms.items() if c == 1.0 and len(p) == 2 and state in p]
    alone = [p for p, c in after.terms.items() if c == 1.0 and len(p) == 1]
    if len(kept) != 1 or len(alone) != 1:
        return None
    (update,), (candidate,) = [a for a in kept[0] if a != state], alone[0]
    if forms.multiply(forms.single(update), forms.single(candidate)).terms.keys() - after.terms.keys():
        return None
    u = _activated(update)
    if u is None or after.terms.get(tuple(sorted((update, candidate), key=forms.order))) != -1.0:
        return None
    name, inner = (candidate[1], candidate[2]) if candidate[0] == "act" else ("linear", candidate[-1])
    if candidate[0] not in ("act", "sum"):
        return None
    made = _reset_before(forms, u, inner, before) or _reset_after(forms, u, inner, before)
    if made is None:
        return None
    rest, weights, source, units = made
    options = {"activation": name, "recurrent_activation": u[0], **rest}
    return Match(GRU, (index,), source, units, options, weights)


_Made = tuple[dict[str, Any], dict[str, tuple[WeightPiece, ...]], TensorForm, int]


def _reset_before(forms: Forms, u: tuple[str, Affine], inner: TensorForm, before: TensorForm) -> _Made | None:
    """Match the GRU candidate W x + b + U (r * h), with the reset before the product; None if it has another form."""
    gate = affine_of(inner)
    if gate is None or gate.peepholes or len(gate.products) != 2:
        return None
    for gated in gate.products:
        reset = _reset_of(gated, before)
        if reset is None:
            continue
        r = _activated(reset)
        if r is None or r[0] != u[0]:
            return None
        source, biases = _two_sides([u[1], r[1]], before), _biases([u[1], r[1], gate])
        if source is None or biases is None or gate.products.keys() != {source, gated}:
            return None
        gates = [u[1], r[1], gate]
        recurrent = [u[1].products[before], r[1].products[before], gate.products[gated]]
        weights = {
            "kernel": _joined([_piece(g.products[source]) for g in gates]),
            "recurrent_kernel": _joined([_piece(block) for block in recurrent]),
        }
        return {"reset_after": False}, weights | biases, source, gate.width
    return None


def _reset_of(gated: TensorForm, before: TensorForm) -> Atom | None:
    """Return the reset gate r of a product r * h; None if the form is another."""
    if len(gated.terms) != 1:
        return None
    ((product, factor),) = gated.terms.items()
    if factor != 1.0 or len(product) != 2 or factor_of(before) not in product:
        return None
    return next((atom for atom in product if atom != factor_of(before)), None)


def _reset_after(forms: Forms, u: tuple[str, Affine], inner: TensorForm, before: TensorForm) -> _Made | None:
    """Match the GRU candidate W x + b + r * (U h + b'), with the reset after the product.

    None if it has another form.
    """
    gated = [p for p in inner.terms if len(p) == 2]
    if len(gated) != 1 or inner.terms[gated[0]] != 1.0:
        return None
    plain = affine_of(forms.make({p: c for p, c in inner.terms.items() if p != gated[0]}))
    for reset, side in (gated[0], gated[0][::-1]):
        if reset[0] != "act" or side[0] not in ("sum", "matmul"):
            continue
        r, recurrent = _activated(reset), affine_of(side[1] if side[0] == "sum" else forms.single(side))
        if r is None or recurrent is None or plain is None or r[0] != u[0]:
            return None
        source = _two_sides([u[1], r[1]], before)
        fits = plain.products.keys() == {source} and recurrent.products.keys() == {before}
        if source is None or not fits or plain.constant or recurrent.constant:
            return None
        biases = _both_biases([u[1], r[1]], plain, recurrent)
        if biases is None:
            return None
        kernels = [u[1].products[source], r[1].products[source], plain.products[source]]
        recurrents = [u[1].products[before], r[1].products[before], recurrent.products[before]]
        weights = {
            "kernel": _joined([_piece(block) for block in kernels]),
            "recurrent_kernel": _joined([_piece(block) for block in recurrents]),
        }
        return {"reset_after": True}, weights | biases, source, plain.width
    return None


def _both_biases(two: Sequence[Affine], plain: Affine, recurrent: Affine) -> dict[str, tuple[WeightPiece, ...]] | None:
    """Return the input and recurrent biases of a GRU.

    None if they do not match. The candidate's biases determine which variable is which.
    """
    if any(gate.constant for gate in two):
        return None
    if not plain.vectors and not recurrent.vectors:
        return {} if not any(gate.vectors for gate in two) else None
    if len(plain.vectors) != 1 or len(recurrent.vectors) != 1 or any(len(gate.vectors) != 2 for gate in two):
        return None
    found: dict[str, tuple[WeightPiece, ...]] = {}
    for key, own in (("bias", plain.vectors[0]), ("recurrent_bias", recurrent.vectors[0])):
        same = [[v for v in g.vectors if (v.variable, v.rows) == (own.variable, own.rows)] for g in two]
        if any(len(vectors) != 1 for vectors in same):
            return None
        found[key] = _joined([_vector(block) for block in (same[0][0], same[1][0], own)])
    return found


def _lstm(forms: Forms, pairs: Sequence[Pair], h: int, c: int) -> Match | None:
    """Match the LSTM states c' = f * c + i * g and o * act(c'), also clipped or projected.

    None if they have another form.
    """
    new_cell, cell_clip = _unclipped(pairs[c][1])
    made = _output(forms, pairs[h][1], pairs[c][1])
    if made is None or len(new_cell.terms) != 2:
        return None
    activation, output, projection, projection_clip = made
    for forget, i, g in _candidates(new_cell, pairs[c][0]):
        gates = [_activated(atom) for atom in (i, forget, g, output)]
        if any(gate is None for gate in gates):
            continue
        (ri, a_i), (rf, a_f), (act, a_g), (ro, a_o) = [gate for gate in gates if gate is not None]
        if not ri == rf == ro or act != activation:
            continue
        affines = [a_i, a_f, a_g, a_o]
        source = _two_sides(affines, pairs[h][0])
        peepholes = _peepholes(affines, pairs[c])
        biases = _biases(affines)
        if source is None or peepholes is None or biases is None:
            continue
        options: dict[str, Any] = {"activation": act, "recurrent_activation": ro}
        weights = _kernels(affines, source, pairs[h][0]) | biases | peepholes
        if projection is not None:
            weights["projection"] = (_piece(projection),)
        if not peepholes and cell_clip is None and projection_clip is None:
            return Match(LSTM, (h, c), source, a_i.width, options, weights)
        options |= {"cell_clip": cell_clip, "projection_clip": projection_clip}
        return Match(PeepholeLSTM, (h, c), source, a_i.width, options, weights)
    return None


def _unclipped(form: TensorForm) -> tuple[TensorForm, float | None]:
    atom = form.atom
    if atom is not None and atom[0] == "clip" and atom[1] is not None and atom[2] is not None and -atom[1] == atom[2]:
        return atom[3], atom[2]
    return form, None


def _candidates(new_cell: TensorForm, before: TensorForm) -> Iterator[tuple[Atom, Atom, Atom]]:
    """Yield (f, i, g) of the cell update f * c + i * g.

    Both orders of i and g are tried; the first one is in the order of their weight columns.
    """
    products = [p for p, factor in new_cell.terms.items() if factor == 1.0 and len(p) == 2]
    state = factor_of(before)
    kept = [p for p in products if state in p]
    if len(products) != 2 or len(kept) != 1:
        return
    forget = next((a for a in kept[0] if a != state), state)
    one, other = next(p for p in products if p is not kept[0])
    first, second = sorted((one, other), key=_place)
    yield forget, first, second
    yield forget, second, first


def _place(atom: Atom) -> int:
    found = _activated(atom)
    return min(block.columns[0] for block in found[1].products.values()) if found is not None else 0


def _output(
    forms: Forms, new_hidden: TensorForm, new_cell: TensorForm
) -> tuple[str, Atom, Block | None, float | None] | None:
    """Return activation, output gate, projection and clip of h' = clip(P (o * act(c'))); None for another form."""
    form, clip = _unclipped(new_hidden)
    projection = None
    if form.atom is not None and form.atom[0] == "matmul":
        _, form, projection = form.atom
    elif clip is not None:
        return None
    if len(form.terms) != 1:
        return None
    ((product, factor),) = form.terms.items()
    if factor != 1.0 or len(product) != 2:
        return None
    for squashed, output in (product, product[::-1]):
        if squashed[0] == "act" and squashed[2] is new_cell:
            return squashed[1], output, projection, clip
        if squashed == factor_of(new_cell):
            return "linear", output, projection, clip
    return None


def _peepholes(gates: Sequence[Affine], cell: Pair) -> dict[str, tuple[WeightPiece, ...]] | None:
    """Return the peephole weights of input, forget and output gate.

    None if there are others. The output gate's peephole reads the new cell state.
    """
    found: dict[str, tuple[WeightPiece, ...]] = {}
    for gate, name, state in zip(gates, ("input", "forget", "", "output"), (*cell[:1] * 3, cell[1]), strict=True):
        if gate.peepholes:
            seen = _alone(factor_of(state))
            if not name or list(gate.peepholes) != [seen]:
                return None
            found[f"peephole_{name}"] = (_vector(gate.peepholes[seen]),)
    return found
