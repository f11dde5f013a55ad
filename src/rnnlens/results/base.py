"""``Result``, the base class of all results: labelled data per layer, provenance, notes, checks, save and restore.

A result class is a thin subclass that names its kind::

    class Weights(Result, kind="weights"):
        def __init__(self, datasets, *, loss=None, **common): ...
        def _meta(self):
            return {**super()._meta(), "loss": self.loss}

``_meta`` returns keyword arguments, stored as JSON, from which :meth:`Result._restore` rebuilds the result. ``rl.open``
finds the class by its kind, and imports the module of that name in this folder if needed.
"""

from __future__ import annotations

import copy
import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, ClassVar, Self

import xarray as xr

from ..arguments import checked
from ..arguments import path as path_of
from ..errors import LayerNotFoundError, did_you_mean, missing_attribute, short_repr
from .array import aligned_text, compute_with_record
from .checks import Certificate, Check, worst_of
from .disk.regions import ChunkTasks
from .encoding import datasets_of, from_path, to_paths
from .page import Row, ShownFinding, interactive_bundle, result_page
from .saving import META, dask_name, root_attrs, save, save_chunks
from .schema import LabelledLayer, format_provenance, with_version

#: Name, description and data of one part of a result.
Part = tuple[str, str, xr.Dataset | xr.DataArray | None]

_CLASSES: dict[str, type[Result]] = {}


#: Module of each kind whose module has another name than the kind.
_MODULES = {
    "run": "training_run",
    "incident": "nonfinite",
    "comparison": "diagnosis",
    "dynamics": "diagnosis",
    "weights": "gradients",
}


def result_class(kind: str) -> type[Result] | None:
    """Return the result class registered for ``kind``, importing its module if needed; None for an unknown kind."""
    if kind not in _CLASSES and kind.isidentifier():
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"{__package__}.{_MODULES.get(kind, kind)}")
    return _CLASSES.get(kind)


