"""The TensorFlow engine: each tap is a reshape to the same shape, whose output a gradient tape watches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops

from ..typing import Array
from .interface import Engine, Keep, Memo, Program, Tap, TargetProgram

#: Float types, the coarsest first.
_FLOATS = (tf.bfloat16, tf.float16, tf.float32, tf.float64)
_ZERO = tf.UnconnectedGradients.ZERO
#: Under a persistent tape, TensorFlow differentiates some nested loops (CTC) only inside the graph, not a compiled
#: graph. The first attempt raises one of the errors, all later ones the other.
_ONLY_IN_A_GRAPH = (tf.errors.NotFoundError, tf.errors.InternalError)


class TensorFlowEngine(Engine):
    """Differentiation, compilation and arrays of TensorFlow; see :class:`rnnlens.autodiff.Engine`."""

    name = "tensorflow"

    def to_array(self, tensor: Any) -> Array:
        """Convert a tensor to NumPy, sharing its buffer; bfloat16 and float16 become float32."""
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype in (tf.bfloat16, tf.float16):
            tensor = tf.cast(tensor, tf.float32)
        # np.asarray shares the buffer, which has no other user after the run; .numpy() would copy it.
        return np.asarray(tensor)

    def gradients(
        self, program: Program, cotangents: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        tape, tapped, (targets, aux) = _run_under_tape(program, self._keep)
        if cotangents is None:
            gradients = tape.gradient(targets, tapped, unconnected_gradients=_ZERO)
        else:
            gradients = _gradients(tape, targets, tapped, cotangents)
        return targets, aux, {key: tf.convert_to_tensor(g) for key, g in gradients.items()}

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Trace ``function`` into a graph for arguments of these structures, shapes and dtypes."""
        del memo  # the cost is in the tracing, which has to be repeated in any case
        return _graph_function(function, arguments)

    def coarsest_dtype(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> str:
        """Trace a function into a graph for these arguments; return the coarsest float dtype of its operations."""
        graphs = [_concrete_function(function, arguments).graph]
        graphs += [inner.graph for inner in graphs[0]._functions.values() if hasattr(inner, "graph")]
        dtypes = {
            t.dtype for graph in graphs for op in graph.get_operations() for t in op.outputs if t.dtype.is_floating
        }
        return next((dtype.name for dtype in _FLOATS if dtype in dtypes), "")

    owner_of_stop_gradient = tf

    @contextmanager
    def step_by_step(self) -> Iterator[None]:
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(eagerly)

    def inlined(self, function: Any) -> Callable[..., Any]:
        """Return the Python function behind a ``tf.function``, its loops over tensors converted as they are in it."""
        enabled = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
        converted: Callable[..., Any] = api.tf_convert(function.python_function, enabled)
        return converted

    @contextmanager
    def random_state_restored(self, seed: int | None = None) -> Iterator[None]:
        """Restore TensorFlow's global random generators on exit; within the block, operations draw other seeds.

        An operation run op by op with the seed of one of the user's would advance the kernel that both share.
        """
        seeds_of_operations = getattr(context.context(), "_rng", None)  # exists once a seed was set
        seeds_state = None if seeds_of_operations is None else seeds_of_operations.getstate()
        generator = stateful_random_ops.global_generator
        value = None if generator is None else generator.state.read_value()
        if seeds_of_operations is not None:
            seeds_of_operations.seed(f"rnnlens {seed}")
        try:
            yield
        finally:
            if seeds_of_operations is not None:
                seeds_of_operations.setstate(seeds_state)
            stateful_random_ops.global_generator = generator
            if generator is not None:
                generator.state.assign(value)

    @property
    def on_accelerator(self) -> bool:
        return bool(tf.config.list_logical_devices("GPU"))

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        was_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(was_enabled)

    def context(self) -> Hashable:
        """Return the identity of the graph that records operations now; it differs inside ``tf.while_loop``."""
        return id(tf.compat.v1.get_default_graph())

    def linearise(self, program: TargetProgram, arguments: Any, memo: Memo | None) -> Any:
        if memo is None:
            return _EagerTensorFlowProgram(program, arguments, self._keep)
        return _TensorFlowProgram(program, arguments, memo, self._keep)

    def per_step(self, function: Callable[..., Any]) -> _TensorFlowSteps:
        return _TensorFlowSteps(function)


def _graph_function(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Trace ``function`` once into a graph for arguments of these shapes and dtypes; return it as a function."""
    concrete_function = _concrete_function(function, arguments)
    return lambda *inputs: concrete_function(_tensor_leaves(inputs))


def _concrete_function(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Trace ``function`` into a concrete function of the tensors in ``arguments``."""
    absent_leaves = tf.nest.map_structure(lambda leaf: leaf is None, arguments)

    def flat_function(leaves: list[Any]) -> Any:
        return function(*_rebuild_structure(absent_leaves, leaves))

    # No autograph: Keras layers do not need it, and it changes the text of user exceptions. A concrete function avoids
    # TensorFlow's warning about frequent retracing.
    return tf.function(flat_function, autograph=False).get_concrete_function(_tensor_leaves(arguments))


def _tensor_leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(tree) if leaf is not None]


def _rebuild_structure(absent_leaves: Any, leaves: list[Any]) -> Any:
    """Rebuild a nested structure from its tensors, as :func:`_tensor_leaves` orders them; None at ``absent_leaves``."""
    remaining_leaves = iter(leaves)
    return tf.nest.map_structure(lambda is_absent: None if is_absent else next(remaining_leaves), absent_leaves)


class _TensorFlowProgram:
    """A compiled forward pass under a persistent tape; its sources are zeros that the taps add to tensors.

    The forward pass runs once; each pull-back runs the compiled backward pass.
    """

    def __init__(self, program: TargetProgram, arguments: Any, memo: Memo, keep: Keep) -> None:
        run = _with_zeros(program, keep)
        shapes, variables, self._connected_keys = memo.once("probe", lambda: self._probe(program, arguments, keep))
        zeros = _zeros(shapes)
        compiled = memo.once("run", lambda: _graph_function(run, (arguments, zeros)))
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([*zeros.values(), *variables.values()])
            self.targets, self.aux = compiled(arguments, zeros)
        self._tape, self._sources = tape, {**zeros, **variables}

        self._pull_in_graph: Callable[[Any], Any] = lambda cotangents: _pull_in_graph(
            run, arguments, zeros, variables, cotangents
        )
        #: Returns the context manager in which the program may be traced again; set by the adapter.
        self.tracing: Callable[[], AbstractContextManager[None]] = nullcontext

    @staticmethod
    def _probe(program: TargetProgram, arguments: Any, keep: Keep) -> tuple[Any, Any, Any]:
        """Trace a program.

        Return shapes of tapped tensors, tapped variables, and for each target the taps it depends on.
        """
        probed: list[tuple[Any, Any, Any]] = []

        def trace(arguments: Any) -> None:
            tape, tapped, (targets, _) = _run_under_tape(lambda tap: program(arguments, tap), keep, persistent=True)
            variables = {key: p for key, p in tapped.items() if isinstance(p, tf.Variable)}
            shapes = {key: (tuple(p.shape), p.dtype) for key, p in tapped.items() if key not in variables}
            probed.append((shapes, variables, _connected_keys(tape, targets, tapped)))

        _graph_function(trace, (arguments,))
        return probed[-1]

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        connected_keys = set().union(*(self._connected_keys[name] for name in cotangents))
        sources = {key: z for key, z in self._sources.items() if key in connected_keys}
        count = len(next(iter(cotangents.values())))
        rows = []
        for k in range(count):
            row_cotangents = {n: tf.convert_to_tensor(c[k], dtype=self.targets[n].dtype) for n, c in cotangents.items()}
            try:
                gradients = _gradients(self._tape, self.targets, sources, row_cotangents)
            except _ONLY_IN_A_GRAPH:
                with self.tracing():
                    gradients = self._pull_in_graph(row_cotangents)
            rows.append({key: tf.convert_to_tensor(gradients[key]).numpy() for key in sources})
        return {key: np.stack([row[key] for row in rows]) if key in sources else None for key in self._sources}


class _EagerTensorFlowProgram(_TensorFlowProgram):
    """A forward pass executed op by op under a persistent tape: quicker than a graph that is used once."""

    def __init__(self, program: TargetProgram, arguments: Any, keep: Keep) -> None:
        self._tape, self._sources, (self.targets, self.aux) = _run_under_tape(
            lambda tap: program(arguments, tap), keep, persistent=True
        )
        try:
            self._connected_keys = _connected_keys(self._tape, self.targets, self._sources)
        except _ONLY_IN_A_GRAPH:  # the probe runs nothing: what the run above changed is not changed again
            self._connected_keys = self._probe(program, arguments, keep)[2]

        def pull(cotangents: Any) -> Any:
            shapes, variables, _ = self._probe(program, arguments, keep)
            return _pull_in_graph(_with_zeros(program, keep), arguments, _zeros(shapes), variables, cotangents)

        self._pull_in_graph = pull
        self.tracing = nullcontext


def _zeros(shapes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tf.zeros(shape, dtype) for key, (shape, dtype) in shapes.items()}


def _with_zeros(program: TargetProgram, keep: Keep) -> Callable[[Any, dict[str, Any]], Any]:
    """Return the program as a function of its arguments and of the zeros that its taps add to tensors."""

    def run(arguments: Any, zeros: dict[str, Any]) -> Any:
        def tap(key: str, tensor: Any) -> Any:
            if key not in zeros:
                return _tap_tensors(tensor, keep)[1]
            return keep(tensor, _with_own_gradient(tensor) + zeros[key])

        return program(arguments, tap)

    return run


def _pull_in_graph(
    run: Callable[[Any, dict[str, Any]], Any],
    arguments: Any,
    zeros: dict[str, Any],
    variables: dict[str, Any],
    cotangents: dict[str, Any],
) -> dict[str, Any]:
    """Run a program forward and back in one graph; return the gradients of its zeros and variables."""

    def pull_back(zeros: dict[str, Any], cotangents: dict[str, Any]) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*zeros.values(), *variables.values()])
            targets, _ = run(arguments, zeros)
        return _gradients(tape, targets, {**zeros, **variables}, cotangents)

    gradients: dict[str, Any] = _graph_function(pull_back, (zeros, cotangents))(zeros, cotangents)
    return gradients


