"""Names of tensors, resolved on a model: ``"loss"``, ``"lstm.hidden"``, ``"weights"``, ``"lstm*/recurrent_kernel"``."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .. import data
from ..adapters.protocol import Adapter, Batch, CaptureRequest, LayerInfo, LayerWeights, ModelFacts, Port
from ..errors import InputError, LayerNotFoundError, RnnlensError, did_you_mean
from ..layout import Layout, dims_of
from ..recurrence.cells import cell_of_kind, kinds
from ..typing import Array, named_leaves
from ..vocabulary import FEATURE, SAMPLE, unnamed_states
from .weight_layout import dims_of_weight, sources

What = Literal[
    "loss", "input", "output", "state", "initial_state", "final_state", "gates", "gate_preactivation", "weight"
]

_INDEXED = re.compile(r"(?P<what>input|output)\[(?P<which>[^\]]+)\]")
_SIMPLE = ("output", "input", "gates", "gate_preactivation", "weights")


@dataclass(frozen=True)
class TensorName:
    """One tensor: name in results, kind, layer, ``index`` of an input, output or state, ``key`` of a weight."""

    text: str
    what: What
    layer: str | None = None
    index: int = 0
    key: str = ""

    @property
    def quantity(self) -> str:
        """Name of the variable in the layer's dataset."""
        if self.what == "weight":
            return self.key
        return self.text if self.layer is None else self.text.removeprefix(f"{self.layer}.")

    @property
    def inside(self) -> bool:
        """Whether the tensor lies inside a recurrence, where the framework has no tensor for it."""
        return self.what in ("state", "gates", "gate_preactivation")

    def port(self, direction: Literal["forward", "backward"] | None = None) -> Port:
        """Return the port of this tensor; raise ``ValueError`` if it lies inside a recurrence."""
        if self.inside:
            raise ValueError(f"{self.text} lies inside a recurrence")
        return Port(self.what, self.layer, self.index, self.key, direction)  # type: ignore[arg-type]


@dataclass
class KnownModel:
    """Facts about a model until its fingerprint changes; ``sequences`` are not among the recurrent layers."""

    fingerprint: Any
    recurrent: Mapping[str, LayerInfo]
    facts: ModelFacts | None = None
    sequences: Mapping[str, LayerInfo] = field(default_factory=dict)
    layouts: dict[Any, dict[Port, Layout]] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[Any, KnownModel] = weakref.WeakKeyDictionary()


def text_of(port: Port) -> str:
    """Return the name of a port as a user writes it."""
    index = f"[{port.index}]" if port.index else ""
    return f"{port.kind}{index}" if port.layer is None else f"{port.layer}.{port.kind}{index}"


def known_model(adapter: Adapter, model: Any) -> KnownModel:
    """Return the facts about a model; they are kept if the adapter has a fingerprint of it."""
    fingerprint = adapter.fingerprint(model)
    known = None if fingerprint is None else _known.get(model)
    if known is None or known.fingerprint != fingerprint:
        infos = {info.name: info for info in adapter.describe(model)}
        recurrent = {name: info for name, info in infos.items() if not info.is_sequence}
        sequences = {name: info for name, info in infos.items() if info.is_sequence}
        known = KnownModel(fingerprint, recurrent, sequences=sequences)
        if fingerprint is not None:
            _known[model] = known
    return known


