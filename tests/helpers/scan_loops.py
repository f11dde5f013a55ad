"""Loops of whole-sequence layers, written from their papers, and a recorder of the arguments of a model's scan calls.

The loops share no code with the package: they read the arguments of the model's scan function by name and return the
states, a list with one tensor per step, and the outputs (sample, time, ...).
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

from rnnlens.adapters.torch.scan_families import scans_of, sequence_modules


def mamba(a):
    dt = a["dt"] if a["delta_bias"] is None else a["dt"] + a["delta_bias"][..., None]
    dt = functional.softplus(dt) if a["delta_softplus"] else dt
    x, state, states, out = a["hidden_states"], 0.0, [], []
    for t in range(x.shape[2]):
        decay = torch.exp(dt[:, :, t, None] * a["A"])
        state = decay * state + (dt[:, :, t] * x[:, :, t])[..., None] * a["B"][:, None, :, t]
        states.append(state)
        out.append(torch.einsum("ben,bn->be", state, a["C"][:, :, t]))
    return states, torch.stack(out, 1)


def mamba2(a):
    dt = a["dt"] if a["dt_bias"] is None else a["dt"] + a["dt_bias"]
    dt = (functional.softplus(dt) if a["dt_softplus"] else dt).clamp(*a["dt_limit"])
    x, state, states, out = a["hidden_states"], 0.0, [], []
    group = torch.arange(x.shape[2]) // (x.shape[2] // a["B"].shape[2])
    for t in range(x.shape[1]):
        update = torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], a["B"][:, t, group])
        state = torch.exp(dt[:, t] * a["A"])[..., None, None] * state + update
        states.append(state)
        out.append(torch.einsum("bhpn,bhn->bhp", state, a["C"][:, t, group]))
    return states, torch.stack(out, 1)


def delta(a):
    heads = torch.arange(a["value"].shape[2]) // (a["value"].shape[2] // a["key"].shape[2])
    q, k, v = a["query"][:, :, heads], a["key"][:, :, heads], a["value"]
    if a["use_qk_l2norm_in_kernel"]:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, states, out = torch.zeros((), dtype=v.dtype), [], []
    for t in range(v.shape[1]):
        decay = a["g"][:, t].exp()
        decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
        state = decay * (state + torch.zeros(*k[:, t].shape, v.shape[-1], dtype=v.dtype))
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], a["beta"][:, t, :, None] * error)
        states.append(state)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] / k.shape[-1] ** 0.5))
    return states, torch.stack(out, 1)


def rg_lru(a):
    state, states = torch.zeros_like(a["hidden_states"][:, 0]), []
    for t in range(a["hidden_states"].shape[1]):
        state = torch.where(a["reset"][:, t], 0.0, a["recurrent_gate"][:, t] * state) + a["hidden_states"][:, t]
        states.append(state)
    return states, torch.stack(states, 1)


def rwkv(a):
    """Return states (numerator, denominator) and outputs, relative to the running maximum as in the model's cache."""
    rate, key = -torch.exp(a["time_decay"]), a["key"]
    last_max, state, states = torch.full_like(key[:, 0], -1e38), 0.0, []
    for t in range(key.shape[1]):
        new_max = torch.maximum(last_max + rate, key[:, t]).detach()
        update = torch.exp(key[:, t] - new_max)[..., None] * torch.stack(
            [a["value"][:, t], torch.ones_like(key[:, t])], -1
        )
        state = torch.exp(last_max + rate - new_max)[..., None] * state + update
        states.append(state)
        last_max = new_max
    return states, torch.stack(states, 1)


def mlstm(a):
    """Return states with matrix and normaliser side by side, and outputs, relative to the running maximum."""
    q, k, v = (a[name].transpose(1, 2) for name in ("query", "key", "value"))
    input_gate, log_forget = a["igate"].transpose(1, 2), functional.logsigmoid(a["fgate"]).transpose(1, 2)
    last_max, state, states, out = torch.zeros_like(input_gate[:, 0]), 0.0, [], []
    for t in range(q.shape[1]):
        new_max = torch.maximum(log_forget[:, t] + last_max, input_gate[:, t])
        values = torch.cat([v[:, t], torch.ones_like(v[:, t, :, :1])], -1)
        update = torch.exp(input_gate[:, t] - new_max)[..., None, None] * k[:, t, :, :, None] * values[:, :, None]
        state = torch.exp(log_forget[:, t] + last_max - new_max)[..., None, None] * state + update
        states.append(state)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] / k.shape[-1] ** 0.5))
        last_max = new_max
    return states, torch.stack(out, 1)


def lightning(a):
    layer, x = a["self"], a["hidden_states"]
    qkv = layer.act_fn(layer.qkv_proj(x)).reshape(*x.shape[:2], layer.num_attention_heads, 3, layer.head_dim)
    q, k, v = qkv.unbind(3)
    state, states, out = 0.0, [], []
    for t in range(x.shape[1]):
        state = torch.exp(-layer.slope_rate) * state + k[:, t, :, :, None] * v[:, t, :, None]
        states.append(state)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return states, torch.stack(out, 1)


LOOPS = {"mamba": mamba, "mamba2": mamba2, "gated_delta": delta, "kimi_delta": delta, "rg_lru": rg_lru}
LOOPS |= {"rwkv": rwkv, "mlstm": mlstm, "lightning": lightning}


@contextmanager
def record_arguments(model):
    """Record the arguments of every call of the model's own scan functions, by name, in the order of the calls."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, _ in dict.fromkeys(
            scan for _, m, _ in sequence_modules(list(model.named_modules())) for scan in scans_of(type(m))
        ):
            patch.setattr(owner, name, record_calls(getattr(owner, name), calls))
        yield calls


def record_calls(original, calls):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in bound.arguments.items()})
        return original(*args, **kwargs)

    return wrapper


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
