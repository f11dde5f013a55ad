"""Hooks on layers while a model runs: they record inputs and outputs, and tap the tensors that are differentiated.

The dialect chooses which method of a recurrent layer is hooked: one that receives mask, initial state and dropout, and
whose result is the layer's output. Any other layer is hooked at its ``call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...autodiff import Tap
from ...errors import InputError, RnnlensError, UnsupportedError
from ..shared import substitute_in_this_thread
from .dialect import Dialect
from .discover import RecurrentSite
from .loops import CellCallHook, LayerCall, Starts, SteppedLayerError, StepRecorder
from .weights import known_class


@contextmanager
def overriding() -> Iterator[Callable[[Any, str, Any], None]]:
    """Yield a function that overrides a method on an instance; on exit, restore all overridden methods."""
    saved: list[tuple[dict[str, Any], str, Any]] = []

    def put(thing: Any, name: str, method: Any) -> None:
        own = vars(thing)
        saved.append((own, name, own.get(name)))
        own[name] = method

    try:
        yield put
    finally:
        for own, name, old in reversed(saved):
            if old is None:
                own.pop(name, None)
            else:
                own[name] = old


@dataclass
class LayerRecorder:
    """Recorder of layer calls, in the order in which they happen.

    ``wanted`` contains what to tap: a kind of tensor (``"output"``) at every call, or one tensor of one call
    (``"lstm|0|1|final_state/0"``), at every step of a loop over a cell. ``keep`` contains the kinds to record besides
    the tapped ones. ``starts`` and ``spoiled`` are for loops over cells, see :class:`.loops.StepRecorder`. ``stepped``
    names the layers whose calls with one step are joined; with None, no layer's are. ``apart`` names the layers whose
    calls with one step do not continue each other.
    """

    keras: Dialect
    tap: Tap
    wanted: frozenset[str]
    keep: frozenset[str]
    initial_state: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    training: bool = False
    starts: Starts = field(default_factory=dict)
    spoiled: str = ""
    stepped: frozenset[str] | None = None
    apart: frozenset[str] = frozenset()
    calls: list[LayerCall] = field(default_factory=list)
    is_inside_a_layer: bool = False
    _recorders: dict[str, StepRecorder] = field(default_factory=dict)
    _returned: set[str] = field(default_factory=set)

    @contextmanager
    def inside_a_layer(self) -> Iterator[None]:
        """Record no call of a cell within the block, in which a recurrent layer calls it."""
        before, self.is_inside_a_layer = self.is_inside_a_layer, True
        try:
            yield
        finally:
            self.is_inside_a_layer = before

    @contextmanager
    def hooked(self, sites: Sequence[RecurrentSite], plain: Mapping[str, Any]) -> Iterator[None]:
        """Hook the recurrent ``sites`` and the ``plain`` layers within the block.

        Hooks are methods overridden on the instances.
        """
        halves: dict[str, int] = {}
        with overriding() as put:

            def override(layer: Any, name: str, method: Any) -> None:
                put(layer, name, substitute_in_this_thread(method, getattr(layer, name)))

            for site in sites:
                half = halves[site.name] = halves.get(site.name, -1) + 1
                if site.is_loop:
                    refuse_random(site, self.training)
                    override(site.layer.cell, "call", own_errors(CellCallHook(self, site, self._steps_of(site))))
                else:
                    site.keras.hook(self, site, half, override)
            for name, layer in plain.items():
                override(layer, "call", self._plain(name, layer))
            yield

    def _steps_of(self, site: RecurrentSite) -> StepRecorder:
        if site.name not in self._recorders:
            starts, spoiled = self.starts.get(site.name), self.spoiled == site.name
            self._recorders[site.name] = StepRecorder(self, site, starts, spoiled)
        return self._recorders[site.name]

    def steps_of(self, site: RecurrentSite, sequence: Any, states: Any) -> StepRecorder | None:
        """Return the recorder of steps for a call of a layer with one step; None for any other call.

        Only a layer that returns its states can be called in a loop over the steps.

        Raises
        ------
        SteppedLayerError
            If the layer was called before, and neither ``stepped`` nor ``apart`` names it: the call may continue it.
        """
        layer = site.layer
        random = self.training and any(getattr(layer.cell, name, 0.0) for name in ("dropout", "recurrent_dropout"))
        if self.stepped is None or site.name in self.apart or site.bidirectional or layer.stateful or random:
            return None
        if not layer.return_state or sequence.shape[1] != 1 or len(sequence.shape) != 3:
            return None
        if site.name in self.stepped:
            return self._steps_of(site)
        if site.name in self._returned:
            raise SteppedLayerError(site.name)
        return None

    def returns(self, site: RecurrentSite) -> None:
        """Note that a layer returned its states, from which its next call may start."""
        self._returned.add(site.name)

    def starts_call(self, place: str, half: int = 0, *, is_loop: bool = False) -> LayerCall:
        """Add a record for a new call of a layer, and return it."""
        index = sum(call.place == place and call.half == half for call in self.calls)
        call = LayerCall(place, half, index, is_loop=is_loop)
        self.calls.append(call)
        return call

    def record(self, call: LayerCall, name: str, tensor: Any) -> Any:
        """Tap and record ``tensor`` if that is requested; return the tensor to continue with."""
        every = name.partition("@")[0]
        kind, key = every.split("/")[0], f"{call.key}|{every}"
        tapped = self.keras.is_float(tensor) and (kind in self.wanted or key in self.wanted)
        if tapped:
            tensor = self.tap(f"{call.key}|{name}", tensor)
        if tapped or kind in self.keep or key in self.keep:
            call.arrays[name] = tensor
        return tensor

    def record_all(self, call: LayerCall, name: str, tree: Any) -> Any:
        """Tap and record each tensor of a nested structure; return the structure to continue with.

        A tensor that occurs twice, such as h as output and state, is tapped once for each place and stays one tensor.
        """
        flat = self.keras.tree.flatten(tree)
        tapped: dict[int, Any] = {}
        for i, tensor in enumerate(flat):
            tapped[id(tensor)] = self.record(call, f"{name}/{i}", tapped.get(id(tensor), tensor))
        return self.keras.tree.pack_sequence_as(tree, [tapped[id(tensor)] for tensor in flat])

    def enters(
        self, site: RecurrentSite, half: int, sequence: Any, initial_state: Any, mask: Any
    ) -> tuple[LayerCall, Any, Any]:
        """Start the record of a recurrent call; return it with the input and initial state to continue with."""
        initial_state = self.given_state(site, half, initial_state)
        call = self.starts_call(site.name, half)
        sequence = self.record(call, "input", sequence)
        # h and c may start as one tensor, and have gradients of their own.
        flat = self.keras.tree.flatten(initial_state)
        flat = [self.record(call, f"initial_state/{i}", state) for i, state in enumerate(flat)]
        initial_state = self.keras.tree.pack_sequence_as(initial_state, flat)
        if "mask" in self.keep and mask is not None:
            call.arrays["mask"] = mask
        return call, sequence, initial_state

    def given_state(self, site: RecurrentSite, half: int, state: Any) -> Any:
        """Return the user's ``initial_state`` for this layer, cast and nested as its own state.

        Returns the layer's own state if none was given, and raises InputError if the shapes differ.
        """
        given = self.initial_state.get(site.name)
        if given is None:
            return state
        own = self.keras.tree.flatten(state)
        if site.bidirectional and len(given) == 2 * len(own):
            given = given[half * len(own) : (half + 1) * len(own)]
        shapes = [tuple(s.shape) for s in given]
        if any(len(s) < 1 for s in shapes) or [s[1:] for s in shapes] != [tuple(s.shape)[1:] for s in own]:
            raise InputError(
                f"The initial state given for {site.name!r} has another shape than the layer's states.",
                got=f"shapes {shapes}",
                expected=f"shapes {[tuple(s.shape) for s in own]}",
            )
        cast = [self.keras.ops.cast(new, old.dtype) for new, old in zip(given, own, strict=True)]
        return self.keras.tree.pack_sequence_as(state, cast)

    def _plain(self, name: str, layer: Any) -> Callable[..., Any]:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            record = self.starts_call(name)
            if args:
                record.shape = tuple(getattr(args[0], "shape", ()))
                args = (self.record_all(record, "input", args[0]), *args[1:])
            return self.record_all(record, "output", original(*args, **kwargs))

        return call


def own_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose errors of rnnlens Keras does not change."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        with own_errors_unchanged():
            return method(*args, **kwargs)

    return marked


@contextmanager
def own_errors_unchanged() -> Iterator[None]:
    """Mark errors of rnnlens so that Keras does not append the layer's arguments to them."""
    try:
        yield
    except RnnlensError as error:
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        raise


