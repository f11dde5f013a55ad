"""Search for the lines of a torch program at which a gradient ends; the program itself runs unchanged."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..typing import Array
from .cuts import Cut, CutKind, CutRecorder, shown_index, user_call

#: Operations that return some of the entries of a tensor.
_SELECTIONS = frozenset(
    ("__getitem__", "select", "narrow", "index_select", "gather", "take_along_dim", "split", "chunk", "unbind", "diff")
) | {"masked_select", "take", "tensor_split", "split_with_sizes", "unfold"}
#: Operations whose result does not depend on the values of the tensors that they take.
VALUELESS = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros")
) | {"new_ones", "new_empty", "new_full", "new_tensor"}
#: A tensor that holds an input or its embedding, and the mask of the entries whose gradient is followed.
_Source = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Group:
    """Operations of one line of code: the tensors with gradient that went in, and those that came out."""

    kind: CutKind
    operation: str
    line: tuple[str, int]
    shape: tuple[int, ...]
    index: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


class TorchCutRecorder(TorchFunctionMode, CutRecorder):  # type: ignore[misc]
    """Recorder of the operations that take a tensor with a gradient and return one without, or a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[Any, _Group] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self._embedded: list[torch.Tensor] = []
        self._is_searching = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_searching:
            self._record(getattr(func, "__name__", str(func)), func, args, kwargs or {}, result)
        return result

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        for tensor in inputs:
            if tensor.grad_fn is None and not isinstance(tensor, torch.nn.Parameter):
                self._leaves.setdefault(id(tensor), tensor)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if name == "embedding":
            self._embedded += outputs
        if not inputs or not outputs or name in VALUELESS:
            return
        kind: CutKind
        if not any(t.requires_grad for t in outputs):
            kind = "constant" if any(t.is_floating_point() for t in outputs) else "discrete"
        elif name in _SELECTIONS and sum(t.numel() for t in outputs) < inputs[0].numel():
            kind = "selection"
        else:
            return
        call = user_call()
        if call is None:
            return
        operation = "data" if name == "__get__" else name.strip("_")  # an attribute of a tensor
        if kind == "constant" and not torch.is_grad_enabled():
            operation += " in torch.no_grad()"
        index = shown_index(args[1]) if name == "__getitem__" else ""
        group = self._groups.setdefault((kind, call), _Group(kind, operation, call[:2], tuple(inputs[0].shape), index))
        group.inputs += inputs
        group.outputs += outputs

    def find(self, values: Sequence[Array], entries: Sequence[Array], others: Sequence[Array]) -> list[Cut]:
        """Return the lines that receive the gradient of the marked entries and do not pass it on."""
        self._is_searching = True
        try:
            sources, other_sources = (self._sources(values, masks) for masks in (entries, others))
            return [
                self._cut(group, sources, other_sources)
                for group in self._groups.values()
                if sources and not _carries(group.outputs, sources) and _carries(group.inputs, sources)
            ]
        finally:
            self._is_searching = False

    def _cut(self, group: _Group, sources: Sequence[_Source], other_sources: Sequence[_Source]) -> Cut:
        return Cut(
            group.kind,
            group.operation,
            *group.line,
            linecache.getline(*group.line).strip(),
            group.shape,
            group.index,
            takes_input=any(tensor is source for tensor in group.inputs for source, _ in sources),
            passes_other=_carries(group.outputs, other_sources),
        )

    def _sources(self, values: Sequence[Array], entries: Sequence[Array]) -> list[_Source]:
        """Pair the tensors that hold the inputs, or their embeddings, with masks of the entries to follow."""
        pairs = []
        for value, mask in zip(values, entries, strict=True):
            array = np.asarray(value)
            is_float = array.dtype.kind == "f"
            candidates = list(self._leaves.values()) if is_float else self._embedded
            for tensor in candidates:
                fits = tensor.shape == array.shape if is_float else tensor.shape[: array.ndim] == array.shape
                if fits and tensor.requires_grad and (not is_float or _equals(tensor, array)):
                    pairs.append((tensor, torch.as_tensor(np.array(mask), device=tensor.device)))
                    break
        return pairs


def _equals(tensor: torch.Tensor, array: Array) -> bool:
    return bool(torch.equal(tensor.detach().cpu(), torch.as_tensor(array).to(tensor.dtype)))


def _carries(tensors: Sequence[torch.Tensor], sources: Sequence[_Source]) -> bool:
    """Return whether a random projection of ``tensors`` has a gradient by the marked entries of the sources."""
    if any(tensor is source for tensor in tensors for source, _ in sources):
        return True
    targets = [t for t in dict.fromkeys(tensors) if t.grad_fn is not None and t.is_floating_point()]
    if not targets:
        return False
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in targets]
    with torch.enable_grad():
        grads = torch.autograd.grad(targets, [s for s, _ in sources], cotangents, retain_graph=True, allow_unused=True)
    return any(
        grad is not None and bool((grad[mask.expand(grad.shape) if mask.dim() == grad.dim() else mask] != 0).any())
        for grad, (_, mask) in zip(grads, sources, strict=True)
    )


@contextmanager
def record_cuts() -> Iterator[CutRecorder]:
    """Record the operations of torch programs within the block."""
    with TorchCutRecorder() as recorder:
        yield recorder
