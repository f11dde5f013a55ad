"""TensorFlow: taps are identities that a tape watches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from ..typing import Array
from .protocol import Keep, Memo, Program, Tap, as_it_is


class TensorFlowEngine:
    """Differentiation, compilation and arrays of TensorFlow; see :class:`rnnlens.autodiff.Engine`."""

    name = "tensorflow"
    compiles = True

    def __init__(self, keep: Keep = as_it_is) -> None:
        self._keep = keep

    def to_array(self, tensor: Any) -> Array:
        """Copy a tensor to NumPy (torch off the CPU: to a torch tensor); halves become float32."""
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype in (tf.bfloat16, tf.float16):
            tensor = tf.cast(tensor, tf.float32)
        # Shares the buffer, which nothing else holds once the run is over; .numpy() would copy it.
        return np.asarray(tensor)

    def like(self, array: Array, other: Array) -> Array:
        """Convert a NumPy array to the kind of array of ``other``, a result of :meth:`to_array`."""
        del other
        return array

    def join(self, arrays: Sequence[Array]) -> Array:
        """Concatenate results of :meth:`to_array` along their first axis."""
        return np.concatenate(list(arrays))

    def own(self, array: Any) -> Any:
        """Copy an array where the engine would otherwise share memory with the user's."""
        return array

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return tensors to substitute for the values of variables; None where the program may read them itself."""
        del tensors
        return None

    def gradients(self, program: Program) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, aux and the gradient of the loss with respect to every tap (zeros where there is no path)."""
        points: dict[str, Any] = {}
        with tf.GradientTape(watch_accessed_variables=False) as tape:

            def tap(key: str, tensor: Any) -> Any:
                points[key], tensor = _point(tensor, self._keep)
                tape.watch(points[key])
                return tensor

            loss, aux = program(tap)
        found = tape.gradient(loss, points, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, aux, {key: tf.convert_to_tensor(g) for key, g in found.items()}

    def forward(self, program: Program) -> tuple[Any, Any]:
        """Return loss and aux, without gradients."""
        return program(lambda key, tensor: tensor)

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """``function`` traced now; see :class:`Engine`."""
        del memo  # a graph costs its tracing, which is to be done anew in any case
        return _graph(function, arguments)

    def settings(self) -> Hashable:
        """Return the engine's own settings that compiled programs depend on."""
        return ()

    @contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Do nothing: Keras draws from variables on this engine."""
        del seed
        yield

    def linearise(
        self,
        program: Callable[[Any, Tap], tuple[dict[str, Any], Any]],
        arguments: Any,
        memo: Memo,
    ) -> Any:
        """Run ``program(arguments, tap) -> (targets, aux)``, and keep what is needed to differentiate it."""
        return _TensorFlowProgram(program, arguments, memo, self._keep)

    def per_step(self, function: Callable[..., Any]) -> _TensorFlowSteps:
        """The steps of a cell, differentiated."""
        return _TensorFlowSteps(function)


def _graph(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Trace ``function`` into one graph, for arguments of these shapes and dtypes; it is never traced again."""
    absent = tf.nest.map_structure(lambda leaf: leaf is None, arguments)

    def flat(leaves: list[Any]) -> Any:
        return function(*_filled(absent, leaves))

    # No autograph: Keras layers do not need it, and the user's exceptions keep their text. A function that is called,
    # rather than asked for its graph, would tell the user that it is traced too often.
    graph = tf.function(flat, autograph=False).get_concrete_function(_tensors(arguments))
    return lambda *given: graph(_tensors(given))


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(tree) if leaf is not None]


def _filled(absent: Any, leaves: list[Any]) -> Any:
    """A tree of these tensors, in the order of :func:`_tensors`; None where there is none."""
    rest = iter(leaves)
    return tf.nest.map_structure(lambda none: None if none else next(rest), absent)


