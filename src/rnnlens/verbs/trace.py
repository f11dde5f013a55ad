"""``rl.trace``: states, gates and gradients of each recurrent layer at every step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import xarray as xr

from .. import arguments as check
from ..adapters.protocol import Batch, Capture, Taps
from ..adapters.registry import adapter_for
from ..errors import InputError, UnsupportedError, did_you_mean
from ..recurrence.replay import Replay
from ..results.checks import Certificate, warn_of_failed_checks
from ..results.schema import LabelledLayer
from ..results.trace import Trace
from ..settings import current
from ..vocabulary import SAMPLE
from .axes import an_axes_table
from .certificates.of_trace import (
    ReplayedValues,
    certify,
    is_divisible,
    part_to_compare,
    start_reference_run,
    with_part,
)
from .chain import ChainGradients
from .chunked.samples import SampleChunks
from .chunked.works import lazy_datasets
from .names import CertifiedTraces, known_model
from .request import ModelRequest, in_turn
from .traced_layers import TraceSelection, assign_coordinates, plain_datasets, recurrent_datasets
from .traced_scans import chosen_positions, select_positions, sequence_datasets


@check.checked(
    model=check.anything,
    x=check.chunked(check.one_batch),
    y=check.chunked(check.examples),
    layers=check.names,
    quantities=check.names,
    initial_state=check.finite_states,
    axes=an_axes_table,
    at=chosen_positions,
    **check.RUN,
)
@in_turn
def trace(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    layers: str | Iterable[str] | None = None,
    quantities: str | Iterable[str] | None = None,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = 0,
    axes: Mapping[str, Any] | None = None,
    at: Mapping[str, int | Sequence[int] | slice] | None = None,
) -> Trace:
    """Trace a model on one batch: activations, gates, states, and direct and total gradients at every timestep.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; it is not changed.
    x
        One batch, as the model takes it: an array, or a tuple, list or dict of arrays.
    y
        Target. Without it, and without a ``loss`` that needs none, there are no gradients.
    layers
        Names of the layers to trace, recurrent or not; all recurrent layers by default.
    quantities
        Names of the variables to compute and keep; all by default. See ``rnnlens.vocabulary.QUANTITIES``. In a layer
        whose states have names of the user's, ``"hidden"`` and ``"hidden_grad"`` are those of the first state.
    loss
        Keras: ``loss(y_true, y_pred)``, a Keras loss or its name; the compiled loss by default.
        torch: ``loss(output, target)``, required for gradients. It must return a scalar.
    sample_weight, class_weight
        As in training.
    training
        Run in training mode, with dropout. State, statistics and random state are restored.
    initial_state
        Initial states by layer name, one (sample, unit) array each.
    seed
        Seed of random numbers such as dropout, so that equal calls draw the same. None continues with the present state
        of the generators.
    axes
        Roles of the axes of a tensor, if they cannot be found out: ``{"conv.output": ("sample", "unit",
        "time")}``; ``(("time", "sample"), "unit")`` for two axes folded into one.
    at
        Positions to keep by dimension, such as ``{"time": [0, -1], "channel": slice(0, 4)}``; all by default. States of
        other steps of whole-sequence layers (Mamba, delta rules) are computed, but never stored.

    Returns
    -------
    Trace
        ``trace["lstm"].hidden_grad`` and others: DataArrays with dimensions ``sample, time, (direction,) unit``.

    Raises
    ------
    InputError
        If data, target or an argument does not fit.
    ModelError
        If the model is not built, not compiled (and no loss given), or of no known framework.
    LayerNotFoundError
        If ``layers`` names a layer that the model does not have.
    UnsupportedError
        If the model contains something that rnnlens does not support; the message names it.

    Warns
    -----
    SelfCheckWarning
        If the mismatch of a self-check exceeds its rounding bound.

    References
    ----------
    Total gradients: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> trace = rl.trace(model, x, loss=lambda output: output[0].square().sum())
    >>> trace["lstm"].hidden_grad.sizes["time"]
    9
    >>> trace["lstm"].gates.sel(gate="forget").dims
    ('sample', 'time', 'unit')
    """
    batch = Batch(x, y, sample_weight, class_weight, loss, training, initial_state, seed)
    selection = TraceSelection.of(layers, quantities, has_loss(model, batch), partial(_states_of_run, model, batch))
    verb = _lazy_trace if check.is_lazy((x, y, sample_weight)) else trace_batch
    return verb(model, batch, selection, at or {}, axes)


def _states_of_run(model: Any, batch: Batch) -> set[str]:
    """Run a model; return the names of the states of all its layers."""
    adapter = adapter_for(model)
    capture = adapter.run(model, batch.without_loss(), Taps.states(inputs=False)).capture
    return {state for call in capture.calls for state in call.cell.state_names}


def has_loss(model: Any, batch: Batch) -> bool:
    """Return whether there is a loss: a target, a function, or the model's own one."""
    return batch.y is not None or batch.loss is not None or adapter_for(model).facts(model).has_own_loss


