"""Where the tensors of a question are met: by the framework's own differentiation, or by a sweep of ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...adapters.protocol import Port
from ..inside import Inside
from ..names import Catalogue, TensorName, uncalled
from ..weight_keys import sources
from .question import Part, Question


@dataclass(frozen=True)
class Place:
    """Where one tensor is met.

    Attributes
    ----------
    swept
        A sweep of ours reaches it: no tensor of the framework stands for it.
    free
        It lies as the framework has it, samples anywhere: an input or output of the model or of a plain layer.
    stepwise
        It is a state of a cell that the user's own loop calls: the framework has it, at every step.
    at
        The ports that together are the tensor: one, or one per direction; none where it is swept.
    below
        Where differentiation goes on from it, towards the inputs of the model.
    above
        Where the gradients arrive that make up the one with respect to it.
    """

    name: TensorName
    swept: bool
    free: bool
    stepwise: bool
    at: tuple[Port, ...]
    below: tuple[Port, ...]
    above: tuple[Port, ...]


@dataclass(frozen=True)
class Plan:
    """What an answer to a question on one batch takes.

    Attributes
    ----------
    leaves
        Where the target starts, tensor by tensor.
    wrt
        Where the gradients end.
    outputs
        The outputs of the model, where the loss is taken apart by sample at them.
    """

    leaves: tuple[Place, ...]
    wrt: tuple[Place, ...]
    outputs: tuple[Port, ...] = ()

    @cached_property
    def starts(self) -> list[Port]:
        """Where the framework's differentiation starts."""
        return list(dict.fromkeys([*(port for place in self.leaves for port in place.below), *self.outputs]))

    @cached_property
    def ends(self) -> list[Port]:
        """Where the framework's differentiation ends."""
        return list(dict.fromkeys([*(port for place in self.wrt for port in place.above), *self.outputs]))

    @cached_property
    def weights(self) -> dict[TensorName, tuple[Port, ...]]:
        """The weights asked about, each with the adapter's weights that it is made of."""
        return {place.name: place.above for place in self.wrt if place.name.what == "weight"}

    @cached_property
    def activations(self) -> tuple[Place, ...]:
        """All other tensors asked about."""
        return tuple(place for place in self.wrt if place.name.what != "weight")

    @property
    def free(self) -> list[Port]:
        """Tensors whose axes have to be found out."""
        places = [*self.leaves, *self.wrt]
        return [*(place.name.port() for place in places if place.free), *self.outputs]


def plan(question: Question, part: Part, inside: Inside) -> Plan:
    """Where every tensor of the question is met on one batch, whose recurrences were looked into."""
    outputs: tuple[Port, ...] = ()
    if part.target.per_sample and question.leaves[0].what == "loss":
        outputs = tuple(Port("output", index=i) for i in range(max(1, len(question.known.outputs))))
    leaves = tuple(_place(name, question.known, inside) for name in question.leaves)
    return Plan(leaves, tuple(_place(name, question.known, inside) for name in question.wrt), outputs)


def layers_inside(question: Question) -> list[str]:
    """The recurrent layers that have to be looked into."""
    names = [*question.leaves, *question.wrt]
    return [str(name.layer) for name in names if question.known.is_inside(name)]


def _place(name: TensorName, known: Catalogue, inside: Inside) -> Place:
    stepwise = inside.is_stepwise(name)
    swept = known.is_inside(name) and not stepwise
    free = known.is_free(name)
    if name.what == "weight":
        found = sources(known.weights[str(name.layer)])[name.key]
        ports = tuple(Port("weight", name.layer, key=source.key) for source in found)
        return Place(name, swept, free, stepwise, ports, ports, ports)
    if swept:
        halves = inside.layer(name.layer)
        below = tuple(port for half in halves for port in half.below())
        return Place(name, swept, free, stepwise, (), below, tuple(port for half in halves for port in half.readers()))
    at = _ports(name, known, stepwise)
    return Place(name, swept, free, stepwise, at, at, tuple(_total(port) for port in at))


def _ports(name: TensorName, known: Catalogue, stepwise: bool) -> tuple[Port, ...]:
    """The ports that together are a tensor of the framework: one, or one per direction."""
    info = known.recurrent.get(uncalled(name.layer))
    if name.what == "output" and info is not None and info.direction == "bidirectional":
        return (name.port("forward"), name.port("backward"))
    if stepwise:
        return (Port(name.what, name.layer, name.index),)  # type: ignore[arg-type]
    return (name.port(),)


def _total(port: Port) -> Port:
    """Of the last state of a layer called step by step: the port that has its total gradient."""
    return port if port.kind != "final_state" else Port("state", port.layer, port.index, key="ending")
