"""The result of following a training: every record of a run by layer and step, also while it is being written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xarray as xr
import zarr

from ..errors import FileError, did_you_mean, message
from .base import Part, Result
from .disk.limits import check_size, damaged
from .names import from_path, to_paths
from .schema import SCHEMA_VERSION
from .view import LayerView

STEP, WRITTEN = "step", "written"
_KINDS = ("probe", "batch")


class Gap(NamedTuple):
    """Records that are missing from a run, and why.

    Attributes
    ----------
    where
        What has the gap: ``"probe"`` or ``"batch"`` records, ``"the run"`` on disk, or a logger.
    first, last
        Steps of the first and of the last record that is missing; None for what was to be written at the end.
    records
        How many records are missing.
    reason
        The error that kept them out.
    """

    where: str
    first: int | None
    last: int | None
    records: int
    reason: str


class LayerRun(LayerView):
    """One layer over training: ``run["lstm"].adjoint_profile`` (step, time), its scalars as ``.reach`` (step,)."""

    def _absence(self, name: str) -> str:
        return message(f"Nothing named {name!r} was recorded of layer {self.name!r}.", hint=did_you_mean(name, self))

    def __repr__(self) -> str:
        lines = [f"<rnnlens LayerRun {self.name!r}>"]
        width = max((len(name) for name in self), default=0)
        for name in self:
            array = self.dataset[name]
            shape = ", ".join(f"{dim}: {size}" for dim, size in array.sizes.items())
            lines.append(f"  {name:<{width}}  ({shape})  {array.attrs.get('long_name', '')}".rstrip())
        return "\n".join(lines)


class TrainingRun(Result, kind="run"):
    """What ``rl.open`` returns for a followed training: a mapping from layer names to :class:`LayerRun`.

    Attributes
    ----------
    scalars
        Every number of every record: a Dataset with dimension ``step``, names as they were recorded
        (``"loss"``, ``"lstm/reach"``), and coordinates ``epoch`` and ``written`` (seconds since 1970).
    of
        Which records these are: ``"probe"`` or ``"batch"``.
    ended
        Why no more come: ``"finished"``, ``"interrupted"``, ``"stopped"``, the name of an error; None while the run is
        written, and where its process was killed.
    path
        Where it was read from; None of a run that was saved as one file.
    gaps
        Records that are missing, each a :class:`Gap`: a probe that failed, a full disk, a logger that raised.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        scalars: xr.Dataset,
        *,
        of: str = "probe",
        ended: str | None = None,
        path: Path | None = None,
        gaps: Iterable[Sequence[Any]] = (),
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.scalars, self.of, self.ended, self.path = scalars, of, ended, path
        self.gaps = [Gap(*gap) for gap in gaps]

    def __getitem__(self, name: str) -> LayerRun:
        return self._node(self._resolve(name))

    def _node(self, name: str) -> LayerRun:
        return LayerRun(name, self.dataset(name))

    @property
    def steps(self) -> xr.DataArray:
        """(step,): batches trained on at each record."""
        found: xr.DataArray = self.scalars[STEP]
        return found

    @property
    def loss(self) -> xr.DataArray:
        """(step,): the loss of each record.

        Raises
        ------
        QuantityNotFoundError
            If none was recorded.
        """
        return self.scalar("loss")

    def scalar(self, name: str) -> xr.DataArray:
        """One number over training, by its full name: ``run.scalar("lstm/reach")``; (step,).

        Raises
        ------
        QuantityNotFoundError
            If it was not recorded.
        """
        from ..errors import QuantityNotFoundError

        if name not in self.scalars:
            hint = did_you_mean(name, map(str, self.scalars.data_vars))
            raise QuantityNotFoundError(message(f"No scalar named {name!r} in this run.", hint=hint))
        return self.scalars[name]

    @property
    def batch(self) -> TrainingRun:
        """The records of the batches that were trained on.

        Raises
        ------
        FileError
            If there are none, or the run was not read from its folder.
        """
        return self._other("batch")

    @property
    def probe(self) -> TrainingRun:
        """The records of the probe."""
        return self._other("probe")

    def refresh(self) -> TrainingRun:
        """Read the run again: with what was written meanwhile."""
        return self._other(self.of)

    def _other(self, kind: str) -> TrainingRun:
        if self.path is None:
            if kind == self.of:
                return self
            raise FileError(message(f"This run was saved without its {kind} records.", got=f"{self.of} records"))
        return read_run(self.path, of=kind)

    def _meta(self) -> dict[str, Any]:
        columns = {str(name): np.asarray(v, dtype=float).tolist() for name, v in self.scalars.data_vars.items()}
        index = {name: self.scalars[name].values.tolist() for name in (STEP, "epoch", WRITTEN)}
        return {
            **super()._meta(),
            "of": self.of,
            "ended": self.ended,
            "gaps": self.gaps,
            "scalars": columns,
            "index": index,
        }

    @classmethod
    def _restore(cls, tree: xr.DataTree, meta: Mapping[str, Any]) -> Self:
        meta = dict(meta)
        scalars = _scalars(meta.pop("index"), meta.pop("scalars"))
        names = meta.pop("layers")
        nodes: dict[str, Any] = {name: tree[path] for name, path in to_paths(names).items()}
        return cls({name: node.to_dataset(inherit=False) for name, node in nodes.items()}, scalars, **meta)

    def _headline(self) -> str:
        count = self.steps.size
        where = f", steps {int(self.steps[0])} to {int(self.steps[-1])}" if count else ""
        loss = self.scalars.get("loss")
        said = "" if loss is None or not count else f", loss {float(loss[0]):.4g} → {float(loss[-1]):.4g}"
        return f"{count} {self.of} {'record' if count == 1 else 'records'}{where}, {super()._headline()}{said}"

    def _parts(self) -> list[Part]:
        loss = [("loss", "", self.scalars["loss"])] if "loss" in self.scalars else []
        return [*loss, *super()._parts()]

    def _remarks(self) -> list[tuple[str, str]]:
        ended = "" if self.ended == "finished" else self.ended or "not yet: it is being written, or was killed"
        missing = [
            (
                "missing",
                f"{gap.records} of {gap.where}, steps {gap.first} to {gap.last}: {gap.reason.partition(chr(10))[0]}",
            )
            for gap in self.gaps
        ]
        return [*([("ended", ended)] if ended else []), *missing, *super()._remarks()]


