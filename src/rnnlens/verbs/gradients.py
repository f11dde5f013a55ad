"""``rl.gradients``: differentiate a number of a model by any of its tensors, or return why there is no gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from .. import arguments as check
from ..adapters.protocol import Adapter, Batch
from ..adapters.registry import adapter_for
from ..errors import DisconnectedError, UnsupportedError
from ..results.array import LabelledArray, LazyArray, record_attrs
from ..results.gradients import Gradients, Reason
from ..results.schema import LabelledLayer, labelled_variable
from ..vocabulary import FEATURE, GATE, SAMPLE, TIME
from .axes import an_axes_table
from .batches import DataSetBatches
from .chunked.samples import SampleChunks
from .chunked.works import gradients_of_chunks
from .differentiation.gather import DataSetGradients, a_clipping, clip_gradients, gather, rule_of_clipping
from .differentiation.request import GradientArguments, GradientRequest, Of, a_target, read_request, trainable_weights
from .differentiation.target import Reduction, a_reduction
from .names import TensorName, known_model
from .request import ModelRequest, in_turn
from .trace import has_loss, trace_batch
from .traced_layers import TraceSelection

__all__ = ["Gradients", "gradients"]

#: Quantities of a whole-sequence layer that the loss can be differentiated by.
SCAN_QUANTITIES = ("state", "decay", "write", "read")
_ROWS_APART = (
    "Keras on TensorFlow clips each looked-up row of an embedding by itself, before the rows of one id are added. "
    "Where ids repeat in a batch, "
    "training clips by a slightly different norm than shown here."
)


@check.checked(
    model=check.anything,
    x=check.chunked(check.data_set),
    y=check.chunked(check.many_examples),
    of=a_target,
    wrt=check.names,
    at=check.axes_by_name,
    reduce=a_reduction,
    per_sample=check.switch,
    measure=check.one_of("norm"),
    across=check.one_of("mean", "sum"),
    clip=a_clipping,
    initial_state=check.finite_states,
    batch_size=check.integer(least=1),
    combine=check.one_of("mean", "sum"),
    memory=check.memory,
    axes=an_axes_table,
    **check.RUN,
)
@in_turn
def gradients(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    of: Of = "loss",
    wrt: str | Iterable[str] = "weights",
    at: Mapping[str, Any] | None = None,
    reduce: Reduction = None,
    per_sample: bool = False,
    measure: Literal["norm"] | None = None,
    across: Literal["mean", "sum"] | None = None,
    clip: str | Mapping[str, float] | None = None,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = 0,
    batch_size: int | None = None,
    combine: Literal["mean", "sum"] | None = None,
    memory: str | int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> LabelledArray | Gradients:
    """Differentiate one number of a model with respect to any of its tensors.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; it is not changed.
    x, y
        One batch, or a data set: arrays, a ``tf.data.Dataset``, a torch ``DataLoader``, a generator, a Zarr array.
        Sources other than arrays contain their own targets.
    of
        Target to differentiate: ``"loss"``; ``"output"``, ``"output[name]"``; ``"dense.output"``; ``"lstm.hidden"``,
        ``"lstm.cell"``, ``"lstm.final_hidden"``; a callable of the model's output (of the list of them, where there are
        several) in the framework's own operations; or ``(callable, name, ...)``, a callable of named tensors.
    wrt
        Tensors to differentiate by: the names above, ``"input"``, ``"input[name]"``, ``"lstm.initial_hidden"``,
        ``"lstm.gates"``, ``"lstm.gate_preactivation"``, ``"lstm.weights"``, ``"lstm*/recurrent_kernel"``,
        ``"weights"``; or several of them. Of a whole-sequence layer (Mamba, delta rules) one of ``"mixer.state"``,
        ``"mixer.decay"``, ``"mixer.write"``, ``"mixer.read"``, for the loss of one batch.
    at
        Steps and units of the target by dimension, selected before differentiation: ``{"time": 10, "unit": [0, 1]}``.
    reduce
        Reduction of a target to one number: ``"sum"``, ``"mean"``, ``"norm"``, weights of a weighted sum, or a callable
        in the framework's own operations. None: a target of several numbers is an error.
    per_sample
        Reduce within each sample only; gradients of weights then have a ``sample`` axis. For the loss, the gradients of
        all samples sum to the gradient of the batch (without weight regularisers).
    measure
        ``"norm"``: the norm of each sample's gradient over units or features, one number per time step. A gradient
        without a sample axis is reduced to one number.
    across
        Reduce the sample axis, after ``measure``, in bounded memory: ``"mean"`` or ``"sum"``.
    clip
        ``"optimizer"``: also return the gradients as the optimizer would clip them, in ``result.clipped``. Or a
        clipping: ``{"global_clipnorm": 1.0}``, ``{"clipnorm": ...}``, ``{"clipvalue": ...}``.
    loss, sample_weight, class_weight, training, initial_state, seed
        As in :func:`rnnlens.trace`. Initial states have one row per sample of ``x``, or one row for all.
    batch_size
        Samples at a time. The result equals that of the whole data set as one batch, for any size. A loss other than a
        mean or sum over samples is evaluated on the outputs of all batches, for which the data is read twice.
    combine
        How the targets of batches combine to that of the data set, if it is not clear from ``reduce``.
    memory
        Memory limit for per-sample gradients of weights, such as ``"1 GiB"``.
    axes
        Roles of the axes of a tensor, if they cannot be found out: ``{"input": ("time", "sample", "feature"),
        "y": ("time", "sample")}``; ``(("time", "sample"), "unit")`` for two axes folded into one.

    Returns
    -------
    DataArray or Gradients
        For one tensor a DataArray with its dimensions, and ``.checks``, ``.certificate`` and ``.save`` like every
        result. For a list, a pattern or ``"weights"`` a mapping by layer, ``g["conv1d"]["kernel"]``, with
        ``g.disconnected``: the tensors without gradient, with reasons.

    Raises
    ------
    DisconnectedError
        If the one requested tensor has no gradient; ``error.reason`` has a code, a sentence and a remedy.
    InputError
        If the target is not one number and ``reduce`` is None, or an argument does not fit.
    LayerNotFoundError
        If a name matches nothing.

    References
    ----------
    Gradients of and through recurrent states: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> g = rl.gradients(model, x, of="lstm.hidden", at={"time": -1}, reduce="sum", wrt="input")
    >>> g.shape
    (3, 9, 2)
    """
    run = Batch(x, y, sample_weight, class_weight, loss, training, initial_state, seed)
    arguments = GradientArguments(of, wrt, at or {}, reduce, per_sample, measure, across, combine, clip, memory, axes)
    if check.is_lazy((x, y, sample_weight)):
        return _lazy_gradients(model, run, arguments, batch_size)
    scan_tensor = _scan_tensor(adapter_for(model), model, wrt)
    if scan_tensor is not None:
        return _scan_gradient(model, run, scan_tensor, arguments, batch_size)
    request = read_request(model, run, arguments)
    data_set_gradients = gather(request, DataSetBatches(run, batch_size, request.axes, request.with_loss))
    provenance = request.provenance(with_loss=request.with_loss)
    if request.lone and clip is None:
        return _labelled_array(request, data_set_gradients, provenance)
    reasons = data_set_gradients.explanation
    result = Gradients(
        _datasets(request, data_set_gradients, provenance),
        of=request.target.text,
        value=data_set_gradients.value,
        disconnected=reasons.disconnected,
        flags=reasons.flags,
        provenance=provenance,
        notes=reasons.notes,
        certificate=data_set_gradients.certificate,
    )
    if clip is not None:
        _add_clipped(result, request, data_set_gradients, clip)
    return result


def _scan_tensor(adapter: Adapter, model: Any, wrt: Any) -> tuple[str, str] | None:
    """Return layer and quantity that ``wrt`` names in a whole-sequence layer; None for any other tensor."""
    match = (
        re.fullmatch(rf"(?P<layer>.+)\.(?P<quantity>{'|'.join(SCAN_QUANTITIES)})", wrt)
        if isinstance(wrt, str)
        else None
    )
    if match is None:
        return None
    layers, (layer_name, hash_, number) = list(known_model(adapter, model).sequences), match["layer"].partition("#")
    matching_layers = [name for name in layers if name == layer_name or name.endswith(f".{layer_name}")]
    return (f"{matching_layers[0]}{hash_}{number}", match["quantity"]) if len(matching_layers) == 1 else None


def _scan_gradient(
    model: Any, run: Batch, tensor: tuple[str, str], arguments: GradientArguments, batch_size: int | None
) -> LabelledArray:
    """Return the gradient of the loss by a state or coefficient of a scan, from a trace; refuse any other target."""
    layer, quantity = tensor
    arguments_by_name = {**vars(arguments), "initial_state": run.initial_state, "batch_size": batch_size}
    unsupported = [name for name, is_changed in (("of", arguments.of != "loss"), ("at", arguments.at)) if is_changed]
    unsupported += [
        n
        for n, v in arguments_by_name.items()
        if n not in ("of", "wrt", "at", "axes") and v is not None and v is not False
    ]
    if unsupported:
        raise UnsupportedError(
            f"A gradient with respect to the {quantity} of a whole-sequence layer is one of the loss of a batch.",
            got=", ".join(f"{name}=" for name in unsupported),
            expected=f'rl.gradients(model, x, y, loss=..., wrt="{layer}.{quantity}")',
            hint="loss=lambda output: ..., any scalar of the output; steps are chosen by rl.trace(..., at=)",
        )
    name = f"{quantity}_grad"
    run = replace(run, x=check.one_batch("x", run.x))
    result = trace_batch(model, run, TraceSelection.of(layer, name, has_loss(model, run)), {}, arguments.axes)
    array = LabelledArray(result[layer][name])
    array.attrs |= record_attrs([self_check for self_check in result.checks if self_check.layer], result.certificate)
    return array


def _lazy_gradients(
    model: Any, run: Batch, arguments: GradientArguments, batch_size: int | None
) -> LabelledArray | Gradients:
    """Return gradients of data in Dask chunks, which are computed when they are asked for."""
    model_request = ModelRequest.resolve(model, run, arguments.axes)
    chunks = SampleChunks.of(model_request.axes, run, batch_size)
    provenance = model_request.provenance(with_loss=arguments.of == "loss")
    request, arrays, explanation, graph = gradients_of_chunks(model, chunks, arguments, _label_gradient, provenance)
    if request.lone:
        name = request.requested[0]
        if name.text not in arrays:
            raise _disconnected_error(request, explanation.disconnected[name.text])
        return LazyArray.of(arrays[name.text], graph)

    present = ((name, arrays[name.text]) for name in request.requested if name.text in arrays)
    datasets = _by_layer({n: (array.variable, {d: array[d].variable for d in array.coords}) for n, array in present})
    options: dict[str, Any] = {"of": request.target.text, "provenance": provenance, "notes": chunks.notes}
    return Gradients(datasets, disconnected=explanation.disconnected, **options).pending(graph)


def _labelled_array(
    request: GradientRequest, gathered: DataSetGradients, provenance: Mapping[str, str]
) -> LabelledArray:
    """Return the single requested gradient as an array, with checks, certificate and reasons as attributes."""
    name, explanation = request.requested[0], gathered.explanation
    if name not in gathered.gradients:
        raise _disconnected_error(request, explanation.disconnected[name.text])
    array = LabelledArray(_label_gradient(request, name, gathered, provenance))
    array.attrs |= record_attrs((), gathered.certificate)
    for attribute, reasons in (("disconnected", explanation.disconnected), ("flagged", explanation.flags)):
        for reason in reasons.values():
            array.attrs[attribute] = str(reason)
    return array


def _disconnected_error(request: GradientRequest, reason: Reason) -> DisconnectedError:
    message = f"There is no gradient of {request.target.text} with respect to {reason.name!r} [{reason.code}]."
    error = DisconnectedError(message, got=reason.sentence, hint=reason.remedy)
    error.reason = reason
    return error


def _add_clipped(
    result: Gradients, request: GradientRequest, gathered: DataSetGradients, clip: str | Mapping[str, float]
) -> None:
    """Clip the gradients of all trained weights, and add the requested ones to the result as ``clipped``."""
    weight_gradients = {
        name: gathered.gradients[name] for name in trainable_weights(request.catalogue) if name in gathered.gradients
    }
    kind, threshold = rule_of_clipping(clip, request.catalogue.facts)
    clipped_gradients, norm = clip_gradients(weight_gradients, request.catalogue, kind, threshold)
    with_clipped = replace(gathered, gradients={**gathered.gradients, **clipped_gradients})
    datasets = _datasets(request, with_clipped, result.provenance)
    has_sparse_rows = any("touched_rows" in v.attrs for layer in datasets.values() for v in layer.variables.values())
    if has_sparse_rows and request.catalogue.facts.clips_lookups_apart:
        result.notes.append(_ROWS_APART)
    result.clip = {"kind": kind, "threshold": threshold, "norm": norm}
    result.clipped = Gradients(datasets, of=result.of, value=gathered.value, provenance=result.provenance)


#: An array and its coordinates.
_Labelled = tuple[xr.Variable, Mapping[Any, xr.Variable]]


def _datasets(
    request: GradientRequest, gathered: DataSetGradients, provenance: Mapping[str, str]
) -> dict[str, LabelledLayer]:
    """Return the gradients of all requested tensors as labelled arrays, by the layer of each tensor."""
    present = (name for name in request.requested if name in gathered.gradients)
    return _by_layer({name: _gradient_variable(request, name, gathered, provenance) for name in present})


def _by_layer(labelled: Mapping[TensorName, _Labelled]) -> dict[str, LabelledLayer]:
    """Return the labelled arrays of each layer; tensors without a layer go to ``"model"``."""
    by_layer: dict[str, LabelledLayer] = {}
    for name, array in labelled.items():
        node = name.layer or "model"
        layer = by_layer.setdefault(node, LabelledLayer({}, {}, {"layer": node}))
        variable, coords = _rename_clashing_dims(name.quantity, array, layer.coords)
        layer.variables[name.quantity.replace("/", ".")] = variable
        layer.coords |= coords
    return by_layer


def _rename_clashing_dims(name: str, labelled: _Labelled, other_coords: Mapping[Any, xr.Variable]) -> _Labelled:
    """Rename those axes of an array that have other labels, or another number of them, in ``other_coords``."""
    variable, coords = labelled
    renamed_dims = {
        dim: f"{name}_{dim}"
        for dim, coordinate in coords.items()
        if dim in other_coords and not np.array_equal(coordinate.values, other_coords[dim].values)
    }
    if not renamed_dims:
        return labelled

    def rename_dims(array: xr.Variable) -> xr.Variable:
        return xr.Variable([renamed_dims.get(dim, dim) for dim in array.dims], array.data, array.attrs)

    return rename_dims(variable), {
        renamed_dims.get(dim, dim): rename_dims(coordinate) for dim, coordinate in coords.items()
    }


def _label_gradient(
    request: GradientRequest, name: TensorName, gathered: DataSetGradients, provenance: Mapping[str, str]
) -> xr.DataArray:
    variable, coords = _gradient_variable(request, name, gathered, provenance)
    return xr.DataArray(variable, coords=coords, name=name.quantity)


def _gradient_variable(
    request: GradientRequest, name: TensorName, gathered: DataSetGradients, provenance: Mapping[str, str]
) -> _Labelled:
    """Return one gradient as a variable, and its coordinates."""
    target_name, arguments = request.target.text, request.arguments
    info = request.catalogue.recurrent.get(str(name.layer).partition("#")[0])
    array, dims = gathered.gradients[name], gathered.dims[name]
    measure = "" if arguments.measure is None else f"{arguments.measure} of the "
    across = "" if arguments.across is None or name.kind == "weight" else f", {arguments.across} over samples"
    target = request.target
    selection_text = "".join(f", {dim}={index!r}" for dim, index in target.at.items())
    reduction_text = (
        "" if target.reduce is None else f"{target.reduce if isinstance(target.reduce, str) else 'weighted'} of "
    )
    per_sample = " of each sample" if target.per_sample else ""
    attrs: dict[str, Any] = {
        "long_name": f"{measure}gradient of {target_name} with respect to {name.text}{across}",
        "units": "loss" if target_name == "loss" else "1",
        "definition": f"{measure}d {reduction_text}{target_name}{selection_text}{per_sample} / d {name.text}{across}",
        "tensor": name.text,
        "layer": name.layer or "model",
    }
    is_embedding = name.kind == "weight" and name.key in request.catalogue.weights[str(name.layer)].tables
    if is_embedding and array.ndim > 1:  # how many rows of an embedding the gradient reaches
        rows = np.abs(array).reshape(-1, *array.shape[-2:]).max(axis=(0, 2))
        attrs["touched_rows"] = int(np.count_nonzero(rows))
    labels = {"cell": info.cell} if info is not None and GATE in dims else {}
    is_input = name.kind == "input" and name.layer is None
    roles, leaf = ((SAMPLE, TIME, FEATURE), name.index) if is_input else ((SAMPLE, TIME), None)
    coords = request.coordinates.labels_of(dict(zip(dims, array.shape, strict=True)), roles, leaf)
    return labelled_variable(array, dims, attrs=attrs, coords=coords, provenance=provenance, info=labels)
