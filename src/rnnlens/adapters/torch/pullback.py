"""Keeps one forward pass, so that cotangents at any port can be pulled back to any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...autodiff.torch import PullMany
from ...errors import InputError, ModelError, UnsupportedError, raised_by
from ...layout import Layout
from ...typing import Array
from ..protocol import Batch, Outputs, Port
from ..shared import hook_in_this_thread
from .boundaries import PortTable, PortTensors, stand_ins
from .capture import NoGradientsError, recorded_pass, run_until_recorded
from .cells import replayable
from .chain import ChainRecorder
from .discover import RequestedLayers, named_modules, unwrapped
from .inputs import as_tensors, home_of, leaves_of, on_leaves, tensors_of
from .losses import host_array
from .record import CallRecorder, JoinRules, tapped
from .restore import borrowed

#: Function that pulls a cotangent of the value back to one cotangent per argument.
Pull = Callable[[Array], list[Array]]

#: Largest memory, in bytes, of the gradients of one vectorised pull.
BUDGET = 256 * 2**20


class TorchPullback:
    """Graph of one forward pass; implements :class:`rnnlens.adapters.protocol.Pullback`.

    Inputs, states and weights of recurrent layers are separate from the tensors of the user's code, so a gradient at
    such a port comes through that layer alone.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        of: Sequence[Port],
        wrt: Sequence[Port],
        cut: Sequence[Port] = (),
        watch: Sequence[Port] = (),
    ) -> None:
        model = unwrapped(model)
        self.of, self.wrt = tuple(of), tuple(wrt)
        self._watched = (*self.of, *self.wrt, *watch)
        self._pull_many = PullMany()
        #: Numbers that the sweep of a whole-sequence layer holds for one cotangent; 0 without such layers.
        self._in_scans = 0
        self.returned: Any = None
        #: Roles of axes that this pass showed, where the model is a plain chain of library modules.
        self.layouts: Mapping[Port, Layout] = {}
        boundaries = run_until_recorded(partial(self._run, model, batch, cut))
        self.outputs = len(boundaries.outputs)
        self._found = boundaries
        self.keep(boundaries)

    def keep(self, boundaries: PortTable) -> None:
        """Store the tensors and values of the requested ports."""
        self._boundaries: dict[Port, PortTensors] = {port: boundaries.find(port) for port in (*self.of, *self.wrt)}
        with torch.enable_grad():
            self._starts = {port: self._boundaries[port].value for port in self.of}
        self.values: Mapping[Port, Any] = {port: replayable(b.value) for port, b in self._boundaries.items()}

    def _run(
        self, model: nn.Module, batch: Batch, cut: Sequence[Port], rules: JoinRules, keep_gradients: bool
    ) -> PortTable:
        """Run one forward pass; raise ``NoGradientsError`` if it must be repeated because it ran without gradients."""
        modules = named_modules(model)
        asked = replace(RequestedLayers.of(model, None), sequences=frozenset())
        recorder = CallRecorder(rules, separate=True, cut={_path(port) for port in cut})
        plain: dict[str, list[Any]] = {}
        inputs, chain = on_leaves(as_tensors(batch.x, model, "x"), _source), ChainRecorder(model)
        if not any(port.kind == "loss" for port in (*self.of, *self.wrt)):
            batch = batch.without_loss()
        with borrowed(model, training=batch.training, seed=batch.seed):
            weights = stand_ins(modules, (*self.of, *self.wrt))
            handles = self._watch_plain(modules, asked, recorder, plain)
            try:
                outputs, loss, unseen = recorded_pass(
                    model, batch, inputs, recorder, chain, asked, keep_gradients=keep_gradients
                )
            finally:
                for handle in handles:
                    handle.remove()
        self._in_scans = recorder.scans.sweep_size
        self.returned = on_leaves(outputs, lambda t: t.detach() if isinstance(t, Tensor) else t)
        leaves = leaves_of(outputs)
        self.layouts = chain.layouts(outputs)
        if unseen and not any(t.requires_grad for t in (*tensors_of(outputs), *([] if loss is None else [loss]))):
            raise NoGradientsError
        return PortTable(recorder, leaves_of(inputs), leaves, loss, plain, weights, modules)

    def _watch_plain(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        asked: RequestedLayers,
        recorder: CallRecorder,
        plain: dict[str, list[Any]],
    ) -> list[Any]:
        recurrent = {id(module) for _, module in (*asked.recurrent, *asked.cells)}
        bases = {str(p.layer).partition("#")[0] for p in self._watched if p.layer and p.kind != "weight"}
        handles = []
        for path, module in modules:
            if path in bases and id(module) not in recurrent:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks, so it is reported as not called
                around = OutputHook(recorder, path, plain.setdefault(path, []))
                handles.append(module.register_forward_pre_hook(hook_in_this_thread(around.before), with_kwargs=True))
                handles.append(module.register_forward_hook(hook_in_this_thread(around.after)))
        return handles

    def vjp(self, cotangents: Mapping[Port, Any]) -> dict[Port, Tensor | None]:
        """Pull cotangents (K, ...) back to every ``wrt`` port; None for a port that no path leads to."""
        if self._starts is None:
            raise ModelError("This pullback was closed.", expected="use inside its with block")
        pairs = [(self._starts[port], torch.as_tensor(c).to(self._starts[port])) for port, c in cotangents.items()]
        pairs = [(start, c) for start, c in pairs if start.requires_grad]
        count = len(torch.as_tensor(next(iter(cotangents.values()))))
        sources = {id(t): t for port in self.wrt for t in self._boundaries[port].tensors if t.requires_grad}
        found: dict[int, Tensor | None] = dict.fromkeys(sources)
        if pairs and sources:
            with raised_by("The backward pass of your model"):
                found = dict(zip(sources, self._pull(pairs, list(sources.values()), count), strict=True))
        return {port: self._gathered(self._boundaries[port], found, count) for port in self.wrt}

    def _pull(self, pairs: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], count: int) -> list[Tensor | None]:
        size = sum(t.numel() * t.element_size() for t in (*sources, *(start for start, _ in pairs)))
        step = max(1, BUDGET // max(4 * size + 4 * self._in_scans, 1))
        parts: list[Sequence[Tensor | None]] = []
        for first in range(0, count, step):
            starts, some = [s for s, _ in pairs], [c[first : first + step] for _, c in pairs]
            parts.append(self._pull_many(starts, sources, some))
        return [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]

    def _gathered(self, boundary: PortTensors, found: Mapping[int, Tensor | None], count: int) -> Tensor | None:
        grads = [found.get(id(tensor)) for tensor in boundary.tensors]
        if all(grad is None for grad in grads):
            return None
        pairs = zip(boundary.tensors, grads, strict=True)
        whole = [t.new_zeros((count, *t.shape)) if grad is None else grad for t, grad in pairs]
        if count == 1:
            return replayable(boundary.gather([grad[0] for grad in whole])).unsqueeze(0)
        return replayable(torch.vmap(lambda *parts: boundary.gather(parts))(*whole))

    def __enter__(self) -> TorchPullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._starts = self._boundaries = self._found = None  # type: ignore[assignment]
        self.values, self.returned = {}, None


class OutputHook:
    """Pair of hooks that records inputs and outputs of a layer that is not recurrent.

    The recorded tensors are separate from the user's.
    """

    def __init__(self, recorder: CallRecorder, path: str, calls: list[Any]) -> None:
        self.recorder, self.path, self.calls = recorder, path, calls
        self.takes: list[Tensor] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a call (forward pre-hook)."""
        self.takes = []
        return None if self.recorder.paused else on_leaves((args, kwargs), self._note(self.takes))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Record the outputs of a call (forward hook)."""
        if self.recorder.paused:
            return None
        returns: list[Tensor] = []
        output = on_leaves(output, self._note(returns))
        self.calls.append((self.takes, returns))
        return output

    def _note(self, into: list[Tensor]) -> Any:
        def tap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            point, copy = tapped(self.path, value)
            into.append(point)
            return copy

        return tap


def _path(port: Port) -> str:
    """Return the module path of a port's layer: ``rnn`` for ``rnn[1]#0``."""
    return str(port.layer).partition("#")[0].partition("[")[0]


def _source(value: Any) -> Any:
    """Return a leaf that requires a gradient for a float or complex tensor; any other value unchanged."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], model: torch.nn.Module) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)`` on the model's device, and its vector-Jacobian product.

    Raise InputError if the function does not return one tensor of floats; from the pull-back also if the value does not
    depend on the arguments.
    """
    device, _ = home_of(model)
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [torch.tensor(np.asarray(a), device=device, requires_grad=True) for a in arrays]
        with raised_by("Your function"):
            value = function(*tensors)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise InputError(
            "The function must return one tensor of floats, computed with the framework's operations.",
            got=f"{type(value).__name__}",
            expected="a torch.Tensor, such as output.mean()",
        )

    def pull(cotangent: Array) -> list[Array]:
        if not value.requires_grad:
            raise InputError(
                "The function's value does not depend on its tensors in a way that can be differentiated.",
                hint="use differentiable operations of the framework: no NumPy, no argmax, no conversion to int",
            )
        seed = torch.as_tensor(np.asarray(cotangent), dtype=value.dtype, device=value.device)
        with raised_by("The backward pass of your function"):
            found = torch.autograd.grad(value, tensors, seed, allow_unused=True, retain_graph=True)
        return [np.zeros_like(a) if g is None else g.detach().cpu().numpy() for g, a in zip(found, arrays, strict=True)]

    return value.detach().cpu().numpy(), pull


def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """Return the output tensors of the model for one batch as arrays."""
    with TorchPullback(model, batch, [], []) as pullback:
        tree = pullback.returned
    leaves = leaves_of(tree)
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise UnsupportedError(
            "The model returns packed sequences, and packed sequences of several batches cannot be concatenated.",
            hint="pad_packed_sequence(..., total_length=x.shape[1]) in the model, or all samples as one batch",
        )
    return Outputs([host_array(leaf) for leaf in leaves], tree)
