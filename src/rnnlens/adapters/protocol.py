"""The contract between a deep-learning framework and rnnlens.

An adapter turns a model and a batch into plain arrays; everything that rnnlens knows about recurrence happens on those
arrays, outside the adapter. What every method leaves behind in the user's model, process and random state: nothing,
also after an exception or an interrupt.

Conventions for every array named here:

* order: sample first, then time: ``(sample, time, feature)``. Time is chronological: index 0 is the first input step,
  also for layers that run backwards (their outputs are turned round by the adapter).
* gates in the order of :data:`rnnlens.vocabulary.GATES`, also in kernels, whatever the framework's own order.
* kind: NumPy arrays, or the framework's own where they follow the array-API standard and should stay on their device
  (torch). Never attached to a graph, never a view that the user could see change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..layout import Layout
from ..recurrence.cells import KnownCell
from ..recurrence.cells.custom import StepCell
from ..typing import Array


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


@dataclass
class Batch:
    """What one forward pass is fed: the user's data, unchanged, and how to run it.

    ``loss`` is None (the compiled loss where the framework has one), or a callable, or a name that the framework knows.
    ``initial_state`` maps a layer name to the state to start from.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    loss: Any = None
    training: bool = False
    initial_state: Mapping[str, Sequence[Any]] | None = None
    seed: int | None = None


@dataclass
class RecurrentCall:
    """What one direction of one call of one recurrent layer did in a forward pass, and what came back from above.

    Attributes
    ----------
    layer
        Name of the node in the result: ``"lstm"``; ``"lstm#0"``, ``"lstm#1"`` for a layer that was called twice;
        ``"encoder/lstm"`` inside a nested model.
    direction
        ``"backward"``: the recurrence runs from the last step to the first. The arrays are chronological all the same.
    bidirectional
        True where this call is one half of a bidirectional layer; its sibling has the same ``layer``.
    cell
        The equations and weights of a known cell, or a :class:`StepCell` to be asked step by step.
    input : (sample, time, feature)
    mask : (sample, time) of bool, or None
    initial_state : one (sample, unit) array per state
    output : (sample, time, unit), or (sample, unit) where the layer returns its last output only
        Before a bidirectional layer merges its halves.
    output_from_state : (sample, time) of bool, or None for "everywhere"
        Where y_t moves with the state after step t. False where the framework returns a constant (zeros at padding).
    masked_output
        What the layer returns at a masked step: the ``"state"`` carried over, the previous ``"output"``, or ``"zero"``.
        For known cells the first two are the same thing.
    final_state : one (sample, unit) array per state, or None where the layer does not return it
    output_grad, final_state_grad : shaped as output and final_state
        The direct gradients: partial L over what the layer returned. None without a loss.
    state_grad : (sample, time, unit) by index of the state, or None
        Direct gradients of states at single steps, where the user's own loop takes more than the output from them.
    stepwise
        True where the user's own loop calls a cell step by step, so that every state is a tensor of the framework: it
        has ports of kind ``"state"``.
    between
        True where the user's code gets hold of states between the calls that make up this run: it has ports of kind
        ``"state_read"``.
    input_scale, state_scale : (sample, n) or (gate, sample, n), or None
        Dropout multipliers, the same at every step.
    compute_dtype
        The dtype that the framework computed in, where it is coarser than that of the arrays (mixed precision).
    tied
        Names in ``weight_grads`` whose gradient is also that of other layers, which have the same variable.
    weights_key
        Calls with the same key share their weights; ``weight_grads`` is then the sum over them.
    weight_grads
        The framework's own dL/dW by the names of :meth:`KnownCell.weights`, without what a weight regulariser adds.
        For custom cells by the framework's names. None without a loss or where not asked for.
    framework_input_grad, framework_initial_state_grad
        What the framework's own differentiation of this call brought to its input, (sample, time, feature), and to its
        initial states. The input that both halves of a bidirectional layer read is told of at the first. None unless
        ``CaptureRequest.borders`` asks for it.
    """

    layer: str
    direction: Literal["forward", "backward"]
    cell: KnownCell | StepCell
    input: Array
    initial_state: tuple[Array, ...]
    output: Array
    bidirectional: bool = False
    mask: Array | None = None
    output_from_state: Array | None = None
    masked_output: Literal["state", "output", "zero"] = "state"
    final_state: tuple[Array, ...] | None = None
    output_grad: Array | None = None
    final_state_grad: tuple[Array, ...] | None = None
    state_grad: Mapping[int, Array] | None = None
    stepwise: bool = False
    between: bool = False
    input_scale: Array | None = None
    state_scale: Array | None = None
    compute_dtype: str = ""
    weights_key: str = ""
    tied: frozenset[str] = frozenset()
    weight_grads: Mapping[str, Array] | None = None
    framework_input_grad: Array | None = None
    framework_initial_state_grad: tuple[Array, ...] | None = None

    @property
    def returns_sequences(self) -> bool:
        """Whether ``output`` has a time axis."""
        return len(self.output.shape) == 3


