"""``rl.layers``, ``rl.weights`` and ``rl.weight_norms``: layers, weights by kernel and gate, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import xarray as xr

from .. import arguments as check
from ..adapters.protocol import Batch, LayerWeights, SequenceCall, Taps
from ..adapters.registry import adapter_for
from ..errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean, raised_by, short_repr
from ..results.checks import warn_of_failed_checks
from ..results.gradients import Weights
from ..results.layers import LayerTable
from ..results.schema import LabelledLayer, to_host
from ..vocabulary import FEATURE, LAG, TIME
from .axes import InputCoordinates
from .certificates.of_gradients import certify_weights
from .chunked.samples import SampleChunks
from .chunked.works import lazy_datasets
from .names import known_model, uncalled_layer
from .request import ModelRequest, in_turn
from .traced_scans import carried_by_lag, kept_masks, scan_measures, token_influence
from .weight_gradients import WeightGradients, find_gradients
from .weight_layout import label_cell, label_plain, outside_cells, weights_of_layer


@check.checked(model=check.anything, x=check.anything)
@in_turn
def layers(model: Any, x: Any = None) -> LayerTable:
    """List the recurrent layers of a model: those that its structure shows, or with data those that a trace has.

    Parameters
    ----------
    model
        A Keras model or layer, a ``torch.nn.Module``, or a model of JAX.
    x
        One batch of data. The model is run once on it, and the rows are the layers of a trace on these data, under
        their names there: loops and custom cells, too, and ``cell#0``, ``cell#1`` for two recurrences of one cell. The
        layers of a model of JAX exist only for data of some shape; they are listed without a run. Without data the
        model is not run, and earlier runs do not change the answer.

    Returns
    -------
    LayerTable
        A sequence of :class:`~rnnlens.adapters.protocol.LayerInfo` that prints as a table.

    Raises
    ------
    ModelError
        If the model is of no known framework, or was not built yet; with data also if no recurrent layer ran.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> print(rl.layers(model))
    name  layer  units  direction  returns     masked               options
    lstm  LSTM   4      forward    every step  depends on the data  bias=True, batch_first=True
    """
    adapter = adapter_for(model)
    if x is None or adapter.needs_shapes:  # bound to the shapes of x by in_turn
        return LayerTable(adapter.describe(model))
    batch = Batch(check.one_batch("x", check.in_memory("x", x)))
    capture = adapter.run(model, batch, Taps.states(inputs=False)).capture
    infos = {info.name: info for info in adapter.known_layers(model)}
    units_that_ran = {call.layer: call.cell.state_sizes[0] for call in capture.calls}
    names = dict.fromkeys([*units_that_ran, *(call.layer for call in capture.sequences)])
    states = {call.layer: call.cell.state_names for call in capture.calls if call.cell.by_framework}
    rows = ((name, infos[uncalled_layer(name, infos)]) for name in names)
    return LayerTable(
        replace(info, name=name, units=info.units or units_that_ran.get(name, 0), states=states.get(name, ()))
        for name, info in rows
    )


@check.checked(
    model=check.anything,
    x=check.chunked(check.one_batch),
    y=check.chunked(check.examples),
    layers=check.names,
    by_time=check.switch,
    measure=check.one_of("norm"),
    keep=check.shares,
    **check.RUN,
)
@in_turn
def weights(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    layers: str | Iterable[str] | None = None,
    by_time: bool = False,
    measure: Literal["norm"] | None = None,
    keep: float | Iterable[float] | None = None,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    seed: int | None = 0,
) -> Weights:
    """Return the weights of every layer; recurrent ones split by gate and direction. With data, also their gradients.

    Parameters
    ----------
    model, x, y, loss, sample_weight, class_weight, training, seed
        As for :func:`rnnlens.trace`; without data there are no gradients.
    layers
        Names of the layers; all layers with weights by default.
    by_time
        Recurrent layers: the contribution of each timestep to dL/dW instead of their sum, ``(time, unit_in, gate,
        unit)``.
    measure
        ``"norm"``, with ``by_time=True``: the Frobenius norm of each contribution per gate,
        ``recurrent_kernel_grad_norm (time, gate)``, which needs little memory.
    keep
        Whole-sequence layers: shares of the state to keep, such as ``(0.5, 0.25)``. ``loss_after_pruning (kept)`` is
        the loss of the model in a run in which this layer writes the other entries of its state no more, for each
        share; those with the least ``state_energy``, the mean square that an entry adds to an output, go first.

    Returns
    -------
    Weights
        ``result["lstm"].kernel (feature, gate, unit)``, ``recurrent_kernel (unit_in, gate, unit)``, ``bias (gate,
        unit)``; bidirectional layers with a leading ``direction``. torch's two biases are ``bias`` and
        ``recurrent_bias``, their sum ``bias_total``. Gradients are called ``kernel_grad`` and so on. They exclude
        weight regularisers, whose gradient belongs to no timestep; ``rl.gradients(of="loss")`` includes them.
        ``*_nan_count`` and ``*_inf_count`` are the numbers of NaN and infinite values per gate. With data, a
        whole-sequence layer (Mamba, delta rules) has ``half_life``, ``state_size`` and ``state_rank`` on these data,
        and ``state_carried (lag, ...)``: the root mean square of dS_T/dS_{T-k}, with all that a delta rule erases;
        and ``token_influence (time, ...)``: how strongly what a step writes moves all outputs from that step on. A
        scan declared by ``rl.torch.scan`` has an entry of these alone: its coefficients come from other layers.

    Raises
    ------
    TooLargeError
        If the gradients by time would not fit ``rl.options(memory=...)``; raised before they are computed.

    References
    ----------
    dL/dW as the sum of per-step contributions: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 3.
    Effective state-size: Parnichkun et al. 2025, arXiv:2504.19561. Rank of a state per head: arXiv:2602.02195.
    Influence of a token by the observability of later outputs: the idea of Mabrok, Zafari 2025, arXiv:2511.17970. The
    formula is ours: the root mean square over samples of the norm of (dy_s/dx_t) x_t over all s >= t, for a scan's
    input x and outputs y, coefficients held. Entries of a state ranked by the energy that they add to the output:
    AIRE-Prune, arXiv:2602.00534, here measured on the data; by their largest gain: LAST, arXiv:2411.02824.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> weights = rl.weights(model)
    >>> weights["lstm"].recurrent_kernel.dims
    ('unit_in', 'gate', 'unit')
    """
    if measure is not None and not by_time:
        raise InputError("measure= applies to gradients by step.", got=f"measure={measure!r}", expected="by_time=True")
    if x is None and (by_time or y is not None or loss is not None):
        raise InputError("Gradients of weights need data.", got="x=None", hint="rl.weights(model, x, y)")
    batch = Batch(x, y, sample_weight, class_weight, loss, training, None, seed)
    if keep is not None and (x is None or check.is_lazy((x, y, sample_weight))):
        hint = "data in memory: rl.weights(model, x, y, keep=...)"
        raise UnsupportedError("keep= runs the model on data in memory.", got="none, or lazy data", hint=hint)
    if check.is_lazy((x, y, sample_weight)):
        return _lazy_weights(model, batch, layers, by_time, measure)
    return _batch_weights(model, batch, layers, measure or by_time, cast("tuple[float, ...] | None", keep))


def _batch_weights(
    model: Any,
    batch: Batch,
    layers: str | Iterable[str] | None,
    by_time: bool | str,
    keep: Sequence[float] | None = None,
) -> Weights:
    """Label the weights and, with data, their gradients on one batch, and certify these."""
    request = ModelRequest.resolve(model, batch)
    layer_weights = _select_layers(request.adapter.weights(model), layers)
    labelled = {}
    for name, layer in layer_weights.items():
        cells = {direction: cell.weights() for direction, cell in layer.cells.items()}
        labelled[name] = (label_cell(cells, layer.cells) if cells else {}) | label_plain(outside_cells(layer))
    provenance, weight_gradients = request.provenance(), WeightGradients()
    if batch.x is not None:
        weight_gradients = find_gradients(request, layer_weights, by_time=by_time)
        for name, gradients in weight_gradients.recurrent.items():
            labelled[name] |= label_cell(gradients, layer_weights[name].cells, suffix="_grad", by_time=by_time)
        for name, other_gradients in weight_gradients.other_layers.items():
            labelled[name] |= label_plain({f"{key}_grad": gradient for key, gradient in other_gradients.items()})
    datasets = {name: weights_of_layer(name, variables, provenance) for name, variables in labelled.items()}
    _assign_coordinates(datasets, weight_gradients, request.coordinates)
    calls = _scans(request, layer_weights, with_declared=layers is None)
    if keep is not None and not calls:
        hint = "leave keep= out"
        raise UnsupportedError("keep= prunes whole-sequence layers; none ran.", got=repr(keep), hint=hint)
    notes = [] if weight_gradients.capture is None else list(weight_gradients.capture.notes)
    for call in calls:
        if call.layer not in datasets:
            datasets[call.layer] = weights_of_layer(call.layer, {}, provenance)
            notes.append(
                f"{call.layer}: a declared scan has no weights; the layers that compute its coefficients have."
            )
        _add_scan_measures(datasets[call.layer], call)
        if keep is not None:
            _prune(request, call, keep, datasets[call.layer])
    details = ("weights", tuple(layer_weights), by_time)
    certificate = None if batch.x is None else request.earlier_certificate(*details)
    if batch.x is not None and certificate is None:
        of_weights = {name: datasets[name] for name in layer_weights}
        certificate = certify_weights(request, layer_weights, of_weights, weight_gradients)
        request.remember(certificate, *details)
    warn_of_failed_checks(weight_gradients.checks, certificate)
    return Weights(
        datasets,
        penalties={
            f"{layer}/{name}": float(to_host(regularizer(entry.values[name])))
            for layer, entry in layer_weights.items()
            for name, regularizer in entry.penalties.items()
        },
        loss=weight_gradients.loss,
        provenance=provenance,
        checks=weight_gradients.checks,
        certificate=certificate,
        notes=notes,
    )


def _add_scan_measures(dataset: LabelledLayer, call: SequenceCall) -> None:
    """Add the measures of a whole-sequence layer: of its cell and last state, by lag, and influence of tokens."""
    dataset.variables |= scan_measures(call.cell, to_host(call.forward_run().last_state))
    carried = carried_by_lag(call.cell)
    if carried is not None:
        dataset.variables["state_carried"], dataset.coords[LAG] = carried
    influence = token_influence(call.cell)
    dataset.variables |= influence
    if "token_influence_interval" in influence:
        dataset.coords["bound"] = xr.Variable(("bound",), ["low", "high"])


def _prune(request: ModelRequest, call: SequenceCall, shares: Sequence[float], dataset: LabelledLayer) -> None:
    """Add the energy of each entry of a layer's state, and the model's loss with a share of the entries."""
    dataset.variables["state_energy"], masks = kept_masks(call, shares)
    losses = []
    for mask in masks:
        batch = replace(request.batch, kept_states={call.layer: mask})
        taps = Taps.states([call.layer], inputs=False, loss=True, all_must_run=False)
        losses.append(request.adapter.run(request.model, batch, taps).capture.loss)
    attributes = {"long_name": "loss with a share of the layer's state", "units": "1"}
    dataset.variables["loss_after_pruning"] = xr.Variable(("kept",), np.array(losses, dtype=np.float64), attributes)
    dataset.coords["kept"] = xr.Variable(("kept",), np.array(shares), {"long_name": "share of the state", "units": "1"})


def _scans(
    request: ModelRequest, layer_weights: Mapping[str, LayerWeights], *, with_declared: bool
) -> Sequence[SequenceCall]:
    """Return the calls of whole-sequence layers on the given data, and of declared scans; none without data."""
    if request.batch.x is None:
        return []
    known = known_model(request.adapter, request.model).sequences  # a declared scan is known once it ran
    sequence_names = tuple(name for name in known if with_declared or name in layer_weights)
    if not sequence_names:
        return []
    taps = Taps.states(sequence_names, all_must_run=False)
    capture = request.adapter.run(request.model, request.batch.without_loss(), taps).capture
    return [call for call in capture.sequences if call.layer in (sequence_names if with_declared else layer_weights)]


def _lazy_weights(
    model: Any, batch: Batch, layers: str | Iterable[str] | None, by_time: bool, measure: str | None
) -> Weights:
    """Return weights, and their gradients of data in Dask chunks, which are computed when they are asked for."""
    if measure is not None:
        hint = "leave measure= out, compute, and take the norm over units"
        raise UnsupportedError("measure= is of the sum over all samples.", got="lazy data", hint=hint)
    request = ModelRequest.resolve(model, batch)
    chunks, verb = SampleChunks.of(request.axes, batch), partial(_batch_weights, layers=layers, by_time=by_time)
    lazy_parts = lazy_datasets(request.adapter, model, chunks, verb, "weights", sums=True, with_loss=True)
    template, datasets, graph = lazy_parts
    notes = [*template.notes, *chunks.notes]
    result = Weights(datasets, penalties=template.penalties, provenance=template.provenance, notes=notes)
    return result.pending(graph)


def _assign_coordinates(
    layers: Mapping[str, LabelledLayer], gradients: WeightGradients, coordinates: InputCoordinates
) -> None:
    """Assign the inputs' labels to steps, and to the features of layers that read an input directly."""
    if not coordinates.leaves or gradients.capture is None:
        return
    for layer in layers.values():
        coordinates.assign_to(layer, (TIME,))
    for call in gradients.capture.calls:
        name, leaf = call.layer.partition("#")[0], coordinates.input_index(to_host(call.input))
        if name in layers and leaf is not None:
            coordinates.assign_to(layers[name], (FEATURE,), leaf)


