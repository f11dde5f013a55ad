"""What a user asked of a watch, checked once; every trainer's watch is made from one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from ...errors import InputError, UnsupportedError, message, shown
from ..alerts import checked_stop_on
from ..batches import DIRECT
from ..incidents import checked_on_nonfinite
from ..probe import NEEDED
from ..watch_arguments import Every, Schedule, listed, quantities_of, refuse_idle


@dataclass(frozen=True)
class Plan:
    """The arguments of :func:`rnnlens.torch.watch`, of which trainers tell some by themselves.

    Raises
    ------
    InputError
        For a schedule, a probe, a quantity or an optimizer that is none.
    """

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
    on_nonfinite: str | None = None
    resume: bool = True
    points: int | None = 64
    step: int | None = None

    @classmethod
    def asked(cls, given: Mapping[str, Any]) -> Self:
        """Of the arguments of a watch by name, ``locals()`` at its beginning; what is none of ours is left out."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def __post_init__(self) -> None:
        """Refuse what cannot be followed before anything is opened."""
        checked = {
            "layers": listed(self.layers),
            "quantities": quantities_of(self.quantities),
            "keep": quantities_of(self.keep) or (),
            "stop_on": checked_stop_on(self.stop_on),
            "epochs": Schedule(self.every, self.epochs).epochs,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        checked_on_nonfinite(self.on_nonfinite)
        _check_probe(self.probe, self.loss)
        Schedule(0 if self.batches is None else self.batches)  # made, and with that checked
        of_batches = {"on_batch": self.on_batch, "quantities": self.quantities}
        refuse_idle(self.probe, self.batches, self.epochs, of_batches)

    @property
    def probes(self) -> Schedule:
        """When the probe is traced."""
        return Schedule(self.every, self.epochs) if self.probe is not None else Schedule(0)

    @property
    def heard(self) -> Schedule:
        """When the batch itself is listened to: as ``every`` says where there is no probe."""
        if self.batches is not None:
            return Schedule(self.batches)
        return Schedule(self.every) if self.probe is None else Schedule(0)

    @property
    def off(self) -> bool:
        """Whether nothing is ever due."""
        return self.probes.off and self.heard.off and self.on_nonfinite is None

    @property
    def recorded(self) -> tuple[str, ...]:
        """What of the batch is recorded."""
        return (*(NEEDED if self.quantities is None else self.quantities), *self.keep)

    @property
    def only_direct(self) -> bool:
        """Whether no replay is needed."""
        return set(self.recorded) <= DIRECT

    @property
    def optimizers(self) -> list[Any]:
        """Those given."""
        if self.optimizer is None:
            return []
        return list(self.optimizer) if isinstance(self.optimizer, list | tuple) else [self.optimizer]


def _check_probe(probe: Any, loss: Any) -> None:
    if probe is None:
        return
    if not isinstance(probe, tuple | list) or not 1 <= len(probe) <= 3:
        raise InputError(message("probe= is a batch.", got=shown(probe), expected="(x, y) or (x, y, sample_weight)"))
    if loss is None:
        raise InputError(
            message(
                "A probe of a torch model needs a loss.",
                got="loss=None",
                expected="loss=callable(output, target)",
                hint="loss=torch.nn.functional.cross_entropy",
            )
        )


def plain_model(model: Any) -> nn.Module:
    """The module inside ``DistributedDataParallel``; any other one unchanged.

    Raises
    ------
    InputError
        For what is no module.
    UnsupportedError
        For ``nn.DataParallel`` and sharded models.
    """
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            message(
                "nn.DataParallel copies the model for every batch, and a copy cannot be followed.",
                got="nn.DataParallel",
                expected="nn.parallel.DistributedDataParallel, or the module by itself",
            )
        )
    if any(cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for cls in type(model).__mro__):
        raise UnsupportedError(
            message("The weights of a sharded model are nowhere whole.", got=type(model).__name__, expected="DDP")
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        raise InputError(message("Only a module can be watched.", got=type(model).__name__, expected="torch.nn.Module"))
    return model


def rank_and_world() -> tuple[int, int]:
    """The number of this process among those that train together, and how many these are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
