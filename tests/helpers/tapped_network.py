"""A small recurrent network written step by step, with a zero added at every tensor that rnnlens names.

The gradient with respect to an added zero is the gradient with respect to the tensor, which any framework's autodiff
computes. conv1d (causal, tanh) -> lstm -> bidirectional gru -> simple rnn -> head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

B, T, F, C, H, G, R, OUT = 3, 5, 2, 4, 3, 2, 3, 2

#: Weights in rnnlens' layout: gates on an axis of their own, directions first.
WEIGHTS = {
    "conv1d/kernel": (2, F, C),
    "conv1d/bias": (C,),
    "lstm/kernel": (C, 4, H),
    "lstm/recurrent_kernel": (H, 4, H),
    "lstm/bias": (4, H),
    "gru/kernel": (2, H, 3, G),
    "gru/recurrent_kernel": (2, G, 3, G),
    "gru/bias": (2, 3, G),
    "gru/recurrent_bias": (2, 3, G),
    "rnn/kernel": (2 * G, 1, R),
    "rnn/recurrent_kernel": (R, 1, R),
    "rnn/bias": (1, R),
    "head/kernel": (R, OUT),
    "head/bias": (OUT,),
}

TAPS = {
    "input": (B, T, F),
    "conv1d.output": (B, T, C),
    "lstm.input": (B, T, C),
    "lstm.initial_hidden": (B, H),
    "lstm.initial_cell": (B, H),
    "lstm.gate_preactivation": (B, T, 4, H),
    "lstm.gates": (B, T, 4, H),
    "lstm.cell": (B, T, H),
    "lstm.hidden": (B, T, H),
    "lstm.final_hidden": (B, H),
    "lstm.final_cell": (B, H),
    "lstm.output": (B, T, H),
    "gru.input": (B, T, H),
    "gru.initial_hidden": (B, 2, G),
    "gru.gate_preactivation": (B, T, 2, 3, G),
    "gru.gates": (B, T, 2, 3, G),
    "gru.hidden": (B, T, 2, G),
    "gru.final_hidden": (B, 2, G),
    "gru.output": (B, T, 2, G),
    "rnn.input": (B, T, 2 * G),
    "rnn.initial_hidden": (B, R),
    "rnn.gate_preactivation": (B, T, 1, R),
    "rnn.gates": (B, T, 1, R),
    "rnn.hidden": (B, T, R),
    "rnn.final_hidden": (B, R),
    "rnn.output": (B, R),
    "head.input": (B, R),
    "head.output": (B, OUT),
    "output": (B, OUT),
}

#: Names of all tensors whose gradients can be computed (``of=``).
TARGETS = (
    "loss",
    "output",
    "conv1d.output",
    "lstm.output",
    "lstm.hidden",
    "lstm.cell",
    "lstm.final_hidden",
    "lstm.final_cell",
    "gru.output",
    "gru.hidden",
    "gru.final_hidden",
    "rnn.output",
    "rnn.hidden",
    "rnn.final_hidden",
    "head.output",
)


def random_arrays(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}


def zero_taps(*, return_sequences: bool = False) -> dict[str, np.ndarray]:
    """Return one zero array per tap; with ``return_sequences`` the last recurrent layer returns all of its steps."""
    shapes = {**TAPS, "rnn.output": (B, T, R)} if return_sequences else TAPS
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def run_network(
    p: dict[str, Any],
    e: dict[str, Any],
    x: Any,
    y: Any,
    ops: Any,
    mask: np.ndarray | None = None,
    holds_initial_state: bool = True,
) -> dict[str, Any]:
    """Return all tensors by name, from weights ``p`` and zeros ``e``.

    ``ops`` has tensor, tanh, sigmoid, mean, stack(list, axis) and concat(list, axis). ``holds_initial_state``: before
    the first real step a layer outputs its initial state (Keras on JAX), not zeros (Keras on TensorFlow and torch).
    """
    out: dict[str, Any] = {}
    started = None if mask is None else ops.tensor((np.cumsum(mask, axis=1) > 0).astype("float64"))
    mask = None if mask is None else ops.tensor(mask.astype("float64"))
    x = x + e["input"]
    previous = ops.concat([x[:, :1] * 0, x[:, :-1]], 1)
    conv = ops.tanh(previous @ p["conv1d/kernel"][0] + x @ p["conv1d/kernel"][1] + p["conv1d/bias"])
    out["conv1d.output"] = conv + e["conv1d.output"]
    out |= _lstm(p, e, out["conv1d.output"], ops, mask)
    if started is not None and not holds_initial_state:
        out["lstm.output"] = out["lstm.hidden"] * started[:, :, None] + e["lstm.output"]
    out |= _gru(p, e, out["lstm.output"], ops, mask)
    gru_output = out["gru.output"]
    out |= _rnn(p, e, ops.concat([gru_output[:, :, 0], gru_output[:, :, 1]], 2), ops, mask)
    last = out["rnn.output"] if len(e["rnn.output"].shape) == 2 else out["rnn.output"][:, -1]
    head = (last + e["head.input"]) @ p["head/kernel"] + p["head/bias"]
    out["head.output"] = head + e["head.output"]
    out["output"] = out["head.output"] + e["output"]
    out["loss"] = ops.mean((out["output"] - y) ** 2)
    return out


def _carry(mask: Any, t: int, new: Any, old: Any) -> Any:
    if mask is None:
        return new
    unmasked = mask[:, t, None]
    return new * unmasked + old * (1 - unmasked)


def _lstm(p: Any, e: Any, x: Any, ops: Any, mask: Any) -> dict[str, Any]:
    x = x + e["lstm.input"]
    h, c = e["lstm.initial_hidden"], e["lstm.initial_cell"]
    hs, cs = [], []
    for t in range(T):
        z = [
            x[:, t] @ p["lstm/kernel"][:, k] + h @ p["lstm/recurrent_kernel"][:, k] + p["lstm/bias"][k]
            for k in range(4)
        ]
        z = [z[k] + e["lstm.gate_preactivation"][:, t, k] for k in range(4)]
        i, f, g, o = ((ops.tanh if k == 2 else ops.sigmoid)(z[k]) + e["lstm.gates"][:, t, k] for k in range(4))
        last = t == T - 1
        new_c = f * c + i * g + e["lstm.cell"][:, t] + (e["lstm.final_cell"] if last else 0)
        new_h = o * ops.tanh(new_c)
        if mask is not None:
            # A masked step carries the state over; a zero added to the step is added to the carried state.
            carried_c = c + e["lstm.cell"][:, t] + (e["lstm.final_cell"] if last else 0)
            new_c, new_h = _carry(mask, t, new_c, carried_c), _carry(mask, t, new_h, h)
        c, h = new_c, new_h + e["lstm.hidden"][:, t] + (e["lstm.final_hidden"] if last else 0)
        hs.append(h)
        cs.append(c)
    hidden = ops.stack(hs, 1)
    return {
        "lstm.hidden": hidden,
        "lstm.cell": ops.stack(cs, 1),
        "lstm.final_hidden": h,
        "lstm.final_cell": c,
        "lstm.output": hidden + e["lstm.output"],
    }


def _gru(p: Any, e: Any, x: Any, ops: Any, mask: Any) -> dict[str, Any]:
    x = x + e["gru.input"]
    directions, finals = [], []
    for d, order in enumerate((range(T), range(T - 1, -1, -1))):
        w, u = p["gru/kernel"][d], p["gru/recurrent_kernel"][d]
        b, v = p["gru/bias"][d], p["gru/recurrent_bias"][d]
        h = e["gru.initial_hidden"][:, d]
        states: dict[int, Any] = {}
        for t in order:
            ez, eg = e["gru.gate_preactivation"][:, t, d], e["gru.gates"][:, t, d]
            z, r = (ops.sigmoid(x[:, t] @ w[:, k] + b[k] + h @ u[:, k] + v[k] + ez[:, k]) + eg[:, k] for k in range(2))
            n = ops.tanh(x[:, t] @ w[:, 2] + b[2] + r * (h @ u[:, 2] + v[2]) + ez[:, 2]) + eg[:, 2]
            h = _carry(mask, t, z * h + (1 - z) * n, h) + e["gru.hidden"][:, t, d]
            h = h + (e["gru.final_hidden"][:, d] if t == order[-1] else 0)
            states[t] = h
        directions.append(ops.stack([states[t] for t in range(T)], 1))
        finals.append(h)
    hidden = ops.stack(directions, 2)
    # Keras' bidirectional layers output zeros at masked steps, not the carried state.
    output = hidden if mask is None else hidden * mask[:, :, None, None]
    return {"gru.hidden": hidden, "gru.final_hidden": ops.stack(finals, 1), "gru.output": output + e["gru.output"]}


def _rnn(p: Any, e: Any, x: Any, ops: Any, mask: Any) -> dict[str, Any]:
    x = x + e["rnn.input"]
    h, states = e["rnn.initial_hidden"], []
    for t in range(T):
        z = x[:, t] @ p["rnn/kernel"][:, 0] + h @ p["rnn/recurrent_kernel"][:, 0] + p["rnn/bias"][0]
        new = ops.tanh(z + e["rnn.gate_preactivation"][:, t, 0]) + e["rnn.gates"][:, t, 0]
        h = _carry(mask, t, new, h) + e["rnn.hidden"][:, t] + (e["rnn.final_hidden"] if t == T - 1 else 0)
        states.append(h)
    hidden = ops.stack(states, 1)
    output = (hidden if len(e["rnn.output"].shape) == 3 else h) + e["rnn.output"]
    return {"rnn.hidden": hidden, "rnn.final_hidden": h, "rnn.output": output}
