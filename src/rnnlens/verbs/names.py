"""Names of tensors, resolved on a model: ``"loss"``, ``"lstm.hidden"``, ``"weights"``, ``"lstm*/recurrent_kernel"``."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from .. import data
from ..adapters.protocol import Adapter, Batch, LayerInfo, LayerWeights, ModelFacts, Port, Run, Taps
from ..arguments.data import is_source
from ..errors import InputError, LayerNotFoundError, RnnlensError, did_you_mean
from ..layout import Layout, dims_of
from ..recurrence.cells import Cell, cell_of_kind, kinds
from ..results.checks import Certificate
from ..typing import Array, container_of, named_leaves
from ..vocabulary import FEATURE, SAMPLE, unnamed_states
from .weight_layout import dims_of_weight, sources

TensorKind = Literal[
    "loss", "input", "output", "state", "initial_state", "final_state", "gates", "gate_preactivation", "weight"
]

_INDEXED = re.compile(r"(?P<what>input|output)\[(?P<which>[^\]]+)\]")
_SIMPLE = ("output", "input", "gates", "gate_preactivation", "weights")


@dataclass(frozen=True)
class TensorName:
    """One tensor: name in results, kind, layer, ``index`` of an input, output or state, ``key`` of a weight."""

    text: str
    kind: TensorKind
    layer: str | None = None
    index: int = 0
    key: str = ""

    @property
    def quantity(self) -> str:
        """Name of the variable in the layer's dataset."""
        if self.kind == "weight":
            return self.key
        return self.text if self.layer is None else self.text.removeprefix(f"{self.layer}.")

    @property
    def is_inside(self) -> bool:
        """Whether the tensor lies inside a recurrence, where the framework has no tensor for it."""
        return self.kind in ("state", "gates", "gate_preactivation")

    def port(self, direction: Literal["forward", "backward"] | None = None) -> Port:
        """Return the port of this tensor; raise ``ValueError`` if it lies inside a recurrence."""
        if self.is_inside:
            raise ValueError(f"{self.text} lies inside a recurrence")
        return Port(self.kind, self.layer, self.index, self.key, direction)  # type: ignore[arg-type]


@dataclass
class CertifiedTraces:
    """Traces of one kind: the certificate of all samples, the number of later ones, and whether a part suffices."""

    certificate: Certificate
    number: int = 0
    divisible: bool = True


@dataclass
class CertifiedCalls:
    """Calls of a model whose certificate passed; those of one kind have one key, see :meth:`ModelRequest.key`."""

    #: Certificates of the calls by key, which ``certify="first"`` repeats.
    passed: dict[Hashable, Certificate] = field(default_factory=dict)
    #: Traces that were certified with all samples, by key.
    traces: dict[Hashable, CertifiedTraces] = field(default_factory=dict)
    #: Keys of traces whose gradients between the layers of a chain were those of the framework.
    agreed_chains: set[Hashable] = field(default_factory=set)


@dataclass
class KnownModel:
    """What calls learned of a model, until its fingerprint changes: it saves time, and no answer depends on it."""

    fingerprint: Hashable | None
    recurrent: Mapping[str, LayerInfo]
    sequences: Mapping[str, LayerInfo]
    certified: CertifiedCalls
    #: Layouts found by experiment, by the shapes and options of the data.
    layouts: dict[Hashable, dict[Port, Layout]] = field(default_factory=dict)


_known_models: weakref.WeakKeyDictionary[Any, KnownModel] = weakref.WeakKeyDictionary()


def text_of(port: Port) -> str:
    """Return the name of a port as a user writes it."""
    index = f"[{port.index}]" if port.index else ""
    return f"{port.kind}{index}" if port.layer is None else f"{port.layer}.{port.kind}{index}"


def known_model(adapter: Adapter, model: Any) -> KnownModel:
    """Return what is known of a model; if its adapter has no fingerprint of it, the layers are read at each call."""
    fingerprint = adapter.fingerprint(model)
    known = _known_models.get(model)
    if known is not None and known.fingerprint != fingerprint:
        known = None
    if known is None or fingerprint is None:
        infos = {info.name: info for info in adapter.known_layers(model)}
        recurrent = {name: info for name, info in infos.items() if not info.is_sequence}
        sequences = {name: info for name, info in infos.items() if info.is_sequence}
        certified = CertifiedCalls() if known is None else known.certified
        known = _known_models[model] = KnownModel(fingerprint, recurrent, sequences, certified)
    return known


