"""Findings on a recorded training: updates that are far too small or large, frozen layers, weights without gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from ..measures.updates import LARGEST_UPDATE, SMALLEST_UPDATE, USUAL_UPDATE
from ..typing import Array
from .diagnosis import Finding

MODEL = "model"
RATIO, BY_INITIAL_NORM, GRADIENT, TRAINED = "update_ratio", "update_by_initial_norm", "update_gradient", "/trained"
#: Fewest recorded steps whose change of the weights is known, from which on anything is said of them.
FEWEST = 3
#: Share of its first value by which the loss must have become smaller to have fallen.
FALL = 0.02
#: Largest number of weights that a sentence names.
_NAMED = 6


def run_findings(scalars: xr.Dataset, layers: Sequence[str], *, of: str) -> list[Finding]:
    """Return the findings on the records of a training, from their scalars and the names of the recorded layers.

    ``of``: kind of the records; those of a probe always have a loss, so that one that is NaN is not finite.
    """
    findings = [*_frozen(scalars)]
    steps = _measured_steps(scalars, of)
    if steps is not None and steps.has_diverged:
        findings += _sizes(steps)
    elif steps is not None and steps.records >= FEWEST:
        sizes = [*_sizes(steps)]
        findings += [*sizes, *_without_gradient(steps, layers)]
        findings += [] if sizes else _left_out(steps)
    order = {"fault": 0, "caution": 1}
    return sorted(findings, key=lambda finding: order[finding.severity])


class _MeasuredSteps(NamedTuple):
    """The records that have the change of the weights by their step.

    ``records``: their number. ``ratios``, ``gradients``: by weight, one number per record; gradients only where the
    watch could read them. ``medians``: of the matrices by the kind of their scale. ``losses``: finite losses of all
    records, None without any. ``has_diverged``: whether the loss was not finite at a record.
    """

    records: int
    ratios: dict[str, Array]
    gradients: dict[str, Array]
    medians: dict[str, Array]
    losses: Array | None
    has_diverged: bool

    @property
    def unchanged(self) -> list[str]:
        """Names of the weights that no recorded step changed."""
        return [name for name, ratios in self.ratios.items() if (ratios == 0).all()]


def _measured_steps(scalars: xr.Dataset, of: str) -> _MeasuredSteps | None:
    names = list(map(str, scalars.data_vars))
    ratio_names = [name for name in names if name.startswith(f"{RATIO}/")]
    if not ratio_names:
        return None
    is_measured = np.any([np.isfinite(scalars[name].values) for name in ratio_names], axis=0)

    def by_weight(kind: str) -> dict[str, Array]:
        chosen = [name for name in names if name.startswith(f"{kind}/")]
        return {name.removeprefix(f"{kind}/"): np.asarray(scalars[name].values)[is_measured] for name in chosen}

    medians = {
        name: np.asarray(scalars[name].values)[is_measured] for name in (RATIO, BY_INITIAL_NORM) if name in scalars
    }
    losses = np.asarray(scalars["loss"].values, dtype=np.float64) if "loss" in scalars else np.empty(0)
    has_diverged = bool(np.isinf(losses).any() or (of == "probe" and np.isnan(losses).any()))
    losses = losses[np.isfinite(losses)]
    return _MeasuredSteps(
        int(is_measured.sum()),
        by_weight(RATIO),
        by_weight(GRADIENT),
        medians,
        losses if losses.size else None,
        has_diverged,
    )


def _sizes(steps: _MeasuredSteps) -> Iterator[Finding]:
    """Find updates that are far too small, or far too large, in a training whose loss has not fallen."""
    finite = {kind: values[np.isfinite(values)] for kind, values in steps.medians.items()}
    counts = [finite.get(kind, np.empty(0)).size for kind in (RATIO, BY_INITIAL_NORM)]
    if min(counts) < (1 if steps.has_diverged else FEWEST):
        return
    loss_text, has_fallen = _loss(steps)
    if has_fallen:
        return
    largest, usual = float(finite[RATIO].max()), float(np.median(finite[BY_INITIAL_NORM]))
    by_weight = {name: _finite_median(ratios) for name, ratios in steps.ratios.items()}
    evidence = {"ratio": largest, "ratio_by_initial_norm": usual, "records": steps.records, "by_weight": by_weight}
    if largest < SMALLEST_UPDATE and not steps.has_diverged:
        most = f"by more than {largest:.1e} of its norm" if largest else "at all"
        factor = f"about {USUAL_UPDATE / largest:.0e} times as large" if largest else "above 0 (check its schedule)"
        yield Finding(
            "UPDATES_TOO_SMALL",
            "fault",
            MODEL,
            f"In none of {steps.records} recorded steps did the optimizer change a weight matrix {most} (median over "
            f"the matrices){loss_text}.",
            evidence,
            f"median update ratio of the weight matrices < {SMALLEST_UPDATE:g} at every recorded step, and a loss "
            f"that has not fallen by {100 * FALL:g} %",
            f"a learning rate {factor}.",
        )
    elif usual > LARGEST_UPDATE:
        yield Finding(
            "UPDATES_TOO_LARGE",
            "fault",
            MODEL,
            f"One step of the optimizer changes a weight matrix by {usual:.2g} times the norm that such a matrix has "
            f"at initialisation (median over the matrices and over {counts[1]} recorded "
            f"{'step' if counts[1] == 1 else 'steps'}){loss_text}.",
            evidence,
            f"median change of the weight matrices by one step > {LARGEST_UPDATE:g} of their initial norm, and a "
            f"loss that has not fallen by {100 * FALL:g} %",
            f"a learning rate about {finite[BY_INITIAL_NORM][0] / USUAL_UPDATE:.0e} times smaller.",
        )


def _loss(steps: _MeasuredSteps) -> tuple[str, bool]:
    """Return text on the loss at the start and at the end of the records, and whether it has fallen.

    At the start: that of the first record or the median of the first quarter, whichever is smaller. At the end: the
    median of the last quarter. A difference within twice its standard error is no fall.
    """
    losses = steps.losses
    if steps.has_diverged:
        return "; the loss became infinite or NaN", False
    if losses is None or losses.size < 2:
        return "; the loss was not recorded", False
    quarter = max(1, len(losses) // 4)
    start, end = float(min(losses[0], np.median(losses[:quarter]))), float(np.median(losses[-quarter:]))
    spread = np.hypot(losses[:quarter].std(), losses[-quarter:].std()) / np.sqrt(quarter)
    text = f"; the loss has not fallen: {start:.4g} at the start of the records, {end:.4g} at their end"
    return text, bool(end < start - max(FALL * abs(start), 2 * spread))


def _without_gradient(steps: _MeasuredSteps, layers: Sequence[str]) -> Iterator[Finding]:
    """Find trained weights whose gradient was 0 at every step; where it is not known, those that did not change."""
    without = [name for name, norms in steps.gradients.items() if _is_zero_throughout(norms)]
    # A change below the precision of a weight leaves it as it is, too.
    is_large_enough = np.nanmax(steps.medians.get(RATIO, np.zeros(1))) >= SMALLEST_UPDATE
    unknown = [name for name in steps.unchanged if name not in steps.gradients and is_large_enough]
    if without:
        sentence = (
            f"{len(without)} of {len(steps.ratios)} trained weights had no gradient, or one that is 0 in every entry, "
            f"at all {steps.records} recorded steps: {_listing(without)}."
        )
        rule = "the gradient that the optimizer got is None or 0 in every entry at every recorded step"
    elif unknown and len(unknown) < len(steps.ratios):
        without = unknown
        sentence = (
            f"{len(without)} of {len(steps.ratios)} trained weights did not change at all in {steps.records} recorded "
            f"steps, and the others did: {_listing(without)}."
        )
        rule = "the weight is the same before and after every recorded step"
    else:
        return
    yield Finding(
        "WEIGHTS_WITHOUT_GRADIENT",
        "fault" if any(_is_of_layer(name, layers) for name in without) else "caution",
        MODEL,
        sentence,
        {"weights": without, "count": len(steps.ratios), "records": steps.records},
        rule,
        "rl.gradients(model, x, y, loss=...).disconnected gives the reasons: a layer that is not called, detach, "
        "no_grad, saturated or dead units.",
    )


def _left_out(steps: _MeasuredSteps) -> Iterator[Finding]:
    """Find weights that have a gradient and do not change."""
    left_out = [name for name in steps.unchanged if np.nan_to_num(steps.gradients.get(name, np.zeros(1))).any()]
    if left_out and len(left_out) < len(steps.ratios):
        yield Finding(
            "UPDATES_TOO_SMALL",
            "fault",
            MODEL,
            f"{len(left_out)} of {len(steps.ratios)} trained weights have a gradient and did not change at all in "
            f"{steps.records} recorded steps: {_listing(left_out)}.",
            {"ratio": 0.0, "left_out": left_out, "records": steps.records},
            "the weight is the same before and after every recorded step, although its gradient is not 0",
            "make the optimizer from model.parameters() after the model is complete, with no learning rate of 0.",
        )


def _frozen(scalars: xr.Dataset) -> Iterator[Finding]:
    """Find recorded layers none of whose weights is trained at any record."""
    shares = {str(name).removesuffix(TRAINED): scalars[name].values for name in scalars if str(name).endswith(TRAINED)}
    frozen = [layer for layer, share in shares.items() if share.size and (share == 0).all()]
    if frozen:
        count = len(shares[frozen[0]])
        yield Finding(
            "FROZEN",
            "caution",
            frozen[0],
            f"No weight of {_listing(frozen)} was trained at any of {count} records (requires_grad or trainable is "
            "False).",
            {"layers": frozen, "records": count},
            "all weights of a recurrent layer are excluded from training at every record",
            "for p in layer.parameters(): p.requires_grad_(True), or layer.trainable = True and compile again.",
        )


def _is_zero_throughout(values: Array) -> bool:
    """Return whether all values that were recorded are 0, and there are any."""
    recorded = values[~np.isnan(values)]
    return bool(recorded.size) and not recorded.any()


def _finite_median(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _is_of_layer(weight: str, layers: Sequence[str]) -> bool:
    """Return whether a weight, by the framework's name, belongs to one of the layers."""
    path = weight.replace("/", ".")
    roots = {layer.partition("#")[0].partition("[")[0].replace("/", ".") for layer in layers}
    return any(path == root or path.startswith(f"{root}.") for root in roots)
