"""Experiments on a model and one batch: move a tensor, watch the target; what runs, what is masked, which relu is dead.

Each is made once, and only when a gradient is missing or zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .... import data
from ....adapters.protocol import Batch, CaptureRequest, Port
from ....autodiff.tensors import dtype_name, like
from ....errors import RnnlensError
from ....results.schema import to_host
from ....typing import Array
from ...inside import outputs_of, runs
from ...names import Catalogue, TensorName
from ...weight_keys import sources
from ..question import Part, Question
from ..target import Target
from .observe import observed_value

#: Relative sizes of nudges. Of the last two, a smooth target answers the larger one more, by about their ratio.
MUCH, LITTLE, LESS = 1.0, 1e-2, 1e-3

Answered = Literal["smoothly", "in jumps", "not", "unknown"]


class Trials:
    """Experiments on a model, a batch and a target to watch."""

    def __init__(self, question: Question, part: Part) -> None:
        self.question, self.part = question, part
        self.batch, self.target = part.batch, part.target
        #: Masks of all batches of a data set by layer, once they were read.
        self.masks_of_all: dict[str, Array] | None = None
        self._values: dict[str, Array] = {}
        self._answers: dict[tuple[str, Port], Answered] = {}
        self._runs: dict[str, bool] = {}

    def response(self, name: TensorName, question: Question | None = None, target: Target | None = None) -> Answered:
        """How a target answers to nudges of a tensor (or of the output of its layer, where it lies inside of one).

        The target is that of another ``question`` where one is given.
        """
        question, target = question or self.question, target or self.target
        port = nudged_port(name, question.known)
        key = (target.text, port)
        if key not in self._answers:
            self._answers[key] = self._experiment(port, question, target)
        return self._answers[key]

    def runs(self, layer: str) -> bool:
        """Whether a layer is called in this forward pass."""
        if layer not in self._runs:
            self._runs[layer] = runs(self.question.adapter, self.question.model, self.batch, layer)
        return self._runs[layer]

    @cached_property
    def masks(self) -> dict[str, Array]:
        """Masks of all recurrent layers, by node; of those that have one."""
        try:
            request = CaptureRequest(None, gradients=False, weight_grads=False)
            capture = self.question.adapter.capture(self.question.model, self._without_loss(), request)
        except RnnlensError:
            return {}
        return {call.layer: to_host(call.mask) for call in capture.calls if call.mask is not None}

    @cached_property
    def dead_relus(self) -> Mapping[str, int]:
        """Relus whose outputs are all exactly 0, and how many they are."""
        relus = self.question.known.facts.having("relu")
        found = outputs_of(self.question.adapter, self.question.model, self.batch, relus) if relus else {}
        return {name: int(output.size) for name, output in found.items() if output.size and not output.any()}

    def _experiment(self, port: Port, question: Question, target: Target) -> Answered:
        reduce = "sum" if target.per_sample and target.reduce is None else target.reduce
        part = Part(self.batch, replace(target, per_sample=False, reduce=reduce))
        if target.text not in self._values:
            self._values[target.text] = observed_value(question, part)
        moves = []
        for size in (MUCH, LITTLE, LESS):
            value = self._nudged_value(port, size, question, part)
            if value is None:
                return "unknown"
            moves.append(float(np.abs(value - self._values[target.text]).max()))
        much, little, less = moves
        if not much and not little:
            return "not"
        return "smoothly" if less and LITTLE / LESS / 3 < little / less < 3 * LITTLE / LESS else "in jumps"

    def _nudged_value(self, port: Port, size: float, question: Question, part: Part) -> Array | None:
        if port.kind == "input":
            moved = replace(part.batch, x=_moved_input(part.batch.x, port.index, size))
            return observed_value(question, replace(part, batch=moved))
        with question.adapter.perturbed_port(question.model, port, size) as possible:
            return observed_value(question, part) if possible else None

    def _without_loss(self) -> Batch:
        return replace(self.batch, y=None, loss=None, sample_weight=None, class_weight=None)


def nudged_port(name: TensorName, known: Catalogue) -> Port:
    """Where to move the model to see what depends on a tensor."""
    if name.what == "weight":
        return Port("weight", str(name.layer), key=sources(known.weights[str(name.layer)])[name.key][0].key)
    if name.layer is None:
        return Port("input", index=name.index)
    return Port("output", name.layer.partition("#")[0])


def _moved_input(x: Any, index: int, size: float) -> Any:
    """The batch with one of its inputs nudged, in a fixed random pattern; integers stay."""
    position = -1

    def move(leaf: Any) -> Any:
        nonlocal position
        position += 1
        if position != index or is_integer(leaf):
            return leaf
        array = to_host(leaf)
        spread = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) or 1.0
        moved = array + (size * spread * np.random.default_rng(0).normal(size=array.shape)).astype(array.dtype)
        return like(moved, leaf)

    return data.map_leaves(move, x)


def is_integer(leaf: Any) -> bool:
    """Whether an array holds ids or flags, by which nothing can be differentiated."""
    return not any(word in dtype_name(leaf) for word in ("float", "complex"))