class Catalogue:
    """All layers, weights, inputs and outputs of a model that names can refer to, read from its adapter when needed.

    ``x``: the input of the model, for the names of inputs. ``outputs``: names of the outputs, once a run showed them.
    """

    def __init__(self, adapter: Adapter, model: Any, x: Any = None, outputs: tuple[str, ...] = ()) -> None:
        self.adapter, self.model, self.x = adapter, model, x
        self.known = known_model(adapter, model)
        self.recurrent, self.sequences = self.known.recurrent, self.known.sequences
        #: Facts of the model that need no run.
        self.facts: ModelFacts = adapter.facts(model)
        if outputs:
            self.outputs = outputs

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
        """Names of the inputs: keys or fields of ``x``, else those of the model, else positions."""
        container = container_of(self.x)
        if container is None:
            return self.facts.inputs
        names = named_leaves(self.x)
        if not isinstance(self.x, tuple | list) or hasattr(self.x, "_fields"):
            return names
        if len(self.x) <= len(self.facts.arguments):
            return named_leaves(dict(zip(self.facts.arguments, self.x, strict=False)))
        return self.facts.inputs or (names if len(container.parts) > 1 else ())

    def keys(self, layer: str) -> list[str]:
        """Return the names of a layer's weights as in results."""
        return list(sources(self.weights[layer]))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers."""
        return tuple(dict.fromkeys([*self.recurrent, *self.facts.submodules, *self.weights]))

    def is_inside(self, name: TensorName) -> bool:
        """Return whether a tensor is a state, a gate or the input of a recurrent layer."""
        if name.is_inside or name.kind in ("initial_state", "final_state"):
            return True
        return name.kind == "input" and name.layer is not None and not self.is_free(name)

    def is_free(self, name: TensorName) -> bool:
        """Return whether a tensor has the framework's own layout: one of the model or of a non-recurrent layer."""
        if name.kind not in ("input", "output"):
            return False
        return name.layer is None or uncalled_layer(name.layer, self.recurrent) not in self.recurrent

    def dims(self, name: TensorName, array: Array, *, per_sample: bool = False) -> tuple[str, ...]:
        """Return the axis names of a weight or a recurrent layer's tensor, or of its gradient."""
        if name.kind == "loss" or array.ndim == 0:
            return ()
        if name.kind == "weight":
            sample_axes = (SAMPLE,) if per_sample else ()
            return sample_axes + dims_of_weight(name.key, self.weights[str(name.layer)], array.ndim - len(sample_axes))
        info, space = self.recurrent.get(uncalled_layer(name.layer, self.recurrent)), self.space(name.layer)
        if name.kind == "input":
            return dims_of(array.shape, last=FEATURE, space=space)
        is_bidirectional = info is not None and info.direction == "bidirectional"
        has_gate_axis = name.kind in ("gates", "gate_preactivation")
        return dims_of(array.shape, bidirectional=is_bidirectional, gate=has_gate_axis, space=space)

    def space(self, layer: str | None) -> tuple[str, ...]:
        """Return the names of a layer's axes of space; none for layers other than convolutional recurrent ones."""
        info = self.recurrent.get(uncalled_layer(layer, self.recurrent))
        return () if info is None else cell_of_kind(info.cell).space

    def suggestions(self) -> Iterator[str]:
        """Yield valid names for the hint of an error."""
        yield from ("loss", "output", "input", "weights")
        for layer in self.layers:
            yield f"{layer}.output"
            if layer in self.recurrent:
                yield from (f"{layer}.{state}" for state in states_of(self.recurrent[layer]))
            if layer in self.weights:
                yield f"{layer}.weights"


