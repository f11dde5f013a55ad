"""One call of a recurrent module in a training step, as it was overheard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(eq=False)
class HeardCall:
    """One call of a fused recurrent module, or all of a cell's loop: what it was fed, what it returned, what came back.

    Attributes
    ----------
    args, kwargs
        Detached copies; empty where only what came back is wanted. Of a loop all inputs (sample, time, feature) and the
        initial states.
    weights
        By layer index and direction, in torch's words; copies where a replay is wanted: the step changes the user's.
    random
        State of the generator that dropout between stacked layers drew from; None where none acted.
    returned
        Detached: the output (of a packed sequence its data), then the final states. Of a loop every state by step
        (sample, time, unit).
    grads
        By the place in ``returned``: the sum over the backward passes that came through. As torch had it: times the
        scale of a GradScaler.
    """

    path: str
    module: Any
    training: bool
    weights: dict[tuple[int, str], dict[str, Tensor]]
    returned: list[Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    packed: PackedSequence | None = None
    random: Tensor | None = None
    autocast: torch.dtype | None = None
    grads: dict[int, Tensor] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)
    number: int = 0
