"""One run of the user's model: what it records, as plain arrays, and vector-Jacobian products between its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ...errors import CertificateError
from ...layout import Layout
from ...recurrence.cells import Cell
from ...recurrence.sequence import SequenceCell, SequenceRun, forward
from ...typing import Array
from .data import EndPort, Port
from .facts import ChainLink

#: One cotangent per leaf of a model's outputs, None for a leaf that gets none; or a function of the outputs' values.
Cotangents = Sequence[Array | None] | Callable[[Sequence[Array]], Sequence[Array | None]]
#: First words of a note on a layer that was left out because it is not supported.
NOT_LOOKED_INTO = "Not looked into"


@dataclass(frozen=True)
class Taps:
    """Calls and tensors that a run records; fewer take less time and memory.

    Attributes
    ----------
    record
        ``"outputs"``: the outputs of the model. ``"states"``: also the calls of ``layers``, with inputs, states and
        masks, so that they can be replayed. ``"direct"``: also the direct gradients of the loss at these calls.
        ``"everything"``: also dL/dW of the layers, and the framework's own gradients at the model's inputs and
        outputs, at the input of every call, and of all weights, which certificates compare. ``"ports"``: the tensors
        at the ports ``of`` and ``wrt``, between which cotangents are pulled. ``"nothing"``: the user's model runs as
        it stands, differentiated by its framework alone.
    layers
        Node names or layer names, recurrent or not; None for all recurrent layers.
    inputs
        Whether calls have their inputs, states and masks. False where outputs and their gradients suffice.
    weight_grads
        Whether ``"direct"`` has dL/dW of the layers, too.
    loss
        Whether the value of the loss is recorded although no gradient is.
    sequences
        Whether coefficients and outputs of whole-sequence layers are recorded.
    all_must_run
        Whether a requested layer that does not run, or is not supported, raises an error. If False, such a layer is
        left out, and a note gives the reason for an unsupported one.
    chain
        Whether to find out if the model is one plain chain of well-known layers in this run (:attr:`Capture.chain`).
    topmost
        Gradients are needed only at the last recurrent layer of a chain; those below follow from its sweep. An adapter
        that finds no chain in this run, or does not make this difference, records all gradients.
    of, wrt, cut
        Ports where cotangents start and end, and ports at which differentiation stops: outputs and final states of
        recurrent layers, whose values are treated as constants. A cut port may be a ``wrt`` port as well; it then
        receives the gradient at that port.
    cotangents
        Cotangents that are known before the run. An adapter that compiles pulls them in the same pass.
    gradients
        With ``"nothing"``: whether the run is differentiated.
    regularised
        With ``"nothing"``: whether penalties of weights have a gradient, too. They always count in the loss.
    """

    record: Literal["outputs", "states", "direct", "everything", "ports", "nothing"] = "outputs"
    layers: tuple[str, ...] | None = None
    inputs: bool = True
    weight_grads: bool = False
    loss: bool = False
    sequences: bool = True
    all_must_run: bool = True
    chain: bool = False
    topmost: bool = False
    of: tuple[Port, ...] = ()
    wrt: tuple[Port, ...] = ()
    cut: tuple[Port, ...] = ()
    cotangents: Mapping[Port, Array] | None = None
    gradients: bool = False
    regularised: bool = False

    @classmethod
    def states(cls, layers: Sequence[str] | None = None, **options: Any) -> Taps:
        """Record calls of layers with their inputs, states and masks."""
        return cls("states", None if layers is None else tuple(layers), **options)

    @classmethod
    def direct(cls, layers: Sequence[str] | None = None, **options: Any) -> Taps:
        """Record calls of layers, and the direct gradients of the loss at them."""
        return cls("direct", None if layers is None else tuple(layers), gradients=True, **options)

    @classmethod
    def everything(cls, layers: Sequence[str] | None = None, **options: Any) -> Taps:
        """Record calls of layers, and all gradients that certificates compare."""
        chosen = None if layers is None else tuple(layers)
        return cls("everything", chosen, gradients=True, **{"weight_grads": True, **options})

    @classmethod
    def ports(cls, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = (), **options: Any) -> Taps:
        """Record the tensors at ports, to pull cotangents of ``of`` back to ``wrt``; see the attributes."""
        return cls("ports", of=tuple(of), wrt=tuple(wrt), cut=tuple(cut), **options)

    @classmethod
    def nothing(cls, *, gradients: bool = True, regularised: bool = False) -> Taps:
        """Run the user's model as it stands: the reference run of a certificate."""
        return cls("nothing", gradients=gradients, regularised=regularised)

    @property
    def boundaries(self) -> bool:
        """Whether the framework's own gradients at boundaries and weights are recorded."""
        return self.record == "everything"

    @property
    def needs_loss(self) -> bool:
        """Whether the loss is evaluated."""
        return self.loss or self.gradients


