"""Tensors as sums of products: two graphs that compute the same with different operations get the same form.

``u * h + (1 - u) * n``, written with any operation, order of arguments or split of a product, is the form
``h u + n - n u`` over *atoms*: states, inputs, matrix products, activations of forms, blocks of variables. A cell is
recognised by comparing forms (:mod:`.cells`), so names of operations do not matter.

Forms are interned: equal forms are one object, so that they are compared by identity. This module is their algebra;
:mod:`.graph_forms` makes them from the operations of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Factor of the products of a form. The first entry is its kind; see :class:`FormAlgebra`.
Atom = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TensorForm:
    """A sum of products of atoms: ``terms`` maps each product, a sorted tuple of atoms, to its factor."""

    terms: Mapping[tuple[Atom, ...], float]
    number: int

    def __repr__(self) -> str:
        return f"<{self.number}: {' + '.join(f'{c:g} {list(t)}' for t, c in self.terms.items())}>"

    @property
    def atom(self) -> Atom | None:
        """The atom that the form consists of; None for any other form."""
        if len(self.terms) == 1:
            ((product, factor),) = self.terms.items()
            if factor == 1.0 and len(product) == 1:
                return product[0]
        return None

    @property
    def constant(self) -> float | None:
        """Number that a form without atoms equals; None for any other form."""
        if not self.terms:
            return 0.0
        return self.terms.get(()) if len(self.terms) == 1 else None


@dataclass(frozen=True)
class Columns:
    """Concatenation of forms along the last axis, each with its width."""

    parts: tuple[tuple[TensorForm, int], ...]


Value = TensorForm | Columns


class FormAlgebra:
    """Sums, products, activations and columns of forms.

    Atoms are ``("leaf", name, start, stop)``, columns of a tensor that is not expanded; ``("matmul", form, block)``;
    ``("block", block)``, a vector of a variable; ``("act", name, form)``; ``("clip", low, high, form)``;
    ``("where", condition, form, form)``; ``("sum", form)``, a sum that is a factor of a product.
    """

    def __init__(self) -> None:
        self._interned: dict[frozenset[tuple[tuple[Atom, ...], float]], TensorForm] = {}
        self._leaves_of: dict[TensorForm, frozenset[Any]] = {}

    def make(self, terms: Mapping[tuple[Atom, ...], float]) -> TensorForm:
        """Return the one form object with the given terms."""
        kept = {product: factor for product, factor in terms.items() if factor != 0.0}
        key = frozenset(kept.items())
        if key not in self._interned:
            self._interned[key] = TensorForm(kept, len(self._interned))
        return self._interned[key]

    def leaf(self, name: Any, start: int | None = None, stop: int | None = None) -> TensorForm:
        """Return the form of some columns of a tensor that is not expanded further."""
        return self.single(("leaf", name, start, stop))

    def alone(self, value: Value) -> TensorForm:
        """Return a form as it is; a concatenation becomes a single leaf."""
        return value if isinstance(value, TensorForm) else self.leaf(("columns", value.parts))

    def single(self, atom: Atom) -> TensorForm:
        """Return the form that consists of one atom."""
        return self.make({(atom,): 1.0})

    def scalar(self, value: float) -> TensorForm:
        """Return the form of a number."""
        return self.make({(): value})

    def add(self, a: TensorForm, b: TensorForm, sign: float = 1.0) -> TensorForm:
        """Return the form ``a + sign * b``."""
        terms = dict(a.terms)
        for product, factor in b.terms.items():
            terms[product] = terms.get(product, 0.0) + sign * factor
        return self.make(terms)

    def multiply(self, a: TensorForm, b: TensorForm) -> TensorForm:
        """Return the product of two forms.

        A sum of a number and one gate, such as 1 - u, is multiplied out; other sums stay one factor.
        """
        if a.constant == 1.0 or b.constant == 1.0:
            return b if a.constant == 1.0 else a
        return self._times(self._factor(a), self._factor(b))

    def activated(self, name: str, form: TensorForm) -> TensorForm:
        """Return the form of an activation applied to a form."""
        return self.single(("act", name, form))

    def clipped(self, low: float | None, high: float | None, form: TensorForm) -> TensorForm:
        """Return a form clipped to bounds.

        Two one-sided bounds become one clip; 0.2 z + 0.5 clipped to [0, 1] becomes a hard sigmoid.
        """
        atom = form.atom
        if atom is not None and atom[0] == "clip" and (atom[1] is None) != (low is None):
            low, high = (atom[1] if low is None else low), (atom[2] if high is None else high)
            form = atom[3]
        if (low, high) == (0.0, 1.0):
            for slope, name in ((0.2, "hard_sigmoid_keras2"), (1 / 6, "hard_sigmoid")):
                if abs(form.terms.get((), 0.0) - 0.5) < 1e-9:
                    inner = self.add(form, self.scalar(form.terms[()]), -1.0)
                    scaled = self.scaled(inner, 1 / slope)
                    if scaled is not None:
                        return self.activated(name, scaled)
        return self.single(("clip", low, high, form))

    def scaled(self, form: TensorForm, factor: float) -> TensorForm | None:
        """Return a form times a number if the result is one sum, or has only whole factors; None otherwise."""
        found = {product: c * factor for product, c in form.terms.items()}
        if len(found) == 1:
            ((product, c),) = found.items()
            if len(product) == 1 and product[0][0] == "sum" and abs(c - 1) < 1e-6:
                inner: TensorForm = product[0][1]
                return inner
        whole = {product: float(round(c)) for product, c in found.items() if abs(c - round(c)) < 1e-6}
        return self.make(whole) if len(whole) == len(found) else None

    def _factor(self, form: TensorForm) -> TensorForm:
        plain = len(form.terms) <= 1 or (len(form.terms) == 2 and () in form.terms and self._is_gate(form))
        return form if plain else self.single(("sum", form))

    @staticmethod
    def _is_gate(form: TensorForm) -> bool:
        return all(len(product) <= 1 and all(a[0] in ("act", "leaf") for a in product) for product in form.terms)

    def _times(self, a: TensorForm, b: TensorForm) -> TensorForm:
        terms: dict[tuple[Atom, ...], float] = {}
        for p, x in a.terms.items():
            for q, y in b.terms.items():
                product = tuple(sorted((*p, *q), key=self.order))
                terms[product] = terms.get(product, 0.0) + x * y
        return self.make(terms)

    def order(self, atom: Atom) -> int:
        """Return the sort key of an atom within a product."""
        return self.single(atom).number

    def mentioned(self, value: Value) -> frozenset[Any]:
        """Return the names of all leaves inside a value, at any depth."""
        parts = [value] if isinstance(value, TensorForm) else [form for form, _ in value.parts]
        return frozenset().union(*(self._mentioned(form) for form in parts))

    def _mentioned(self, form: TensorForm) -> frozenset[Any]:
        if form not in self._leaves_of:
            found: set[Any] = set()
            for atom in {atom for product in form.terms for atom in product}:
                if atom[0] == "leaf":
                    found |= {atom[1]} if atom[1][0] != "columns" else self.mentioned(Columns(atom[1][1]))
                for part in atom[1:]:
                    if isinstance(part, TensorForm):
                        found |= self._mentioned(part)
            self._leaves_of[form] = frozenset(found)
        return self._leaves_of[form]

    def columns(self, value: Value, start: int, stop: int) -> Value:
        """Return the columns ``start:stop`` of a value."""
        if isinstance(value, TensorForm):
            return self._restricted(value, start, stop)
        parts: list[tuple[TensorForm, int]] = []
        at = 0
        for form, width in value.parts:
            low, high = max(start, at), min(stop, at + width)
            if low < high:
                whole = (low, high) == (at, at + width)
                parts.append((form if whole else self._restricted(form, low - at, high - at), high - low))
            at += width
        return parts[0][0] if len(parts) == 1 else Columns(tuple(parts))

    def _restricted(self, form: TensorForm, start: int, stop: int) -> TensorForm:
        terms: dict[tuple[Atom, ...], float] = {}
        for product, factor in form.terms.items():
            cut = tuple(sorted((self._cut(atom, start, stop) for atom in product), key=self.order))
            terms[cut] = terms.get(cut, 0.0) + factor
        return self.make(terms)

    def _cut(self, atom: Atom, start: int, stop: int) -> Atom:
        kind = atom[0]
        if kind == "leaf":
            begin = atom[2] or 0
            return (*atom[:2], begin + start, begin + stop)
        if kind == "matmul":
            return (*atom[:2], atom[2].columns_of(start, stop))
        if kind == "block":
            return ("block", atom[1].columns_of(start, stop))
        if kind == "where":
            return (*atom[:2], *(self._restricted(form, start, stop) for form in atom[2:]))
        return (*atom[:-1], self._restricted(atom[-1], start, stop))

    def aligned(self, *values: Value) -> list[tuple[tuple[TensorForm, ...], int | None]]:
        """Cut all values at the same columns; return the pieces with their widths.

        If no value is a concatenation, there is one piece of width None.
        """
        joined = next((v for v in values if isinstance(v, Columns)), None)
        if joined is None:
            return [(tuple(v for v in values if isinstance(v, TensorForm)), None)]
        edges = sorted({edge for v in values if isinstance(v, Columns) for edge in _edges(v)})
        pieces: list[tuple[tuple[TensorForm, ...], int | None]] = []
        for start, stop in zip([0, *edges], edges, strict=False):
            cut = tuple(self.columns(v, start, stop) for v in values)
            pieces.append((tuple(c for c in cut if isinstance(c, TensorForm)), stop - start))
        return pieces

    def elementwise(self, function: Callable[..., TensorForm], *values: Value) -> Value:
        """Apply a function of forms to values, piece by piece of their columns."""
        made = [(function(*forms), width) for forms, width in self.aligned(*values)]
        return made[0][0] if made[0][1] is None else Columns(tuple((f, w or 0) for f, w in made))


def _edges(value: Columns) -> list[int]:
    return [int(edge) for edge in np.cumsum([width for _, width in value.parts])]
