"""Families of whole-sequence layers: how the arguments of a model's own scan are read into a linear recurrence.

Each family has one reader: it turns the arguments of the model's scan function into a
:class:`~rnnlens.recurrence.sequence.SequenceCell`, and the outputs y_t of the cell into what that function returns.
:func:`register` adds a family of a third party.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import InputError, UnsupportedError
from ...recurrence.sequence import SequenceCell
from . import scan_mamba, scan_packages
from .scan_reading import Family, Hold, Reading, normalised_memory, unit_norm, widen_tensors

#: Versions of packages whose scan functions the readers were tested with.
TESTED = (
    "transformers 5.24, flash-linear-attention 0.6, mambapy 1.2, minGRU-pytorch 0.2, xlstm 2.0, s5-pytorch 0.2 or "
    "lru-pytorch 0.1"
)


def _read_delta_rule(call: Any, hold: Hold) -> Reading:
    """Read a gated delta rule: (I - beta k k^T) a for each head, with one decay a per head or per key.

    Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, eq. 10; Kimi delta attention: arXiv:2510.26692, eq. 1.
    """
    dtype = call.query.dtype
    query, key, value, decay, beta = widen_tensors(call.query, call.key, call.value, call.g, call.beta)
    heads = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(heads, 2) for t in (query, key))
    if call.use_qk_l2norm_in_kernel:
        query, key = unit_norm(query), unit_norm(key)
    key, beta = hold(key), hold(beta)[..., None]
    decay = decay[..., None] if decay.dim() == 3 else decay
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(hold(decay)[..., None],),
        write=((beta * key)[..., None], value[..., None, :]),
        read=hold(query * key.shape[-1] ** -0.5)[..., None],
        right=key[..., None],
        contracted=-2,
        initial=call.initial_state,
    )
    return Reading(cell, lambda y, last_state: (y.to(dtype), last_state if call.output_final_state else None))


def _read_gated_linear(call: Any, hold: Hold) -> Reading:
    """Read the scan of an RG-LRU: diagonal, the output is the state; De et al. 2024, arXiv:2402.19427, eqs. 1-4."""
    dtype = call.hidden_states.dtype
    x, gate = widen_tensors(call.hidden_states, call.recurrent_gate)
    initial = None if call.recurrent_states is None else call.recurrent_states.to(x.dtype)
    cell = SequenceCell(("channel",), (hold(gate) * ~call.reset,), (x,), logarithmic=False, initial=initial)
    return Reading(cell, lambda y, last_state: (y.to(dtype), last_state))


def _read_weighted_mean(call: Any, hold: Hold) -> Reading:
    """Read RWKV-4's scan: sums of weighted values and of weights, each relative to a running maximum m_t.

    Peng et al. 2023, arXiv:2305.13048, eqs. 16 and 22-28. The output does not depend on m_t, so m_t has no gradient.
    """
    dtype = call.value.dtype
    rate, first_bonus, key, value = widen_tensors(call.time_decay, call.time_first, call.key, call.value)
    rate, first_bonus, key = -torch.exp(hold(rate)), hold(first_bonus), hold(key)
    initial_maximum = torch.full_like(key[:, 0], -1e38) if call.state is None else call.state[2].to(key.dtype)
    running_maxima = [initial_maximum.detach()]
    for t in range(key.shape[1]):
        running_maxima.append(torch.maximum(running_maxima[-1] + rate.detach(), key[:, t].detach()))
    previous_maxima, new_maxima = torch.stack(running_maxima[:-1], 1), torch.stack(running_maxima[1:], 1)
    values = torch.stack([value, torch.ones_like(value)], -1)
    initial = None if call.state is None else torch.stack(call.state[:2], -1).to(key.dtype)
    cell = SequenceCell(
        ("channel", "part"),
        ((rate + previous_maxima - new_maxima)[..., None],),
        (torch.exp(key - new_maxima)[..., None], values),
        initial=initial,
        relative=True,
    )

    def finish(states: Tensor, last_state: Tensor) -> Any:
        output_maximum = torch.maximum(previous_maxima, (key + first_bonus).detach())
        past_sums = (
            torch.cat([cell.start()[:, None], states[:, :-1]], 1)
            * torch.exp(previous_maxima - output_maximum)[..., None]
        )
        total = past_sums + torch.exp(key + first_bonus - output_maximum)[..., None] * values
        state = [*last_state.unbind(-1), running_maxima[-1]] if call.return_state or call.state is not None else None
        return (total[..., 0] / total[..., 1]).to(dtype), state

    return Reading(cell, finish)


def _read_matrix_memory(call: Any, hold: Hold) -> Reading:
    """Read the scan of an mLSTM: a matrix and a normaliser per head, relative to a running maximum m_t.

    Beck et al. 2024, arXiv:2405.04517, eqs. 19-27. The normaliser is the last position of the axis "value".
    """
    dtype, config = call.query.dtype, call.self.config
    arguments = (call.query, call.key, call.value, call.igate, call.fgate)
    query, key, value, write, forget = (t.transpose(1, 2) for t in widen_tensors(*arguments))
    initial_maximum = torch.zeros_like(forget[:, 0]) if call.m_initial is None else call.m_initial[..., 0]
    initial = None
    if call.c_initial is not None:
        initial = torch.cat([call.c_initial, call.n_initial[..., None]], -1).to(forget.dtype)
    query, forget = hold(query) * key.shape[-1] ** -0.5, functional.logsigmoid(hold(forget))
    cell, new_maxima = normalised_memory(
        query, hold(key), value, hold(write), forget, initial_maximum.to(forget.dtype), initial
    )

    def finish(y: Tensor, last_state: Tensor) -> Any:
        scale = torch.maximum(y[..., -1:].abs(), torch.exp(-new_maxima)[..., None]) + config.eps
        h = (y[..., :-1] / scale).transpose(1, 2).to(dtype)
        returns_states = config.return_last_states if call.return_last_states is None else call.return_last_states
        if "inference" not in (call.mode or config.mode) and not returns_states:
            return h
        return h, (last_state[..., :-1], last_state[..., -1], new_maxima[:, -1][..., None])

    return Reading(cell, finish)


def _read_lightning(call: Any, hold: Hold) -> Reading:
    """Read MiniMax's lightning attention: one fixed decay per head; arXiv:2501.08313, section 2.2.1, eqs. 6-9.

    Its scan stands inside the layer's forward, so that the reader has what stands before and after it, too.
    """
    layer, x = call.self, call.hidden_states
    # The argument was renamed in transformers 5.24.
    if getattr(call, "cache", getattr(call, "past_key_values", None)) is not None:
        raise UnsupportedError("MiniMax runs with a cache.", expected="use_cache=False")
    states = layer.act_fn(layer.qkv_proj(x))
    states = sys.modules[type(layer).__module__].apply_mask_to_padding_states(states, call.attention_mask)
    states = states.reshape(*x.shape[:2], layer.num_attention_heads, 3 * layer.head_dim)
    query, key, value, rate = widen_tensors(*states.split(layer.head_dim, dim=3), layer.slope_rate)
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(-rate[None, None],),
        write=(hold(key)[..., None], value[..., None, :]),
        read=hold(query)[..., None],
        contracted=-2,
    )

    def finish(y: Tensor, last_state: Tensor) -> Any:
        normed = layer.norm(y.to(x.dtype).reshape(*x.shape[:2], -1))
        return layer.out_proj(torch.sigmoid(layer.output_gate(x)) * normed), last_state.to(x.dtype)

    return Reading(cell, finish)


_KEYS = (("num_v_heads", "num_heads"), ("head_k_dim", "head_dim"), ("head_v_dim", "head_dim"))

#: Families by the name of their scan function in a modelling module.
FUNCTIONS = {
    **scan_mamba.FUNCTIONS,
    "torch_chunk_gated_delta_rule": Family("gated_delta", ("head", "key", "value"), _KEYS, _read_delta_rule),
    "chunk_kimi_delta_attention": Family("kimi_delta", ("head", "key", "value"), _KEYS, _read_delta_rule),
    "rwkv_linear_attention": Family(
        "rwkv", ("channel", "part"), lambda layer: (layer.attention_hidden_size, 2), _read_weighted_mean
    ),
    **scan_packages.FUNCTIONS,
}
#: Families by the name of the method that is their scan.
METHODS = {
    "_rnn_scan": Family("rg_lru", ("channel",), lambda layer: layer.recurrent_param.shape, _read_gated_linear),
    **scan_packages.METHODS,
}


#: Families by the name of the class whose ``forward`` is the scan: of a module that the layer makes.
PARTS = {
    "xLSTMBackend": Family(
        "mlstm",
        ("head", "key", "value"),
        # The values have the normaliser in addition.
        lambda layer: (n := layer.config.num_heads, layer.qk_dim // n, layer.v_dim // n + 1),
        _read_matrix_memory,
    )
}


#: Families by the name of the layer's class, or its module and name, whose ``forward`` has the scan inside.
LAYERS = {
    "MiniMaxLightningAttention": Family(
        "lightning",
        ("head", "key", "value"),
        lambda layer: (layer.num_attention_heads, layer.head_dim, layer.head_dim),
        _read_lightning,
    ),
    **scan_packages.LAYERS,
}


def families() -> list[Family]:
    """Return all families of whole-sequence layers."""
    return [family for table in (FUNCTIONS, METHODS, PARTS, LAYERS) for family in table.values()]


def register(function: str, family: Family) -> None:
    """Add a family of whole-sequence layers, found by the name of the scan function that their class calls.

    Parameters
    ----------
    function
        Name of the function in the module that defines the layers' class, where the class looks it up at each call.
    family
        Name, axes of a state, their sizes, and the reader of a call.

    Raises
    ------
    InputError
        If the name is no identifier, or a family of that function or of that name exists.
    """
    if not (function.isidentifier() and isinstance(family, Family)):
        raise InputError("A family needs the name of a scan function.", got=f"{function!r}, {family!r}")
    if function in FUNCTIONS or family.name in {existing.name for existing in families()}:
        known_names = ", ".join(f"{existing.name}" for existing in families())
        raise InputError(f"A family of {function!r} or {family.name!r} exists.", got=f"known: {known_names}")
    FUNCTIONS[function] = family


def scans_of(layer_class: type[nn.Module]) -> list[tuple[Any, str, Family]]:
    """List the scans that a class of layers calls: the owner of each, its name there and its family."""
    module, names = sys.modules.get(layer_class.__module__), _global_names(layer_class)
    own_scans = {name: (layer_class, name, family) for name, family in METHODS.items() if name in vars(layer_class)}
    for name in (layer_class.__name__, f"{layer_class.__module__}.{layer_class.__name__}"):
        if name in LAYERS:
            own_scans.setdefault("forward", (layer_class, "forward", LAYERS[name]))
    parts = [
        (getattr(module, name), "forward", family)
        for name, family in PARTS.items()
        if name in names and isinstance(getattr(module, name, None), type)
    ]
    functions = [
        (module, name, family)
        for name, family in FUNCTIONS.items()
        if name in names and callable(getattr(module, name, None))
    ]
    scans = list(own_scans.values()) or parts or functions
    return [scan for scan in scans if scan[2].arguments <= _argument_names(vars(scan[0])[scan[1]])]


def _argument_names(function: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _global_names(layer_class: type) -> set[str]:
    """Return the global names that the methods of a class refer to."""
    names: set[str] = set()
    for method in vars(layer_class).values():
        code = getattr(inspect.unwrap(method), "__code__", None) if inspect.isfunction(method) else None
        names.update(() if code is None else code.co_names)
    return names


def unknown_scans(modules: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """List the functions named like a scan that classes of modules call and no family reads, as ``module.name``."""
    found: dict[str, None] = {}
    for _, module in modules:
        owner = sys.modules.get(type(module).__module__)
        for name in sorted(_global_names(type(module)) - FUNCTIONS.keys()):
            function = getattr(owner, name, None)
            # The method ``apply`` of an autograd function is torch's, its class is not.
            owner_class = getattr(function, "__self__", None)
            definer = owner_class if isinstance(owner_class, type) else function
            source = str(getattr(definer, "__module__", "")).partition(".")[0]
            if "scan" in name.lower() and _takes_two(function) and source not in ("torch", "rnnlens"):
                found[f"{type(module).__module__}.{name}"] = None
    return list(found)


def _takes_two(function: Any) -> bool:
    """Return whether a function can be called with the two arrays (a, b) of a scan."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:  # it takes another number of arguments, or is no function
        return False
    except ValueError:  # a built-in function without a signature
        return callable(function)
    return True


