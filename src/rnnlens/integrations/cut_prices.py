"""Result of ``cuts``: the calls that cut the gradient of a training, and the price of each and of all together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..autodiff.cuts import CutSite, UserCall
from ..typing import Array

#: Relative difference of two gradients above which a cut changes the gradient.
_CHANGED = 1e-9


@dataclass(frozen=True)
class Price:
    """The gradient that training uses, compared with one without cuts: cosine, and ratio of their norms."""

    cosine: float
    norm_ratio: float

    def __str__(self) -> str:
        return f"cosine {self.cosine:.3f}, norm {self.norm_ratio:.3g} times"


@dataclass(frozen=True)
class TrainingCut:
    """One call in the user's code that cuts the gradient, and the price of this cut alone.

    Where the framework does not tell the line, ``line`` is 0 and ``code`` names the layer or the operation. ``behind``:
    another cut ends the same gradient, so that without this one alone nothing changes.
    """

    operation: str
    file: str
    line: int
    code: str
    count: int
    price: Price
    behind: bool = False

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        place = f" in {self.file.rpartition('/')[2]}, line {self.line}" if self.line else ""
        code = f": {self.code}" if self.code else ""  # nothing to show of what was typed at a prompt
        return f"{self.operation}{place}, {times}{code}\n" + (
            "    ends what another cut ends too"
            if self.behind
            else f"    the gradient in use against that without this cut: {self.price}"
        )


@dataclass(frozen=True)
class TrainingCuts:
    """Cuts of the gradient in one training step; ``print`` shows them.

    Attributes
    ----------
    cuts
        Calls that change the gradient of the weights, in the order of execution.
    price
        The gradient in use against that of full backpropagation, over all weights.
    by_weight
        The same for each weight.
    by_window
        The same by window: with every k-th execution of the cuts left in place. Window 1 is the step as it is.
    losses
        Number of backward passes in the step; of Keras, of batches.
    left_out
        Steps of the input by which the losses have no gradient, with or without the cuts: a slice, a mask, padding.
    cut_off
        Steps of the input by which the losses have a gradient only without the cuts. Both count over all batches, and
        are known for Keras models of float inputs.
    """

    cuts: list[TrainingCut]
    price: Price
    by_weight: Mapping[str, Price]
    by_window: Mapping[int, Price]
    losses: int
    left_out: Sequence[int] = ()
    cut_off: Sequence[int] = ()

    def __str__(self) -> str:
        left_out = (
            [f"Input steps without a gradient, also without cuts: {_listing(self.left_out)}"] if self.left_out else []
        )
        if not self.cuts:
            passes = "1 backward pass" if self.losses == 1 else f"{self.losses} backward passes"
            no_cut = f"No cut: the gradient of {passes} is that of full backpropagation."
            return "\n".join([no_cut, *left_out])
        lines = [str(cut) for cut in self.cuts]
        lines.append(f"All cuts together: the gradient in use against full backpropagation: {self.price}")
        lines += [f"    window {k}: {price}" for k, price in self.by_window.items()]
        if self.cut_off:
            lines.append(f"Input steps with a gradient only without the cuts: {_listing(self.cut_off)}")
        return "\n".join([*lines, *left_out])


class StepGradients(NamedTuple):
    """Gradients of one run of a training: by weight, the sites that cut, the number of losses, and by the inputs."""

    by_weight: Mapping[str, Array]
    sites: Sequence[CutSite]
    losses: int
    by_input: Sequence[Array] = ()


def compare_cuts(
    run: Callable[[Sequence[CutSite], int | None], StepGradients], used: StepGradients, keep: str | Sequence[str] = ()
) -> TrainingCuts:
    """Compare the gradient in use with those of ``run(bypassed sites, every)``: without each cut, and without all.

    Cuts in lines that contain a text of ``keep`` stay in place.
    """
    sites, full = _run_without_cuts(run, used, [keep] if isinstance(keep, str) else keep)
    left_out, cut_off = _steps_without_gradient(full.by_input), _steps_without_gradient(used.by_input)
    cut_off = [step for step in cut_off if step not in left_out]
    found = _cuts_that_matter(run, used, sites, full) if _differs(used.by_weight, full.by_weight) else []
    if not found:
        return TrainingCuts([], Price(1.0, 1.0), {}, {}, used.losses, left_out)
    windows, longest = {1: _price(used.by_weight, full.by_weight)}, max(cut.count for cut in found)
    window = 2
    while window < longest:
        windows[window] = _price(run(sites, window).by_weight, full.by_weight)
        window *= 2
    by_weight = {name: _price({name: grad}, {name: full.by_weight[name]}) for name, grad in used.by_weight.items()}
    return TrainingCuts(found, windows[1], by_weight, windows, used.losses, left_out, cut_off)


def _run_without_cuts(
    run: Callable[[Sequence[CutSite], int | None], StepGradients], used: StepGradients, keep: Sequence[str]
) -> tuple[list[CutSite], StepGradients]:
    """Pass over all cuts, also those that only a gradient which an earlier one has let through reaches."""
    gradients = used
    sites: dict[UserCall, CutSite] = {}
    while True:
        allowed = (site for site in gradients.sites if not any(text in site.code for text in keep))
        new_sites = {site.call: site for site in allowed if site.call not in sites}
        if not new_sites:
            return list(sites.values()), gradients
        sites.update(new_sites)
        gradients = run(list(sites.values()), None)


def _cuts_that_matter(
    run: Callable[[Sequence[CutSite], int | None], StepGradients],
    used: StepGradients,
    sites: Sequence[CutSite],
    full: StepGradients,
) -> list[TrainingCut]:
    """Return the cuts without which the gradient changes, and those that would change it if they were the only ones."""
    found = []
    for site in sites:
        without = run([site], None).by_weight
        is_alone = _differs(used.by_weight, without)
        others = [other for other in sites if other is not site]
        if is_alone or _differs(run(others, None).by_weight, full.by_weight):
            price = _price(used.by_weight, without) if is_alone else Price(1.0, 1.0)
            found.append(TrainingCut(site.operation, *site.call[:2], site.code, site.count, price, behind=not is_alone))
    return found


def _steps_without_gradient(by_input: Sequence[Array]) -> list[int]:
    """Return the steps of consecutive inputs (sample, time, ...) at which their gradient is 0 in every sample."""
    has_gradient = [np.moveaxis(grad, 1, 0).reshape(grad.shape[1], -1).any(axis=1) for grad in by_input]
    return np.flatnonzero(~np.concatenate(has_gradient)).tolist() if has_gradient else []


def _listing(steps: Sequence[int]) -> str:
    """Return steps as ranges: ``0-3, 7``."""
    starts = [i for i in range(len(steps)) if i == 0 or steps[i] != steps[i - 1] + 1]
    runs = [(steps[a], steps[b - 1]) for a, b in zip(starts, [*starts[1:], len(steps)], strict=True)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _flat(gradients: Mapping[str, Array]) -> Array:
    return np.concatenate([np.asarray(gradient, dtype=np.float64).reshape(-1) for gradient in gradients.values()])


def _differs(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    a, b = _flat(first), _flat(second)
    return bool(np.linalg.norm(a - b) > _CHANGED * max(np.linalg.norm(a), np.linalg.norm(b)))


def _price(used: Mapping[str, Array], full: Mapping[str, Array]) -> Price:
    a, b = _flat(used), _flat(full)
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    cosine = float(a @ b) / (norms[0] * norms[1]) if norms[0] and norms[1] else float("nan")
    return Price(cosine, norms[0] / norms[1] if norms[1] else float("nan"))
