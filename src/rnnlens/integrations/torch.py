"""``rl.torch``: mark custom cells and loops as recurrent layers, make models of functions, record training loops.

>>> import rnnlens as rl  # doctest: +SKIP
>>> with rl.torch.cell(model.memory):  # doctest: +SKIP
...     trace = rl.trace(model, x, y, loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..adapters.torch.function_model import model
from ..adapters.torch.public import cell, scan, step
from ..adapters.torch.restore import borrowed_model
from ..arguments import anything, checked
from ..autodiff.cuts import CutSite
from ..autodiff.torch_bypass import run_step
from ..errors import InputError
from ..tracking.torch.plan import WatchPlan
from ..tracking.torch.watch import TorchWatch
from ..tracking.watch_arguments import Every, check_arguments
from .cut_prices import StepGradients, TrainingCuts, compare_cuts

__all__ = ["cell", "cuts", "model", "scan", "step", "watch"]


@check_arguments
def watch(
    model: Any,
    path: str | PathLike[str] | None = None,
    *,
    probe: Sequence[Any] | None = None,
    loss: Callable[..., Any] | str | None = None,
    every: Every = 50,
    epochs: Collection[int] = (),
    batches: Every | None = None,
    on_batch: Callable[[Any], object] | None = None,
    quantities: str | Iterable[str] | None = None,
    optimizer: Any = None,
    scaler: Any = None,
    layers: str | Iterable[str] | None = None,
    keep: str | Iterable[str] = (),
    loggers: Any = None,
    stop_on: str | Iterable[str] = (),
    on_alert: Callable[[Any], object] | None = None,
    on_nonfinite: str | None = None,
    resume: bool = True,
    points: int | None = 64,
    step: int | None = None,
) -> TorchWatch:
    """Record a training loop: ``with rl.torch.watch(model, "runs/a.zarr", every=50) as watch: ...``.

    The results of the loop do not change. A *probe* is a fixed held-out batch that is traced between two steps. *Batch*
    mode captures the training step itself. Hooks capture the direct gradients and weight gradients of the training
    batch, without a second forward pass. States, gates and total gradients come from a replay of the recurrent calls
    alone, with their own weights, inputs and dropout.

    Parameters
    ----------
    model
        The module that is trained, which may be wrapped by ``DistributedDataParallel`` or ``torch.compile``. Under
        DDP, rank 0 writes records of its own samples, with a note.
    path
        Folder of the run, ending in ``.zarr``; :func:`rnnlens.open` reads it, also during training. An existing run is
        continued. None writes nothing to disk; :attr:`~TorchWatch.latest` is available.
    probe, loss
        A fixed batch ``(x, y)`` or ``(x, y, sample_weight)``, not used for training, that is traced in evaluation mode;
        and its loss, ``loss(output, target)`` or a name.
    every, epochs
        When to record: a number of steps, with 0 for never; ``"powers of two"``; or a function ``(step, epoch) ->
        bool``. The probe is recorded before training as well, and at the end of ``epochs`` where the loop sets
        ``watch.epoch``.
    batches
        When to record the training batch, with the same values as ``every``. By default never if there is a probe,
        otherwise the value of ``every``.
    on_batch
        Function that is called with each batch selected by ``batches`` after its step.
    quantities
        Quantities that are recorded of these batches; states, gates and total gradients by default.
        ``"output_grad"``, ``"final_state_grad"`` and ``"output"`` need no replay.
    optimizer
        One optimizer or several; the steps of the first are counted. By default each optimizer with weights of the
        model is found at its first step, and the first with weights of a recurrent layer is counted.
    scaler
        The ``GradScaler``, whose scale is divided out; by default it is found when it calls the optimizer.
    layers
        Names of the layers to record; all recurrent layers by default.
    keep
        Quantities whose full arrays are recorded, such as ``"hidden_grad"``.
    loggers
        Further destinations of the records: a ``SummaryWriter``, a run of ``wandb`` or ``mlflow``, a Lightning logger,
        the name of a tool, an object with ``write(record)`` and ``close(reason)``, or a list of these.
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``. The loop must
        check ``watch.stop``. All three are logged once with their step, whether or not they end training.
    on_alert
        Function that is called with each new :class:`~rnnlens.results.training_run.Alert`, once; training goes on if it
        raises.
    on_nonfinite
        ``"report"``: the model's input at the first step whose gradients (or ``watch.loss``) are not finite is written
        to ``runs/a.nonfinite.nc``, with the weights from before the step and with ``watch.target`` if the loop sets it;
        the first non-finite quantity is logged. All gradients are checked before every step.
    resume
        Continue an existing run at ``path``; False replaces it.
    points
        Maximal number of points stored per profile over time; None stores every step.
    step
        Number of steps trained before; later records of an existing run are dropped. By default it is read from the
        optimizers given, or else it is the last step of the run.

    Returns
    -------
    TorchWatch
        A context manager. ``watch.latest`` is the last captured batch, ``watch.latest["lstm"].output_grad`` one of its
        gradients, ``watch.latest.trace`` its trace. A loop without an optimizer calls ``watch.step()`` after each step.

    Raises
    ------
    InputError
        If an argument has an invalid value, or would have no effect with the others.
    LayerNotFoundError
        If ``layers`` names a layer that the model does not have.
    UnsupportedError
        For ``nn.DataParallel``, sharded models, and batch mode if no layer can be captured.
    FileError
        If ``path`` exists and is no run, or if another process writes this run.

    Warns
    -----
    TrackingWarning
        At the end, if nothing was recorded, with the reason; once for each failed record.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> class Reader(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gru, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)
    ...     def forward(self, x):
    ...         return self.head(self.gru(x)[0][:, -1])
    >>> model, x, mse = Reader(), torch.randn(16, 9, 2), torch.nn.functional.mse_loss
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with rl.torch.watch(model, "run.zarr", probe=(x, x[:, 0, :1]), loss=mse, every=1):
    ...     for _ in range(2):
    ...         optimizer.zero_grad()
    ...         mse(model(x), x[:, 0, :1]).backward()
    ...         optimizer.step()
    >>> rl.open("run.zarr").steps.values.tolist()
    [0, 1, 2]
    """
    return TorchWatch(model, WatchPlan.from_arguments(locals()))


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
