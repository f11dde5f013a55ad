"""Arguments and results of one captured forward pass, and the ports between which the framework differentiates.

All arrays are plain and in the order of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from ...errors import InputError
from ...recurrence.cells import Cell
from ...recurrence.sequence import SequenceCell
from ...typing import Array
from .facts import ChainLink


@dataclass(frozen=True)
class Port:
    """A tensor at the boundary of a layer or model, where the framework's own differentiation starts or ends.

    ``kind`` is one of ``"input"`` and ``"output"`` (``index``: number of the tensor), ``"initial_state"`` and
    ``"final_state"`` (``index``: number of the state), ``"weight"`` (``key``: its name within the layer), ``"loss"``.

    A layer that the user's code calls step by step also has ``"state"``: a state after every step with its *total*
    gradient (``key="ending"``: only as the last step left it). A run that consists of several calls also has
    ``"state_read"``: the *direct* gradient of a state wherever the user's code reads it.

    ``layer`` is None for the model itself. ``direction`` selects one direction of a bidirectional layer; its ports are
    those before the directions are merged.
    """

    kind: Literal["input", "output", "initial_state", "final_state", "state", "state_read", "weight", "loss"]
    layer: str | None = None
    index: int = 0
    key: str = ""
    direction: Literal["forward", "backward"] | None = None


@dataclass(frozen=True)
class EndPort:
    """One end of a time Jacobian, as a certificate looks for it in the user's model.

    ``port`` may be of kind ``"state"``, whose ``index`` is the number of the state. ``steps``: number of steps, None
    without a time axis. ``states``: number of states of the recurrent layer that it belongs to, 0 for any other tensor.
    ``is_lower``: the derivative is taken by this end.
    """

    port: Port
    steps: int | None = None
    states: int = 0
    is_lower: bool = False


class Pullback(Protocol):
    """One forward pass, kept for differentiation; a context manager that frees all memory on exit.

    It may have an attribute ``layouts``, the roles of axes by port, of tensors whose axes this very pass showed; and
    ``recurrent_sizes``, the numbers (samples, steps) of the calls of recurrent layers, where samples come first. If its
    cotangents were known before the pass, it may have ``known_gradients`` instead of ``vjp``: their gradients by port.
    """

    values: Mapping[Port, Array]
    #: Number of tensors that the model returned.
    outputs: int

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents at ``of`` ports back to every ``wrt`` port.

        Each cotangent has the shape of its port with one leading axis K: K cotangents are pulled at once, vectorised.
        Each result has the same leading axis. A result is None if no path leads from any given ``of`` port to that
        ``wrt`` port. For a recurrent layer's ``output`` port as ``wrt`` the result is the *direct* gradient.
        """

    def __enter__(self) -> Pullback: ...
    def __exit__(self, *exc: object) -> None: ...


def refuse_misfits(cotangents: Mapping[Port, Array], of: Sequence[Port], values: Mapping[Port, Array]) -> None:
    """Raise an error for cotangents of other ports than those of a pull-back, or of another shape than (K, *port).

    Raises
    ------
    InputError
        If a port is not among ``of``, or a shape does not fit.
    """
    for port, cotangent in cotangents.items():
        if port not in of:
            raise InputError("A cotangent was given for a tensor that is not among of=.", got=port)
        shape = tuple(values[port].shape)
        if tuple(cotangent.shape)[1:] != shape:
            raise InputError(
                "The shape of a cotangent differs from its tensor's.",
                got=tuple(cotangent.shape),
                expected=("K", *shape),
            )


#: First words of a note on a layer that was left out because it is not supported.
NOT_LOOKED_INTO = "Not looked into"