def complete_catalogue(catalogue: Catalogue, batch: Batch, texts: Sequence[str]) -> Catalogue:
    """Run the model if a name needs it, as a custom state does; return the catalogue with the names shown."""
    adapter, model = catalogue.adapter, catalogue.model

    def run() -> Run:
        x = data.first_batch(batch.x)[0].x if is_source(batch.x) else batch.x
        return adapter.run(model, replace(batch.without_loss(), x=x), Taps.states(inputs=False))

    indexed_matches = (_INDEXED.fullmatch(text.replace("][", ".")) for text in texts)
    if not catalogue.outputs and any(m and m["what"] == "output" and not m["which"].isdigit() for m in indexed_matches):
        catalogue = Catalogue(adapter, model, catalogue.x, tuple(filter(None, named_leaves(run().returned))))
    if any(not text.isidentifier() and _needs_run(text, catalogue) for text in texts):  # no state's name is one word
        with suppress(RnnlensError):  # the error is that of the name
            _ = run().capture
        return Catalogue(adapter, model, catalogue.x, vars(catalogue).get("outputs", ()))
    return catalogue


def _needs_run(text: str, catalogue: Catalogue) -> bool:
    """Return whether a name may be that of a state that only a run of the model shows.

    Names that an earlier run showed may be of another kind of state than this call's.
    """
    try:
        names = read(text, catalogue)
    except LayerNotFoundError:
        return "." in text
    layers = [catalogue.recurrent[uncalled_layer(n.layer, catalogue.recurrent)] for n in names if _is_state(n)]
    return any(info.cell == Cell.kind for info in layers)


def read(text: str, catalogue: Catalogue) -> list[TensorName]:
    """Resolve a name, a pattern (``*``, ``?``) or ``"weights"`` to at least one tensor."""
    for attempt in (_model_tensors, _weights_by_path, _layer_tensors):
        names = attempt(text, catalogue)
        if names:
            return names
    if name := _weight_of_framework(text, catalogue):
        return [name]
    if text in catalogue.facts.tensors:  # the framework's name of a single tensor
        return [TensorName(text, "output", text)]
    is_input = text in catalogue.inputs
    hint = f'wrt="input[{text}]"' if is_input else did_you_mean(text, catalogue.suggestions())
    layer, _, state = text.rpartition(".")
    info = catalogue.recurrent.get(uncalled_layer(layer, catalogue.recurrent))
    if info is not None:
        listing = ", ".join(f"{layer}.{name}" for name in (*states_of(info), "input", "output", "weights"))
        raise LayerNotFoundError(f"{layer!r} has no {state!r}.", got=repr(text), expected=listing, hint=hint)
    raise LayerNotFoundError(f"Nothing in this model is named {text!r}.", got=repr(text), hint=hint)


def read_one(text: str, catalogue: Catalogue) -> TensorName:
    """Resolve a name to exactly one tensor; raise if it matches several."""
    matches = read(text, catalogue)
    if len(matches) > 1:
        listing = ", ".join(repr(name.text) for name in matches)
        argument = {"input": "wrt=", "output": "of="}.get(text, "")
        hint = f"{argument}{matches[0].text!r}" + ("" if argument else f" in place of {text!r}")
        raise InputError(f"{text!r} names several tensors.", got=listing, expected="one of them", hint=hint)
    return matches[0]


def refuse_lone_output(names: Sequence[TensorName], count: int) -> None:
    """Raise for ``"output"`` of a model with several outputs, since the name is ambiguous."""
    if any(name.text == "output" for name in names):
        expected = ", ".join(f'"output[{i}]"' for i in range(count))
        hint = 'name one of them, as in of="output[0]"'
        raise InputError("The model returns several tensors.", got='"output"', expected=expected, hint=hint)


def uncalled_layer(layer: str | None, known_names: Collection[str] | None = None) -> str:
    """Return the layer of a node: ``lstm`` for ``lstm#0``, unless the name itself is in ``known_names``."""
    name = str(layer)
    return name if known_names is not None and name in known_names else name.rpartition("#")[0] or name


def _model_tensors(text: str, catalogue: Catalogue) -> list[TensorName]:
    if text == "weights":
        return [_weight_name(layer, key) for layer in catalogue.weights for key in catalogue.keys(layer)]
    if text == "loss":
        return [TensorName(text, "loss")]
    if text in ("input", "output"):
        names = catalogue.inputs if text == "input" else catalogue.outputs
        if len(names) < 2:
            return [TensorName(text, text)]  # type: ignore[arg-type]
        tensors = [TensorName(f"{text}[{name}]", text, index=i) for i, name in enumerate(names)]  # type: ignore[arg-type]
        values = data.leaves_of(catalogue.x) if text == "input" else []
        floating = [i for i, value in enumerate(values) if "float" in str(getattr(value, "dtype", ""))]
        # Ids have no gradient: among several inputs a single floating one is meant.
        return [tensors[floating[0]]] if len(floating) == 1 and len(values) > 1 else tensors
    match = _INDEXED.fullmatch(text.replace("][", "."))  # as in Python, input[a][b] is input[a.b]
    return [] if match is None else [_indexed_name(text, match["what"], match["which"].strip("'\""), catalogue)]


