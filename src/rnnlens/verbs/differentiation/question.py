"""A question, "how does this number move with those tensors?", its answer, and the borders at which it is put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...adapters.protocol import Adapter, Batch, Port
from ...layout import dims_of
from ...recurrence.adjoint import Adjoint
from ...typing import Array
from ...vocabulary import FEATURE, SAMPLE
from ..axes import Axes
from ..inside import Half, Inside
from ..names import Catalogue, TensorName, uncalled
from ..weight_keys import dims_of_weight, sources
from .target import Target


@dataclass(frozen=True)
class Question:
    """What to differentiate with respect to what.

    Attributes
    ----------
    leaves
        The tensors that the target is made of: one, or the arguments of ``function``.
    function
        A callable of the leaves, on tensors of the framework; None where the target is the leaf itself.
    scale
        What the target is multiplied by while gradients flow, and gradients are divided by at the end: a loss scale.
    memory
        Bytes that per-sample gradients of weights may use at a time.
    every_output
        Whether ``function`` takes all that the model returns, and the leaves stand for that.
    seeds
        Cotangents of the leaves, where these are known already; the value of the target is then not asked for.
    """

    adapter: Adapter
    model: Any
    known: Catalogue
    leaves: tuple[TensorName, ...]
    function: Callable[..., Any] | None
    target: Target
    wrt: tuple[TensorName, ...]
    axes: Axes
    scale: float = 1.0
    memory: int = 2 * 1024**3
    every_output: bool = False
    seeds: tuple[Array, ...] | None = None


@dataclass
class Answer:
    """Gradients of one batch by tensor, None where no path leads there, and the names of their axes.

    ``swept`` has the sweeps that they were taken from, by layer: all that a certificate needs.
    ``weight``: how many samples the target was made of, where these are not all of the batch.
    """

    value: Array
    samples: int
    gradients: dict[TensorName, Array | None]
    dims: dict[TensorName, tuple[str, ...]]
    masks: dict[str, Array] = field(default_factory=dict)
    swept: dict[str, list[tuple[Half, Adjoint]]] = field(default_factory=dict)
    weight: int | None = None


class SeveralOutputs(Exception):  # noqa: N818 - no error, but what a run found out
    """The model, which does not say so beforehand, returned several tensors, and the question is about all of them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def repeatable(adapter: Adapter, seed: int | None, training: bool) -> int | None:
    """The seed to run with: a model that runs twice in training mode must draw the same both times."""
    return 0 if seed is None and training and not adapter.draws_again else seed


class Borders:
    """The ports at which the framework's differentiation starts and ends."""

    def __init__(self, question: Question, inside: Inside) -> None:
        self.question, self.inside = question, inside
        of = [port for leaf in question.leaves for port in self._below(leaf)]
        wrt = [port for name in question.wrt for port in self.above(name)]
        if self.through_outputs:
            outputs = [Port("output", index=i) for i in range(max(1, len(question.known.outputs)))]
            of, wrt = [*of, *outputs], [*wrt, *outputs]
        self.of, self.wrt = list(dict.fromkeys(of)), list(dict.fromkeys(wrt))

    @property
    def through_outputs(self) -> bool:
        """Whether the loss is taken apart by sample, at the outputs of the model."""
        return self.question.target.per_sample and self.question.leaves[0].what == "loss"

    def of_tensor(self, name: TensorName) -> list[Port]:
        """The ports that together are a tensor outside of recurrences: one, or one per direction."""
        info = self.question.known.recurrent.get(uncalled(name.layer))
        if name.what == "output" and info is not None and info.direction == "bidirectional":
            return [name.port("forward"), name.port("backward")]
        if self.inside.is_stepwise(name):
            return [Port(name.what, name.layer, name.index)]  # type: ignore[arg-type]
        return [name.port()]

    def weight_ports(self, name: TensorName) -> list[Port]:
        """The adapter's weights that a weight of ours is made of."""
        found = sources(self.question.known.weights[str(name.layer)])[name.key]
        return [Port("weight", name.layer, key=source.key) for source in found]

    def is_inside(self, name: TensorName) -> bool:
        """Whether our sweep, not the framework, reaches a tensor."""
        return is_inside(name, self.question.known) and not self.inside.is_stepwise(name)

    @staticmethod
    def _ending(port: Port) -> Port:
        """Of the last state of a layer called step by step: the port that has its total gradient."""
        return port if port.kind != "final_state" else Port("state", port.layer, port.index, key="ending")

    def _below(self, leaf: TensorName) -> list[Port]:
        if not self.is_inside(leaf):
            return self.of_tensor(leaf)
        return [port for half in self.inside.layer(leaf.layer) for port in half.below()]

    def above(self, name: TensorName) -> list[Port]:
        """Where gradients arrive that make up the one with respect to a tensor."""
        if name.what == "weight":
            return self.weight_ports(name)
        if not self.is_inside(name):
            return [self._ending(port) for port in self.of_tensor(name)]
        return [port for half in self.inside.layer(name.layer) for port in half.readers()]


def is_inside(name: TensorName, known: Catalogue) -> bool:
    """Whether our sweep, not the framework, reaches a tensor: states, gates, and the input of a recurrent layer."""
    if name.inside or name.what in ("initial_state", "final_state"):
        return True
    return name.what == "input" and name.layer is not None and uncalled(name.layer, known.recurrent) in known.recurrent


def is_outside(name: TensorName, known: Catalogue) -> bool:
    """Whether a tensor lies as the framework has it: an input or output of the model or of a plain layer."""
    if name.what not in ("input", "output"):
        return False
    return name.layer is None or uncalled(name.layer, known.recurrent) not in known.recurrent


def learn_axes(question: Question, batch: Batch) -> None:
    """Find out how the tensors lie that the question is about, or that its loss is taken apart at."""
    names = [*question.leaves, *question.wrt]
    ports = [name.port() for name in names if is_outside(name, question.known)]
    if question.target.per_sample and question.leaves[0].what == "loss":
        ports += [Port("output", index=i) for i in range(max(1, len(question.known.outputs)))]
    question.axes.learn(batch, ports)


def dims_for(name: TensorName, array: Array, known: Catalogue, per_sample: bool) -> tuple[str, ...]:
    """Names of the axes of a weight or of a tensor of a recurrent layer, or of its gradient."""
    if name.what == "loss" or array.ndim == 0:
        return ()
    if name.what == "weight":
        lead = (SAMPLE,) if per_sample else ()
        weights = known.weights[str(name.layer)]
        return lead + dims_of_weight(name.key, weights, array.ndim - len(lead))
    if name.what == "input":
        return dims_of(array.shape, last=FEATURE)
    info = known.recurrent.get(uncalled(name.layer, known.recurrent))
    both = info is not None and info.direction == "bidirectional"
    return dims_of(array.shape, bidirectional=both, gate=name.what in ("gates", "gate_preactivation"))
