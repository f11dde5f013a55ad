"""``rl.verify`` of cells, layers and models: gradients against differences of the forward pass in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError
from ..results.checks import epsilon, rounding_bound
from .model_design import Arrays, ModelDesign, ModelRun
from .pure_models import PureModel

#: Random directions in which the gradient of a weight is compared.
DIRECTIONS = 2
#: Multiple of the measured effect of one rounding that rounding may explain.
SAFETY = 32.0


@dataclass(frozen=True)
class Direction:
    """A direction in one tensor: of one sample and step of the input, of a state, or of a whole weight."""

    tensor: str
    value: Any = field(repr=False)
    step: int | None = None
    row: int | None = None


class ModelCase:
    """One length: gradients of a model and differences of its forward pass, under two sets of cotangents.

    The first set has a random cotangent at every result and step; the second at the last step of the output alone.
    """

    def __init__(
        self, model: PureModel, design: ModelDesign, values: Arrays, dtypes: tuple[str, str], seed: int
    ) -> None:
        dtype, wide = dtypes
        self.design, self.dtype = design, dtype
        self.length = design.x.shape[design.time]
        self.run, self.wide_run = ModelRun.of(model, design, dtype), ModelRun.of(model, design, wide)
        self.values, self.rng = values, np.random.default_rng(seed)
        self.results, self.expected = self.run.results(values), self.wide_run.results(values)
        self._refuse_random()
        self.bound, self.reference_epsilon = rounding_bound(dtype, self.length), epsilon(wide)
        #: Relative rounding of the results whose differences are taken; without a wider dtype, of many operations.
        self.reference_rounding = self.reference_epsilon if wide != dtype else self.bound
        self.cotangents = self._cotangents()
        self.gradients = self.run.gradients(values, self.cotangents)
        self.sensitivity = self._sensitivity() if wide != dtype else None
        self.directions = list(self._directions())
        measured = [self.difference(direction) for direction in self.directions]
        #: Derivatives (direction, cotangents) by differences, and how far two estimates of them differ.
        self.derivatives, self.doubt = (np.array(part) for part in zip(*measured, strict=True))
        self.claimed = np.array(
            [[inner(grads[d.tensor], d.value) for grads in self.gradients] for d in self.directions]
        )

    def _refuse_random(self) -> None:
        again = self.run.results(self.values)
        bound = rounding_bound(self.dtype, self.length)
        if any(
            np.abs(a - b).max(initial=0) > bound * np.abs(a).max() for a, b in zip(self.results, again, strict=True)
        ):
            raise InputError(
                "The model gives other outputs on a second call with the same data.",
                expected="a model without dropout, and without a state that it keeps between calls",
                hint="verify the cell or layer inside it",
            )

    def _cotangents(self) -> list[list[Any]]:
        design, run = self.design, self.run
        dense = [run.model.runner.array(run._tensor(self._normal(result))) for result in self.results]
        last = [np.zeros_like(value) for value in dense]
        if design.step:
            last[self.length - 1] = dense[self.length - 1]
        elif dense[0].ndim > design.time and dense[0].shape[design.time] == self.length:
            place = (slice(None),) * design.time + (-1,)
            last[0][place] = dense[0][place]
        else:
            last[0] = dense[0]
        return [dense, last]

    def _normal(self, like: Any) -> Any:
        values = self.rng.normal(size=like.shape)
        return values + 1j * self.rng.normal(size=like.shape) if np.iscomplexobj(like) else values

    def _directions(self) -> Iterator[Direction]:
        """Yield unit directions: per sample and step of the input, and random ones of states and weights."""
        design = self.design
        for name, value in self.values.items():
            if not np.issubdtype(value.dtype, np.inexact) or not value.size:
                continue
            if name != "input":
                for _ in range(DIRECTIONS):
                    yield Direction(name, _unit(self._normal(value)))
                continue
            for step in design.steps_to_compare():
                for row in design.rows_to_compare():
                    place = (row, step) if design.time == 1 else (step, row)
                    direction = np.zeros_like(value)
                    direction[place] = _unit(self._normal(direction[place]))
                    yield Direction(name, direction, step, row)
            if len(design.steps_to_compare()) < self.length:
                yield Direction(name, _unit(self._normal(value)))

    def difference(self, direction: Direction) -> tuple[Any, Any]:
        """Return the derivatives in one direction under both cotangents, and the doubt about them.

        Central differences with three steps, extrapolated twice (Richardson 1911); the doubt is the difference of two
        extrapolations, and at least the rounding of the results.
        """
        step = self.reference_epsilon**0.23
        results: list[Any] = []
        for size in (step, 2 * step, 4 * step):
            moved = size * direction.value
            plus, minus = (
                self.wide_run.results({**self.values, direction.tensor: self.values[direction.tensor] + sign * moved})
                for sign in (1, -1)
            )
            change = [(a - b) / (2 * size) for a, b in zip(plus, minus, strict=True)]
            results.append([sum(inner(c, d) for c, d in zip(grads, change, strict=True)) for grads in self.cotangents])
        near, middle, far = map(np.array, results)
        fine, coarse = (4 * near - middle) / 3, (4 * middle - far) / 3
        floor = [
            self.reference_rounding / step * sum(np.linalg.norm(c) * np.abs(r).max(initial=0) for c, r in pairs)
            for pairs in (list(zip(grads, self.expected, strict=True)) for grads in self.cotangents)
        ]
        return fine, np.abs(fine - coarse) + floor

    def _sensitivity(self) -> list[Arrays]:
        """Return how far all gradients move where every value moves by one rounding: the model's own conditioning."""
        size = epsilon(self.dtype)
        moved = {
            name: value * (1 + size * self.rng.choice((-1, 1), value.shape))
            if np.issubdtype(value.dtype, np.inexact)
            else value
            for name, value in self.values.items()
        }
        before, after = (self.wide_run.gradients(values, self.cotangents) for values in (self.values, moved))
        return [{name: b[name] - a[name] for name in a} for a, b in zip(before, after, strict=True)]

    @cached_property
    def tolerance(self) -> Any:
        """Largest errors that rounding explains, relative to the tensor; of the input, relative to the step."""
        size = np.abs(self.derivatives)
        tolerance = np.zeros_like(size)
        every = [self._root_mean_square(g, d) for g in self.gradients for d in self.directions]
        largest = np.array(every).reshape(len(self.gradients), -1).max(1)
        for i, direction in enumerate(self.directions):
            group = [
                j for j, d in enumerate(self.directions) if (d.tensor, d.step) == (direction.tensor, direction.step)
            ]
            unit = np.maximum(size[group].max(0), [self._root_mean_square(g, direction) for g in self.gradients])
            tolerance[i] = self.bound * unit + self.doubt[i]
            if direction.step is None:  # a saturated gate has a derivative of a few roundings, or none
                tolerance[i] += SAFETY * epsilon(self.dtype) * largest
            if self.sensitivity is not None:
                tolerance[i] += [SAFETY * self._root_mean_square(s, direction) for s in self.sensitivity]
        return tolerance

    def _root_mean_square(self, gradients: Arrays, direction: Direction) -> float:
        grad = gradients[direction.tensor]
        part = grad if direction.step is None else np.take(grad, direction.step, self.design.time)
        return float(np.linalg.norm(part) / max(part.size, 1) ** 0.5)

    @cached_property
    def errors(self) -> Any:
        """Errors (direction, cotangents) in units of the tolerance; not finite counts as wrong."""
        errors = np.abs(self.claimed - self.derivatives) / np.maximum(self.tolerance, np.finfo(float).tiny)
        return np.where(np.isfinite(self.claimed), errors, np.inf)

    def wrong_results(self) -> list[tuple[str, float]]:
        """Return the results that differ from the forward pass in float64, with their error."""
        names = self.result_names()
        wrong = []
        for name, actual, expected in zip(names, self.results, self.expected, strict=True):
            unit = float(np.abs(expected).max(initial=0.0)) or 1.0
            error = float(np.max(np.abs(actual - expected), initial=0.0)) / unit
            if not error <= self.bound:
                wrong.append((name, error))
        return wrong

    def result_names(self) -> list[str]:
        """Return the name of each result in messages."""
        if self.design.step:
            states = len(self.results) - self.length
            return [f"output of step {t}" for t in range(self.length)] + ["last state"] * states
        return ["output", *(f"output {i}" for i in range(1, len(self.results)))]

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors whose gradients are compared."""
        return list(dict.fromkeys(direction.tensor for direction in self.directions))

    def reach(self) -> int | None:
        """Return how many steps back from the last one the gradient of the last step could be compared."""
        resolved = [
            self.length - 1 - d.step
            for d, value, doubt in zip(self.directions, self.derivatives, self.tolerance, strict=True)
            if d.step is not None and abs(value[1]) > 2 * doubt[1]
        ]
        return max(resolved, default=None)

    def first_wrong_lag(self) -> int | None:
        """Return the smallest lag at which the gradient of the last step alone is wrong."""
        wrong = [
            self.length - 1 - d.step
            for d, error in zip(self.directions, self.errors, strict=True)
            if d.step is not None and error[1] > 1
        ]
        return min(wrong, default=None)


def inner(gradient: Any, direction: Any) -> float:
    """Return the derivative along a direction of a real number with this gradient."""
    return float(np.real(np.vdot(gradient, direction)))


def _unit(value: Any) -> Any:
    return value / max(float(np.linalg.norm(value)), np.finfo(float).tiny)
