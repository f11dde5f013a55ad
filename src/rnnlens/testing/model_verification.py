"""``rl.verify`` of cells, layers and models: which runs are compared, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import InputError, RnnlensError
from ..typing import leaves_of, map_leaves
from .model_design import Arrays, ModelDesign, ModelRun, state_names
from .model_gradients import ModelCase, inner
from .model_mistakes import cause_of
from .pure_models import PureModel, as_array, open_pure

#: Most weights that a search for slow decay changes.
MOST_WEIGHTS = 24
#: Share of the first input's effect on the last output, relative to the last input's, at which the search ends.
ENOUGH = 0.5


def verify_model(model: Any, design: ModelDesign, dtype: str, seed: int) -> Verification:
    """Compare the gradients of a cell, layer or model with differences of its forward pass."""
    design = _checked(design, model)
    pure = open_pure(model, step=design.step)
    wide = "float64" if pure.wide is not None and _runs(pure, design, "float64") else dtype
    data = {"input": design.x, **dict(zip(state_names(design.state), leaves_of(design.state), strict=False))}
    values = pure.runner.rounded({**pure.weights, **data}, dtype)
    whole = design.x.shape[design.time]
    dtypes = (dtype, wide)
    # A model may be made for sequences of some length: shorter ones that it does not take are left out.
    lengths = tuple(n for n in design.lengths if n == whole or _runs(pure, design.cut(n), dtype))
    cases = []
    for length in lengths:
        cut = {**values, "input": np.take(values["input"], range(length), design.time)}
        cases.append(ModelCase(pure, design.cut(length), cut, dtypes, seed))
    slow = pure.runner.rounded(_with_slow_decay(pure, design, values, wide, seed), dtype)
    cases.append(ModelCase(pure, design, slow, dtypes, seed))
    names = [name.partition(" of step")[0] for name in cases[-1].result_names()]
    compared = (*dict.fromkeys(names), *(f"gradient of {name}" for name in cases[-1].tensors))
    reached = [reach for case in cases if case.length == whole and (reach := case.reach()) is not None]
    verdict = Verification(pure.name, dtype, lengths, compared=compared, reach=max(reached, default=None))
    wrong_cases = [(case, wrong) for case in cases if (wrong := _wrong_tensors(case))]
    if not wrong_cases:
        return verdict
    # A run of one step shows the least, the shortest of several steps shows the place.
    shortest, wrong = next((pair for pair in wrong_cases if pair[0].length > 1), wrong_cases[0])
    cause = next((cause for case, _ in reversed(wrong_cases) if (cause := cause_of(case))), "")
    return replace(verdict, wrong=tuple(wrong), lag=shortest.first_wrong_lag(), cause=cause)


def _checked(design: ModelDesign, model: Any) -> ModelDesign:
    """Return the design with arrays; raise InputError for data in which mistakes could hide."""
    x = as_array(design.x)
    if x.ndim < 2 or x.shape[design.row_axis] < 2:
        raise InputError(
            "verify needs an example input of at least two samples: a gradient may be right in the first one alone.",
            got=f"shape {x.shape}",
            expected="(sample, time, ...), or (time, sample, ...) with time_first=True",
        )
    if design.step and design.state is None:
        raise InputError(
            "One step of a recurrence needs the state to begin with.",
            got=f"step=True for {type(model).__name__}",
            hint="state=zeros of (sample, unit), or the nested states",
        )
    return replace(design, x=x, state=map_leaves(as_array, design.state))


def _runs(model: PureModel, design: ModelDesign, dtype: str) -> bool:
    """Return whether the model runs in a dtype on data of this length."""
    states = dict(zip(state_names(design.state), leaves_of(design.state), strict=False))
    try:
        ModelRun.of(model, design, dtype).results({**model.weights, "input": design.x, **states})
    except Exception:  # of any class of the user
        return False
    return True


def _wrong_tensors(case: ModelCase) -> list[WrongTensor]:
    wrong = [WrongTensor(name, case.length, error, case.bound) for name, error in case.wrong_results()]
    for name in case.tensors:
        places = [i for i, direction in enumerate(case.directions) if direction.tensor == name]
        bad = [i for i in places if (case.errors[i] > 1).any()]
        if not bad:
            continue
        worst, column = np.unravel_index(np.argmax(case.errors[bad]), case.errors[bad].shape)
        i = bad[int(worst)]
        unit = float(np.abs(case.derivatives[places, column]).max()) or 1.0
        error = float(abs(case.claimed[i, column] - case.derivatives[i, column])) / unit
        steps = tuple(sorted({d.step for j in bad if (d := case.directions[j]).step is not None}))
        rows = tuple(sorted({d.row for j in bad if (d := case.directions[j]).row is not None}))
        bound = float(case.tolerance[i, column]) / unit
        wrong.append(WrongTensor(f"gradient of {name}", case.length, error, bound, steps, rows))
    return wrong


def _with_slow_decay(model: PureModel, design: ModelDesign, values: Arrays, dtype: str, seed: int) -> Arrays:
    """Return weights with which the last step depends on the first one as much as possible, without growth.

    A vector is moved by 3 either way, square blocks of a matrix are made orthogonal, other tensors are moved down by 3:
    forget gates open, decays come close to 1. What lets more of the first input through is kept.
    """
    if design.x.shape[design.time] < 3 or not np.issubdtype(values["input"].dtype, np.inexact):
        return values
    run, rng = ModelRun.of(model, design, dtype), np.random.default_rng(seed)
    direction = rng.normal(size=values["input"].shape)
    best, kept = _dependence(run, values, direction), values
    for name in list(model.weights)[:MOST_WEIGHTS]:
        for candidate in _slower(values[name], rng):
            trial = {**kept, name: candidate}
            try:
                share = _dependence(run, trial, direction)
            except RnnlensError:  # weights that the model refuses
                continue
            if best < share <= 2:
                best, kept = share, trial
            if best > ENOUGH:
                return kept
    return kept


def _slower(value: Any, rng: Any) -> list[Any]:
    if value.ndim == 2 and min(value.shape) > 1 and max(value.shape) % min(value.shape) == 0:
        long, short = max(value.shape), min(value.shape)
        blocks = [np.linalg.qr(rng.normal(size=(short, short)))[0] for _ in range(long // short)]
        return [np.concatenate(blocks, int(value.shape[1] == long))]
    return [value + 3, value - 3] if value.ndim < 2 else [value - 3]


def _dependence(run: ModelRun, values: Arrays, direction: Any) -> float:
    """Return how much the first input moves the last output, relative to the last input."""
    time, length = run.design.time, run.design.x.shape[run.design.time]
    moves = []
    for step in (0, length - 1):
        mask = (np.arange(length) == step).reshape(*(1,) * time, -1, *(1,) * (direction.ndim - time - 1))
        plus, minus = (run.results({**values, "input": values["input"] + s * 1e-3 * mask * direction}) for s in (1, -1))
        last = length - 1 if run.design.step else 0
        change = plus[last] - minus[last]
        if not run.design.step and change.ndim > time and change.shape[time] == length:
            change = np.take(change, -1, time)
        moves.append(float(np.sqrt(abs(inner(change, change)))))
    share = moves[0] / (moves[1] or 1.0)
    return share if np.isfinite(share) else np.inf


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that differs from the reference by more than rounding explains.

    Attributes
    ----------
    name
        ``"output"``, ``"last state"``, or ``"gradient of ..."`` an argument.
    length
        Number of steps of the run.
    error, bound
        Largest difference relative to the largest reference value, and how much rounding explains.
    steps, rows
        Steps and samples at which it differs, of those compared; empty for a tensor without that axis.
    """

    name: str
    length: int
    error: float
    bound: float
    steps: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        places = []
        if self.steps:
            steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
            places.append(f"at {len(self.steps)} of {self.length} steps ({steps})")
        if self.rows:
            places.append(f"in samples {', '.join(map(str, self.rows))}")
        return f"{self.name}: off by {self.error:.2g} (rounding explains {self.bound:.1g}) {' '.join(places)}".strip()


