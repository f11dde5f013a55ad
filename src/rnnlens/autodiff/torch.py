"""The torch engine: each tap is a node of its own in the autograd graph; the user's parameters are never changed."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..typing import Array
from .cuts import CutRecorder, CutSite, UserCall
from .interface import Engine, Keep, Memo, Program, Tap, TargetProgram
from .torch_bypass import StepRun
from .torch_cuts import record_cuts

#: Largest memory, in bytes, of the gradients of the rows of a Jacobian that are pulled back at once.
ROWS_BUDGET = 256 * 2**20

#: Numbers of which a backward pass returns gradients, below which it gets no thread of its own.
WORTH_A_THREAD = 2**16


class _PulledTarget(torch.autograd.Function):  # type: ignore[misc]
    """The number 0, whose derivatives by the targets are given cotangents."""

    @staticmethod
    def forward(ctx: Any, cotangents: Sequence[torch.Tensor], *targets: torch.Tensor) -> torch.Tensor:
        ctx.cotangents = cotangents
        return torch.zeros((), device=targets[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.cotangents)


def _vector_jacobian_product(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None] | None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Call ``torch.autograd.grad``; None where no path leads.

    With cotangents torch imports its symbolic shapes, and with them sympy: some 480 modules, which take longer than
    many a call. It does not for one target that holds the cotangents, which cannot be batched.
    """
    if cotangents and not options.get("is_grads_batched") and all(c is not None for c in cotangents):
        with torch.enable_grad():
            targets, cotangents = [_PulledTarget.apply(cotangents, *targets)], None
    return tuple(torch.autograd.grad(targets, sources, cotangents, allow_unused=True, **options))


def pull_gradients(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor] | None = None,
    **options: Any,
) -> list[torch.Tensor | None]:
    """Pull cotangents of ``targets`` back to one gradient per source; None where no path leads.

    Without cotangents the targets are scalars, and their cotangents are 1.
    """
    live_indices = [i for i, target in enumerate(targets) if target.requires_grad]
    if not live_indices or not sources:
        return [None] * len(sources)
    live_cotangents = None if cotangents is None else [cotangents[i] for i in live_indices]
    live_targets = [targets[i] for i in live_indices]
    return list(_vector_jacobian_product(live_targets, sources, live_cotangents, **options))


def backward_pass(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None] | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Differentiate a whole network; None where no path leads.

    Gradients that vanish over hundreds of steps become subnormal, and a processor's arithmetic with them is up to fifty
    times slower. It is therefore told to set subnormal results to 0. That setting belongs to a thread and to the
    threads that it starts, so that a large pass has a thread of its own, and the user's threads are not changed.
    """

    def differentiate() -> tuple[torch.Tensor | None, ...]:
        return _vector_jacobian_product(targets, sources, cotangents, **options)

    on_cpu = all(target.device.type == "cpu" for target in targets)
    if not on_cpu or sum(source.numel() for source in sources) < WORTH_A_THREAD:
        return differentiate()
    with ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(True,)) as executor:
        return executor.submit(contextvars.copy_context().run, differentiate).result()


class PullMany:
    """Vector-Jacobian products of K cotangents per target at once, or one by one if an operation cannot be batched.

    The autograd graph is retained.
    """

    def __init__(self) -> None:
        self._batched = True

    def __call__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Pull cotangents (K, ...) back to one gradient (K, ...) per source; None where no path leads."""
        count = len(cotangents[0])
        if self._batched and count > 1:
            try:
                return pull_gradients(targets, sources, cotangents, is_grads_batched=True, retain_graph=True)
            except RuntimeError:  # an operation without a batching rule: one cotangent at a time
                self._batched = False
        rows = [pull_gradients(targets, sources, [c[k] for c in cotangents], retain_graph=True) for k in range(count)]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


class _DtypeRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Recorder of the coarsest dtype of all operations that take and return floats."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _float_dtypes((args, kwargs)):
            dtypes = [*_float_dtypes(result), *([self.coarsest] if self.coarsest is not None else [])]
            self.coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        return result


