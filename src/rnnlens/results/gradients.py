"""``Gradients`` and ``Weights``, the results of ``rl.gradients`` and ``rl.weights``.

Gradients have a reason for each missing one; weights are labelled by kernel and gate, with counts of NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import xarray as xr

from ..errors import QuantityNotFoundError, did_you_mean, message
from .base import Part, Result, check_name_is_text
from .encoding import datasets_of
from .layers import LayerView, sizes_of
from .schema import LabelledLayer


@dataclass(frozen=True)
class Reason:
    """Reason for a gradient that does not exist, is zero, or must be read with care.

    Attributes
    ----------
    name
        The tensor, as named in the call.
    code
        One word to test for, such as ``"integer_input"`` or ``"stop_gradient"``; docs/gradients.md lists them.
    sentence
        The reason in words, with numbers where there are any.
    remedy
        The call that gives a gradient.
    """

    name: str
    code: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.sentence} Try: {self.remedy}"


class Reasons(Mapping[str, Reason]):
    """Reasons by the name of a tensor, each found when it is first read, and kept.

    ``entries`` has a :class:`Reason`, its mapping as stored in a file, or a function that finds it.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, Any] = dict(entries or {})

    def __getitem__(self, name: str) -> Reason:
        entry = self._entries[name]
        if not isinstance(entry, Reason):
            entry = self._entries[name] = Reason(**entry) if isinstance(entry, Mapping) else entry()
        reason: Reason = entry
        return reason

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)  # a copy in another process has no model to experiment on


#: Largest number of reasons that a result prints.
_PRINTED = 20


class LayerGradients(LayerView):
    """Gradients with respect to the tensors of one layer: ``g["conv1d"]["kernel"]`` or ``g["conv1d"].kernel``."""

    def __init__(self, name: str, dataset: xr.Dataset, disconnected: Mapping[str, Reason]) -> None:
        super().__init__(name, dataset)
        self._disconnected = disconnected

    def _missing_message(self, name: str) -> str:
        for tensor in (f"{self.name}/{name}", f"{self.name}.{name}"):
            if tensor in self._disconnected:
                return _no_gradient_message(self._disconnected[tensor])
        return message(
            f"The gradient of {name!r} was not computed for layer {self.name!r}.", hint=did_you_mean(name, self)
        )

    def _variables(self) -> list[tuple[str, str]]:
        return [(name, _summary(self.dataset[name])) for name in self]


#: Prefix, in a file, of the layer names of clipped gradients.
_CLIPPED = "~clipped/"