def _indexed_name(text: str, kind: str, label_or_index: str, catalogue: Catalogue) -> TensorName:
    names = catalogue.inputs if kind == "input" else catalogue.outputs
    if label_or_index in names:
        return TensorName(f"{kind}[{label_or_index}]", kind, index=names.index(label_or_index))  # type: ignore[arg-type]
    if label_or_index.isdigit() and (not names or int(label_or_index) < len(names)):
        label = names[int(label_or_index)] if names else label_or_index
        return TensorName(f"{kind}[{label}]", kind, index=int(label_or_index))  # type: ignore[arg-type]
    raise LayerNotFoundError(
        f"This model has no {text}.", hint=did_you_mean(text, [f"{kind}[{name}]" for name in names])
    )


def _weights_by_path(text: str, catalogue: Catalogue) -> list[TensorName]:
    """Resolve ``layer/key``, ``pattern/key`` or ``layer.key`` to weights."""

    def is_match(layer: str, key: str) -> bool:
        return any(
            _matches(text, f"{name}{sep}{key}")
            for name in (layer, _last_part(layer), _stack_name(layer))
            for sep in "/."
        )

    return [
        _weight_name(layer, key) for layer in catalogue.weights for key in catalogue.keys(layer) if is_match(layer, key)
    ]


def _weight_of_framework(text: str, catalogue: Catalogue) -> TensorName | None:
    """Find the weight whose parameter the framework calls ``text``, such as torch's ``rnn.weight_hh_l0``."""
    for layer, weights in catalogue.weights.items():
        for key, parts in sources(weights).items():
            locations = [catalogue.facts.weight_location(layer, part.direction, part.key) for part in parts]
            if not any(location is not None and location.name == text for location in locations):
                continue
            if len(parts) > 1:
                hint = f"{layer}/{key}, which has the weights of both directions"
                raise LayerNotFoundError(f"{text!r} is one direction of a weight.", got=repr(text), hint=hint)
            return _weight_name(layer, key)
    return None


def _layer_tensors(text: str, catalogue: Catalogue) -> list[TensorName]:
    """Resolve ``layer.hidden``, ``layer.output`` or ``layer.weights``; the layer may be a pattern."""
    pattern, dot, quantity = text.rpartition(".")
    state = _match_state(quantity, catalogue)
    if not dot or (state is None and quantity not in _SIMPLE):
        return []
    if quantity == "weights":
        return [
            _weight_name(layer, key)
            for layer in _matching_layers(pattern, catalogue.weights, text, catalogue)
            for key in catalogue.keys(layer)
        ]
    if state is not None or quantity.startswith("gate"):
        layers = _matching_layers(pattern, catalogue.recurrent, text, catalogue)
        return [
            _gates_name(layer, quantity, info) if state is None else _state_name(layer, quantity, state, info)
            for layer in layers
            for info in [catalogue.recurrent[uncalled_layer(layer, catalogue.recurrent)]]
        ]
    layers = _matching_layers(pattern, catalogue.layers, text, catalogue)
    return [TensorName(f"{layer}.{quantity}", quantity, layer) for layer in layers]  # type: ignore[arg-type]


def names_behind_ids(adapter: Adapter, model: Any, batch: Batch, catalogue: Catalogue) -> list[str]:
    """Run the model; name float tensors behind an input of ids: embeddings, else the inputs of recurrent layers."""
    tables = catalogue.facts.having("embedding")
    if not tables and not adapter.needs_shapes:  # a program, which has to be traced, does not say what an embedding is
        return []
    try:
        capture = adapter.run(model, batch, Taps.states((*tables, *catalogue.recurrent))).capture
    except RnnlensError:
        return [f"{table}.output" for table in tables]
    called_layers = {call.layer for call in capture.other_calls}
    table_outputs = [f"{table}.output" for table in tables if table in called_layers]
    return table_outputs or [f"{call.layer}.input" for call in capture.calls[:1]]