def refuse_random(site: RecurrentSite, training: bool) -> None:
    """Refuse cells of unknown equations whose step cannot be replayed in training mode.

    Raises
    ------
    UnsupportedError
        If the cell draws random numbers or uses statistics of the batch.
    """
    layer = site.layer
    if training and known_class(layer.cell) is None and _takes_statistics(site.keras, layer.cell):
        raise UnsupportedError(
            f"Layer {site.name!r}: batch normalisation in the cell {type(layer.cell).__name__} mixes the samples "
            "of the batch.",
            got="training=True",
            expected="a cell whose step depends only on its input, its state and its weights",
            hint="training=False",
        )
    if training and known_class(layer.cell) is None and _is_random(site.keras, layer.cell):
        raise UnsupportedError(
            f"Layer {site.name!r}: dropout inside the cell {type(layer.cell).__name__} cannot be replayed.",
            hint="training=False, or dropout between the layers instead of inside the cell",
        )


def _takes_statistics(keras: Dialect, cell: Any) -> bool:
    inner = cell._flatten_layers() if isinstance(cell, keras.Layer) else ()
    return any(isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in inner)


def _is_random(keras: Dialect, cell: Any) -> bool:
    if not isinstance(cell, keras.Layer):
        return False
    for layer in cell._flatten_layers():
        rates = [getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout", "rate")]
        if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            return True
        if keras.draws(layer) and known_class(layer) is None:
            return True
    return False
