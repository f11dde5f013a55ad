"""One model on one set of samples: predictions at one output step, also for changed inputs, and captured states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Capture, LayerInfo, Port, RecurrentCall, ReferenceRun, Taps
from ..adapters.registry import adapter_for
from ..errors import InputError, ModelError, RnnlensError, short_repr
from ..layout import Layout
from ..measures.intervention import DistributionDifference, SquaredDifference, donors, score
from ..recurrence.replay import Replay
from ..results.schema import to_host
from ..typing import Array
from ..verbs.axes import refuse_steps_first
from ..verbs.names import Catalogue, known_model
from ..vocabulary import POSITION
from .prediction import OutputForm, PredictionTarget, ignored_class, read_form, read_target, takes_logits
from .samples import Samples

#: Largest number of samples whose states are captured.
MOST_CAPTURED = 32


@dataclass
class Experiment:
    """Model, samples, and the output step that is examined."""

    model: Any
    samples: Samples
    step: int = -1
    output: int | str = 0
    task: str | None = None
    loss: Any = None
    seed: int = 0
    optimizer: Any = None
    adapter: Adapter = field(init=False)
    _is_padding_after: dict[int, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.adapter = adapter_for(self.model)

    def axes_of(self, output: str) -> dict[str, Any]:
        """Return the axes of inputs and of the examined output for ``rl.gradients``, which finds those left out."""
        orientation = self.samples.orientation
        declared = {name: layout.axes for name, layout in orientation.declared.items()}
        if orientation.inputs is not None:
            # With an output declared, samples are counted on the inputs.
            return {**self._axes_of_inputs(), **declared} if declared else declared
        if output in declared:
            return declared
        # Samples come first in the inputs, and the axes of the output are known.
        return {**declared, output: self.layout.axes}

    def _axes_of_inputs(self) -> dict[str, Any]:
        """Return the axes of the inputs by their names in ``axes=``, of those that were not declared."""
        orientation, names = self.samples.orientation, Catalogue(self.adapter, self.model, self.samples.x).inputs
        layouts = enumerate(orientation.inputs or [])
        return {
            (f"input[{names[i] if names else i}]" if len(orientation.inputs or []) > 1 else "input"): layout.axes
            for i, layout in layouts
            if layout.axes and Port("input", index=i) not in orientation.axes.stated
        }

    @cached_property
    def layout(self) -> Layout:
        """Axes of the examined output."""
        output = to_host(self._leaf(self.capture.outputs))
        _ = self.examined_output
        return self.samples.orientation.output_layout(output, self.output_index)

    def in_model_order(self, x: Any) -> Any:
        """Convert data with samples first to the model's own order of axes."""
        return self.samples.orientation.as_given(x)

    @cached_property
    def first_inputs(self) -> Any:
        """First samples of the data, at most ``MOST_CAPTURED``, in the model's own order of axes."""
        return self.in_model_order(data.select(self.samples.x, slice(MOST_CAPTURED)))

    @property
    def first_batch(self) -> Batch:
        """First samples with the seed of the diagnosis: its runs on them draw the same random numbers."""
        return Batch(self.first_inputs, seed=self.seed)

    @cached_property
    def capture(self) -> Capture:
        """Capture of the forward pass on the first samples, with the states of all recurrent layers."""
        capture = self.adapter.run(self.model, self.first_batch, Taps.states(sequences=False)).capture
        if not capture.calls and not capture.scanned:
            raise ModelError("No recurrent layer ran in this forward pass.", hint="rl.layers(model)")
        sizes = (call.input.shape[:2] for call in capture.calls)
        refuse_steps_first(self.samples.orientation.axes, Batch(self.first_inputs), sizes)
        return capture

    def capture_of(self, rows: Array, seed: int | None = None) -> Capture:
        """Capture the forward pass on the first samples in another order, or on some of them, or with another seed."""
        batch = Batch(self.in_model_order(data.map_leaves(lambda leaf: leaf[rows], self.samples.x)), seed=seed)
        return self.adapter.run(self.model, batch, Taps.states(sequences=False)).capture

    @property
    def takes_logits(self) -> bool | None:
        """Whether the loss takes logits; False for probabilities, None if its name and settings leave it open."""
        return takes_logits(self.loss)

    @cached_property
    def scans(self) -> dict[str, LayerInfo]:
        """Whole-sequence layers (Mamba, delta rules) that ran, by name."""
        known_layers = known_model(self.adapter, self.model).sequences
        return {name: known_layers[name] for name in self.capture.scanned if name in known_layers}

    @cached_property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the embeddings of a model of token ids; empty for a model of floats."""
        if data.leaves_of(self.samples.x)[self.samples.sequences[0]].dtype.kind == "f":
            return ()
        return Catalogue(self.adapter, self.model).facts.having("embedding")

    def embed(self, x: Any) -> Array | None:
        """Return embedded token ids (sample, time, feature); None if no embedding ran over all steps."""
        taps = Taps.states(self.embeddings, all_must_run=False)
        embedding_calls = (
            self.adapter.run(self.model, Batch(self.in_model_order(x)), taps).capture.other_calls
            if self.embeddings
            else []
        )
        embeddings = (to_host(call.output) for call in embedding_calls)
        return next(
            (embedding for embedding in embeddings if embedding.ndim == 3 and embedding.shape[1] == self.samples.steps),
            None,
        )

    @cached_property
    def replays(self) -> list[tuple[Any, Replay]]:
        """Pairs of a captured call and its replay, of layers that run over steps: not of loops over depth."""
        calls = [call for call in self.capture.calls if call.layer not in self.depth_loops]
        return [(call, Replay.from_call(call_in_numpy(call))) for call in calls]

    @cached_property
    def depth_loops(self) -> list[str]:
        """Names of blocks called on their own output: their states have one vector for each step of the data."""
        calls = self.capture.calls
        return [call.layer for call in calls if POSITION in getattr(call.cell, "state_axes", ())]

    @cached_property
    def lengths(self) -> Array:
        """Number of steps up to each sample's last real one, (sample,). It is the full length without a mask.

        Steps after the last target that the loss does not ignore are padding of the target.
        """
        with_targets = self.samples.lengths_with_targets(ignored_class(self.loss)) if self.step == -1 else None
        return self._unmasked_lengths if with_targets is None else np.minimum(with_targets, self._unmasked_lengths)

    @cached_property
    def _unmasked_lengths(self) -> Array:
        """Number of steps up to the last one that no layer masks, (sample,)."""
        full_lengths = np.full(self.samples.count, self.samples.steps)
        if all(call.mask is None for call in self.capture.calls):
            return full_lengths
        batch = Batch(self.in_model_order(self.samples.x))
        calls = self.adapter.run(self.model, batch, Taps.states()).capture.calls
        mask = next((to_host(call.mask) for call in calls if call.mask is not None), None)
        counts_samples = mask is not None and len(mask) == self.samples.count  # its rows may be parts of samples
        if mask is None or not counts_samples or not self._are_steps_of_the_data(mask.shape[1]):
            return full_lengths
        last_steps = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
        return np.where(mask.any(axis=1), last_steps, 1)

    def _are_steps_of_the_data(self, steps: int) -> bool:
        """Return whether an axis of size ``steps`` counts the data's steps: all of them, or all but final padding."""
        if steps < self.samples.steps and steps not in self._is_padding_after:
            self._is_padding_after[steps] = self._gives_same_output(steps)
        return self._is_padding_after.get(steps, steps == self.samples.steps)

    def _gives_same_output(self, steps: int) -> bool:
        """Return whether the first ``steps`` steps alone give the same output as all steps: the rest is padding."""
        shortened_x = self.samples.map_sequences(
            lambda leaf: leaf[:MOST_CAPTURED, :steps], lambda leaf: leaf[:MOST_CAPTURED]
        )
        full_output = to_host(self._leaf(self.capture.outputs))
        try:
            run = self.adapter.run(self.model, Batch(self.in_model_order(shortened_x)), Taps())
            short_output = to_host(self._leaf(run.returned))
        except RnnlensError:
            return False
        return short_output.shape == full_output.shape and bool(
            np.allclose(short_output, full_output, rtol=1e-3, atol=1e-5)
        )

    def outputs(self, x: Any, initial_state: Any = None) -> Array:
        """Run the model; return the examined output at the examined step, (sample, output)."""
        model_input = self.in_model_order(x)
        run = self.adapter.run(self.model, Batch(model_input, initial_state=initial_state), Taps())
        output = self.samples.orientation.canonical_output(
            to_host(self._leaf(run.returned)), self.output_index, model_input, data.sample_count(x)
        )
        if output.ndim == 1:
            output = output[:, None]
        examined_values = output[np.arange(len(output)), self.examined_indices(output)] if output.ndim >= 3 else output
        return examined_values.reshape(len(examined_values), -1)

    @cached_property
    def output_index(self) -> int:
        """Position of the output examined by the diagnosis among the model's outputs."""
        outputs = self.capture.outputs
        names = list(outputs) if isinstance(outputs, Mapping) else []
        output_count = len(data.leaves_of(outputs))
        if isinstance(self.output, str) and self.output in names and len(names) == output_count:
            return names.index(self.output)
        if isinstance(self.output, str) or not -output_count <= self.output < output_count:
            expected = f"0 to {output_count - 1}" + (f"; {', '.join(map(repr, names))}" if names else "")
            raise InputError("output= exceeds the number of outputs.", got=repr(self.output), expected=expected)
        return self.output % output_count

    @cached_property
    def first_targets(self) -> Any:
        """Targets of the first samples, as the user gives them to the loss."""
        return self.samples.orientation.target_as_given(data.select(self.samples.y, slice(MOST_CAPTURED)))

    @cached_property
    def loss_run(self) -> tuple[ReferenceRun | None, list[Any]]:
        """Run of the untouched model on the first samples, differentiated by the loss; what a loss function returned.

        The run is None without a loss or targets, and where the loss fails: the diagnosis does not need it.
        """
        returned: list[Any] = []
        if self.loss is None or self.samples.y is None:
            return None, returned
        loss = _recorded(self.loss, returned) if inspect.isroutine(self.loss) else self.loss
        batch = Batch(self.first_inputs, self.first_targets, loss=loss, seed=self.seed)
        try:
            return self.adapter.run(self.model, batch, Taps.nothing()).reference(), returned
        except Exception:  # of the user's loss, which may be any function
            return None, returned

    def refuse_loss(self) -> None:
        """Raise InputError if the loss is a function that returns no real number or tensor."""
        for value in self.loss_run[1]:
            dtype_name = str(getattr(value, "dtype", type(value).__name__))
            if value is None or isinstance(value, str | bytes) or "complex" in dtype_name:
                received = f"{getattr(self.loss, '__name__', 'loss')} returned {short_repr(value)}"
                raise InputError("The loss returns no real number.", got=received, expected="a tensor of numbers")

    def _leaf(self, outputs: Any) -> Any:
        return data.leaves_of(outputs)[self.output_index]

    def _target_of_output(self, y: Any) -> Array:
        """Return the target of the examined output: the only one, or the one of the same name or position."""
        outputs, target_leaves = self.capture.outputs, data.leaves_of(y)
        if len(target_leaves) == 1:
            return target_leaves[0]
        if isinstance(outputs, Mapping) and len(outputs) > 1:
            name = list(outputs)[self.output_index]
            if not isinstance(y, Mapping) or name not in y:
                received = (
                    f"targets {', '.join(map(repr, y))}"
                    if isinstance(y, Mapping)
                    else f"{len(target_leaves)} without names"
                )
                hint = f"y={{{', '.join(f'{key!r}: ...' for key in outputs)}}}, or the one of output={name!r} alone"
                raise InputError("The outputs have names, so the targets need the same names.", got=received, hint=hint)
            return data.leaves_of(y[name])[0]
        if len(target_leaves) != len(data.leaves_of(outputs)):
            received = f"{len(target_leaves)} targets for {len(data.leaves_of(outputs))} outputs"
            raise InputError(
                "rnnlens cannot tell which target belongs to the output.", got=received, hint="pass that one"
            )
        return target_leaves[self.output_index]

    @cached_property
    def examined_output(self) -> Array:
        """Examined output on the first samples, (sample, ...)."""
        count = min(MOST_CAPTURED, self.samples.count)
        return self.samples.orientation.canonical_output(
            to_host(self._leaf(self.capture.outputs)), self.output_index, self.first_inputs, count
        )

    def examined_indices(self, output: Array) -> Array:
        """Return each sample's index (sample,) of the examined step, in an output (sample, time, ...)."""
        count, steps = output.shape[:2]
        if self.step == -1 and self._are_steps_of_the_data(steps):
            return self.lengths[:count] - 1
        if not -steps <= self.step < steps:
            raise InputError("step= is beyond the output.", got=self.step, expected=f"{-steps} to {steps - 1}")
        return np.full(count, self.step % steps)

    def final_indices(self, call: RecurrentCall) -> Array | None:
        """Return the step after which each sample's state reaches the output, (sample,); None for the last."""
        counts_data_steps = self._are_steps_of_the_data(call.input.shape[1])
        rows, lengths = call.input.shape[0], self.examined_lengths
        if rows > len(lengths):  # parts of samples, or both halves of a bidirectional layer, are the layer's samples
            if (lengths != lengths[0]).any():
                return None
            lengths = np.full(rows, lengths[0])
        final_indices = lengths[:rows] - 1
        if not counts_data_steps or final_indices.max() >= call.input.shape[1]:
            return None
        return None if call.direction == "backward" and not self.is_sequence else final_indices

    @cached_property
    def raw_output(self) -> Array:
        """Output of the model on all samples, (sample, output)."""
        return self.outputs(self.samples.x)

    @cached_property
    def target(self) -> PredictionTarget | None:
        """Target at the examined step; None without y."""
        if self.samples.y is None:
            return None
        y = self._target_of_output(self.samples.y)
        if self.step == -1 and self.is_sequence and y.ndim >= 2 and y.shape[1] == self.samples.steps:
            y, step = y[np.arange(len(y)), self.lengths - 1], None
        else:
            step = self.step if self.is_sequence and y.ndim >= 2 else None
        return read_target(y, self.raw_output, step, self.task, self.loss)

    @cached_property
    def is_sequence(self) -> bool:
        """Whether the output has a time axis."""
        return len(self.examined_output.shape) >= 3

    @cached_property
    def prediction(self) -> Array:
        """Prediction f on all samples, (sample, output): probabilities for classes, the output itself otherwise."""
        return self.to_prediction(self.raw_output)

    @cached_property
    def form(self) -> OutputForm:
        """Form of the examined output if there is no y."""
        return read_form(self.raw_output, self.task, self.loss)

    @cached_property
    def predicts_distribution(self) -> bool:
        """Whether the output is a distribution whose divergence is measured: without y."""
        return self.target is None and self.form.task != "values"

    def difference(self, prediction: Array) -> SquaredDifference:
        """Return how changes of a prediction are measured: by divergence of distributions without y, else squared."""
        return DistributionDifference(prediction) if self.predicts_distribution else SquaredDifference(prediction)

    @cached_property
    def variation(self) -> SquaredDifference:
        """Differences from the prediction on all samples."""
        return self.difference(self.prediction)

    @cached_property
    def examined_lengths(self) -> Array:
        """Number of input steps up to the examined output step, (sample,).

        It is the full length if output steps are not input steps, as in a forecast, where each output depends on all
        inputs.
        """
        if self.step == -1 or not self.is_sequence:
            return self.lengths
        steps = self.examined_output.shape[1]
        if not self._are_steps_of_the_data(steps):
            return self.lengths
        return np.minimum(self.lengths, self.step % steps + 1)

    @cached_property
    def max_examined_length(self) -> int:
        """Number of input steps up to and including the examined output step, of the sample that has most."""
        return int(self.examined_lengths.max())

    @cached_property
    def lender(self) -> Array:
        """Index of the sample whose older steps replace those of each sample in an exchange, (sample,)."""
        return donors(self.samples.count, lengths=self.examined_lengths, seed=self.seed)

    def predict_exchanged(self, n_steps: int) -> tuple[Array, Array]:
        """Predict with all but the last ``n_steps`` steps of another sample; return as :meth:`predict_changed` does."""
        kept_lengths = np.full(self.samples.count, n_steps)
        return self.predict_changed(
            self.samples.with_prefix_exchanged(kept_lengths, self.lender, self.examined_lengths)
        )

    def predict_changed(self, x: Any) -> tuple[Array, Array]:
        """Predict on changed inputs; return the change and the score of the prediction, (sample,) each."""
        prediction = self.to_prediction(self.outputs(x))
        change = self.variation.change(prediction)
        return change, np.zeros_like(change) if self.target is None else score(self.target.values, prediction)

    def predict_shortened(self, lengths: Array) -> Array | None:
        """Predict from the last ``lengths`` steps of each sample; None if the model refuses fewer, or joins samples."""
        have_full_length = bool((self.lengths == self.samples.steps).all())
        if not have_full_length and self.is_sequence:
            return None
        try:
            outputs = self.outputs(self.samples.shortened(self.lengths, lengths))
        except RnnlensError:
            return None
        return self.to_prediction(outputs) if len(outputs) == self.samples.count else None

    def to_prediction(self, raw: Array) -> Array:
        """Convert outputs (sample, output) to predictions: probabilities of classes or events, else values."""
        return self.form.distribution(raw) if self.target is None else self.target.prediction(raw)


def _recorded(loss: Any, returned: list[Any]) -> Any:
    """Return the same loss function, which also appends what it returns to a list."""

    @wraps(loss)
    def recorded_loss(*arguments: Any, **options: Any) -> Any:
        returned.append(loss(*arguments, **options))
        return returned[-1]

    return recorded_loss


def call_in_numpy(call: RecurrentCall) -> RecurrentCall:
    """Convert the arrays of a call and of its cell to NumPy, unless the framework runs the cell."""
    if call.cell.by_framework:
        return call
    host_fields = {
        call_field.name: _to_host_tree(getattr(call, call_field.name))
        for call_field in fields(call)
        if call_field.name not in ("cell", "weight_grads")
    }
    return replace(call, cell=call.cell.with_weights(to_host), **host_fields)


def _to_host_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_host_tree(item) for item in value)
    return to_host(value) if hasattr(value, "shape") else value
