"""``rl.lightning``: what only users of Lightning need: a callback of the trainer that follows training.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trainer = L.Trainer(callbacks=[rl.lightning.Watch("runs/a.zarr", every=50)])  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from os import PathLike
from typing import Any

from ..errors import MissingDependencyError, message
from ..tracking.asked import at_the_door
from ..tracking.lightning import Following
from ..tracking.schedule import Every
from ..tracking.torch.plan import Plan

__all__ = ["Watch"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callbacks() -> tuple[type, ...]:
    """The ``Callback`` of Lightning under both of its names, as far as these are loaded; else of the one there is."""
    loaded = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    for name in () if loaded else _PACKAGES:
        try:
            loaded = [importlib.import_module(name)]
            break
        except ModuleNotFoundError:
            continue
    if not loaded:
        raise MissingDependencyError(message("rl.lightning needs Lightning.", hint="pip install lightning"))
    return tuple(dict.fromkeys(package.Callback for package in loaded))


class Watch(Following, *_callbacks()):  # type: ignore[misc]
    """A callback of Lightning's trainer that follows training: on a probe between the steps, or on its batches.

    The layers go by their names in the ``LightningModule``. Mixed precision, accumulation and gradient clipping are the
    trainer's, and recorded as what they are; early stopping, an error and Ctrl-C close the run. Under DDP rank 0
    writes, of its own samples, and its records say so.

    Parameters
    ----------
    path, probe, loss, every, epochs, batches, on_batch, quantities, layers, keep, stop_on, on_nonfinite, resume, points
        As for :func:`rnnlens.torch.watch`. A finding of ``stop_on`` sets ``trainer.should_stop``.
    loggers
        As there; True for the loggers of the trainer.

    Attributes
    ----------
    latest
        The last batch that was looked at: ``callback.latest["net.lstm"].output_grad``.

    Raises
    ------
    InputError, LayerNotFoundError, UnsupportedError, FileError
        As for :func:`rnnlens.torch.watch`; what depends on the model, when training begins.
    """

    @at_the_door
    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        probe: Sequence[Any] | None = None,
        loss: Callable[..., Any] | str | None = None,
        every: Every = 50,
        epochs: Collection[int] = (),
        batches: Every | None = None,
        on_batch: Callable[[Any], object] | None = None,
        quantities: str | Iterable[str] | None = None,
        layers: str | Iterable[str] | None = None,
        keep: str | Iterable[str] = (),
        loggers: Any = None,
        stop_on: str | Iterable[str] = (),
        on_nonfinite: str | None = None,
        resume: bool = True,
        points: int | None = 64,
    ) -> None:
        super().__init__()
        self.plan = Plan.asked(locals())
