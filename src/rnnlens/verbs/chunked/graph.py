"""Task graph of a verb over chunks of samples: one task per chunk, sums in the order of the chunks, checks reduced."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...arguments import weights_of_samples
from ...autodiff.tensors import to_numpy
from ...cluster import TravellingModel, current_client, name_failed_samples, warn
from ...errors import InputError, SelfCheckWarning
from ...results.checks import Check, worst_checks
from ...settings import Settings, current, options
from ...typing import Array
from ...vocabulary import SAMPLE
from ..request import in_turn
from .samples import ChunkRows, SampleChunks

#: Engines that compile a run for each number of samples.
_COMPILED = ("jax", "tensorflow")
#: How a smaller chunk is filled up to the size of the others, so that their compiled run is used: with samples that
#: repeat and are left out of the result, or that have a sample weight of zero besides.
Padding = Literal["repeated", "weightless"]


@dataclass
class ChunkValues:
    """Numbers of one chunk: arrays that keep samples, parts of sums over samples, checks, and the target's value."""

    kept: dict[str, Array]
    sums: dict[str, Array] = field(default_factory=dict)
    checks: list[Mapping[str, Any]] = field(default_factory=list)
    certificate: Mapping[str, Any] | None = None
    value: Array | None = None
    weight: float = 1.0

    def record(self) -> dict[str, Any]:
        """Return the result of a chunk without its arrays: checks, certificate and value of the target."""
        return {"checks": self.checks, "certificate": self.certificate, "value": self.value, "weight": self.weight}


@dataclass(frozen=True)
class ChunkWork:
    """The computation of one chunk, which is sent to workers."""

    #: Padding of a chunk to full size that leaves its result unchanged; None if there is no such padding.
    padding: Padding | None
    #: Operation that combines the targets of all chunks: ``"mean"`` or ``"sum"``; None for a single chunk.
    combine: str | None

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Run the verb on the batch of one chunk; of its ``size`` samples, all after ``rows.count`` are padding."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChunkTask:
    """A task without its data: the work, options of the run, settings, layouts, size of a whole chunk, and padding."""

    work: ChunkWork
    options: Batch
    settings: Settings
    layouts: data.DataLayouts | None
    full: int
    padding: Padding | None

    def __call__(self, model: TravellingModel, rows: tuple[int, ...], *parts: Any) -> ChunkValues:
        """Compute one chunk from its arrays, in this process."""
        chunk = ChunkRows(*rows)
        certify = "never"
        if self.settings.certify == "always" or (chunk.number == 0 and self.settings.certify != "never"):
            certify = "always"
        with (
            name_failed_samples((chunk.start, chunk.stop)),
            options(memory=self.settings.memory, compiled=self.settings.compiled, certify=certify, progress=False),  # type: ignore[arg-type]
        ):
            values = _run_in_turn(model.get(), self, chunk, parts)
        for check in [*values.checks, *((values.certificate or {}).get("checks", ()))]:
            if not Check(**check).ok:
                samples_text = f"samples {chunk.start} to {chunk.stop - 1}"
                warn(f"{samples_text}: {Check(**check).sentence}", SelfCheckWarning)
        return values

    def batch(self, rows: ChunkRows, parts: Sequence[Any]) -> Batch:
        """Return the batch of a chunk, padded where that is possible."""
        x, y, weight, states = parts
        weight = None if weight is None else weights_of_samples("sample_weight", weight)
        seed = self.options.seed
        if seed is not None and self.options.training:
            seed += rows.number
        if self.padding == "weightless" and weight is None:
            weight = np.ones((rows.count, 1), "float32")
        if self.padding is not None and rows.count < self.full:
            x, y = self._pad_to_full("x", x, rows.count), self._pad_to_full("y", y, rows.count)
            weight = self._pad_to_full("sample_weight", weight, rows.count)
        return replace(self.options, x=x, y=y, sample_weight=weight, initial_state=states, seed=seed)

    def _pad_to_full(self, name: str, tree: Any, count: int) -> Any:
        """Pad the arrays of a chunk to full chunk size by repeating samples, with ``sample_weight`` 0 for these."""
        layouts = iter((self.layouts or {}).get(name) or [None] * len(data.leaves_of(tree)))

        def pad(array: Array) -> Array:
            layout = next(layouts)
            axis = 0 if layout is None or layout.sample is None else layout.sample
            padded = np.take(array, np.arange(self.full) % count, axis=axis)
            if name == "sample_weight":
                np.moveaxis(padded, axis, 0)[count:] = 0
            return padded

        return data.map_leaves(pad, tree)


@in_turn
def _run_in_turn(model: Any, task: ChunkTask, rows: ChunkRows, parts: Sequence[Any]) -> ChunkValues:
    return task.work(model, task.batch(rows, parts), rows, rows.count if task.padding is None else task.full)