class Gradients(Result, kind="gradients"):
    """Result of ``rl.gradients`` for several tensors: a mapping from layer names to their gradients.

    Access is by layer and name, ``g["conv1d"]["kernel"]``, or by the full name of a tensor, ``g["conv1d/kernel"]``,
    ``g["lstm.hidden"]``, ``g["input"]``; weights also with a dot, ``g["conv1d.kernel"]``. Tensors without a layer are
    in a node named ``"model"``.

    Attributes
    ----------
    of
        Name of the differentiated target.
    value
        Value of the target: a number, or one per sample with ``per_sample=True``.
    disconnected
        :class:`Reason` of each tensor without a gradient, by name. Each is found when it is first read, by experiments
        on the model as it is then. Where the gradient exists but is zero throughout, the zeros are in the result as
        well.
    flags
        :class:`Reason` of each gradient that exists but must be read with care (frozen weights, masked steps).
    clipped
        Gradients after clipping, if ``clip=`` was given: a result of the same layout.
    clip
        Description of the clipping: ``kind``, ``threshold``, ``norm``; empty without clipping.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset | LabelledLayer] | xr.DataTree,
        *,
        of: str = "loss",
        value: Any = None,
        disconnected: Mapping[str, Any] | None = None,
        flags: Mapping[str, Reason | Mapping[str, str]] | None = None,
        clip: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.of = of
        self.value = None if value is None else np.asarray(value)[()]
        self.disconnected = disconnected if isinstance(disconnected, Reasons) else Reasons(disconnected)
        self.flags = Reasons(flags)
        self.clip: dict[str, Any] = dict(clip or {})
        self.clipped: Gradients | None = None

    @cached_property
    def _tensors(self) -> dict[str, tuple[str, str]]:
        """Layer name and variable name of each tensor, by the tensor's full name."""
        return {
            str(array.attrs["tensor"]): (node, str(name))
            for node in self.layers
            for name, array in self.dataset(node).data_vars.items()
        }

    def _set_chunk_record(self, record: Mapping[str, Any]) -> None:
        super()._set_chunk_record(record)
        self.value = None if record["value"] is None else np.asarray(record["value"])[()]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Full names of all tensors that have a gradient in this result."""
        return tuple(self._tensors)

    def __getitem__(self, name: str) -> Any:
        check_name_is_text(name, self._tensors, "the gradients")
        by_layer = "/".join(name.rpartition(".")[::2])  # "emb.weight", as torch names the parameter
        name = by_layer if by_layer in self._tensors or by_layer in self.disconnected else name
        if name in self._tensors:
            node, variable = self._tensors[name]
            return self.dataset(node)[variable]
        if name in self.disconnected:
            raise QuantityNotFoundError(_no_gradient_message(self.disconnected[name]))
        if name not in self and any(tensor.startswith((f"{name}/", f"{name}.")) for tensor in self.disconnected):
            return LayerGradients(name, xr.Dataset(), self.disconnected)
        return super().__getitem__(name)

    def _node(self, name: str) -> LayerGradients:
        return LayerGradients(name, self.dataset(name), self.disconnected)

    def _meta(self) -> dict[str, Any]:
        return {
            **super()._meta(),
            "of": self.of,
            "value": None if self.value is None else np.asarray(self.value, dtype=float).tolist(),
            "disconnected": {name: asdict(reason) for name, reason in self.disconnected.items()},
            "flags": {name: asdict(reason) for name, reason in self.flags.items()},
            "clip": self.clip,
        }

    def _stored(self) -> tuple[xr.DataTree, list[str]]:
        if self.clipped is None:
            return super()._stored()
        unclipped_and_clipped = {name: self.dataset(name) for name in self.layers}
        unclipped_and_clipped |= {f"{_CLIPPED}{name}": self.clipped.dataset(name) for name in self.clipped.layers}
        combined = Result(unclipped_and_clipped)
        return combined.tree, list(combined.layers)

    @classmethod
    def _restore(cls, tree: xr.DataTree, meta: Mapping[str, Any]) -> Self:
        datasets = datasets_of(tree, meta["layers"])
        unclipped = {name: dataset for name, dataset in datasets.items() if not name.startswith(_CLIPPED)}
        result = cls(unclipped, **{key: value for key, value in meta.items() if key != "layers"})
        clipped = {name.removeprefix(_CLIPPED): datasets[name] for name in datasets if name not in unclipped}
        if clipped:
            result.clipped = Gradients(clipped, of=result.of, value=result.value, provenance=meta["provenance"])
        return result

    def _headline(self) -> str:
        value = "" if self.value is None or np.ndim(self.value) else f" = {float(self.value):.4g}"
        count = len(self._tensors)
        return f"of {self.of}{value}, with respect to {count} {'tensor' if count == 1 else 'tensors'}"

    def _rows(self) -> list[tuple[str, str]]:
        return [(tensor, _summary(self.dataset(node)[name])) for tensor, (node, name) in self._tensors.items()]

    def _parts(self) -> list[Part]:
        gradients = {tensor: self.dataset(node)[name] for tensor, (node, name) in self._tensors.items()}
        return [(tensor, _summary(array), array) for tensor, array in gradients.items()]

    def _remarks(self) -> list[tuple[str, str]]:
        names = list(self.disconnected)
        remarks = [("disconnected", f"{name}: {self.disconnected[name]}") for name in names[:_PRINTED]]
        if names[_PRINTED:]:
            text = f"{len(names) - _PRINTED} more: {', '.join(names[_PRINTED:])}; .disconnected has their reasons"
            remarks.append(("disconnected", text))
        remarks += [("flagged", f"{name}: {reason}") for name, reason in self.flags.items()]
        if self.clip:
            figures = ", ".join(f"{key} {value:.4g}" for key, value in self.clip.items() if key != "kind")
            remarks.append(("clip", f"{self.clip['kind']}: {figures}; see .clipped"))
        return remarks + super()._remarks()


def _summary(array: xr.DataArray) -> str:
    """Format dimensions, norm, range and share of masked steps of an array in a few words."""
    sizes = sizes_of(array) or "one number"
    if array.chunks is not None:
        return f"({sizes})  lazy, {array.data.npartitions} chunks"
    touched_rows = f", {array.attrs['touched_rows']} rows touched" if "touched_rows" in array.attrs else ""
    values = np.asarray(array.values, dtype=float)
    value_range = f", {values.min():.2g} to {values.max():.2g}" if values.size else ""
    masked_share = f", {1 - float(array['mask'].mean()):.0%} of steps masked" if "mask" in array.coords else ""
    return f"({sizes})  norm {float(np.linalg.norm(values)):.3g}{value_range}{masked_share}{touched_rows}"


def _no_gradient_message(reason: Reason) -> str:
    return message(
        f"There is no gradient with respect to {reason.name!r} [{reason.code}].",
        got=reason.sentence,
        hint=reason.remedy,
    )


class LayerWeights(LayerView):
    """Weights of one layer, their gradients, and counts of NaN and infinity: ``w["lstm"].recurrent_kernel_grad``."""

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values by variable; variables without any are left out."""
        counts: dict[str, int] = {}
        for name in self:
            stem, _, suffix = name.rpartition("_")
            if suffix == "count" and self.dataset[name].chunks is None:
                count = int(self.dataset[name].sum())
                stem = stem.rpartition("_")[0]
                if count:
                    counts[stem] = counts.get(stem, 0) + count
        return counts

    def _missing_message(self, name: str) -> str:
        hint = did_you_mean(name, self)
        if name.endswith("_grad") and name.removesuffix("_grad") in self:
            hint = "pass data for gradients: rl.weights(model, x, y)"
        return message(f"Layer {self.name!r} has no {name!r} here.", hint=hint)

    def _variables(self) -> list[tuple[str, str]]:
        flags = {name: f"  {count} NaN or infinite" for name, count in self.nonfinite.items()}
        weight_names = [name for name in self if not name.endswith("_count")]
        return [(name, f"({sizes_of(self.dataset[name])}){flags.get(name, '')}") for name in weight_names]


