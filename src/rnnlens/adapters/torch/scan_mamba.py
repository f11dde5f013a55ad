"""Readers of the scans of Mamba and Mamba-2: of transformers, and of mamba_ssm with its fused entries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...errors import UnsupportedError
from ...recurrence.sequence import SequenceCell
from .scan_reading import Family, Hold, Reading, widen_tensors


def _read_selective_scan(call: Any, hold: Hold) -> Reading:
    """Read Mamba's scan: a = exp(dt A), W = dt B x, diagonal; Gu, Dao 2023, arXiv:2312.00752, eqs. 2-4."""
    dtype = call.hidden_states.dtype
    x, dt, rate, write, read = widen_tensors(call.hidden_states, call.dt, call.A, call.B, call.C)
    dt = dt if call.delta_bias is None else dt + call.delta_bias.to(dt.dtype)[..., None]
    dt = hold(functional.softplus(dt) if call.delta_softplus else dt).transpose(1, 2)
    cell = SequenceCell(
        ("channel", "state_unit"),
        decay=(dt[..., None], hold(rate)[None, None]),
        write=((dt * x.transpose(1, 2))[..., None], _by_channel(hold(write), x.shape[1])),
        read=_by_channel(hold(read), x.shape[1]),
    )
    gate = None if call.z is None else functional.silu(call.z)

    def finish(y: Tensor, last_state: Tensor) -> Any:
        output = y.transpose(1, 2)
        output = output if call.D is None else output + x * call.D[None, :, None]
        output = output if gate is None else output * gate
        output = output if dtype == x.dtype else output.to(dtype)
        return (output, last_state) if call.return_last_state else output

    return Reading(
        cell, finish, None if gate is None else gate.transpose(1, 2), values=call.hidden_states.transpose(1, 2)
    )


def _read_chunked_scan(call: Any, hold: Hold) -> Reading:
    """Read Mamba-2's scan: one decay per head; Dao, Gu 2024, arXiv:2405.21060, section 7."""
    x, dt, rate, *coefficients = widen_tensors(call.hidden_states, call.dt, call.A, call.B, call.C)
    dt = dt if call.dt_bias is None else dt + call.dt_bias.to(dt.dtype)
    dt = hold((functional.softplus(dt) if call.dt_softplus else dt).clamp(*call.dt_limit))
    heads = x.shape[2] // call.B.shape[2]
    write, read = (hold(t).repeat_interleave(heads, 2)[:, :, :, None] for t in coefficients)
    cell = SequenceCell(
        ("head", "channel", "state_unit"),
        decay=((dt * hold(rate).to(dt.dtype))[..., None, None],),
        write=((dt[..., None] * x)[..., None], write),
        read=read,
        initial=call.initial_states,
    )

    def finish(y: Tensor, last_state: Tensor) -> Any:
        skip = 0.0 if call.D is None else call.D if call.D.dim() == 2 else call.D[..., None]
        output = y if call.D is None else y + skip * x
        return (output, last_state) if call.return_final_states else output

    return Reading(cell, finish)


