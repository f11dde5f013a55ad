"""``rl.weights`` and ``rl.weight_norms``: weights by kernel and gate, their gradients, also per timestep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from ..adapters.protocol import Adapter, Batch, Capture, CaptureRequest, LayerWeights, Port, RecurrentCall
from ..adapters.registry import adapter_for
from ..arguments import (
    anything,
    called,
    checked,
    class_weights,
    either,
    examples,
    names,
    one_batch,
    one_of,
    seed,
    switch,
    whole,
)
from ..arguments import loss as a_loss
from ..errors import (
    InputError,
    LayerNotFoundError,
    TooLargeError,
    UnsupportedError,
    did_you_mean,
    message,
    raised_by,
    shown,
)
from ..recurrence.cells import KnownCell
from ..recurrence.run import Run
from ..results.certificate import Certificate
from ..results.checks import Check, warn_about
from ..results.schema import plain
from ..results.weights import Weights
from ..settings import current, format_memory
from .certify import wanted as asked_for
from .certify_weights import certify_weights
from .host import on_host
from .sweep import sweep, weight_norms_by_time, weights_of
from .trace import WeightSum
from .turns import in_turn
from .weight_labels import Labelled, label_cell, label_plain, node_dataset


@checked(
    model=anything,
    x=one_batch,
    y=examples,
    layers=names,
    by_time=either(switch, one_of("norm"), expected="True, False or 'norm'", what="is no such switch"),
    loss=a_loss,
    sample_weight=examples,
    class_weight=class_weights,
    training=switch,
    seed=seed,
)
@in_turn
def weights(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    layers: str | Iterable[str] | None = None,
    by_time: bool | Literal["norm"] = False,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    seed: int | None = None,
) -> Weights:
    """Weights of every layer; recurrent ones split by gate and direction. With data, also their gradients.

    Parameters
    ----------
    model, x, y, loss, sample_weight, class_weight, training, seed
        As for :func:`rnnlens.trace`; without data there are no gradients.
    layers
        Names of the layers wanted; all layers with weights by default.
    by_time
        Recurrent layers: the contribution of each timestep to dL/dW instead of their sum, ``(time, unit_in, gate,
        unit)``; or ``"norm"``: its Frobenius norm per gate only, ``recurrent_kernel_grad_norm (time, gate)``, in little
        memory.

    Returns
    -------
    Weights
        ``result["lstm"].kernel (feature, gate, unit)``, ``recurrent_kernel (unit_in, gate, unit)``, ``bias (gate,
        unit)``; bidirectional layers with a leading ``direction``. torch's two biases are ``bias`` and
        ``recurrent_bias``, their sum ``bias_total``. Gradients are called ``kernel_grad`` and so on. They are those of
        the loss without weight regularisation, whose own part is not of any timestep; ``rl.gradients(of="loss")``
        includes it. ``*_nan_count`` and ``*_inf_count`` count per gate what is not finite.

    Raises
    ------
    TooLargeError
        If the gradients by time would not fit ``rl.options(memory=...)``; raised before they are computed.

    References
    ----------
    dL/dW as the sum of per-step contributions: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eq. 3.
    """
    if x is None and (by_time or y is not None or loss is not None):
        raise InputError(message("Gradients of weights need data.", got="x=None", hint="rl.weights(model, x, y)"))
    adapter = adapter_for(model)
    found = _selected(adapter.weights(model), layers)
    labelled = {name: _label(layer) for name, layer in found.items()}
    value: float | None = None
    checks: list[Check] = []
    notes: list[str] = []
    if x is not None:
        batch = Batch(x, y, sample_weight, class_weight, loss, training, None, seed)
        certified = asked_for(model, "weights", batch)
        value, checks, capture = _add_gradients(adapter, model, batch, found, labelled, by_time, certified)
        notes = [] if capture is None else capture.notes
    provenance = adapter.provenance(model)
    datasets = {name: node_dataset(name, variables, provenance) for name, variables in labelled.items()}
    certificate = None if x is None else Certificate()
    if x is not None and certified:
        certificate = certify_weights(adapter, model, batch, found, datasets, capture, value, adapter.engine)
    warn_about([*checks, *(certificate.checks if certificate else ())])
    return Weights(
        datasets,
        penalties=_penalties(found),
        loss=value,
        provenance=provenance,
        checks=checks,
        certificate=certificate,
        notes=notes,
    )


def _a_history(name: str, value: Any) -> xr.Dataset:
    """What an earlier call returned."""
    if not isinstance(value, xr.Dataset) or not value.sizes.get("step") or value["step"].dtype.kind not in "iu":
        expected = "what rl.weight_norms returned, with a dimension step"
        raise InputError(message(f"{name}= is no history of norms.", got=shown(value), expected=expected))
    return value


@checked(
    model=anything,
    layers=names,
    over=names,
    ord=either(whole(least=1, most=2), called, expected="1, 2 or a callable", what="is no norm that is known"),
    history=_a_history,
    step=whole(),
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
    """Norms of all weights as one row of a history.

    Parameters
    ----------
    model, layers
        As in :func:`weights`.
    over
        Dimensions to take the norm over, such as ``("feature", "unit_in", "unit")`` to keep one norm per gate; all by
        default: one number per weight.
    ord
        1: sum of absolute values; 2: Euclidean (Frobenius) norm; or a callable from a 1-D array to a number.
    history
        What an earlier call returned: the new row is appended.
    step
        Position of the row; by default one more than the last.

    Returns
    -------
    Dataset
        One variable per weight, named ``"lstm/kernel"``, with a leading dimension ``step``. ``history`` is not changed.
        NaN values make their norm NaN.
    """
    row = {}
    found = weights(model, layers=layers)
    _refuse_unknown_dims(found, over)
    for layer, node in found.items():
        for name in node.names:
            if not name.endswith("_count") and name != "bias_total":
                norm = _norm(node[name], over, ord)
                row[f"{layer}/{name}"] = norm.assign_attrs(_norm_words(node[name], ord))
    last = -1 if history is None else int(history["step"].values[-1])
    new = xr.Dataset(row).expand_dims(step=[last + 1 if step is None else step])
    return new if history is None else xr.concat([history, new], dim="step", combine_attrs="override")


def _refuse_unknown_dims(found: Weights, over: str | Iterable[str] | None) -> None:
    """A dimension that no weight at all has is a misspelt one."""
    known = {str(dim): None for layer in found for dim in found.dataset(layer).dims}
    for dim in [over] if isinstance(over, str) else over or ():
        if dim not in known:
            raise InputError(
                message(f"No weight has a dimension {dim!r}.", got=f"over={over!r}", hint=did_you_mean(dim, known))
            )


def _norm(values: xr.DataArray, over: str | Iterable[str] | None, ord: Any) -> xr.DataArray:
    wanted = {over} if isinstance(over, str) else set(over) if over is not None else set(map(str, values.dims))
    dims = [str(dim) for dim in values.dims if dim in wanted]
    # Dense kernels name their axes otherwise: a weight without any of these dimensions is reduced whole.
    dims = dims or [str(dim) for dim in values.dims]
    if callable(ord):
        flat = values.stack(_all=dims) if dims else values
        with raised_by("Your norm, ord=,"):
            reduced: xr.DataArray = xr.apply_ufunc(ord, flat, input_core_dims=[["_all"]], vectorize=True)
        return reduced
    if ord == 1:
        return abs(values).sum(dims, skipna=False)
    squares: xr.DataArray = (values.astype("float64") ** 2).sum(dims, skipna=False)
    return squares**0.5


def _norm_words(values: xr.DataArray, ord: Any) -> dict[str, str]:
    name = f"L{ord} norm" if not callable(ord) else getattr(ord, "__name__", "norm")
    return {"long_name": f"{name} of the {values.attrs.get('long_name', values.name)}", "units": "1"}


def _selected(found: Mapping[str, LayerWeights], layers: str | Iterable[str] | None) -> dict[str, LayerWeights]:
    if layers is None:
        return dict(found)
    names = [layers] if isinstance(layers, str) else list(layers)
    for name in names:
        if name not in found:
            raise LayerNotFoundError(message(f"No layer named {name!r} with weights.", hint=did_you_mean(name, found)))
    return {name: found[name] for name in names}


def _label(layer: LayerWeights) -> dict[str, Labelled]:
    if layer.cells:
        return label_cell({direction: cell.weights() for direction, cell in layer.cells.items()}, layer.cells)
    return label_plain(layer.values)


def _penalties(found: Mapping[str, LayerWeights]) -> dict[str, float]:
    """What each weight regulariser adds to the loss."""
    return {
        f"{layer}/{name}": float(plain(regularizer(entry.values[name])))
        for layer, entry in found.items()
        for name, regularizer in entry.penalties.items()
    }


def _add_gradients(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    found: Mapping[str, LayerWeights],
    labelled: dict[str, dict[str, Labelled]],
    by_time: bool | str,
    certified: bool,
) -> tuple[float | None, list[Check], Capture | None]:
    recurrent = {name for name, layer in found.items() if layer.cells}
    value: float | None = None
    checks: list[Check] = []
    capture: Capture | None = None
    if recurrent:
        request = CaptureRequest(layers=tuple(sorted(recurrent)), borders=certified)
        capture = adapter.capture(model, batch, request)
        value = capture.loss
        for name in recurrent:
            calls = _of_layer(on_host(capture.calls), name, by_time)
            grads, check = _recurrent_gradients(calls, by_time)
            labelled[name] |= label_cell(grads, found[name].cells, suffix="_grad", by_time=by_time)
            checks += check
    others = [name for name in found if name not in recurrent]
    if others:
        value = _plain_gradients(adapter, model, batch, found, labelled, others)
    return value, checks, capture


def _of_layer(calls: Iterable[RecurrentCall], name: str, by_time: bool | str) -> list[RecurrentCall]:
    """The calls of a layer, and of those that are tied to it: dL/dW is over all that share W.

    By time a layer has its own steps only, and no sum to be held against.
    """
    own: list[RecurrentCall] = []
    others: list[RecurrentCall] = []
    for call in calls:
        (own if call.layer.partition("#")[0] == name else others).append(call)
    keys = {call.weights_key for call in own if call.weights_key}
    tied = [call for call in others if call.weights_key in keys]
    if not tied or not by_time:
        return own + tied
    return [replace(call, weight_grads=None) for call in own]


def _recurrent_gradients(
    calls: Sequence[RecurrentCall], by_time: bool | str
) -> tuple[dict[str, dict[str, Any]], list[Check]]:
    """Gradients per direction, summed over the calls of a layer; and whether their sums equal the framework's.

    By time: calls of one layer are summed step by step. Those that the user's own loop makes follow each other instead.
    """
    _must_align(calls, by_time)
    total: dict[str, dict[str, Any]] = {}
    sums: dict[str, WeightSum] = {}
    for call in calls:
        _must_fit(call, by_time)
        run = Run.from_call(call)
        result = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad)
        whole = weights_of(call, run, result)
        if call.weight_grads is not None:
            alone = {name: grad for name, grad in call.weight_grads.items() if name not in call.tied}
            sums.setdefault(call.direction, WeightSum(call, alone)).add(whole, int(call.input.shape[1]))
        if by_time == "norm":
            whole = weight_norms_by_time(run, result)
        elif by_time:
            whole = weights_of(call, run, result, by_time=True)
        mine = total.setdefault(call.direction, {})
        for name, grad in whole.items():
            if name not in mine:
                mine[name] = plain(grad)
            elif by_time and call.stepwise:
                mine[name] = np.concatenate([mine[name], plain(grad)])
            else:
                mine[name] = plain(grad) + mine[name]
        if not by_time and call.weight_grads is not None:  # dL/dW is over all that share W
            mine |= {name: plain(call.weight_grads[name]) for name in call.tied if name in whole}
    return total, [entry.check() for entry in sums.values()]


def _must_align(calls: Sequence[RecurrentCall], by_time: bool | str) -> None:
    """Refuse calls that have no steps in common, and norms of what several calls do at one step."""
    whole = [call for call in calls if not call.stepwise]
    several = len(whole) > len({call.direction for call in whole})
    lengths = sorted({int(call.input.shape[1]) for call in whole})
    if several and (by_time == "norm" or (by_time and len(lengths) > 1)):
        raise UnsupportedError(
            message(
                f"Layer {whole[0].layer.partition('#')[0]!r} is called more than once: the calls share no time.",
                got=f"by_time={by_time!r} over {len(whole)} calls of {' and '.join(map(str, lengths))} steps",
                expected="calls of one length, and by_time=True",
                hint="rl.weights(...) without by_time, or a model that calls the layer once",
            )
        )


def _must_fit(call: RecurrentCall, by_time: bool | str) -> None:
    if by_time is not True or not isinstance(call.cell, KnownCell):
        return
    steps = int(call.input.shape[1])
    values = sum(int(np.prod(tuple(w.shape))) for w in call.cell.weights().values())
    size, limit = steps * values * plain(call.input[:1, :1]).itemsize, current().memory
    if size > limit:
        raise TooLargeError(
            message(
                f"The weight gradients of {call.layer!r} at each of {steps} steps would not fit into memory.",
                got=format_memory(size),
                expected=f"at most {format_memory(limit)} (rl.options(memory=...))",
                hint='by_time="norm" keeps one norm per step and gate',
            )
        )


def _plain_gradients(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    found: Mapping[str, LayerWeights],
    labelled: dict[str, dict[str, Labelled]],
    names: Sequence[str],
) -> float:
    """Gradients of layers that are not recurrent, by the framework; a weight off the path has none."""
    ports = [Port("weight", layer, key=key) for layer in names for key in found[layer].values]
    loss = Port("loss")
    with adapter.pullback(model, batch, [loss], ports) as pullback:
        value = pullback.values[loss]
        grads = pullback.vjp({loss: (value * 0 + 1)[None]})
        for port in ports:
            grad = grads.get(port)
            if grad is not None and port.layer is not None:
                labelled[port.layer] |= label_plain({f"{port.key}_grad": plain(grad)[0]})
        return float(value)
