"""``episode_resets``: whether the state of a policy is reset where an episode begins, a step too early, or too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from ..arguments import anything, as_numbers, callable_value, checked, integer
from ..autodiff.tensors import converted_like, to_numpy
from ..errors import InputError, UnsupportedError, has_attribute
from ..typing import Array

#: Steps around the first step of an episode at which a reset is looked for.
OFFSETS = (-1, 0, 1)
#: Change of an output, in units of the rounding error of the largest, up to which it counts as unchanged.
_ROUNDING = 100.0
#: Which of the steps -1, 0, 1 the outputs do not depend on what was before, and the verdict.
_VERDICTS = {(0,): "aligned", (-1,): "early", (1,): "late", (): "missing", (-1, 0, 1): "unknown"}


class _Border(NamedTuple):
    """The first step of an episode, and a sample whose inputs differ around it."""

    sample: int
    step: int
    end: int
    donor: int


ResetVerdict = Literal["aligned", "early", "late", "missing", "mixed", "unknown"]

_SENTENCES = {
    "aligned": "The state is reset at the first step of an episode ({borders}): from there on the output is the same, "
    "whatever came before.",
    "early": "The state is reset one step too early ({borders}): the last step of an episode no longer depends on the "
    "steps before it, and the next episode depends on that last step.",
    "late": "The state is reset one step too late ({borders}): the output at the first step of an episode depends on "
    "the episode before, and the steps after it no longer depend on the first.",
    "missing": "The state is not reset where an episode begins ({borders}): the output depends on the episode before.",
    "unknown": "The output does not depend on earlier inputs on either side of the border ({borders}): the policy has "
    "no memory, or is reset at every step.",
}
_REMEDIES = {
    "early": "the flag belongs to the step after: start[:, t] = done[:, t - 1], and start[:, 0] is where the rollout "
    "begins an episode.",
    "late": "reset before the step that begins the episode: h = h * (1 - start[:, t]), then h = cell(x[:, t], h).",
    "missing": "pass the episode starts to the policy, and set the state to its first value where they are 1.",
    "mixed": "look at .borders, which has the verdict of each border.",
    "unknown": "check that the state is carried from one step to the next at all.",
}


@dataclass(frozen=True)
class EpisodeResets:
    """Result of :func:`rnnlens.episode_resets`; prints as a sentence.

    Attributes
    ----------
    verdict
        ``"aligned"``, ``"early"`` or ``"late"`` (by one step), ``"missing"``, ``"unknown"`` (the output depends on no
        earlier input), or ``"mixed"`` where borders differ or are none of these.
    borders
        A Dataset over the examined borders: ``sample`` and ``step`` of the first step of an episode, its ``verdict``,
        and ``change`` (border, offset): by how much the outputs from ``step + offset`` on change when all inputs before
        that step are exchanged, as a share of the largest output. 0 where the state is reset.
    """

    verdict: ResetVerdict
    borders: xr.Dataset

    @property
    def sentence(self) -> str:
        """The result in words."""
        verdicts = Counter(map(str, self.borders["verdict"].values))
        count = self.borders.sizes["border"]
        if self.verdict == "mixed":
            parts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
            return f"Of {count} examined borders of episodes: {parts}."
        return _SENTENCES[self.verdict].format(borders=f"{count} border{'s' * (count > 1)} examined")

    @property
    def remedy(self) -> str:
        """What to change; empty if the resets are aligned."""
        return _REMEDIES.get(self.verdict, "")

    def __str__(self) -> str:
        return f"{self.sentence} Try: {self.remedy}" if self.remedy else self.sentence


@checked(model=callable_value, x=anything, starts=anything, most=integer(least=1))
def episode_resets(model: Callable[[Any], Any], x: Any, starts: Any, *, most: int = 16) -> EpisodeResets:
    """Tell whether the state is reset at the first step of each episode, one step too early or late, or not at all.

    All inputs before a step are exchanged with those of another sequence, and everything else stays: if the state is
    reset at that step, the outputs from it on do not change. This is done for the first step of an episode and the
    steps around it. It needs no gradients and sees values: a state that is detached and carried on counts as carried.

    Parameters
    ----------
    model
        A function of the inputs that returns outputs (sample, time, ...), or a model that is one: of logits, values, or
        a loss of each step. It takes the episode starts along: ``lambda x: policy(x, starts)``. The state before
        the first step has to be the same at each call.
    x : (sample, time, ...)
        Observations, at least two sequences; an array of NumPy, or of the framework.
    starts : (sample, time) of bool, or of 0 and 1
        Whether a step is the first of an episode. Of ``done`` flags: ``starts[:, 1:] = done[:, :-1]``.
    most
        Largest number of borders to examine.

    Returns
    -------
    EpisodeResets
        ``verdict``, ``sentence``, ``remedy``, and ``borders`` with the numbers of each.

    Raises
    ------
    InputError
        If sizes do not fit, or no border has two steps of an episode on either side.
    UnsupportedError
        If two calls of the model with the same inputs differ: dropout, sampling, or a state kept between calls.

    Examples
    --------
    A policy that sums what it sees, and is reset after the first step of an episode:

    >>> import numpy as np
    >>> import rnnlens as rl
    >>> x = np.random.default_rng(0).normal(size=(4, 9, 1))
    >>> starts = np.zeros((4, 9), bool)
    >>> starts[:, 4] = True
    >>> def policy(x):
    ...     h, outputs = 0, []
    ...     for t in range(9):
    ...         h = h + x[:, t]
    ...         outputs.append(h)
    ...         h = h * (1 - starts[:, t, None])
    ...     return np.stack(outputs, axis=1)
    >>> rl.episode_resets(policy, x, starts).verdict
    'late'
    """
    inputs, flags = as_numbers("x", x), as_numbers("starts", starts).astype(bool)
    x = x if has_attribute(x, "dtype") else inputs
    if inputs.ndim < 2 or flags.shape != inputs.shape[:2] or len(inputs) < 2:
        raise InputError(
            "x and starts do not fit.",
            got=f"x of shape {inputs.shape}, starts of shape {flags.shape}",
            expected="x (sample, time, ...) of at least two samples, starts (sample, time)",
        )
    borders = _borders(inputs, flags, most)
    plain = _outputs(model, x, flags.shape)
    if not np.array_equal(plain, _outputs(model, x, flags.shape), equal_nan=True):
        raise UnsupportedError(
            "Two calls of the model with the same inputs differ.",
            got="other outputs at the second call",
            expected="a function of its inputs",
            hint="model.eval() for dropout; logits instead of sampled actions; the same first state at each call",
        )
    changes = _changes(model, x, inputs, plain, borders)
    allowed = _ROUNDING * np.finfo(plain.dtype).eps
    verdicts = [
        _VERDICTS.get(tuple(offset for offset, change in zip(OFFSETS, row, strict=True) if change <= allowed), "other")
        for row in changes
    ]
    found = set(verdicts)
    return EpisodeResets(
        verdicts[0] if len(found) == 1 and "other" not in found else "mixed",  # type: ignore[arg-type]
        xr.Dataset(
            {
                "sample": ("border", [border.sample for border in borders]),
                "step": ("border", [border.step for border in borders]),
                "verdict": ("border", verdicts),
                "change": (("border", "offset"), changes),
            },
            coords={"offset": [*OFFSETS]},
        ),
    )


def _borders(inputs: Array, flags: Array, most: int) -> list[_Border]:
    """Return at most ``most`` borders, evenly chosen, far enough from others to tell a reset from that of the next."""
    count, steps = flags.shape
    borders = []
    for sample in range(count):
        begins = [0, *(int(step) for step in np.flatnonzero(flags[sample]) if step), steps]
        for before, step, end in zip(begins, begins[1:-1], begins[2:], strict=False):
            room_after = 2 if end == steps else 3
            if step - before < 3 or end - step < room_after:
                continue
            differs = (inputs[:, step - 2 : step + 1] != inputs[sample, step - 2 : step + 1]).reshape(count, 3, -1)
            donors = np.flatnonzero(differs.any(axis=2).all(axis=1))
            if donors.size:
                borders.append(_Border(sample, step, end, int(donors[(donors > sample).argmax()])))
    if not borders:
        raise InputError(
            "No border between two episodes can be examined.",
            got=f"{int(flags[:, 1:].sum())} episode starts after the first step",
            expected="starts with three steps of an episode before and after, and other inputs in another sample",
            hint="longer sequences, or starts[:, 1:] = done[:, :-1]",
        )
    chosen = np.unique(np.linspace(0, len(borders) - 1, min(most, len(borders))).round().astype(int))
    return [borders[i] for i in chosen]


def _outputs(model: Callable[[Any], Any], x: Any, shape: tuple[int, ...]) -> Array:
    """Return the model's outputs in double precision or their own, (sample, time, output)."""
    result = model(x)
    result = result[0] if isinstance(result, tuple | list) and result else result
    outputs = to_numpy(result)
    if outputs.shape[:2] != shape or outputs.dtype.kind != "f":
        raise InputError(
            "The model returns no outputs of each step.",
            got=f"shape {outputs.shape}, {outputs.dtype}",
            expected=f"numbers of shape {(*shape, '...')}".replace("'", ""),
            hint="model=lambda x: policy(x, starts), returning logits (sample, time, action)",
        )
    return outputs.reshape(*shape, -1)


def _changes(model: Callable[[Any], Any], x: Any, inputs: Array, plain: Array, borders: list[_Border]) -> Array:
    """Return by how much outputs change if all inputs before a step are exchanged, (border, offset).

    Borders of different samples share a call.
    """
    changes = np.zeros((len(borders), len(OFFSETS)))
    largest = float(np.abs(plain).max()) or 1.0
    remaining = list(enumerate(borders))
    while remaining:
        in_one_call = {border.sample: (i, border) for i, border in reversed(remaining)}
        remaining = [pair for pair in remaining if pair not in in_one_call.values()]
        for column, offset in enumerate(OFFSETS):
            exchanged = inputs.copy()
            for sample, (_, border) in in_one_call.items():
                exchanged[sample, : border.step + offset] = inputs[border.donor, : border.step + offset]
            outputs = _outputs(model, converted_like(exchanged, x), plain.shape[:2])
            for sample, (i, border) in in_one_call.items():
                kept = slice(border.step + offset, border.end)
                changes[i, column] = float(np.abs(outputs[sample, kept] - plain[sample, kept]).max()) / largest
    return changes
