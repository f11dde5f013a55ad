"""Recurrences whose gradient :func:`~rnnlens.testing.scan_gradients.verify` knows: arguments, drawn values, equations.

Each is a :class:`~rnnlens.recurrence.sequence.SequenceCell` of NumPy arrays in float64, and the chain rule from the
gradients of its parts to those of the arguments. Values are drawn so that errors show: decays lie between 0.9 and
0.9999, so that gradients reach every step, and samples, heads and steps all differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..recurrence.sequence import SequenceCell

Arrays = dict[str, Any]

#: Sizes of the axes of drawn arguments, besides time.
SIZES = {"sample": 3, "head": 2, "key": 8, "value": 4, "unit": 5, "state": 4}


@dataclass(frozen=True)
class Recurrence:
    """One recurrence: names of its arguments, drawn values, its cell, and the chain rule to the arguments.

    ``draw(rng, steps, sizes)`` returns the arguments; ``cell(arguments, initial)`` the cell; ``pull(arguments, parts)``
    the gradients of the arguments from those of the cell's parts.
    """

    arguments: tuple[str, ...]
    draw: Callable[[Any, int, Mapping[str, int]], Arrays]
    cell: Callable[[Any, Any], SequenceCell]
    pull: Callable[[Any, Any], Arrays]


def _log_decays(rng: Any, *shape: int) -> Any:
    return -(10.0 ** rng.uniform(-4, -1, shape))


def _unit_vectors(rng: Any, *shape: int) -> Any:
    vectors = rng.normal(size=shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _draw_diagonal(rng: Any, steps: int, n: Mapping[str, int]) -> Arrays:
    shape = (n["sample"], steps, n["unit"])
    return {"a": np.exp(_log_decays(rng, *shape)), "b": rng.normal(size=shape)}


def _draw_complex(rng: Any, steps: int, n: Mapping[str, int]) -> Arrays:
    shape = (n["sample"], steps, n["unit"])
    angles, imaginary = rng.uniform(-np.pi, np.pi, shape), rng.normal(size=shape)
    return {
        "a": np.exp(_log_decays(rng, *shape) + 1j * angles),
        "b": rng.normal(size=shape) + 1j * imaginary,
    }


def _diagonal_cell(v: Any, initial: Any) -> SequenceCell:
    return SequenceCell(("unit",), (v["a"],), (v["b"],), logarithmic=False, initial=initial)


def _draw_attention(rng: Any, steps: int, n: Mapping[str, int], *, per_key: bool) -> Arrays:
    heads, keys = (n["sample"], steps, n["head"]), n["key"]
    decay_shape = (*heads, keys) if per_key else heads
    return {
        "q": rng.normal(size=(*heads, keys)),
        "k": _unit_vectors(rng, *heads, keys),
        "v": rng.normal(size=(*heads, n["value"])),
        "g": _log_decays(rng, *decay_shape),
    }


def _matrix_cell(v: Any, initial: Any, write: Any, **vectors: Any) -> SequenceCell:
    decay = v["g"][..., None] if v["g"].ndim == 4 else v["g"][..., None, None]
    read = v["q"][..., None] * v["q"].shape[-1] ** -0.5
    parts = {"read": read, "contracted": -2, "initial": initial, **vectors}
    return SequenceCell(("head", "key", "value"), (decay,), (write, v["v"][..., None, :]), **parts)


def _pull_matrix(v: Any, parts: Any) -> Arrays:
    decay = parts["decay_0"][..., 0]
    return {
        "q": parts["read"][..., 0] * v["q"].shape[-1] ** -0.5,
        "k": parts["write_0"][..., 0],
        "v": parts["write_1"][..., 0, :],
        "g": decay if v["g"].ndim == 4 else decay[..., 0],
    }


def _draw_delta(rng: Any, steps: int, n: Mapping[str, int], *, per_key: bool) -> Arrays:
    arguments = _draw_attention(rng, steps, n, per_key=per_key)
    return arguments | {"beta": rng.uniform(0.05, 0.95, (n["sample"], steps, n["head"]))}


def _delta_cell(v: Any, initial: Any) -> SequenceCell:
    write = (v["beta"][..., None] * v["k"])[..., None]
    return _matrix_cell(v, initial, write, left=write, right=v["k"][..., None])


def _pull_delta(v: Any, parts: Any) -> Arrays:
    write = (parts["write_0"] + parts["left"])[..., 0]
    keys = v["beta"][..., None] * write + parts["right"][..., 0]
    return _pull_matrix(v, parts) | {"k": keys, "beta": (write * v["k"]).sum(-1)}


def _draw_selective(rng: Any, steps: int, n: Mapping[str, int]) -> Arrays:
    channels, states = n["unit"], n["state"]
    return {
        "x": rng.normal(size=(n["sample"], steps, channels)),
        "dt": 10.0 ** rng.uniform(-3, -1, (n["sample"], steps, channels)),
        "A": -rng.uniform(0.1, 1.0, (channels, states)),
        "B": rng.normal(size=(n["sample"], steps, states)),
        "C": rng.normal(size=(n["sample"], steps, states)),
    }


def _selective_cell(v: Any, initial: Any) -> SequenceCell:
    write, read = v["B"][:, :, None], v["C"][:, :, None]
    decay = (v["dt"][..., None], v["A"][None, None])
    return SequenceCell(("channel", "state"), decay, ((v["dt"] * v["x"])[..., None], write), read=read, initial=initial)


def _pull_selective(v: Any, parts: Any) -> Arrays:
    write = parts["write_0"][..., 0]
    return {
        "x": write * v["dt"],
        "dt": parts["decay_0"][..., 0] + write * v["x"],
        "A": parts["decay_1"][0, 0],
        "B": parts["write_1"][:, :, 0],
        "C": parts["read"][:, :, 0],
    }


def _draw_rwkv(rng: Any, steps: int, n: Mapping[str, int]) -> Arrays:
    v = _draw_attention(rng, steps, n, per_key=True)
    removal = _unit_vectors(rng, n["sample"], steps, n["head"], n["key"])
    rate = rng.uniform(0.05, 0.95, (n["sample"], steps, n["head"], n["key"]))
    write = rng.normal(size=v["k"].shape)
    return {"r": v["q"], "w": v["g"], "k": write, "v": v["v"], "a": -removal, "b": removal * rate}


def _rwkv_cell(v: Any, initial: Any) -> SequenceCell:
    return SequenceCell(
        ("head", "key", "value"),
        (v["w"][..., None],),
        (v["k"][..., None], v["v"][..., None, :]),
        read=v["r"][..., None],
        left=-v["b"][..., None],
        right=(v["a"] * np.exp(-v["w"]))[..., None],
        contracted=-2,
        initial=initial,
    )


def _pull_rwkv(v: Any, parts: Any) -> Arrays:
    right, factor = parts["right"][..., 0], np.exp(-v["w"])
    return {
        "r": parts["read"][..., 0],
        "w": parts["decay_0"][..., 0] - right * v["a"] * factor,
        "k": parts["write_0"][..., 0],
        "v": parts["write_1"][..., 0, :],
        "a": right * factor,
        "b": -parts["left"][..., 0],
    }


def _linear_cell(v: Any, initial: Any) -> SequenceCell:
    return _matrix_cell(v, initial, v["k"][..., None])


def _pull_diagonal(_: Any, parts: Any) -> Arrays:
    return {"a": parts["decay_0"], "b": parts["write_0"]}


def _per_head(draw: Any) -> Any:
    return lambda rng, steps, n: draw(rng, steps, n, per_key=False)


def _per_key(draw: Any) -> Any:
    return lambda rng, steps, n: draw(rng, steps, n, per_key=True)


#: Recurrences by name. References: diagonal: arXiv:2303.06349; selective_scan: arXiv:2312.00752; ssd: arXiv:2405.21060;
#: gla: arXiv:2312.06635; gated_delta: arXiv:2412.06464; kda: arXiv:2510.26692; rwkv7: arXiv:2503.14456.
RECURRENCES = {
    "diagonal": Recurrence(("a", "b"), _draw_diagonal, _diagonal_cell, _pull_diagonal),
    "complex_diagonal": Recurrence(("a", "b"), _draw_complex, _diagonal_cell, _pull_diagonal),
    "selective_scan": Recurrence(("x", "dt", "A", "B", "C"), _draw_selective, _selective_cell, _pull_selective),
    "ssd": Recurrence(("q", "k", "v", "g"), _per_head(_draw_attention), _linear_cell, _pull_matrix),
    "gla": Recurrence(("q", "k", "v", "g"), _per_key(_draw_attention), _linear_cell, _pull_matrix),
    "gated_delta": Recurrence(("q", "k", "v", "g", "beta"), _per_head(_draw_delta), _delta_cell, _pull_delta),
    "kda": Recurrence(("q", "k", "v", "g", "beta"), _per_key(_draw_delta), _delta_cell, _pull_delta),
    "rwkv7": Recurrence(("r", "w", "k", "v", "a", "b"), _draw_rwkv, _rwkv_cell, _pull_rwkv),
}