def is_run(path: Path) -> bool:
    """Whether a folder is a run, complete or not."""
    try:
        attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
        return bool(attributes["rnnlens_kind"] == "run")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refuse_newer(path: Path, attributes: Mapping[str, Any]) -> None:
    """Refuse a run that a newer rnnlens wrote, whose layout is not known here.

    Raises
    ------
    FileError
        By its schema.
    """
    if attributes.get("rnnlens_schema", 0) > SCHEMA_VERSION:
        raise FileError(message("This run was written by a newer rnnlens.", got=str(path), hint="upgrade rnnlens"))


def read_run(path: Path, *, of: str | None = None, memory: int | None = None) -> TrainingRun:
    """Read the complete records of a run; by default those of the probe, where there are any.

    Raises
    ------
    FileError
        If there are no records of that kind, or the folder is damaged or of a newer rnnlens.
    TooLargeError
        If they exceed ``memory`` bytes.
    """
    root = zarr.open_group(path, mode="r", zarr_format=3)
    attrs = dict(root.attrs)
    refuse_newer(path, attrs)
    there = [kind for kind in _KINDS if kind in root]
    kind = of or (there[0] if there else "probe")
    if of is not None and of not in there:
        listing = " and ".join(there) or "nothing"
        raise FileError(message(f"This run has no {of} records.", got=f"{path}: {listing}"))
    sessions = attrs.get("sessions") or [{}]
    common = {"provenance": sessions[-1].get("provenance"), "ended": (attrs.get("ended") or {}).get("reason")}
    common["gaps"] = attrs.get("gaps", [])
    if kind not in there:
        return TrainingRun({}, _scalars({STEP: [], "epoch": [], WRITTEN: []}, {}), of=kind, path=path, **common)
    group = root[kind]
    count = int(group["committed"][()]) if "committed" in group else 0
    arrays = _arrays(group)
    if memory is not None:
        check_size(path, sum(count * int(np.prod(a.shape[1:])) * a.dtype.itemsize for a in arrays.values()), memory)
    short = [name for name, array in arrays.items() if name.count("/") == 0 and array.shape[0] < count]
    if short:
        raise damaged(path, f"{count} records, but fewer of {', '.join(short)}")
    return _told(group, arrays, count, {"of": kind, "path": path, **common})


