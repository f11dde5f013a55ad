"""One model on one set of samples: predictions at one output step, also for changed inputs, and captured states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Capture, CaptureRequest, LayerInfo, RecurrentCall
from ..adapters.registry import adapter_for
from ..errors import InputError, ModelError, RnnlensError, shown
from ..layout import Layout
from ..measures.intervention import donors, score, squared_change
from ..recurrence.replay import Replay
from ..results.schema import to_host
from ..typing import Array
from ..verbs.names import Catalogue, known_model
from .prediction import PredictionTarget, read_target
from .samples import Samples

#: Largest number of samples whose states are captured.
LOOKED_INTO = 32


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
    adapter: Adapter = field(init=False)
    _same_without: dict[int, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.adapter = adapter_for(self.model)

    def axes_of(self, output: str) -> dict[str, Any] | None:
        """Return the axes of inputs and of the examined output for ``rl.gradients``, which finds those left out."""
        orientation = self.samples.orientation
        declared = {name: layout.axes for name, layout in orientation.declared.items()}
        if output in declared or orientation.inputs is not None:
            return declared
        # Samples come first in the inputs, and the axes of the output are known.
        return {**declared, output: self.layout.axes}

    @cached_property
    def layout(self) -> Layout:
        """Axes of the examined output."""
        whole = to_host(self._leaf(self.capture.outputs))
        _ = self.looked_at
        return self.samples.orientation.names(whole, self.which)

    def given(self, x: Any) -> Any:
        """Convert data with samples first to the model's own order of axes."""
        return self.samples.orientation.as_given(x)

    @cached_property
    def few(self) -> Any:
        """First samples of the data, at most ``LOOKED_INTO``, in the model's own order of axes."""
        return self.given(data.map_leaves(lambda leaf: leaf[:LOOKED_INTO], self.samples.x))

    @cached_property
    def capture(self) -> Capture:
        """Capture of the forward pass on the first samples, with the states of all recurrent layers."""
        request = CaptureRequest(gradients=False, weight_grads=False, scans=False)
        capture = self.adapter.capture(self.model, Batch(self.few), request)
        if not capture.calls and not capture.scanned:
            raise ModelError("No recurrent layer ran in this forward pass.", hint="rl.layers(model)")
        return capture

    @cached_property
    def scans(self) -> dict[str, LayerInfo]:
        """Whole-sequence layers (Mamba, delta rules) that ran, by name."""
        known = known_model(self.adapter, self.model).sequences
        return {name: known[name] for name in self.capture.scanned if name in known}

    @cached_property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the embeddings of a model of token ids; empty for a model of floats."""
        if data.leaves_of(self.samples.x)[self.samples.sequences[0]].dtype.kind == "f":
            return ()
        return Catalogue(self.adapter, self.model).facts.having("embedding")

    def embedded(self, x: Any) -> Array | None:
        """Return embedded token ids (sample, time, feature); None if no embedding ran over all steps."""
        request = CaptureRequest(self.embeddings, gradients=False, weight_grads=False, all_must_run=False)
        plain = self.adapter.capture(self.model, Batch(self.given(x)), request).plain if self.embeddings else []
        found = (to_host(call.output) for call in plain)
        return next((e for e in found if e.ndim == 3 and e.shape[1] == self.samples.steps), None)

    @cached_property
    def runs(self) -> list[tuple[Any, Replay]]:
        """Pairs of a captured call and its replay."""
        return [(call, Replay.from_call(in_numpy(call))) for call in self.capture.calls]

    @cached_property
    def lengths(self) -> Array:
        """Number of steps up to each sample's last real one, (sample,). It is the full length without a mask."""
        full = np.full(self.samples.count, self.samples.steps)
        if all(call.mask is None for call in self.capture.calls):
            return full
        request = CaptureRequest(gradients=False, weight_grads=False)
        calls = self.adapter.capture(self.model, Batch(self.given(self.samples.x)), request).calls
        mask = next((to_host(call.mask) for call in calls if call.mask is not None), None)
        if mask is None or not self._are_steps_of_the_data(mask.shape[1]):
            return full
        last = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
        return np.where(mask.any(axis=1), last, 1)

    def _are_steps_of_the_data(self, steps: int) -> bool:
        """Return whether an axis of size ``steps`` counts the data's steps: all of them, or all but final padding."""
        if steps < self.samples.steps and steps not in self._same_without:
            self._same_without[steps] = self._answers_the_same(steps)
        return self._same_without.get(steps, steps == self.samples.steps)

    def _answers_the_same(self, steps: int) -> bool:
        """Return whether the first ``steps`` steps alone give the same output as all steps: the rest is padding."""
        few = self.samples.each_sequence(lambda leaf: leaf[:LOOKED_INTO, :steps], lambda leaf: leaf[:LOOKED_INTO])
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False, calls=False)
        whole = to_host(self._leaf(self.capture.outputs))
        try:
            part = to_host(self._leaf(self.adapter.capture(self.model, Batch(self.given(few)), request).outputs))
        except RnnlensError:
            return False
        return part.shape == whole.shape and bool(np.allclose(part, whole, rtol=1e-3, atol=1e-5))

    def outputs(self, x: Any, initial_state: Any = None) -> Array:
        """Run the model; return the examined output at the examined step, (sample, output)."""
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False, calls=False)
        given = self.given(x)
        capture = self.adapter.capture(self.model, Batch(given, initial_state=initial_state), request)
        whole = self.samples.orientation.output(to_host(self._leaf(capture.outputs)), self.which, given, data.len_of(x))
        if whole.ndim == 1:
            whole = whole[:, None]
        at_step = whole[np.arange(len(whole)), self.place(whole)] if whole.ndim >= 3 else whole
        return at_step.reshape(len(at_step), -1)

    @cached_property
    def which(self) -> int:
        """Position of the output examined by the diagnosis among the model's outputs."""
        outputs = self.capture.outputs
        names = list(outputs) if isinstance(outputs, Mapping) else []
        count = len(data.leaves_of(outputs))
        if isinstance(self.output, str) and self.output in names and len(names) == count:
            return names.index(self.output)
        if isinstance(self.output, str) or not -count <= self.output < count:
            expected = f"0 to {count - 1}" + (f"; {', '.join(map(repr, names))}" if names else "")
            raise InputError("output= exceeds the number of outputs.", got=repr(self.output), expected=expected)
        return self.output % count

    def refuse_loss(self, loss: Any) -> None:
        """Run a loss function once on the first samples; raise InputError if it returns no real number or tensor."""
        if not inspect.isroutine(loss) or self.samples.y is None:
            return
        returned: list[Any] = []

        def recorded(*arguments: Any) -> Any:
            returned.append(loss(*arguments))
            return returned[-1]

        y = self.samples.orientation.target_as_given(data.map_leaves(lambda leaf: leaf[:LOOKED_INTO], self.samples.y))
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False, loss=True)
        with suppress(RnnlensError):  # the loss is not needed: its name is enough
            self.adapter.capture(self.model, Batch(self.few, y, loss=recorded), request)
        for value in returned:
            words = str(getattr(value, "dtype", type(value).__name__))
            if value is None or isinstance(value, str | bytes) or "complex" in words:
                got = f"{getattr(loss, '__name__', 'loss')} returned {shown(value)}"
                raise InputError("The loss returns no real number.", got=got, expected="a tensor of numbers")

    def _leaf(self, outputs: Any) -> Any:
        return data.leaves_of(outputs)[self.which]

    def _of_output(self, y: Any) -> Array:
        """Return the target of the examined output: the only one, or the one of the same name or position."""
        outputs, targets = self.capture.outputs, data.leaves_of(y)
        if len(targets) == 1:
            return targets[0]
        if isinstance(outputs, Mapping) and len(outputs) > 1:
            name = list(outputs)[self.which]
            if not isinstance(y, Mapping) or name not in y:
                got = (
                    f"targets {', '.join(map(repr, y))}" if isinstance(y, Mapping) else f"{len(targets)} without names"
                )
                hint = f"y={{{', '.join(f'{key!r}: ...' for key in outputs)}}}, or the one of output={name!r} alone"
                raise InputError("The outputs have names, so the targets need the same names.", got=got, hint=hint)
            return data.leaves_of(y[name])[0]
        if len(targets) != len(data.leaves_of(outputs)):
            got = f"{len(targets)} targets for {len(data.leaves_of(outputs))} outputs"
            raise InputError("rnnlens cannot tell which target belongs to the output.", got=got, hint="pass that one")
        return targets[self.which]

    @cached_property
    def looked_at(self) -> Array:
        """Examined output on the first samples, (sample, ...)."""
        count = min(LOOKED_INTO, self.samples.count)
        return self.samples.orientation.output(to_host(self._leaf(self.capture.outputs)), self.which, self.few, count)

    def place(self, whole: Array) -> Array:
        """Return each sample's index (sample,) of the examined step, in an output (sample, time, ...)."""
        count, steps = whole.shape[:2]
        if self.step == -1 and self._are_steps_of_the_data(steps):
            return self.lengths[:count] - 1
        if not -steps <= self.step < steps:
            raise InputError("step= is beyond the output.", got=self.step, expected=f"{-steps} to {steps - 1}")
        return np.full(count, self.step % steps)

    def ends(self, call: RecurrentCall) -> Array | None:
        """Return the step after which each sample's state reaches the output, (sample,); None for the last."""
        own = self._are_steps_of_the_data(call.input.shape[1])
        if not own or (call.direction == "backward" and not self.is_sequence):
            return None
        return self.last[: call.input.shape[0]] - 1

    @cached_property
    def raw(self) -> Array:
        """Output of the model on all samples, (sample, output)."""
        return self.outputs(self.samples.x)

    @cached_property
    def target(self) -> PredictionTarget | None:
        """Target at the examined step; None without y."""
        if self.samples.y is None:
            return None
        y = self._of_output(self.samples.y)
        if self.step == -1 and self.is_sequence and y.ndim >= 2 and y.shape[1] == self.samples.steps:
            y, step = y[np.arange(len(y)), self.lengths - 1], None
        else:
            step = self.step if self.is_sequence and y.ndim >= 2 else None
        return read_target(y, self.raw, step, self.task, self.loss)

    @cached_property
    def is_sequence(self) -> bool:
        """Whether the output has a time axis."""
        return len(self.looked_at.shape) >= 3

    @cached_property
    def prediction(self) -> Array:
        """Prediction f on all samples, (sample, output): probabilities for classes, the output itself otherwise."""
        return self.raw if self.target is None else self.target.prediction(self.raw)

    @cached_property
    def last(self) -> Array:
        """Number of input steps up to the examined output step, (sample,).

        It is the full length if output steps are not input steps, as in a forecast, where each output depends on all
        inputs.
        """
        if self.step == -1 or not self.is_sequence:
            return self.lengths
        steps = self.looked_at.shape[1]
        if not self._are_steps_of_the_data(steps):
            return self.lengths
        return np.minimum(self.lengths, self.step % steps + 1)

    @cached_property
    def reach(self) -> int:
        """Number of input steps up to and including the examined output step, of the sample that has most."""
        return int(self.last.max())

    @cached_property
    def lender(self) -> Array:
        """Index of the sample whose older steps replace those of each sample in an exchange, (sample,)."""
        return donors(self.samples.count, lengths=self.last, seed=self.seed)

    def exchanged(self, keep: int) -> tuple[Array, Array]:
        """Predict with all but the last ``keep`` steps of another sample; return as :meth:`changed` does."""
        kept = np.full(self.samples.count, keep)
        return self.changed(self.samples.with_prefix(kept, self.lender, self.last))

    def changed(self, x: Any) -> tuple[Array, Array]:
        """Predict on changed inputs; return the squared change and the score of the prediction, (sample,) each."""
        prediction = self._predicted(self.outputs(x))
        change = squared_change(self.prediction, prediction)
        return change, np.zeros_like(change) if self.target is None else score(self.target.values, prediction)

    def answer_shorter(self, lengths: Array) -> Array | None:
        """Predict from the last ``lengths`` steps of each sample; None if the model refuses fewer."""
        equal = bool((self.lengths == self.samples.steps).all())
        if not equal and self.is_sequence:
            return None
        try:
            return self._predicted(self.outputs(self.samples.shortened(self.lengths, lengths)))
        except RnnlensError:
            return None

    def _predicted(self, raw: Array) -> Array:
        return raw if self.target is None else self.target.prediction(raw)


def in_numpy(call: RecurrentCall) -> RecurrentCall:
    """Convert the arrays of a call and of its cell to NumPy, unless the framework runs the cell."""
    if call.cell.by_framework:
        return call
    changed = {
        f.name: _host_tree(getattr(call, f.name)) for f in fields(call) if f.name not in ("cell", "weight_grads")
    }
    return replace(call, cell=call.cell.with_weights(to_host), **changed)


def _host_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_host_tree(part) for part in value)
    return to_host(value) if hasattr(value, "shape") else value
