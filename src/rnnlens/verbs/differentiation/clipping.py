"""Gradient clipping as the optimizer applies it, to whole variables of the framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...adapters.protocol import ModelFacts
from ...arguments import number
from ...errors import InputError, ModelError, did_you_mean, shown
from ...typing import Array
from ..names import Catalogue, TensorName
from ..weight_layout import WeightSource, sources

#: Keras' names for clipping every entry, the norm of every variable, and the norm of all variables together.
KINDS = ("clipvalue", "clipnorm", "global_clipnorm")

Gradients = Mapping[TensorName, Array]


def a_clipping(name: str, value: Any) -> str | dict[str, float]:
    """Check ``clip=``: ``"optimizer"``, or a dict of one kind of clipping and its threshold."""
    if isinstance(value, Mapping):
        unknown = [kind for kind in value if kind not in KINDS]
        if unknown or len(value) != 1:
            hint = did_you_mean(unknown[0] if unknown else "", KINDS)
            raise InputError(f"{name}= takes exactly one way to clip.", got=shown(value), hint=hint)
        return {kind: number(above=0)(f"{name}[{kind!r}]", threshold) for kind, threshold in value.items()}
    if not isinstance(value, str) or value != "optimizer":
        expected, hint = '"optimizer" or a dict', '{"global_clipnorm": 1.0}'
        raise InputError(f"{name}= is not a way to clip gradients.", got=shown(value), expected=expected, hint=hint)
    return value


def rule(clip: str | Mapping[str, float], facts: ModelFacts) -> tuple[str, float]:
    """Return kind and threshold of the clipping: the optimizer's, or the user's as ``{"global_clipnorm": 1.0}``."""
    if isinstance(clip, Mapping):
        ((kind, threshold),) = clip.items()
        return kind, threshold
    if facts.clipping is not None:
        return facts.clipping
    raise ModelError(
        "The optimizer of this model does not clip gradients.",
        got=facts.optimizer or "no optimizer",
        expected="a compiled Keras model whose optimizer has clipvalue, clipnorm or global_clipnorm",
        hint=(
            'state the clipping: clip={"global_clipnorm": 1.0}; torch clips in the training loop, not in its optimizers'
        ),
    )


def clipped(
    gradients: Gradients, known: Catalogue, kind: str, threshold: float
) -> tuple[dict[TensorName, Array], float]:
    """Clip the gradients of all trainable weights; also return the compared norm (the largest one per variable).

    ``gradients`` must contain every trainable weight, requested or not, as the global norm includes all.
    """
    if kind == "clipvalue":
        largest = max((float(np.abs(g).max()) for g in gradients.values() if g.size), default=0.0)
        return {name: np.clip(g, -threshold, threshold) for name, g in gradients.items()}, largest
    norms = {variable: np.sqrt(total) for variable, total in _squares(gradients, known).items()}
    if kind == "global_clipnorm":
        own = [n for (layer, key), n in norms.items() if key not in known.weights[layer].uncounted]
        norm = float(np.sqrt(sum(n**2 for n in own)))
        factor = threshold / max(norm, threshold)
        return {name: g * g.dtype.type(factor) for name, g in gradients.items()}, norm
    factors = {variable: threshold / max(norm, threshold) for variable, norm in norms.items()}
    result = {name: np.array(g) for name, g in gradients.items()}
    for name, index, variable in _pieces(result, known):
        result[name][index] *= result[name].dtype.type(factors[variable])
    return result, float(max(norms.values(), default=0.0))


def _squares(gradients: Gradients, known: Catalogue) -> dict[tuple[str, str], float]:
    """Return the sum of squares of the gradient by framework variable."""
    totals: dict[tuple[str, str], float] = {}
    for name, index, variable in _pieces(gradients, known):
        piece = np.asarray(gradients[name][index], dtype=np.float64)
        totals[variable] = totals.get(variable, 0.0) + float(np.sum(piece**2))
    return totals


def _pieces(gradients: Gradients, known: Catalogue) -> Iterator[tuple[TensorName, Any, tuple[str, str]]]:
    """Yield each gradient's name, index and framework variable; a variable has one direction, maybe both biases."""
    for name in gradients:
        found: list[WeightSource] = sources(known.weights[str(name.layer)])[name.key]
        for position, source in enumerate(found):
            yield name, position if len(found) > 1 else ..., (str(name.layer), source.key)
