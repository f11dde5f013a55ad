"""``WatchPlan``: the checked arguments of a watch in torch; the module inside DDP; which process writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from ...adapters.torch.discover import cell_candidates, step_methods
from ...errors import InputError, UnsupportedError, short_repr
from ..alerts import checked_on_nonfinite, checked_stop_on
from ..batches import DIRECT
from ..records import NEEDED
from ..watch_arguments import Every, Schedule, names_tuple, quantity_names, refuse_idle_arguments


@dataclass(frozen=True)
class WatchPlan:
    """Arguments of :func:`rnnlens.torch.watch`, checked; trainers set some of them themselves."""

    path: str | PathLike[str] | None = None
    probe: Sequence[Any] | None = None
    loss: Callable[..., Any] | str | None = None
    every: Every = 50
    epochs: Collection[int] = ()
    batches: Every | None = None
    on_batch: Callable[[Any], object] | None = None
    quantities: str | Iterable[str] | None = None
    optimizer: Any = None
    scaler: Any = None
    layers: str | Iterable[str] | None = None
    keep: str | Iterable[str] = ()
    loggers: Any = None
    stop_on: str | Iterable[str] = ()
    on_alert: Callable[[Any], object] | None = None
    on_nonfinite: str | None = None
    resume: bool = True
    points: int | None = 64
    step: int | None = None
    #: Whether the model may have cells of the user's own, whose states have names that only a run shows.
    may_have_own_cells: bool = True

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Create a plan from arguments by name, such as ``locals()``; unknown names are ignored."""
        given = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        model = arguments.get("model")
        if isinstance(model, nn.Module):
            given["may_have_own_cells"] = bool(cell_candidates(model) or step_methods(model, None))
        return cls(**given)

    def __post_init__(self) -> None:
        """Check the arguments before any file is opened."""
        checked_fields = {
            "layers": names_tuple(self.layers),
            "quantities": quantity_names(self.quantities, own_states=self.may_have_own_cells),
            "keep": quantity_names(self.keep, own_states=self.may_have_own_cells) or (),
            "stop_on": checked_stop_on(self.stop_on),
            "epochs": Schedule(self.every, self.epochs).epochs,
        }
        for name, value in checked_fields.items():
            object.__setattr__(self, name, value)
        checked_on_nonfinite(self.on_nonfinite)
        if self.probe is not None:
            if not isinstance(self.probe, tuple | list) or not 1 <= len(self.probe) <= 3:
                expected = "(x, y) or (x, y, sample_weight)"
                raise InputError("probe= is a batch.", got=short_repr(self.probe), expected=expected)
            if self.loss is None:
                raise InputError(
                    "A probe of a torch model needs a loss.",
                    got="loss=None",
                    expected="loss=callable(output, target)",
                    hint="loss=torch.nn.functional.cross_entropy",
                )
        Schedule(0 if self.batches is None else self.batches)  # constructed for its checks
        batch_arguments = {"on_batch": self.on_batch, "quantities": self.quantities}
        refuse_idle_arguments(self.probe, self.batches, self.epochs, batch_arguments)

    @property
    def probe_schedule(self) -> Schedule:
        """Schedule of the probe; never due without a probe."""
        return Schedule(self.every, self.epochs) if self.probe is not None else Schedule(0)

    @property
    def batch_schedule(self) -> Schedule:
        """Schedule of batch records; without ``batches=`` and probe it is that of ``every=``."""
        if self.batches is not None:
            return Schedule(self.batches)
        return Schedule(self.every) if self.probe is None else Schedule(0)

    @property
    def is_off(self) -> bool:
        """True if the schedules never require a record."""
        return self.probe_schedule.is_off and self.batch_schedule.is_off and self.on_nonfinite is None

    @property
    def recorded_quantities(self) -> tuple[str, ...]:
        """Names of the quantities recorded of a batch."""
        return tuple(dict.fromkeys([*(NEEDED if self.quantities is None else self.quantities), *self.keep]))

    @property
    def is_only_direct(self) -> bool:
        """True if all recorded quantities are captured in the training step, so that no replay is needed."""
        return set(self.recorded_quantities) <= DIRECT

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers given by the user, as a list."""
        optimizer = () if self.optimizer is None else self.optimizer
        return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def inner_module(model: Any) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``; any other module unchanged."""
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "nn.DataParallel copies the model for every batch, and the copies cannot be recorded.",
            got="nn.DataParallel",
            expected="nn.parallel.DistributedDataParallel, or the module by itself",
        )
    if any(cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for cls in type(model).__mro__):
        raise UnsupportedError(
            "No process has the whole weights of a sharded model.", got=type(model).__name__, expected="DDP"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        raise InputError("rl.torch.watch takes a torch module.", got=type(model).__name__, expected="torch.nn.Module")
    return model


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) without torch.distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
