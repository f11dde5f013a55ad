"""Scan functions in plain torch loops, right, and with mistakes of public kernels: values right, a gradient wrong.

A mistake is made by what autograd sees: ``with_gradient_of(value, other)`` has the value of the one and the gradient of
the other.
"""

from __future__ import annotations

import torch


def with_gradient_of(value, other):
    return value.detach() + other - other.detach()


def scaled_gradient(x, factor):
    return with_gradient_of(x, factor * x)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is reversed in time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(1)


def diagonal(a, b, initial=None, *, mistake="", chunk=8):
    state = torch.zeros_like(b[:, 0]) if initial is None else initial
    if mistake == "initial detached":
        state = state.detach()
    if mistake == "first row only":
        a, b = (torch.cat([x[:1], x[1:].detach()]) for x in (a, b))
    if mistake == "last chunk without gradient":
        whole = b.shape[1] // chunk * chunk
        b = torch.cat([b[:, :whole], b[:, whole:].detach()], 1) if whole else b
    if mistake == "decay reversed":
        a = Reversed.apply(a)
    if mistake == "negative":
        b = scaled_gradient(b, -1)
    states = []
    for t in range(b.shape[1]):
        if mistake == "truncated" and t and t % chunk == 0:
            state = state.detach()
        decay, previous = a[:, t], state
        if mistake == "decay detached":
            decay = decay.detach()
        state = decay * previous + b[:, t]
        if mistake == "a_t for a_{t+1}" and t:
            state = with_gradient_of(state, a[:, t - 1].detach() * previous + decay * previous.detach() + b[:, t])
        if mistake == "S_t for S_{t-1}":
            wrong = decay.detach() * previous + decay * state.detach() + b[:, t]
            state = with_gradient_of(state, wrong)
        states.append(state)
    return torch.stack(states, 1)


class WithoutConjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        states = diagonal(a, b)
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        a, states = ctx.saved_tensors
        total, totals = torch.zeros_like(grad[:, 0]), []
        for t in reversed(range(grad.shape[1])):
            total = grad[:, t] + total
            totals.append(total)
            total = a[:, t] * total
        totals = torch.stack(totals[::-1], 1)
        previous = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        return totals * previous.conj(), totals


def without_conjugate(a, b):
    return WithoutConjugate.apply(a, b)


def matrix(q, k, v, g, beta=None, initial=None, *, mistake="", chunk=8, last=False):
    """Gated linear attention, and with ``beta`` the gated delta rule."""
    decay = torch.exp(g)[..., None] if g.dim() == 4 else torch.exp(g)[..., None, None]
    if mistake == "decay detached":
        decay = decay.detach()
    if mistake == "scale missing":
        q = scaled_gradient(q, q.shape[-1] ** 0.5)
    if mistake == "read detached":
        q = q.detach()
    removed = k.detach() if mistake == "removal detached" else k
    rate = beta.detach() if mistake == "beta of the write only" else beta
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(q.shape[1]):
        if mistake == "truncated" and t and t % chunk == 0:
            state = state.detach()
        previous, state = state, decay[:, t] * state
        write = k[:, t] if beta is None else beta[:, t, :, None] * k[:, t]
        if beta is not None:
            left = (rate[:, t, :, None] * removed[:, t])[..., None]
            right = removed[:, t][..., None]
            carried = state - left * (right * state).sum(-2, keepdim=True)
            if mistake == "order":
                swapped = decay[:, t] * (previous - left * (right * previous).sum(-2, keepdim=True))
                carried = with_gradient_of(carried, swapped)
            state = carried
        written = write[..., None] * v[:, t, :, None, :]
        state = state + written
        y = (q[:, t][..., None] * state).sum(-2) * q.shape[-1] ** -0.5
        if mistake == "read reads S_{t-1}":
            read = q[:, t].detach()[..., None] * state + q[:, t][..., None] * previous.detach()
            y = with_gradient_of(y, read.sum(-2) * q.shape[-1] ** -0.5)
        outputs.append(y)
    y = torch.stack(outputs, 1)
    if mistake == "last state detached":
        state = state.detach()
    return (y, state) if last or mistake == "last state detached" else y


def selective(x, dt, A, B, C, *, mistake=""):
    if mistake == "A of one sample":
        rate = torch.cat([A[None], A.detach().expand(len(x) - 1, *A.shape)])
    elif mistake == "A averaged":
        rate = scaled_gradient(A, 1 / len(x))[None]
    else:
        rate = A[None]
    step = dt.detach() if mistake == "dt of the write detached" else dt
    drive = step * x
    state, outputs = x.new_zeros(*x.shape[:1], *A.shape), []
    for t in range(x.shape[1]):
        decay_step = dt[:, t].detach() if mistake == "dt of the decay detached" else dt[:, t]
        state = torch.exp(decay_step[..., None] * rate) * state + drive[:, t, :, None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def rwkv7(r, w, k, v, a, b, *, mistake=""):
    state, outputs = r.new_zeros(*r.shape[:1], *r.shape[2:], v.shape[-1]), []
    for t in range(r.shape[1]):
        removal = a[:, t].detach() if mistake == "a detached" else a[:, t]
        carried = (removal[..., None] * state).sum(-2, keepdim=True)
        if mistake == "state of the removal detached":
            carried = (removal[..., None] * state.detach()).sum(-2, keepdim=True)
        state = torch.exp(w[:, t])[..., None] * state + b[:, t][..., None] * carried
        state = state + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append((r[:, t][..., None] * state).sum(-2))
    return torch.stack(outputs, 1)


#: Right functions by recurrence.
RIGHT = {
    "diagonal": diagonal,
    "complex_diagonal": diagonal,
    "selective_scan": selective,
    "ssd": matrix,
    "gla": matrix,
    "gated_delta": matrix,
    "kda": matrix,
    "rwkv7": rwkv7,
}
