"""Scans of whole-sequence layers: the functions of Hugging Face models that run a linear recurrence over all steps.

Each family has one reader: it turns the arguments of the model's own scan function into a
:class:`~rnnlens.recurrence.sequence.SequenceCell`, and the outputs y_t of the cell into what that function returns. For
one forward pass :func:`seams` replaces these functions in the modelling modules of a model; the replacement runs in
time and memory linear in the number of steps.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import UnsupportedError, message
from ...recurrence.sequence import SequenceCell, forward, sweep
from ..shared.threads import hook_in_this_thread, substitute_in_this_thread
from .public import ANY_SCAN, in_order_of_time, note_scan

#: Versions of transformers whose scan functions the readers were tested with.
TESTED = "transformers 5.23"

Hold = Callable[[Tensor], Tensor]


@dataclass
class Reading:
    """A scan call read by its family: the cell, the gate, and what the replaced function returns for outputs y_t."""

    cell: SequenceCell
    finish: Callable[[Tensor, Tensor], Any]
    gate: Tensor | None = None


@dataclass(frozen=True)
class Family:
    """Layers that share a scan function.

    Attributes
    ----------
    name
        Name in results, as ``LayerInfo.cell``.
    axes
        Axes of a state.
    sizes
        Names of the module's attributes that may have the size of each axis.
    read
        Reader of a call, given its arguments by name; ``hold`` is applied to the coefficients of the recurrence.
    is_quadratic
        Whether the time of the model's own backward pass grows with the square of the number of steps.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[tuple[str, ...], ...]
    read: Callable[..., Reading]
    is_quadratic: bool = False


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Convert tensors to the widest dtype among them, at least float32, in which the models' own scans compute."""
    widest = torch.float32
    for tensor in tensors:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]


def _selective(call: Any, hold: Hold) -> Reading:
    """Read Mamba's scan: a = exp(dt A), W = dt B x, diagonal; Gu, Dao 2023, arXiv:2312.00752, eqs. 2-4."""
    kind = call.hidden_states.dtype
    x, dt, rate, write, read = _wide(call.hidden_states, call.dt, call.A, call.B, call.C)
    dt = dt if call.delta_bias is None else dt + call.delta_bias.to(dt.dtype)[..., None]
    dt = hold(functional.softplus(dt) if call.delta_softplus else dt).transpose(1, 2)
    cell = SequenceCell(
        ("channel", "state_unit"),
        decay=(dt[..., None], hold(rate)[None, None]),
        write=((dt * x.transpose(1, 2))[..., None], hold(write).transpose(1, 2)[:, :, None]),
        read=hold(read).transpose(1, 2)[:, :, None],
    )
    gate = None if call.z is None else functional.silu(call.z)

    def finish(y: Tensor, last: Tensor) -> Any:
        out = y.transpose(1, 2)
        out = out if call.D is None else out + x * call.D[None, :, None]
        out = out if gate is None else out * gate
        out = out if kind == x.dtype else out.to(kind)
        return (out, last) if call.return_last_state else out

    return Reading(cell, finish, None if gate is None else gate.transpose(1, 2))


def _chunked(call: Any, hold: Hold) -> Reading:
    """Read Mamba-2's scan: one decay per head; Dao, Gu 2024, arXiv:2405.21060, section 7."""
    x, dt, rate, *coefficients = _wide(call.hidden_states, call.dt, call.A, call.B, call.C)
    dt = dt if call.dt_bias is None else dt + call.dt_bias.to(dt.dtype)
    dt = hold((functional.softplus(dt) if call.dt_softplus else dt).clamp(*call.dt_limit))
    heads = x.shape[2] // call.B.shape[2]
    write, read = (hold(t).repeat_interleave(heads, 2)[:, :, :, None] for t in coefficients)
    cell = SequenceCell(
        ("head", "channel", "state_unit"),
        decay=((dt * hold(rate).to(dt.dtype))[..., None, None],),
        write=((dt[..., None] * x)[..., None], write),
        read=read,
        initial=call.initial_states,
    )

    def finish(y: Tensor, last: Tensor) -> Any:
        out = y if call.D is None else y + call.D[..., None] * x
        return (out, last) if call.return_final_states else out

    return Reading(cell, finish)


