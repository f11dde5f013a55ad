"""``rl.hidden_attention``: what each output of a Mamba channel takes from each input of the channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import arguments as check
from ..adapters.protocol import Batch, Port, ReferenceRun, Run, Taps
from ..errors import InputError, LayerNotFoundError, did_you_mean, short_repr
from ..results.array import LabelledArray, record_attrs
from ..results.checks import (
    Certificate,
    Check,
    residual,
    rounding_bound,
    warn_of_failed_checks,
    warn_of_missing_certificate,
)
from ..results.schema import labelled_array, to_host
from ..settings import must_fit
from ..vocabulary import CHANNEL, IN_TIME, OUT_TIME, SAMPLE, TIME
from .certificates.compare import (
    OUTPUTS,
    WEIGHTS,
    Comparisons,
    attempt,
    compare_in_turn,
    could_not_compare,
    fill_missing,
    random_factors,
    untouched,
)
from .names import uncalled_layer
from .request import ModelRequest, in_turn
from .traced_scans import resolve_positions

__all__ = ["hidden_attention"]

MAP, FROZEN, TOTAL = "map", "frozen", "total"
#: Number of channels of which the result has maps, unless others are asked for.
CHANNELS = 4
#: Largest memory, in bytes, of the cotangents of one pull.
_CHUNK = 32 * 2**20

Numbers = np.ndarray[Any, Any]


def chosen_positions(name: str, value: Any) -> dict[str, Any]:
    """Check ``at=``: positions by the dimension ``channel``, ``out_time`` or ``in_time``."""
    positions = check.axes_by_name(name, value)
    for dim in positions:
        if dim not in (CHANNEL, OUT_TIME, IN_TIME):
            expected = f'positions, {{"{CHANNEL}": ..., "{OUT_TIME}": ..., "{IN_TIME}": ...}}'
            raise InputError(f"{name}= of a hidden attention has no {dim!r}.", got=short_repr(value), expected=expected)
    return {dim: check.kept_steps(f"{name}[{dim!r}]", steps) for dim, steps in positions.items()}


def _batch_in_memory(name: str, value: Any) -> Any:
    """Check that an argument is one batch of samples in memory: no iterator of batches, no lazy array."""
    return check.one_batch(name, check.in_memory(name, value))


@check.checked(
    model=check.anything,
    x=_batch_in_memory,
    layer=check.text,
    at=chosen_positions,
    training=check.switch,
    seed=check.seed,
)
@in_turn
def hidden_attention(
    model: Any,
    x: Any,
    layer: str | None = None,
    *,
    at: Mapping[str, int | Sequence[int] | slice] | None = None,
    training: bool = False,
    seed: int = 0,
) -> LabelledArray:
    """Show what each output step of a Mamba channel takes from each input step, coefficients held and in total.

    A selective scan has the input x_t of a channel and the readout y_t = C_t S_t. With decay, write and read held at
    their values, y_i is the sum of alpha[i, j] x_j over the steps j: a matrix like that of an attention head, one for
    each channel. In total x_j also changes the coefficients of its own step and of this and all other channels.

    Parameters
    ----------
    model
        A ``torch.nn.Module`` with layers of Mamba-1 (Mamba, FalconMamba, Jamba, Zamba, mambapy); it is not changed.
    x
        One batch, as the model takes it.
    layer
        Name of the layer, as ``rl.layers(model)`` lists it, or its last parts, such as ``"layers.0.mixer"``; needed if
        there are several.
    at
        Positions to compute: ``{"channel": [0, 5], "out_time": [-1]}``, from 0; negative ones count from the end. By
        default all steps, and the four channels with the largest mean square of y. One pull-back of the scan per output
        step gives the frozen maps of all channels; the total ones take one per channel as well.
    training, seed
        As in :func:`rnnlens.trace`.

    Returns
    -------
    DataArray
        ``(map, sample, channel, out_time, in_time)`` with the maps ``"frozen"`` (alpha) and ``"total"``
        (dy_i/dx_j). Its self-check compares the sum of alpha[i, j] x_j with y_i. Its certificate compares
        the model around the differentiated scan with your own: the output, and the gradients of the layer's weights.

    Raises
    ------
    LayerNotFoundError
        If no whole-sequence layer, or not only one, has that name.
    UnsupportedError
        If the layer does not compute its coefficients from the input of its scan, as those of Mamba-2 and delta rules.
    TooLargeError
        If the result would not fit into memory; raised before the maps are computed.

    References
    ----------
    alpha: Ali, Zimerman, Wolf 2024, arXiv:2403.01590, eqs. 10-12.
    Selective scan: Gu, Dao 2023, arXiv:2312.00752, eqs. 2-4.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> from transformers import MambaConfig, MambaModel
    >>> model = MambaModel(MambaConfig(vocab_size=9, hidden_size=4, state_size=2, num_hidden_layers=1)).eval()
    >>> attention = rl.hidden_attention(model, torch.randint(9, (2, 6)), "layers.0.mixer")
    >>> attention.dims
    ('map', 'sample', 'channel', 'out_time', 'in_time')
    """
    request = ModelRequest.resolve(model, Batch(x, training=training, seed=seed))
    name = _scan_layer(request, layer)
    of, wrt = Port("scan_output", name), Port("scan_input", name)
    maps: dict[str, Numbers] = {}
    for kind in (FROZEN, TOTAL):
        batch = Batch(x, training=training, seed=seed, frozen=kind == FROZEN)
        with request.adapter.run(model, batch, Taps.ports([of], [wrt])) as run:
            outputs, inputs = (to_host(run.values[port]) for port in (of, wrt))
            if not maps:
                positions = _resolve(at or {}, outputs)
                _refuse_large(outputs, positions)
            maps[kind] = _pulled(run, (of, wrt), outputs.shape, positions, each_channel=kind == TOTAL)
            if kind == FROZEN:
                check_of_sum = _compare_sum(name, maps[kind], inputs, outputs, positions)
    kept_maps = np.stack([values[..., positions[IN_TIME]] for values in maps.values()])
    coords = {
        MAP: list(maps),
        SAMPLE: request.coordinates.find(SAMPLE, len(outputs)),
        CHANNEL: positions[CHANNEL],
    }
    labels = request.coordinates.find(TIME, outputs.shape[1])
    for dim in (OUT_TIME, IN_TIME):
        coords[dim] = positions[dim] if labels is None else labels[positions[dim]]
    details = ("hidden_attention", name, tuple(positions[CHANNEL]))
    certificate = request.earlier_certificate(*details)
    if certificate is None:
        certificate = _certify(replace(request, batch=Batch(x, training=training, seed=seed)), name, (of, wrt))
        request.remember(certificate, *details)
    attrs = {
        "long_name": "hidden attention",
        "units": "1",
        "layer": name,
        "definition": "frozen: alpha[i, j], y_i = sum_j alpha[i, j] x_j with decay, write and read held; "
        "total: dy_i / dx_j, of one channel",
        "source": "Ali, Zimerman, Wolf 2024, arXiv:2403.01590, eqs. 10-12",
        **record_attrs([check_of_sum], certificate),
    }
    warn_of_failed_checks([check_of_sum], certificate)
    warn_of_missing_certificate(certificate)
    dims = (MAP, SAMPLE, CHANNEL, OUT_TIME, IN_TIME)
    kept_coords = {dim: values for dim, values in coords.items() if values is not None}
    source = request.provenance()
    return LabelledArray(
        labelled_array(kept_maps, dims, name="hidden_attention", attrs=attrs, coords=kept_coords, provenance=source)
    )


def _scan_layer(request: ModelRequest, layer: str | None) -> str:
    """Return the full name of a whole-sequence layer; raise ``LayerNotFoundError`` unless there is one."""
    names = list(request.catalogue.sequences)
    if not names:
        raise LayerNotFoundError(
            "This model has no whole-sequence layer.",
            got=type(request.model).__name__,
            expected="a model with a layer of Mamba",
            hint='rl.jacobian(model, x, of="lstm.hidden", wrt="input"), of layers that run step by step',
        )
    if layer is None:
        matches = names
    else:
        base = uncalled_layer(layer, names)
        matches = [name for name in names if name == base or name.endswith(f".{base}")]
    if len(matches) != 1:
        raise LayerNotFoundError(
            "One layer has to be named." if layer is None else f"{len(matches)} whole-sequence layers have this name.",
            got=repr(layer),
            expected=f"one of {', '.join(names)}",
            hint=f'layer="{names[0]}"' if layer is None or matches else did_you_mean(layer, names),
        )
    call_number = "" if layer is None else layer.removeprefix(uncalled_layer(layer, names))
    return matches[0] + call_number


def _resolve(at: Mapping[str, Any], outputs: Numbers) -> dict[str, list[int]]:
    """Return the positions of all three dimensions; by default the channels with the largest mean square, in order."""
    _, steps, channels = outputs.shape
    sizes = {CHANNEL: channels, OUT_TIME: steps, IN_TIME: steps}
    largest = np.argsort(-np.square(outputs.astype(float)).mean((0, 1)), kind="stable")[:CHANNELS]
    positions = {CHANNEL: sorted(largest.tolist()), OUT_TIME: list(range(steps)), IN_TIME: list(range(steps))}
    return positions | {dim: resolve_positions(dim, value, sizes) for dim, value in at.items()}


def _refuse_large(outputs: Numbers, positions: Mapping[str, list[int]]) -> None:
    samples, steps, _ = outputs.shape
    count = 2 * samples * len(positions[CHANNEL]) * len(positions[OUT_TIME]) * steps
    hint = 'at={"channel": [0], "out_time": [-1]}, or fewer samples'
    must_fit("The maps would not fit into the memory granted.", count * outputs.dtype.itemsize, hint)


def _pulled(
    run: Run, ends: tuple[Port, Port], shape: Sequence[int], positions: Mapping[str, list[int]], *, each_channel: bool
) -> Numbers:
    """Return dy_i/dx_j of single channels, (sample, channel, out_time, in_time).

    While coefficients are held no channel reaches another one, and one cotangent of all channels serves all.
    """
    of, wrt = ends
    samples, steps, channels = shape
    kept, out_times = positions[CHANNEL], positions[OUT_TIME]
    dtype = to_host(run.values[of]).dtype
    maps = np.zeros((samples, len(kept), len(out_times), steps), dtype)
    groups: list[Any] = list(range(len(kept))) if each_channel else [slice(None)]
    for group in groups:
        for rows in _chunks(len(out_times), samples * steps * channels * dtype.itemsize):
            cotangents = np.zeros((len(rows), *shape), dtype)
            for row, position in enumerate(rows):
                cotangents[row, :, out_times[position], kept[group] if each_channel else slice(None)] = 1.0
            pulled = run.pull({of: cotangents})[wrt]
            if pulled is not None:
                selected = to_host(pulled)[..., kept]  # (row, sample, in_time, channel)
                by_channel = selected.transpose(1, 3, 0, 2)
                maps[:, group, rows] = by_channel[:, group]
    return maps


def _chunks(count: int, size: int) -> Iterator[range]:
    """Yield positions of as many rows of ``size`` bytes as are pulled at once."""
    rows = max(1, _CHUNK // max(size, 1))
    return (range(first, min(first + rows, count)) for first in range(0, count, rows))


def _compare_sum(
    name: str, frozen: Numbers, inputs: Numbers, outputs: Numbers, positions: Mapping[str, list[int]]
) -> Check:
    """Compare the sum of alpha[i, j] x_j with y_i."""
    x, y = (array[..., positions[CHANNEL]].astype(float) for array in (inputs, outputs))
    summed = np.einsum("scij,sjc->sic", frozen.astype(float), x)
    scale = np.einsum("scij,sjc->sic", abs(frozen).astype(float), abs(x)).max(initial=0.0)
    bound = rounding_bound(str(inputs.dtype), outputs.shape[1])
    return Check("hidden attention", name, residual(summed, y[:, positions[OUT_TIME]], scale=scale), bound)


def _certify(request: ModelRequest, name: str, scan_ends: tuple[Port, Port]) -> Certificate:
    """Compare the model around the differentiated scan with the user's model, whose own scan the framework runs.

    Random cotangents are pulled from the first output to the weights of the layer, through either scan and its
    coefficients: to those that make x_t, and to those that make the coefficients from it.
    """
    reference, reason = attempt(lambda: untouched(request, request.batch).reference(_factors))
    if reference is None:
        return could_not_compare(request, reason)
    inside = name.partition("#")[0] + "."
    weights = {
        weight: Port("weight", weight.rpartition(".")[0], key=weight.rpartition(".")[2])
        for weight, gradient in reference.weight_grads.items()
        if weight.startswith(inside) and gradient is not None
    }
    output_index = next((i for i, cotangent in enumerate(_factors(reference.outputs)) if cotangent is not None), None)
    if output_index is None:
        return could_not_compare(request, "the model returns no array of floats")
    output_port = Port("output", index=output_index)

    def pull() -> ReferenceRun:
        taps = Taps.ports([output_port, scan_ends[0]], [scan_ends[1], *weights.values()])
        with request.adapter.run(request.model, request.batch, taps) as run:
            output = np.asarray(to_host(run.values[output_port]))
            gradients = run.pull({output_port: _factor_array(output)[None]})
            weight_grads = {weight: _first_row(gradients[port]) for weight, port in weights.items()}
            return ReferenceRun([output], weight_grads=weight_grads)

    claim, reason = attempt(pull)
    if claim is None:
        return could_not_compare(request, reason)
    # Weights that are not trained are no tensors of the run that differentiates a scan.
    compared = weights if any(grad is not None for grad in claim.weight_grads.values()) else {}

    def compare(run: ReferenceRun) -> Certificate:
        comparisons = Comparisons(max(64, claim.outputs[0].shape[1]), "")
        comparisons.compare(OUTPUTS, "", [(claim.outputs[0], run.outputs[output_index])])
        for weight in compared:
            pairs = [fill_missing(claim.weight_grads[weight], run.weight_grads[weight])]
            comparisons.compare(WEIGHTS, weight.rpartition(".")[0], pairs)
        total = "the total maps, as no weight of the layer is trained"
        return comparisons.certificate(
            request.adapter.engine,
            certified=(
                "outputs through the differentiated scan",
                *["gradients of the layer's weights"] * bool(compared),
            ),
            resting=("frozen and total maps",) if compared else ("frozen maps",),
            uncertified=() if compared else (total,),
        )

    return compare_in_turn(request, lambda: (reference, ""), [compare], steps=claim.outputs[0].shape[1])


def _factor_array(values: Numbers) -> Numbers:
    """Return random factors of the shape and dtype of ``values``, the same at each call."""
    return np.asarray(random_factors(values.shape), values.dtype)


def _factors(outputs: Sequence[Any]) -> list[Numbers | None]:
    """Return random factors as cotangent of the first output of floats, None for the others."""
    arrays = [np.asarray(to_host(output)) for output in outputs]
    first = next((i for i, array in enumerate(arrays) if array.dtype.kind == "f" and array.ndim > 1), None)
    return [_factor_array(array) if i == first else None for i, array in enumerate(arrays)]


def _first_row(gradient: Any) -> Numbers | None:
    return None if gradient is None else np.asarray(to_host(gradient))[0]