@dataclass
class Batch:
    """Data of one forward pass, as the user passed it, and the options of the run.

    ``loss`` is None (the compiled loss where the framework has one), a callable, or a name that the framework knows.
    ``initial_state`` maps a layer name to the state to start from. ``frozen``: the coefficients of whole-sequence
    layers are held constant where they are differentiated.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    loss: Any = None
    training: bool = False
    initial_state: Mapping[str, Sequence[Any]] | None = None
    seed: int | None = None
    frozen: bool = False

    def without_loss(self) -> Batch:
        """Return the batch without target, sample and class weights and loss."""
        return replace(self, y=None, loss=None, sample_weight=None, class_weight=None)


@dataclass(frozen=True)
class CaptureRequest:
    """Quantities to capture in one pass; fewer quantities take less time and memory.

    ``layers``: node names or layer names, recurrent or not; None for all recurrent layers.
    ``inputs``: capture inputs, states and masks, so that the recurrence can be replayed.
    ``gradients``: capture direct gradients (needs a loss). ``weight_grads``: also dL/dW of the requested layers.
    ``loss``: also the value of the loss, even without gradients.
    ``boundaries``: also the framework's own gradients at the model inputs, at the input of every call, and of all
    weights; certificates compare them.
    ``chain``: also find out whether the model is one plain chain of well-known layers in this pass
    (:attr:`Capture.chain`).
    ``topmost``: gradients are needed only at the last recurrent layer of a chain; those below follow from its sweep.
    An adapter that finds no chain in this pass, or does not make this difference, captures all gradients.
    ``scans``: capture the coefficients and outputs of whole-sequence layers.
    ``calls``: record recurrent calls. If False, only the outputs of the model are needed; an adapter that can run it
    more cheaply without recording does so.
    ``all_must_run``: raise an error for a requested layer that does not run or is not supported. If False, such a layer
    is left out, and a note gives the reason for an unsupported one.
    """

    layers: tuple[str, ...] | None = None
    inputs: bool = True
    gradients: bool = True
    weight_grads: bool = True
    boundaries: bool = False
    loss: bool = False
    all_must_run: bool = True
    chain: bool = False
    topmost: bool = False
    scans: bool = True
    calls: bool = True


@dataclass
class RecurrentCall:
    """One direction of one call of one recurrent layer: its inputs and outputs, and their direct gradients.

    Attributes
    ----------
    layer
        Name of the node in the result: ``"lstm"``; ``"lstm#0"``, ``"lstm#1"`` for a layer that was called twice;
        ``"encoder/lstm"`` inside a nested model.
    direction
        ``"backward"``: the recurrence runs from the last step to the first. The arrays are chronological nevertheless.
    bidirectional
        True if this call is one direction of a bidirectional layer; the other direction has the same ``layer``.
    cell
        The equations and weights of the layer, or a :class:`StepCell` that the framework runs step by step.
    input : (sample, time, feature)
    mask : (sample, time) of bool, or None
    initial_state : one (sample, unit) array per state
    output : (sample, time, unit), or (sample, unit) where the layer returns its last output only
        Before a bidirectional layer merges its directions.
    output_from_state : (sample, time) of bool, or None for "everywhere"
        True where y_t depends on the state after step t, False where a framework returns a constant (zeros at padding).
    masked_output
        Output of the layer at a masked step: the ``"state"`` carried over, the previous ``"output"``, or ``"zero"``.
        For known cells the first two are equal.
    final_state : one (sample, unit) array per state, or None where the layer does not return it
    output_grad, final_state_grad : shaped as output and final_state
        Direct gradients: partial derivatives of L by the tensors that the layer returned. None without a loss.
    state_grad : (sample, time, unit) by index of the state, or None
        Direct gradients of states at single steps, if the user's own loop reads more than the output of a step.
    stepwise
        True if the user's own loop calls a cell step by step, or a layer whose states it changes between the steps.
        Every state is then a tensor of the framework, with a port of kind ``"state"``.
    reads_states_between
        True if the user's code reads states between the calls that form this run. They have ports of kind
        ``"state_read"``.
    start_states : one (sample, time, unit) array per state, or None
        States that each step started from, if the user's code changes the states between the steps. The direct
        gradients of a step's output and states then include all paths through later steps. None if each step starts
        from the states of the step before.
    reset : (sample, time) of bool, or None
        True where a step started from a state through which no gradient passes to the step before.
    resets_only
        Whether the user's code does nothing else to the states between the steps.
    input_scale, state_scale : (sample, n) or (gate, sample, n), or None
        Dropout multipliers, equal at every step.
    compute_dtype
        Dtype of the framework's computation, if it is coarser than that of the arrays (mixed precision).
    tied
        Names in ``weight_grads`` whose variable is shared with other layers, so that the gradient includes theirs.
    computed
        Names of weights that the model computed from its parameters. Gradients are by the weight as the call used it.
    weights_key
        Calls with the same key share their weights; ``weight_grads`` is then the sum over them.
    weight_grads
        The framework's own dL/dW by the names of :meth:`Cell.weights`, without what a weight regulariser adds.
        For custom cells by the framework's names. None without a loss or if not requested.
    framework_input_grad, framework_initial_state_grad
        Gradients by the framework's own differentiation of this call, at its input, (sample, time, feature), and at its
        initial states. For a bidirectional layer, the first direction has the gradient of the shared input. None unless
        ``CaptureRequest.boundaries`` is set.
    """

    layer: str
    direction: Literal["forward", "backward"]
    cell: Cell
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
    reads_states_between: bool = False
    start_states: tuple[Array, ...] | None = None
    reset: Array | None = None
    resets_only: bool = False
    input_scale: Array | None = None
    state_scale: Array | None = None
    compute_dtype: str = ""
    weights_key: str = ""
    tied: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()
    weight_grads: Mapping[str, Array] | None = None
    framework_input_grad: Array | None = None
    framework_initial_state_grad: tuple[Array, ...] | None = None

    @property
    def returns_sequences(self) -> bool:
        """Whether ``output`` has a time axis."""
        return len(self.output.shape) > len(self.initial_state[0].shape)


@dataclass
class SequenceCall:
    """One scan of a whole-sequence layer: its coefficients, outputs and their direct gradient.

    Attributes
    ----------
    layer
        Name of the node in the result; ``"mixer#0"``, ``"mixer#1"`` for a layer with several scans.
    cell
        Coefficients at all steps.
    output : (sample, time, axes of the state without the contracted one)
        Readout y_t = C_t S_t, before a skip connection and a gate.
    output_grad : shaped as ``output``
        Direct gradient: partial derivative of L by y_t. None without a loss.
    gate : shaped as ``output``
        Factor by which the scan function multiplies the readout; None without one.
    mismatch
        Largest difference between the replaced function's result and the model's own, relative to the largest value.
    compute_dtype
        Coarsest dtype in which the model's own function computes.
    """

    layer: str
    cell: SequenceCell
    output: Array
    output_grad: Array | None = None
    gate: Array | None = None
    mismatch: float = 0.0
    compute_dtype: str = "float32"


@dataclass
class NonRecurrentCall:
    """Output and direct output gradient of one call of a layer that is not recurrent; arrays of any rank."""

    layer: str
    output: Array
    output_grad: Array | None = None


@dataclass
class Capture:
    """All quantities captured in one forward pass and, with a loss, one backward pass.

    ``entangled``: True if a recurrence is more than a chain of steps: its output is an input of the same layer again,
    its states are read between the steps, or one layer runs in several recurrences. Differentiation must then not be
    cut at recurrences. It is set only for passes without gradients.

    ``chain``: the layers from input to output if this pass was one plain chain of well-known layers, with axes samples
    first, then time. None if it was not, or if that is not known.

    ``topmost``: whether direct gradients were captured only at the last recurrent layer of ``chain``, and none of the
    framework's own gradients. The ``output_grad`` of the layers below then has no meaning, and ``input_grads`` has only
    None.

    ``order``: names of all captured calls, in the order in which they finished; empty if not known.

    ``scanned``: number of samples of every whole-sequence layer that ran, captured or not.

    With ``CaptureRequest.boundaries``, ``input_grads`` is the gradient for every leaf of x, in the leaf's own layout.
    ``outside_weight_grads`` maps the framework's name of a weight to its gradient along all paths except the captured
    calls. For weights in ``full_gradient_names`` it is the full gradient, captured calls included.
    ``recurrent_weight_names`` names the weights used by all recurrent layers that were captured, requested or not.
    ``alteration`` is the reason why gradients differ on purpose from those of the reference run, or "".
    ``output_grads`` is the gradient dL/dy for every leaf of the outputs; empty if the adapter does not record it.
    """

    calls: list[RecurrentCall]
    other_calls: list[NonRecurrentCall] = field(default_factory=list)
    sequences: list[SequenceCall] = field(default_factory=list)
    loss: float | None = None
    outputs: Any = None
    notes: list[str] = field(default_factory=list)
    entangled: bool = False
    order: tuple[str, ...] = ()
    input_grads: list[Array | None] = field(default_factory=list)
    output_grads: list[Array | None] = field(default_factory=list)
    outside_weight_grads: Mapping[str, Array | None] = field(default_factory=dict)
    full_gradient_names: frozenset[str] = frozenset()
    recurrent_weight_names: frozenset[str] = frozenset()
    alteration: str = ""
    chain: list[ChainLink] | None = None
    topmost: bool = False
    scanned: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Outputs:
    """Outputs of a model for one batch.

    Attributes
    ----------
    leaves
        Output tensors in order, as NumPy arrays in the layout that the model returned.
    tree
        The framework's own nested structure of the outputs.
    masks
        One mask per leaf, or None where the framework knows none.
    own_losses
        A loss function that returns zero by itself, so that only losses added by the model count; None if there are
        none.
    """

    leaves: list[Array]
    tree: Any
    masks: list[Array | None] = field(default_factory=list)
    own_losses: Callable[..., Any] | None = None


@dataclass
class ReferenceRun:
    """Results of the user's model run by its framework alone: no hooks, no cuts, the framework's own differentiation.

    ``outputs`` and ``input_grads`` have one entry per leaf of the outputs and of x. ``weight_grads`` uses the
    framework's names, and its layout, which ``WeightLocation.take`` turns into that of ``Adapter.weights``.
    With the inherited ``capture`` it has the layout of ``Adapter.weights`` itself. A gradient is None if no
    path leads there. ``input_names`` are the keys of x in the order of its leaves, if x is a dict.
    """

    outputs: list[Array]
    loss: float | None = None
    input_grads: list[Array | None] = field(default_factory=list)
    weight_grads: Mapping[str, Array | None] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()