def unread_scans(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return the families that are known not to be read, by the functions that classes of modules call."""
    return {
        f"{type(module).__module__}.{name}": scan_mamba.NOT_READ[name]
        for _, module in modules
        for name in sorted(_global_names(type(module)) & scan_mamba.NOT_READ.keys())
    }


def sequence_modules(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, Family]]:
    """List the whole-sequence layers among named modules, with their families."""
    sequence_layers = []
    for path, module in modules:
        scans = [] if type(module).__module__.startswith("torch.") else scans_of(type(module))
        if scans and scans[0][2].is_read(module):
            sequence_layers.append((path, module, scans[0][2]))
    return sequence_layers


def state_sizes(module: nn.Module, family: Family) -> tuple[tuple[str, int], ...]:
    """Return the axes of a layer's state with their sizes; 0 where the module does not have the size."""
    if callable(family.sizes):
        return tuple(zip(family.axes, map(int, family.sizes(module)), strict=True))
    size_sources = [module, *(source for source in (getattr(module, "config", None),) if source is not None)]
    sizes = (
        next((n for name in names for source in size_sources if isinstance(n := getattr(source, name, None), int)), 0)
        for names in family.sizes
    )
    return tuple(zip(family.axes, sizes, strict=True))


def read_call(original: Any, family: Family, hold: Hold, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading:
    """Read a call by the names of its arguments; raise ``UnsupportedError`` if the function has other ones."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    names = [name for name, p in bound.signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    further = {key: value for name in names for key, value in bound.arguments.pop(name).items()}
    try:
        return family.read(SimpleNamespace(**bound.arguments, **further), hold)
    except AttributeError as error:
        raise UnsupportedError(
            f"The scan function of {family.name} takes other arguments than rnnlens reads.",
            got=f"{package_of(original)}: {original.__module__}.{original.__name__}, {error}",
            expected=f"the arguments of {TESTED}",
        ) from error


def package_of(definition: Any) -> str:
    """Return the name of the package that defines a class or function, with its version if it has one."""
    package = str(definition.__module__).partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    return package if version is None else f"{package} {version}"
