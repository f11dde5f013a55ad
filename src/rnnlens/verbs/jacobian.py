"""``rl.jacobian``: which input step moved which output step, exactly, in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import numpy as np
import xarray as xr

from ..adapters.protocol import Adapter, Batch, CaptureRequest
from ..adapters.registry import adapter_for
from ..arguments import (
    anything,
    as_numbers,
    checked,
    kept_steps,
    memory,
    number,
    one_batch,
    one_of,
    path,
    seed,
    states,
    switch,
    text,
    whole,
)
from ..data import leaves_of
from ..errors import InputError, ModelError, TooLargeError, message
from ..recurrence.reductions import REDUCTIONS, probe_signs, sketched
from ..results.certificate import Certificate
from ..results.checks import coarser, warn_about
from ..results.jacobian import checks_of
from ..settings import current, format_memory, parse_memory
from .axes import Axes, an_axes_table
from .certify import wanted as asked_for
from .certify_jacobian import certify_jacobian
from .differentiation.question import repeatable
from .inside import Inside
from .jacobian_ends import resolve
from .jacobian_label import Labels, masks_of
from .jacobian_run import compute
from .jacobian_target import Swept, Tensor, chosen_times, look_inside, projection
from .jacobian_wanted import Ends
from .names import Catalogue, TensorName, catalogue, read_one, refuse_lone_output, with_named_outputs
from .turns import in_turn

__all__ = ["jacobian"]


def a_projection(name: str, value: Any) -> Any:
    """A word, or weights of the output units."""
    return one_of("mean", "sum")(name, value) if isinstance(value, str) else as_numbers(name, value)


@checked(
    model=anything,
    x=one_batch,
    of=text,
    wrt=text,
    out_times=kept_steps,
    in_times=kept_steps,
    project=a_projection,
    reduce=one_of(*REDUCTIONS),
    average=one_of("sample"),
    sketch=whole(least=2),
    rtol=number(least=0, below=1, what="is a share"),
    mode=one_of("auto", "forward", "reverse"),
    memory=memory,
    out=path,
    training=switch,
    initial_state=states,
    seed=seed,
    axes=an_axes_table,
)
@in_turn
def jacobian(
    model: Any,
    x: Any,
    *,
    of: str = "output",
    wrt: str = "input",
    out_times: int | Sequence[int] | slice | None = None,
    in_times: int | Sequence[int] | slice | None = None,
    project: Literal["mean", "sum"] | Any = None,
    reduce: Literal["norm", "spectral", "sum", "mean", "abs_mean"] | None = None,
    average: Literal["sample"] | None = None,
    sketch: int | None = None,
    rtol: float | None = None,
    mode: Literal["auto", "forward", "reverse"] = "auto",
    memory: str | int | None = None,
    out: str | PathLike[str] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> xr.DataArray:
    """Differentiate every output step by every input step.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module`` with at least one recurrent layer; left exactly as found.
    x
        One batch, as the model takes it.
    of
        What is differentiated: ``"output"``, ``"lstm.output"``, ``"lstm.hidden"``, ``"lstm.cell"``,
        ``"lstm.final_hidden"``, ``"dense.output"``.
    wrt
        By what: ``"input"``, ``"embedding.output"``, the output of any layer, ``"lstm.hidden"`` or ``"lstm.cell"``
        (state to state), ``"lstm.initial_hidden"``. A state counts as it is produced: a change of c_t also reaches h_t.
    out_times, in_times
        Steps to look at, chronological from 0; negative ones count from the end. All by default.
    project
        Contract the output units before differentiation: ``"mean"``, ``"sum"``, a vector (unit,) or a matrix (k, unit).
        The cost falls by the same factor.
    reduce
        One number per pair of steps instead of a matrix (output unit, input feature): ``"norm"`` (Frobenius),
        ``"spectral"`` (largest singular value), ``"sum"``, ``"mean"``, ``"abs_mean"``. Taken inside the sweep, so the
        whole is never stored.
    average
        ``"sample"``: the mean over samples, streamed.
    sketch
        Number of random probes that replace the output units in ``reduce="norm"``: the square of the norm is estimated
        without bias, and comes with its standard error, as coordinates ``norm_squared`` and ``norm_squared_stderr``.
    rtol
        Drop cotangents that fell below this share of what they started with; off by default. An estimate of the
        resulting error (Frobenius norm over everything) is in the attributes as ``pruning_error``.
    mode
        Direction of the sweep; ``"auto"`` takes the one with fewer operations.
    memory
        Bytes for the result and the working arrays, such as ``"2 GiB"`` (the default of ``rl.options``).
    out
        A path ending in ``.zarr``: the result is written there piece by piece and may exceed the memory.
        After an interrupt, what was finished can be read; the rest is NaN.
    training, initial_state, seed, axes
        As in :func:`rnnlens.trace`.

    Returns
    -------
    DataArray
        ``(sample, out_time, out_unit, in_time, in_feature)``; reduced ``(sample, out_time, in_time)``. No ``out_time``
        of a tensor without time. A state of a bidirectional layer adds ``direction`` (``in_direction``). Its attributes
        hold the mode, the operations and the bytes it took.

    Raises
    ------
    InputError
        If an argument does not fit, or the input is integer: the message names the tensor to ask for instead.
    TooLargeError
        Before computing, if the result would not fit; with its size and cheaper calls.
    LayerNotFoundError
        If ``of`` or ``wrt`` names nothing.

    References
    ----------
    Products of Jacobians through time: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 5.
    Random probes: Hutchinson 1990, doi:10.1080/03610919008812866.
    """
    _check(reduce, sketch, mode, project)
    limit = current().memory if memory is None else parse_memory(memory)
    adapter = adapter_for(model)
    batch = Batch(x, training=training, initial_state=initial_state, seed=repeatable(adapter, seed, training))
    known = with_named_outputs(adapter, model, batch, catalogue(adapter, model, x), (of, wrt))
    names = (read_one(of, known), read_one(wrt, known))
    room = Axes(adapter, model, axes, known)
    inside = _look(adapter, model, batch, names, known)
    swept = look_inside(inside)
    with resolve(adapter, model, batch, known, inside, list(swept.values()), names, room) as (start, end, graph):
        ends = _ends(start, end, names, out_times, in_times, project, reduce, average, sketch, batch_of(inside), limit)
        masks = masks_of(ends, list(swept.values()))
        labels = Labels(names, ends, reduce, sketch, known, adapter.provenance(model), training, project, masks)
        found = compute(graph, list(swept.values()), ends, labels, mode, rtol, limit, out)
    certificate = Certificate()
    if out is not None:
        certificate = Certificate("could not", why="it was written piece by piece, and is not read back")
    elif asked_for(model, "jacobian", batch, names, reduce, average, sketch, project is None):
        certificate = certify_jacobian(
            adapter, model, batch, found, labels, room, batch_of(inside), _computed_in(found, labels, swept.values())
        )
    found.attrs |= certificate.attributes(checks_of(found))
    warn_about(certificate.checks)
    return found


def _computed_in(found: xr.DataArray, labels: Labels, swept: Iterable[Swept]) -> str:
    """The coarsest dtype on the way: that of the result, of the model, or of a layer."""
    kinds = [str(found.dtype), labels.provenance.get("dtype", ""), *(one.half.call.compute_dtype for one in swept)]
    return functools.reduce(coarser, (kind or "" for kind in kinds))


def batch_of(inside: Inside) -> int:
    """Number of samples in the batch that was captured."""
    return int(next(iter(inside.halves.values()))[0].run.input.shape[0])


def _look(adapter: Adapter, model: Any, batch: Batch, names: tuple[TensorName, TensorName], known: Catalogue) -> Inside:
    try:
        capture = adapter.capture(model, batch, CaptureRequest(gradients=False, weight_grads=False))
    except ModelError as error:
        if known.recurrent:
            raise
        raise ModelError(_not_recurrent(model)) from error
    if not capture.calls:
        raise ModelError(_not_recurrent(model))
    outputs = leaves_of(capture.outputs)
    if len(outputs) > 1 and not known.outputs:
        refuse_lone_output(names, len(outputs))
    return Inside.of(capture.calls, capture.entangled)


def _not_recurrent(model: Any) -> str:
    return message(
        "A time Jacobian goes through recurrent layers, and none ran in this forward pass.",
        got=type(model).__name__,
        expected="a model with at least one recurrent layer, as rl.layers(model) lists them",
        hint='for one output unit, rl.gradients(model, x, of="output", at={"unit": 0}, reduce="sum", wrt="input")',
    )


def _check(reduce: Any, sketch: Any, mode: Any, project: Any) -> None:
    """What a sketch goes together with."""
    if sketch is None:
        return
    if reduce not in (None, "norm") or project is not None:
        got = f"reduce={reduce!r}" if project is None else "project="
        raise InputError(message("A sketch estimates the norm over all units.", got=got, expected='reduce="norm"'))
    if mode == "forward":
        raise InputError(message("A sketch is pulled back.", got='mode="forward"', expected='"auto" or "reverse"'))


def _refuse_many_probes(sketch: int, start: Tensor, samples: int, limit: int) -> None:
    """Probes are drawn for every sample, step and unit at once."""
    each = 2 * 8 * start.size * (start.times or 1) * samples
    if sketch * each > limit:
        raise TooLargeError(
            message(
                "The random probes of sketch= would not fit into the memory granted.",
                got=f"sketch={sketch}: {format_memory(sketch * each)}",
                expected=f"at most {format_memory(limit)} (memory=)",
                hint=f"sketch={max(2, min(100, limit // each))}; without sketch= the norm is exact and often cheaper",
            )
        )


def _ends(
    start: Tensor,
    end: Tensor,
    names: tuple[TensorName, TensorName],
    out_times: Any,
    in_times: Any,
    project: Any,
    reduce: str | None,
    average: str | None,
    sketch: int | None,
    samples: int,
    limit: int,
) -> Ends:
    """What is wanted, as the sweeps need it."""
    weights = projection(project, start.size)
    if weights is not None:
        weights = weights[None, None]
    function, tail = (None if reduce is None else REDUCTIONS[reduce]), ()
    if sketch is not None:
        _refuse_many_probes(sketch, start, samples, limit)
        weights = probe_signs(sketch, start.size, start.times or 1, samples, seed=0)
        function, tail = sketched, (2,)  # type: ignore[assignment]
    elif reduce in ("sum", "mean"):
        # Linear in the output units: contracted before differentiation.
        ones = np.ones((1, start.size)) if weights is None else np.ones((1, weights.shape[2])) @ weights[0, 0]
        share = 1.0 if reduce == "sum" else 1.0 / (start.size if weights is None else weights.shape[2])
        weights = (share * ones)[None, None]
    outs, ins = chosen_times(out_times, start.times, "out_times"), chosen_times(in_times, end.times, "in_times")
    return Ends(start, end, outs, ins, weights, function, tail, average is not None)