@dataclass
class PlainCall:
    """Output and direct gradient of one call of a layer that is not recurrent, any rank."""

    layer: str
    output: Array
    output_grad: Array | None = None
    kind: str = ""


@dataclass
class Capture:
    """All that one forward pass (and one backward pass, with a loss) told about a model.

    ``entangled``: a recurrence is more than a chain of steps: what it returned is fed to it again, its states are read
    between the steps, or one layer runs in several recurrences. Differentiation must then not be cut at recurrences.
    Said of passes without gradients only.

    With ``CaptureRequest.borders``: ``input_grads``, the gradient at every leaf of x, in its own layout; and
    ``beside``, by the framework's own name of each weight, what reaches it on any way but through the captured calls.
    For weights in ``whole`` it is all that reaches them, the captured calls included. ``inside`` are the weights that
    layers took which were looked into, asked for or not. ``altered`` says why the gradients cannot be those of the
    model run plainly, where they are meant not to be.
    """

    calls: list[RecurrentCall]
    plain: list[PlainCall] = field(default_factory=list)
    loss: float | None = None
    outputs: Any = None
    notes: list[str] = field(default_factory=list)
    entangled: bool = False
    input_grads: list[Array | None] = field(default_factory=list)
    beside: Mapping[str, Array | None] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    altered: str = ""


@dataclass
class PlainRun:
    """What the user's own model gave when it ran as it stands: no taps, no hooks, no cuts, its own differentiation.

    ``outputs`` and ``input_grads`` go by the leaves of what the model returned and of x; ``weight_grads`` by the
    framework's own names, in the framework's layout. None where no path leads. ``input_names`` has the keys of x, in
    the order of its leaves, where it is a dict.
    """

    outputs: list[Array]
    loss: float | None = None
    input_grads: list[Array | None] = field(default_factory=list)
    weight_grads: Mapping[str, Array | None] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Which of the framework's own weights a weight of ours is: its name, and how to lay out its gradient as ours.

    ``part`` tells weights apart that share one of the framework's; ``tied`` is True where the framework's weight has
    more than one name.
    """

    name: str
    take: Callable[[Array], Array]
    part: str = ""
    tied: bool = False


@dataclass
class Outputs:
    """What a model returned for one batch.

    Attributes
    ----------
    leaves
        Its tensors in order, as NumPy arrays in the layout that the model returned.
    tree
        The framework's own structure around them.
    masks
        By leaf: the mask that goes with it, where the framework knows one.
    own_losses
        A loss function of nothing, to be completed by what the model adds to any loss; None where it adds nothing.
    """

    leaves: list[Array]
    tree: Any
    masks: list[Array | None] = field(default_factory=list)
    own_losses: Callable[..., Any] | None = None


@dataclass(frozen=True)
class CaptureRequest:
    """What to look at. The less is asked, the less is computed.

    ``layers``: node names or layer names, recurrent or not; None for all recurrent layers.
    ``inputs``: capture inputs, states and masks, so that the recurrence can be replayed.
    ``gradients``: capture direct gradients (needs a loss). ``weight_grads``: also dL/dW of the layers asked for.
    ``borders``: also what the framework's own differentiation brings to the inputs of the model, of every call, and to
    all weights: what the certificate compares.
    """

    layers: tuple[str, ...] | None = None
    inputs: bool = True
    gradients: bool = True
    weight_grads: bool = True
    borders: bool = False


@dataclass(frozen=True)
class Port:
    """A tensor at the border of a layer or model: where the framework's own differentiation starts or ends.

    ``kind`` is one of ``"input"`` (index: which), ``"output"`` (index: which of several), ``"initial_state"`` and
    ``"final_state"`` (index: which state), ``"weight"`` (``key``: its name within the layer), ``"loss"``; of a layer
    that is called step by step also ``"state"``: a state after every step (``key="ending"``: as the last one left it),
    with its *total* gradient; and of a run that
    several calls make up ``"state_read"``: the *direct* gradient of a state wherever the user's code gets hold of it.
    ``layer`` is None for the model itself. ``direction`` picks one half of a bidirectional layer: its ports are
    those of the half, before merging.
    """

    kind: Literal["input", "output", "initial_state", "final_state", "state", "state_read", "weight", "loss"]
    layer: str | None = None
    index: int = 0
    key: str = ""
    direction: Literal["forward", "backward"] | None = None


class Pullback(Protocol):
    """One forward pass, kept alive for differentiation; a context manager that frees everything on exit."""

    values: Mapping[Port, Array]
    #: How many tensors the model returned.
    outputs: int

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents at ``of`` ports back to every ``wrt`` port.

        Each cotangent has the shape of its port with one leading axis K (K pulled at once, vectorised); so has each
        result. None where no path leads from any of the given ``of`` ports to that ``wrt`` port. For a
        recurrent layer's ``output`` port as ``wrt`` the result is the *direct* gradient.
        """

    def __enter__(self) -> Pullback: ...
    def __exit__(self, *exc: object) -> None: ...


