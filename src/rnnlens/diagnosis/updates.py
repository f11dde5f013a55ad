"""Size of one step of the user's optimizer by that of the weights: far too small to learn, or far too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..measures.updates import LARGEST_UPDATE, SMALLEST_UPDATE, USUAL_UPDATE, initial_norm, update_norm, update_ratio
from ..results.diagnosis import Finding
from ..typing import Array
from .experiment import Experiment

MODEL = "model"


def update_findings(experiment: Experiment, gradients: Mapping[str, Array | None] | None) -> list[Finding] | None:
    """Step a copy of the optimizer by the gradients of the loss, and compare the weights before and after.

    Weights whose gradient is missing or 0 have a finding of their own and do not count. None without an optimizer.
    """
    if gradients is None:
        return None
    try:
        changes = experiment.adapter.facts(experiment.model).optimizer_step(experiment.optimizer, gradients)
    except UnsupportedError:
        if experiment.optimizer is not None:
            raise
        return None
    if changes is None:
        return None
    with_gradient = {name: change for name, change in changes.items() if _is_nonzero(gradients.get(name))}
    left_out = [name for name, change in with_gradient.items() if change.after is None]
    if left_out:
        return [_left_out(left_out, len(with_gradient))]
    matrices = {
        name: change for name, change in with_gradient.items() if change.before.ndim > 1 and np.any(change.before)
    }
    by_norm = {name: update_ratio(change.before, change.after) for name, change in matrices.items()}
    if not by_norm or not np.isfinite(list(by_norm.values())).all():
        return None
    by_initial_norm = {
        name: update_norm(change.before, change.after) / initial_norm(change.before.shape)
        for name, change in matrices.items()
    }
    ratio, initial_ratio = float(np.median(list(by_norm.values()))), float(np.median(list(by_initial_norm.values())))
    evidence = {"ratio": ratio, "ratio_by_initial_norm": initial_ratio, "by_weight": by_norm}
    if ratio < SMALLEST_UPDATE:
        return [_too_small(ratio, evidence)]
    return [_too_large(initial_ratio, evidence)] if initial_ratio > LARGEST_UPDATE else []


def _too_small(ratio: float, evidence: dict[str, Any]) -> Finding:
    count = len(evidence["by_weight"])
    steps = f", so about {1 / ratio:.0e} such steps in one direction change it by its own size" if ratio else ""
    factor = f"about {USUAL_UPDATE / ratio:.0e} times as large" if ratio else "above 0 (check its schedule)"
    return Finding(
        "UPDATES_TOO_SMALL",
        "fault",
        MODEL,
        f"One step of the optimizer changes a weight matrix by {ratio:.1e} of its norm (median of {count}){steps}.",
        evidence,
        f"median update ratio of the weight matrices < {SMALLEST_UPDATE:g}, and no skill",
        f"a learning rate {factor}.",
    )


def _too_large(ratio: float, evidence: dict[str, Any]) -> Finding:
    count = len(evidence["by_weight"])
    return Finding(
        "UPDATES_TOO_LARGE",
        "fault",
        MODEL,
        f"One step of the optimizer changes a weight matrix by {ratio:.2g} times the norm that such a matrix has at "
        f"initialisation (median of {count}): a step overwrites what the steps before have learned.",
        evidence,
        f"median change of the weight matrices by one step > {LARGEST_UPDATE:g} of their initial norm, and no skill",
        f"a learning rate about {ratio / USUAL_UPDATE:.0e} times smaller.",
    )


def _is_nonzero(gradient: Array | None) -> bool:
    return gradient is not None and bool(np.any(gradient))


def _left_out(names: list[str], count: int) -> Finding:
    listing = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return Finding(
        "UPDATES_TOO_SMALL",
        "fault",
        MODEL,
        f"The optimizer has not got {len(names)} of {count} weights that have a gradient, and so never changes them: "
        f"{listing}.",
        {"ratio": 0.0, "left_out": names},
        "weights with a gradient that the optimizer does not have, and no skill",
        "make the optimizer from model.parameters() after the model is complete.",
    )