def trace_batch(
    model: Any, batch: Batch, requested: TraceSelection, at: Mapping[str, Any], axes: Mapping[str, Any] | None
) -> Trace:
    """Capture, replay, sweep, label and certify one batch."""
    request = ModelRequest.resolve(model, batch, axes)
    details = ("trace", requested.layers, requested.quantities)
    earlier, key = request.earlier_certificate(*details), request.key(*details)
    needs_certificate, certified = earlier is None, request.catalogue.known.certified
    part = part_to_compare(certified, batch, key) if needs_certificate else None
    agreed = not batch.initial_state and key in certified.agreed_chains
    selection = replace(requested, compares_weights=needs_certificate or current().certify != "first", part=part)
    taps = selection.taps(needs_certificate, topmost=agreed and (part is not None or not needs_certificate))
    capture = request.adapter.run(model, batch, taps).capture
    selection = replace(selection, compares_weights=selection.compares_weights and not capture.topmost)
    provenance = request.provenance(with_loss=selection.has_loss)
    claim = ReplayedValues(capture, part) if needs_certificate else None
    layer_infos = {**request.catalogue.recurrent, **request.catalogue.sequences}
    if any(not layer_infos.keys() & {call.layer, call.layer.rpartition("#")[0]} for call in capture.calls):
        layer_infos |= known_model(request.adapter, model).recurrent  # the run has shown cells
    with nullcontext(None) if claim is None else start_reference_run(request, claim) as reference_run:
        chain = ChainGradients.of(capture, batch.x) if selection.needs_sweep else None
        datasets_of = partial(recurrent_datasets, layer_infos, capture, selection, provenance, chain=chain)
        datasets, checks = datasets_of(claim)
        scans: dict[str, LabelledLayer] = {}
        if capture.sequences:
            scans, scan_checks = sequence_datasets(layer_infos, capture.sequences, selection, provenance, at)
            datasets, checks = {**datasets, **scans}, [*checks, *scan_checks]
        if claim is not None:
            claim.include_scans(capture.sequences)
        datasets |= plain_datasets(capture.other_calls, request.axes, batch, selection, provenance)
        selection.refuse_absent(datasets, list(layer_infos))
        assign_coordinates(datasets.values(), request.coordinates)
        certificate = earlier or Certificate()
        if claim is not None and reference_run is not None:
            certificate = certify(
                request, claim, reference_run, partial(_claim_of_replays, datasets_of, capture), datasets
            )
            request.remember(certificate, *details)
    if part is not None:
        calls = certified.traces[key]
        if certificate.state != "passed":
            calls.divisible = False
            return trace_batch(model, batch, requested, at, axes)
        certificate = with_part(calls.certificate, certificate, part)
    elif needs_certificate and certificate.state == "passed" and key is not None and is_divisible(batch, capture):
        known_model(request.adapter, model).certified.traces.setdefault(key, CertifiedTraces(certificate))
    elif certificate.state == "failed":
        certified.traces.pop(key, None)
    passed = certificate.state in ("passed", "off") and all(result.ok for result in checks)
    if chain is not None and chain.agree and key is not None and passed and key not in certified.agreed_chains:
        known_model(request.adapter, model).certified.agreed_chains.add(key)
    kept_datasets: dict[str, xr.Dataset | LabelledLayer] = dict(datasets)
    if at:
        kept_datasets |= _at_positions(datasets, at, selected_before=scans)
    warn_of_failed_checks(checks, certificate)
    return Trace(
        kept_datasets,
        loss=capture.loss,
        quantities=None if selection.quantities is None else sorted(selection.quantities),
        provenance=provenance,
        notes=capture.notes,
        checks=checks,
        certificate=certificate,
    )


def _at_positions(
    datasets: Mapping[str, LabelledLayer], at: Mapping[str, Any], selected_before: Container[str]
) -> dict[str, xr.Dataset]:
    """Return the layers at some positions, but not those selected before; raise for a dimension that no layer has."""
    known_dims = {str(dim) for layer in datasets.values() for dim in layer.sizes}
    for dim in at:
        if dim not in known_dims:
            problem = f"at= has a dimension {dim!r} that no traced layer has."
            raise InputError(problem, got=f"at={dict(at)!r}", hint=did_you_mean(dim, known_dims))
    return {
        name: select_positions(layer.dataset(), at) for name, layer in datasets.items() if name not in selected_before
    }


def _lazy_trace(
    model: Any, batch: Batch, selection: TraceSelection, at: Mapping[str, Any], axes: Mapping[str, Any] | None
) -> Trace:
    """Return a trace of data in Dask chunks, which is computed when it is asked for."""
    if SAMPLE in at:
        hint = "select the samples of x and y before: x.isel(sample=...), or x[...] of a dask array"
        raise UnsupportedError("at= selects no samples of lazy data.", got=f"at={dict(at)!r}", hint=hint)
    request = ModelRequest.resolve(model, batch, axes)
    chunks = SampleChunks.of(request.axes, batch)
    verb = partial(trace_batch, requested=selection, at=at, axes=axes)
    lazy_parts = lazy_datasets(request.adapter, model, chunks, verb, "trace", sums=False, with_loss=selection.has_loss)
    template, datasets, graph = lazy_parts
    quantities = None if selection.quantities is None else sorted(selection.quantities)
    notes = [*template.notes, *chunks.notes]
    result = Trace(datasets, quantities=quantities, provenance=template.provenance, notes=notes)
    return result.pending(graph)


def _claim_of_replays(
    datasets_of: Callable[..., Any], capture: Capture, replay_of: Callable[[Replay], Replay]
) -> ReplayedValues:
    """Recompute what a certificate compares from other replays of the captured calls."""
    claim = ReplayedValues(capture)
    datasets_of(claim, replay=lambda call: replay_of(Replay.from_call(call)))
    return claim
