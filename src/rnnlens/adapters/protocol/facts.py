"""Facts about a model that need no run: layers and their parts, weights, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ...errors import UnsupportedError
from ...layout import Layout
from ...recurrence.cells import Cell
from ...typing import Array
from .data import Batch, Port


@dataclass(frozen=True)
class LayerInfo:
    """One recurrent layer of a model; a row of ``rl.layers(model)``.

    ``masked``: whether a mask reaches the layer; False in a framework without masks; None if it depends on the data.
    ``state_axes``: names and sizes of the axes of a whole-sequence layer's state; empty for all other layers.
    ``states``: names of a custom cell's states; empty while they are not known, and for cells that have their own.
    """

    name: str
    kind: str
    cell: str
    units: int
    direction: Literal["forward", "backward", "bidirectional"]
    return_sequences: bool
    masked: bool | None = None
    stateful: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    state_axes: tuple[tuple[str, int], ...] = ()
    states: tuple[str, ...] = ()

    @property
    def is_sequence(self) -> bool:
        """Whether one call of the layer runs all steps of a linear recurrence: it has no step function."""
        return bool(self.state_axes)


#: Property of a layer that affects its gradients: it looks up rows, returns 0 for negative inputs, or drops values at
#: random.
Role = Literal["embedding", "relu", "dropout"]


@dataclass(frozen=True)
class Submodule:
    """One layer of a model, recurrent or not, that a user can select by its name.

    ``dtype``: dtype of its computation, ``""`` if not known.
    """

    roles: frozenset[Role] = frozenset()
    dtype: str = ""


@dataclass
class ModelFacts:
    """Facts about a model, alone and with a batch, that need no run; subclasses compute them when they are read.

    Every attribute and method has a default that is correct for any framework, usually "not known".

    Parameters
    ----------
    model
        The model.
    batch
        Data and loss, for the facts that need them.

    Attributes
    ----------
    submodules
        Layers of the model, by the name that results use.
    inputs, outputs
        Names of the model's inputs and outputs, in the order of the ports; empty if the model does not name them.
    arguments
        Names of the arguments of a model that is a function, for inputs that are passed by position; else empty.
    loss
        The loss that the model was compiled with, as the user passed it; None if there is none.
    has_own_loss
        Whether the model has a loss that needs no target.
    optimizer
        Name of the optimizer that the model was compiled with; ``""`` if there is none.
    clipping
        Kind of gradient clipping of that optimizer (``"clipvalue"``, ``"clipnorm"`` or ``"global_clipnorm"``) and its
        threshold.
    clips_lookups_apart
        Whether it clips each looked-up row of an embedding separately, before rows of the same id are added.
    loss_scale
        Factor by which training multiplies the loss, so that small gradients do not underflow in half precision.
    tensors
        Names of single tensors that a request may use besides the layers, as in the framework.
    compiles
        Whether a run whose cotangents are known computes values and gradients in one compiled pass. Later batches of a
        data set take it then. Otherwise all batches are swept, and give the numbers of single calls.
    framework
        Name of the framework.
    """

    model: Any
    batch: Batch | None = None

    submodules: ClassVar[Mapping[str, Submodule]] = {}
    inputs: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[Any] = None
    has_own_loss: ClassVar[bool] = False
    optimizer: ClassVar[str] = ""
    clipping: ClassVar[tuple[str, float] | None] = None
    clips_lookups_apart: ClassVar[bool] = False
    loss_scale: ClassVar[float] = 1.0
    tensors: ClassVar[Container[str]] = frozenset()
    compiles: ClassVar[bool] = False
    framework = ""

    @property
    def provenance(self) -> Mapping[str, str]:
        """Framework, version, engine, adapter, dtype and device as plain strings."""
        return {"framework": self.framework, "engine": self.framework, "adapter": self.framework}

    def having(self, role: Role) -> tuple[str, ...]:
        """Return the names of the submodules that have a role."""
        return tuple(name for name, submodule in self.submodules.items() if role in submodule.roles)

    def reduction(self, loss: Any) -> str | None:
        """Return how a loss reduces over samples, by the loss's own name such as ``"mean"``.

        Returns None if it has no such name. ``loss`` None selects the model's own loss; this default then
        returns None.
        """
        reduction = getattr(loss, "reduction", None)
        return None if reduction is None else str(reduction)

    def layouts(self, x: Any) -> Mapping[Port, Layout]:
        """Return the layouts of tensors whose steps the model's structure shows, where the convention has none.

        Such tensors are a film, or an image that is read column by column; ``x`` is the input of the model.
        """
        return {}

    def weight_location(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find by name alone the framework weight behind ``key`` of a layer; None if there is none."""
        return None

    def chain(self, *, training: bool) -> list[ChainLink] | None:
        """Return the layers from input to output if they form one plain chain of well-known layers; None otherwise."""
        return None

    def subnetwork(self, of: Port, wrt: Port) -> Callable[[Array], tuple[Array, Callable[[Array], list[Array]]]] | None:
        """Return a function that runs the user's own layers from tensor ``wrt`` to tensor ``of`` alone.

        Like ``differentiate``, it maps an array to a value and a pull-back of cotangents. It runs in inference mode and
        without code of rnnlens in between. None if the model cannot be split like that.
        """
        return None

    def combination(self) -> str | None:
        """Return how losses of equally large batches combine to that of the data set: ``"mean"``, ``"sum"`` or None.

        None means that it is not known.
        """
        return None

    def ignores_weight_zero(self) -> bool:
        """Return whether a sample of weight zero adds nothing to the loss, and a mean still divides by all samples."""
        return False

    def mixes_samples(self, *, training: bool) -> str | None:
        """Return the name of a layer that uses statistics of its batch; None if there is none; ``"?"`` if not known."""
        return "?"

    def find_obstacle(self, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """Return why no gradient path leads from ``of`` to ``wrt``, if the structure of the model shows the reason.

        Called before any experiment. None if an experiment has to find the reason.
        """
        return None

    def optimizer_step(
        self, optimizer: Any, gradients: Mapping[str, Array | None]
    ) -> Mapping[str, WeightChange] | None:
        """Step a copy of an optimizer by ``gradients``; return the trained weights by the framework's names.

        The names are those of ``ReferenceRun.weight_grads``. The model, its weights and the optimizer stay as they are.
        None if ``optimizer`` is None and the model has none of its own.

        Raises
        ------
        UnsupportedError
            If the adapter knows no optimizers, or this one cannot take a step from gradients alone.
        """
        if optimizer is None:
            return None
        hint = "leave optimizer= out"
        got = self.provenance["framework"]
        raise UnsupportedError("Optimizers of this framework are not read.", got=got, hint=hint)


@dataclass
class LayerWeights:
    """Weights of one layer: by name, and as one known cell per direction if the layer is a known cell.

    ``trainable``: whether the optimizer changes a weight. ``statistics``: names of statistics that the layer updates
    itself. ``tables``: names of weights whose rows are looked up by integers. ``uncounted``: names of weights that a
    norm over all variables leaves out: those that an earlier layer has too (tied weights), and those that are computed
    from variables, such as by torch's ``weight_norm``.
    """

    values: dict[str, Array]
    trainable: dict[str, bool]
    cells: dict[str, Cell] = field(default_factory=dict)
    penalties: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    statistics: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    uncounted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Obstacle:
    """Reason, found by the adapter in the model's structure, why no gradient leads from one tensor to another.

    ``code`` is one word for tests, ``sentence`` the description of the cause, ``remedy`` the suggested action.
    """

    code: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class WeightLocation:
    """The framework weight behind a weight of rnnlens: its name, and the function that reorders its gradient.

    ``take`` maps the gradient in ``ReferenceRun.weight_grads`` to the layout of rnnlens; of a
    :class:`RunByPorts` it returns it unchanged. ``part`` distinguishes weights of rnnlens that share one framework
    weight. ``tied`` is True if the framework's weight has more than one name.
    """

    name: str
    take: Callable[[Array], Array]
    part: str = ""
    tied: bool = False


@dataclass(frozen=True)
class WeightChange:
    """A trained weight before and after one step of an optimizer; ``after`` is None if the optimizer has not got it."""

    before: Array
    after: Array | None


@dataclass(frozen=True)
class ChainLink:
    """One layer of a model that is a plain chain of well-known layers.

    With it, the time Jacobian needs no experiment for the layers between the recurrent ones.

    ``kind``: ``"recurrent"`` (one direction, forward); ``"dense"``: activation(x @ kernel + bias) at every step, the
    activation alone without a kernel; ``"same"``: the input unchanged; ``"table"``: an embedding of integers;
    ``"step"``: one step of the input, number ``step``.
    ``name``: the layer; empty for an operation that no layer performs.
    ``is_state``: the step was read from the final state, which equals the last output.
    ``axes``: roles of the axes of what the layer returns; empty for samples first, then time.
    """

    name: str
    kind: Literal["recurrent", "dense", "same", "table", "step"]
    kernel: Array | None = None
    bias: Array | None = None
    activation: str = "linear"
    step: int = 0
    is_state: bool = False
    axes: tuple[str, ...] = ()