def _delta(call: Any, hold: Hold) -> Reading:
    """Read a gated delta rule: (I - beta k k^T) a for each head, with one decay a per head or per key.

    Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, eq. 10; Kimi delta attention: arXiv:2510.26692, eq. 1.
    """
    kind = call.query.dtype
    query, key, value, decay, beta = _wide(call.query, call.key, call.value, call.g, call.beta)
    heads = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(heads, 2) for t in (query, key))
    if call.use_qk_l2norm_in_kernel:
        query, key = _normalised(query), _normalised(key)
    key, beta = hold(key), hold(beta)[..., None]
    decay = decay[..., None] if decay.dim() == 3 else decay
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=(hold(decay)[..., None],),
        write=((beta * key)[..., None], value[..., None, :]),
        read=hold(query * key.shape[-1] ** -0.5)[..., None],
        left=(beta * key)[..., None],
        right=key[..., None],
        contracted=-2,
        initial=call.initial_state,
    )
    return Reading(cell, lambda y, last: (y.to(kind), last if call.output_final_state else None))


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gated_linear(call: Any, hold: Hold) -> Reading:
    """Read the scan of an RG-LRU: diagonal, the output is the state; De et al. 2024, arXiv:2402.19427, eqs. 1-4."""
    kind = call.hidden_states.dtype
    x, gate = _wide(call.hidden_states, call.recurrent_gate)
    start = None if call.recurrent_states is None else call.recurrent_states.to(x.dtype)
    cell = SequenceCell(("channel",), (hold(gate) * ~call.reset,), (x,), logarithmic=False, initial=start)
    return Reading(cell, lambda y, last: (y.to(kind), last))


_MIXER = (("intermediate_size",), ("ssm_state_size",))
_HEADS = (("num_heads",), ("head_dim",), ("ssm_state_size",))
_KEYS = (("num_v_heads", "num_heads"), ("head_k_dim", "head_dim"), ("head_v_dim", "head_dim"))

#: Families by the name of their scan function in a modelling module.
FUNCTIONS = {
    "mamba_selective_scan": Family("mamba", ("channel", "state_unit"), _MIXER, _selective, is_quadratic=True),
    "mamba2_chunk_scan": Family("mamba2", ("head", "channel", "state_unit"), _HEADS, _chunked),
    "torch_chunk_gated_delta_rule": Family("gated_delta", ("head", "key", "value"), _KEYS, _delta),
    "chunk_kimi_delta_attention": Family("kimi_delta", ("head", "key", "value"), _KEYS, _delta),
}
#: Families by the name of the method that is their scan.
METHODS = {"_rnn_scan": Family("rg_lru", ("channel",), (("lru_width",),), _gated_linear)}
#: Recurrences that run over all steps in one call and have no reader: function that the layer calls, or its class.
UNREAD = {
    "rwkv_linear_attention": "RWKV-4: numerator and denominator with a running maximum",
    "xLSTMBackend": "xLSTM: a matrix and a normaliser per head with a running maximum",
    "MiniMaxLightningAttention": "MiniMax: lightning attention with a fixed decay",
}


def scan_of(kind: type[nn.Module]) -> tuple[Any, str, Family] | None:
    """Return the owner of the scan that a class of layers calls, its name there and its family; None for no scan."""
    for name, family in METHODS.items():
        if name in vars(kind):
            return kind, name, family
    module = sys.modules.get(kind.__module__)
    called = _called(kind)
    for name, family in FUNCTIONS.items():
        if name in called and callable(getattr(module, name, None)):
            return module, name, family
    return None


def unread(module: nn.Module) -> str | None:
    """Return the description of a whole-sequence recurrence that no family reads; None for other modules."""
    called = {name for name in _called(type(module)) if name.islower()}
    return next((words for name, words in UNREAD.items() if name in {type(module).__name__, *called}), None)


