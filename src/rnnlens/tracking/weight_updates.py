"""Change of the weights by one step of training, as scalars of a record: the update ratio."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..adapters.registry import adapter_for
from ..measures.updates import initial_norm, update_norm, update_ratio
from ..typing import Array
from .watch_arguments import Schedule


def is_due_at(schedule: Schedule, step: int, epoch: int) -> bool:
    """Return whether a record is known to be due after a step that is yet to come: a function is not asked twice."""
    return not callable(schedule.every) and schedule.is_due(step, epoch)


def update_scalars(
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    gradient_norms: Mapping[str, float] | None = None,
    left_out: Collection[str] = (),
) -> dict[str, float]:
    """Return the change of each weight by one step as scalars, from the weights before and after it.

    ``update_ratio/<weight>``: norm of the change by the norm of the weight; NaN for a weight of zeros that changed.
    ``update_ratio``: the median over the matrices that have a gradient, or, where ``gradient_norms`` are not known,
    that changed; over all matrices if none did; never over weights that are ``left_out`` of the optimizer.
    ``update_by_initial_norm``: the same median with the norm that such a
    matrix has at initialisation. ``update_gradient/<weight>``: norm of the gradient that the optimizer got.
    """
    ratios, by_initial_norm = {}, {}
    for name, value in before.items():
        change = update_norm(value, after[name])
        ratios[name] = update_ratio(value, after[name]) if change else 0.0
        if value.ndim > 1 and np.any(value) and name not in left_out:
            by_initial_norm[name] = change / initial_norm(value.shape)
    counted = [name for name in by_initial_norm if (ratios if gradient_norms is None else gradient_norms).get(name)]
    if counted := counted or [*by_initial_norm]:
        medians = {
            "update_ratio": float(np.median([ratios[name] for name in counted])),
            "update_by_initial_norm": float(np.median([by_initial_norm[name] for name in counted])),
        }
    else:
        medians = {}
    gradients = {f"update_gradient/{name}": norm for name, norm in (gradient_norms or {}).items()}
    return {**medians, **{f"update_ratio/{name}": ratio for name, ratio in ratios.items()}, **gradients}


def trained_shares(model: Any, layers: Sequence[str]) -> dict[str, float]:
    """Return the share of trained weights of each layer that has frozen ones: ``"lstm/trained"``, 0 if all are."""
    weights = adapter_for(model).weights(model)
    names = [name for name in dict.fromkeys(layer.partition("#")[0] for layer in layers) if name in weights]
    return {
        f"{name}/trained": float(np.mean([*weights[name].trainable.values()]))
        for name in names
        if not all(weights[name].trainable.values())
    }