class _TensorFlowProgram:
    """The compiled forward pass under a tape, its taps turned into inputs by adding zeros to them.

    One run forward; every pull back runs the compiled backward half.
    """

    def __init__(
        self, program: Callable[[Any, Tap], tuple[dict[str, Any], Any]], arguments: Any, memo: Memo, keep: Keep
    ) -> None:
        def run(arguments: Any, zeros: dict[str, Any]) -> Any:
            return program(arguments, lambda key, t: keep(t, t + zeros[key]) if key in zeros else _point(t, keep)[1])

        shapes, variables, self._paths = memo.once("probe", lambda: self._probe(program, arguments, keep))
        zeros = {key: tf.zeros(shape, dtype) for key, (shape, dtype) in shapes.items()}
        compiled = memo.once("run", lambda: _graph(run, (arguments, zeros)))
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([*zeros.values(), *variables.values()])
            self.targets, self.aux = compiled(arguments, zeros)
        self._tape, self._sources = tape, {**zeros, **variables}

        def pulled(zeros: dict[str, Any], cotangents: dict[str, Any]) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch([*zeros.values(), *variables.values()])
                targets, _ = run(arguments, zeros)
            return _gradients(inner, targets, {**zeros, **variables}, cotangents)

        self._pull_inside: Callable[[Any], Any] = lambda given: _graph(pulled, (zeros, given))(zeros, given)
        #: Makes the context in which the program may be traced once more; set by the adapter.
        self.tracing: Callable[[], AbstractContextManager[None]] = nullcontext

    @staticmethod
    def _probe(
        program: Callable[[Any, Tap], tuple[dict[str, Any], Any]], arguments: Any, keep: Keep
    ) -> tuple[Any, Any, Any]:
        """Shapes of the taps or the variables tapped, and for each target the taps that lead to it.

        Traces a graph and never runs it.
        """
        shapes: dict[str, Any] = {}
        variables: dict[str, Any] = {}
        paths: dict[str, set[str]] = {}

        def trace(arguments: Any) -> None:
            points: dict[str, Any] = {}

            def tap(key: str, tensor: Any) -> Any:
                points[key], value = _point(tensor, keep)
                tape.watch(points[key])
                if isinstance(tensor, tf.Variable):
                    variables[key] = tensor
                else:
                    shapes[key] = (tuple(tensor.shape), tensor.dtype)
                return value

            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                targets, _ = program(arguments, tap)
            for name, target in targets.items():
                found = tape.gradient(target, points) if target.dtype.is_floating else {}
                paths[name] = {key for key, g in found.items() if g is not None}

        _graph(trace, (arguments,))
        return shapes, variables, paths

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        """Pull cotangents back; see :class:`rnnlens.autodiff.LinearisedProgram`."""
        linked = set().union(*(self._paths[name] for name in cotangents))
        sources = {key: z for key, z in self._sources.items() if key in linked}
        count = len(next(iter(cotangents.values())))
        rows = []
        for k in range(count):
            given = {n: tf.convert_to_tensor(c[k], dtype=self.targets[n].dtype) for n, c in cotangents.items()}
            try:
                found = _gradients(self._tape, self.targets, sources, given)
            except tf.errors.NotFoundError:
                # TensorFlow has no gradient of a graph that holds some nested loops (CTC), but one within the graph.
                with self.tracing():
                    found = self._pull_inside(given)
            rows.append({key: tf.convert_to_tensor(found[key]).numpy() for key in sources})
        return {key: np.stack([row[key] for row in rows]) if key in sources else None for key in self._sources}


def _gradients(
    tape: Any, targets: Mapping[str, Any], sources: dict[str, Any], cotangents: Mapping[str, Any]
) -> dict[str, Any]:
    """Pull cotangents of some targets back to ``sources``; zeros where no path leads."""
    found: dict[str, Any] = tape.gradient(
        [targets[name] for name in cotangents],
        sources,
        output_gradients=list(cotangents.values()),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return found


def _point(tensor: Any, keep: Keep) -> tuple[Any, Any]:
    """Return (the tensor that a tape watches, the tensor to go on with); a variable is watched itself."""
    if isinstance(tensor, tf.Variable):
        return tensor, tf.convert_to_tensor(tensor)
    new = keep(tensor, tf.identity(tensor))
    return new, new


def _traced_quietly(function: Callable[..., Any]) -> Any:
    """A ``tf.function`` that does not tell the user how often it is traced: once per cell and call, as it has to be."""
    traced = tf.function(function, autograph=False, reduce_retracing=True)
    traced._omit_frequent_tracing_warning = True
    return traced


class _TensorFlowSteps:
    """A step function and its derivatives, each compiled once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.step = _traced_quietly(function)
        self._pull = _traced_quietly(self._vjp)
        self._rows = _traced_quietly(self._jacobian)
        self._produced = _traced_quietly(self._produced_by)
        self._function = function

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents back; see :class:`rnnlens.autodiff.protocol.PerStep`."""
        return self._pull(inputs, cotangents)

    def produced(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents back to each new state where it is computed."""
        return self._produced(inputs, cotangents)

    def _produced_by(self, inputs: Any, cotangents: Any) -> Any:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            output, new = self._function(*inputs)
        targets, given, found = [output, *new], [cotangents[0], *cotangents[1]], []
        for state in new:
            if any(state is t for t in (inputs[0], *inputs[1])):  # passed on, not produced
                found.append(tf.add_n([c for target, c in zip(targets, given, strict=True) if target is state]))
            else:
                zero = tf.UnconnectedGradients.ZERO
                found.append(tape.gradient(targets, state, given, unconnected_gradients=zero))
        return [tf.convert_to_tensor(g) for g in found]

    def jacobian(self, inputs: Any) -> Any:
        """Return rows of [new states, output] by states and by input."""
        return self._rows(inputs)

    def _vjp(self, inputs: Any, cotangents: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            outputs = self._function(*inputs)
        found = tape.gradient(outputs, inputs, cotangents, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.nest.map_structure(tf.convert_to_tensor, found)

    def _jacobian(self, inputs: Any) -> Any:
        x, states, weights = inputs
        sizes = [s.shape[-1] for s in states]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            joined = tf.concat(states, axis=-1)
            tape.watch(x)
            tape.watch(joined)
            output, new = self._function(x, tf.split(joined, sizes, axis=-1), weights)
            stacked = tf.concat([*new, output], axis=-1)
        zero = tf.UnconnectedGradients.ZERO
        return (
            tape.batch_jacobian(stacked, joined, unconnected_gradients=zero),
            tape.batch_jacobian(stacked, x, unconnected_gradients=zero),
        )
