"""Recording during ``fit``: the batch of each execution of the compiled step, and the weights before it.

``fit`` calls ``model.train_function`` with an iterator (TensorFlow, JAX) or a batch (torch). For a recorded execution,
the iterator is replaced by one that yields the same elements and records them; the compiled step stays the user's.
Everything the step changes is copied before: weights, statistics, states, seeds of dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ...autodiff import Engine
from ...errors import UnsupportedError
from .dialect import dialect_of
from .model_facts import optimizers
from .reference_run import names_of
from .step_gradients import DirectGradients


@dataclass
class StateBeforeStep:
    """State before a training step: variables (seeds of dropout among them) and torch's random generators.

    Keras on torch draws dropout from torch's own generator if the layer has no seed.
    """

    engine: Engine
    variables: list[tuple[Any, Any]]
    torch_state: Any = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set variables and generators to the state before the step within the block.

        Restore the present state on exit.
        """
        present_values = [(variable, copy_of(variable)) for variable, _ in self.variables]
        with self.engine.random_state_restored():
            try:
                self.restore()
                yield
            finally:
                for variable, value in present_values:
                    variable.assign(value)

    def restore(self) -> None:
        """Assign to the model's variables and to torch's random generators what they were before the training step."""
        for variable, value in self.variables:
            variable.assign(value)
        if self.torch_state is not None:
            import torch

            torch.set_rng_state(self.torch_state[0])
            if self.torch_state[1]:
                torch.cuda.set_rng_state_all(self.torch_state[1])


@dataclass
class RecordedStep:
    """Record of one execution: its first batch, and the state before it."""

    x: Any
    y: Any
    sample_weight: Any
    state_before: StateBeforeStep
    batches: int = 1
    direct_gradients: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss: float | None = None


class TrainStep:
    """Wrapper of ``model.train_function`` during one ``fit``, which records the batch when ``records_next`` is True.

    Set ``records_next`` to True before an execution to record it; the execution resets it. ``recorded`` is the record
    of the last recorded execution until :meth:`take_record` returns it.
    """

    def __init__(self, model: Any, direct: Sequence[str] = ()) -> None:
        self._model, self._original = model, model.train_function
        self._direct = DirectGradients(model, direct, batches_per_execution(model)) if direct else None
        self._keras = dialect_of(model)
        self.records_next = False
        self.recorded: RecordedStep | None = None
        self.failure: Exception | None = None
        self._batches: list[Any] = []
        self._dataset: Any = None  # a data set over ``_batches``, kept because creating one is slow
        model.train_function = self

    def __call__(self, *arguments: Any) -> Any:
        """Run one execution of one or several training steps, and record it if ``records_next`` is set."""
        if not self.records_next:
            return self._original(*arguments)
        self.records_next = False
        batches: list[Any] = []
        weight_count = len(self._model.weights)
        try:
            state_before = self._copy_state(arguments)
            source = self._tee(arguments[-1], batches)
        except Exception as error:  # training goes on without this record
            self.failure = error
            return self._original(*arguments)
        result = self._step(arguments, source, state_before)
        if batches and len(self._model.weights) == weight_count:  # else the state before the step is unknown
            element = batches[0] if isinstance(batches[0], tuple | list) else (batches[0],)
            x, y, weight = (*element, None, None)[:3]
            self.recorded = RecordedStep(x, y, weight, state_before, len(batches))
            if self._direct is not None and self._direct.gradients is not None:
                self.recorded.direct_gradients, self.recorded.loss = self._direct.gradients, self._direct.loss
        return result

    def _step(self, arguments: Sequence[Any], source: Any, state_before: StateBeforeStep) -> Any:
        """Run the training step with taps for direct gradients; if that is impossible or fails, run it without taps."""
        if self._direct is None or not self._direct.available:
            return self._original(*arguments[:-1], source)
        try:
            result = self._direct.run(self._original, source)
        except Exception as error:
            self._direct = None
            state_before.restore()
            source = source if self._dataset is None else iter(self._dataset)
            result = self._original(*arguments[:-1], source)  # raises what the user's own step raises
            self.failure = error
            return result
        try:
            self._direct.read()
        except Exception as error:
            self._direct, self.failure = None, error
        return result

    def take_record(self) -> tuple[RecordedStep | None, Exception | None]:
        """Return the record of the last execution, or the error that prevented it, and delete both from this object."""
        record_and_failure = self.recorded, self.failure
        self.recorded = self.failure = None
        return record_and_failure

    def remove(self) -> None:
        """Restore the model's own ``train_function``."""
        if self._model.train_function is self:
            self._model.train_function = self._original

    def _copy_state(self, arguments: Sequence[Any]) -> StateBeforeStep:
        """Copy the values of the model's variables before a training step.

        On JAX the values are in the state passed to the step, which donates it.
        """
        engine = self._keras.engine
        if len(arguments) == 1:
            copies = [(variable, copy_of(variable)) for variable in self._keras.variables(self._model)]
            return StateBeforeStep(engine, copies, _torch_state() if engine.name == "torch" else None)
        updated_variables = [*self._model.trainable_variables, *self._model.non_trainable_variables]
        values = [*arguments[0][0], *arguments[0][1]]
        return StateBeforeStep(engine, [(v, value.copy()) for v, value in zip(updated_variables, values, strict=True)])

    def _tee(self, source: Any, batches: list[Any]) -> Any:
        """Return an iterator with the batches of ``source`` that also appends those of one execution to ``batches``."""

        def recorded_batches() -> Iterator[Any]:
            for element in source:
                batches.append(element)
                yield element

        engine = self._keras.engine.name
        if engine == "torch":
            batches.append(source[0])
            return source
        return recorded_batches() if engine == "jax" else self._tee_tensorflow(source, batches)

    def _tee_tensorflow(self, source: Any, batches: list[Any]) -> Any:
        """Read the batches of one execution from a TensorFlow iterator into ``batches``; return an iterator over these.

        It has the same ``element_spec``, so that the compiled training step is not traced again.
        """
        import tensorflow as tf

        if not isinstance(source, tf.data.Iterator):
            raise _strategy_error(type(source).__name__)
        self._batches = batches
        if self._dataset is None or self._dataset.element_spec != source.element_spec:
            self._dataset = tf.data.Dataset.from_generator(
                lambda: iter(self._batches), output_signature=source.element_spec
            )
        dataset_iterator = iter(self._dataset)
        batches.extend(islice(source, batches_per_execution(self._model)))  # last: what is taken is handed on
        return dataset_iterator


