"""A batch of training that is no longer finite, with the weights that it met: what can be looked into afterwards.

Put back into a model, it is the very moment::

    incident = rl.open("runs/a.nonfinite.nc")
    model.set_weights(list(incident.weights.values()))                               # Keras: in the model's order
    model.load_state_dict({k: torch.as_tensor(v) for k, v in incident.weights.items()})    # torch
    rl.find_nonfinite(model, incident.x, incident.y)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import xarray as xr

from .base import Result
from .schema import to_host

_PARTS = ("x", "y", "sample_weight")
_WORDS = {
    "x": "what the model was fed",
    "y": "target",
    "sample_weight": "weight of each sample",
    "weights": "weight of the model before its update",
}


class Incident(Result, kind="incident"):
    """What ``on_nonfinite="report"`` of a callback writes: one batch, and the weights that the model had on it.

    Attributes
    ----------
    step, epoch
        Of which batch, counted as the records of the run are.
    loss
        Of the batch; None where it is not known.
    weights : dict of arrays
        Before the update, by the framework's own names, in its order and layout.
    x, y, sample_weight
        As the model took them: an array, or a tuple, list or dict of arrays; None where they are not known.
    found
        The sentence of ``rl.find_nonfinite``, where it was asked at once; ``""`` otherwise.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        structure: Mapping[str, Any],
        when: Mapping[str, Any],
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self._structure, self._when = dict(structure), dict(when)
        self.step, self.epoch = int(when["step"]), int(when.get("epoch", 0))
        self.loss = None if when.get("loss") is None else float(when["loss"])
        self.found = str(when.get("found", ""))

    @classmethod
    def of(cls, parts: Mapping[str, Any], weights: Mapping[str, Any], when: Mapping[str, Any], **common: Any) -> Self:
        """From ``x``, ``y``, ``sample_weight``; weights by name; and ``step``, ``epoch``, ``loss``, ``found``."""
        datasets: dict[str, xr.Dataset] = {}
        structure: dict[str, Any] = {}
        for name in _PARTS:
            leaves: list[Any] = []
            structure[name] = _described(parts.get(name), leaves)
            if leaves:
                datasets[name] = _dataset(name, leaves)
        structure["weights"] = list(weights)
        datasets["weights"] = _dataset("weights", list(weights.values()), list(weights))
        kept = {**when, "loss": None if when.get("loss") is None else repr(float(when["loss"]))}
        return cls(datasets, structure=structure, when=kept, **common)

    @property
    def x(self) -> Any:
        """What the model was fed."""
        return self._part("x")

    @property
    def y(self) -> Any:
        """The target; None where it is not known."""
        return self._part("y")

    @property
    def sample_weight(self) -> Any:
        """The weights of the samples; None without."""
        return self._part("sample_weight")

    @property
    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights before the update, by the framework's names, in its order."""
        return dict(zip(self._structure["weights"], self._leaves("weights"), strict=True))

    def _part(self, name: str) -> Any:
        return _rebuilt(self._structure[name], self._leaves(name))

    def _leaves(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        if name not in self._paths:
            return iter(())
        dataset = self.dataset(name)
        return (dataset[f"part_{i}"].values for i in range(len(dataset.data_vars)))

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "structure": self._structure, "when": self._when}

    def _headline(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:g}"
        found = f": {self.found}" if self.found else ""
        return f"step {self.step} of training, epoch {self.epoch}{loss}{found}"

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, ", ".join(str(tuple(v.shape)) for v in self.dataset(name).data_vars.values())) for name in self]


def _described(value: Any, leaves: list[Any]) -> Any:
    """The structure around arrays, as JSON can hold it; the arrays go to ``leaves``, in order."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {"dict": [[str(key), _described(part, leaves)] for key, part in value.items()]}
    if isinstance(value, tuple | list):
        return {type(value).__name__ if type(value) is list else "tuple": [_described(part, leaves) for part in value]}
    leaves.append(value)
    return "array"


def _rebuilt(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, str):
        return next(leaves)
    (kind, parts), *_ = structure.items()
    if kind == "dict":
        return {key: _rebuilt(part, leaves) for key, part in parts}
    found = [_rebuilt(part, leaves) for part in parts]
    return found if kind == "list" else tuple(found)


def _dataset(name: str, leaves: list[Any], titles: list[str] | None = None) -> xr.Dataset:
    variables = {}
    for i, leaf in enumerate(leaves):
        array = to_host(leaf)
        title = _WORDS[name] if titles is None else titles[i]
        attrs = {"long_name": title, "units": "1", "definition": _WORDS[name], "layer": name}
        variables[f"part_{i}"] = xr.Variable([f"part_{i}_axis_{axis}" for axis in range(array.ndim)], array, attrs)
    return xr.Dataset(variables)
