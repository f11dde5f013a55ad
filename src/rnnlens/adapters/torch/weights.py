"""Torch's recurrent weights in the layout of rnnlens.

Gates are reordered, kernels are (input, gate * unit), and the two biases stay separate.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import FileError, ModelError
from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN, registered
from ..protocol import LayerWeights
from .cells import build_cell, has_own_step
from .inputs import replay_copy

#: Position of each gate of rnnlens in torch's order: LSTM i, f, g, o; GRU r, z, n, where z is the update gate.
_ORDER: dict[type[Cell], tuple[int, ...]] = {SimpleRNN: (0,), LSTM: (0, 1, 2, 3), GRU: (1, 0, 2)}
#: torch's name -> name in rnnlens, in the order in which torch passes a layer's weights to its kernels.
NAMES = {
    "weight_ih": "kernel",
    "weight_hh": "recurrent_kernel",
    "bias_ih": "bias",
    "bias_hh": "recurrent_bias",
    "weight_hr": "projection",
}
#: Name in rnnlens -> torch's name.
SLOTS = {name: slot for slot, name in NAMES.items()}
#: Modules whose ``weight`` is a table of rows that integers select.
TABLES = (nn.Embedding, nn.EmbeddingBag)


def weight_slots(count: int) -> tuple[str, ...]:
    """Return torch's names of the ``count`` weights of one layer and direction, without the layer's suffix.

    Biases come in pairs; an odd number means that the last weight is a projection.
    """
    names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if count >= 4 else ()))
    return (*names, "weight_hr") if count % 2 else names


def from_torch(cell: type[Cell], slot: str, value: Any) -> Any:
    """Convert a weight, or its gradient, from torch's layout to that of rnnlens. Additional leading axes are kept.

    A result with reordered gates is a copy; a transposed LSTM kernel is a view.
    """
    if slot == "weight_hr":
        return value.mT
    axis = -1 if slot.startswith("bias") else -2
    order = _ORDER[cell]
    if order != tuple(range(len(order))):
        parts = value.chunk(len(order), dim=axis)
        value = torch.cat([parts[i] for i in order], dim=axis)
    return value if axis == -1 else value.mT


def named_copies(cell: type[Cell], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of weights by slot, or of their gradients, under the names and in the layout of rnnlens."""
    return {NAMES[slot]: replay_copy(from_torch(cell, slot, value)) for slot, value in values.items()}


def create_cell(cell: type[Cell], weights: Mapping[str, Any], activation: str = "tanh") -> Cell:
    """Create the cell of one layer and direction from torch's weights by name, such as ``weight_ih``."""
    cell_class: Any = cell
    return cell_class(activation=activation, **named_copies(cell, weights))  # type: ignore[no-any-return]


def class_of(module: nn.Module) -> tuple[type[Cell], str] | None:
    """Return the rnnlens cell class and the activation of a torch recurrent module or cell.

    Returns None for any other module.
    """
    if has_own_step(module):
        return None
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return LSTM, "tanh"
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return GRU, "tanh"
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        return SimpleRNN, str(module.nonlinearity)
    return None