def _by_channel(coefficient: Tensor, channels: int) -> Tensor:
    """Return B or C of a Mamba as (sample or 1, time or 1, channel or 1, state_unit).

    It is (channel, state_unit), (sample, state_unit, time), or (sample, group, state_unit, time).
    """
    if coefficient.dim() == 2:
        return coefficient[None, None]
    if coefficient.dim() == 3:
        return coefficient.transpose(1, 2)[:, :, None]
    return coefficient.repeat_interleave(channels // coefficient.shape[1], 1).permute(0, 3, 1, 2)


def _read_interface_scan(call: Any, hold: Hold) -> Reading:
    """Read ``selective_scan_fn`` of mamba_ssm, of tensors (sample, channel, time)."""
    _refuse_packed(call)
    return _read_selective_scan(_complete(call, hidden_states=call.u, dt=call.delta), hold)


def _read_fused_mamba(call: Any, hold: Hold) -> Reading:
    """Read ``mamba_inner_fn``, a Mamba layer behind its first projection; Gu, Dao 2023, arXiv:2312.00752, sec. 3.4.

    Convolution, projections to dt, B and C, scan, gate and output projection, in this order.
    """
    _refuse_packed(call)
    x, z = call.xz.chunk(2, 1)
    x = functional.silu(_causal_convolution(x, call.conv1d_weight.flatten(1), call.conv1d_bias))
    parts = functional.linear(x.transpose(1, 2), call.x_proj_weight)
    rank, size = call.delta_proj_weight.shape[1], call.A.shape[-1]
    dt = functional.linear(parts[..., :rank], call.delta_proj_weight).transpose(1, 2)
    write, read = parts[..., rank : rank + size], parts[..., -size:]
    biases = (getattr(call, name, None) for name in ("B_proj_bias", "C_proj_bias"))
    write, read = (t if bias is None else t + bias for t, bias in zip((write, read), biases, strict=True))
    coefficients = {
        "B": write.transpose(1, 2) if call.B is None else call.B,
        "C": read.transpose(1, 2) if call.C is None else call.C,
    }
    reading = _read_selective_scan(
        _complete(call, hidden_states=x, dt=dt, z=z, return_last_state=False, **coefficients), hold
    )

    def finish(y: Tensor, last_state: Tensor) -> Tensor:
        output = reading.finish(y, last_state).transpose(1, 2)
        return functional.linear(output, call.out_proj_weight, call.out_proj_bias)

    return Reading(reading.cell, finish, reading.gate, values=reading.values)


def _read_combined_scan(call: Any, hold: Hold) -> Reading:
    """Read ``mamba_chunk_scan_combined`` of mamba_ssm, with its gate."""
    _refuse_packed(call)
    reading = _read_chunked_scan(_complete(call, hidden_states=call.x), hold)

    def finish(y: Tensor, last_state: Tensor) -> Any:
        returned = reading.finish(y, last_state)
        output, *states = returned if call.return_final_states else (returned,)
        output = (output if call.z is None else output * functional.silu(call.z)).to(call.x.dtype)
        return (output, *states) if states else output

    return Reading(reading.cell, finish)


def _read_fused_mamba2(call: Any, hold: Hold) -> Reading:
    """Read ``mamba_split_conv1d_scan_combined``, a whole Mamba-2 layer behind its first projection.

    The input has side by side the parts of a gated unit beside the scan, if any, the gate z, what is convolved (x, B,
    C), and dt. Norms are taken over the channels of each group, as in the kernel. Dao, Gu 2024, arXiv:2405.21060,
    section 8.
    """
    _refuse_packed(call)
    heads, groups = call.A.shape[0], call.ngroups
    channels = call.D.shape[1] if call.D.dim() == 2 else call.headdim
    width, convolved = heads * channels, call.conv1d_weight.shape[0]
    size = (convolved - width) // (2 * groups)
    beside = (call.zxbcdt.shape[-1] - width - convolved - heads) // 2
    outer, up, z, mixed, dt = call.zxbcdt.split([beside, beside, width, convolved, heads], -1)
    mixed = _causal_convolution(mixed.transpose(1, 2), call.conv1d_weight, call.conv1d_bias).transpose(1, 2)
    mixed = mixed if call.activation is None else functional.silu(mixed)
    x, write, read = mixed.split([width, groups * size, groups * size], -1)
    arguments = {
        "hidden_states": x.unflatten(-1, (heads, channels)),
        "dt": dt,
        "B": write.unflatten(-1, (groups, size)),
        "C": read.unflatten(-1, (groups, size)),
        "dt_softplus": True,
        "return_final_states": False,
    }
    reading = _read_chunked_scan(_complete(call, **arguments), hold)

    def finish(y: Tensor, last_state: Tensor) -> Any:
        output = reading.finish(y, last_state).flatten(2)
        gate = functional.silu(z)
        if call.rmsnorm_weight is None:
            output = output * gate
        else:
            output = output if call.norm_before_gate else output * gate
            grouped = output.unflatten(-1, (groups, -1))
            grouped = grouped * (grouped.square().mean(-1, keepdim=True) + call.rmsnorm_eps).rsqrt()
            output = grouped.flatten(2) * call.rmsnorm_weight
            output = output * gate if call.norm_before_gate else output
        output = torch.cat([functional.silu(outer) * up, output], -1) if beside else output
        output = output.to(call.zxbcdt.dtype)
        if call.outproj_weight is not None:
            output = functional.linear(output, call.outproj_weight, call.outproj_bias)
        return (output, last_state) if call.return_final_states else output

    return Reading(reading.cell, finish)


def _complete(call: Any, **arguments: Any) -> SimpleNamespace:
    """Return the arguments of a call under the names that a reader expects."""
    return SimpleNamespace(**{**vars(call), **arguments})


def _causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve (sample, channel, time) with one kernel (channel, width) for each channel, over earlier steps."""
    padded = functional.pad(x, (weight.shape[1] - 1, 0))
    return functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])


def _refuse_packed(call: Any) -> None:
    """Raise ``UnsupportedError`` for packed sequences, complex numbers, and norms of dt, B and C inside a kernel."""
    names = ("seq_idx", "cu_seqlens", "b_rms_weight", "c_rms_weight", "dt_rms_weight")
    options = [name for name in names if getattr(call, name, None) is not None]
    options += ["a complex A"] if call.A.is_complex() else []
    if options:
        raise UnsupportedError(
            "A fused scan of Mamba runs with options that rnnlens does not read.",
            got=", ".join(options),
            expected="sequences of one length, real numbers, and no norm of dt, B or C inside the kernel",
        )


_CHANNELS = (("intermediate_size", "d_inner"), ("ssm_state_size", "d_state"))
_HEADS = (("num_heads", "nheads"), ("head_dim", "headdim"), ("ssm_state_size", "d_state"))


def _mamba(read: Any, **options: Any) -> Family:
    return Family("mamba", ("channel", "state_unit"), _CHANNELS, read, **options)


def _mamba2(read: Any, **options: Any) -> Family:
    return Family("mamba2", ("head", "channel", "state_unit"), _HEADS, read, **options)


_FUSED_MAMBA2 = _mamba2(_read_fused_mamba2, may_decline=True)
#: Families by the name of their scan function; the first two are those of transformers.
FUNCTIONS = {
    "mamba_selective_scan": _mamba(_read_selective_scan, is_quadratic=True),
    "mamba2_chunk_scan": _mamba2(_read_chunked_scan),
    "selective_scan_fn": _mamba(_read_interface_scan, arguments=frozenset({"u", "delta", "A", "B", "C"})),
    "mamba_inner_fn": _mamba(_read_fused_mamba, may_decline=True),
    "mamba_chunk_scan_combined": _mamba2(_read_combined_scan, arguments=frozenset({"x", "dt", "A", "B", "C"})),
    "mamba_split_conv1d_scan_combined": _FUSED_MAMBA2,
    "mamba2_split_conv1d_scan_combined": _FUSED_MAMBA2,
}

#: Functions of families that are no :class:`SequenceCell`, by name. What a step of Mamba-3 writes is a sum of the
#: products of this step and the last one.
NOT_READ = dict.fromkeys(("mamba3_siso_combined", "mamba3_mimo_combined"), "Mamba-3")
