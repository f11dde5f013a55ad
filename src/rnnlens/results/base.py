"""What every result has in common: labelled data per layer, where it comes from, notes, checks, save and open.

A result class is a thin subclass that names its kind::

    class Weights(Result, kind="weights"):
        def __init__(self, datasets, *, loss=None, **common): ...
        def _meta(self):
            return {**super()._meta(), "loss": self.loss}

``_meta`` returns what :meth:`Result._restore`, after a trip through JSON, builds the same result again from: keyword
arguments, unless the class says otherwise. ``rl.open`` finds the class by its kind: one that nobody has imported yet
lives in the module of that name in this folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, ClassVar, Self

import xarray as xr

from ..arguments import checked
from ..arguments import path as path_of
from ..errors import LayerNotFoundError, did_you_mean, message, shown
from .certificate import Certificate
from .checks import Check
from .names import from_path, to_paths
from .page import Row, Said, page
from .schema import with_version

#: Name, words and data of one part of a result.
Part = tuple[str, str, xr.Dataset | xr.DataArray | None]

_CLASSES: dict[str, type[Result]] = {}


#: Modules of the kinds that do not have the name of their module.
_MODULES = {"run": "training_run", "incident": "nonfinite"}


def result_class(kind: str) -> type[Result] | None:
    """Find the class that registered itself for ``kind``, imported if need be; None for a kind nobody knows."""
    if kind not in _CLASSES and kind.isidentifier():
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"{__package__}.{_MODULES.get(kind, kind)}")
    return _CLASSES.get(kind)


class Result(Mapping[str, Any]):
    """Labelled data with one node per layer.

    Behaves as a mapping from layer names to what :meth:`_node` makes of their datasets.

    Parameters
    ----------
    datasets
        By layer name, in the order in which the layers were called; or a tree of them.
    provenance
        Framework, versions, engine, dtype, device: plain strings. Which rnnlens it was is added.
    notes
        Sentences that a reader of the numbers must know.
    checks
        Self-checks, as :class:`~rnnlens.results.checks.Check` or as mappings.
    certificate
        How the numbers compare with a plain run of the model, as :class:`~rnnlens.results.certificate.Certificate` or
        as a mapping. Its comparisons are among ``checks`` as well.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind:
            cls.kind = kind
            _CLASSES[kind] = cls

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        provenance: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        checks: Iterable[Check | Mapping[str, Any]] = (),
        certificate: Certificate | Mapping[str, Any] | None = None,
    ) -> None:
        self._tree = datasets if isinstance(datasets, xr.DataTree) else _tree(datasets)
        self._paths = _found(datasets) if isinstance(datasets, xr.DataTree) else to_paths(datasets)
        self.provenance = with_version(provenance)
        self.notes = list(notes)
        self.certificate = Certificate.from_dict(certificate) if isinstance(certificate, Mapping) else certificate
        self._self_checks = [check if isinstance(check, Check) else Check(**check) for check in checks]
        self.checks = [*self._self_checks, *(self.certificate.checks if self.certificate else ())]

    @property
    def tree(self) -> xr.DataTree:
        """All data as one xarray DataTree: one node per layer, nested models as groups."""
        return self._tree

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they were called."""
        return tuple(self._paths)

    def dataset(self, name: str) -> xr.Dataset:
        """All variables of one layer.

        Raises
        ------
        LayerNotFoundError
            If no layer has that name, or if more than one could be meant.
        """
        node: Any = self._tree[self._paths[self._resolve(name)]]
        dataset: xr.Dataset = node.to_dataset(inherit=False)
        return dataset

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to one file: netCDF for ``.nc``, Zarr for ``.zarr``; ``rl.open`` reads it back.

        A result of that name that is already there is replaced, and only once the new one is complete: after an error
        or an interrupt the old file is as it was.

        Raises
        ------
        FileError
            If the path cannot be written, or ends in neither.
        """
        from .files import save

        save(self, path)

    def _node(self, name: str) -> Any:
        """Build what ``result[name]`` returns."""
        return self.dataset(name)

    def _meta(self) -> dict[str, Any]:
        """What builds this result again from its tree, for :meth:`_restore`; JSON can hold it."""
        return {
            "provenance": self.provenance,
            "notes": self.notes,
            "checks": [check.to_dict() for check in self._self_checks],
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
        }

    def _stored(self) -> tuple[xr.DataTree, list[str]]:
        """What a file holds: the tree, and the names of its nodes in their order."""
        return self._tree, list(self.layers)

    @classmethod
    def _restore(cls, tree: xr.DataTree, meta: Mapping[str, Any]) -> Self:
        """Build the result again from its tree, :meth:`_meta`, and the order of its layers."""
        meta = dict(meta)
        nodes: dict[str, Any] = {name: tree[path] for name, path in to_paths(meta.pop("layers")).items()}
        return cls({name: node.to_dataset(inherit=False) for name, node in nodes.items()}, **meta)

    def _resolve(self, name: str) -> str:
        """Full name of a layer: exact, or short where only one layer ends in it."""
        refuse_no_name(name, self._paths, f"this {self.kind}")
        if name in self._paths:
            return name
        calls = [known for known in self._paths if known.rpartition("#")[0] == name]
        inside = [known for known in self._paths if known.endswith(f"/{name}")]
        inside_calls = [known for known in self._paths if known.rpartition("#")[0].endswith(f"/{name}")]
        candidates = calls or inside or inside_calls
        if len(candidates) == 1:
            return candidates[0]
        if not candidates:
            raise LayerNotFoundError(
                message(f"No layer named {name!r} in this {self.kind}.", hint=did_you_mean(name, self._paths))
            )
        why = "was called more than once" if calls else "exists more than once"
        listing = ", ".join(repr(candidate) for candidate in candidates)
        raise LayerNotFoundError(message(f"Layer {name!r} {why}.", got=repr(name), expected=f"one of: {listing}"))

    def __getitem__(self, name: str) -> Any:
        return self._node(self._resolve(name))

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
        """First line of the repr."""
        return f"{len(self)} {'layer' if len(self) == 1 else 'layers'}"

    def _rows(self) -> list[tuple[str, str]]:
        """Name and description per layer, for the repr."""
        return [(name, ", ".join(str(v) for v in self.dataset(name).data_vars)) for name in self]

    def _remarks(self) -> list[tuple[str, str]]:
        """Label and sentence of whatever follows the layers in the repr."""
        remarks = [("checks", sentence) for sentence in _check_sentences(self._self_checks)]
        if self.certificate is not None:
            remarks += [("certificate", self.certificate.sentence)]
            remarks += [("", f"FAILED {check.sentence}") for check in self.certificate.checks if not check.ok]
        remarks += [("note", note) for note in self.notes]
        return [*remarks, ("from", _origin(self.provenance))]

    def __repr__(self) -> str:
        lines = [f"<rnnlens {type(self).__name__}> {self._headline()}"]
        rows = self._rows() + self._remarks()
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join(lines + [f"  {label:<{width}}  {text}" for label, text in rows])

    def _said(self) -> list[Said]:
        """Findings, for the head of the page in a notebook."""
        return []

    def _parts(self) -> list[Part]:
        """Name, words and data of what the result is made of: layers, unless the class says otherwise."""
        words = dict(self._rows())
        return [(name, words.get(name, ""), self.dataset(name)) for name in self]

    def _beside(self) -> list[tuple[str, str]]:
        """What is said beside the parts and the findings: other rows, checks, notes, where it comes from."""
        named = {name for name, _, _ in self._parts()}
        rows = [] if self._said() else [(label, text) for label, text in self._rows() if label not in named]
        return [*rows, *self._remarks()]

    def _repr_html_(self) -> str:
        rows = [Row.of(*part) for part in self._parts()]
        return page(f"{type(self).__name__}: {self._headline()}", rows, self._beside(), self._said())


