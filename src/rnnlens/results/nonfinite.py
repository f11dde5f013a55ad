"""``NonFinite`` and ``Incident``: the first number that is not finite, and a saved batch of training with one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import numpy as np
import xarray as xr

from ..typing import container_of, is_leaf
from ..vocabulary import GATE, SAMPLE, TIME, UNIT
from .base import Result
from .schema import to_host

Phase = Literal["data", "weights", "forward", "loss", "backward"]


@dataclass(frozen=True)
class Origin:
    """First number that is not finite, or too large for its precision, although it was computed from finite numbers.

    Attributes
    ----------
    phase
        Phase in which the number appears: ``"data"``, ``"weights"``, ``"forward"``, ``"loss"`` or ``"backward"``.
    layer
        Name of the layer, or ``"input"``, ``"output"``, ``"y"``, ``"sample_weight"``, ``"loss"``.
    quantity
        Quantity of the layer: ``"gate_preactivation"``, ``"hidden"``, ``"kernel"``, ``"hidden_grad"``, ...
    value
        The number. It is finite if it only overflows the precision of its layer.
    index
        Position by dimension: ``{"sample": 12, "time": 37, "unit": 5}``; in a convolutional layer with ``height``,
        ``width`` and ``channel``.
    fed_by
        Inputs of the computation that gave the number, in words.
    gate, direction
        Name of the gate, and direction of a bidirectional layer; ``""`` where there is none.
    precision
        The dtype that it overflowed; ``""`` where the number itself is not finite.
    """

    phase: Phase
    layer: str
    quantity: str
    value: float
    index: Mapping[str, int] = field(default_factory=dict)
    fed_by: str = ""
    gate: str = ""
    direction: str = ""
    precision: str = ""

    @property
    def sentence(self) -> str:
        """Place and value of the number as one line of text.

        >>> where = {"sample": 12, "time": 37, "unit": 5}
        >>> Origin("forward", "lstm_1", "gate_preactivation", float("inf"), where, gate="forget").sentence
        'first at step 37 of sample 12: forget gate of lstm_1, unit 5 (pre-activation inf)'
        """
        index_words = [
            f"{word} {self.index[dim]}" for dim, word in ((TIME, "step"), (SAMPLE, "sample")) if dim in self.index
        ]
        position = " of ".join(index_words)
        beginning = f"first at {position}: " if position else f"first {_PHASE_WORDS[self.phase]}: "
        other_indices = [f"{dim} {i}" for dim, i in self.index.items() if dim not in (TIME, SAMPLE, GATE)]
        location = ", ".join([self._subject, *other_indices])
        number_text = f"{_QUANTITY_WORDS.get(self.quantity, self.quantity)} {self.value:.3g}"
        number_text += f", beyond {self.precision}" if self.precision else ""
        return f"{beginning}{location} ({number_text})" + (f"; fed by {self.fed_by}" if self.fed_by else "")

    @property
    def _subject(self) -> str:
        direction_suffix = f" ({self.direction})" if self.direction else ""
        if self.phase == "data" or self.layer in ("loss", "output"):
            return self.layer
        return f"{self.gate} gate of {self.layer}{direction_suffix}" if self.gate else f"{self.layer}{direction_suffix}"


_PHASE_WORDS = {
    "data": "in the data",
    "weights": "in the weights, before anything runs",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
}
_QUANTITY_WORDS = {"gate_preactivation": "pre-activation", "gates": "gate"}


def _origin_property(name: str, docstring: str) -> property:
    """Return a property that reads a field of the origin, or its index along a dimension; None without an origin."""

    def read_field(result: NonFinite) -> Any:
        if result.origin is None or name in (TIME, SAMPLE, UNIT):
            return None if result.origin is None else result.origin.index.get(name)
        value = getattr(result.origin, name)
        return None if name == "gate" and not value else value

    return property(read_field, doc=docstring)


class NonFinite(Result, kind="nonfinite"):
    """Result of ``rl.find_nonfinite``: false where every number is finite, and then it prints "none".

    ``found["lstm"].magnitude`` is the largest magnitude of the quantity at each step of the affected sample, up to the
    fault.

    Attributes
    ----------
    origin : :class:`Origin`, or None
        The first number that is not finite, in order of computation; None if all are finite.
    reaches
        Those of ``"outputs"``, ``"loss"``, ``"gradients"`` that are not finite; ``"exception"`` where the model or the
        loss raises one.
    looked_at
        Quantities that were examined, in words.
    layer, quantity, gate, step, unit, sample, value, fed_by, phase
        Fields of the origin; None if all numbers are finite.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        origin: Origin | Mapping[str, Any] | None = None,
        reaches: Iterable[str] = (),
        looked_at: Iterable[str] = (),
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        if isinstance(origin, Mapping):  # as stored: the value is text, because JSON has no NaN
            origin = Origin(**{**origin, "value": float(origin["value"])})
        self.origin = origin
        self.reaches, self.looked_at = tuple(reaches), tuple(looked_at)

    def __bool__(self) -> bool:
        return self.origin is not None

    @property
    def sentence(self) -> str:
        """First line of the output of ``print``."""
        if self.origin is None:
            return f"none: all values are finite ({', '.join(self.looked_at)})"
        reach_sentence = (
            f"It reaches {', '.join(self.reaches)}." if self.reaches else "It does not affect the output of the model."
        )
        if "exception" in self.reaches:
            reach_sentence = "The model or the loss raises an exception."
        return f"{self.origin.sentence}. {reach_sentence}"

    phase = _origin_property(
        "phase", 'Phase in which the number appears, such as ``"forward"``; None if all are finite.'
    )
    layer = _origin_property("layer", "Layer in which the number appears; None if all numbers are finite.")
    quantity = _origin_property(
        "quantity", 'Quantity of the layer, such as ``"hidden"``; None if all numbers are finite.'
    )
    gate = _origin_property("gate", "Name of the gate in which the number appears; None outside of gates.")
    value = _origin_property("value", "The number itself; None if all numbers are finite.")
    fed_by = _origin_property(
        "fed_by", "Inputs of the computation that gave the number, in words; None if all are finite."
    )
    step = _origin_property(TIME, "Time step of the number, counted from 0; None without a time axis.")
    sample = _origin_property(SAMPLE, "Sample of the batch, counted from 0; None without a sample axis.")
    unit = _origin_property(UNIT, "Unit of the layer, counted from 0; None without a unit axis.")

    def _meta(self) -> dict[str, Any]:
        origin = None if self.origin is None else {**asdict(self.origin), "value": repr(self.origin.value)}
        return {**super()._meta(), "origin": origin, "reaches": self.reaches, "looked_at": self.looked_at}

    def _headline(self) -> str:
        return self.sentence


