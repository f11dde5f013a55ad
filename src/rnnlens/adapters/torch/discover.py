"""Finds the layers of a torch model, their names and roles, and refuses layers that cannot be recorded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean
from ...recurrence.cells import registered
from ..protocol import LayerInfo
from .cells import build_cell, has_own_forward
from .function_model import FunctionModel
from .public import (
    ANY_SCAN,
    DECLARED_CELLS,
    KEPT_STATES,
    LOOPS_RUN,
    RAN_AS_CELL,
    SCANS_RUN,
    STATES_RUN,
    is_declared_cell,
)
from .scan_families import sequence_modules, state_sizes
from .weights import class_of, node_name

_STATE_PARAMETER = re.compile(r"^(h|c|hx|hc|hidden|state|states|carry|prev|memory)$|hidden|state")
#: Containers of modules, which are never called themselves.
HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_RECURRENT_SCRIPT = {"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the plain module inside ``torch.compile(module)``; raise ``ModelError`` for one that is not built."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod
    for path, submodule in module.named_modules():
        if isinstance(submodule, LazyModuleMixin):
            raise ModelError(
                f"{path or 'The model'!r} is not built: its weights do not exist yet.",
                got=type(submodule).__name__,
                expected="a module whose input shape is known",
                hint="call the model once on a batch, model(x)",
            )
    return module


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List every module once, with its path. The wrapper of ``torch.compile`` is left out.

    The model itself is named after its class: ``net``, or ``net_model`` if one of its parts is called ``net``.
    """
    modules: list[tuple[str, nn.Module]] = []
    own_name = type(model).__name__.lower()
    own_name += "_model" if own_name in model._modules else ""
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules:
            continue
        if "_orig_mod" in path:
            path = ".".join(name for name in path.split(".") if name != "_orig_mod")
        modules.append((path or own_name, module))
    return modules


def recurrent_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List torch's own recurrent modules and cells that can be recorded, in the order of their definition."""
    modules = named_modules(model)
    declared_cells = [path for path, module in modules if is_declared_cell(module)]
    recurrent = []
    for path, module in modules:
        if any(path.startswith(f"{cell_path}.") for cell_path in declared_cells):
            continue
        _refuse_unrecordable(path, module)
        if class_of(module) is not None and not is_declared_cell(module):
            recurrent.append((path, module))
    return recurrent


def _refuse_unrecordable(path: str, module: nn.Module) -> None:
    """Raise ``UnsupportedError`` for a recurrent layer in TorchScript or a quantized one: it cannot be recorded."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    original_name = str(getattr(module, "original_name", "")) if is_script else ""
    if original_name in _RECURRENT_SCRIPT and not is_declared_cell(module):
        raise UnsupportedError(
            f"Layer {path!r} is a {original_name} inside TorchScript, whose steps cannot be recorded.",
            got="torch.jit.script or torch.jit.trace",
            expected="the Python module before torch.jit",
            hint="trace the module before scripting it; load_state_dict() takes the scripted weights",
        )
    if "quantized" in type(module).__module__ and type(module).__name__ in _RECURRENT_SCRIPT:
        raise UnsupportedError(
            f"Layer {path!r} is quantized; integer kernels have no gradient.",
            got=f"{type(module).__module__}.{type(module).__name__}",
            expected="the floating-point model",
        )


def refuse_scripts(modules: list[tuple[str, nn.Module]]) -> None:
    """Raise ``UnsupportedError`` if any module is TorchScript, which may contain a recurrence."""
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"No recurrent layer ran in Python, and {path!r} is TorchScript, which cannot be recorded.",
                got="torch.jit.script, torch.jit.trace or torch.jit.freeze",
                expected="the Python module before torch.jit",
            )


def refuse_own_loops(recurrent: list[tuple[str, nn.Module]]) -> None:
    """Raise ``UnsupportedError`` if a subclass of a torch layer defines its own forward."""
    for path, module in recurrent:
        if has_own_forward(module):
            raise UnsupportedError(
                f"Layer {path!r} computes its steps in its own forward, which cannot be recorded.",
                got=f"{type(module).__name__}.forward, which does not call torch's kernel",
                expected="super().forward(x, state), or one call of a cell per step",
                hint="in its loop write h = rl.torch.step(lambda x, h: ..., x[:, t], h); "
                "rl.gradients by inputs and weights works unchanged",
            )


def cell_candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List modules that may be custom cells: their forward takes two arguments and they contain no recurrent layer.

    A candidate proves to be a cell when the model runs: its returned state must be the next call's state.
    """
    modules = named_modules(model)
    declared_cells = [path for path, module in modules if is_declared_cell(module)]
    known_paths = [*declared_cells, *(path for path, module in modules if class_of(module) is not None)]
    sequence_paths = {path for path, *_ in sequence_modules(modules)}

    def is_candidate(path: str, module: nn.Module) -> bool:
        if path in declared_cells:
            return True
        if path in sequence_paths:
            return False
        # Layers of transformers run whole sequences at a time; their scans are found by their functions.
        if type(module).__module__.startswith(("torch.nn.modules", "transformers.")) or isinstance(
            module, FunctionModel
        ):
            return False
        if any(path.startswith(f"{cell_path}.") for cell_path in declared_cells) or (
            known_paths and module is modules[0][1]
        ):
            return False
        contains_known = any(known_path == path or known_path.startswith(f"{path}.") for known_path in known_paths)
        return not contains_known and len(positional_names(module)) >= 2

    return [(path, module) for path, module in modules if is_candidate(path, module)]