def record_fit(model: Any, direct: Sequence[str] = ()) -> TrainStep:
    """Start recording the ``fit`` that has begun; :meth:`TrainStep.remove` ends it.

    ``direct`` names the layers whose direct gradients are recorded in the step itself, if that is possible.
    UnsupportedError is raised for a training loop of the user, a ``tf.distribute`` strategy, and random numbers that
    cannot be reproduced.
    """
    if getattr(model, "train_function", None) is None:
        raise UnsupportedError(
            "This model does not train through Keras' own fit, so its batches cannot be recorded.",
            got=type(model).__name__,
            hint="probe= instead of batches=, or rl.trace within your loop",
        )
    strategy = getattr(model, "_distribute_strategy", None) or getattr(model, "_distribution_strategy", None)
    if strategy is not None:
        raise _strategy_error(type(strategy).__name__)
    _refuse_random(model)
    if isinstance(model.train_function, TrainStep):
        model.train_function.remove()  # left by a training that was interrupted
    return TrainStep(model, direct)


def _strategy_error(got: str) -> UnsupportedError:
    """Create the error for training under a ``tf.distribute`` strategy, which splits each batch over replicas."""
    problem = "Batches cannot be followed under a tf.distribute strategy."
    return UnsupportedError(problem, got=got, hint="probe= instead of batches=")


def _refuse_random(model: Any) -> None:
    """Raise UnsupportedError if the step draws random numbers that the same step, run again eagerly, does not draw.

    tf_keras cannot repeat them. XLA on TensorFlow and torch's compiler have their own generators; JAX draws the same
    numbers either way.
    """
    keras, random = dialect_of(model), _random_layer(model)
    if random is None:
        return
    if keras.name == "tf_keras":
        raise UnsupportedError(
            f"Layer {random!r} draws random numbers in training, which tf_keras cannot repeat.",
            expected="a model of tf_keras without dropout, or of Keras 3",
            hint="probe= instead of batches=",
        )
    if bool(getattr(model, "jit_compile", False)) and keras.engine.name != "jax":
        raise UnsupportedError(
            f"Layer {random!r} draws random numbers in a compiled training step, which cannot be repeated outside of "
            "it.",
            got=f"jit_compile=True on {keras.engine.name}",
            expected="jit_compile=False, or a model without dropout",
            hint="probe= instead of batches=",
        )


