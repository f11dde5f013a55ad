"""``rl.keras.cuts``: where training on consecutive batches cuts the gradient, and the gradient without the cuts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..adapters.keras.dialect import Dialect, dialect_of
from ..adapters.keras.losses import scalar_loss
from ..adapters.keras.restore import borrowed
from ..adapters.protocol import Batch
from ..arguments import anything, checked
from ..autodiff.cuts import CutSite, UserCall, user_call
from ..autodiff.interface import Tap
from ..errors import InputError, UnsupportedError, raised_by, short_repr
from .cut_prices import StepGradients, TrainingCuts, compare_cuts


@dataclass
class UntoldSite(CutSite):
    """A cut that no line of the user's code makes: by a layer that keeps its state, or by an operation of a graph."""

    description: str = ""

    @property
    def code(self) -> str:
        """Description of what cuts."""
        return self.description or super().code


@dataclass
class _Bypass:
    """Counter of the cuts of one run, which says of each execution whether it is passed over."""

    calls: frozenset[UserCall]
    every: int | None
    sites: dict[UserCall, CutSite] = field(default_factory=dict)

    def passes(self, site: CutSite) -> bool:
        """Count one execution; return whether the gradient goes on as if the cut were not there."""
        site = self.sites.setdefault(site.call, site)
        site.count += 1
        return site.call in self.calls and (self.every is None or bool((site.count - 1) % self.every))


@checked(model=anything, batches=anything, loss=anything, keep=anything)
def cuts(model: Any, batches: Iterable[Any], *, loss: Any = None, keep: str | Sequence[str] = ()) -> TrainingCuts:
    """Find where training on consecutive batches cuts the gradient, and compare it with that without the cuts.

    The model is run several times at the weights as they are, in training mode, step by step and without compilation:
    once as it is, then with one of its cuts passed over, with all of them, and with every 2nd, 4th, ... execution left
    in place. Gradients are those of the sum of the losses of all batches. Full backpropagation goes through the states
    that layers keep between batches, too.

    Parameters
    ----------
    model
        A built Keras 3 model. Weights, states, metrics and random generators are restored.
    batches
        Consecutive batches as ``train_on_batch`` takes them: ``(x, y)`` or ``(x, y, sample_weight)``. Several of them
        are needed to see what ``stateful=True`` cuts.
    loss
        The loss, as for :func:`rnnlens.trace`; that of ``compile`` by default.
    keep
        Texts of lines whose cuts stay in place, since they are meant, as of a target.

    Returns
    -------
    TrainingCuts
        Only cuts that change the gradient: ``stop_gradient`` of Keras, TensorFlow and JAX, in torch also ``detach`` and
        ``no_grad``, each with its line; states kept between batches, of ``stateful=True`` and of layers that assign
        variables. Where Keras runs a graph of operations, or keeps the state itself, the line is 0. ``left_out`` has
        the input steps that slices and masks leave without a gradient. Conversions to NumPy are not observed.

    Raises
    ------
    InputError
        If there is no batch, or one is no pair.
    UnsupportedError
        For a model of ``tf_keras``.

    References
    ----------
    Truncated backpropagation through time: Williams, Peng 1990, doi:10.1162/neco.1990.2.4.490.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import rnnlens as rl
    >>> model = keras.Sequential([keras.Input((9, 2)), keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 9, 2), "float32"), np.zeros((8, 1), "float32")
    >>> print(rl.keras.cuts(model, [(x, y)]))
    No cut: the gradient of 1 backward pass is that of full backpropagation.
    """
    keras = dialect_of(model)
    if keras.name != "keras":
        raise UnsupportedError(
            "rl.keras.cuts runs models of Keras 3.", got=f"a model of {keras.name}", hint="a model of keras 3"
        )
    data = [_checked_batch(batch) for batch in batches]
    if not data:
        raise InputError("There is no batch.", got="batches=[]", expected="[(x, y), ...]")
    training = _Training(model, keras, data, loss)
    return compare_cuts(training.gradients, training.gradients([], None), keep)


