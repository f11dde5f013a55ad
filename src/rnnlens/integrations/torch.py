"""``rl.torch``: what only torch users need: cells and loops that have no name of their own, and trainings followed.

>>> import rnnlens as rl  # doctest: +SKIP
>>> with rl.torch.cell(model.memory):  # doctest: +SKIP
...     trace = rl.trace(model, x, y, loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from os import PathLike
from typing import Any

from ..adapters.torch.public import cell, step
from ..tracking.torch.plan import Plan
from ..tracking.torch.watch import TorchWatch
from ..tracking.watch_arguments import Every, at_the_door

__all__ = ["cell", "step", "watch"]


@at_the_door
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
    on_nonfinite: str | None = None,
    resume: bool = True,
    points: int | None = 64,
    step: int | None = None,
) -> TorchWatch:
    """Follow a training loop: ``with rl.torch.watch(model, "runs/a.zarr", every=50) as watch: ...``.

    Nothing that the loop computes is changed. A *probe* is a held-out batch that is traced between two steps: the same
    question at every record. *Batch* mode hears the step itself: the direct gradients and weight gradients of the batch
    that was trained on, by hooks, without a second forward; states, gates and total gradients by a replay of the
    recurrent calls alone, with their own weights, inputs and dropout.

    Parameters
    ----------
    model
        The module that is trained; inside ``DistributedDataParallel`` or ``torch.compile`` it is found. Under
        DDP rank 0 writes, of its own samples, and its records say so.
    path
        Of the run, ending in ``.zarr``; :func:`rnnlens.open` reads it, also while it is written. A run that is there is
        gone on with. None keeps only :attr:`~TorchWatch.latest`.
    probe, loss
        ``(x, y)`` or ``(x, y, sample_weight)``, a batch that is not trained on, and ``loss(output, target)`` or the
        name of one. It is traced in evaluation mode.
    every, epochs
        When to record: a number of steps, with 0 for never; ``"powers of two"``; or a function ``(step, epoch) ->
        bool``. The probe is recorded before training as well, and at the end of ``epochs`` where the loop sets
        ``watch.epoch``.
    batches
        When to look at the batch that is trained on, in the words of ``every``. Unless given: never where there is a
        probe, otherwise as ``every`` says.
    on_batch
        Called with each such batch once its step is over; ``watch.latest`` holds it as well.
    quantities
        What is recorded of these batches: states, gates and total gradients unless given. ``"output_grad"``,
        ``"final_state_grad"`` and ``"output"`` need no replay.
    optimizer
        One or several; a step is a step of the first. By default every optimizer that holds weights of the model is
        found as it steps, and the first that holds weights of a recurrent layer counts.
    scaler
        The ``GradScaler``, whose scale is divided out; found by itself where it calls the optimizer.
    layers
        Names of the layers to follow; all recurrent ones by default.
    keep
        Quantities to be kept whole in every record, such as ``"hidden_grad"``.
    loggers
        Where else records go: a ``SummaryWriter``, a run of ``wandb`` or ``mlflow``, a logger of Lightning's, the name
        of a tool, an object with ``write(record)`` and ``close(reason)``, or a list of these.
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``. A loop asks ``watch.stop``. All
        three are logged once with their step, whether they end it or not.
    on_nonfinite
        ``"report"``: what the model was fed at the first step whose gradients (or ``watch.loss``) are not finite is
        written to ``runs/a.nonfinite.nc`` with the weights from before the step, and with ``watch.target``, where the
        loop sets it; where the fault begins is logged. All gradients are looked at before every step.
    resume
        False replaces a run that is there.
    points
        Most points of a profile over time that are kept; None keeps every step.
    step
        Batches trained on before: training goes on from there, and records beyond are dropped. Unless given it is read
        from the optimizers that were given, or as far as the run goes.

    Returns
    -------
    TorchWatch
        A context manager. ``watch.latest`` is the last batch that was heard, ``watch.latest["lstm"].output_grad`` its
        gradients, ``.trace`` all the rest; ``watch.step()`` tells a step of a loop without an optimizer.

    Raises
    ------
    InputError
        If an argument does not fit, or would do nothing beside the others.
    LayerNotFoundError
        If ``layers`` names a layer that the model does not have.
    UnsupportedError
        For ``nn.DataParallel``, sharded models, and batch mode without a layer that can be heard.
    FileError
        If something that is no run is in the way, or another process writes this run.

    Warns
    -----
    TrackingWarning
        At the end, if nothing was recorded, with the reason; once for every record that failed.
    """
    return TorchWatch(model, Plan.asked(locals()))