_DATA_PARTS = ("x", "y", "sample_weight")
_PART_WORDS = {
    "x": "what the model was fed",
    "y": "target",
    "sample_weight": "weight of each sample",
    "weights": "weight of the model before its update",
}


class Incident(Result, kind="incident"):
    """Batch of training that was not finite, and the weights before its update; written by ``on_nonfinite="report"``.

    Attributes
    ----------
    step, epoch
        Step and epoch of the batch, counted as in the records of the run.
    loss
        Loss of the batch; None where it is not known.
    weights : dict of arrays
        Weights before the update, by the framework's own names, in its order and layout.
    x, y, sample_weight
        Data as passed to the model: an array, or a tuple, list or dict of arrays; None where not known.
    found
        Sentence of ``rl.find_nonfinite``, if it was run on the batch; ``""`` otherwise.
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
        """Build an incident from the batch, weights by name, and ``step``, ``epoch``, ``loss``, ``found``."""
        datasets: dict[str, xr.Dataset] = {}
        structure: dict[str, Any] = {}
        for name in _DATA_PARTS:
            leaves: list[Any] = []
            structure[name] = _nesting_of(parts.get(name), leaves)
            if leaves:
                datasets[name] = _part_dataset(name, leaves)
        structure["weights"] = list(weights)
        datasets["weights"] = _part_dataset("weights", list(weights.values()), list(weights))
        stored_when = {**when, "loss": None if when.get("loss") is None else repr(float(when["loss"]))}
        return cls(datasets, structure=structure, when=stored_when, **common)

    @property
    def x(self) -> Any:
        """Input of the model; None where it is not known."""
        return self._part("x")

    @property
    def y(self) -> Any:
        """Target of the batch; None where it is not known."""
        return self._part("y")

    @property
    def sample_weight(self) -> Any:
        """Weight of each sample; None without sample weights."""
        return self._part("sample_weight")

    @property
    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights before the update, by the framework's names, in its order."""
        return dict(zip(self._structure["weights"], self._leaves("weights"), strict=True))

    def _part(self, name: str) -> Any:
        return _rebuild_nesting(self._structure[name], self._leaves(name))

    def _leaves(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        if name not in self._paths:
            return iter(())
        dataset = self.dataset(name)
        return (dataset[f"part_{i}"].values for i in range(len(dataset.data_vars)))

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "structure": self._structure, "when": self._when}

    def _headline(self) -> str:
        loss_suffix = "" if self.loss is None else f", loss {self.loss:g}"
        finding_suffix = f": {self.found}" if self.found else ""
        return f"step {self.step} of training, epoch {self.epoch}{loss_suffix}{finding_suffix}"

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, ", ".join(str(tuple(v.shape)) for v in self.dataset(name).data_vars.values())) for name in self]


def _nesting_of(value: Any, leaves: list[Any]) -> Any:
    """Return the nesting of tuples, lists and dicts around arrays as JSON; append the arrays to ``leaves`` in order.

    Other containers become tuples. Of constants numbers and text are kept, and the text of any other object.
    """
    container = container_of(value)
    if container is None and is_leaf(value):
        leaves.append(value)
        return "array"
    if container is None:
        is_plain = value is None or isinstance(value, bool | int | float | str)
        return None if value is None else {"value": [value if is_plain else repr(value)]}
    parts = [_nesting_of(part, leaves) for part in container.parts]
    if isinstance(value, Mapping):
        return {"dict": [list(pair) for pair in zip(container.names, parts, strict=True)]}
    return {"list" if type(value) is list else "tuple": parts}


def _rebuild_nesting(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, str):
        return next(leaves)
    (kind, stored_parts), *_ = structure.items()
    if kind == "value":
        return stored_parts[0]
    if kind == "dict":
        return {key: _rebuild_nesting(part, leaves) for key, part in stored_parts}
    rebuilt_parts = [_rebuild_nesting(part, leaves) for part in stored_parts]
    return rebuilt_parts if kind == "list" else tuple(rebuilt_parts)


def _part_dataset(name: str, leaves: list[Any], titles: list[str] | None = None) -> xr.Dataset:
    variables = {}
    for i, leaf in enumerate(leaves):
        array = to_host(leaf)
        title = _PART_WORDS[name] if titles is None else titles[i]
        attrs = {"long_name": title, "units": "1", "definition": _PART_WORDS[name], "layer": name}
        variables[f"part_{i}"] = xr.Variable([f"part_{i}_axis_{axis}" for axis in range(array.ndim)], array, attrs)
    return xr.Dataset(variables)
