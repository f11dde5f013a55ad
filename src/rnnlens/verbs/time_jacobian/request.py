"""The request of ``rl.jacobian``: names and options, resolved and checked once; its two ends, their steps and rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from ...adapters.protocol import Batch, Port
from ...autodiff.tensors import dtype_name
from ...errors import InputError, UnsupportedError
from ...recurrence.reductions import REDUCTIONS, probe_signs, sketch_statistics
from ...results.schema import to_host
from ...settings import must_fit
from ...typing import Array, arrays_of
from ...vocabulary import IN_TIME, OUT_TIME
from ..names import TensorName, names_behind_ids, read_one
from ..recurrent_layers import ReplayedCall
from ..request import ModelRequest


@dataclass(frozen=True)
class JacobianOptions:
    """Options of a time Jacobian, as the arguments of ``rl.jacobian``; ``memory`` in bytes."""

    memory: int
    at: Mapping[str, Any] = field(default_factory=dict)
    reduce: Any = None
    measure: str | None = None
    across: str | None = None
    sketch: int | None = None
    rtol: float | None = None
    mode: str = "auto"
    out: str | PathLike[str] | None = None

    @property
    def kind(self) -> Hashable:
        """Value that is equal for options of which one certificate answers for all; steps and weights may differ."""
        contracted = self.reduce if isinstance(self.reduce, str | None) else np.shape(self.reduce)
        further = (self.across, self.sketch, self.rtol, self.mode, self.memory, self.out is None)
        return (tuple(self.at), contracted, self.measure, *further)

    def __post_init__(self) -> None:
        """Raise an error for options that cannot be combined with ``sketch``."""
        if self.sketch is None:
            return
        if self.measure not in (None, "norm") or self.reduce is not None:
            got = f"measure={self.measure!r}" if self.reduce is None else "reduce="
            raise InputError("A sketch estimates the norm over all units.", got=got, expected='measure="norm"')
        if self.mode == "forward":
            raise InputError("A sketch is pulled back.", got='mode="forward"', expected='"auto" or "reverse"')
        if self.out is not None:
            message = "A sketch cannot be written in chunks."
            raise InputError(message, got="sketch= and out=", hint="save it")


@dataclass(frozen=True)
class JacobianRequest(ModelRequest):
    """A time Jacobian to compute: model, batch, the two ends by name, and options."""

    #: Names of the upper and the lower end, valid for a time Jacobian.
    of: TensorName
    wrt: TensorName
    options: JacobianOptions


def read_request(
    model: Any, batch: Batch, end_names: tuple[str, str], options: JacobianOptions, axes: Mapping[str, Any] | None
) -> JacobianRequest:
    """Resolve the names of the two ends on the model, and check all arguments that need no run."""
    resolved = ModelRequest.resolve(model, batch, axes, end_names)
    of, wrt = (read_one(text, resolved.catalogue) for text in end_names)
    for role, name in (("of", of), ("wrt", wrt)):
        if name.kind not in _ENDS[role]:
            hint = "rl.gradients differentiates the loss, and by weights and gates"
            message = f"{role}={name.text!r} has no time Jacobian."
            raise UnsupportedError(message, expected=_EXAMPLES[role], hint=hint)
    integer_kind = integer_dtype(wrt, batch)
    if integer_kind is not None:
        alternatives = names_behind_ids(resolved.adapter, model, batch, resolved.catalogue)
        hint = " or ".join(f'wrt="{name}"' for name in alternatives) or 'x.astype("float32")'
        got = f"{wrt.text} of dtype {integer_kind}"
        raise InputError("Integers have no derivative.", got=got, expected="floats", hint=hint)
    if batch.frozen and not resolved.catalogue.sequences:
        message = "frozen=True holds the coefficients of whole-sequence layers, and this model has none."
        raise InputError(message, got=type(model).__name__, expected="a model with a layer of Mamba or a delta rule")
    return JacobianRequest(**vars(resolved), of=of, wrt=wrt, options=options)


_ENDS = {
    "of": ("output", "state", "final_state"),
    "wrt": ("input", "output", "state", "initial_state"),
}
_EXAMPLES = {
    "of": '"output", "lstm.output", "lstm.hidden", "lstm.cell" or "lstm.final_hidden"',
    "wrt": '"input", "embedding.output", "lstm.output", "lstm.hidden" or "lstm.initial_hidden"',
}


def integer_dtype(wrt: TensorName, batch: Batch) -> str | None:
    """Return the dtype of an input of the model that holds integers; None for any other tensor."""
    if wrt.kind != "input" or wrt.layer is not None:
        return None
    leaves = arrays_of(batch.x)
    if wrt.index >= len(leaves):
        raise InputError(f"The model has no {wrt.text}.", got=f"{len(leaves)} inputs")
    dtype = dtype_name(leaves[wrt.index])
    return None if "float" in dtype or "complex" in dtype else dtype


Reduce = Callable[[Array], Array]
Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class JacobianEnd:
    """One end of a time Jacobian: a state or output inside recurrences, or a tensor of the framework."""

    name: TensorName
    #: The recurrences that contain it, one for each direction; empty if it lies outside of all.
    within: tuple[ReplayedCall, ...]
    #: The port of its framework tensor; None inside a recurrence.
    port: Port | None
    #: Inside a recurrence: ``"state"``, ``"final_state"``, ``"initial_state"`` or ``"output"``, and the index of the
    #: state.
    kind: str
    state: int
    #: Size per step, and number of steps; None without a time axis.
    size: int
    times: int | None
    #: Names and lengths of the axes that are flattened to ``size``, outermost first, if it has channels and space.
    image: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class JacobianEnds:
    """The two ends of a time Jacobian, their steps, and the reductions."""

    of: JacobianEnd
    wrt: JacobianEnd
    #: Requested steps in the requested order; None without a time axis.
    out_times: list[int] | None
    in_times: list[int] | None
    #: (1, 1, row, unit) or None: combinations of the output units that the user requested.
    projection: Rows | None
    #: (sample or 1, time or 1, row, unit) or None: rows to pull back instead of single output units: the projection, or
    #: its contraction by a linear reduction.
    weights: Rows | None
    #: Name of the reduction; None for the whole matrix of every pair of steps.
    measure: str | None
    #: Number of random probes that estimate the norm; None for the exact value.
    sketch: int | None
    #: Whether to average over samples.
    average: bool

    @property
    def measured_by(self) -> Reduce | None:
        """Function that reduces a block (sample, group, out, in); None to keep it."""
        if self.sketch is not None:
            return sketch_statistics
        return None if self.measure is None else REDUCTIONS[self.measure]

    @property
    def tail(self) -> tuple[int, ...]:
        """Extra last axes of a reduced Jacobian: (2,) for a sketch, its estimate and variance; else ()."""
        return () if self.sketch is None else (2,)

    @property
    def rows(self) -> int:
        """Number of cotangent rows per output step: output units, or combinations of them."""
        return self.of.size if self.weights is None else int(self.weights.shape[2])

    @property
    def groups(self) -> int:
        """Number of output steps."""
        return 1 if self.out_times is None else len(self.out_times)

    @property
    def in_count(self) -> int:
        """Number of input steps."""
        return 1 if self.in_times is None else len(self.in_times)

    @property
    def rows_pulled(self) -> Rows:
        """Cotangent rows to pull back, (sample or 1, time or 1, row, unit); the identity without ``weights``."""
        return np.eye(self.of.size)[None, None] if self.weights is None else self.weights


def ends_of(of: JacobianEnd, wrt: JacobianEnd, options: JacobianOptions, samples: int) -> JacobianEnds:
    """Resolve the two ends of a Jacobian with the steps, rows and reductions that ``options`` request."""
    projection = None if options.reduce is None else _projection(options.reduce, of.size)
    measure = "norm" if options.sketch is not None else options.measure
    weights = projection
    if options.sketch is not None:
        bytes_per_probe = 2 * 8 * of.size * (of.times or 1) * samples
        message, limit = "The random probes of sketch= are larger than the memory limit.", options.memory
        hint = (
            f"sketch={max(2, min(100, limit // bytes_per_probe))}; without sketch= the norm is exact and often cheaper"
        )
        must_fit(message, options.sketch * bytes_per_probe, hint, got=f"sketch={options.sketch}: {{}}", limit=limit)
        weights = probe_signs(options.sketch, of.size, of.times or 1, samples, seed=0)
    elif measure in ("sum", "mean"):
        combine = np.sum if measure == "sum" else np.mean
        weights = _projection(measure, of.size) if projection is None else combine(projection, axis=2, keepdims=True)
    outs = _chosen_times(options.at, OUT_TIME, of.times)
    ins = _chosen_times(options.at, IN_TIME, wrt.times)
    return JacobianEnds(of, wrt, outs, ins, projection, weights, measure, options.sketch, options.across is not None)


def _projection(reduce: Any, size: int) -> Rows:
    """Return rows (1, 1, k, unit) that contract the output units before differentiation."""
    if isinstance(reduce, str):
        return np.full((1, 1, 1, size), 1.0 / size if reduce == "mean" else 1.0)
    matrix = np.atleast_2d(to_host(reduce))
    if matrix.ndim == 2 and matrix.shape[1] == size:
        matrix = matrix.astype(float)
    if matrix.ndim != 2 or matrix.shape[1] != size or not np.isfinite(matrix).all():
        raise InputError(
            "reduce= does not match the number of output units.",
            got=f"shape {np.shape(to_host(reduce))}",
            expected=f"({size},) or (k, {size}), finite",
        )
    rows: Rows = matrix[None, None]
    return rows


def _chosen_times(at: Mapping[str, Any], dim: str, count: int | None) -> list[int] | None:
    """Return the requested step indices; negative ones count from the end. None without a time axis."""
    times, argument = at.get(dim), f"at[{dim!r}]"
    if count is None:
        if times is not None:
            raise InputError(f"There is no {dim} to choose from: the tensor has no time axis.", got=f"at={dict(at)!r}")
        return None
    if times is None:
        return list(range(count))
    if isinstance(times, slice):
        steps = list(range(count))[times]
        if not steps:
            expected = f"some of the {count} steps from 0"
            raise InputError(f"{argument} names no steps.", got=repr(times), expected=expected)
        return steps
    time_list = [times] if isinstance(times, int) else list(times)
    if not all(-count <= t < count for t in time_list):
        raise InputError(f"{argument} names a step that does not exist.", got=repr(times), expected=f"0 to {count - 1}")
    steps = [t % count for t in time_list]
    if len(set(steps)) < len(steps):
        raise InputError(f"{argument} names a step twice.", got=repr(times))
    return steps