def refuse_unread(named: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise ``UnsupportedError`` if a model has a whole-sequence recurrence that no family reads."""
    for path, module in named:
        words = unread(module)
        if words is not None:
            raise UnsupportedError(
                message(
                    f"Layer {path!r} runs its recurrence inside one call, in a form that rnnlens does not read yet.",
                    got=f"{type(module).__name__} ({words})",
                    expected="one of: " + ", ".join(f.name for f in (*FUNCTIONS.values(), *METHODS.values())),
                    hint='rl.gradients(model, x, y, loss=..., wrt="weights") differentiates the model as it is',
                )
            )


def _called(kind: type) -> set[str]:
    """Return the global names that the methods of a class use."""
    found: set[str] = set()
    for method in vars(kind).values():
        code = getattr(inspect.unwrap(method), "__code__", None) if inspect.isfunction(method) else None
        found.update(() if code is None else code.co_names)
    return found


def sequence_modules(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, Family]]:
    """List the whole-sequence layers among named modules, with their families."""
    found = []
    for path, module in named:
        scan = None if type(module).__module__.startswith("torch.") else scan_of(type(module))
        if scan is not None:
            found.append((path, module, scan[2]))
    return found


def state_sizes(module: nn.Module, family: Family) -> tuple[tuple[str, int], ...]:
    """Return the axes of a layer's state with their sizes; 0 where the module does not have the size."""
    holders = [module, *(h for h in (getattr(module, "config", None),) if h is not None)]

    def size(names: Sequence[str]) -> int:
        found = (getattr(holder, name, None) for name in names for holder in holders)
        return next((n for n in found if isinstance(n, int)), _width(module) if family.name == "rg_lru" else 0)

    return tuple((axis, size(names)) for axis, names in zip(family.axes, family.sizes, strict=True))


def _width(module: nn.Module) -> int:
    parameter = getattr(module, "recurrent_param", None)
    return int(parameter.shape[0]) if isinstance(parameter, Tensor) else 0


class _Scan(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of a sequence cell: outputs of all steps and the last state, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, cell: SequenceCell, names: tuple[str, ...], *parts: Tensor) -> tuple[Tensor, Tensor]:
        y, before, last = forward(_assembled(cell, parts))
        ctx.cell, ctx.names, ctx.before = cell, names, before
        ctx.save_for_backward(*parts)
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, _last: Any) -> tuple[Any, ...]:
        cell, whole = _assembled(ctx.cell, ctx.saved_tensors), {}
        pieces: dict[str, list[Any]] = {name: [] for name in ctx.names}
        for chunk, arriving in sweep(cell, ctx.before, output_grad):
            for name, grad in chunk.part_grads().items():
                pieces[name].append(grad)
            whole["initial"] = arriving
        for name, part in cell.parts.items():
            if name != "initial":
                found = pieces[name]
                whole[name] = sum(found[1:], found[0]) if part.shape[1] == 1 else torch.cat(found[::-1], 1)
        return (None, None, *(whole[name] for name in ctx.names))


def _assembled(cell: SequenceCell, parts: Sequence[Tensor]) -> SequenceCell:
    """Return the cell with other coefficient arrays, in the order of ``SequenceCell.parts``."""
    rest = iter(parts)
    return cell.with_parts(lambda _: next(rest))


def scan(cell: SequenceCell) -> tuple[Tensor, Tensor]:
    """Return outputs and last state of a sequence cell of tensors, with gradients in linear time."""
    parts, constant = cell.parts, cell.with_parts(torch.Tensor.detach)
    return _Scan.apply(constant, tuple(parts), *parts.values())  # type: ignore[no-any-return]


@dataclass
class ScanRecord:
    """One recorded scan call: layer, reading, outputs y_t inside the graph, and the mismatch with the model's own."""

    layer: str
    cell: SequenceCell
    output: Tensor
    gate: Tensor | None
    mismatch: float
    dtype: str