class Run:
    """One run of a model, as :meth:`Adapter.run` returns it; which attributes it has follows from its :class:`Taps`.

    It is a context manager that frees the memory of a run that can be differentiated.
    """

    #: Outputs of the model as arrays, for every ``record`` but ``"ports"`` and ``"nothing"``.
    outputs: Outputs
    #: Outputs in the structure in which the model returned them, where ``outputs`` are.
    returned: Any
    #: Calls of layers and gradients, for ``"states"``, ``"direct"`` and ``"everything"``.
    capture: Capture
    #: With ``"ports"``: values of the ports.
    values: Mapping[Port, Array]
    #: With ``"ports"``: number of tensors that the model returned.
    output_count: int = 1
    #: With ``"ports"``: roles of axes of tensors whose axes this very run showed.
    layouts: Mapping[Port, Layout] = {}
    #: With ``"ports"``: numbers (samples, steps) of the calls of recurrent layers, where samples come first.
    recurrent_sizes: Sequence[tuple[int, int]] = ()
    #: Gradients of cotangents that were known before the run; None if there were none.
    known_gradients: Mapping[Port, Array | None] | None = None
    #: Whether :meth:`reference` may run in another thread, after :meth:`prepared`.
    is_prepared: bool = False

    def pull(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents at ``of`` ports back to every ``wrt`` port.

        Each cotangent has the shape of its port with one leading axis K: K cotangents are pulled at once, vectorised.
        Each result has the same leading axis. A result is None if no path leads from any given ``of`` port to that
        ``wrt`` port. For a recurrent layer's ``output`` port as ``wrt`` the result is the *direct* gradient.
        """
        raise NotImplementedError

    def prepared(self) -> Self:
        """Do all that touches the user's model now, if it can be separated; return the run itself."""
        return self

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the untouched model and differentiate its loss, or its outputs by their ``cotangents``.

        Raises ``CertificateError`` if the model would behave differently without rnnlens.
        """
        raise NotImplementedError

    def between(self, of: EndPort, wrt: EndPort, cotangent: Callable[[Array], Array]) -> ReferenceRun:
        """Run the untouched model, and pull ``cotangent`` of the value at ``of`` back to ``wrt`` by its framework.

        The ends are found without what recording runs use. The one gradient is that at ``wrt``. Ends of a recurrent
        layer are (sample, time, unit), others in the framework's layout. Raises ``CertificateError`` if an end is no
        tensor of the user's model, as the states within a fused layer.
        """
        raise CertificateError("the framework has no tensor of its own there")

    def rounded(self, unit: float) -> ReferenceRun | None:
        """Run a copy of the untouched model whose weights are changed by one rounding of size ``unit``.

        It is called where the certificate of a model with whole-sequence layers has failed. None if it cannot be made.
        """
        return None

    def in_double(self) -> Self:
        """Return the run of a float64 copy of the untouched model, with data in float64.

        It is called where a certificate in a coarser dtype has failed. Raises ``CertificateError`` if there is none.
        """
        raise CertificateError("the adapter makes no copy of the model in float64")

    def coarsest_dtype(self) -> str:
        """Run the untouched model; return the coarsest float dtype of its operations, or "" if not known.

        It is called where a certificate has failed. A part of a float64 model may compute in float32.
        """
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


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
        ``Taps.record`` is ``"everything"``.
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
    last_state, last_state_grad : (sample, axes of the state)
        State after the last step, while the pass runs; its direct gradient, None where no path leads from the loss.
    run
        The forward pass of ``cell``; None if it was not kept.
    gate : shaped as ``output``
        Factor by which the scan function multiplies the readout; None without one.
    values : shaped as ``output``
        Input of the scan, in which the readout is linear while the coefficients are held. None where the pass is over,
        and in families whose coefficients come from other tensors.
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
    values: Array | None = None
    last_state: Array | None = None
    last_state_grad: Array | None = None
    run: SequenceRun | None = None
    mismatch: float = 0.0
    compute_dtype: str = "float32"

    def forward_run(self) -> SequenceRun:
        """Return the forward pass of the cell, which is run again if it was not kept."""
        return self.run or forward(self.cell)[1]


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

    ``loops``: for each loop over single steps, the names of the calls that ran in turn at each of its steps.

    With ``"everything"``, ``input_grads`` is the gradient for every leaf of x, in the leaf's own layout.
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
    loops: Sequence[frozenset[str]] = ()


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
    layer_losses
        Whether layers add losses of what they compute, so that the loss is more than a function of the outputs.
    """

    leaves: list[Array]
    tree: Any
    masks: list[Array | None] = field(default_factory=list)
    own_losses: Callable[..., Any] | None = None
    layer_losses: bool = False


@dataclass
class ReferenceRun:
    """Results of the user's model run by its framework alone: no hooks, no cuts, the framework's own differentiation.

    ``outputs`` and ``input_grads`` have one entry per leaf of the outputs and of x. ``weight_grads`` uses the
    framework's names, and its layout, which ``WeightLocation.take`` turns into that of ``Adapter.weights``.
    Of a :class:`RunByPorts` it has the layout of ``Adapter.weights`` itself. A gradient is None if no
    path leads there. ``input_names`` are the names of the leaves of x, if it is a container and they are known.
    """

    outputs: list[Array]
    loss: float | None = None
    input_grads: list[Array | None] = field(default_factory=list)
    weight_grads: Mapping[str, Array | None] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()