def repeatable_modules(model: nn.Module, requested: Collection[str] | None) -> list[tuple[str, nn.Module]]:
    """List modules with weights that are no candidates for cells, as path and module; of ``requested`` paths, or all.

    Called on its own output, such a module proves to be the step of a loop over depth when the model runs. Modules
    that contain recurrent layers are left out.
    """
    modules = named_modules(model)
    known = {path for path, module in modules if is_declared_cell(module) or class_of(module) is not None}
    known |= {path for path, *_ in sequence_modules(modules)}
    candidates = {path for path, _ in cell_candidates(model)}

    def is_repeatable(path: str, module: nn.Module) -> bool:
        if path in candidates or isinstance(module, (*HOLDERS, torch.jit.ScriptModule)):
            return False
        if any(f"{other}.".startswith(f"{path}.") or path.startswith(f"{other}.") for other in known):
            return False
        return next(nn.Module.parameters(module), None) is not None

    return [(p, m) for p, m in modules[1:] if (requested is None or p in requested) and is_repeatable(p, m)]


def step_methods(model: nn.Module, requested: Collection[str] | None) -> list[tuple[str, nn.Module, str]]:
    """List methods that may be steps of a recurrence, as path, module and name: they take two arguments or more.

    ``requested``: paths of modules; None for all. Modules that contain recurrent layers are left out, as is what torch,
    Hugging Face or rnnlens define. A method proves to be a step when the model runs.
    """
    modules = named_modules(model)
    known_paths = [path for path, module in modules if is_declared_cell(module) or class_of(module) is not None]
    sequence_paths = {path for path, *_ in sequence_modules(modules)}
    methods = []
    for path, module in modules:
        contains_known = path in sequence_paths or any(f"{known}.".startswith(f"{path}.") for known in known_paths)
        if contains_known or (module is model and known_paths) or (requested is not None and path not in requested):
            continue
        names = {
            name
            for user_class in type(module).__mro__
            if not user_class.__module__.startswith(("torch.", "transformers.", "rnnlens."))
            for name, value in vars(user_class).items()
            if inspect.isfunction(value) and not hasattr(nn.Module, name)
        }
        methods += [(path, module, name) for name in sorted(names) if len(positional_names(module, name)) >= 2]
    return methods


def positional_names(module: nn.Module, method: str = "forward") -> list[str]:
    """Return the names of the positional arguments of a module's method."""
    if isinstance(module, torch.jit.ScriptModule):
        schema = getattr(getattr(module, "forward", None), "schema", None)
        return [argument.name for argument in schema.arguments[1:]] if schema is not None else []
    try:
        parameters = inspect.signature(getattr(module, method)).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def input_argument(module: nn.Module, method: str = "forward") -> tuple[int, str]:
    """Return position and name of a cell's input: the first argument of its method that is not named as a state."""
    names = positional_names(module, method)
    is_swapped = len(names) >= 2 and _STATE_PARAMETER.search(names[0]) and not _STATE_PARAMETER.search(names[1])
    return (1, names[1]) if is_swapped else (0, names[0] if names else "")


