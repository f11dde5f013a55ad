"""Listens to layers while a model runs: what went in, what came out, and taps at the tensors that are asked for.

A recurrent layer is listened to at its ``inner_loop``: there the mask, the initial state (given, carried over, or
zeros) and the dropout multipliers are settled, and what the loop returns is what the layer returns. Any other layer is
listened to at its ``call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from ...autodiff import Tap
from ...errors import InputError, RnnlensError, UnsupportedError, message
from ..threads import heard_here
from .discover import Site
from .weights import known_class


@dataclass
class Call:
    """One call of one layer. ``arrays`` holds tensors by name; ``key`` starts the name of every tap of this call."""

    place: str
    half: int
    index: int
    arrays: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Such as ``"lstm|0|1"``: second call of the first (or only) half."""
        return f"{self.place}|{self.half}|{self.index}"


@dataclass
class Listener:
    """Records calls in the order in which they happen.

    ``wanted`` holds what to tap: a kind of tensor (``"output"``) at every call, or one tensor of one call
    (``"lstm|0|1|final_state/0"``). ``keep`` names the kinds to record besides what was tapped.
    """

    tap: Tap
    wanted: frozenset[str]
    keep: frozenset[str]
    initial_state: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def listening(self, sites: Sequence[Site], plain: Mapping[str, Any]) -> Iterator[None]:
        """Overrides methods on the instances; the caller restores ``vars`` of every layer (see ``found.py``)."""
        halves: dict[str, int] = {}
        saved: list[tuple[dict[str, Any], str, Any]] = []

        def override(layer: Any, name: str, method: Any) -> None:
            own = vars(layer)
            saved.append((own, name, own.get(name)))
            own[name] = heard_here(method, getattr(layer, name))

        try:
            for site in sites:
                half = halves[site.name] = halves.get(site.name, -1) + 1
                override(site.layer, "inner_loop", self._loop(site, half))
                if site.bidirectional:
                    override(site.owner, "_can_attempt_fused_lstm", lambda *args, **kwargs: False)
                    override(site.owner, "_can_attempt_fused_gru", lambda *args, **kwargs: False)
            for name, layer in plain.items():
                override(layer, "call", self._plain(name, layer))
            yield
        finally:
            for own, name, old in reversed(saved):
                if old is None:
                    own.pop(name, None)
                else:
                    own[name] = old

    def _start(self, place: str, half: int = 0) -> Call:
        index = sum(call.place == place and call.half == half for call in self.calls)
        call = Call(place, half, index)
        self.calls.append(call)
        return call

    def _pass(self, call: Call, name: str, tensor: Any) -> Any:
        """Tap ``tensor`` if asked to, record it if asked to, and return what to go on with."""
        kind, key = name.split("/")[0], f"{call.key}|{name}"
        is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
        tapped = is_float and (kind in self.wanted or key in self.wanted)
        if tapped:
            tensor = self.tap(key, tensor)
        if tapped or kind in self.keep or key in self.keep:
            call.arrays[name] = tensor
        return tensor

    def _pass_all(self, call: Call, name: str, tree: Any) -> Any:
        flat = [self._pass(call, f"{name}/{i}", t) for i, t in enumerate(keras.tree.flatten(tree))]
        return keras.tree.pack_sequence_as(tree, flat)

    def _loop(self, site: Site, half: int) -> Callable[..., Any]:
        original, layer = site.layer.inner_loop, site.layer

        def inner_loop(sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
            mask = mask[0] if keras.tree.is_nested(mask) else mask
            with _own_errors_unchanged():
                refuse_options(site, mask, bool(training))
                initial_state = keras.tree.map_structure(_value_of, initial_state)
                initial_state = self._given_state(site, half, initial_state)
            call = self._start(site.name, half)
            sequences = self._pass(call, "input", sequences)
            initial_state = self._pass_all(call, "initial_state", initial_state)
            if "mask" in self.keep and mask is not None:
                call.arrays["mask"] = mask
            if "dropout" in self.keep and training:
                call.arrays.update(_dropout(layer.cell))
            last, outputs, states = original(sequences, initial_state, mask, training=training)
            if layer.return_sequences:
                outputs = self._pass(call, "output", outputs)
            else:
                last = self._pass(call, "output", last)
            if layer.return_state:
                states = self._pass_all(call, "final_state", states)
            return last, outputs, states

        return inner_loop

    def _given_state(self, site: Site, half: int, state: Any) -> Any:
        """The state that the user asked to start from, in place of the layer's own."""
        given = self.initial_state.get(site.name)
        if given is None:
            return state
        own = keras.tree.flatten(state)
        if site.bidirectional and len(given) == 2 * len(own):
            given = given[half * len(own) : (half + 1) * len(own)]
        shapes = [tuple(s.shape) for s in given]
        if any(len(s) < 1 for s in shapes) or [s[1:] for s in shapes] != [tuple(s.shape)[1:] for s in own]:
            raise InputError(
                message(
                    f"The initial state given for {site.name!r} does not fit.",
                    got=f"shapes {shapes}",
                    expected=f"shapes {[tuple(s.shape) for s in own]}",
                )
            )
        cast = [keras.ops.cast(new, old.dtype) for new, old in zip(given, own, strict=True)]
        return keras.tree.pack_sequence_as(state, cast)

    def _plain(self, name: str, layer: Any) -> Callable[..., Any]:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            record = self._start(name)
            if args:
                args = (self._pass_all(record, "input", args[0]), *args[1:])
            return self._pass_all(record, "output", original(*args, **kwargs))

        return call


def _value_of(state: Any) -> Any:
    """A stateful layer hands over its variables, of which only the values can be differentiated."""
    return keras.ops.convert_to_tensor(state.value) if isinstance(state, keras.Variable) else state


@contextmanager
def _own_errors_unchanged() -> Iterator[None]:
    """Keras writes the arguments of the layer into every error that passes through; ours are complete as they are."""
    try:
        yield
    except RnnlensError as error:
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        raise


def refuse_options(site: Site, mask: Any, training: bool) -> None:
    """What can be seen only when the layer runs, and cannot be honoured.

    Raises
    ------
    UnsupportedError
        For an option triple that Keras itself cannot run, and for random numbers and statistics of the batch inside a
        cell of unknown equations.
    """
    layer = site.layer
    if keras.backend.backend() == "torch" and layer.unroll and layer.go_backwards and mask is not None:
        raise UnsupportedError(
            message(
                f"Layer {site.name!r}: Keras on torch cannot run unroll=True, going backwards, with a mask.",
                hint="unroll=False",
            )
        )
    if training and known_class(layer.cell) is None and _takes_statistics(layer.cell):
        raise UnsupportedError(
            message(
                f"Layer {site.name!r}: batch normalisation in the cell {type(layer.cell).__name__} acts on the batch.",
                got="training=True",
                expected="a cell whose step is a function of its input and state alone",
                hint="training=False",
            )
        )
    if training and known_class(layer.cell) is None and _is_random(layer.cell):
        raise UnsupportedError(
            message(
                f"Layer {site.name!r}: dropout inside the cell {type(layer.cell).__name__} cannot be replayed.",
                hint="training=False, or dropout between the layers instead of inside the cell",
            )
        )


def _takes_statistics(cell: Any) -> bool:
    inner = cell._flatten_layers() if isinstance(cell, keras.Layer) else ()
    return any(isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in inner)


def _is_random(cell: Any) -> bool:
    if not isinstance(cell, keras.Layer):
        return False
    for layer in cell._flatten_layers():
        rates = [getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout", "rate")]
        if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            return True
        if getattr(layer, "_seed_generators", None) and known_class(layer) is None:
            return True
    return False


def _dropout(cell: Any) -> dict[str, Any]:
    """The multipliers that a known cell applies at every step, as one tensor each; per gate for implementation 1."""
    found = {}
    per_gate = getattr(cell, "implementation", 2) == 1
    for name, attribute, rate in (
        ("input_scale", "_dropout_mask", "dropout"),
        ("state_scale", "_recurrent_dropout_mask", "recurrent_dropout"),
    ):
        mask = getattr(cell, attribute, None)
        if mask is not None and 0.0 < getattr(cell, rate) < 1.0:
            found[name] = keras.ops.stack(mask) if per_gate else mask
    return found
