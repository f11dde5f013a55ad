"""Fused entries of mamba_ssm and the two gates of GDN-2, rebuilt here as loops of single steps on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import rnnlens as rl
from rnnlens.errors import ModelError, UnsupportedError

WIDTH, SIZE, STEPS, HEADS, GROUPS = 4, 3, 40, 4, 2
TAPS = []


def mamba_loop(u, delta, A, B, C, D, z, bias):
    """Run a Mamba of tensors (sample, channel, time), one step after the other; states go to ``TAPS``."""
    state, outputs = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        dt = functional.softplus(delta[:, :, t] + bias)
        state = torch.exp(dt[..., None] * A) * state + dt[..., None] * B(t) * u[:, :, t, None]
        TAPS.append(state)
        outputs.append((state * C(t)).sum(-1) + D * u[:, :, t])
    return torch.stack(outputs, 2) * functional.silu(z)


def convolve(x, weight, bias):
    """Convolve (sample, channel, time) with (channel, width) as a sum over the kernel, and apply SiLU."""
    width = weight.shape[1]
    shifted = [functional.pad(x, (width - 1 - k, 0))[:, :, : x.shape[2]] * weight[:, k, None] for k in range(width)]
    return functional.silu(sum(shifted) + bias[:, None])


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, cu_seqlens=None
):
    def at(coefficient):
        if coefficient.dim() == 2:
            return lambda t: coefficient
        if coefficient.dim() == 3:
            return lambda t: coefficient[:, None, :, t]
        return lambda t: coefficient[..., t].repeat_interleave(u.shape[1] // coefficient.shape[1], 1)

    assert delta_softplus
    return mamba_loop(u, delta, A, at(B), at(C), D, z, delta_bias)


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
    A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True,
    cu_seqlens=None, seq_idx=None,
):  # fmt: skip
    x, z = xz.split(xz.shape[1] // 2, 1)
    x = convolve(x, conv1d_weight[:, 0], conv1d_bias)
    parts = torch.einsum("rd,bdt->brt", x_proj_weight, x)
    rank = delta_proj_weight.shape[1]
    delta = torch.einsum("dr,brt->bdt", delta_proj_weight, parts[:, :rank])
    write, read = parts[:, rank : rank + SIZE], parts[:, rank + SIZE :]
    y = mamba_loop(x, delta, A, lambda t: write[:, None, :, t], lambda t: read[:, None, :, t], D, z, delta_bias)
    return y.transpose(1, 2) @ out_proj_weight.T + out_proj_bias


def mamba2_loop(x, dt, A, B, C, D, dt_bias):
    """Run a Mamba-2 of x (sample, time, head, channel) and B, C (sample, time, group, size), step by step."""
    samples, steps, heads, channels = x.shape
    state, outputs = x.new_zeros(samples, heads, channels, B.shape[-1]), []
    for t in range(steps):
        rate = functional.softplus(dt[:, t] + dt_bias)
        write, read = (c[:, t].repeat_interleave(heads // c.shape[2], 1) for c in (B, C))
        state = torch.exp(rate * A)[..., None, None] * state
        state = state + rate[..., None, None] * x[:, t, :, :, None] * write[:, :, None]
        TAPS.append(state)
        outputs.append((state * read[:, :, None]).sum(-1) + (D if D.dim() == 2 else D[:, None]) * x[:, t])
    return torch.stack(outputs, 1)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    y = mamba2_loop(x, dt, A, B, C, D, dt_bias)
    return y if z is None else y * functional.silu(z)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    channels = headdim or D.shape[1]
    width, mixed = HEADS * channels, conv1d_weight.shape[0]
    beside = (zxbcdt.shape[-1] - width - mixed - HEADS) // 2
    first, second, z, xbc, dt = zxbcdt.split([beside, beside, width, mixed, HEADS], -1)
    xbc = convolve(xbc.transpose(1, 2), conv1d_weight, conv1d_bias).transpose(1, 2)
    x, write, read = xbc[..., :width], *xbc[..., width:].chunk(2, -1)
    write, read = (c.unflatten(-1, (ngroups, SIZE)) for c in (write, read))
    y = mamba2_loop(x.unflatten(-1, (HEADS, channels)), dt, A, write, read, D, dt_bias).flatten(2)
    if rmsnorm_weight is None:
        y = y * functional.silu(z)
    else:
        y = y if norm_before_gate else y * functional.silu(z)
        parts = [p / (p.square().mean(-1, keepdim=True) + rmsnorm_eps).sqrt() for p in y.chunk(ngroups, -1)]
        y = torch.cat(parts, -1) * rmsnorm_weight
        y = y * functional.silu(z) if norm_before_gate else y
    return torch.cat([functional.silu(first) * second, y], -1) @ outproj_weight.T + outproj_bias


def chunk_gdn2(q, k, v, g, b, w, scale=None, initial_state=None, use_qk_l2norm_in_kernel=False, **options):
    if use_qk_l2norm_in_kernel:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    state, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = torch.exp(g[:, t, ..., None]) * state
        erased = torch.einsum("bhk,bhkv->bhv", b[:, t] * k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], w[:, t] * v[:, t] - erased)
        TAPS.append(state)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outputs, 1), None


class FusedMamba(nn.Module):
    d_inner, d_state = WIDTH, SIZE

    def __init__(self):
        super().__init__()
        shapes = {"in": (2 * WIDTH, 3), "conv": (WIDTH, 1, 4), "x": (2 + 2 * SIZE, WIDTH), "dt": (WIDTH, 2)}
        shapes |= {"out": (3, WIDTH), "rate": (WIDTH, SIZE), "c_bias": (WIDTH,), "o_bias": (3,), "skip": (WIDTH,)}
        shapes |= {"dt_bias": (WIDTH,)}
        self.w = nn.ParameterDict({name: nn.Parameter(0.5 * torch.randn(shape)) for name, shape in shapes.items()})

    def forward(self, x):
        w, xz = self.w, torch.einsum("ed,btd->bet", self.w["in"], x)
        weights = (w["conv"], w["c_bias"], w["x"], w["dt"], w["out"], w["o_bias"])
        rate = -torch.exp(w["rate"])
        return mamba_inner_fn(xz, *weights, rate, None, None, w["skip"], delta_bias=w["dt_bias"], delta_softplus=True)


class InterfaceMamba(FusedMamba):
    """The scan alone: B of each step and group, C constant or of each step."""

    def __init__(self, constant):
        super().__init__()
        self.constant, self.coefficients = constant, nn.Linear(3, (2 + 1) * SIZE)
        self.fixed = nn.Parameter(torch.randn(WIDTH, SIZE))

    def forward(self, x):
        w = self.w
        u, z = torch.einsum("ed,btd->bet", w["in"], x).chunk(2, 1)
        write, read = self.coefficients(x).split([2 * SIZE, SIZE], -1)
        write, read = write.transpose(1, 2).unflatten(1, (2, SIZE)), read.transpose(1, 2)
        read = self.fixed if self.constant else read
        options = {"z": z, "delta_bias": w["dt_bias"], "delta_softplus": True}
        return selective_scan_fn(u, u * 0.3, -torch.exp(w["rate"]), write, read, w["skip"], **options).transpose(1, 2)


class FusedMamba2(nn.Module):
    nheads, headdim, d_state = HEADS, 2, SIZE

    def __init__(self, *, norm=True, before=False, beside=0, by_channel=False, split=True):
        super().__init__()
        self.options, self.beside, self.split = {"norm_before_gate": before}, beside, split
        width, mixed = 2 * HEADS, 2 * HEADS + 2 * GROUPS * SIZE
        shapes = {"in": (2 * beside + width + mixed + HEADS, 3), "conv": (mixed, 4), "c_bias": (mixed,)}
        shapes |= {"dt_bias": (HEADS,), "rate": (HEADS,), "skip": (HEADS, 2) if by_channel else (HEADS,)}
        shapes |= {"out": (3, beside + width), "o_bias": (3,), **({"norm": (width,)} if norm else {})}
        self.w = nn.ParameterDict({name: nn.Parameter(0.5 * torch.randn(shape)) for name, shape in shapes.items()})
        self.headdim_option = None if by_channel else 2

    def forward(self, x):
        w = self.w
        rate = -torch.exp(w["rate"])
        parts = x @ w["in"].T
        if not self.split:
            z, x, write, read, dt = parts.split([2 * HEADS, 2 * HEADS, GROUPS * SIZE, GROUPS * SIZE, HEADS], -1)
            x, z = (t.unflatten(-1, (HEADS, 2)) for t in (x, z))
            write, read = (t.unflatten(-1, (GROUPS, SIZE)) for t in (write, read))
            options = {"D": w["skip"], "z": z, "dt_bias": w["dt_bias"], "dt_softplus": True}
            return mamba_chunk_scan_combined(x, dt, rate, write, read, chunk_size=8, **options).flatten(2)
        options = {"rmsnorm_weight": w.get("norm", None), "rmsnorm_eps": 1e-5, **self.options}
        options |= {"outproj_weight": w["out"], "outproj_bias": w["o_bias"], "headdim": self.headdim_option}
        weights = (w["conv"], w["c_bias"], w["dt_bias"], rate)
        return mamba_split_conv1d_scan_combined(parts, *weights, D=w["skip"], chunk_size=8, ngroups=GROUPS, **options)


class TwoGates(nn.Module):
    num_heads, head_k_dim, head_v_dim = 2, 3, 2

    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(3, 4 * 6 + 2 * 4)

    def forward(self, x):
        q, k, g, b, v, w = self.parts(x).split([6, 6, 6, 6, 4, 4], -1)
        q, k, g, b = (t.unflatten(-1, (2, 3)) for t in (q, k, g, b))
        v, w = (t.unflatten(-1, (2, 2)) for t in (v, w))
        gates = {"g": -functional.softplus(g), "b": 2 * b.sigmoid(), "w": w.sigmoid()}
        return chunk_gdn2(q=q, k=k, v=v, **gates, use_qk_l2norm_in_kernel=True)[0].flatten(2)


LAYERS = {
    "inner": FusedMamba,
    "interface, constant C": lambda: InterfaceMamba(True),
    "interface": lambda: InterfaceMamba(False),
    "split": FusedMamba2,
    "split, norm before the gate": lambda: FusedMamba2(before=True, beside=2),
    "split, no norm": lambda: FusedMamba2(norm=False, by_channel=True),
    "combined": lambda: FusedMamba2(split=False),
    "two gates": TwoGates,
}


def data():
    torch.manual_seed(0)
    return torch.randn(2, STEPS, 3, dtype=torch.float64)


@pytest.mark.product(keep=("inner", "split", "two gates"))
@pytest.mark.parametrize("name", LAYERS)
def test_states_and_gradients_are_those_of_single_steps(name):
    x = data()
    layer = LAYERS[name]().double()
    model = nn.Sequential(layer, nn.Tanh())
    (row,) = rl.layers(model)
    assert all(size > 0 for _, size in row.state_axes)

    def last_squares(output):
        return (output[:, -1] ** 2).sum()

    trace = rl.trace(model, x, loss=last_squares)
    assert trace.certificate.state == "passed"
    assert max(check.residual for check in trace.certificate.checks) <= 1e-12
    TAPS.clear()
    loss = last_squares(model(x))
    states = TAPS[:STEPS]
    grads = torch.autograd.grad(loss, states)
    for actual, expected in ((trace["0"].state, states), (trace["0"].state_grad, grads)):
        expected = torch.stack([t.detach() for t in expected], 1).numpy()
        np.testing.assert_allclose(actual, expected, atol=1e-12 * np.abs(expected).max())


def test_options_that_are_not_read_are_refused():
    class Packed(FusedMamba):
        def forward(self, x):
            weights = [self.w[name] for name in ("conv", "c_bias", "x", "dt", "out", "o_bias", "rate")]
            xz = torch.einsum("ed,btd->bet", self.w["in"], x)
            options = {"D": self.w["skip"], "delta_bias": self.w["dt_bias"], "seq_idx": torch.zeros(2, STEPS)}
            return mamba_inner_fn(xz, *weights, **options)

    with pytest.raises(UnsupportedError, match="seq_idx"):
        rl.trace(Packed().double(), data())


def mamba3_siso_combined(Q, K, V, **options):
    return V


class MambaThree(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x):
        return mamba3_siso_combined(Q=x, K=x, V=self.w(x))


def test_mamba_3_is_refused_by_name():
    with pytest.raises(ModelError, match=r"Mamba-3") as refusal:
        rl.trace(MambaThree().double(), data())
    assert "mamba3_siso_combined" in str(refusal.value)
    assert "rl.gradients by inputs and weights works unchanged" in str(refusal.value)
    assert float(abs(rl.gradients(MambaThree().double(), data(), loss=torch.sum, wrt="input")).max()) > 0
