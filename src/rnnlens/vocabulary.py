"""Names of dimensions, states, gates and quantities, each defined once.

All labels shown to users (axis names, units, definitions in files, figures and pages) are defined here.
This module imports no other module of rnnlens, so that all may import it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# Dimensions, in the order in which they appear in results.
SAMPLE = "sample"
TIME = "time"
DIRECTION = "direction"
FEATURE = "feature"
GATE = "gate"
STATE = "state"
UNIT = "unit"
UNIT_IN = "unit_in"
CHANNEL = "channel"
#: Axis of a state that has units at each position of a sequence, as in a loop over depth.
POSITION = "position"
#: Names of the spatial axes of an input or a state with channels, by their number.
SPACE: dict[int, tuple[str, ...]] = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
#: Axes of gradients by lag: pairs of a sample and an output step, and steps back from that output.
PROBE, LAG = "probe", "lag"
OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE = "out_time", "out_unit", "in_time", "in_feature"

FORWARD, BACKWARD, BIDIRECTIONAL = "forward", "backward", "bidirectional"


def unnamed_states(count: int) -> tuple[str, ...]:
    """Return default names for ``count`` state tensors of a cell: hidden, state_1, state_2, ..."""
    return ("hidden", *(f"state_{i}" for i in range(1, count)))


def named_states(fields: Sequence[str | None], taken: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of a custom cell's states: the fields in which the user's code holds them.

    A state has its default name where its field is None, no identifier, given twice, one of the names ``taken``, or a
    name that results use for something else, such as ``output``, ``unit``, ``initial_v`` or ``v_grad``.

    >>> named_states(["voltage", "input", None])
    ('voltage', 'state_1', 'state_2')
    """

    def is_free(field: str | None) -> bool:
        return (
            field is not None
            and field.isidentifier()
            and fields.count(field) == 1
            and field not in taken
            and field not in _TAKEN
            and not field.endswith(("_grad", "_lag_gradient", "_unit"))
            and not field.startswith(("initial_", "final_", "previous_"))
            and not field.removeprefix("state_").isdigit()
        )

    names = [field if is_free(field) else None for field in fields]
    defaults = unnamed_states(len(names))
    return tuple(
        name or ("state_0" if default in names else default) for name, default in zip(names, defaults, strict=True)
    )


def renamed_states(names: Iterable[str], fields: Iterable[str | None]) -> str:
    """Return the text of a note on states that cannot have the names of their fields; empty if all have."""
    pairs = zip(names, fields, strict=True)
    renamed = [f"{name} is the state's {field!r}" for name, field in pairs if field not in (None, name)]
    return f"{', '.join(renamed)}: results use that name for something else, or it is no identifier" if renamed else ""


def field_of(path: Iterable[str | int]) -> str | None:
    """Return the name of a nested field from the keys that lead to it, then positions; None for positions alone.

    >>> field_of(["memory", 0]), field_of([1, "soma", "voltage"]), field_of([0])
    ('memory_0', 'soma_voltage_1', None)
    """
    keys = list(path)
    names = [key for key in keys if isinstance(key, str)]
    return "_".join([*names, *(str(key) for key in keys if isinstance(key, int))]) if names else None


def leading_state(states: Sequence[str]) -> str:
    """Return the state that curves and records of a layer show: ``hidden``, or the first where none has that name."""
    return states[0] if states and "hidden" not in states else "hidden"


@dataclass(frozen=True)
class Quantity:
    """One variable of a trace: its dimensions, its label and its definition.

    ``dims`` are the dimensions for a unidirectional layer. A bidirectional layer adds ``direction`` after ``time``, or
    after ``sample`` if there is no time. ``needs_loss`` is True for gradients.
    """

    name: str
    dims: tuple[str, ...]
    long_name: str
    units: str
    definition: str
    needs_loss: bool = False
    source: str = ""


_PASCANU = "Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5"
_STU = (SAMPLE, TIME, UNIT)
_ST = (SAMPLE, TIME)
_STGU = (SAMPLE, TIME, GATE, UNIT)