def _run_under_tape(
    program: Callable[[Tap], Any], keep: Keep, *, persistent: bool = False
) -> tuple[Any, dict[str, Any], tuple[Any, Any]]:
    """Run a program under a gradient tape; return the tape, the tensor that it watches per tap key, and the result."""
    tapped: dict[str, Any] = {}

    def tap(key: str, tensor: Any) -> Any:
        tapped[key], value = _tap_tensors(tensor, keep)
        tape.watch(tapped[key])
        return value

    with tf.GradientTape(persistent=persistent, watch_accessed_variables=False) as tape:
        result = program(tap)
    return tape, tapped, result


def _connected_keys(tape: Any, targets: Mapping[str, Any], tapped: dict[str, Any]) -> dict[str, set[str]]:
    """Return per target the keys of the tensors in ``tapped`` that it depends on."""
    target_gradients = {name: tape.gradient(t, tapped) if t.dtype.is_floating else {} for name, t in targets.items()}
    return {
        name: {key for key, g in gradients.items() if g is not None} for name, gradients in target_gradients.items()
    }


def _gradients(
    tape: Any, targets: Mapping[str, Any], sources: dict[str, Any], cotangents: Mapping[str, Any]
) -> dict[str, Any]:
    """Pull cotangents of some targets back to ``sources``; zeros where no path leads."""
    gradients: dict[str, Any] = tape.gradient(
        [targets[name] for name in cotangents],
        sources,
        output_gradients=list(cotangents.values()),
        unconnected_gradients=_ZERO,
    )
    return gradients


