"""Loops without a module per step: each ``rl.torch.step`` of the user's is noted as the call of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import InputError, message
from .public import LISTENER, note_loop
from .record import Recorder
from .steps import CellHook


class LoopStep(nn.Module):  # type: ignore[misc]
    """The user's function as a module that knows which parameters of the model it uses."""

    def __init__(self, function: Callable[..., Any], names: dict[int, str]) -> None:
        super().__init__()
        self.function, self._names = function, names
        self._used: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *state: Any) -> Any:
        """The function, and from the graph that it made the parameters that it used."""
        output = self.function(x, *state)
        given = [t for t in pytree.tree_leaves((x, state)) if isinstance(t, Tensor)]
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor):
                leaves = [leaf for leaf in _leaves(tensor, given) if id(leaf) in self._names]
                self._used |= {self._names[id(leaf)]: leaf for leaf in leaves}
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the model that the function used, by the model's names."""
        return iter(self._used.items())


def _leaves(tensor: Tensor, given: Sequence[Tensor]) -> Iterator[Tensor]:
    """Leaves that a tensor was made of, but for those behind what the function was given."""
    done = {t.grad_fn for t in given} | {None}
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in done or node is None:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(parent for parent, _ in node.next_functions)


class _Loops:
    """Takes the place of the user's functions during one pass."""

    def __init__(self, recorder: Recorder, model: nn.Module, asked: Sequence[str] | None) -> None:
        self.recorder, self.model = recorder, model
        self.asked = None if asked is None else {name.partition("#")[0] for name in asked}
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.hooks: dict[Any, CellHook] = {}

    def __call__(self, function: Callable[..., Any], x: Tensor, state: Sequence[Any], name: str | None) -> Any:
        if self.recorder.paused:
            return function(x, *state)
        key: Any = name or getattr(function, "__code__", id(function))
        if key not in self.hooks:
            self.hooks[key] = self._hook(function, name)
        hook = self.hooks[key]
        if self.asked is not None and hook.owner.name not in self.asked:
            return function(x, *state)
        module: Any = hook.module
        module.function = function
        fed = hook.before(module, (x, *state), {})
        args, kwargs = ((x, *state), {}) if fed is None else fed
        output = module(*args, **kwargs)
        handed = hook.after(module, args, kwargs, output)
        first = next(t for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
        note_loop(self.model, hook.owner.name, int(first.flatten(1).shape[1]))
        return output if handed is None else handed

    def _hook(self, function: Callable[..., Any], name: str | None) -> CellHook:
        count = sum(hook.owner.name.startswith("loop") for hook in self.hooks.values())
        name = name or (f"loop_{count}" if count else "loop")
        if name in dict(self.model.named_modules()):
            what = f"rl.torch.step(..., name={name!r}): a module has that name."
            raise InputError(message(what, expected="a name of its own for each loop"))
        hook = CellHook(self.recorder, name, LoopStep(function, self.names))
        # The same in every pass over the model, as what one pass finds out about a cell is told to the next.
        hook.owner.key, hook.owner.named = hash((name, id(self.model))), True
        return hook


@contextmanager
def listening(recorder: Recorder, model: nn.Module, asked: Sequence[str] | None) -> Iterator[None]:
    """Within the block, in this thread, steps of loops are noted."""
    token = LISTENER.set(_Loops(recorder, model, asked))
    try:
        yield
    finally:
        LISTENER.reset(token)