QUANTITIES: dict[str, Quantity] = {
    q.name: q
    for q in (
        Quantity("input", (SAMPLE, TIME, FEATURE), "layer input", "1", "x_t, the input of the layer at step t"),
        Quantity("mask", (SAMPLE, TIME), "mask", "1", "True at real steps, False at padding"),
        Quantity("reset", (SAMPLE, TIME), "reset", "1", "True where the state before step t was set anew"),
        Quantity("hidden", _STU, "hidden state", "1", "h_t after step t; carried over at masked steps"),
        Quantity("cell", _STU, "cell state", "1", "c_t after step t; carried over at masked steps"),
        Quantity("gates", _STGU, "gate activation", "1", "gate values after their activation function"),
        Quantity("gate_preactivation", _STGU, "gate pre-activation", "1", "gate values before their activation"),
        Quantity(
            "output",
            _STU,
            "layer output",
            "1",
            "y_t, the output of the layer; without a time axis if it returns the last step only",
        ),
        Quantity(
            "output_grad",
            _STU,
            "direct gradient of the output",
            "loss",
            "partial L / partial y_t: only through the operations above the layer",
            True,
            _PASCANU,
        ),
        Quantity(
            "hidden_grad",
            _STU,
            "total gradient of the hidden state",
            "loss",
            "dL/dh_t: through the operations above and through the layer's recurrence (BPTT adjoint)",
            True,
            _PASCANU,
        ),
        Quantity(
            "cell_grad",
            _STU,
            "total gradient of the cell state",
            "loss",
            "dL/dc_t, including the path through h_t",
            True,
            _PASCANU,
        ),
        Quantity(
            "lag_gradient",
            (PROBE, LAG),
            "gradient by lag",
            "loss",
            "norm by state of one output step's direct gradient, pulled back through the layer's recurrence",
            True,
            _PASCANU,
        ),
        Quantity("gate_grad", _STGU, "gradient of the gate pre-activation", "loss", "dL/dz_t, total", True, _PASCANU),
        Quantity(
            "input_grad",
            (SAMPLE, TIME, FEATURE),
            "gradient of the layer input",
            "loss",
            "dL/dx_t through this layer; exactly 0 at masked steps",
            True,
            _PASCANU,
        ),
        Quantity(
            "initial_state_grad",
            (SAMPLE, STATE, UNIT),
            "gradient of the initial state",
            "loss",
            "dL/ds_0, the state before the first step",
            True,
            _PASCANU,
        ),
        Quantity(
            "final_state_grad",
            (SAMPLE, STATE, UNIT),
            "direct gradient of the returned final state",
            "loss",
            "partial L / partial s_T where the layer returns its state",
            True,
            _PASCANU,
        ),
        Quantity("state", _ST, "state", "1", "S_t of a whole-sequence layer after step t: S_t = A_t S_{t-1} + W_t"),
        Quantity("decay", _ST, "decay", "1", "diagonal part of A_t: the share of S_{t-1} that step t keeps"),
        Quantity("write", _ST, "write", "1", "W_t: what step t adds to the state, the input times its coefficients"),
        Quantity("read", _ST, "read", "1", "C_t: the readout is y_t = C_t S_t"),
        Quantity("gate", _ST, "output gate", "1", "factor of the readout within the layer's scan function"),
        Quantity(
            "state_grad", _ST, "total gradient of the state", "loss", "dL/dS_t through the recurrence", True, _PASCANU
        ),
        Quantity(
            "decay_grad", _ST, "gradient of the decay", "loss", "dL/da_t: dL/dS_t S_{t-1}, summed where shared", True
        ),
        Quantity("write_grad", _ST, "gradient of the write", "loss", "dL/dW_t, which equals dL/dS_t", True),
        Quantity("read_grad", _ST, "gradient of the read", "loss", "dL/dC_t: S_t dL/dy_t, summed where shared", True),
    )
}


#: Weights that several cells share; each cell lists all of its weights.
KERNEL = Quantity("kernel", (FEATURE, GATE, UNIT), "input kernel", "1", "W_x: from the layer input to each gate")
RECURRENT_KERNEL = Quantity(
    "recurrent_kernel", (UNIT_IN, GATE, UNIT), "recurrent kernel", "1", "W_h: from h_{t-1} to each gate"
)
BIAS = Quantity("bias", (GATE, UNIT), "bias", "1", "added on the input side of each gate")
BIAS_BY_CHANNEL = Quantity("bias", (GATE, CHANNEL), "bias", "1", "added to each gate")
RECURRENT_BIAS = Quantity(
    "recurrent_bias", (GATE, UNIT), "recurrent bias", "1", "added on the recurrent side of each gate"
)
PROJECTION = Quantity("projection", (UNIT, UNIT_IN), "projection", "1", "from o_t * tanh(c_t) to the smaller h_t")


#: Names in results that no field of a state may have.
_TAKEN = {
    *(QUANTITIES.keys() - {"hidden", "cell"}),
    *(SAMPLE, TIME, DIRECTION, FEATURE, GATE, STATE, UNIT, UNIT_IN, CHANNEL, POSITION, PROBE, LAG),
    *(OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE, "step"),
    *SPACE[3],
    *("weights", "loss", "dataset"),
}


def state_quantity(name: str, *, gradient: bool = False) -> Quantity:
    """Return the quantity of a state tensor such as ``state_1``, of its gradient, or of the state before each step."""
    if name.startswith("previous_") and not gradient:
        label = name.replace("_", " ")
        return Quantity(name, _STU, label, "1", "the state that step t started from, as the model's code changed it")
    if gradient:
        return Quantity(
            f"{name}_grad", _STU, f"total gradient of {name}", "loss", f"dL/d{name} at step t", True, _PASCANU
        )
    return Quantity(name, _STU, name.replace("_", " "), "1", f"{name} after step t; carried over at masked steps")
