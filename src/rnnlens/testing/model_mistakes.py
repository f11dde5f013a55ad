"""Known mistakes in the backward pass of a model, and which of them gives the wrong gradients that were found.

Where a state was given, one step is linearised by differences, and backpropagation through time in float64 is run with
each mistake. Elsewhere, the pattern of the wrong numbers is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import RnnlensError
from ..typing import leaves_of
from .model_design import state_names
from .model_gradients import ModelCase

#: Largest number of numbers in the states of all samples, and of single steps run, for a linearisation.
LARGEST_STATE, MOST_RUNS = 256, 20_000


def cause_of(case: ModelCase) -> str:
    """Return the likeliest mistake behind the wrong gradients of one run, or ""."""
    if wrong := case.wrong_results():
        names = ", ".join(name for name, _ in wrong)
        return f"the forward pass is wrong ({names}); its gradient cannot be judged"
    is_input_wrong = bool((case.errors[_input_places(case)] > 1).any())
    try:
        steps = _Steps.of(case) if is_input_wrong else None
    except RnnlensError:  # a layer that cannot run on single steps
        steps = None
    if steps is not None and _agrees(case, steps.derivatives()):
        for text, mistake in steps.mistakes():
            if _agrees(case, steps.derivatives(**mistake), claimed=True):
                return text
    return _by_pattern(case)


def _input_places(case: ModelCase) -> list[int]:
    return [i for i, direction in enumerate(case.directions) if direction.step is not None]


def _agrees(case: ModelCase, derivatives: Any, *, claimed: bool = False) -> bool:
    """Return whether derivatives by the input equal the right ones, or the claimed ones."""
    places = _input_places(case)
    other = (case.claimed if claimed else case.derivatives)[places]
    scale = max(case.bound, 1e-5) * np.abs(other).max(0) + case.tolerance[places]
    return bool((np.abs(derivatives - other) <= scale).all())


def _by_pattern(case: ModelCase) -> str:
    """Name the mistake by how wrong derivatives are related to the right ones."""
    causes = [cause] if (cause := _truncation(case)) else []
    for name in case.tensors:
        places = [i for i, direction in enumerate(case.directions) if direction.tensor == name]
        if (case.errors[places] <= 1).all():
            continue
        text = f"the gradient of {name}"
        claimed, right, tolerance = case.claimed[places], case.derivatives[places], case.tolerance[places]
        single = [i for i in places if case.directions[i].row is not None]
        rows = {case.directions[i].row for i in single}
        wrong_rows = {case.directions[i].row for i in single if (case.errors[i] > 1).any()}
        factor = float((claimed * right).sum() / ((right * right).sum() or 1.0))
        unconjugated = [
            [float(np.real((grads[name] * case.directions[i].value).sum())) for grads in case.gradients] for i in places
        ]
        if not np.isfinite(claimed).all():
            causes.append(f"{text} is not finite")
        elif not any(grads[name].any() for grads in case.gradients):
            causes.append(f"{text} is missing")
        elif (np.abs(claimed - factor * right) <= tolerance).all():
            causes.append(f"{text} has the factor {factor:.4g}")
        elif np.iscomplexobj(case.values[name]) and (np.abs(np.array(unconjugated) - right) <= tolerance).all():
            causes.append(f"{text} is the complex conjugate")
        elif 0 < len(wrong_rows) < len(rows):
            causes.append(f"{text} is right in {len(rows) - len(wrong_rows)} of {len(rows)} compared samples")
    return "; ".join(causes)


def _truncation(case: ModelCase) -> str:
    """Return whether the gradient of the last step stops at a step although the right one goes on."""
    places = _input_places(case)
    cut = [case.directions[i].step for i in places if case.errors[i, 1] > 1 and case.claimed[i, 1] == 0]
    if not cut:
        return ""
    first = max(step for step in cut if step is not None) + 1
    if any(case.claimed[i, 1] != 0 for i in places if (case.directions[i].step or 0) < first):
        return ""
    if first == case.length - 1:
        return "the gradient through the state is missing"
    grads = np.moveaxis(case.gradients[1]["input"], case.design.time, 0)
    reached = np.flatnonzero(grads.reshape(case.length, -1).any(1))
    return f"the gradient of the last step is truncated before step {reached[0]}" if reached.size else ""


class _Steps:
    """Steps of a model linearised by differences: ds_t = A_t ds_{t-1} + B_t d, dy_t = C_t ds_{t-1} + D_t d."""

    def __init__(self, case: ModelCase, arrays: dict[str, Any]) -> None:
        self.case = case
        self.state_by_state, self.output_by_state = arrays["A"], arrays["C"]
        self.state_by_input, self.output_by_input = arrays["B"], arrays["D"]

    @classmethod
    def of(cls, case: ModelCase) -> _Steps | None:
        """Linearise a model whose state was given; None if it returns no state, or is too large."""
        design = case.design
        if design.state is None:
            return None
        start = [np.asarray(leaf) for leaf in leaves_of(design.state)]
        size, length = sum(leaf.size for leaf in start), case.length
        if size > LARGEST_STATE or 2 * size * length > MOST_RUNS:
            return None
        is_complex = any(np.iscomplexobj(leaf) for leaf in start)

        state, x = np.concatenate([leaf.ravel() for leaf in start]), case.values["input"]
        run = case.wide_run.with_design(replace(design, x=np.take(x, [0], design.time)))

        def step(x_t: Any, state: Any) -> tuple[Any, Any]:
            states = dict(zip(state_names(design.state), _split(state, start), strict=True))
            results = run.results({**case.values, "input": x_t, **states})
            return results[0].ravel(), np.concatenate([value.ravel() for value in results[-len(start) :]])

        h = 1e-4
        arrays: dict[str, list[Any]] = {name: [] for name in "ABCD"}
        for t in range(length):
            x_t = np.take(x, [t], design.time)
            columns = [
                [(a - b) / (2 * h) for a, b in zip(step(x_t, state + d), step(x_t, state - d), strict=True)]
                for d in h * np.eye(size, dtype=complex if is_complex else float)
            ]
            arrays["C"].append(np.stack([column[0] for column in columns], -1))
            arrays["A"].append(np.stack([column[1] for column in columns], -1))
            inputs = [np.take(d.value, [t], design.time) for d in case.directions if d.step == t]
            pairs = [(step(x_t + h * d, state), step(x_t - h * d, state)) for d in inputs]
            arrays["D"].append([(plus[0] - minus[0]) / (2 * h) for plus, minus in pairs])
            arrays["B"].append([(plus[1] - minus[1]) / (2 * h) for plus, minus in pairs])
            state = step(x_t, state)[1]
        return cls(case, arrays)

    def derivatives(self, *, shift: int = 0, border: int = 0, conjugate: bool = True) -> Any:
        """Return the derivatives by the input in the directions of the case; defaults are right, options mistakes."""
        case, order = self.case, np.roll(np.arange(self.case.length), shift)
        conj = np.conj if conjugate else np.asarray
        found = np.zeros((len(_input_places(case)), len(case.cotangents)))
        place = {i: n for n, i in enumerate(_input_places(case))}
        for c in range(len(case.cotangents)):
            outputs, later = self._cotangents(c)
            for t in reversed(range(case.length)):
                if border and (t + 1) % border == 0 and t + 1 < case.length:
                    later = np.zeros_like(later)
                here = [i for i, direction in enumerate(case.directions) if direction.step == t]
                for n, i in enumerate(here):
                    total = np.vdot(later, self.state_by_input[t][n]) + np.vdot(outputs[t], self.output_by_input[t][n])
                    found[place[i], c] = np.real(total)
                a, read = self.state_by_state[order[t]], self.output_by_state[order[t]]
                later = conj(a).T @ later + conj(read).T @ outputs[t]
        return found

    def _cotangents(self, c: int) -> tuple[list[Any], Any]:
        """Return the cotangents of the output at each step, and of the last state."""
        case, design = self.case, self.case.design
        grads, count = case.cotangents[c], len(leaves_of(self.case.design.state))
        last = np.concatenate([grad.ravel() for grad in grads[-count:]])
        if design.step:
            return [grad.ravel() for grad in grads[: case.length]], last
        return [np.take(grads[0], t, design.time).ravel() for t in range(case.length)], last

    def mistakes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield known mistakes in words, and as options of :meth:`derivatives`."""
        yield "the gradient through the state is missing", {"border": 1}
        for border in (2, 4, 8, 16, 32, 64, 128, 256):
            if border < self.case.length:
                yield f"the gradient is truncated at borders of {border} steps", {"border": border}
        yield "the adjoint reads A_t in place of A_{t+1}", {"shift": 1}
        yield "the adjoint reads A_{t+2} in place of A_{t+1}", {"shift": -1}
        if any(np.iscomplexobj(a) for a in self.state_by_state):
            yield "the adjoint lacks the complex conjugate", {"conjugate": False}


def _split(vector: Any, like: list[Any]) -> list[Any]:
    borders = np.cumsum([leaf.size for leaf in like])[:-1]
    return [part.reshape(leaf.shape) for part, leaf in zip(np.split(vector, borders), like, strict=True)]