class Catalogue:
    """All layers, weights, inputs and outputs of a model that names can refer to, read from its adapter when needed.

    ``x``: the input of the model, for the names of inputs. ``outputs``: names of the outputs, once a run showed them.
    """

    def __init__(self, adapter: Adapter, model: Any, x: Any = None, outputs: tuple[str, ...] = ()) -> None:
        self.adapter, self.model, self.x = adapter, model, x
        self._kept = known_model(adapter, model)
        self.recurrent, self.sequences = self._kept.recurrent, self._kept.sequences
        if outputs:
            self.outputs = outputs

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts of the model that need no run."""
        self._kept.facts = self._kept.facts or self.adapter.facts(self.model)
        return self._kept.facts

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs; empty if they are not known."""
        return self.facts.outputs

    @cached_property
    def weights(self) -> Mapping[str, LayerWeights]:
        """Weights of all layers, by layer."""
        return self.adapter.weights(self.model)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs: keys of ``x``, else those of the model, else positions."""
        x = self.x
        if isinstance(x, Mapping):
            return tuple(map(str, x))
        several = isinstance(x, tuple | list) and not data.is_packed(x) and len(x) > 1
        return self.facts.inputs or (tuple(map(str, range(len(x)))) if several else ())

    def keys(self, layer: str) -> list[str]:
        """Return the names of a layer's weights as in results."""
        return list(sources(self.weights[layer]))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers."""
        return tuple(dict.fromkeys([*self.recurrent, *self.facts.submodules, *self.weights]))

    def is_inside(self, name: TensorName) -> bool:
        """Return whether a tensor is a state, a gate or the input of a recurrent layer."""
        if name.inside or name.what in ("initial_state", "final_state"):
            return True
        return name.what == "input" and name.layer is not None and not self.is_free(name)

    def is_free(self, name: TensorName) -> bool:
        """Return whether a tensor has the framework's own layout: one of the model or of a non-recurrent layer."""
        if name.what not in ("input", "output"):
            return False
        return name.layer is None or uncalled(name.layer, self.recurrent) not in self.recurrent

    def dims(self, name: TensorName, array: Array, *, per_sample: bool = False) -> tuple[str, ...]:
        """Return the axis names of a weight or a recurrent layer's tensor, or of its gradient."""
        if name.what == "loss" or array.ndim == 0:
            return ()
        if name.what == "weight":
            lead = (SAMPLE,) if per_sample else ()
            return lead + dims_of_weight(name.key, self.weights[str(name.layer)], array.ndim - len(lead))
        info, space = self.recurrent.get(uncalled(name.layer, self.recurrent)), self.space(name.layer)
        if name.what == "input":
            return dims_of(array.shape, last=FEATURE, space=space)
        both = info is not None and info.direction == "bidirectional"
        gate = name.what in ("gates", "gate_preactivation")
        return dims_of(array.shape, bidirectional=both, gate=gate, space=space)

    def space(self, layer: str | None) -> tuple[str, ...]:
        """Return the names of a layer's axes of space; none for layers other than convolutional recurrent ones."""
        info = self.recurrent.get(uncalled(layer, self.recurrent))
        return () if info is None else cell_of_kind(info.cell).space

    def suggestions(self) -> Iterator[str]:
        """Yield valid names for the hint of an error."""
        yield from ("loss", "output", "input", "weights")
        for layer in self.layers:
            yield f"{layer}.output"
            if layer in self.recurrent:
                yield f"{layer}.hidden"
            if layer in self.weights:
                yield f"{layer}.weights"


def completed(known: Catalogue, batch: Batch, texts: Sequence[str]) -> Catalogue:
    """Run the model if a name needs it, as a custom state does; return the catalogue with the names shown."""
    adapter, model = known.adapter, known.model
    quiet = CaptureRequest(inputs=False, gradients=False, weight_grads=False)
    asked = map(_INDEXED.fullmatch, texts)
    if not known.outputs and any(m and m["what"] == "output" and not m["which"].isdigit() for m in asked):
        outputs = adapter.capture(model, batch, quiet).outputs
        known = Catalogue(adapter, model, known.x, tuple(filter(None, named_leaves(outputs))))
    try:
        for text in texts:
            if _state(text.rpartition(".")[2]) is not None:
                read(text, known)
    except LayerNotFoundError:
        with suppress(RnnlensError):  # the error is that of the name
            adapter.capture(model, batch, quiet)
        return Catalogue(adapter, model, known.x, vars(known).get("outputs", ()))
    return known


def read(text: str, known: Catalogue) -> list[TensorName]:
    """Resolve a name, a pattern (``*``, ``?``) or ``"weights"`` to at least one tensor."""
    for attempt in (_whole_model, _weight_path, _layer_quantity):
        found = attempt(text, known)
        if found:
            return found
    if text in known.facts.tensors:  # the framework's name of a single tensor
        return [TensorName(text, "output", text)]
    raise LayerNotFoundError(
        f"Nothing in this model is named {text!r}.", got=repr(text), hint=did_you_mean(text, known.suggestions())
    )