def _checked_batch(batch: Any) -> tuple[Any, Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise InputError("A batch is a pair.", got=short_repr(batch), expected="(x, y) or (x, y, sample_weight)")
    return (*batch, None) if len(batch) == 2 else tuple(batch)


class _Training:
    """Forward passes of a model on consecutive batches, as a program that its engine differentiates."""

    def __init__(self, model: Any, keras: Dialect, batches: Sequence[tuple[Any, Any, Any]], loss: Any) -> None:
        self._model, self._keras = model, keras
        tensors = [
            tuple(
                None if part is None else keras.tree.map_structure(keras.ops.convert_to_tensor, part) for part in batch
            )
            for batch in batches
        ]
        self._batches = tensors
        self._losses = [
            scalar_loss(model, Batch(x, y, sample_weight=weight, loss=loss, training=True)) for x, y, weight in tensors
        ]
        self._stop = _StopGradient(keras)
        self._options = {"training": True} if model._call_has_training_arg else {}
        self._owners = {
            id(v): layer
            for layer in model._flatten_layers()
            for v in (*layer._non_trainable_variables, *keras.tree.flatten(getattr(layer, "states", None)))
        }

    def gradients(self, bypassed: Sequence[CutSite], every: int | None) -> StepGradients:
        """Run all batches, with some cuts passed over; return the gradients of the sum of their losses."""
        keras, calls = self._keras, frozenset(site.call for site in bypassed)
        with borrowed(self._model, keras, 0, regularised=True), ExitStack() as stack:
            stack.enter_context(keras.engine.step_by_step())
            recorder = stack.enter_context(_observed(keras, self._stop, calls, every))

            def program(tap: Tap) -> tuple[Any, Any]:
                recorder.restart()
                return self._sum_of_losses(tap, recorder), None

            _, _, gradients = keras.engine.gradients(program)
        arrays = {key: np.asarray(keras.engine.to_array(grad), dtype=np.float64) for key, grad in gradients.items()}
        by_weight = {key[7:]: grad for key, grad in arrays.items() if key.startswith("weight|")}
        by_input = [arrays[key] for key in sorted(arrays) if key.startswith("input|") and arrays[key].ndim > 2]
        return StepGradients(by_weight, recorder.sites, len(self._batches), by_input)

    def _sum_of_losses(self, tap: Tap, recorder: _Observed) -> Any:
        keras = self._keras
        trained = {id(variable) for variable in self._model.trainable_variables}
        values: dict[int, tuple[Any, Any]] = {}
        for variable in keras.variables(self._model):
            tensor = keras.ops.convert_to_tensor(variable)
            is_trained = id(variable) in trained
            values[id(variable)] = variable, tap(f"weight|{keras.path(variable)}", tensor) if is_trained else tensor
        total: Any = None
        for i, ((x, y, weight), loss) in enumerate(zip(self._batches, self._losses, strict=True)):
            x = self._tapped(x, tap, i)
            scope = _scope(list(values.values()))
            with scope, raised_by("Your model"):
                value = loss(x, y, self._model(x, **self._options), weight)
            total = value if total is None else total + value
            is_last = i + 1 == len(self._batches)
            for variable, call in () if is_last else scope.assigned.values():
                new = scope.get_current_value(variable)
                if keras.is_float(new) and not recorder.passes(self._state_site(variable, call)):
                    new = recorder.stop(new)
                values[id(variable)] = variable, new
        return total

    def _tapped(self, x: Any, tap: Tap, batch: int) -> Any:
        """Tap the first float leaf of the input."""
        leaves, keras = self._keras.tree.flatten(x), self._keras
        for i, leaf in enumerate(leaves):
            if keras.is_float(leaf):
                leaves[i] = tap(f"input|{batch:06d}", leaf)
                break
        return keras.tree.pack_sequence_as(x, leaves)

    def _state_site(self, variable: Any, call: UserCall | None) -> CutSite:
        """Return the site of a state that is kept between batches: the user's line, or else the layer."""
        if call is not None:
            return CutSite(call, "assignment of a state, read by the next batch,")
        layer = self._owners.get(id(variable))
        name = self._keras.path(variable) if layer is None else layer.name
        stateful = " (stateful=True)" if getattr(layer, "stateful", False) else ""
        description = f"layer {name!r}{stateful}"
        return UntoldSite((description, 0, 0), "state kept between batches", description=description)


def _scope(values: Sequence[tuple[Any, Any]]) -> Any:
    """Return a scope in which variables have these values, and which records assigned variables and the lines."""
    import keras

    class Scope(keras.StatelessScope):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(values, collect_losses=True, initialize_variables=False)
            self.assigned: dict[int, tuple[Any, UserCall | None]] = {}

        def add_update(self, update: Any) -> None:
            super().add_update(update)
            self.assigned[id(update[0])] = update[0], user_call()

    return Scope()


class _Observed:
    """Observer of ``stop_gradient`` and of states; in torch also of ``detach`` and ``no_grad``."""

    def __init__(self, calls: frozenset[UserCall], every: int | None, stop: Callable[[Any], Any]) -> None:
        self._calls, self._every, self.stop = calls, every, stop
        self.detached: Mapping[UserCall, CutSite] = {}
        self.restart()

    def restart(self) -> None:
        """Count from 0: JAX runs a program twice."""
        self._bypass = _Bypass(self._calls, self._every)

    @property
    def sites(self) -> list[CutSite]:
        """All cuts that were executed."""
        return [site for site in (*self.detached.values(), *self._bypass.sites.values()) if site.count]

    def passes(self, site: CutSite) -> bool:
        """Count one execution; return whether it is passed over."""
        return self._bypass.passes(site)

    def stop_gradient(self, x: Any, *arguments: Any, **options: Any) -> Any:
        """Stop the gradient of a tensor, or not if this execution is passed over."""
        call = user_call()
        if _is_trial_step():
            return self.stop(x, *arguments, **options)
        site = _operation_site() if call is None else CutSite(call, "stop_gradient")
        return x if self.passes(site) else self.stop(x, *arguments, **options)


def _is_trial_step() -> bool:
    """Return whether a step is run only for the shape of its output: Keras does so on TensorFlow and torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "rnn" and "input_time_zero" in frame.f_locals:
            return "output_time_zero" not in frame.f_locals
        frame = frame.f_back
    return False


def _operation_site() -> CutSite:
    """Return the site of the operation of a model's graph that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        operation = frame.f_locals.get("self")
        if type(operation).__name__ == "StopGradient":
            name = f"operation {operation.name!r} of the model's graph"
            return UntoldSite((name, 0, 0), "stop_gradient", description=name)
        frame = frame.f_back
    return UntoldSite(("", 0, 0), "stop_gradient", description="an operation whose line is not known")


#: Modules whose own calls of ``stop_gradient`` are no cuts of the user's, as in a softmax.
_INTERNALS = ("jax._src", "tensorflow.python", "keras.src", "rnnlens")


class _StopGradient:
    """The engine's ``stop_gradient``, and the modules and closures that have it under a name of their own.

    A name that was imported (``from jax.lax import stop_gradient``) does not follow the module it came from.
    """

    def __init__(self, keras: Dialect) -> None:
        from keras.src import backend

        owner = keras.engine.owner_of_stop_gradient or backend.core
        self.function: Callable[..., Any] = owner.stop_gradient
        modules = [vars(owner)]
        modules += [vars(module) for name, module in list(sys.modules.items()) if not name.startswith(_INTERNALS)]
        self._names = [
            (names, name) for names in modules for name, value in list(names.items()) if value is self.function
        ]
        self._closures = [holder for holder in gc.get_referrers(self.function) if hasattr(holder, "cell_contents")]

    def replace(self, function: Callable[..., Any]) -> None:
        """Let all these names stand for another function."""
        for holder, name in self._names:
            holder[name] = function
        for closure in self._closures:
            closure.cell_contents = function


@contextmanager
def _observed(
    keras: Dialect, stop: _StopGradient, calls: frozenset[UserCall], every: int | None
) -> Iterator[_Observed]:
    """Observe the engine's ``stop_gradient`` within the block."""
    observed = _Observed(calls, every, stop.function)
    stop.replace(observed.stop_gradient)
    try:
        with keras.engine.observe_detached(list(calls), every, _is_trial_step) as observed.detached:
            yield observed
    finally:
        stop.replace(stop.function)