def _tap_tensors(tensor: Any, keep: Keep) -> tuple[Any, Any]:
    """Return a tensor for a tape to watch (a variable itself), and the tensor with which the program continues."""
    if isinstance(tensor, tf.Variable):
        return tensor, tf.convert_to_tensor(tensor)
    replacement = keep(tensor, _with_own_gradient(tensor))
    return replacement, replacement


def _with_own_gradient(tensor: Any) -> Any:
    """Return a tensor of the same values, whose gradient is not the same Python object as that of ``tensor``.

    A gradient tape never frees a gradient that two of its sources share, as a tensor and its ``tf.identity`` do; if the
    tape traces a graph, the whole graph stays in memory. The gradient of a reshape is a new object.
    """
    return tf.reshape(tensor, tf.shape(tensor))


def _quiet_function(function: Callable[..., Any]) -> Any:
    """Return a ``tf.function`` without TensorFlow's warning about frequent retracing."""
    traced = tf.function(function, autograph=False, reduce_retracing=True)
    traced._omit_frequent_tracing_warning = True
    return traced


class _TensorFlowSteps:
    """A cell's step function and its derivatives, each compiled once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.step = _quiet_function(function)
        self.vjp = _quiet_function(self._vjp)
        self.produced = _quiet_function(self._produced_by)
        self.jacobian = _quiet_function(self._jacobian)

    def _produced_by(self, inputs: Any, cotangents: Any) -> Any:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            output, new_states = self._function(*inputs)
        targets, all_cotangents, gradients = [output, *new_states], [cotangents[0], *cotangents[1]], []
        for state in new_states:
            if any(state is t for t in (inputs[0], *inputs[1])):  # passed on, not produced
                gradients.append(
                    tf.add_n([c for target, c in zip(targets, all_cotangents, strict=True) if target is state])
                )
            else:
                gradients.append(tape.gradient(targets, state, all_cotangents, unconnected_gradients=_ZERO))
        return [tf.convert_to_tensor(g) for g in gradients]

    def _vjp(self, inputs: Any, cotangents: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            outputs = self._function(*inputs)
        gradients = tape.gradient(outputs, inputs, cotangents, unconnected_gradients=_ZERO)
        return tf.nest.map_structure(tf.convert_to_tensor, gradients)

    def _jacobian(self, inputs: Any) -> Any:
        x, states, weights = inputs
        sizes = [s.shape[-1] for s in states]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            joined_states = tf.concat(states, axis=-1)
            tape.watch(x)
            tape.watch(joined_states)
            output, new_states = self._function(x, tf.split(joined_states, sizes, axis=-1), weights)
            stacked_results = tf.concat([*new_states, output], axis=-1)
        return tuple(
            tape.batch_jacobian(stacked_results, source, unconnected_gradients=_ZERO) for source in (joined_states, x)
        )