def read_one(text: str, known: Catalogue) -> TensorName:
    """Resolve a name to exactly one tensor; raise if it matches several."""
    found = read(text, known)
    if len(found) > 1:
        listing = ", ".join(repr(name.text) for name in found)
        raise InputError(f"{text!r} names several tensors.", got=listing, expected="one of them")
    return found[0]


def refuse_lone_output(names: Sequence[TensorName], count: int) -> None:
    """Raise for ``"output"`` of a model with several outputs, since the name is ambiguous."""
    if any(name.text == "output" for name in names):
        expected = ", ".join(f'"output[{i}]"' for i in range(count))
        raise InputError("The model returns several tensors.", got='"output"', expected=expected)


def uncalled(layer: str | None, known: Collection[str] | None = None) -> str:
    """Return the layer of a node: ``lstm`` for ``lstm#0``, unless the name itself is in ``known``."""
    name = str(layer)
    return name if known is not None and name in known else name.rpartition("#")[0] or name


def _whole_model(text: str, known: Catalogue) -> list[TensorName]:
    if text == "weights":
        return [_weight(layer, key) for layer in known.weights for key in known.keys(layer)]
    if text == "loss":
        return [TensorName(text, "loss")]
    if text in ("input", "output"):
        names = known.inputs if text == "input" else known.outputs
        if len(names) < 2:
            return [TensorName(text, text)]  # type: ignore[arg-type]
        found = [TensorName(f"{text}[{name}]", text, index=i) for i, name in enumerate(names)]  # type: ignore[arg-type]
        x = known.x if text == "input" else None
        values = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, tuple | list) else []
        floating = [i for i, value in enumerate(values) if "float" in str(getattr(value, "dtype", ""))]
        # Ids have no gradient: among several inputs a single floating one is meant.
        return [found[floating[0]]] if len(floating) == 1 and len(values) > 1 else found
    indexed = _INDEXED.fullmatch(text)
    return [] if indexed is None else [_indexed(text, indexed["what"], indexed["which"].strip("'\""), known)]


def _indexed(text: str, what: str, which: str, known: Catalogue) -> TensorName:
    names = known.inputs if what == "input" else known.outputs
    if which in names:
        return TensorName(f"{what}[{which}]", what, index=names.index(which))  # type: ignore[arg-type]
    if which.isdigit() and (not names or int(which) < len(names)):
        label = names[int(which)] if names else which
        return TensorName(f"{what}[{label}]", what, index=int(which))  # type: ignore[arg-type]
    raise LayerNotFoundError(f"This model has no {text}.", hint=did_you_mean(which, names))


def _weight_path(text: str, known: Catalogue) -> list[TensorName]:
    """Resolve ``layer/key``, ``pattern/key`` or ``layer.key`` to weights."""

    def meant(layer: str, key: str) -> bool:
        return any(
            _matches(text, f"{name}{sep}{key}") for name in (layer, _short(layer), _stacked(layer)) for sep in "/."
        )

    return [_weight(layer, key) for layer in known.weights for key in known.keys(layer) if meant(layer, key)]


def _layer_quantity(text: str, known: Catalogue) -> list[TensorName]:
    """Resolve ``layer.hidden``, ``layer.output`` or ``layer.weights``; the layer may be a pattern."""
    pattern, dot, what = text.rpartition(".")
    state = _state(what)
    if not dot or (state is None and what not in _SIMPLE):
        return []
    if what == "weights":
        return [
            _weight(layer, key) for layer in _layers(pattern, known.weights, text, known) for key in known.keys(layer)
        ]
    if state is not None or what.startswith("gate"):
        layers = _layers(pattern, known.recurrent, text, known)
        return [_inner(layer, what, state, known.recurrent[uncalled(layer, known.recurrent)]) for layer in layers]
    layers = _layers(pattern, known.layers, text, known)
    return [TensorName(f"{layer}.{what}", what, layer) for layer in layers]  # type: ignore[arg-type]