class Adapter(Protocol):
    """What rnnlens asks of a framework. One module-level object per adapter folder, found through the registry."""

    name: str
    #: Whether every tensor of every model of this framework has its samples on the first axis.
    samples_first: bool
    #: Whether a second run without a seed draws what the first one drew, since the first gave all random states back.
    draws_again: bool

    def describe(self, model: Any) -> list[LayerInfo]:
        """Recurrent layers in the order in which they are called, without running the model. May raise ModelError."""

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """One forward pass and, with a loss, one backward pass. Called once per ``rl.trace``."""

    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run the model once, and keep what is needed to differentiate any ``of`` with respect to any ``wrt``.

        Differentiation stops at every ``cut`` port (outputs and final states of recurrent layers): its value counts as
        given from outside, so that nothing flows through the layer behind it. A cut port may be a ``wrt`` port as well:
        it receives what arrives there. The time Jacobian cuts at every recurrent layer and sweeps through those itself.
        """

    def plain(
        self,
        model: Any,
        batch: Batch,
        cotangents: Callable[[Sequence[Array]], Sequence[Array | None]] | None = None,
        *,
        gradients: bool = True,
        regularised: bool = False,
    ) -> PlainRun:
        """Run the user's own model once as it stands and, with ``gradients``, differentiate it once by itself.

        What is differentiated is the loss, or with ``cotangents`` the outputs: given their values, it returns one
        cotangent per leaf. Weight regularisers count in the loss, and in its gradient if ``regularised``. Raises
        ``CertificateError`` where the model by itself would do something else.
        """

    def place(self, model: Any, layer: str, direction: str | None, key: str) -> Place | None:
        """Which of the framework's weights ``key`` of a layer is, found by name alone; None where it is none."""

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Which axis is what, of inputs and outputs of the model and of layers that are not recurrent.

        Their tensors lie as the framework has them. Empty where the rule of the framework holds: samples first, then
        time. Never from rank or equal sizes alone; an axis of which nothing is known is called ``axis_0``, ``axis_1``.
        """

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """What the model returns for one batch: one forward pass, without a loss."""

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """The loss of outputs that are at hand, and its gradient at each of them; None where it does not depend on one.

        Without the losses that the model makes itself (``Outputs.own_losses``). ``batch`` has the targets and weights.
        """

    def combination(self, model: Any, batch: Batch) -> str | None:
        """How losses of batches of one size make up that of the data set: ``"mean"``, ``"sum"``; None: not known."""

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """The name of a layer that uses statistics of the batch it is in; None: there is none; ``"?"``: not known."""

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """All layers with weights, copies of the values, gates in our order."""

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Value of a user's function of the framework's tensors, and what pulls cotangents back to its arguments."""

    def nudged(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Within the block, add ``size`` times its own spread to a weight or to the output of a layer.

        The pattern is random and fixed. Yields False where the port cannot be moved.
        """

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Framework, its version, engine, dtype, device: plain strings."""


# An adapter may offer ``output_names(model)``: the keys of outputs that are a dict, in the order of their ports, where
# they can be told without a run.


@dataclass
class LayerWeights:
    """The weights of one layer: by name, and as a known cell per direction where it is one."""

    values: dict[str, Array]
    trainable: dict[str, bool]
    cells: dict[str, KnownCell] = field(default_factory=dict)
    penalties: dict[str, Callable[[Any], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainLink:
    """One layer of a model that is a plain chain of well-known layers.

    An adapter may offer ``chain(model, training=...)``: these from input to output, or None where the model is anything
    else. It spares the time Jacobian from finding out what the layers between the recurrent ones do.

    ``kind``: ``"recurrent"`` (one direction, forward); ``"dense"``: activation(x @ kernel + bias) at every step;
    ``"same"``: the input unchanged; ``"table"``: an embedding of integers.
    """

    name: str
    kind: Literal["recurrent", "dense", "same", "table"]
    kernel: Array | None = None
    bias: Array | None = None
    activation: str = "linear"