def _select_layers(
    layer_weights: Mapping[str, LayerWeights], layers: str | Iterable[str] | None
) -> dict[str, LayerWeights]:
    if layers is None:
        return dict(layer_weights)
    names = [layers] if isinstance(layers, str) else list(layers)
    for name in names:
        if name not in layer_weights:
            raise LayerNotFoundError(f"No layer named {name!r} with weights.", hint=did_you_mean(name, layer_weights))
    return {name: layer_weights[name] for name in names}


def _check_history(name: str, value: Any) -> xr.Dataset:
    """Check a history of norms returned by an earlier call."""
    if not isinstance(value, xr.Dataset) or not value.sizes.get("step") or value["step"].dtype.kind not in "iu":
        expected = "the result of rl.weight_norms, with a dimension step"
        raise InputError(f"{name}= is not a history of norms.", got=short_repr(value), expected=expected)
    return value


@check.checked(
    model=check.anything,
    layers=check.names,
    over=check.names,
    ord=check.either(
        check.integer(least=1, most=2),
        check.callable_value,
        expected="1, 2 or a callable",
        what="is no norm that is known",
    ),
    history=_check_history,
    step=check.integer(),
)
def weight_norms(
    model: Any,
    *,
    layers: str | Iterable[str] | None = None,
    over: str | Iterable[str] | None = None,
    ord: float | Callable[[np.ndarray[Any, Any]], Any] = 2,
    history: xr.Dataset | None = None,
    step: int | None = None,
) -> xr.Dataset:
    """Return the norms of all weights as one row of a history.

    Parameters
    ----------
    model, layers
        As in :func:`weights`.
    over
        Dimensions over which the norm is taken, such as ``("feature", "unit_in", "unit")`` to keep one norm per gate;
        all by default: one number per weight.
    ord
        1: sum of absolute values; 2: Euclidean (Frobenius) norm; or a callable from a 1-D array to a number.
    history
        Result of an earlier call, to which the new row is appended.
    step
        Position of the row; by default one more than the last.

    Returns
    -------
    Dataset
        One variable per weight, named ``"lstm/kernel"``, with a leading dimension ``step``. ``history`` is not changed.
        NaN values make their norm NaN.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> history = rl.weight_norms(model)
    >>> history = rl.weight_norms(model, history=history)  # after a step of training
    >>> history["lstm/bias"].sizes["step"]
    2
    """
    row = {}
    all_weights = weights(model, layers=layers)
    known_dims = {str(dim): None for layer in all_weights for dim in all_weights.dataset(layer).dims}
    for dim in [over] if isinstance(over, str) else over or ():
        if dim not in known_dims:
            raise InputError(
                f"No weight has a dimension {dim!r}.", got=f"over={over!r}", hint=did_you_mean(dim, known_dims)
            )
    for layer, node in all_weights.items():
        for name in node:
            if not name.endswith("_count") and name != "bias_total":
                norm = _norm(node[name], over, ord)
                norm_name = getattr(ord, "__name__", "norm") if callable(ord) else f"L{ord} norm"
                long_name = f"{norm_name} of the {node[name].attrs.get('long_name', name)}"
                row[f"{layer}/{name}"] = norm.assign_attrs(long_name=long_name, units="1")
    last_step = -1 if history is None else int(history["step"].values[-1])
    new_row = xr.Dataset(row).expand_dims(step=[last_step + 1 if step is None else step])
    return new_row if history is None else xr.concat([history, new_row], dim="step", combine_attrs="override")


def _norm(values: xr.DataArray, over: str | Iterable[str] | None, ord: Any) -> xr.DataArray:
    reduced_dims = {over} if isinstance(over, str) else set(over) if over is not None else set(map(str, values.dims))
    dims = [str(dim) for dim in values.dims if dim in reduced_dims]
    # Axes of dense kernels have other names. A weight without any of these dimensions is reduced as a whole.
    dims = dims or [str(dim) for dim in values.dims]
    if callable(ord):
        flat = values.stack(_all=dims) if dims else values
        with raised_by("Your norm, ord=,"):
            reduced: xr.DataArray = xr.apply_ufunc(ord, flat, input_core_dims=[["_all"]], vectorize=True)
        return reduced
    if ord == 1:
        return abs(values).sum(dims, skipna=False)
    squares: xr.DataArray = (abs(values).astype("float64") ** 2).sum(dims, skipna=False)
    return squares**0.5
