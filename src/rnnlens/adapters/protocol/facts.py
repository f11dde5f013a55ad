"""What is known of a model without running it: its layers and their parts, its weights, how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...recurrence.cells import Cell
from ...typing import Array


@dataclass(frozen=True)
class LayerInfo:
    """One recurrent layer as found in a model; a row of ``rl.layers(model)``."""

    name: str
    kind: str
    cell: str
    units: int
    direction: Literal["forward", "backward", "bidirectional"]
    return_sequences: bool
    masked: bool | None = None
    stateful: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


#: What a layer does that a reader of its gradients has to know: look up rows, pass nothing where its input is negative,
#: leave out numbers at random.
Role = Literal["embedding", "relu", "dropout"]


@dataclass(frozen=True)
class Submodule:
    """One layer of a model, recurrent or not, that can be looked at by its name.

    ``dtype``: what it computes in, ``""`` where that is not known.
    """

    roles: frozenset[Role] = frozenset()
    dtype: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without running it.

    Attributes
    ----------
    submodules
        Its layers, by the name under which results show them.
    inputs, outputs
        Names of what the model takes and returns, in the order of the ports; empty where it does not name them.
    loss
        What the model carries to be trained with, as it was given; None where it carries none.
    optimizer
        What the optimizer that the model carries is called; ``""`` where it carries none.
    clipping
        How that optimizer clips gradients, ``"clipvalue"``, ``"clipnorm"`` or ``"global_clipnorm"``, and at what.
    clips_lookups_apart
        Whether it clips each looked-up row of an embedding by itself, before the rows of one id are added.
    loss_scale
        What training multiplies the loss by, so that small gradients do not vanish in half precision.
    tensors
        Names of single tensors that may be asked for beside the layers, as the framework has them.
    """

    submodules: Mapping[str, Submodule] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    loss: Any = None
    optimizer: str = ""
    clipping: tuple[str, float] | None = None
    clips_lookups_apart: bool = False
    loss_scale: float = 1.0
    tensors: Container[str] = frozenset()

    def having(self, role: Role) -> tuple[str, ...]:
        """Names of the submodules that have a role."""
        return tuple(name for name, submodule in self.submodules.items() if role in submodule.roles)


@dataclass
class LayerWeights:
    """The weights of one layer: by name, and as a known cell per direction where it is one.

    ``trainable``: whether the optimizer moves it. ``statistics``: those that the layer keeps for itself. ``tables``:
    those whose rows are looked up by integers.
    """

    values: dict[str, Array]
    trainable: dict[str, bool]
    cells: dict[str, Cell] = field(default_factory=dict)
    penalties: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    statistics: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Obstacle:
    """Why no gradient leads from one tensor to another, as the adapter reads it off the model.

    ``code`` is one word to test for, ``sentence`` what is the matter and where, ``remedy`` what to do instead.
    """

    code: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class WeightLocation:
    """Which of the framework's own weights a weight of ours is: its name, and how to lay out its gradient as ours.

    ``part`` tells weights apart that share one of the framework's; ``tied`` is True where the framework's weight has
    more than one name.
    """

    name: str
    take: Callable[[Array], Array]
    part: str = ""
    tied: bool = False


@dataclass(frozen=True)
class ChainLink:
    """One layer of a model that is a plain chain of well-known layers.

    It spares the time Jacobian from finding out what the layers between the recurrent ones do.

    ``kind``: ``"recurrent"`` (one direction, forward); ``"dense"``: activation(x @ kernel + bias) at every step;
    ``"same"``: the input unchanged; ``"table"``: an embedding of integers.
    """

    name: str
    kind: Literal["recurrent", "dense", "same", "table"]
    kernel: Array | None = None
    bias: Array | None = None
    activation: str = "linear"