def cell_weights(module: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield ``(layer index, direction, weights by slot)`` of a torch recurrent module or cell."""
    if isinstance(module, nn.RNNCellBase):
        yield 0, "forward", {slot: getattr(module, slot) for slot in weight_slots(4 if module.bias else 2)}
        return
    weights_per_direction = len(module._flat_weights) // (module.num_layers * (2 if module.bidirectional else 1))
    for layer in range(module.num_layers):
        for direction in ("forward", "backward")[: 2 if module.bidirectional else 1]:
            names = {
                slot: torch_name(module, layer, f"{direction}/{NAMES[slot]}")
                for slot in weight_slots(weights_per_direction)
            }
            yield layer, direction, {slot: _weight_named(module, name) for slot, name in names.items()}


def _weight_named(module: Any, name: str) -> Any:
    """Return a weight of a torch recurrent layer by torch's name.

    A weight that the model's forward computes, as by DropConnect, may not exist before the first forward pass. The
    layer then has the parameter that it is computed from, such as ``weight_hh_l0_raw``: a copy of it is returned.

    Raises
    ------
    ModelError
        If there is no such parameter.
    """
    if hasattr(module, name):
        return getattr(module, name)
    names = module._flat_weights_names if isinstance(module, nn.RNNBase) else []
    stored = module._flat_weights[names.index(name)] if names else None
    own_parameters = ((key, p) for key, p in module._parameters.items() if p is not None and key not in names)
    sources = [p for key, p in own_parameters if key.startswith(f"{name}_")]
    if stored is None and len(sources) != 1:
        raise ModelError(
            f"Weight {name!r} of a {type(module).__name__} does not exist yet.",
            got="a weight that the model's forward computes",
            hint="call the model once on a batch, model(x)",
        )
    return (sources[0] if stored is None else stored).detach().clone().requires_grad_()


def _is_trained(module: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Return whether a weight is trained; one that the forward computes, by the parameters that it is computed from.

    Such a weight, as pruning computes from ``weight_hh_l0_orig``, was left behind by a pass that may have been without
    gradients.
    """
    own_parameters = dict(module.named_parameters(recurse=False))
    computed_from = [p for key, p in own_parameters.items() if re.fullmatch(rf"{name}_(?!reverse)\w+", key)]
    sources = [value] if name in own_parameters or not computed_from else computed_from
    return any(p.requires_grad for p in sources)


def torch_name(module: nn.Module | None, layer: int, key: str) -> str:
    """Return torch's name of a weight: ``weight_ih_l0_reverse`` for ``backward/kernel``; ``key`` of other modules."""
    direction, _, name = key.rpartition("/")
    if name not in SLOTS or not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return key
    suffix = f"_l{layer}{'_reverse' if direction == 'backward' else ''}" if isinstance(module, nn.RNNBase) else ""
    return SLOTS[name] + suffix


def library_parameter(module: nn.Module | None, layer: int, key: str) -> nn.Parameter | None:
    """Return the parameter of a torch recurrent module behind a weight such as ``backward/kernel``; None if absent."""
    name = torch_name(module, layer, key)
    parameter = None if module is None or name == key else module._parameters.get(name)
    return parameter if isinstance(parameter, nn.Parameter) else None


def node_name(path: str, module: Any, layer: int) -> str:
    """Return the name of one stacked layer: the module's path, with the layer index if there are several."""
    return f"{path}[{layer}]" if getattr(module, "num_layers", 1) > 1 and isinstance(module, nn.RNNBase) else path


def layer_weights(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, LayerWeights]:
    """Return the weights of all modules that have any; a recurrent module gives one entry per stacked layer."""
    _refuse_without_values(modules)
    result: dict[str, LayerWeights] = {}
    registered_paths: tuple[str, ...] = ()
    counted_ids: set[int] = set()
    for path, module in modules:
        registration = registered(module)
        if registration is not None:
            cell = build_cell(module, registration)
            is_trainable = all(parameter.requires_grad for parameter in nn.Module.parameters(module))
            result[path] = LayerWeights(cell.weights(), dict.fromkeys(cell.weights(), is_trainable), {"forward": cell})
            registered_paths = (*registered_paths, f"{path}.")
            continue
        if path.startswith(registered_paths):
            continue
        cell_and_activation = class_of(module)
        if cell_and_activation is None:
            parameters = dict(module.named_parameters(recurse=False))
            if parameters:
                values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
                tables = frozenset({"weight"} if isinstance(module, TABLES) else ())
                result[path] = LayerWeights(
                    values, {name: parameter.requires_grad for name, parameter in parameters.items()}, tables=tables
                )
                result[path].uncounted = {
                    name for name, parameter in parameters.items() if id(parameter) in counted_ids
                }
                counted_ids |= {id(parameter) for parameter in parameters.values()}
            continue
        for layer, direction, weights in cell_weights(module):
            entry = result.setdefault(node_name(path, module, layer), LayerWeights({}, {}))
            entry.cells[direction] = create_cell(cell_and_activation[0], weights, cell_and_activation[1])
            prefix = f"{direction}/" if getattr(module, "bidirectional", False) else ""
            for slot, value in weights.items():
                key = prefix + NAMES[slot]
                entry.values[key] = from_torch(cell_and_activation[0], slot, value.detach()).clone()
                entry.trainable[key] = _is_trained(module, torch_name(module, layer, key), value)
                if id(value) in counted_ids or not isinstance(value, nn.Parameter):
                    entry.uncounted.add(key)
                counted_ids.add(id(value))
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in counted_ids:
                # Torch's cell does not use it itself, such as ``weight_hh_l0_g`` of ``weight_norm``.
                number = re.search(r"_l(\d+)", name) if isinstance(module, nn.RNNBase) else None
                entry = result[node_name(path, module, int(number[1]) if number else 0)]
                entry.values[name], entry.trainable[name] = parameter.detach().clone(), parameter.requires_grad
    return result


def _refuse_without_values(modules: Sequence[tuple[str, nn.Module]]) -> None:
    weights = (
        (f"{path}.{name}", weight)
        for path, module in modules
        for name, weight in module.named_parameters(recurse=False)
    )
    meta_name = next((name for name, weight in weights if weight.is_meta), None)
    if meta_name is not None:
        raise ModelError(
            "The weights of this model have no values (meta device).",
            got=f"{meta_name} on the meta device",
            hint="model.to_empty(device=...), and load_state_dict",
        )


def load_weights(model: torch.nn.Module, path: Path, *, unsafe: bool = False) -> None:
    """Load a state dict from a file into a model; ``unsafe`` accepts files that can run code as they are read."""
    state = _read_state(path, unsafe)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise FileError("The shapes of these weights do not match the model.", got=f"{path}: {error}") from error


def _read_state(path: Path, unsafe: bool) -> Any:
    """Read a state dict from a file, also from a checkpoint that stores it under a customary key."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=not unsafe)
    except pickle.UnpicklingError as error:
        raise FileError(
            "This weights file is not loaded, because doing so could run code that it contains.",
            got=f"{path}: more than tensors (torch.load with weights_only=True refuses it)",
            expected="torch.save(model.state_dict(), path)",
            hint="--unsafe, if you trust whoever made the file",
        ) from error
    except Exception as error:  # a damaged file raises RuntimeError, EOFError, KeyError, ...
        raise FileError("This weights file cannot be read.", got=f"{path}: {type(error).__name__}") from error
    if isinstance(state, torch.nn.Module):
        return state.state_dict()
    for key in ("state_dict", "model_state_dict"):
        if isinstance(state, dict) and key in state:
            return state[key]
    return state
