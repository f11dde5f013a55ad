"""``rl.jacobian``: derivative of every output step by every input step, exact and in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal

from .. import arguments as check
from ..adapters.protocol import Batch
from ..arguments.data import is_source
from ..errors import InputError, short_repr
from ..recurrence.reductions import REDUCTIONS
from ..results.array import LabelledArray, record_attrs
from ..results.checks import Certificate, warn_of_failed_checks, warn_of_missing_certificate
from ..settings import current, parse_memory
from ..vocabulary import IN_TIME, OUT_TIME
from .axes import an_axes_table
from .batches import DataSetBatches
from .certificates.of_jacobian import certify, claim_of
from .chunked.graph import Padding
from .chunked.samples import SampleChunks
from .chunked.works import JacobianWork, lazy_jacobian
from .request import ModelRequest, in_turn
from .time_jacobian.execute import execute
from .time_jacobian.label import JacobianLabels, mean_over, refuse_for_chunks, refuse_without_mean
from .time_jacobian.network import open_network
from .time_jacobian.plan import make_plan
from .time_jacobian.request import JacobianOptions, read_request

__all__ = ["jacobian"]


def a_contraction(name: str, value: Any) -> Any:
    """Check ``reduce=``: "mean", "sum", or weights of the output units."""
    if isinstance(value, str) and value in REDUCTIONS and value not in ("mean", "sum"):
        message = f"{name}= applies before the differentiation, and {value!r} after it."
        raise InputError(message, got=f"{name}={value!r}", hint=f"measure={value!r}")
    return check.one_of("mean", "sum")(name, value) if isinstance(value, str) else check.as_numbers(name, value)


def chosen_steps(name: str, value: Any) -> dict[str, Any]:
    """Check ``at=``: steps by the dimension ``out_time`` or ``in_time``."""
    steps_by_dim = check.axes_by_name(name, value)
    for dim in steps_by_dim:
        if dim not in (OUT_TIME, IN_TIME):
            expected = f'steps, {{"{OUT_TIME}": ..., "{IN_TIME}": ...}}; weights of output units are reduce='
            problem = f"{name}= of a time Jacobian has no {dim!r}."
            hint = f'{name}={{"out_time": [-1]}}, for the last output step'
            raise InputError(problem, got=short_repr(value), expected=expected, hint=hint)
    return {dim: check.kept_steps(f"{name}[{dim!r}]", steps) for dim, steps in steps_by_dim.items()}


@check.checked(
    model=check.anything,
    x=check.chunked(check.data_set),
    of=check.text,
    wrt=check.text,
    at=chosen_steps,
    reduce=a_contraction,
    measure=check.one_of(*REDUCTIONS),
    across=check.one_of("mean"),
    sketch=check.integer(least=2),
    rtol=check.number(least=0, below=1, what="is a share"),
    mode=check.one_of("auto", "forward", "reverse"),
    training=check.switch,
    initial_state=check.finite_states,
    seed=check.seed,
    batch_size=check.integer(least=1),
    memory=check.memory,
    out=check.path,
    axes=an_axes_table,
    frozen=check.switch,
)
@in_turn
def jacobian(
    model: Any,
    x: Any,
    *,
    of: str = "output",
    wrt: str = "input",
    at: Mapping[str, int | Sequence[int] | slice] | None = None,
    reduce: Literal["mean", "sum"] | Any = None,
    measure: Literal["norm", "spectral", "sum", "mean", "abs_mean"] | None = None,
    across: Literal["mean"] | None = None,
    sketch: int | None = None,
    rtol: float | None = None,
    mode: Literal["auto", "forward", "reverse"] = "auto",
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    memory: str | int | None = None,
    out: str | PathLike[str] | None = None,
    axes: Mapping[str, Any] | None = None,
    frozen: bool = False,
) -> LabelledArray:
    """Differentiate every output step by every input step.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module`` with at least one recurrent layer; it is not changed.
    x
        One batch, as the model takes it; with ``across=`` also a data set, as :func:`rnnlens.gradients` takes it.
    of
        Tensor to differentiate: ``"output"``, ``"lstm.output"``, ``"lstm.hidden"``, ``"lstm.cell"``,
        ``"lstm.final_hidden"``, ``"dense.output"``.
    wrt
        Tensor to differentiate by: ``"input"``, ``"embedding.output"``, the output of any layer, ``"lstm.hidden"`` or
        ``"lstm.cell"`` (state to state), ``"lstm.initial_hidden"``. A change of the state c_t includes its effect on
        h_t.
    at
        Steps to compute: ``{"out_time": [10], "in_time": slice(0, 5)}``, chronological from 0; negative ones count from
        the end. All by default. A single step keeps its axis.
    reduce
        Contract the output units before differentiation: ``"mean"``, ``"sum"``, a vector (unit,) or a matrix (k, unit).
        The cost falls by the same factor.
    measure
        One number per pair of steps instead of a matrix (output unit, input feature): ``"norm"`` (Frobenius),
        ``"spectral"`` (largest singular value), ``"sum"``, ``"mean"``, ``"abs_mean"``. Computed inside the sweep, so
        that the whole matrix is never stored.
    across
        ``"mean"``: the mean over samples, after ``measure``; the result has no sample axis.
    sketch
        Number of random probes that replace the output units in ``measure="norm"``. The estimate of the squared norm is
        unbiased; it and its standard error are the coordinates ``norm_squared`` and ``norm_squared_stderr``.
    rtol
        Drop cotangents that fell below this share of their initial size; off by default. The attribute
        ``pruning_error`` estimates the resulting error (Frobenius norm of the whole result).
    mode
        Direction of the sweep; ``"auto"`` selects the one with fewer operations.
    training, initial_state, seed
        As in :func:`rnnlens.trace`.
    batch_size
        Samples at a time, with ``across=``; the mean over all samples does not depend on it.
    memory
        Memory limit for the result and the working arrays, such as ``"2 GiB"``; by default that of ``rl.options``.
    out
        A path ending in ``.zarr``: the result is written there piece by piece and may exceed the memory.
        After an interrupt the finished pieces can be read; the rest is NaN.
    axes
        As in :func:`rnnlens.trace`.
    frozen
        Whole-sequence layers: hold the coefficients of their recurrences (decay, write, read) constant, so that the
        result is the frozen map, which is linear in the layer's values. False: the total derivative, in which a change
        of the input changes the coefficients as well.

    Returns
    -------
    DataArray
        ``(sample, out_time, out_unit, in_time, in_feature)``; with ``measure`` ``(sample, out_time, in_time)``. A
        tensor without time has no ``out_time``. Units and features of images are numbered in the framework's order;
        their channels and places are coordinates (``out_channel``, ``in_height``). A state of a bidirectional layer
        adds ``direction`` (``in_direction``). Its attributes give the mode, the operations and the memory used; it has
        ``.checks``, ``.certificate`` and ``.save`` like every result.

    Raises
    ------
    InputError
        If an argument does not fit, or the input is integer; the message then names a tensor to use instead.
    TooLargeError
        If the result would not fit into memory; raised before the computation, with its size and cheaper calls.
    LayerNotFoundError
        If ``of`` or ``wrt`` matches nothing.

    Warns
    -----
    SelfCheckWarning
        If the Jacobian differs from a reference run of the model by more than rounding explains, or if the comparison
        was attempted and could not be made; the message has the reason.

    References
    ----------
    Products of Jacobians through time: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 5.
    Frozen map of a scan, alpha: Ali, Zimerman, Wolf 2024, arXiv:2403.01590, eqs. 10-12.
    Random probes: Hutchinson 1990, doi:10.1080/03610919008812866.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> jacobian = rl.jacobian(model, x, of="output[0]", at={"out_time": [5]}, measure="norm")
    >>> jacobian.dims
    ('sample', 'out_time', 'in_time')
    >>> float(jacobian.sel(in_time=6).max())  # a later input changes nothing
    0.0
    """
    memory_limit = current().memory if memory is None else parse_memory(memory)
    options = JacobianOptions(memory_limit, at or {}, reduce, measure, across, sketch, rtol, mode, out)
    run = Batch(x, training=training, initial_state=initial_state, seed=seed, frozen=frozen)
    if check.is_lazy(x):
        return _lazy_result(model, run, (of, wrt), options, batch_size, axes)
    if batch_size is None and not is_source(x):
        return _batch_jacobian(model, run, (of, wrt), options, axes)
    refuse_without_mean(options)
    model_axes = ModelRequest.resolve(model, run, axes).axes
    batches = DataSetBatches(run, batch_size, model_axes, with_loss=False)
    return mean_over(
        (_batch_jacobian(model, batch, (of, wrt), options, axes), model_axes.samples(batch)) for batch in batches
    )


def _lazy_result(
    model: Any,
    run: Batch,
    tensor_names: tuple[str, str],
    options: JacobianOptions,
    batch_size: int | None,
    axes: Mapping[str, Any] | None,
) -> LabelledArray:
    """Return the time Jacobian of data in Dask chunks, which is computed when it is asked for."""
    refuse_for_chunks(options)
    verb = partial(_batch_jacobian, tensor_names=tensor_names, options=options, axes=axes)
    by_sample = partial(_batch_jacobian, tensor_names=tensor_names, options=replace(options, across=None), axes=axes)
    mean = options.across is not None
    # A padded chunk needs the Jacobian of each sample, which is large unless it is measured.
    padding: Padding | None = None if mean and options.measure is None else "repeated"
    work = JacobianWork(padding, None, verb, by_sample, mean)
    chunks = SampleChunks.of(ModelRequest.resolve(model, run, axes).axes, run, batch_size)
    return lazy_jacobian(model, chunks, work, tensor_names[0].partition(".")[0])


def _batch_jacobian(
    model: Any, batch: Batch, tensor_names: tuple[str, str], options: JacobianOptions, axes: Mapping[str, Any] | None
) -> LabelledArray:
    """Compute and certify the time Jacobian of one batch."""
    check.refuse_large("x", batch.x)
    request = read_request(model, batch, tensor_names, options, axes)
    with open_network(request) as network:
        plan = make_plan(options, network)
        result = execute(JacobianLabels(plan, request.provenance(), request.coordinates, batch.frozen), options.out)
        details = ("jacobian", request.of, request.wrt, options.kind)
        earlier = None if options.out is not None else request.earlier_certificate(*details)
        claim = claim_of(request, plan, result) if earlier is None else None
    if claim is not None:
        certificate = certify(request, claim)
        request.remember(certificate, *details)
        result.attrs |= record_attrs(result.checks, certificate)
        warn_of_failed_checks(certificate.checks)
        if not isinstance(claim, Certificate):  # what the options rule out beforehand needs no warning
            warn_of_missing_certificate(certificate)
    elif earlier is not None and earlier.state == "passed":
        result.attrs |= record_attrs(result.checks, earlier)
    return result