def describe(model: nn.Module) -> list[LayerInfo]:
    """Return the rows of ``rl.layers(model)``, without running the model; earlier runs do not change them.

    A custom cell is listed if it was declared by ``rl.torch.cell`` or if one of the first two arguments of its
    ``forward`` is named as a state. Other cells, loops and scans are found when the model runs (``known_layers``).
    """
    return _rows(unwrap(model), {}, {}, {})


def known_layers(model: nn.Module) -> list[LayerInfo]:
    """Return the rows of ``describe``, corrected and completed by what earlier runs of the model showed."""
    model = unwrap(model)
    rows, states = _rows(model, RAN_AS_CELL, LOOPS_RUN.get(model, {}), SCANS_RUN.get(model, {})), STATES_RUN.get(model)
    return [replace(row, states=states.get(row.name, ())) for row in rows] if states else rows


def _rows(
    model: nn.Module,
    ran_as_cell: Mapping[nn.Module, bool],
    loops: Mapping[str, int],
    scans: Mapping[str, tuple[tuple[str, int], ...]],
) -> list[LayerInfo]:
    rows = [row for path, module in recurrent_modules(model) for row in _recurrent_rows(path, module)]
    rows.extend(
        _custom_row(path, module)
        for path, module in cell_candidates(model)
        if is_declared_cell(module)
        or isinstance(module, nn.RNNCellBase)
        or ran_as_cell.get(module, any(is_state_name(name) for name in positional_names(module)[:2]))
    )
    candidates = dict(cell_candidates(model))
    rows.extend(
        _custom_row(path, module)
        for path, module in named_modules(model)
        if path not in candidates and class_of(module) is None and ran_as_cell.get(module)
    )
    for path, module, family in sequence_modules(named_modules(model)):
        axes = state_sizes(module, family)
        rows.append(_layer_row(path, type(module).__name__, family.name, axes[0][1], masked=False, state_axes=axes))
    order = {path: index for index, (path, _) in enumerate(named_modules(model))}
    rows.sort(key=lambda row: order[row.name.split("[")[0] if row.name not in order else row.name])
    listed = {row.name for row in rows}
    rows += [_layer_row(name, "loop", "custom", units) for name, units in loops.items() if name not in listed]
    return [
        *rows,
        *(_layer_row(n, "scan", "affine_scan", axes[0][1], masked=False, state_axes=axes) for n, axes in scans.items()),
    ]


def _layer_row(name: str, kind: str, cell: str, units: int, **fields: Any) -> LayerInfo:
    return LayerInfo(name, kind, cell, units, **{"direction": "forward", "return_sequences": True, **fields})


def is_state_name(name: str) -> bool:
    """Return whether an argument's name is that of one step's state; ``hidden_states`` names those of a sequence."""
    return _STATE_PARAMETER.search(name) is not None and not name.endswith("_states")


def _recurrent_rows(path: str, module: Any) -> Iterator[LayerInfo]:
    cell_and_activation = class_of(module)
    assert cell_and_activation is not None
    cell, activation = cell_and_activation
    is_fused = isinstance(module, nn.RNNBase)
    options: dict[str, Any] = {"bias": bool(module.bias)}
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        options["activation"] = activation
    if is_fused:
        options |= {"batch_first": module.batch_first, "dropout": module.dropout, "proj_size": module.proj_size}
    for layer in range(module.num_layers if is_fused else 1):
        direction = "bidirectional" if is_fused and module.bidirectional else "forward"
        name, units = node_name(path, module, layer), int(module.hidden_size)
        yield _layer_row(name, type(module).__name__, cell.kind, units, direction=direction, options=options)


