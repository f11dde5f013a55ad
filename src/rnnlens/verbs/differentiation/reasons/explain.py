"""Why there is no gradient, or why it is zero: a code, a sentence, and the call to make instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .... import data
from ....adapters.protocol import Batch
from ....errors import RnnlensError
from ....results.gradients import Reason
from ....typing import Array
from ....vocabulary import SAMPLE, TIME
from ...names import TensorName
from ...weight_keys import sources
from ..pull import answer
from ..question import Question
from ..target import Target
from .trials import Laboratory, dtype_of, is_integer, modules_of

#: Weights that a layer keeps for itself and no optimizer trains.
STATISTICS = ("moving_mean", "moving_variance")
#: By how much a target is scaled up to see whether its gradient was only too small for the dtype.
LIFT = 2.0**12


@dataclass
class Explanation:
    """Reasons by tensor: no gradient (or zeros throughout), and gradients to be read with care."""

    disconnected: dict[str, Reason] = field(default_factory=dict)
    flags: dict[str, Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(
    question: Question,
    batch: Batch,
    found: Mapping[TensorName, Array],
    dims: Mapping[TensorName, tuple[str, ...]],
    batches: Callable[[], Iterable[Batch]],
) -> Explanation:
    """Look at every tensor asked for: missing, zero throughout, zero in part, frozen.

    ``batch`` is the one that experiments are made on; ``batches`` reads all of them, for their masks.
    """
    result = Explanation()
    inquiry = _Inquiry(question, batch, batches)
    for name in question.wrt:
        grad = found.get(name)
        if grad is None or not np.any(grad):
            result.disconnected[name.text] = inquiry.why(name, exists=grad is not None)
            continue
        flag = inquiry.frozen(name) or inquiry.partly_masked(name, grad, dims[name])
        if flag is not None:
            result.flags[name.text] = flag
    return result


class _Inquiry:
    """One missing gradient after another, on one batch."""

    def __init__(self, question: Question, batch: Batch, batches: Callable[[], Iterable[Batch]]) -> None:
        self.question, self.batch, self.batches = question, batch, batches
        self.laboratory = Laboratory(question, batch)

    @property
    def of(self) -> str:
        """The target in words: a name in quotes, or what a callable is called."""
        text = self.question.target.text
        return text if text.startswith("<") else f'"{text}"'

    def why(self, name: TensorName, *, exists: bool) -> Reason:
        """The first cause that applies, from the most to the least specific."""
        causes = [self._integer_input, self._unused_layer]
        if exists:
            causes += [self._masked_out, self._underflow, self._relu_dead]
        for cause in causes:
            reason = cause(name)
            if reason is not None:
                return reason
        return self._by_experiment(name, exists=exists)

    def frozen(self, name: TensorName) -> Reason | None:
        """A weight that is not trained: its gradient is given all the same."""
        if name.what != "weight":
            return None
        weights = self.question.known.weights[str(name.layer)]
        if all(weights.trainable.get(source.key, True) for source in sources(weights)[name.key]):
            return None
        if name.key.rpartition("/")[2] in STATISTICS:
            sentence = f"{name.text} is a statistic that the layer keeps, not a weight that training moves."
            return Reason(
                name.text, "frozen", sentence, "rl.gradients(..., training=True), where the batch has its own"
            )
        sentence = f"{name.text} is frozen: this is its gradient, and training does not act on it."
        return Reason(name.text, "frozen", sentence, f"make {name.layer} trainable to train it")

    def partly_masked(self, name: TensorName, grad: Array, dims: tuple[str, ...]) -> Reason | None:
        """Steps at which the gradient is exactly 0 because they are masked."""
        if name.what == "weight" or dims[:2] != (SAMPLE, TIME):
            return None
        zero = ~np.any(grad.reshape(*grad.shape[:2], -1), axis=2)
        if not zero.any():
            return None
        alone = len(zero) == self.question.axes.samples(self.batch)
        for mask in (self.laboratory.masks if alone else self._all_masks).values():
            if mask.shape == zero.shape and not mask.all() and np.all(zero[~mask]):
                sentence = f"{int((~mask).sum())} of {mask.size} steps are masked: the gradient is exactly 0 there."
                return Reason(name.text, "masked_out", sentence, "g.where(mask) before taking means over time")
        return None

    @cached_property
    def _all_masks(self) -> dict[str, Array]:
        """Masks of all batches, by layer, where the layers mask at all."""
        parts: dict[str, list[Array]] = {layer: [] for layer in self.laboratory.masks}
        for batch in self.batches() if parts else ():
            for layer, mask in Laboratory(self.question, batch).masks.items():
                parts.setdefault(layer, []).append(mask)
        return {layer: np.concatenate(p) for layer, p in parts.items() if len({mask.shape[1:] for mask in p}) == 1}

    def _instead(self, **changed: str | None) -> str:
        """The call to make instead: the one that was made, with some arguments changed; None leaves one out."""
        target = self.question.target
        arguments: dict[str, str | None] = {
            "of": self.of if self.of.startswith('"') else "...",
            "at": str(dict(target.at)).replace("'", '"') if target.at else None,
            "reduce": f'"{target.reduce}"'
            if isinstance(target.reduce, str)
            else None
            if target.reduce is None
            else "...",
            "per_sample": "True" if target.per_sample else None,
            **changed,
        }
        given = "x, y" if arguments["of"] == '"loss"' else "x"
        return f"rl.gradients(model, {given}, {', '.join(f'{k}={v}' for k, v in arguments.items() if v is not None)})"

    def _integer_input(self, name: TensorName) -> Reason | None:
        leaves = data.leaves_of(self.batch.x)
        if name.what != "input" or name.layer is not None or name.index >= len(leaves):
            return None
        if not is_integer(leaves[name.index]):
            return None
        sentence = (
            f"{name.text} holds integers ({dtype_of(leaves[name.index])}): nothing can be differentiated by them."
        )
        tables = _embeddings(self.question)
        remedy = " or ".join(self._instead(wrt=f'"{layer}.output"') for layer in tables)
        return Reason(name.text, "integer_input", sentence, remedy or 'pass floats: x.astype("float32")')

    def _unused_layer(self, name: TensorName) -> Reason | None:
        layer = str(name.layer).partition("#")[0]
        if name.layer is None or self.laboratory.runs(layer):
            return None
        sentence = f"Layer {layer!r} was not called in this forward pass: nothing depends on it."
        return Reason(name.text, "unused_layer", sentence, f"call {layer!r} in the model, or leave it out of wrt=")

    def _masked_out(self, name: TensorName) -> Reason | None:
        """All steps of the target are masked, or all steps of all layers are."""
        masks = self.laboratory.masks
        for leaf in self.question.leaves:
            mask = masks.get(str(leaf.layer))
            if mask is None or leaf.what != "state":
                continue
            steps = np.atleast_1d(np.arange(mask.shape[1])[self.question.target.at.get(TIME, slice(None))])
            real = np.flatnonzero(mask.any(axis=0))
            if not mask[:, steps].any() and len(real):
                listing = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
                sentence = f"Every sample is masked at time {listing}: the state there is the one carried over."
                remedy = self._instead(at=f'{{"time": {int(real[0])}}}', wrt=f'"{name.text}"')
                return Reason(name.text, "masked_out", sentence, remedy)
        if masks and not any(mask.any() for mask in masks.values()):
            sentence = "Every step of every sample is masked: no input reaches any state."
            return Reason(name.text, "masked_out", sentence, "rl.trace(model, x), variable mask, to see what masks it")
        return None

    def _underflow(self, name: TensorName) -> Reason | None:
        """The gradient comes back once the target is scaled up."""
        dtype = _half_precision(self.question)
        if dtype is None:
            return None
        lifted = replace(self.question, wrt=(name,), scale=self.question.scale * LIFT)
        again = answer(lifted, self.batch).gradients[name]
        if again is None or not np.any(again):
            return None
        size = float(np.abs(again).max())
        sentence = f"The gradient underflows in {dtype}: its largest entry, {size:.1g}, became 0 on the way."
        remedy = "the same call on the model in float32; to train, a loss scale (LossScaleOptimizer, GradScaler)"
        return Reason(name.text, "underflow", sentence, remedy)

    def _relu_dead(self, name: TensorName) -> Reason | None:
        """A relu between the tensor and the target that lets nothing through on this batch."""
        found = next(((n, c) for n, c in self.laboratory.dead_relus.items() if self._lies_between(n, name)), None)
        if found is None:
            return None
        layer, count = found
        sentence = f"All {count} outputs of the relu {layer!r} are 0 on this batch: no gradient passes it."
        remedy = f'rl.trace(model, x, layers=["{layer}"]) shows it; a lower learning rate or a leaky relu revives it'
        return Reason(name.text, "relu_dead", sentence, remedy)

    def _lies_between(self, layer: str, name: TensorName) -> bool:
        """Whether the target moves with the output of a layer, and that has a path, a dead one, from the tensor."""
        output = TensorName(f"{layer}.output", "output", layer)
        if self.laboratory.response(output) == "not":
            return False
        target = Target(output.text, {}, "sum", per_sample=False)
        asked = replace(
            self.question, leaves=(output,), function=None, every_output=False, target=target, wrt=(name,), scale=1.0
        )
        try:
            grad = answer(asked, self.batch).gradients[name]
        except RnnlensError:
            return False
        return grad is not None and not np.any(grad)

    def _by_experiment(self, name: TensorName, *, exists: bool) -> Reason:
        """Move the tensor and see what the target does."""
        answered = self.laboratory.response(name)
        if answered == "smoothly" and not exists:
            sentence = f"{self.of} moves with {name.text}, but a stop_gradient or detach on the way hides it."
            remedy = f"{self._instead(wrt='<a tensor behind it>')}; remove it to train {name.layer or name.text!r}"
            return Reason(name.text, "stop_gradient", sentence, remedy)
        if answered in ("smoothly", "in jumps"):
            sentence = (
                f"{self.of} moves with {name.text} in jumps only: there is an argmax, a rounding, a comparison or a "
                "conversion to integers on the way."
            )
            before = self._instead(of='"<the layer before that>.output"', at=None, wrt=f'"{name.text}"')
            return Reason(name.text, "non_differentiable", sentence, before)
        if exists:
            sentence = f"A path leads from {name.text} to {self.of}, but the target does not move along it here."
            return Reason(name.text, "no_effect", sentence, "another batch, or reduce= with weights: a sum may cancel")
        return self._not_on_path(name)

    def _not_on_path(self, name: TensorName) -> Reason:
        """Say which branch was cut: what the tensor does move, and the target does not see."""
        remedy = self._instead(of='"output"', at=None, wrt=f'"{name.text}"')
        if name.layer is None:
            sentence = f"{self.of} does not depend on {name.text}."
            return Reason(name.text, "not_on_path", sentence, remedy)
        output = replace(self.question.target, text="output", at={}, reduce="norm", per_sample=False)
        whole = replace(
            self.question, leaves=(TensorName("output", "output"),), function=None, target=output, scale=1.0
        )
        if self.question.target.text not in ("output", "loss") and self.laboratory.response(name, whole) != "not":
            sentence = f"{name.text} moves the output, not {self.of}: the branch from there to the output was cut off."
            return Reason(name.text, "not_on_path", sentence, remedy)
        sentence = f"{self.of} does not depend on {name.text}; nor does the output of the model on this batch."
        return Reason(name.text, "not_on_path", sentence, f"leave it out of wrt=, or see how {name.layer!r} is used")


def _embeddings(question: Question) -> list[str]:
    """Layers that turn ids into vectors."""
    modules = modules_of(question.model)
    layers = [*question.known.weights]
    return [layer for layer in layers if "Embedding" in type(modules.get(layer)).__name__]


def _half_precision(question: Question) -> str | None:
    """The half-precision dtype that a model computes in, if it does."""
    layers = [question.model, *modules_of(question.model).values()]
    found = [str(getattr(layer, "compute_dtype", "")) for layer in layers]
    found.append(str(question.adapter.provenance(question.model).get("dtype", "")))
    return next((dtype for dtype in found if dtype in ("float16", "bfloat16")), None)
