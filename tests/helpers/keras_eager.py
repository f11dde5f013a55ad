"""Run Keras models uncompiled, which is faster for a single run on little data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rnnlens.adapters.keras import run


@contextmanager
def eager_captures() -> Iterator[None]:
    """Run every capture within the block uncompiled, as the first capture of a model is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "memo_for", lambda *_: None)
        yield


@contextmanager
def variables_unchanged() -> Iterator[None]:
    """Restore on exit the values of TensorFlow variables that are assigned within the block."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    originals = {}

    def remembering(assign):
        def wrapper(variable, *args, **kwargs):
            originals.setdefault(id(variable), (variable, variable.read_value()))
            return assign(variable, *args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("assign", "assign_add", "assign_sub"):
            patch.setattr(ResourceVariable, name, remembering(getattr(ResourceVariable, name)))
        yield
    for variable, value in originals.values():
        variable.assign(value)


@contextmanager
def op_by_op() -> Iterator[None]:
    """Execute functions that TensorFlow would trace into graphs eagerly within the block.

    Tracing a graph for each model of each test, to run it once or twice, would take most of the tests' time.
    """
    import tensorflow as tf

    from rnnlens.autodiff import tensorflow as engine

    def tensors(arguments):
        return tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), arguments)

    def graph(function, arguments):
        with variables_unchanged():  # tracing assigns nothing
            function(*tensors(arguments))  # tracing would convert them, too
        return lambda *args: function(*tensors(args))

    def compiled(_, function, arguments, memo):
        pending = [function(*tensors(arguments))]

        def run(*args):
            rerun = not pending or any(arg is not first_arg for arg, first_arg in zip(args, arguments, strict=True))
            return function(*tensors(args)) if rerun else pending.pop()

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_graph_function", graph)
        patch.setattr(engine.TensorFlowEngine, "compile", compiled)
        yield