def _custom_row(path: str, module: nn.Module) -> LayerInfo:
    registration = registered(module)
    if registration is not None:
        cell = build_cell(module, registration)
        return _layer_row(path, type(module).__name__, cell.kind, cell.state_sizes[0])
    sizes = (getattr(module, name, None) for name in ("hidden_size", "units", "hidden_dim", "state_size", "hidden"))
    units = next((size for size in sizes if isinstance(size, int)), 0)
    return _layer_row(path, str(getattr(module, "original_name", type(module).__name__)), "custom", units)


def fingerprint(model: nn.Module) -> Hashable:
    """Return a hashable of a model's structure, hooks, flags, code, known loops and scans, but not of its weights."""
    shown_by_runs: tuple[Any, ...] = (LOOPS_RUN, SCANS_RUN, STATES_RUN)
    structure: list[Any] = [tuple(by_model.get(model, {}).items()) for by_model in shown_by_runs]
    for path, module in model.named_modules(remove_duplicate=False):
        code = getattr(inspect.getattr_static(type(module), "forward", None), "__code__", None)
        structure += [
            path,
            type(module),
            code,
            module in DECLARED_CELLS,
            KEPT_STATES.get(module),
            RAN_AS_CELL.get(module),
            registered(module),
        ]
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                # A lazy module's parameters have no shape before its first batch.
                tensors = {key: tensor for key, tensor in value.items() if tensor is not None and not is_lazy(tensor)}
                structure.append(tuple((key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors.items()))
            elif name == "_modules" or "hook" in name:
                structure.append(
                    tuple((key, id(entry)) for key, entry in value.items()) if isinstance(value, dict) else ()
                )
            else:
                is_plain = isinstance(value, (int, float, str, type(None)))
                structure.append(
                    (name, value if is_plain else (type(value), getattr(value, "__code__", None), id(value)))
                )
    return tuple(structure)


@dataclass
class RequestedLayers:
    """Layers to record: recurrent modules, candidates for custom cells, other modules, and the requested names.

    ``sequences``: paths of the requested whole-sequence layers.
    """

    recurrent: list[tuple[str, nn.Module]]
    cells: list[tuple[str, nn.Module]]
    other_layers: list[tuple[str, nn.Module]]
    names: tuple[str, ...] | None
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    ran_paths: set[str] = field(default_factory=set)
    sequences: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, names: Sequence[str] | None) -> RequestedLayers:
        """Sort the requested names into kinds of layers; raise ``LayerNotFoundError`` for an unknown name."""
        recurrent, cells, modules = recurrent_modules(model), cell_candidates(model), named_modules(model)
        sequences = frozenset([*(path for path, *_ in sequence_modules(modules)), *SCANS_RUN.get(model, {}), ANY_SCAN])
        if names is None:
            return cls(recurrent, cells, [], None, modules, sequences=sequences)
        node_names = [
            node_name(path, module, i) for path, module in recurrent for i in range(getattr(module, "num_layers", 1))
        ]
        known_names = {*node_names, *dict(recurrent), *dict(cells), *LOOPS_RUN.get(model, {}), *sequences}
        other_layers = []
        for name in names:
            base = name.split("#")[0]
            matches = [(path, module) for path, module in modules if path == base]
            if not matches and base not in known_names:
                layer_names = dict.fromkeys([*node_names, *(path for path, _ in modules[1:])])
                raise LayerNotFoundError("No layer of that name.", got=repr(name), hint=did_you_mean(name, layer_names))
            other_layers += [] if base in known_names else matches
        bases = {name.split("#")[0] for name in names}
        module_paths = {base.split("[")[0] for base in bases}
        return cls(
            [
                (path, module)
                for path, module in recurrent
                if path in module_paths or path in bases or path.split("[")[0] in module_paths
            ],
            [(path, module) for path, module in cells if path in bases],
            other_layers,
            tuple(names),
            modules,
            sequences=sequences & bases,
        )

    def keeps(self, node: str) -> bool:
        """Return whether the layer with this node name was requested for the result."""
        if self.names is None:
            return True
        base = node.split("#")[0]
        return any(name in (node, base) or ("#" not in name and base.rpartition("[")[0] == name) for name in self.names)