def names_behind_ids(adapter: Adapter, model: Any, batch: Batch, known: Catalogue) -> list[str]:
    """Run the model; name float tensors behind an input of ids: embeddings, else the inputs of recurrent layers."""
    tables = known.facts.having("embedding")
    if not tables:
        return []
    request = CaptureRequest((*tables, *known.recurrent), gradients=False, weight_grads=False)
    try:
        capture = adapter.capture(model, batch, request)
    except RnnlensError:
        return [f"{table}.output" for table in tables]
    called = {call.layer for call in capture.plain}
    found = [f"{table}.output" for table in tables if table in called]
    return found or [f"{call.layer}.input" for call in capture.calls[:1]]


def _inner(layer: str, what: str, state: re.Match[str] | None, info: LayerInfo) -> TensorName:
    """Return the name of a state or of the gates of a recurrent layer; raise if the cell has none such."""
    if state is None:
        if not cell_of_kind(info.cell).gates:
            raise LayerNotFoundError(
                f"{layer!r} has a custom cell, whose gates are not known.",
                got=f"{layer}.{what}",
                expected=f"{layer}.hidden, {layer}.output or {layer}.weights",
            )
        return TensorName(f"{layer}.{what}", what, layer)  # type: ignore[arg-type]
    when = {"initial_": "initial_state", "final_": "final_state", None: "state"}[state["when"]]
    names = cell_of_kind(info.cell).states if info.cell in kinds() else unnamed_states(8)
    if state["state"] not in names:
        raise LayerNotFoundError(
            f"{layer!r} is a {info.cell} layer: it has no state named {state['state']!r}.",
            got=f"{layer}.{what}",
            hint=", ".join(f"{layer}.{name}" for name in names),
        )
    return TensorName(f"{layer}.{what}", when, layer, names.index(state["state"]))  # type: ignore[arg-type]


def _state(what: str) -> re.Match[str] | None:
    """Match ``hidden``, ``initial_cell``, ``final_state_1``: a state of any cell, at every step or at an end."""
    states = dict.fromkeys(re.escape(state) for cell in kinds().values() for state in cell.states)
    return re.fullmatch(rf"(?P<when>initial_|final_)?(?P<state>hidden|{'|'.join(states)}|state_\d+)", what)


def _layers(pattern: str, names: Iterable[str], text: str, known: Catalogue) -> list[str]:
    """Return the layers that ``pattern`` selects: a name, a call (``lstm#0``), a stack, a last part or ``lstm*``."""
    names = list(names)
    if pattern in names or uncalled(pattern, names) in names:
        return [pattern]
    found = [name for name in names if _matches(pattern, name)]
    stacked = [name for name in names if _stacked(name) == pattern != name]
    if stacked and not found:
        return stacked
    found = found or [name for name in names if _matches(pattern, _short(name))]
    found = found or [name for name in names if name.endswith(f".{pattern}")]
    if len(found) > 1 and "*" not in pattern and "?" not in pattern:
        listing = ", ".join(repr(name) for name in found)
        raise LayerNotFoundError(f"{pattern!r} is the name of several layers.", got=text, expected=listing)
    if not found:
        hint = did_you_mean(text, known.suggestions())
        raise LayerNotFoundError(f"Nothing in this model is named {text!r}.", got=repr(text), hint=hint)
    return found


def _short(layer: str) -> str:
    return layer.rpartition("/")[2]


def _stacked(layer: str) -> str:
    """Return the module of a stacked layer: ``lstm`` for ``lstm[0]``; any other name unchanged."""
    return re.sub(r"\[\d+\]$", "", layer)


def _weight(layer: str, key: str) -> TensorName:
    return TensorName(f"{layer}/{key}", "weight", layer, key=key)


def _matches(pattern: str, name: str) -> bool:
    """Match a shell pattern with ``*`` and ``?`` only, as brackets are part of torch names such as ``rnn[1]``."""
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None