def _gates_name(layer: str, quantity: str, info: LayerInfo) -> TensorName:
    """Return the name of the gates of a recurrent layer; raise if its cell has no known gates."""
    if not cell_of_kind(info.cell).gates:
        reason = "a cell without gates" if info.cell in kinds() else "a custom cell, whose gates are not known"
        raise LayerNotFoundError(
            f"{layer!r} has {reason}.",
            got=f"{layer}.{quantity}",
            expected=f"{layer}.hidden, {layer}.output or {layer}.weights",
        )
    return TensorName(f"{layer}.{quantity}", quantity, layer)  # type: ignore[arg-type]


def _state_name(layer: str, quantity: str, state: re.Match[str], info: LayerInfo) -> TensorName:
    """Return the name of a state of a recurrent layer: at all steps, initial or final; raise if there is no such state.

    ``state`` is the match of ``quantity``, with its groups ``when`` and ``state``.
    """
    kind = {"initial_": "initial_state", "final_": "final_state", None: "state"}[state["when"]]
    names = states_of(info) if info.states or info.cell in kinds() else unnamed_states(8)
    if state["state"] not in names:
        raise LayerNotFoundError(
            f"{layer!r} is a {info.cell} layer: it has no state named {state['state']!r}.",
            got=f"{layer}.{quantity}",
            hint=", ".join(f"{layer}.{name}" for name in names),
        )
    return TensorName(f"{layer}.{quantity}", kind, layer, names.index(state["state"]))  # type: ignore[arg-type]


def states_of(info: LayerInfo) -> tuple[str, ...]:
    """Return the names of a layer's states; ``hidden`` for a custom cell that did not run yet."""
    return info.states or cell_of_kind(info.cell).states


def _is_state(name: TensorName) -> bool:
    return name.kind in ("state", "initial_state", "final_state")


def _match_state(quantity: str, catalogue: Catalogue) -> re.Match[str] | None:
    """Match ``hidden``, ``initial_cell``, ``final_voltage``: a state of any cell, at every step or at an end."""
    cells = [*(cell.states for cell in kinds().values()), *(info.states for info in catalogue.recurrent.values())]
    states = dict.fromkeys(re.escape(state) for names in cells for state in names)
    return re.fullmatch(rf"(?P<when>initial_|final_)?(?P<state>hidden|{'|'.join(states)}|state_\d+)", quantity)


def _matching_layers(pattern: str, names: Iterable[str], text: str, catalogue: Catalogue) -> list[str]:
    """Return the layers that ``pattern`` selects: a name, a call (``lstm#0``), a stack, a last part or ``lstm*``."""
    names = list(names)
    if pattern in names or uncalled_layer(pattern, names) in names:
        return [pattern]
    matches = [name for name in names if _matches(pattern, name)]
    stack_members = [name for name in names if _stack_name(name) == pattern != name]
    if stack_members and not matches:
        return stack_members
    matches = matches or [name for name in names if _matches(pattern, _last_part(name))]
    matches = matches or [name for name in names if name.endswith(f".{pattern}")]
    if len(matches) > 1 and "*" not in pattern and "?" not in pattern:
        listing = ", ".join(repr(name) for name in matches)
        raise LayerNotFoundError(f"{pattern!r} is the name of several layers.", got=text, expected=listing)
    if not matches:
        hint = did_you_mean(text, catalogue.suggestions())
        raise LayerNotFoundError(f"Nothing in this model is named {text!r}.", got=repr(text), hint=hint)
    return matches


def _last_part(layer: str) -> str:
    return layer.rpartition("/")[2]


def _stack_name(layer: str) -> str:
    """Return the module of a stacked layer: ``lstm`` for ``lstm[0]``; any other name unchanged."""
    return re.sub(r"\[\d+\]$", "", layer)


def _weight_name(layer: str, key: str) -> TensorName:
    return TensorName(f"{layer}/{key}", "weight", layer, key=key)


def _matches(pattern: str, name: str) -> bool:
    """Match a shell pattern with ``*`` and ``?`` only, as brackets are part of torch names such as ``rnn[1]``."""
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None
