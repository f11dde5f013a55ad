"""Values of tensors for the replay."""

from __future__ import annotations

from typing import Any

import torch


def replayable(value: Any) -> Any:
    """A detached copy for the replay; half precision is widened to float32, in which a recurrence can be trusted."""
    value = value.detach()
    if value.dtype in (torch.bfloat16, torch.float16):
        return value.float().contiguous()
    return value.clone(memory_format=torch.contiguous_format)
