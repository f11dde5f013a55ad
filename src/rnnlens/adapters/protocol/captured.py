"""What one forward pass is fed and asked for, and what it told: plain arrays, in our order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...recurrence.cells import Cell
from ...typing import Array
from .facts import ChainLink

#: How a note begins on a layer that was left out, since it is refused by name.
NOT_LOOKED_INTO = "Not looked into"


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


@dataclass(frozen=True)
class CaptureRequest:
    """What to look at. The less is asked, the less is computed.

    ``layers``: node names or layer names, recurrent or not; None for all recurrent layers.
    ``inputs``: capture inputs, states and masks, so that the recurrence can be replayed.
    ``gradients``: capture direct gradients (needs a loss). ``weight_grads``: also dL/dW of the layers asked for.
    ``loss``: its value, also without gradients.
    ``boundaries``: also what the framework's own differentiation brings to the inputs of the model, of every call, and
    to all weights: what the certificate compares.
    ``chain``: whether the model is one plain chain of well-known layers in this pass (:attr:`Capture.chain`).
    ``all_must_run``: whether a layer that was asked for and does not run, or is refused by name, is an error; else it
    is left out, and of one that is refused a note says why.
    """

    layers: tuple[str, ...] | None = None
    inputs: bool = True
    gradients: bool = True
    weight_grads: bool = True
    boundaries: bool = False
    loss: bool = False
    all_must_run: bool = True
    chain: bool = False


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
        Its equations and weights, or a :class:`StepCell` that the framework runs step by step.
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
    computed
        Names of weights that the model computed from its parameters: gradients are with respect to what the call used.
    weights_key
        Calls with the same key share their weights; ``weight_grads`` is then the sum over them.
    weight_grads
        The framework's own dL/dW by the names of :meth:`Cell.weights`, without what a weight regulariser adds.
        For custom cells by the framework's names. None without a loss or where not asked for.
    framework_input_grad, framework_initial_state_grad
        What the framework's own differentiation of this call brought to its input, (sample, time, feature), and to its
        initial states. The input that both halves of a bidirectional layer read is told of at the first. None unless
        ``CaptureRequest.boundaries`` asks for it.
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
    between: bool = False
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
        return len(self.output.shape) == 3 + len(self.cell.space)


@dataclass
class NonRecurrentCall:
    """Output and direct gradient of one call of a layer that is not recurrent, any rank."""

    layer: str
    output: Array
    output_grad: Array | None = None


@dataclass
class Capture:
    """All that one forward pass (and one backward pass, with a loss) told about a model.

    ``entangled``: a recurrence is more than a chain of steps: what it returned is fed to it again, its states are read
    between the steps, or one layer runs in several recurrences. Differentiation must then not be cut at recurrences.
    Said of passes without gradients only.

    ``chain``: the layers from input to output, where this pass was one plain chain of well-known ones, samples first,
    then time; None where it was not, or where that is not known.

    ``order``: names of all calls that were looked at, each where it was finished; empty where that is not known.

    With ``CaptureRequest.boundaries``: ``input_grads``, the gradient at every leaf of x, in its own layout; and
    ``beside``, by the framework's own name of each weight, what reaches it on any way but through the captured calls.
    For weights in ``whole`` it is all that reaches them, the captured calls included. ``inside`` are the weights that
    layers took which were looked into, asked for or not. ``altered`` says why the gradients cannot be those of the
    model run plainly, where they are meant not to be.
    """

    calls: list[RecurrentCall]
    plain: list[NonRecurrentCall] = field(default_factory=list)
    loss: float | None = None
    outputs: Any = None
    notes: list[str] = field(default_factory=list)
    entangled: bool = False
    order: tuple[str, ...] = ()
    input_grads: list[Array | None] = field(default_factory=list)
    beside: Mapping[str, Array | None] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    altered: str = ""
    chain: list[ChainLink] | None = None


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


@dataclass
class ReferenceRun:
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