@dataclass
class ScanRecorder:
    """Scans of one forward pass.

    Attributes
    ----------
    wanted
        Paths of the layers whose calls are recorded; None for all.
    ran
        Samples and steps of every layer whose scan ran, by path.
    held
        Whether the coefficients are held constant (frozen map).
    model
        Model that runs, in which declared scans are stored.
    compared
        Whether the model's own function also runs, without gradients, to compare its outputs.
    """

    wanted: Collection[str] | None = None
    held: bool = False
    model: nn.Module | None = None
    compared: bool = True
    records: list[ScanRecord] = field(default_factory=list)
    ran: dict[str, tuple[int, int]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)

    def named(self) -> list[tuple[str, ScanRecord]]:
        """Return the records with the names of their nodes: a number is added where a layer has several scans."""
        count = Counter(record.layer for record in self.records)
        seen: Counter[str] = Counter()
        found = []
        for record in self.records:
            number = f"#{seen[record.layer]}" if count[record.layer] > 1 else ""
            seen[record.layer] += 1
            found.append((f"{record.layer}{number}", record))
        return found

    def declared(self, a: Tensor, b: Tensor, initial: Any, function: Any, name: str | None) -> Tensor:
        """Run and record one scan declared by ``rl.torch.scan``; return its states."""
        count = sum(path.startswith("scan") for path in self.ran)
        path = name or (f"scan_{count}" if count else "scan")
        axes = ("unit",) if a.dim() == 3 else ("head", "channel")
        x, decay = _wide(b, a)
        cell = SequenceCell(axes, (decay.detach() if self.held else decay,), (x,), logarithmic=False, initial=initial)
        states, _ = scan(cell)
        self.ran[path] = (cell.shape[0], cell.steps)
        if self.model is not None:
            note_scan(self.model, path, tuple(zip(axes, map(int, cell.shape[2:]), strict=True)))
        if self.wanted is not None and path not in self.wanted and ANY_SCAN not in self.wanted:
            return states.to(b.dtype)
        states = states if states.requires_grad else states.requires_grad_()
        record = ScanRecord(path, cell, states, None, 0.0, _coarsest((a, b), {}))
        self.records.append(record)
        with torch.no_grad():
            given = (a, b) if initial is None else (a, b, initial)
            record.mismatch = _mismatch(states, (function or in_order_of_time)(*given))
        return states.clone().to(b.dtype)

    def around(self, original: Callable[..., Any], family: Family) -> Callable[..., Any]:
        """Return the replacement of a scan function."""

        def replaced(*args: Any, **kwargs: Any) -> Any:
            hold: Hold = (lambda t: t.detach()) if self.held else (lambda t: t)
            reading = _read_call(original, family, hold, args, kwargs)
            y, last = scan(reading.cell)
            path = self.inside[-1] if self.inside else ""
            self.ran[path] = (reading.cell.shape[0], reading.cell.steps)
            if self.wanted is None or path in self.wanted:
                y = y if y.requires_grad else y.requires_grad_()
                record = ScanRecord(path, reading.cell, y, reading.gate, 0.0, _coarsest(args, kwargs))
                self.records.append(record)
                y = y.clone()
            result = reading.finish(y, last)
            if (self.wanted is None or path in self.wanted) and self.compared:
                with torch.no_grad():
                    record.mismatch = _mismatch(result, original(*args, **kwargs))
            return result

        return substitute_in_this_thread(replaced, original)


def _read_call(original: Any, family: Family, hold: Hold, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading:
    """Read a call by the names of its arguments; raise ``UnsupportedError`` if the function has other ones."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    try:
        return family.read(SimpleNamespace(**bound.arguments), hold)
    except AttributeError as error:
        raise UnsupportedError(
            message(
                f"The scan function of {family.name} takes other arguments than rnnlens reads.",
                got=f"transformers {_version()}: {original.__module__}.{original.__name__}, {error}",
                expected=f"the arguments of {TESTED}",
            )
        ) from error


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "?"))


def _coarsest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the coarsest dtype of a call's tensors, at most float32, in which the models' own scans compute."""
    kinds = {t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()}
    half = sorted(str(kind) for kind in kinds if kind.itemsize < 4)
    return (half[0] if half else "torch.float32").removeprefix("torch.")


def _mismatch(ours: Any, theirs: Any) -> float:
    """Return the largest difference of the outputs relative to the largest output."""
    mine, reference = (value[0] if isinstance(value, tuple) else value for value in (ours, theirs))
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    return float((mine.detach() - reference).abs().max()) / largest if largest else 0.0


@contextmanager
def seams(modules: Sequence[tuple[str, nn.Module]], recorder: ScanRecorder) -> Iterator[ScanRecorder]:
    """Replace the scan functions of a model's whole-sequence layers within the block.

    Raises
    ------
    UnsupportedError
        After the block, for a layer that ran without a call of its scan function.
    """
    layers = sequence_modules(modules)
    entered: set[str] = set()
    with ExitStack() as stack:
        for path, module, _ in layers:
            stack.callback(
                module.register_forward_pre_hook(hook_in_this_thread(_entering(recorder, path, entered))).remove
            )
            leave = hook_in_this_thread(lambda *_: _left(recorder))
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        for owner, name, family in dict.fromkeys(s for _, m, _ in layers if (s := scan_of(type(m))) is not None):
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, recorder.around(original, family))
        yield recorder
    for path, module, family in layers:
        if path in entered and path not in recorder.ran:
            raise _bypassed(path, module, family)


def _entering(recorder: ScanRecorder, path: str, entered: set[str]) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        recorder.inside.append(path)
        entered.add(path)

    return enter


def _left(recorder: ScanRecorder) -> None:
    if recorder.inside:
        recorder.inside.pop()


def _bypassed(path: str, module: nn.Module, family: Family) -> UnsupportedError:
    return UnsupportedError(
        message(
            f"Layer {path!r} ({type(module).__name__}, {family.name}) ran without a call of its scan function.",
            got=f"transformers {_version()}, {'training' if module.training else 'evaluation'} mode",
            expected=f"the PyTorch scan of {TESTED}, over more than one step",
            hint="training=False, at least 2 steps, use_cache=False, and a model without fused kernels",
        )
    )
