"""``EpisodeResets``: whether the state of a policy is reset where an episode begins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import xarray as xr

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
