"""What a model is run with by ``rl.verify``, and its run: results and gradients as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError, raised_by
from ..typing import leaves_of, map_leaves
from .pure_models import PureModel, as_array

Arrays = dict[str, Any]
#: Most steps of a run whose gradient is compared one by one, and most samples.
STEPS, ROWS = 12, 3


@dataclass(frozen=True)
class ModelDesign:
    """What a model is run with: an example input and state, and how it is called.

    ``state``: nested arrays, or None. ``step``: whether the model is one step of the recurrence, which is then called
    at every step. ``time``: axis of time of ``x``; the other of the first two counts samples. ``chunk``: borders.
    """

    x: Any
    state: Any = None
    step: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    time: int = 1
    chunk: int = 64

    @property
    def row_axis(self) -> int:
        """Axis of samples of ``x``."""
        return 1 - self.time

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of steps of the runs: one, and around the borders of chunks, as far as the example reaches."""
        steps, chunk = self.x.shape[self.time], self.chunk
        return tuple(sorted({n for n in (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 5) if n < steps} | {steps}))

    def cut(self, length: int) -> ModelDesign:
        """Return the design for the first ``length`` steps; arguments with a time axis are cut too."""
        steps = self.x.shape[self.time]

        def first(value: Any) -> Any:
            has_time = getattr(value, "ndim", 0) > self.time and value.shape[self.time] == steps
            return np.take(as_array(value), range(length), self.time) if has_time else value

        arguments = {name: map_leaves(first, value) for name, value in self.arguments.items()}
        return ModelDesign(first(self.x), self.state, self.step, arguments, self.time, self.chunk)

    def steps_to_compare(self) -> tuple[int, ...]:
        """Return the steps at the ends of the run and around borders of chunks; all steps of a short run."""
        n, chunk = self.x.shape[self.time], self.chunk
        if n <= STEPS:
            return tuple(range(n))
        near = (0, 1, chunk - 2, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, n // 2, n - 3, n - 2, n - 1)
        return tuple(sorted({t for t in near if 0 <= t < n}))

    def rows_to_compare(self) -> tuple[int, ...]:
        """Return the first two samples and the last one."""
        rows = self.x.shape[self.row_axis]
        return tuple(sorted({0, 1, rows - 1})) if rows > ROWS else tuple(range(rows))


class ModelRun:
    """A model in one dtype with one design: results as arrays, gradients, and derivatives by differences."""

    def __init__(self, model: PureModel, design: ModelDesign, dtype: str) -> None:
        self.model, self.design, self.dtype = model, design, dtype
        self.context = (model.wide if dtype == "float64" else None) or nullcontext
        self._compiled = model.runner.compiled(self._call)
        self._gradients = model.runner.gradient_function(lambda tensors, fixed: self._call({**fixed, **tensors}))

    @classmethod
    def of(cls, model: PureModel, design: ModelDesign, dtype: str) -> ModelRun:
        """Return the model's run for data of this shape; each is made, and compiled, once."""
        key = design.x.shape, dtype
        run: ModelRun | None = model.runs.get(key)
        if run is None:
            run = model.runs[key] = cls(model, design, dtype)
        return run

    def with_design(self, design: ModelDesign) -> ModelRun:
        """Return a run of the same model in the same dtype on other data."""
        return ModelRun(self.model, design, self.dtype)

    def results(self, values: Arrays) -> list[Any]:
        """Return outputs and last states for weights, ``"input"`` and ``"state"`` leaves by name."""
        with self.context(), raised_by("Your model"):
            tensors = {name: self._tensor(value) for name, value in values.items()}
            return [self.model.runner.array(result) for result in self._compiled(tensors)]

    def gradients(self, values: Arrays, cotangents: list[list[Any]]) -> list[Arrays]:
        """Return the framework's gradient of every floating value, for each list of cotangents of the results."""
        names = [name for name, value in values.items() if np.issubdtype(value.dtype, np.inexact)]
        fixed = {name: value for name, value in values.items() if name not in names}
        with self.context(), raised_by("The backward pass of your model"):
            rest = {name: self._tensor(value) for name, value in fixed.items()}
            array = self.model.runner.array
            pulled = self._gradients({name: self._tensor(values[name]) for name in names}, rest, cotangents)
            return [
                {name: np.zeros_like(values[name]) if grads[name] is None else array(grads[name]) for name in names}
                for grads in pulled
            ]

    def _tensor(self, value: Any) -> Any:
        return self.model.runner.tensor(value, self.dtype)

    def _call(self, tensors: Mapping[str, Any]) -> list[Any]:
        design = self.design
        weights = {name: tensors[name] for name in self.model.weights}
        state = None
        if design.state is not None:
            state = with_leaves(design.state, [tensors[name] for name in state_names(design.state)])
        arguments = {name: map_leaves(self._tensor, value) for name, value in design.arguments.items()}
        x = tensors["input"]

        def body(call: Any) -> list[Any]:
            if not design.step:
                return [leaf for leaf in leaves_of(call(x, state, arguments)) if _is_float(leaf)]
            outputs, states, count = [], list[Any](), len(leaves_of(design.state))
            nested = state
            for t in range(x.shape[design.time]):
                returned = leaves_of(call(x[:, t] if design.time == 1 else x[t], nested, arguments))
                output, states = _output_and_state(returned, count, self.model.state_first)
                outputs.append(output)
                nested = with_leaves(design.state, states)
            return [*outputs, *states]

        return self.model.run(self.dtype, weights, body)  # type: ignore[no-any-return]


def _is_float(leaf: Any) -> bool:
    return any(kind in str(leaf.dtype) for kind in ("float", "complex"))


def _output_and_state(returned: list[Any], count: int, state_first: bool) -> tuple[Any, list[Any]]:
    """Split what a step returned; the output of a step that returns its state alone is the state's first part."""
    if len(returned) == count:
        return returned[0], returned
    if len(returned) == count + 1:
        return (returned[count], returned[:count]) if state_first else (returned[0], returned[1:])
    raise InputError(
        "The step returns something else than its state, or an output and its state.",
        got=f"{len(returned)} tensors",
        expected=f"{count} or {count + 1}, as state= has {count}",
    )


def with_leaves(tree: Any, values: list[Any]) -> Any:
    """Return nested data of the structure of ``tree`` with other leaves."""
    following = iter(values)
    return map_leaves(lambda _: next(following), tree)


def state_names(state: Any) -> list[str]:
    """Return the names of the leaves of an initial state in messages."""
    count = len(leaves_of(state))
    return ["initial state"] if count == 1 else [f"initial state {i}" for i in range(count)]
