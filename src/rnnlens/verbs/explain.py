"""Why there is no gradient, or why it is zero: in words, found by experiment, with the call to make instead.

What the framework will not say is found out by moving the tensor and watching the target: a little, much less, and a lot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from .. import data
from ..adapters.protocol import Batch, CaptureRequest, Port
from ..errors import RnnlensError
from ..results.gradients import Reason
from ..results.schema import plain
from ..typing import Array
from ..vocabulary import SAMPLE, TIME
from .names import Catalogue, TensorName
from .observe import observed_value
from .question import Question, answer
from .weight_keys import sources

#: Relative sizes of nudges: a smooth target answers the first about as much larger as it is larger than the second.
LITTLE, LESS, MUCH = 1e-2, 1e-3, 1.0
#: Weights that a layer keeps for itself and no optimizer trains.
STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var")

Answered = Literal["smoothly", "in jumps", "not", "unknown"]


@dataclass
class Explanation:
    """Reasons by tensor: no gradient (or zeros throughout), and gradients to be read with care."""

    disconnected: dict[str, Reason] = field(default_factory=dict)
    flags: dict[str, Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(
    question: Question, batch: Batch, found: Mapping[TensorName, Array], dims: Mapping[TensorName, tuple[str, ...]]
) -> Explanation:
    """Look at every tensor asked for: missing, zero throughout, zero in part, frozen."""
    result = Explanation()
    inquiry = _Inquiry(question, batch)
    for name in question.wrt:
        grad = found.get(name)
        if grad is None or not np.any(grad):
            result.disconnected[name.text] = inquiry.why(name, exists=grad is not None)
            continue
        masked = inquiry.partly_masked(name, grad, dims[name])
        frozen = inquiry.frozen(name)
        for reason in (masked, frozen):
            if reason is not None:
                result.flags[name.text] = reason
    return result


class _Inquiry:
    """Experiments on one batch, each made once and only when a tensor calls for it."""

    def __init__(self, question: Question, batch: Batch) -> None:
        self.question, self.batch = question, batch
        self._base: dict[str, Array] = {}
        self._masks: dict[str, Array] | None = None
        self._dead: str | None | Literal[False] = False
        self._answers: dict[Any, Answered] = {}
        self._called: dict[str, bool] = {}

    @property
    def of(self) -> str:
        """The target, as the user named it."""
        return repr(self.question.target.text).replace("'", '"')

    def why(self, name: TensorName, *, exists: bool) -> Reason:
        """The first cause that applies, from the most to the least specific."""
        causes = [self._masked_out, self._underflow, self._relu_dead] if exists else []
        for cause in (self._integer_input, self._unused_layer, *causes):
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
            sentence = f"{name.text} is a statistic that the layer keeps, not a weight that is trained."
            return Reason(
                name.text, "frozen", sentence, "training=True for gradients through the batch's own statistics"
            )
        sentence = f"{name.text} is frozen: this is its gradient, and training does not act on it."
        return Reason(name.text, "frozen", sentence, f"make {name.layer} trainable, or leave it out of wrt=")

    def partly_masked(self, name: TensorName, grad: Array, dims: tuple[str, ...]) -> Reason | None:
        """Steps at which the gradient is exactly 0 because they are masked."""
        if name.what == "weight" or dims[:2] != (SAMPLE, TIME):
            return None
        zero = ~np.any(grad.reshape(*grad.shape[:2], -1), axis=2)
        if not zero.any():
            return None
        rows = data.len_of(self.batch.x)
        for mask in self._all_masks().values():
            if mask.shape == zero[:rows].shape and not mask.all() and np.all(zero[:rows][~mask]):
                sentence = f"{int((~mask).sum())} of {mask.size} steps are masked: the gradient is exactly 0 there."
                return Reason(name.text, "masked_out", sentence, "average over unmasked steps only, not over all")
        return None

    def _integer_input(self, name: TensorName) -> Reason | None:
        if name.what != "input" or name.layer is not None:
            return None
        leaves = data._leaves(self.batch.x)
        if name.index >= len(leaves) or not _is_integer(leaves[name.index]):
            return None
        tables = _embeddings(self.question)
        sentence = f"{name.text} holds integers ({_dtype(leaves[name.index])}): nothing can be differentiated by them."
        remedy = " or ".join(f'wrt="{layer}.output"' for layer in tables) or 'x.astype("float32")'
        return Reason(name.text, "integer_input", sentence, remedy)

    def _unused_layer(self, name: TensorName) -> Reason | None:
        if name.layer is None or self._was_called(name.layer.partition("#")[0]):
            return None
        layer = name.layer.partition("#")[0]
        sentence = f"Layer {layer!r} was not called in this forward pass: nothing depends on it."
        return Reason(name.text, "unused_layer", sentence, f"call {layer} in the model, or leave it out of wrt=")

    def _was_called(self, layer: str) -> bool:
        """Whether the layer ran in this forward pass; looked at once per layer."""
        if layer not in self._called:
            self._called[layer] = self._runs(layer)
        return self._called[layer]

    def _runs(self, layer: str) -> bool:
        request = CaptureRequest((layer,), inputs=False, gradients=False, weight_grads=False)
        try:
            capture = self.question.adapter.capture(self.question.model, self._without_loss(), request)
        except RnnlensError:
            return False
        return bool(capture.calls or capture.plain)

    def _masked_out(self, name: TensorName) -> Reason | None:
        """All steps of the target are masked, or all steps of all layers are."""
        masks = self._all_masks()
        for leaf in self.question.leaves:
            mask = masks.get(str(leaf.layer))
            if mask is None or leaf.what != "state":
                continue
            time = self.question.target.at.get(TIME, slice(None))
            steps = np.atleast_1d(np.arange(mask.shape[1])[time])
            if not mask[:, steps].any():
                listing = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
                sentence = f"Every sample is masked at time {listing}: the state there was carried over from before."
                return Reason(
                    name.text,
                    "masked_out",
                    sentence,
                    f'at={{"time": {self._first_real(mask)}}}, a step that is not masked',
                )
        if masks and not any(mask.any() for mask in masks.values()):
            sentence = "Every step of every sample is masked: no input reaches any state."
            return Reason(name.text, "masked_out", sentence, "look at the mask: rl.trace(model, x), variable mask")
        return None

    @staticmethod
    def _first_real(mask: Array) -> Any:
        real = np.flatnonzero(mask.any(axis=0))
        return int(real[0]) if len(real) else "..."

    def _underflow(self, name: TensorName) -> Reason | None:
        """The gradient comes back once the target is scaled up."""
        dtype = _coarse_dtype(self.question)
        if dtype is None:
            return None
        scale = self.question.scale * 2.0**12
        again = answer(replace(self.question, wrt=(name,), scale=scale), self.batch).gradients[name]
        if again is None or not np.any(again):
            return None
        size = float(np.abs(again).max())
        sentence = f"The gradient underflows in {dtype}: its largest entry is {size:.1g} and became 0 on the way."
        remedy = "the same call with the model in float32, or train with a loss scale (keras.optimizers.LossScaleOptimizer, torch.amp.GradScaler)"
        return Reason(name.text, "underflow", sentence, remedy)

    def _relu_dead(self, name: TensorName) -> Reason | None:
        """A relu that lets nothing through on this batch."""
        if self._dead is False:
            self._dead = self._dead_relu()
        if self._dead is None:
            return None
        layer, count = self._dead.rsplit(" ", 1)
        sentence = f"All {count} outputs of the relu {layer!r} are 0 on this batch, so no gradient passes it."
        return Reason(
            name.text,
            "relu_dead",
            sentence,
            f'rl.trace(model, x, layers=["{layer}"]) to see its output; a lower learning rate or leaky_relu to revive it',
        )

    def _dead_relu(self) -> str | None:
        """Name of a relu layer whose outputs are all exactly 0, and how many they are."""
        layers = tuple(self.question.known.plain) or tuple(_modules(self.question.model))
        if not layers:
            return None
        request = CaptureRequest(layers, inputs=False, gradients=False, weight_grads=False)
        try:
            capture = self.question.adapter.capture(self.question.model, self._without_loss(), request)
        except RnnlensError:
            return None
        for call in [*capture.plain, *capture.calls]:
            output = plain(call.output)
            if output.size and not output.any() and _is_relu(self.question.model, call.layer.partition("#")[0]):
                return f"{call.layer} {output.size}"
        return None

    def _by_experiment(self, name: TensorName, *, exists: bool) -> Reason:
        answered = self._response(name, self.question)
        if answered == "smoothly" and not exists:
            sentence = f"{self.of} moves with {name.text}, and a stop_gradient (detach) on the way hides it from differentiation."
            return Reason(
                name.text,
                "stop_gradient",
                sentence,
                f"remove the stop_gradient, or ask with respect to a tensor behind it",
            )
        if answered in ("smoothly", "in jumps"):
            sentence = (
                f"{self.of} moves with {name.text} only in jumps: there is an argmax, a rounding, a comparison or "
                "a conversion to integers on the way."
            )
            return Reason(
                name.text,
                "non_differentiable",
                sentence,
                "of= a tensor before that operation, such as the probabilities before an argmax",
            )
        if exists:
            sentence = (
                f"A path leads from {name.text} to {self.of}, and on this batch the target does not move along it."
            )
            return Reason(
                name.text, "no_effect", sentence, "another batch, or reduce= with weights: parts may cancel in a sum"
            )
        return self._not_on_path(name)

    def _not_on_path(self, name: TensorName) -> Reason:
        cut = f"what lies behind {self.of} was cut off when that was chosen"
        if name.what == "output" and name.layer is None:
            sentence = f"{name.text} is not on the path: {cut}."
            return Reason(name.text, "not_on_path", sentence, 'of="output" or of="loss"')
        whole = replace(
            self.question,
            leaves=(TensorName("output", "output"),),
            function=None,
            target=replace(self.question.target, text="output", at={}, reduce="norm", per_sample=False),
            scale=1.0,
        )
        behind = (
            ""
            if self._response(name, whole) == "not"
            else f"{name.text} moves the model's output, and not {self.of}: {cut}."
        )
        sentence = behind or f"{name.text} moves neither {self.of} nor the model's output on this batch."
        remedy = (
            'of="output" or of="loss"'
            if behind
            else f"leave it out of wrt=, or look at how {name.layer or 'it'} is used in the model"
        )
        return Reason(name.text, "not_on_path", sentence, remedy)

    def _response(self, name: TensorName, question: Question) -> Answered:
        """How a target answers to nudges of a tensor (or of the output of its layer, where it lies inside of one)."""
        port = _nudged_port(name, question.known)
        key = (question.target.text, port)
        if key not in self._answers:
            self._answers[key] = self._experiment(port, question)
        return self._answers[key]

    def _experiment(self, port: Port, question: Question) -> Answered:
        asked = replace(question, target=replace(question.target, per_sample=False, reduce=_total(question)))
        if question.target.text not in self._base:
            self._base[question.target.text] = observed_value(asked, self.batch)
        base, moves = self._base[question.target.text], []
        for size in (MUCH, LITTLE, LESS):
            value = self._nudged_value(port, size, asked)
            if value is None:
                return "unknown"
            moves.append(float(np.abs(value - base).max()))
            if size == MUCH and not moves[0]:
                return "not"
        _, little, less = moves
        return "smoothly" if less and LITTLE / LESS / 3 < little / less < 3 * LITTLE / LESS else "in jumps"

    def _nudged_value(self, port: Port, size: float, asked: Question) -> Array | None:
        if port.kind == "input":
            return observed_value(asked, replace(self.batch, x=_moved_input(self.batch.x, port.index, size)))
        adapter: Any = self.question.adapter
        with adapter.nudged(self.question.model, port, size) as possible:
            return observed_value(asked, self.batch) if possible else None

    def _all_masks(self) -> dict[str, Array]:
        """Masks of all recurrent layers, by node; of those that have one."""
        if self._masks is None:
            try:
                request = CaptureRequest(None, gradients=False, weight_grads=False)
                capture = self.question.adapter.capture(self.question.model, self._without_loss(), request)
                self._masks = {c.layer: plain(c.mask) for c in capture.calls if c.mask is not None}
            except RnnlensError:
                self._masks = {}
        return self._masks

    def _without_loss(self) -> Batch:
        return replace(self.batch, y=None, loss=None, sample_weight=None, class_weight=None)


def _total(question: Question) -> Any:
    """A reduction for experiments: that of the question, or none for one number."""
    target = question.target
    return "sum" if target.per_sample and target.reduce is None else target.reduce


def _nudged_port(name: TensorName, known: Catalogue) -> Port:
    if name.what == "weight":
        return Port("weight", str(name.layer), key=sources(known.weights[str(name.layer)])[name.key][0].key)
    if name.layer is None:
        return Port("input", index=name.index)
    return Port("output", name.layer.partition("#")[0])


def _moved_input(x: Any, index: int, size: float) -> Any:
    """The batch with one of its inputs nudged."""
    seen = -1

    def move(leaf: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen != index or _is_integer(leaf):
            return leaf
        array = plain(leaf)
        spread = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) or 1.0
        moved = array + (size * spread * np.random.default_rng(0).normal(size=array.shape)).astype(array.dtype)
        return leaf.new_tensor(moved) if hasattr(leaf, "new_tensor") else moved

    return data._map(move, x)


def _is_integer(leaf: Any) -> bool:
    return not any(word in _dtype(leaf) for word in ("float", "complex"))


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", np.asarray(leaf).dtype)).removeprefix("torch.")


def _embeddings(question: Question) -> list[str]:
    """Layers that turn ids into vectors."""
    kinds = {name: type(module).__name__ for name, module in _modules(question.model).items()}
    return [
        layer
        for layer, w in question.known.weights.items()
        if "embeddings" in w.values or "Embedding" in kinds.get(layer, "")
    ]


def _modules(model: Any) -> dict[str, Any]:
    """Submodules of a torch model by path; of a Keras model its layers by name."""
    if hasattr(model, "named_modules") and not hasattr(model, "get_layer"):
        return {name: module for name, module in model.named_modules() if name}
    return {str(layer.name): layer for layer in getattr(model, "layers", ())}


def _is_relu(model: Any, name: str) -> bool:
    layer = _modules(model).get(name)
    activation = getattr(layer, "activation", None) or getattr(layer, "nonlinearity", None)
    words = f"{type(layer).__name__} {getattr(activation, '__name__', activation)}".lower()
    return "relu" in words


def _coarse_dtype(question: Question) -> str | None:
    """The half-precision dtype that a model computes in, if it does."""
    policy = getattr(getattr(question.model, "dtype_policy", None), "compute_dtype", None)
    dtype = str(policy or question.adapter.provenance(question.model).get("dtype", ""))
    return dtype if dtype in ("float16", "bfloat16") else None
