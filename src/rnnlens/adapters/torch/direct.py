"""The direct gradients that were heard in a training step, as the contract's calls: nothing is computed for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..protocol import RecurrentCall
from .assemble import half
from .discover import node_name
from .heard_call import HeardCall
from .heard_weights import unscaled
from .record import Packing
from .values import replayable
from .weights import class_of, known_cell


def direct_calls(calls: Sequence[HeardCall], scale: float) -> list[RecurrentCall]:
    """One call per direction of every heard call: output, its direct gradient and those of the final states.

    Of stacked layers the uppermost, which is the one that what is above reads.
    """
    count, seen = Counter(call.path for call in calls), Counter[str]()
    found = []
    for call in calls:
        suffix = f"#{seen[call.path]}" if count[call.path] > 1 else ""
        seen[call.path] += 1
        if isinstance(call.module, nn.RNNCellBase):
            found.append(_loop(call, call.path + suffix, scale))
            continue
        name = node_name(call.path, call.module, call.module.num_layers - 1) + suffix
        found += [_call(call, name, side, scale) for side in range(2 if call.module.bidirectional else 1)]
    return found


def _loop(call: HeardCall, name: str, scale: float) -> RecurrentCall:
    """A loop of cells; its output is its first state."""
    known = class_of(call.module)
    assert known is not None
    output, *_ = [replayable(state) for state in call.returned]
    arrived, *others = [replayable(unscaled(call.grads[place], scale)) for place in range(len(call.returned))]
    return RecurrentCall(
        layer=name,
        direction="forward",
        bidirectional=False,
        cell=known_cell(known[0], call.weights[0, "forward"], known[1]),
        input=output,  # its number of steps and samples is what counts
        initial_state=tuple(torch.zeros_like(state[:, 0]) for state in call.returned),
        mask=None,
        output=output,
        output_grad=arrived,
        final_state_grad=(torch.zeros_like(arrived[:, -1]), *(grad[:, -1] for grad in others)),
        compute_dtype=_half(output),
    )


def _half(output: Tensor) -> str:
    return str(output.dtype).removeprefix("torch.") if output.dtype.itemsize == 2 else ""


def _call(call: HeardCall, name: str, side: int, scale: float) -> RecurrentCall:
    module, top = call.module, call.module.num_layers - 1
    directions = 2 if module.bidirectional else 1
    direction = ("forward", "backward")[side]
    known = class_of(module)
    assert known is not None
    packing = _packing(call)
    output, *finals = call.returned
    arrived = [unscaled(call.grads.get(place, torch.zeros_like(t)), scale) for place, t in enumerate(call.returned)]
    mask = None if packing is None or bool(packing.mask.all()) else packing.mask.T.contiguous()
    row = top * directions + side
    return RecurrentCall(
        layer=name,
        direction=direction,  # type: ignore[arg-type]
        bidirectional=directions > 1,
        cell=known_cell(known[0], call.weights[top, direction], known[1]),
        input=_steps(call, half(output, directions, side), packing),  # its number of steps and samples is what counts
        initial_state=tuple(torch.zeros_like(_state(call, f, row, packing)) for f in finals),
        mask=mask,
        output=_steps(call, half(output, directions, side), packing),
        output_grad=_steps(call, half(arrived[0], directions, side), packing),
        final_state_grad=tuple(_state(call, grad, row, packing) for grad in arrived[1:]),
        compute_dtype=_half(output),
    )


def _packing(call: HeardCall) -> Packing | None:
    if call.packed is None:
        return None
    return Packing.of(call.packed.batch_sizes, call.packed.unsorted_indices, call.returned[0].device)


def _steps(call: HeardCall, value: Tensor, packing: Packing | None) -> Tensor:
    """(sample, time, unit), chronological, in the order of the caller's samples."""
    if packing is not None:
        value = packing.padded(value).transpose(0, 1)
    elif value.dim() == 2:
        value = value[None]
    elif not call.module.batch_first:
        value = value.transpose(0, 1)
    return replayable(value)


def _state(call: HeardCall, value: Tensor, row: int, packing: Packing | None) -> Tensor:
    """(sample, unit) of one layer and direction; torch hands final states out in the caller's order."""
    state = value[row]
    return replayable(state[None] if state.dim() == 1 else state)
