"""``rl.torch.cuts``: where a training step cuts the gradient, and what that gradient is without the cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..adapters.torch.restore import borrowed_model
from ..arguments import anything, checked
from ..autodiff.torch_bypass import CutSite, StepRun, run_step
from ..errors import InputError

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
    """One call in the user's code that cuts the gradient, and the price of this cut alone."""

    operation: str
    file: str
    line: int
    code: str
    count: int
    price: Price

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        code = f": {self.code}" if self.code else ""  # nothing to show of what was typed at a prompt
        return (
            f"{self.operation} in {self.file.rpartition('/')[2]}, line {self.line}, {times}{code}\n"
            f"    the gradient in use against that without this cut: {self.price}"
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
        Number of backward passes in the step.
    """

    cuts: list[TrainingCut]
    price: Price
    by_weight: Mapping[str, Price]
    by_window: Mapping[int, Price]
    losses: int

    def __str__(self) -> str:
        if not self.cuts:
            return f"No cut: the gradient of {self.losses} backward passes is that of full backpropagation."
        lines = [str(cut) for cut in self.cuts]
        lines.append(f"All cuts together: the gradient in use against full backpropagation: {self.price}")
        lines += [f"    window {k}: {price}" for k, price in self.by_window.items()]
        return "\n".join(lines)


@checked(step=anything, model=anything)
def cuts(step: Callable[[], Any], model: nn.Module) -> TrainingCuts:
    """Find where a training step cuts the gradient, and compare its gradient with that without the cuts.

    The step is run several times at the weights as they are: once as it is, then with one of its cuts passed over, with
    all of them, and with every 2nd, 4th, ... execution left in place. ``loss.backward()`` only records the loss, so
    that the optimizer finds no gradient and changes nothing. Gradients are those of the sum of all losses of the step.

    Parameters
    ----------
    step
        Function without arguments that runs one training step, with all its windows: forward passes,
        ``loss.backward()``, and the optimizer. It must be repeatable: states that it stores outside of ``model`` are
        not restored. Losses under a ``GradScaler`` and ``torch.autograd.grad`` are not supported.
    model
        The module whose weights are trained. Its weights, buffers, flags, gradients and all random generators are
        restored.

    Returns
    -------
    TrainingCuts
        Only cuts that change the gradient: a loss that is detached for a log is none. Operations inside compiled code
        are not observed.

    Raises
    ------
    InputError
        If the step calls no ``loss.backward()``.

    References
    ----------
    Truncated backpropagation through time: Williams, Peng 1990, doi:10.1162/neco.1990.2.4.490.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> cell, head, x = torch.nn.GRUCell(2, 4), torch.nn.Linear(4, 1), torch.randn(8, 6, 2)
    >>> def training_step():
    ...     h = torch.zeros(8, 4)
    ...     for t in range(6):
    ...         h = cell(x[:, t], h.detach())
    ...     head(h).pow(2).mean().backward()
    >>> found = rl.torch.cuts(training_step, torch.nn.ModuleList([cell, head]))
    >>> [(cut.operation, cut.count) for cut in found.cuts]
    [('detach', 5)]
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    used, first = _gradients(step, model, weights)
    if not first.losses:
        raise InputError(
            "The training step calls no loss.backward().",
            got="a step without a backward pass, or one by torch.autograd.grad or torch.autograd.backward",
            expected="rl.torch.cuts(step, model), where step() calls loss.backward()",
        )
    sites = [site for site in first.sites.values() if site.count]
    found, calls = [], []
    for site in sites:
        without, _ = _gradients(step, model, weights, [site])
        if _differs(used, without):
            calls.append(site)
            price = _price(used, without)
            found.append(TrainingCut(site.operation, *site.call[:2], site.code, site.count, price))
    if not found:
        return TrainingCuts([], Price(1.0, 1.0), {}, {}, len(first.losses))
    full, _ = _gradients(step, model, weights, calls)
    windows, longest = {1: _price(used, full)}, max(site.count for site in calls)
    window = 2
    while window < longest:
        windows[window] = _price(_gradients(step, model, weights, calls, window)[0], full)
        window *= 2
    by_weight = {name: _price({name: used[name]}, {name: full[name]}) for name in weights}
    return TrainingCuts(found, windows[1], by_weight, windows, len(first.losses))


def _gradients(
    step: Callable[[], Any],
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    bypassed: list[CutSite] | None = None,
    every: int | None = None,
) -> tuple[dict[str, torch.Tensor], StepRun]:
    """Run the step and restore the model; return the gradients of its weights, and the run."""
    with borrowed_model(model):
        run = run_step(step, [site.call for site in bypassed or ()], every)
        return run.gradients(weights), run


def _flat(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1).double() for gradient in gradients.values()])


def _differs(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    a, b = _flat(first), _flat(second)
    return bool((a - b).norm() > _CHANGED * torch.maximum(a.norm(), b.norm()))


def _price(used: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor]) -> Price:
    a, b = _flat(used), _flat(full)
    norms = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (norms[0] * norms[1]) if norms[0] and norms[1] else float("nan")
    return Price(cosine, norms[0] / norms[1] if norms[1] else float("nan"))