def _arrays(group: zarr.Group) -> dict[str, zarr.Array]:
    return {path: group[path] for path in group.attrs.get("arrays", []) if path in group}


def _told(group: zarr.Group, arrays: Mapping[str, zarr.Array], count: int, common: Mapping[str, Any]) -> TrainingRun:
    attrs = dict(group.attrs)
    index = {name: arrays[name][:count] if name in arrays else [] for name in (STEP, "epoch", WRITTEN)}
    table = arrays["scalars"][:count] if "scalars" in arrays else np.zeros((count, 0))
    columns = dict(zip(attrs.get("scalars", []), np.asarray(table).T, strict=False))
    scalars = _scalars(index, columns)
    layers: dict[str, dict[str, xr.DataArray]] = {layer: {} for layer in attrs.get("layers", [])}
    for name, array in arrays.items():
        if name.startswith("layers/"):
            path, _, quantity = name.removeprefix("layers").rpartition("/")
            layers.setdefault(from_path(path), {})[quantity] = _labelled(array, quantity, count, scalars)
    for name in map(str, scalars.data_vars):
        layer = max((layer for layer in layers if name.startswith(f"{layer}/")), key=len, default=None)
        if layer is not None:
            layers[layer].setdefault(name.removeprefix(f"{layer}/").replace("/", "_"), scalars[name])
    notes = [f"step {step}: {note}" for step, note in attrs.get("notes", []) if not count or step <= index[STEP][-1]]
    return TrainingRun({layer: xr.Dataset(found) for layer, found in layers.items()}, scalars, notes=notes, **common)


def _labelled(array: zarr.Array, name: str, count: int, scalars: xr.Dataset) -> xr.DataArray:
    values = np.full((count, *array.shape[1:]), array.fill_value, dtype=array.dtype)
    values[: min(count, array.shape[0])] = array[: min(count, array.shape[0])]
    attrs = dict(array.attrs)
    labels = attrs.pop("labels", {})
    dims = array.metadata.dimension_names
    sizes = dict(zip(dims, values.shape, strict=True))
    coords = {dim: labels[dim] for dim in dims if dim in labels and len(labels[dim]) == sizes[dim]}
    for dim, size in zip(dims[1:], values.shape[1:], strict=True):
        coords.setdefault(dim, np.arange(size))
    coords |= {STEP: scalars[STEP].values, "epoch": (STEP, scalars["epoch"].values)}
    return xr.DataArray(values, dims=dims, coords=coords, name=name, attrs=attrs)


def _scalars(index: Mapping[str, Any], columns: Mapping[str, Any]) -> xr.Dataset:
    coords: dict[str, Any] = {STEP: np.asarray(index[STEP], dtype=np.int64)}
    coords[STEP] = xr.Variable(
        (STEP,), coords[STEP], {"long_name": "training step", "definition": "batches trained on"}
    )
    coords["epoch"] = xr.Variable((STEP,), np.asarray(index["epoch"], dtype=np.int64), {"long_name": "epoch"})
    clock = {"long_name": "time of writing", "units": "seconds since 1970"}
    coords[WRITTEN] = xr.Variable((STEP,), np.asarray(index[WRITTEN], dtype=np.float64), clock)
    return xr.Dataset({name: ((STEP,), np.asarray(v), {"long_name": name}) for name, v in columns.items()}, coords)


def age(run: TrainingRun) -> float:
    """Seconds since the last record of a run was written; infinite of an empty one."""
    written = run.scalars[WRITTEN].values
    return float(time.time() - written[-1]) if written.size else float("inf")