class Weights(Result, kind="weights"):
    """Result of ``rl.weights``: a mapping from layer names to :class:`LayerWeights`.

    Parameters
    ----------
    penalties
        Regularisation penalty by weight, ``"lstm/kernel"`` -> number.
    loss
        Loss of the batch that was differentiated; None without data.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset | LabelledLayer] | xr.DataTree,
        *,
        penalties: Mapping[str, float] | None = None,
        loss: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.penalties = dict(penalties or {})
        self.loss = loss

    @property
    def penalty_loss(self) -> float:
        """Sum of all penalties, which weight regularisation adds to the loss."""
        return float(sum(self.penalties.values()))

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values by weight, ``"lstm/kernel"`` -> count; weights without any are left out."""
        return {f"{layer}/{name}": n for layer in self for name, n in self[layer].nonfinite.items()}

    def _set_chunk_record(self, record: Mapping[str, Any]) -> None:
        super()._set_chunk_record(record)
        self.loss = None if record["value"] is None else float(record["value"])

    def _node(self, name: str) -> LayerWeights:
        return LayerWeights(name, self.dataset(name))

    def __getitem__(self, name: str) -> LayerWeights:
        return self._node(self._resolve(name))

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "penalties": self.penalties, "loss": self.loss}

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, ", ".join(n for n in self[name] if not n.endswith("_count"))) for name in self]

    def _remarks(self) -> list[tuple[str, str]]:
        nonfinite_rows = [("WARNING", f"{name}: {count} NaN or infinite") for name, count in self.nonfinite.items()]
        penalty_rows = (
            [("penalty", f"{self.penalty_loss:.6g} from {len(self.penalties)} weights")] if self.penalties else []
        )
        return nonfinite_rows + penalty_rows + super()._remarks()
