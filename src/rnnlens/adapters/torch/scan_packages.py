"""Readers of the scans of packages: mambapy, minGRU-pytorch, xlstm, s5-pytorch, lru-pytorch, flash-linear-attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...errors import UnsupportedError
from ...recurrence.sequence import SequenceCell
from .scan_reading import Family, Hold, Reading, normalised_memory, unit_norm, widen_tensors


def _read_plain_selective_scan(call: Any, hold: Hold) -> Reading:
    """Read a Mamba scan of tensors (sample, time, channel), as mambapy and mamba-minimal have it; arXiv:2312.00752."""
    inputs = call.x if hasattr(call, "x") else call.u
    x, dt, rate, write, read = widen_tensors(inputs, call.delta, call.A, call.B, call.C)
    dt = hold(dt)
    cell = SequenceCell(
        ("channel", "state_unit"),
        decay=(dt[..., None], hold(rate)[None, None]),
        write=((dt * x)[..., None], hold(write)[:, :, None]),
        read=hold(read)[:, :, None],
    )
    return Reading(cell, lambda y, last_state: y + call.D * x, values=inputs)


def _read_log_scan(call: Any, hold: Hold) -> Reading:
    """Read a minGRU's or minLSTM's scan h_t = a_t h_{t-1} + b_t of log a, log b; arXiv:2410.01201, app. B."""
    log_decay, log_write = widen_tensors(call.log_coeffs, call.log_values)
    cell = SequenceCell(("channel",), (hold(log_decay),), (torch.exp(log_write),))
    return Reading(cell, lambda states, last_state: states.to(call.log_values.dtype))


def _read_parallel_memory(call: Any, hold: Hold) -> Reading:
    """Read an mLSTM of the package xlstm, whose parallel form stands inside the layer; arXiv:2405.04517, eqs. 19-27.

    m_t is the running maximum of the terms of a row: no term stands for the state before the first step.
    """
    layer = call.self
    samples, steps = call.q.shape[:2]
    gates = torch.cat([call.q, call.k, call.v], -1)
    arguments = (call.q, call.k, call.v, layer.igate(gates), layer.fgate(gates))
    query, key, value, write, forget = widen_tensors(*arguments)
    query, key, value = (t.view(samples, steps, layer.config.num_heads, -1) for t in (query, key, value))
    forget = functional.logsigmoid(hold(forget))
    write = hold(write)
    cell, new_maxima = normalised_memory(
        hold(query), hold(key) * key.shape[-1] ** -0.5, value, write, forget, write[:, 0] - forget[:, 0]
    )

    def finish(y: Tensor, last_state: Tensor) -> Tensor:
        scale = torch.maximum(y[..., -1:].abs(), torch.exp(-new_maxima)[..., None]) + 1e-6
        normed = layer.outnorm((y[..., :-1] / scale).transpose(1, 2).to(call.q.dtype))
        return normed.transpose(1, 2).reshape(samples, steps, -1)

    return Reading(cell, finish)


def _read_s5(call: Any, hold: Hold) -> Reading:
    """Read an S5 of s5-pytorch, which runs each sample in a vmap; arXiv:2208.04933, eqs. 2 and 6.

    Matrices and discretization are the layer's own. ``step_scale`` is a number, or one for each sample, or step of it.
    """
    layer, signal, scale = call.self.seq, call.signal, call.step_scale
    input_matrix, output_matrix = layer.get_BC_tilde()

    def discretized(scale: Any) -> tuple[Tensor, Tensor]:
        decay, write_matrix = layer.discretize(layer.Lambda, input_matrix, scale * torch.exp(layer.log_step))
        return decay, write_matrix**layer.degree

    if torch.is_tensor(scale):
        decay, write_matrix = torch.vmap(discretized)(scale[..., None])
        decay = decay.reshape(len(signal), -1, decay.shape[-1])
        write_matrix = write_matrix.reshape(*decay.shape, -1)
    else:
        rounded = torch.ones((), device=signal.device) * scale  # in the default precision, as the package has it
        decay, write_matrix = (t[None, None] for t in discretized(rounded))
    write = (hold(write_matrix) @ signal.type(decay.dtype)[..., None])[..., 0]
    decay = decay + write if layer.liquid else decay  # arXiv:2209.12951, eq. 8
    cell = SequenceCell(("state_unit",), (hold(decay),), (write,), logarithmic=False, initial=call.state)
    skip, read_matrix = hold(layer.D), hold(output_matrix)

    def finish(states: Tensor, last_state: Tensor) -> Any:
        output = (states @ read_matrix.mT).real + skip * signal
        return (output, last_state) if call.return_state else output

    return Reading(cell, finish)


def _read_lru(call: Any, hold: Hold) -> Reading:
    """Read an LRU of lru-pytorch, which loops over samples and steps; arXiv:2303.06349, eqs. 3, 7 and 8."""
    layer, x = call.self, call.input
    if call.state is not None or x.dim() != 3:
        raise UnsupportedError(
            "An LRU of lru-pytorch runs on one sequence, or from a state that only its first sample gets.",
            got=f"input of shape {tuple(x.shape)}{'' if call.state is None else ', state='}",
            expected="(sample, time, feature), without state=",
            hint="lru(x[None])[0] runs one sequence; without state= every sample starts from zeros",
        )
    modulus, phase = torch.exp(-torch.exp(layer.nu_log)), torch.exp(layer.theta_log)
    decay = torch.complex(modulus * torch.cos(phase), modulus * torch.sin(phase))
    write_matrix = torch.exp(layer.gamma_log)[:, None] * layer.B
    write = x.to(layer.B.dtype) @ hold(write_matrix).mT
    cell = SequenceCell(("state_unit",), (hold(decay)[None, None],), (write,), logarithmic=False)
    skip, read_matrix = hold(layer.D), hold(layer.C)

    def finish(states: Tensor, last_state: Tensor) -> Tensor:
        return ((states @ read_matrix.mT).real + x @ skip.mT).to(torch.get_default_dtype())  # as its torch.empty is

    return Reading(cell, finish)


def _fla_reading(call: Any, cell: SequenceCell, dtype: torch.dtype) -> Reading:
    """Return the reading of a call of flash-linear-attention: outputs and the last state, or None for it."""
    if getattr(call, "cu_seqlens", None) is not None:
        raise UnsupportedError(
            "A layer of flash-linear-attention runs packed sequences.",
            got="cu_seqlens, or an attention mask with padding",
            expected="sequences of one length, without a mask",
        )
    is_transposed, is_returned = getattr(call, "state_v_first", False), getattr(call, "output_final_state", False)
    return Reading(
        cell,
        lambda y, last_state: (y.to(dtype), (last_state.mT if is_transposed else last_state) if is_returned else None),
    )


def _initial_state(call: Any) -> Tensor | None:
    """Return the state before the first step as (sample, head, key, value)."""
    state = getattr(call, "initial_state", None)
    return state.mT if state is not None and getattr(call, "state_v_first", False) else state


def _scaled_query(call: Any, query: Tensor) -> Tensor:
    scale = getattr(call, "scale", None)
    return query * (query.shape[-1] ** -0.5 if scale in (None, -1) else scale)


def _read_gated_attention(call: Any, hold: Hold) -> Reading:
    """Read gated linear attention, one decay per key or per head; GLA: arXiv:2312.06635, eq. 3, HGRN-2: 2404.07904."""
    gate = getattr(call, "gk", None) if getattr(call, "g", None) is None else call.g
    gamma = getattr(call, "g_gamma", None)
    query, key, value = widen_tensors(call.q, call.k, call.v)
    if gate is None:
        gate = query.new_zeros(1, 1, query.shape[2])
    if gamma is not None:
        gate = gate + gamma
    gate = gate.to(query.dtype)
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(hold(gate[..., None] if gate.dim() == 3 else gate)[..., None],),
        write=(hold(key)[..., None], value[..., None, :]),
        read=hold(_scaled_query(call, query))[..., None],
        contracted=-2,
        initial=_initial_state(call),
    )
    return _fla_reading(call, cell, call.v.dtype)


def _read_delta_attention(call: Any, hold: Hold) -> Reading:
    """Read a delta rule: DeltaNet (arXiv:2406.06484, eq. 4), gated (2412.06464, eq. 10), KDA (2510.26692, eq. 1).

    The gates may be logits, with the options of the kernels: g = -exp(A_log) softplus(g + dt_bias), beta = sigmoid.
    """
    query, key, value, beta = widen_tensors(call.q, call.k, call.v, call.beta)
    decay = _log_decay(call, query, value)
    if getattr(call, "use_beta_sigmoid_in_kernel", False):
        beta = beta.sigmoid() * (2 if getattr(call, "allow_neg_eigval", False) else 1)
    if getattr(call, "use_qk_l2norm_in_kernel", False):
        query, key = unit_norm(query), unit_norm(key)
    groups = value.shape[2] // query.shape[2]
    query, key = (t.repeat_interleave(groups, 2) for t in (query, key))
    key, beta = hold(key), hold(beta[..., None] if beta.dim() == 3 else beta)
    decay = hold(decay.to(query.dtype))
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=((decay[..., None] if decay.dim() == 3 else decay)[..., None],),
        write=((beta * key)[..., None], value[..., None, :]),
        read=hold(_scaled_query(call, query))[..., None],
        right=key[..., None],
        contracted=-2,
        initial=_initial_state(call),
    )
    return _fla_reading(call, cell, call.v.dtype)


def _log_decay(call: Any, query: Tensor, value: Tensor) -> Tensor:
    """Return the log decay of a delta rule, from its logits where the kernel has the gate inside."""
    decay = getattr(call, "g", None)
    if decay is None:
        return query.new_zeros(1, 1, value.shape[2])
    if not getattr(call, "use_gate_in_kernel", False):
        return decay
    bias = getattr(call, "dt_bias", None)
    logits = decay.to(query.dtype) + (0 if bias is None else bias.view(decay.shape[2:]))
    rate = call.A_log.exp().view(-1, *[1] * (decay.dim() - 3))
    lower_bound = getattr(call, "lower_bound", None)
    is_bounded = lower_bound is not None
    return lower_bound * torch.sigmoid(rate * logits) if is_bounded else -rate * functional.softplus(logits)


def _read_two_gates(call: Any, hold: Hold) -> Reading:
    """Read GDN-2: S_t = (I - k (b * k)^T) diag(e^g) S_{t-1} + k (w * v)^T, with a gate per key and one per value.

    The equation of flash-linear-attention's layer GatedDeltaNet2, github.com/NVlabs/GatedDeltaNet-2.
    """
    query, key, value, erase, write = widen_tensors(call.q, call.k, call.v, call.b, call.w)
    if getattr(call, "use_qk_l2norm_in_kernel", False):
        query, key = unit_norm(query), unit_norm(key)
    key, decay = hold(key), hold(_log_decay(call, query, value).to(query.dtype))
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(decay[..., None],),
        write=(key[..., None], (hold(write) * value)[..., None, :]),
        read=hold(_scaled_query(call, query))[..., None],
        right=(hold(erase) * key)[..., None],
        contracted=-2,
        initial=_initial_state(call),
    )
    return _fla_reading(call, cell, call.v.dtype)


def _read_rwkv7(call: Any, hold: Hold) -> Reading:
    """Read RWKV-7: S_t = (diag(e^w) + b a^T) S_{t-1} + k v^T; Peng et al. 2025, arXiv:2503.14456, eq. 17."""
    removed, added = (-call.kk, call.kk * call.a) if hasattr(call, "kk") else (call.a, call.b)
    read, decay, key, value, removed, added = widen_tensors(call.r, call.w, call.k, call.v, removed, added)
    decay = hold(decay)
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(decay[..., None],),
        write=(hold(key)[..., None], value[..., None, :]),
        read=hold(_scaled_query(call, read))[..., None],
        left=-hold(added)[..., None],
        right=(hold(removed) * torch.exp(-decay))[..., None],
        contracted=-2,
        initial=_initial_state(call),
    )
    return _fla_reading(call, cell, call.v.dtype)


def _hidden_units(layer: Any) -> tuple[int]:
    """Return the units of a minGRU or minLSTM, whose first layer makes two or three numbers for each."""
    for name, parts in (("to_hidden_and_gate", 2), ("to_hidden_and_f_i_gate", 3)):
        if hasattr(layer, name):
            return (getattr(layer, name).out_features // parts,)
    return (0,)


def _is_one_way(layer: Any) -> bool:
    return not layer.seq.bidir


_KEYS = (("num_v_heads", "num_heads"), ("head_k_dim", "head_f_dim", "head_dim"), ("head_v_dim", "head_i_dim"))
_STATE = ("head", "key", "value")
_GLA = Family("gla", _STATE, _KEYS, _read_gated_attention)
_DELTA = Family("delta", _STATE, _KEYS, _read_delta_attention)
_GATED_DELTA = Family("gated_delta", _STATE, _KEYS, _read_delta_attention)
_KDA = Family("kimi_delta", _STATE, _KEYS, _read_delta_attention)
_RWKV7 = Family("rwkv7", _STATE, _KEYS, _read_rwkv7)
_GDN2 = Family("gdn2", _STATE, _KEYS, _read_two_gates, arguments=frozenset({"b", "w"}))

#: Families by the name of their scan function in the module of a layer.
FUNCTIONS = {
    "heinsen_associative_scan_log": Family("log_scan", ("channel",), _hidden_units, _read_log_scan),
    **dict.fromkeys(("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"), _GLA),
    **dict.fromkeys(("chunk_simple_gla", "fused_recurrent_simple_gla"), _GLA),
    **dict.fromkeys(("chunk_delta_rule", "fused_recurrent_delta_rule"), _DELTA),
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), _GATED_DELTA),
    **dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), _KDA),
    **dict.fromkeys(("chunk_rwkv7", "fused_mul_recurrent_rwkv7"), _RWKV7),
    **dict.fromkeys(("chunk_gdn2", "fused_recurrent_gdn2"), _GDN2),
}

_MAMBA = Family(
    "mamba",
    ("channel", "state_unit"),
    (("d_inner",), ("d_state",)),
    _read_plain_selective_scan,
    arguments=frozenset({"delta", "A", "B", "C", "D"}),
)
#: Families by the name of the method that is their scan.
METHODS = {"selective_scan": _MAMBA, "selective_scan_seq": _MAMBA}


#: Families by module and name of the layer's class, whose ``forward`` has the scan inside.
LAYERS = {
    "xlstm.blocks.mlstm.cell.mLSTMCell": Family(
        "mlstm",
        _STATE,
        lambda cell: (n := cell.config.num_heads, d := cell.config.embedding_dim // n, d + 1),
        _read_parallel_memory,
    ),
    "s5.s5_model.S5": Family(
        "s5", ("state_unit",), lambda layer: (len(layer.seq.Lambda),), _read_s5, is_read=_is_one_way
    ),
    "LRU_pytorch.LRU.LRU": Family("lru", ("state_unit",), lambda layer: (len(layer.nu_log),), _read_lru),
}