class Result(Mapping[str, Any]):
    """Labelled data with one node per layer: a mapping from layer names to the return values of :meth:`_node`.

    Parameters
    ----------
    datasets
        Dataset of each layer by name, or its labelled arrays, in the order of the calls; or a DataTree of them.
    provenance
        Framework, versions, engine, dtype, device as strings. The version of rnnlens is added.
    notes
        Sentences on how to read the numbers.
    checks
        Self-checks, as :class:`~rnnlens.results.checks.Check` or as mappings.
    certificate
        Comparison with a reference run of the model, as :class:`~rnnlens.results.checks.Certificate` or as a
        mapping. Its comparisons are also in ``checks``.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if kind:
            cls.kind = kind
            _CLASSES[kind] = cls

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset | LabelledLayer] | xr.DataTree,
        *,
        provenance: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        checks: Iterable[Check | Mapping[str, Any]] = (),
        certificate: Certificate | Mapping[str, Any] | None = None,
    ) -> None:
        #: Data as given. Datasets and their tree are made on first use, as each takes as long as a small replay.
        self._datasets: dict[str, xr.Dataset | LabelledLayer] | xr.DataTree
        self._datasets = datasets if isinstance(datasets, xr.DataTree) else dict(datasets)
        if isinstance(datasets, xr.DataTree):
            self._paths = {from_path(node.path): node.path for node in datasets.subtree if node.has_data}
        else:
            self._paths = to_paths(datasets)
        self._tasks: ChunkTasks | None = None
        self.provenance = with_version(provenance)
        self.notes = list(notes)
        self.certificate = Certificate.from_dict(certificate) if isinstance(certificate, Mapping) else certificate
        self._self_checks = [check if isinstance(check, Check) else Check(**check) for check in checks]
        self.checks = [*self._self_checks, *(self.certificate.checks if self.certificate else ())]

    def pending(self, tasks: ChunkTasks) -> Self:
        """Set the tasks that compute this lazy result, and give its checks and certificate; return the result."""
        self._tasks = tasks
        return self

    def compute(self, **kwargs: Any) -> Self:
        """Return the result in memory; a lazy one (of Dask data) is computed, with checks reduced over its chunks.

        Parameters
        ----------
        **kwargs
            For ``dask.compute``, such as ``scheduler="synchronous"``.

        Warns
        -----
        SelfCheckWarning
            If a check of a chunk fails; the message names the chunk's samples.
        """
        if self._tasks is None:
            return self
        lazy_datasets = {name: self.dataset(name) for name in self}
        datasets, record = compute_with_record(lazy_datasets, self._tasks, **kwargs)
        result = copy.copy(self)
        result._datasets, result._tasks = dict(datasets), None
        result._set_chunk_record(record)
        return result

    def _set_chunk_record(self, record: Mapping[str, Any]) -> None:
        """Store checks and certificate of all chunks, from their reduced record, in this result."""
        self._self_checks = [Check(**check) for check in record["checks"]]
        stored_certificate = record["certificate"]
        self.certificate = Certificate() if stored_certificate is None else Certificate.from_dict(stored_certificate)
        self.checks = [*self._self_checks, *self.certificate.checks]

    @property
    def tree(self) -> xr.DataTree:
        """All data as one xarray DataTree: one node per layer, nested models as groups."""
        if not isinstance(self._datasets, xr.DataTree):
            nodes = {path: self._dataset(name) for name, path in self._paths.items()}
            self._datasets = xr.DataTree.from_dict(nodes)
        return self._datasets

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they were called."""
        return tuple(self._paths)

    def dataset(self, name: str) -> xr.Dataset:
        """Return all variables of one layer.

        Raises
        ------
        LayerNotFoundError
            If no layer has that name, or if a short name is ambiguous.
        """
        name = self._resolve(name)
        return self._dataset(name).copy()

    def _dataset(self, name: str) -> xr.Dataset:
        """Return the dataset of a layer, given its full name; it is made on first use."""
        if isinstance(self._datasets, xr.DataTree):
            node: Any = self._datasets[self._paths[name]]
            dataset: xr.Dataset = node.to_dataset(inherit=False)
            return dataset
        layer = self._datasets[name]
        if isinstance(layer, LabelledLayer):
            layer = self._datasets[name] = layer.dataset()
        return layer

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one file: netCDF for ``.nc``, Zarr for ``.zarr``; ``rl.open`` reads it back.

        An existing result is replaced only once the new one is complete: after an error or an interrupt the old file is
        unchanged.

        Raises
        ------
        FileError
            If the path cannot be written, or has another suffix.
        """
        if self._tasks is None:
            save(self._marked_tree(), path)
        elif all(dask_name(v) in self._tasks.names for name in self for v in self.dataset(name).data_vars.values()):
            save_chunks(self._marked_tree(), self._tasks, path, self._attributes_of_chunks)
        else:
            self.compute().save(path)

    def _marked_tree(self) -> xr.DataTree:
        """Return the tree of arrays to write to a file; its root has the attributes that mark a result of rnnlens."""
        stored_tree, layers = self._stored()
        tree = stored_tree.copy(deep=False)
        tree.attrs = root_attrs(self.kind, {**self._meta(), "layers": layers})
        return tree

    def _attributes_of_chunks(self, record: Mapping[str, Any], _: str) -> dict[str, Any]:
        """Return the attributes of the root once all chunks are written; ``record`` is their reduced record."""
        result = copy.copy(self)
        result._set_chunk_record(record)
        return {"": {META: result._marked_tree().attrs[META]}}

    def _node(self, name: str) -> Any:
        """Return the value of ``result[name]``: the layer's dataset, or a view of it in subclasses."""
        return self.dataset(name)

    def _meta(self) -> dict[str, Any]:
        """Return what :meth:`_restore` needs besides the tree of arrays to rebuild the result, serialisable as JSON."""
        return {
            "provenance": self.provenance,
            "notes": self.notes,
            "checks": [check.to_dict() for check in self._self_checks],
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
        }

    def _stored(self) -> tuple[xr.DataTree, list[str]]:
        """Return the tree to write to a file, and the names of its nodes in order."""
        return self.tree, list(self.layers)

    @classmethod
    def _restore(cls, tree: xr.DataTree, meta: Mapping[str, Any]) -> Self:
        """Rebuild the result from its tree and its metadata: the mapping of :meth:`_meta` and the layer names."""
        arguments = {key: value for key, value in meta.items() if key != "layers"}
        return cls(datasets_of(tree, meta["layers"]), **arguments)

    def _resolve(self, name: str) -> str:
        """Return the full name of a layer, given its exact or an unambiguous short name (the last part of the path)."""
        check_name_is_text(name, self._paths, f"the {self.kind}")
        if name in self._paths:
            return name
        same_name_calls = [full_name for full_name in self._paths if full_name.rpartition("#")[0] == name]
        nested_layers = [full_name for full_name in self._paths if full_name.endswith(f"/{name}")]
        nested_calls = [full_name for full_name in self._paths if full_name.rpartition("#")[0].endswith(f"/{name}")]
        candidates = same_name_calls or nested_layers or nested_calls
        if len(candidates) == 1:
            return candidates[0]
        if not candidates:
            layer, _, variable = name.replace("/", ".").rpartition(".")
            hint = did_you_mean(name, self._paths)
            if layer in self._paths:
                hint = f"result[{layer!r}][...], {did_you_mean(variable, map(str, self.dataset(layer).data_vars))}"
            raise LayerNotFoundError(f"No layer named {name!r} in this {self.kind}.", hint=hint)
        reason = "was called more than once" if same_name_calls else "exists more than once"
        listing = ", ".join(repr(candidate) for candidate in candidates)
        raise LayerNotFoundError(f"Layer {name!r} {reason}.", got=repr(name), expected=f"one of: {listing}")

    def __getitem__(self, name: str) -> Any:
        return self._node(self._resolve(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._missing_attribute(name), name=name, obj=self)

    def _missing_attribute(self, name: str) -> str:
        """Return the message for an attribute that does not exist: a variable is one of a layer of the result."""
        layer = next(iter(self._paths), None)
        variable_names = [] if layer is None else [str(variable) for variable in self.dataset(layer).data_vars]
        attribute_names = [attribute for attribute in dir(self) if not attribute.startswith("_")]
        closest = difflib.get_close_matches(name, [*variable_names, *attribute_names], n=1, cutoff=0.6)
        owner = self.kind or "result"
        in_layer = f"{owner}[{layer!r}]"
        gradients = [variable for variable in variable_names if variable.endswith("_grad")]
        other = None
        if name in ("grad", "grads", "gradient", "gradients") and gradients:
            other = f"{in_layer}.{'hidden_grad' if 'hidden_grad' in gradients else gradients[0]}: one of {gradients}"
        elif closest and closest[0] in variable_names:
            other = f"{in_layer}.{closest[0]}: variables belong to a layer"
        elif name in self._paths:
            other = f"{owner}[{name!r}]"
        elif not closest and variable_names:
            other = f"{in_layer} has {', '.join(variable_names)}; the {owner} itself has {', '.join(attribute_names)}"
        return missing_attribute(f"{type(self).__name__}", name, attribute_names, f"{owner}.", other)

    def __contains__(self, name: object) -> bool:
        try:
            self._resolve(name)  # type: ignore[arg-type]
        except LayerNotFoundError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._paths)

    def _headline(self) -> str:
        """Return the text that follows the class name in the first line of the repr."""
        return f"{len(self)} {'layer' if len(self) == 1 else 'layers'}"

    def _rows(self) -> list[tuple[str, str]]:
        """Return name and description of each layer, for the repr."""
        return [(name, ", ".join(str(v) for v in self.dataset(name).data_vars)) for name in self]

    def _remarks(self) -> list[tuple[str, str]]:
        """Return label and text of each line below the layers in the repr: checks, certificate, notes, provenance."""
        remarks = [("checks", f"FAILED {check.sentence}") for check in self._self_checks if not check.ok]
        if not remarks and (worst_check := worst_of(self._self_checks)):
            passed_text = f"{len(self._self_checks)} of {len(self._self_checks)} passed"
            remarks = [("checks", f"{passed_text} ({worst_check.layer} {worst_check.name}: {worst_check.figures})")]
        if self.certificate is not None:
            remarks += [("certificate", self.certificate.sentence)]
            remarks += [("", f"FAILED {check.sentence}") for check in self.certificate.checks if not check.ok]
        remarks += [("note", note) for note in self.notes]
        return [*remarks, ("from", format_provenance(self.provenance))]

    def __repr__(self) -> str:
        return aligned_text(f"<rnnlens {type(self).__name__}> {self._headline()}", self._rows() + self._remarks())

    def _notebook_findings(self) -> list[ShownFinding]:
        """Return the findings shown at the top of the notebook page; none unless a subclass overrides it."""
        return []

    def _parts(self) -> list[Part]:
        """Return name, description and data of each part of the result; the parts are the layers unless overridden."""
        descriptions = dict(self._rows())
        return [(name, descriptions.get(name, ""), self.dataset(name)) for name in self]

    def _non_part_rows(self) -> list[tuple[str, str]]:
        """Return label and text of the notebook page's rows that describe no part: checks, notes, provenance.

        A result with findings has only the remarks, because the page shows its other rows as findings.
        """
        if self._notebook_findings():
            return self._remarks()
        part_names = {name for name, _, _ in self._parts()}
        return [(label, text) for label, text in self._rows() if label not in part_names] + self._remarks()

    def _repr_html_(self) -> str:
        rows = [Row.of(*part) for part in self._parts()]
        return result_page(
            f"{type(self).__name__}: {self._headline()}", rows, self._non_part_rows(), self._notebook_findings()
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {} if self._tasks is not None else interactive_bundle(self)


def check_name_is_text(name: object, known_names: Iterable[str], owner: str) -> None:
    """Raise LayerNotFoundError if ``name`` is not a string."""
    if not isinstance(name, str):
        raise LayerNotFoundError(
            f"Entries of {owner} are found by name.", got=short_repr(name), hint=did_you_mean(name, known_names)
        )
