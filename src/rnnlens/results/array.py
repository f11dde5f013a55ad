"""``LabelledArray``: one quantity with its labels, units, checks, certificate, provenance and ``save``."""

from __future__ import annotations

import importlib
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import xarray as xr

from ..arguments import checked
from ..arguments import path as path_of
from ..errors import QuantityNotFoundError, did_you_mean
from .checks import Certificate, Check
from .disk.regions import ChunkTasks
from .page import Row, drawn_page, interactive_bundle, result_page
from .saving import save, save_chunks, tree_of
from .schema import format_provenance, provenance_of

#: Attributes of an array that store checks and certificate; other results have these as Python attributes.
RECORD, CERTIFICATE = "record", "certificate"


#: Largest number of values that are printed below the summary.
_MOST_PRINTED = 64


def aligned_text(headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """Format a headline and labelled rows below it; rows wider than the terminal continue in their column."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    terminal_width = shutil.get_terminal_size((10**6, 24)).columns
    wrap_options = {
        "width": max(terminal_width, width + 24),
        "subsequent_indent": " " * (width + 4),
        "break_on_hyphens": False,
    }
    lines = [headline, *(f"  {label:<{width}}  {text}" for label, text in rows)]
    return "\n".join(textwrap.fill(line, **wrap_options) if len(line) > terminal_width else line for line in lines)  # type: ignore[arg-type]


class LabelledArray(xr.DataArray):  # type: ignore[no-untyped-call]  # xarray's own __init_subclass__
    """A DataArray that prints as a summary, with checks, certificate, provenance and :meth:`save`.

    Arrays computed from it by xarray with attributes kept have them too.
    """

    __slots__ = ()

    @classmethod
    def around(cls, array: xr.DataArray) -> LabelledArray:
        """Return the same array, not copied and not checked again, as a labelled array."""
        return cls(array.variable, array._coords, name=array.name, indexes=array._indexes, fastpath=True)

    def sel(self, indexers: Mapping[Any, Any] | None = None, *args: Any, **labels: Any) -> Any:
        """Select by labels, as xarray does; a label that is not there is an error with those that are.

        Raises
        ------
        QuantityNotFoundError
            If a dimension or a label does not exist.
        """
        try:
            return super().sel(indexers, *args, **labels)
        except KeyError as error:
            unknown = self._unknown_label({**(indexers or {}), **labels})
            if unknown is None:
                raise
            raise unknown from error

    def isel(self, indexers: Mapping[Any, Any] | None = None, *args: Any, **positions: Any) -> Any:
        """Select by position, as xarray does; a dimension that is not there is an error with those that are.

        Raises
        ------
        QuantityNotFoundError
            If a dimension does not exist.
        """
        try:
            return super().isel(indexers, *args, **positions)
        except ValueError as error:
            asked = {**(indexers or {}), **positions}
            unknown = next((dim for dim in asked if dim not in {*self.dims, "drop", "missing_dims"}), None)
            if unknown is None:
                raise
            hint = did_you_mean(unknown, map(str, self.dims))
            raise QuantityNotFoundError(f"There is no dimension {unknown!r}.", hint=hint) from error

    def _unknown_label(self, labels: Mapping[Any, Any]) -> QuantityNotFoundError | None:
        """Return the error for the first dimension or label by name that does not exist; None if all exist."""
        for dim, label in labels.items():
            if dim in ("method", "tolerance", "drop"):  # options of xarray
                continue
            if dim not in self.coords and dim not in self.dims:
                hint = did_you_mean(dim, map(str, self.dims))
                return QuantityNotFoundError(f"There is no dimension {dim!r}.", hint=hint)
            names = [str(name) for name in self.coords[dim].values] if dim in self.coords else []
            if isinstance(label, str) and label not in names:
                # The share of the state that is kept: an LSTM's forget gate, a GRU's update gate.
                kept = {"forget": "update", "update": "forget"}.get(label)
                hint = did_you_mean(label, names)
                if kept in names:
                    hint = f"{dim}={kept!r}, the share of the state that is kept"
                return QuantityNotFoundError(f"There is no {dim} {label!r} here.", got=f"{dim}={label!r}", hint=hint)
        return None

    @property
    def checks(self) -> list[Check]:
        """Self-checks of the replayed layers, followed by the comparisons of the certificate."""
        self_checks = [Check(**stored_check) for stored_check in _stored_record(self).get("checks", [])]
        return [*self_checks, *self.certificate.checks]

    @property
    def certificate(self) -> Certificate:
        """Comparison with a reference run of the model; its state is ``"off"`` where none was stored."""
        stored_certificate = _stored_record(self).get("certificate")
        return Certificate() if stored_certificate is None else Certificate.from_dict(stored_certificate)

    @property
    def provenance(self) -> dict[str, str]:
        """Framework, versions, engine, dtype, device: plain strings."""
        return provenance_of(str(self.attrs.get("provenance", "")))

    def __repr__(self) -> str:
        values = self.variable._data
        if "provenance" not in self.attrs or not isinstance(values, np.ndarray) or not values.size:
            return super().__repr__()  # values on disk or in Dask chunks are not read for a summary
        rows = [("definition", str(self.attrs["definition"]))] if "definition" in self.attrs else []
        rows += [("dims", ", ".join(f"{dim}: {size}" for dim, size in self.sizes.items()))]
        if values.dtype.kind in "fiu":
            norm = float(np.linalg.norm(values.astype(float)))
            rows.append(("values", f"{np.min(values):.3g} to {np.max(values):.3g}, norm {norm:.3g}, {values.dtype}"))
        if "mask" in self.coords:
            rows.append(
                (
                    "masked",
                    f"{100 * (1 - float(self.coords['mask'].mean())):.0f} % of {', '.join(self.coords['mask'].dims)}",
                )
            )
        if "flagged" in self.attrs:
            rows.append(("flagged", str(self.attrs["flagged"])))
        summary = aligned_text(str(self.attrs.get("long_name", self.name)), rows + self._remarks())
        return summary if values.size > _MOST_PRINTED else f"{summary}\n{np.array2string(values, precision=4)}"

    def _remarks(self) -> list[tuple[str, str]]:
        """Return label and text of the lines below the values in the repr: certificate and provenance."""
        certificate = [("certificate", self.certificate.sentence)] if CERTIFICATE in self.attrs else []
        return [*certificate, ("from", format_provenance(self.provenance))]

    def _repr_html_(self) -> str:
        sizes = ", ".join(f"{dim}: {size}" for dim, size in self.sizes.items())
        row = Row.of(str(self.name or "values"), f"({sizes})", xr.DataArray(self))
        return result_page(str(self.attrs.get("long_name", self.name)), [row], self._remarks())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {} if self.chunks else interactive_bundle(self)

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Write the array to one file: netCDF for ``.nc``, Zarr for ``.zarr``; ``rl.open`` reads it back.

        A hidden attention is also written as the page of its figure, for ``.html``.

        Raises
        ------
        FileError
            If the path cannot be written, or has another suffix.
        """
        drawing = drawn_page(self) if str(path).lower().endswith((".html", ".htm")) else None
        if drawing is None:
            save(tree_of(self), path)
        else:
            drawing.save(path)


class LazyArray(LabelledArray):  # type: ignore[no-untyped-call]
    """A result in Dask chunks: nothing is computed until it is asked for.

    :meth:`compute` also reduces checks and certificates over the chunks. Arrays made from it by xarray
    are lazy too, and have none.
    """

    __slots__ = ("_tasks",)
    _tasks: ChunkTasks | None

    @classmethod
    def of(cls, array: xr.DataArray, tasks: ChunkTasks) -> LazyArray:
        """Return a lazy array; ``tasks.record()`` is a dask array of one mapping: checks and certificate."""
        lazy_array = cls(array)
        lazy_array._tasks = tasks
        return lazy_array

    def compute(self, **kwargs: Any) -> LabelledArray:  # type: ignore[override]
        """Compute the values, with checks and certificate reduced over the chunks; warn of failed ones."""
        tasks = getattr(self, "_tasks", None)
        if tasks is None:
            return LabelledArray(xr.DataArray(self).compute(**kwargs))
        lazy_dataset = xr.DataArray(self).to_dataset(name="values")
        computed_datasets, chunk_record = compute_with_record({"": lazy_dataset}, tasks, **kwargs)
        return LabelledArray(
            computed_datasets[""]["values"].rename(self.name).assign_attrs(chunk_record_attrs(chunk_record))
        )

    def _repr_html_(self) -> str:
        return str(xr.DataArray(self)._repr_html_())  # type: ignore[no-untyped-call]

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Compute chunk by chunk into a Zarr folder, each chunk by its own task; ``rl.open`` reads it back.

        A save that was killed, or in which chunks failed, goes on with what is missing when it is called again for the
        same model, data and arguments. The folder has its name once it is complete.

        Raises
        ------
        FileError
            If the path cannot be written or does not end in ``.zarr``, the disk is full, or the scheduler is lost.
        """
        tasks = getattr(self, "_tasks", None)
        if tasks is None or self.data.name not in tasks.names:
            self.compute().save(path)
        else:
            save_chunks(
                tree_of(self),
                tasks,
                path,
                lambda chunk_record, array_path: {array_path: chunk_record_attrs(chunk_record)},
            )


def compute_with_record(
    lazy_datasets: Mapping[str, xr.Dataset], tasks: ChunkTasks, **kwargs: Any
) -> tuple[dict[str, xr.Dataset], dict[str, Any]]:
    """Compute lazy datasets together with the record of their chunks, so that no chunk runs twice.

    Dask is given bare arrays: a dataset would be sent to a worker with all its tasks, the model among them. The record
    is an array too, since Dask optimizes collections of one kind together, and would fuse a chunk's task into both.
    """
    dask = importlib.import_module("dask")
    bare_arrays = {
        name: {key: v.data for key, v in dataset.data_vars.items()} for name, dataset in lazy_datasets.items()
    }
    values, chunk_record = dask.compute(bare_arrays, tasks.record(), **kwargs)
    return {name: dataset.copy(data=values[name]) for name, dataset in lazy_datasets.items()}, chunk_record.item()


#: Sentence of a result without a certificate.
_NOT_CERTIFIED = Certificate().sentence


def record_attrs(checks: Iterable[Check], certificate: Certificate | None = None) -> dict[str, str]:
    """Convert self-checks and a certificate to attributes for a file: all as JSON, and the certificate's sentence."""
    stored: dict[str, Any] = {"checks": [check.to_dict() for check in checks]}
    if certificate is None:
        return {RECORD: json.dumps(stored), CERTIFICATE: _NOT_CERTIFIED}
    return {RECORD: json.dumps({**stored, "certificate": certificate.to_dict()}), CERTIFICATE: certificate.sentence}


def chunk_record_attrs(chunk_record: Mapping[str, Any]) -> dict[str, str]:
    """Convert the reduced checks and certificate of all chunks to attributes that a file can store."""
    certificate = (
        Certificate() if chunk_record["certificate"] is None else Certificate.from_dict(chunk_record["certificate"])
    )
    return record_attrs([Check(**check) for check in chunk_record["checks"]], certificate)


def as_result(array: Any) -> Any:
    """Convert a DataArray of rnnlens to a :class:`LabelledArray`; return anything else unchanged."""
    is_labelled = isinstance(array, xr.DataArray) and "provenance" in array.attrs
    return LabelledArray.around(array) if is_labelled else array


def _stored_record(array: xr.DataArray) -> Mapping[str, Any]:
    stored: Mapping[str, Any] = json.loads(array.attrs.get(RECORD, "{}"))
    return stored
