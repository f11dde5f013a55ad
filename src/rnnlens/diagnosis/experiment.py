"""One model on one set of samples: predictions, exchanged prefixes, exchanged states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Capture, CaptureRequest, RecurrentCall
from ..adapters.registry import adapter_for
from ..errors import InputError, ModelError, RnnlensError, message
from ..layout import Layout, dims_of
from ..measures.intervention import donors, squared_change
from ..recurrence.replay import Replay
from ..results.schema import to_host
from ..typing import Array
from .prediction import Target, read_target
from .samples import Samples

#: Samples whose states are looked at; the median over them is what is reported.
LOOKED_INTO = 32


@dataclass
class Experiment:
    """A model, its samples, and the output step that is looked at."""

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
        """What is known of the axes of inputs and of the output looked at; None where it has to be found out."""
        lie = self.samples.lie
        said = {} if lie is None else {name: layout.axes for name, layout in lie.said.items()}
        if output in said or (lie is not None and lie.inputs is not None):
            return said
        # Samples come first in what went in; how the output lies was looked up, where it was not plain.
        return {**said, output: self.layout.axes}

    @cached_property
    def layout(self) -> Layout:
        """How the output that is looked at lies."""
        whole = to_host(self._leaf(self.capture.outputs))
        _ = self.looked_at
        return (
            Layout.plain(dims_of(whole.shape))
            if self.samples.lie is None
            else self.samples.lie.names(whole, self.which)
        )

    def given(self, x: Any) -> Any:
        """Data as the model wants them."""
        return x if self.samples.lie is None else self.samples.lie.as_given(x)

    @cached_property
    def few(self) -> Any:
        """The first few samples, as the model wants them."""
        return self.given(data.map_leaves(lambda leaf: leaf[:LOOKED_INTO], self.samples.x))

    @cached_property
    def capture(self) -> Capture:
        """States of all recurrent layers, on the first few samples."""
        capture = self.adapter.capture(self.model, Batch(self.few), CaptureRequest(gradients=False, weight_grads=False))
        if not capture.calls:
            raise ModelError(message("Nothing recurrent ran in this forward pass.", hint="rl.layers(model)"))
        return capture

    @cached_property
    def runs(self) -> list[tuple[Any, Replay]]:
        """Every captured call and its replay."""
        return [(call, Replay.from_call(in_numpy(call))) for call in self.capture.calls]

    @cached_property
    def lengths(self) -> Array:
        """(sample,): real steps of each sample; all of them where nothing is masked, or padding comes first."""
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
        """Whether so many steps are the first of the data: all of them, or those that a packed layer keeps."""
        if steps < self.samples.steps and steps not in self._same_without:
            self._same_without[steps] = self._answers_the_same(steps)
        return self._same_without.get(steps, steps == self.samples.steps)

    def _answers_the_same(self, steps: int) -> bool:
        """Whether the model says of the first ``steps`` steps what it says of all: what comes after is padding."""
        place = -1

        def cut(leaf: Array) -> Array:
            nonlocal place
            place += 1
            return leaf[:LOOKED_INTO, :steps] if place in self.samples.sequences else leaf[:LOOKED_INTO]

        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False)
        whole = to_host(self._leaf(self.capture.outputs))
        try:
            x = self.given(data.map_leaves(cut, self.samples.x))
            part = to_host(self._leaf(self.adapter.capture(self.model, Batch(x), request).outputs))
        except RnnlensError:
            return False
        return part.shape == whole.shape and bool(np.allclose(part, whole, rtol=1e-3, atol=1e-5))

    def outputs(self, x: Any, initial_state: Any = None) -> Array:
        """(sample, output) at the step that is looked at, as the model returns it."""
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False)
        given = self.given(x)
        capture = self.adapter.capture(self.model, Batch(given, initial_state=initial_state), request)
        whole = self._turned(to_host(self._leaf(capture.outputs)), given, data.len_of(x))
        if whole.ndim == 1:
            whole = whole[:, None]
        at_step = self._at_step(whole) if whole.ndim >= 3 else whole
        return at_step.reshape(len(at_step), -1)

    @cached_property
    def which(self) -> int:
        """The place of the output that is looked at among those of the model."""
        outputs = self.capture.outputs
        names = list(outputs) if isinstance(outputs, Mapping) else []
        count = len(data.leaves_of(outputs))
        if isinstance(self.output, str) and self.output in names and len(names) == count:
            return names.index(self.output)
        if isinstance(self.output, str) or not -count <= self.output < count:
            expected = f"0 to {count - 1}" + (f"; {', '.join(map(repr, names))}" if names else "")
            raise InputError(message("output= is beyond what there is.", got=repr(self.output), expected=expected))
        return self.output % count

    def _leaf(self, outputs: Any) -> Any:
        return data.leaves_of(outputs)[self.which]

    def _of_output(self, y: Any) -> Array:
        """The target of the output that is looked at: the only one, that of its name, or that in its place."""
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
                raise InputError(message("The outputs have names, so the targets need theirs.", got=got, hint=hint))
            return data.leaves_of(y[name])[0]
        if len(targets) != len(data.leaves_of(outputs)):
            got = f"{len(targets)} targets for {len(data.leaves_of(outputs))} outputs"
            raise InputError(message("Which target belongs to the output is not known.", got=got, hint="pass that one"))
        return targets[self.which]

    def _turned(self, whole: Array, given: Any, samples: int) -> Array:
        lie = self.samples.lie
        return whole if lie is None else lie.output(whole, self.which, given, samples)

    @cached_property
    def looked_at(self) -> Array:
        """The output on the first few samples, with samples first."""
        few = min(LOOKED_INTO, self.samples.count)
        return self._turned(to_host(self._leaf(self.capture.outputs)), self.few, few)

    def _at_step(self, whole: Array) -> Array:
        found: Array = whole[np.arange(len(whole)), self.place(whole)]
        return found

    def place(self, whole: Array) -> Array:
        """(sample,): where, in an output (sample, time, ...), the step is that is looked at."""
        count, steps = whole.shape[:2]
        if self.step == -1 and self._are_steps_of_the_data(steps):
            return self.lengths[:count] - 1
        if not -steps <= self.step < steps:
            raise InputError(message("step= is beyond the output.", got=self.step, expected=f"{-steps} to {steps - 1}"))
        return np.full(count, self.step % steps)

    def ends(self, call: RecurrentCall) -> Array | None:
        """(sample,): after which step of a captured call its state is the one that the output at the step has seen.

        None where the recurrence has run to its end by then, or its steps are not those of the data.
        """
        own = self._are_steps_of_the_data(call.input.shape[1])
        if not own or (call.direction == "backward" and not self.is_sequence):
            return None
        ends: Array = self.last[: call.input.shape[0]] - 1
        return ends

    @cached_property
    def raw(self) -> Array:
        """The model's output on its own samples."""
        return self.outputs(self.samples.x)

    @cached_property
    def target(self) -> Target | None:
        """The target at the step, or None without y."""
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
        """Prediction f on the model's own samples."""
        return self.raw if self.target is None else self.target.prediction(self.raw)

    @cached_property
    def last(self) -> Array:
        """(sample,): steps up to and including the one whose output is looked at."""
        if self.step == -1:
            return self.lengths
        step = self.step if self.step >= 0 else self.samples.steps + self.step
        return np.minimum(self.lengths, step + 1) if self.is_sequence else self.lengths

    @cached_property
    def reach(self) -> int:
        """Steps that the output can have seen: of the longest sample."""
        return int(self.last.max())

    @cached_property
    def lender(self) -> Array:
        """Who lends a prefix to whom."""
        return donors(self.samples.count, lengths=self.last, seed=self.seed)

    def exchanged(self, keep: int) -> tuple[Array, Array]:
        """Change of the prediction and loss (sample,) where all but the last ``keep`` steps are another sample's."""
        kept = np.full(self.samples.count, keep)
        raw = self.outputs(self.samples.with_prefix(kept, self.lender, self.last))
        if self.target is None:
            return squared_change(self.prediction, raw), np.zeros(len(raw))
        prediction = self.target.prediction(raw)
        return squared_change(self.prediction, prediction), self.target.loss(prediction)


def in_numpy(call: RecurrentCall) -> RecurrentCall:
    """The same call with its arrays, and those of its cell, in NumPy; a cell that the framework steps stays its."""
    if call.cell.by_framework:
        return call
    changed = {
        f.name: _plain_tree(getattr(call, f.name)) for f in fields(call) if f.name not in ("cell", "weight_grads")
    }
    return replace(call, cell=call.cell.with_weights(to_host), **changed)


def _plain_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain_tree(part) for part in value)
    return to_host(value) if hasattr(value, "shape") else value
