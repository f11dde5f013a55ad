"""``rl.torch.cuts``: where a training step cuts the gradient, and what that gradient is without the cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..adapters.torch.restore import borrowed_model
from ..arguments import anything, checked
from ..autodiff.cuts import CutSite
from ..autodiff.torch_bypass import run_step
from ..errors import InputError
from .cut_prices import StepGradients, TrainingCuts, compare_cuts


@checked(step=anything, model=anything, keep=anything)
def cuts(step: Callable[[], Any], model: nn.Module, *, keep: str | Sequence[str] = ()) -> TrainingCuts:
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
    keep
        Texts of lines whose cuts stay in place, since they are meant: a target, an old log probability.

    Returns
    -------
    TrainingCuts
        Only cuts that change the gradient: a loss that is detached for a log is none. Operations inside compiled code
        are not observed. A state that goes to NumPy and comes back as a tensor is followed by its values.

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
    used = _gradients(step, model, weights)
    if not used.losses:
        raise InputError(
            "The training step calls no loss.backward().",
            got="a step without a backward pass, or one by torch.autograd.grad or torch.autograd.backward",
            expected="rl.torch.cuts(step, model), where step() calls loss.backward()",
        )
    return compare_cuts(lambda sites, every: _gradients(step, model, weights, sites, every), used, keep)


def _gradients(
    step: Callable[[], Any],
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    bypassed: Sequence[CutSite] = (),
    every: int | None = None,
) -> StepGradients:
    """Run the step and restore the model; return the gradients of its weights."""
    with borrowed_model(model):
        run = run_step(step, [site.call for site in bypassed], every)
        gradients = {name: grad.double().cpu().numpy() for name, grad in run.gradients(weights).items()}
    return StepGradients(gradients, [site for site in run.sites.values() if site.count], len(run.losses))