class ChunkGraph:
    """The tasks of one call, and lazy arrays of their results; ``title`` names the tasks on Dask's dashboard."""

    def __init__(self, model: Any, chunks: SampleChunks, work: ChunkWork, title: str) -> None:
        self.chunks, self.work, run = chunks, work, chunks.run
        self.names: dict[str, str] = {}
        engine, sizes = adapter_for(model).engine, {rows.count for rows in chunks.bounds}
        self.model = TravellingModel(model, digest_of, engine)
        self.title = "rnnlens-" + "-".join(part for part in re.split(r"[^a-zA-Z]+", title) if part)
        compiles_again = engine in _COMPILED and len(sizes) > 1 and not run.training and run.initial_state is None
        batch_options = replace(run, x=None, y=None, sample_weight=None, initial_state=None)
        padding = work.padding if compiles_again else None
        self.task = ChunkTask(work, batch_options, current(), chunks.layouts, max(sizes), padding)
        if current_client() is not None:
            self.model.pack()

    @cached_property
    def token(self) -> str:
        """Name of the call as Dask uses it: equal for the same model, data and arguments."""
        from dask.base import tokenize

        run = self.chunks.run
        lazy = [
            getattr(leaf, "data", leaf) for tree in (run.x, run.y, run.sample_weight) for leaf in data.leaves_of(tree)
        ]
        names = [getattr(leaf, "name", None) or leaf for leaf in lazy]
        return str(
            tokenize(self.model, self.task, names, [vars(rows) for rows in self.chunks.bounds], run.initial_state)
        )

    @cached_property
    def arguments(self) -> list[tuple[Any, ...]]:
        """Arguments of the task of each chunk, with the model and the work as tasks of their own."""
        from dask import delayed

        model = delayed(self.model, name=f"rnnlens-model-{self.token}", traverse=False)
        task = delayed(self.task, name=f"rnnlens-work-{self.token}", traverse=False)
        states = self.chunks.run.initial_state
        parts = zip(*(self.chunks.blocks(name) for name in ("x", "y", "sample_weight")), strict=True)
        return [
            (
                task,
                model,
                (rows.number, rows.start, rows.stop, rows.total),
                *chunk_parts,
                data.samples_of_arrays(states, rows.start, rows.stop),
            )
            for rows, chunk_parts in zip(self.chunks.bounds, parts, strict=True)
        ]

    @cached_property
    def results(self) -> list[Any]:
        """The task of each chunk; its value is a :class:`ChunkValues`."""
        from dask import delayed

        return [
            self._named_task(delayed(compute_chunk), rows.number)(*arguments)
            for rows, arguments in zip(self.chunks.bounds, self.arguments, strict=True)
        ]

    def kept(self, name: str, template: xr.DataArray) -> xr.DataArray:
        """Return a lazy array with the samples of all chunks, labelled as the template."""
        import dask.array as da
        from dask import delayed

        axis = template.dims.index(SAMPLE)
        parts = []
        for rows, result in zip(self.chunks.bounds, self.results, strict=True):
            shape = tuple(rows.count if i == axis else size for i, size in enumerate(template.shape))
            take = self._named_task(delayed(take_array), rows.number, "take", name)
            part = take(result, "kept", name, shape, str(template.dtype))
            parts.append(da.from_delayed(part, shape, template.dtype))
        joined = da.concatenate(parts, axis=axis)
        self.names[joined.name] = name
        return self.label(template, joined)

    def total(self, name: str, template: xr.DataArray, scale: float = 1.0, samples: int = 1) -> xr.DataArray:
        """Return a lazy sum of the chunks' parts in their order, times ``scale`` and divided by ``samples``."""
        import dask.array as da
        from dask import delayed

        total: Any = None
        for rows, result in zip(self.chunks.bounds, self.results, strict=True):
            take = self._named_task(delayed(take_array), rows.number, "take", name)
            part = take(result, "sums", name, template.shape)
            add = self._named_task(delayed(np.add), rows.number, "sum", name)
            total = part if total is None else add(total, part)
        finish = self._named_task(delayed(finish_sum), 0, "finish", name)
        total = finish(total, scale, samples, str(template.dtype))
        return self.label(template, da.from_delayed(total, template.shape, template.dtype))

    def record(self) -> Any:
        """Return a dask array of one mapping: the worst self-checks and certificate of all chunks, and their value."""
        import dask.array as da
        from dask import delayed

        records = [
            self._named_task(delayed(ChunkValues.record), i, "take", "checks")(result)
            for i, result in enumerate(self.results)
        ]
        reduced = self._named_task(delayed(box_records), 0, "checks")(records, self.work.combine)
        return da.from_delayed(reduced, (), object)

    def reduced(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Reduce the records of all chunks to checks, certificate and value."""
        return reduce_records(records, self.work.combine)

    def label(self, template: xr.DataArray, lazy: Any) -> xr.DataArray:
        """Return a lazy array with the dimensions, coordinates and attributes of the template."""
        coords = {str(name): coord.variable for name, coord in template.coords.items() if SAMPLE not in coord.dims}
        if SAMPLE in template.dims:
            attrs = template[SAMPLE].attrs if SAMPLE in template.coords else {}
            coords[SAMPLE] = xr.Variable((SAMPLE,), self.chunks.labels(), attrs)
        attrs = dict(template.attrs)
        for attribute in ("record", "certificate", "flagged", "touched_rows", "flops", "peak_bytes", "replay_residual"):
            attrs.pop(attribute, None)
        if self.chunks.notes:
            attrs["note"] = " ".join(dict.fromkeys(self.chunks.notes))
        return xr.DataArray(lazy, dims=template.dims, coords=coords, name=template.name, attrs=attrs)

    def _named_task(self, function: Any, number: int, step: str = "", array: str = "") -> Callable[..., Any]:
        """Return a delayed function whose task has a key of ours, by which Dask's dashboard groups tasks.

        ``number`` is that of the chunk, ``step`` one word, and ``array`` the name of the array that the task makes.
        """
        group = "-".join(part for part in (self.title, step, self.token) if part)
        return partial(function, dask_key_name=(group, *([array] if array else []), number))


def compute_chunk(task: ChunkTask, model: TravellingModel, rows: tuple[int, ...], *parts: Any) -> ChunkValues:
    """Compute the result of one chunk of samples; this is the function of the Dask tasks."""
    return task(model, rows, *parts)


def take_array(
    values: ChunkValues, kind: Literal["kept", "sums"], name: str, shape: tuple[int, ...], dtype: str | None = None
) -> Array:
    """Return one array of a chunk; raise InputError if its shape is not that of the other chunks."""
    array: Array = getattr(values, kind)[name]
    if array.shape != tuple(shape):
        message = f"A chunk has another shape of {name!r} than the others, so they cannot be put together."
        hint = "pad all samples to one length and mask the padding"
        raise InputError(message, got=array.shape, expected=tuple(shape), hint=hint)
    return array if dtype is None else array.astype(dtype, copy=False)


def finish_sum(total: Array, scale: float, samples: int, dtype: str) -> Array:
    """Multiply a sum over all chunks by ``scale / samples``, and convert it to ``dtype``."""
    return np.asarray(total * scale / samples).astype(dtype, copy=False)


def box_records(records: Sequence[Mapping[str, Any]], combine: str | None) -> Array:
    """Reduce the records of all chunks to one; return it as the only element of an array."""
    box = np.empty((), object)
    box[()] = reduce_records(records, combine)
    return box


def reduce_records(records: Sequence[Mapping[str, Any]], combine: str | None) -> dict[str, Any]:
    """Reduce the records of chunks: each check closest to its bound, a failed certificate first, the target's value."""
    checks = worst_checks(Check(**check) for chunk_record in records for check in chunk_record["checks"])
    values: list[Any] = [chunk_record["value"] for chunk_record in records]
    value: Any = None
    if values[0] is not None and np.ndim(values[0]):
        value = np.concatenate(values)
    elif all(part is not None for part in values):
        totals, weights = np.asarray(values, dtype=np.float64), [chunk_record["weight"] for chunk_record in records]
        value = np.average(totals, weights=weights) if combine == "mean" else totals.sum()
    rank = {"failed": 0, "could not": 1, "passed": 2, "off": 3}

    def order(certificate: Mapping[str, Any]) -> tuple[int, float]:
        """Return the sort key of a certificate: its state, then how close its worst comparison is to the bound."""
        return rank[certificate["state"]], -max(
            (check["residual"] / check["bound"] for check in certificate["checks"]), default=0.0
        )

    certificates = [chunk_record["certificate"] for chunk_record in records if chunk_record["certificate"] is not None]
    return {
        "checks": [check.to_dict() for check in checks],
        "certificate": min(certificates, key=order, default=None),
        "value": value,
    }


def digest_of(model: Any) -> str:
    """Return a hash of a model's class, layers and weights."""
    adapter, digest = adapter_for(model), hashlib.sha256()
    digest.update(repr(type(model)).encode())
    digest.update(repr([(info.name, info.kind, info.units) for info in adapter.describe(model)]).encode())
    for layer, weights in adapter.weights(model).items():
        for name, value in weights.values.items():
            array = np.ascontiguousarray(to_numpy(value))
            digest.update(f"{layer}/{name} {array.shape} {array.dtype}".encode())
            digest.update(array.view(np.uint8).data if array.ndim and array.size else array.tobytes())
    return digest.hexdigest()[:32]