@dataclass(frozen=True)
class Verification:
    """Verdict on the gradient of one function or model.

    Attributes
    ----------
    recurrence, dtype
        What was verified, and in which dtype.
    lengths
        Numbers of steps of the runs.
    wrong
        Tensors that differ, of the shortest length at which any did; empty if all are right.
    lag
        Number of steps back from the last from which on a gradient of the last step alone is wrong; None if it is not.
    cause
        The likeliest cause: a known mistake that gives the same wrong numbers, or "".
    compared
        Names of all compared tensors.
    reach
        Of a cell, layer or model: how many steps back from the last one its gradient is large enough to be compared.
    """

    recurrence: str
    dtype: str
    lengths: tuple[int, ...]
    wrong: tuple[WrongTensor, ...] = ()
    lag: int | None = None
    cause: str = ""
    compared: tuple[str, ...] = field(default=(), repr=False)
    reach: int | None = None

    @property
    def ok(self) -> bool:
        """Whether all tensors agree with the reference."""
        return not self.wrong

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        if self.ok:
            reach = "" if self.reach is None else f", {self.reach} steps back"
            return f"right: {self.recurrence} in {self.dtype}, {lengths} steps{reach}: {', '.join(self.compared)}"
        lines = [f"WRONG: {self.recurrence} in {self.dtype}", *(f"  {tensor}" for tensor in self.wrong)]
        if self.lag is not None:
            lines.append(f"  lag: the gradient of the last step is wrong from {self.lag} steps back")
        lines.append(f"  cause: {self.cause or 'no known mistake gives these numbers'}")
        return "\n".join(lines)
