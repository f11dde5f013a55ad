"""``rl.transformers``: what only users of Hugging Face's ``Trainer`` need: a callback that follows training.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trainer = Trainer(model, args, callbacks=[rl.transformers.Watch("runs/a.zarr", every=50)])  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..errors import MissingDependencyError, message
from ..tracking.asked import at_the_door
from ..tracking.schedule import Every
from ..tracking.torch.plan import Plan
from ..tracking.transformers import Following, own_loss

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependencyError(
        message("rl.transformers needs transformers and accelerate.", hint="pip install 'transformers[torch]'")
    ) from error

__all__ = ["Watch"]


class Watch(Following, TrainerCallback):
    """A callback of Hugging Face's ``Trainer`` that follows training: on a probe between the steps, or on its batches.

    Gradients are taken when the Trainer has clipped them (``on_pre_optimizer_step``), and before. The Trainer tells its
    callbacks nothing of an error or Ctrl-C: what was written is readable all the same, and ``with
    rl.transformers.Watch(...) as watch: ...`` around ``trainer.train()`` closes the run then too.

    Parameters
    ----------
    path, every, epochs, batches, on_batch, quantities, layers, keep, loggers, stop_on, on_nonfinite, resume,
    points
        As for :func:`rnnlens.torch.watch`. A finding of ``stop_on`` ends training.
    probe, loss
        As there; or a dict of what the model takes, its labels among them, whose own loss is meant.

    Attributes
    ----------
    latest
        The last batch that was looked at: ``callback.latest["lstm"].output_grad``.

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
        probe: Sequence[Any] | Mapping[str, Any] | None = None,
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
        if isinstance(probe, Mapping):
            probe, loss = (dict(probe),), own_loss if loss is None else loss
        self.plan = Plan.asked(locals())