def batches_per_execution(model: Any) -> int:
    """Return the number of batches in one call of the compiled step: ``steps_per_execution``."""
    steps = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return 1 if steps is None else int(np.asarray(steps))


def synchronise_variables(model: Any) -> None:
    """Copy the variables of a model that trains on JAX from the state of ``fit`` back into the model."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def optimizer_steps(model: Any) -> int:
    """Return the number of batches that the optimizer has received so far."""
    _, optimizer = optimizers(model)
    # The public attribute of Keras 3 is divided by the number of accumulated batches.
    iterations = getattr(optimizer, "_iterations", None)
    iterations = getattr(optimizer, "iterations", None) if iterations is None else iterations
    return 0 if iterations is None else int(dialect_of(model).value_of(iterations))


def weights_of(model: Any) -> dict[str, Any]:
    """Return copies of all weights by unique name, in the order of ``set_weights``."""
    keras, names = dialect_of(model), names_of(model)
    return {names[id(variable)]: keras.value_of(variable) for variable in keras.weights(model)}


def trained_weights_of(model: Any) -> dict[str, Any]:
    """Return copies of the trained weights by unique name, half precision widened to float32."""
    keras, names = dialect_of(model), names_of(model)
    values = {names[id(variable)]: np.array(keras.value_of(variable)) for variable in model.trainable_variables}
    return {name: value if value.dtype == np.float64 else value.astype(np.float32) for name, value in values.items()}


def updates_at_each_batch(model: Any) -> bool:
    """Return whether the weights change once per call of the training step: no accumulation, one batch per call."""
    _, optimizer = optimizers(model)
    return not getattr(optimizer, "gradient_accumulation_steps", None) and batches_per_execution(model) == 1


def largest_weight(model: Any) -> float:
    """Return the largest magnitude among the trained weights; NaN or infinite if one is not finite."""
    keras = dialect_of(model)
    values = (np.asarray(keras.value_of(variable), dtype=np.float64) for variable in model.trainable_variables)
    return float(np.max([np.max(np.abs(value), initial=0.0) for value in values], initial=0.0))


def notes_of_training(model: Any, recorded: RecordedStep) -> list[str]:
    """Return notes on how the gradients of a recorded batch differ from those that the optimizer used."""
    optimizer, inner_optimizer = optimizers(model)
    notes = []
    accumulation_steps = getattr(inner_optimizer, "gradient_accumulation_steps", None)
    if accumulation_steps:
        notes.append(
            f"Gradients are those of this batch alone; the optimizer applies the mean of {accumulation_steps} batches."
        )
    if inner_optimizer is not optimizer:
        notes.append("Gradients are those of the loss, without the loss scale used in training.")
    if recorded.batches > 1:
        notes.append(
            f"The first of {recorded.batches} batches of one compiled execution: Keras does not expose the weights "
            "between the others."
        )
    return notes


def process_index_and_count(model: Any) -> tuple[int, int]:
    """Return (number of this process, number of processes) of a distributed training; (0, 1) for a single process."""
    engine = dialect_of(model).engine.name
    if engine == "jax":
        import jax

        return jax.process_index(), jax.process_count()
    if engine == "torch":
        import torch.distributed as group

        is_running = group.is_available() and group.is_initialized()
        return (group.get_rank(), group.get_world_size()) if is_running else (0, 1)
    import tensorflow as tf

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    workers = cluster.cluster_spec().as_dict().get("worker", ())
    return (int(cluster.task_id or 0), len(workers)) if len(workers) > 1 else (0, 1)


def copy_of(variable: Any) -> Any:
    """Return the value of a variable in memory of its own; TensorFlow's copies of tensors share memory."""
    value = getattr(variable, "value", variable)
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "sharding") else np.array(variable)


def _torch_state() -> tuple[Any, list[Any]]:
    import torch

    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _random_layer(model: Any) -> str | None:
    """Return the name of a layer that draws random numbers in training; None if there is none."""
    keras = dialect_of(model)
    for layer in model._flatten_layers():
        names = [name for name in ("rate", "dropout", "recurrent_dropout", "stddev") if hasattr(layer, name)]
        if any((getattr(layer, name) or 0) > 0 for name in names) or (keras.draws_random_numbers(layer) and not names):
            return str(layer.name)
    return None