def _float_dtypes(tree: Any) -> list[torch.dtype]:
    """Return the dtypes of the float tensors in nested arguments or results."""
    return [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class TorchEngine(Engine):
    """Differentiation, compilation and arrays of torch; see :class:`rnnlens.autodiff.Engine`."""

    name = "torch"
    compiles = False
    backward_pass = staticmethod(backward_pass)

    def to_array(self, tensor: Any) -> Array:
        """Convert a tensor to NumPy, or on a device detach it; bfloat16 and float16 become float32."""
        tensor = torch.as_tensor(tensor).detach()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.to(torch.float32)
        if tensor.device.type != "cpu" and not self._on_host:
            return tensor
        return tensor.cpu().resolve_conj().resolve_neg().numpy()

    def own_copy(self, array: Any) -> Any:
        """Copy an array or a tensor, whose memory torch could otherwise share with the user's."""
        return array.detach().clone() if isinstance(array, torch.Tensor) else super().own_copy(array)

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return detached tensors to substitute for the values of a program's variables."""
        # Detached tensors share memory with the parameters, whose requires_grad and grad do not change.
        return [tensor.detach() for tensor in tensors]

    def gradients(
        self, program: Program, cotangents: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        tapped: dict[str, Any] = {}
        with torch.enable_grad():
            targets, aux = program(_recording_tap(tapped, self._keep))
            target_tensors = [targets] if cotangents is None else [targets[name] for name in cotangents]
            target_cotangents = None if cotangents is None else list(cotangents.values())
            is_connected = tapped and any(target.requires_grad for target in target_tensors)
            gradients = (
                backward_pass(target_tensors, list(tapped.values()), target_cotangents)
                if is_connected
                else [None] * len(tapped)
            )
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(tapped.values(), gradients, strict=True))
        return targets, aux, dict(zip(tapped, zeros, strict=True))

    def forward(self, program: Program) -> tuple[Any, Any]:
        with torch.no_grad():
            return program(lambda key, tensor: tensor)

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Return ``function`` itself: nothing is compiled."""
        del arguments, memo
        return function

    def coarsest_dtype(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> str:
        """Call a function; return the name of the coarsest float dtype in which its operations computed, or ""."""
        with _DtypeRecorder() as recorder:
            function(*arguments)
        return "" if recorder.coarsest is None else str(recorder.coarsest).removeprefix("torch.")

    def record_cuts(self) -> AbstractContextManager[CutRecorder]:
        return record_cuts()

    @contextmanager
    def observe_detached(
        self, bypassed: Sequence[UserCall], every: int | None, ignored: Callable[[], bool]
    ) -> Iterator[Mapping[UserCall, CutSite]]:
        with StepRun(bypassed, every, ignored) as run:
            yield run.sites

    @property
    def on_accelerator(self) -> bool:
        return bool(torch.cuda.is_available())

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        if not torch.cuda.is_initialized():
            yield
            return
        with ExitStack() as stack:
            _without_tf32_products(stack)
            _without_tf32_kernels(stack)
            yield

    def without_fused_sums(self) -> AbstractContextManager[None] | None:
        is_alone = threading.active_count() == 1  # a training in another thread would go on with other kernels
        return _without_onednn() if is_alone and torch._C._get_mkldnn_enabled() else None

    @contextmanager
    def random_state_restored(self, seed: int | None = None) -> Iterator[None]:
        """Restore torch's random generators on exit, after seeding them if a seed is given.

        On torch, Keras' dropout without a seed draws from them.
        """
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=list(devices)):
            if seed is not None:
                set_seed(seed)
            yield

    def linearise(self, program: TargetProgram, arguments: Any, memo: Memo | None) -> Any:
        del memo  # nothing is compiled
        return _TorchProgram(program, arguments, self._keep)

    def per_step(self, function: Callable[..., Any]) -> _TorchSteps:
        return _TorchSteps(function)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Run a block without oneDNN; ``torch.backends.mkldnn.flags`` warns of a flag for Intel's GPUs."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _without_tf32_products(stack: ExitStack) -> None:
    """Switch off TF32 in matrix products until ``stack`` closes.

    Since torch 2.9 the older names raise RuntimeError where the user set TF32 by the newer ones.
    """
    try:
        previous_precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        _set_until_closed(stack, torch.backends.cuda.matmul, "fp32_precision", "ieee")
    else:
        if previous_precision != "highest":
            stack.callback(torch.set_float32_matmul_precision, previous_precision)
            torch.set_float32_matmul_precision("highest")


def _without_tf32_kernels(stack: ExitStack) -> None:
    """Switch off TF32 in cuDNN's recurrences and convolutions, where it is on by default, until ``stack`` closes."""
    try:
        if torch.backends.cudnn.allow_tf32:
            _set_until_closed(stack, torch.backends.cudnn, "allow_tf32", False)
    except RuntimeError:
        for operation in (torch.backends.cudnn.rnn, torch.backends.cudnn.conv):
            _set_until_closed(stack, operation, "fp32_precision", "ieee")


def _set_until_closed(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``stack`` closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def set_seed(seed: int) -> None:
    """Seed torch's random generators: only the CPU's if there is no accelerator.

    ``torch.manual_seed`` would take a millisecond more, because it records the call stack for uninitialised devices.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _recording_tap(tapped: dict[str, Any], keep: Keep) -> Tap:
    def tap(key: str, tensor: Any) -> Any:
        # view_as creates a new node of the graph, so that a tensor can be tapped twice under different keys.
        tapped_tensor = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        tapped[key] = keep(tensor, tapped_tensor)
        return tapped[key]

    return tap


class _TorchProgram:
    """A program run once, with its autograd graph, which lives as long as this object."""

    def __init__(self, program: TargetProgram, arguments: Any, keep: Keep) -> None:
        self._tapped: dict[str, Any] = {}
        self._pull = PullMany()
        with torch.enable_grad():
            self.targets, self.aux = program(arguments, _recording_tap(self._tapped, keep))

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        targets = [self.targets[name] for name in cotangents]
        target_cotangents = [
            torch.as_tensor(c if hasattr(c, "detach") else np.require(c, None, "W"), dtype=t.dtype, device=t.device)
            for c, t in zip(cotangents.values(), targets, strict=True)
        ]
        return dict(zip(self._tapped, self._pull(targets, list(self._tapped.values()), target_cotangents), strict=True))


class _TorchSteps:
    """A cell's step function and its derivatives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def step(self, x: Any, states: Any, weights: Any) -> Any:
        """Compute (output, new states) of one step, without gradients."""
        with torch.no_grad():
            return self._function(x, states, weights)

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        x, states, weights = inputs
        leaves = [t.detach().requires_grad_() for t in (x, *states, *weights.values())]
        count = len(states)
        with torch.enable_grad():
            named_weights = dict(zip(weights, leaves[1 + count :], strict=True))
            output, new_states = self._function(leaves[0], leaves[1 : 1 + count], named_weights)
            gradients = pull_gradients([output, *new_states], leaves, [cotangents[0], *cotangents[1]])
        filled_gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True)]
        return (
            filled_gradients[0],
            filled_gradients[1 : 1 + count],
            dict(zip(weights, filled_gradients[1 + count :], strict=True)),
        )

    def produced(self, inputs: Any, cotangents: Any) -> Any:
        x, states, weights = inputs
        leaves = [t.detach().requires_grad_() for t in (x, *states)]
        with torch.enable_grad():
            output, new_states = self._function(leaves[0], leaves[1:], weights)
            targets, all_cotangents = [output, *new_states], [cotangents[0], *cotangents[1]]
            return [self._state_gradient(state, targets, all_cotangents, leaves) for state in new_states]

    @staticmethod
    def _state_gradient(state: Any, targets: list[Any], cotangents: list[Any], leaves: list[Any]) -> Any:
        if not state.requires_grad or any(state is leaf for leaf in leaves):  # passed on, not produced
            return sum(c for target, c in zip(targets, cotangents, strict=True) if target is state)
        return pull_gradients(targets, [state], cotangents, retain_graph=True)[0]

    def jacobian(self, inputs: Any) -> Any:
        x, states, weights = inputs
        sizes = [s.shape[-1] for s in states]
        x = x.detach().requires_grad_()
        joined_states = torch.cat([s.detach() for s in states], dim=-1).requires_grad_()
        with torch.enable_grad():
            output, new_states = self._function(x, list(torch.split(joined_states, sizes, dim=-1)), weights)
            stacked_results = torch.cat([*new_states, output], dim=-1)
        return tuple(jacobian_rows(stacked_results, [joined_states, x]))


def jacobian_rows(stacked: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Jacobians (n, rows, size) of ``stacked`` (n, rows), independent along n, by each source (n, size)."""
    n, count = stacked.shape
    pull, jacobians = PullMany(), [source.new_zeros((n, count, source.shape[1])) for source in sources]
    numbers_per_row = n * (count + sum(source.shape[1] for source in sources))
    rows_at_once = max(1, ROWS_BUDGET // (4 * numbers_per_row * stacked.element_size()))
    for start in range(0, count, rows_at_once):
        # Samples do not mix within a step, so all samples share one unit cotangent per row of the Jacobian.
        rows = torch.arange(start, min(start + rows_at_once, count), device=stacked.device)
        unit_cotangents = torch.nn.functional.one_hot(rows, count).to(stacked.dtype)[:, None, :].expand(-1, n, count)
        for jacobian, grad in zip(jacobians, pull([stacked], sources, [unit_cotangents]), strict=True):
            if grad is not None:
                jacobian[:, start : start + rows_at_once] = grad.transpose(0, 1)
    return jacobians