def refuse_no_name(name: object, known: Iterable[str], where: str) -> None:
    """What results hold is asked for by name."""
    if not isinstance(name, str):
        raise LayerNotFoundError(
            message(f"What is in {where} is asked for by name.", got=shown(name), hint=did_you_mean(name, known))
        )


def _tree(datasets: Mapping[str, xr.Dataset]) -> xr.DataTree:
    paths = to_paths(datasets)
    return xr.DataTree.from_dict({paths[name]: dataset for name, dataset in datasets.items()})


def _found(tree: xr.DataTree) -> dict[str, str]:
    return {from_path(node.path): node.path for node in tree.subtree if node.has_data}


def _origin(provenance: Mapping[str, str]) -> str:
    """Values of the provenance, each once; which rnnlens comes last. The adapter has the name of its framework."""
    silent = ("rnnlens", "loss_reduction", "adapter")
    others = dict.fromkeys(value for key, value in provenance.items() if key not in silent)
    return ", ".join([*others, f"rnnlens {provenance['rnnlens']}"])


def _check_sentences(checks: list[Check]) -> list[str]:
    """Every failure in full; otherwise the closest call, in one sentence."""
    failed = [check.sentence for check in checks if not check.ok]
    if failed or not checks:
        return [f"FAILED {sentence}" for sentence in failed]
    worst = max(checks, key=lambda check: check.residual / check.bound)
    figures = f"largest residual {worst.residual:.1g}, rounding explains {worst.bound:.1g}"
    return [f"{len(checks)} of {len(checks)} passed ({worst.layer} {worst.name}: {figures})"]
