"""The user's own module inside what trains it on several devices, and who of several processes writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import InputError, UnsupportedError, message


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
