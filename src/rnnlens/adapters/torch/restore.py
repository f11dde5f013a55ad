"""Borrows a user's model: every run of a user's torch code is inside :func:`borrowed_model`, which restores all of it.

A forward pass, a loss or a single step of a cell can change much more than its result: train/eval flags, buffers
(running statistics, the vectors of a spectral norm), weights (``self.weight.data.clamp_(0)``), attributes
(``self.hidden = h`` would keep the graph in memory), and random states, also those of Python and NumPy (teacher
forcing is mostly decided by ``random.random()``).
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...autodiff.torch import set_seed
from .package_loops import package_loops_by_step, scan_by_loop
from .triton_kernels import without_triton

#: Torch's recurrences of all steps; packed sequences have one argument more.
_FUSED = tuple(getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NO_STATE = frozenset({type, ModuleType, bool, int, float, str, bytes, tuple, type(None)})
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)

#: Beginnings of the names of files without user code: the standard library, packages, this one, and frozen modules.
_NO_USER_CODE = (
    "<frozen",
    *{
        f"{path}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for path in [sysconfig.get_path(name)]
    },
    str(Path(__file__).parents[2]),
)

#: Largest size, in bytes, of a tensor that is copied before every run.
SMALL = 2**16
#: Larger tensors of models, with the modes (``training``) of the runs that left them unchanged.
_UNCHANGED_BY: Any = WeakTensorKeyDictionary()


class BorrowedModel:
    """State of a model before a run, and what the run changed in its tensors.

    Restored are the attributes of all modules, the content of containers within them and the attributes of objects
    directly within those; flags, generators, and tensors: weights, buffers, and tensors that are plain attributes.

    A tensor that was assigned to (``weight.data = ...``) gets its memory back. A tensor that was changed in place is
    restored from a copy. Copying all weights would take longer than many a run of a model with large tables, so a
    tensor of more than ``SMALL`` bytes is not copied again after a whole run in the same mode left it unchanged. If a
    later run changes it after all, a warning says so.

    While another thread runs user code, which may train the model, values and gradients of weights are that thread's:
    they are neither saved nor restored.
    """

    def __init__(self, modules: Sequence[nn.Module], training: bool | None) -> None:
        self._training = training
        #: Whether a parameter is on a CUDA device.
        self.has_cuda = False
        #: Whether the run wrote tensors of the model.
        self.has_written = False
        self._contents: list[tuple[Any, Any]] = []
        self._flags: list[tuple[nn.Module, bool]] = []
        self._grads: list[tuple[nn.Parameter, Tensor | None]] = []
        self._requires_grad: list[tuple[nn.Parameter, bool]] = []
        self._generator_states: list[Callable[[], None]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  the state that user code draws from
        ]
        # Those of CUDA and XPU exist once the device was used.
        generators: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
        generators += getattr(torch.xpu, "default_generators", ())
        if torch.backends.mps.is_available():
            generators.append(torch.mps._get_default_mps_generator())
        tensors: dict[int, Tensor] = {}
        self._walk(modules, generators, tensors)
        for generator in generators:
            if isinstance(generator, random.Random):
                restore = partial(generator.setstate, generator.getstate())
            elif isinstance(generator, np.random.Generator):
                restore = partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
            else:
                restore = partial(generator.set_state, generator.get_state())
            self._generator_states.append(restore)
        parameters: dict[int, nn.Parameter] = {}
        for module in modules:
            tensors |= zip(map(id, module._buffers.values()), module._buffers.values(), strict=True)
            parameters |= zip(map(id, module._parameters.values()), module._parameters.values(), strict=True)
            if hasattr(module, "training"):
                self._flags.append((module, module.training))
        self._requires_grad = [(p, p.requires_grad) for p in parameters.values() if p is not None]
        self.has_cuda = any(parameter.is_cuda for parameter, _ in self._requires_grad)
        if threading.active_count() > 1 and _other_threads_run_user_code():
            for key in parameters:  # a recurrent module has them in a list, too
                tensors.pop(key, None)
        else:
            tensors |= parameters
            self._grads = [(p, p.grad) for p, _ in self._requires_grad]
        for parameter, grad in self._grads:
            if grad is not None:  # a backward pass within the forward would add to it
                parameter.grad = None
        # Sparse, lazy and distributed tensors have no memory of their own.
        self._tensors: list[_TensorState] = []
        for tensor in tensors.values():
            if type(tensor) in _TENSORS and tensor.layout is torch.strided and not tensor.is_meta:
                is_small = tensor.numel() * tensor.element_size() <= SMALL
                is_copied = is_small or training not in _UNCHANGED_BY.get(tensor, ())
                data, version = tensor.data, None if tensor.is_inference() else tensor._version
                self._tensors.append(_TensorState(tensor, data, data.clone() if is_copied else None, version))

    def _walk(self, modules: Sequence[nn.Module], generators: list[Any], tensors: dict[int, Tensor]) -> None:
        """Save the attributes of modules and the content of containers; collect generators and tensors in them."""
        seen: set[int] = set()
        pending: list[tuple[Any, bool]] = [(m.__dict__, True) for m in modules if hasattr(m, "__dict__")]
        while pending:
            container, may_hold_objects = pending.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            content = container.copy()
            self._contents.append((container, content))
            for value in content.values() if isinstance(content, dict) else content:
                kind = type(value)
                if kind in _CONTAINERS:
                    if value:
                        pending.append((value, may_hold_objects))
                    else:  # most of a module's: the dictionaries of its hooks
                        self._contents.append((value, None))
                elif kind in _NO_STATE or isinstance(value, nn.Module):
                    pass
                elif isinstance(value, Tensor):
                    tensors[id(value)] = value
                elif isinstance(value, _GENERATORS):
                    generators.append(value)
                elif may_hold_objects and type(getattr(value, "__dict__", None)) is dict and not callable(value):
                    pending.append((value.__dict__, False))

    def restore(self, *, is_complete: bool) -> None:
        """Restore everything; ``is_complete``: the run ended without an error."""
        for restore in self._generator_states:
            restore()
        for container, content in self._contents:
            if content is not None:
                _restore_content(container, content)
            elif container:
                container.clear()
        for module, flag in self._flags:
            if module.training != flag:
                module.training = flag
        for state in self._tensors:
            state.restore(self._training if is_complete else None)
            self.has_written |= state.moved is not None or state.later_version is not None or state.written is not None
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad

    @contextmanager
    def written_values(self) -> Iterator[None]:
        """Give the model's tensors, within the block, the values that the run wrote.

        A backward pass after the run reads weights at the values that the forward pass had.
        """
        with ExitStack() as stack, torch.no_grad():
            for state in self._tensors:
                if state.moved is not None:
                    stack.callback(setattr, state.tensor, "data", state.tensor.data)
                    state.tensor.data = state.moved
                elif state.written is not None:
                    stack.callback(state.data.copy_, state.data.clone())
                    state.data.copy_(state.written)
                if state.later_version is not None:
                    stack.callback(_set_version, state.tensor, state.tensor._version)
                    _set_version(state.tensor, state.later_version)
            with torch.enable_grad():
                yield


def _set_version(tensor: Tensor, version: int) -> None:
    """Set the number with which autograd sees whether a tensor that a graph needs was changed."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@dataclass(slots=True, eq=False)
class _TensorState:
    """Values and memory of a tensor before a run, and what the run wrote.

    ``moved``: memory that was assigned. ``written``: values that were written in place. ``later_version``: autograd's
    number of the tensor's version after the run, if it is another one.
    """

    tensor: Tensor
    data: Tensor
    copy: Tensor | None
    version: int | None
    moved: Tensor | None = None
    written: Tensor | None = None
    later_version: int | None = None

    def restore(self, training: bool | None) -> None:
        """Restore the tensor. ``training``: mode of a complete run, which shows whether such runs change it."""
        tensor, data, copy = self.tensor, self.data, self.copy
        if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape or tensor.dtype != data.dtype:
            self.moved, tensor.data = tensor.data, data
        is_changed = self.version is not None and tensor._version != self.version
        if copy is None:
            if is_changed:
                del _UNCHANGED_BY[tensor]
                warnings.warn(
                    f"The model's forward changed a tensor of shape {tuple(tensor.shape)} in place. Earlier runs did "
                    "not, so no copy was made, and the change stays.",
                    stacklevel=2,
                )
            return
        if self.version is not None and is_changed:
            self.later_version = tensor._version
            _set_version(tensor, self.version)
        if not torch.equal(data, copy):
            self.written = data.clone()
            data.copy_(copy)
        elif not is_changed and training is not None and copy.numel() * copy.element_size() > SMALL:
            _UNCHANGED_BY.setdefault(tensor, set()).add(training)
        self.copy = None


def _other_threads_run_user_code() -> bool:
    """Return whether a thread besides this one is in code that is neither the standard library's nor a package's."""
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and thread != threading.get_ident():
            if not frame.f_code.co_filename.startswith(_NO_USER_CODE):
                return True
            frame = frame.f_back
    return False


@contextmanager
def borrowed_model(
    model: nn.Module,
    *,
    training: bool | None = None,
    seed: int | None = None,
    loss: Any = None,
    differentiable: bool = False,
    library_only: bool = False,
) -> Iterator[BorrowedModel]:
    """Run the block with gradients on, and restore the model, its loss and all random generators afterwards.

    ``training`` is the mode of the model in the block; None leaves its flags. ``loss``: the user's loss, which may be
    a module. ``differentiable``: frozen weights require gradients, too. Compiled submodules run as the plain modules
    that they wrap, because hooks do not run inside a compiled graph. ``library_only``: the model should
    call library modules alone, so that torch's higher-order scan is left as it is.
    """
    modules = list(nn.Module.modules(model))
    owner = getattr(loss, "__self__", loss)
    loss_modules = [m for m in nn.Module.modules(owner) if m not in modules] if isinstance(owner, nn.Module) else []
    borrowed = BorrowedModel([*modules, *loss_modules], training)
    is_complete = False
    try:
        if training is not None:
            _set_mode(model, training, set())
        for parameter in nn.Module.parameters(model) if differentiable else ():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.requires_grad_(True)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:  # the compiler is not loaded if nothing was compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if not library_only:
                stack.enter_context(scan_by_loop())
                stack.enter_context(package_loops_by_step())
                stack.enter_context(without_triton(model))
            stack.enter_context(_without_checkpoints())
            if not training and borrowed.has_cuda:
                stack.enter_context(_DifferentiableKernels())
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002  the state that user code draws from
                set_seed(seed)
            yield borrowed
            is_complete = True
    finally:
        borrowed.restore(is_complete=is_complete)


def _set_mode(module: nn.Module, training: bool, seen: set[int]) -> None:
    """Set the training flag of a module and of those in it, without calling ``train``, which the user may define.

    A module with its own ``train`` that is in the mode already is left as it is: its ``train`` may keep some parts in
    evaluation mode. A frozen TorchScript module has no flag.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    if hasattr(module, "training"):
        has_own_train = getattr(type(module).train, "__module__", "").partition(".")[0] != "torch"
        if has_own_train and module.training == training:
            return
        module.training = training
    for child in module.children():
        _set_mode(child, training, seen)


class _DifferentiableKernels(TorchFunctionMode):  # type: ignore[misc]
    """Function mode in which fused recurrences in eval mode run in their training mode, without dropout.

    That changes no value, and cuDNN can be differentiated in this mode only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUSED:
            mode = 7 if isinstance(args[3], (list, tuple)) else 6  # index of `train`, after the rate of dropout
            args = args if args[mode] else (*args[: mode - 1], 0.0, True, *args[mode + 1 :])
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Run checkpointed functions without checkpointing within the block: the values are the same.

    With checkpointing a layer is recomputed in the backward pass, after its hooks were removed. With
    ``use_reentrant=True`` its tensors are not on the graph either.
    """
    checkpoint: Any = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None:
        yield
        return
    original = checkpoint._checkpoint_without_reentrant_generator
    outer_apply = vars(checkpoint.CheckpointFunction).get("apply")  # set by an outer block

    def no_checkpoint(*_args: Any, **_options: Any) -> Iterator[None]:
        yield

    checkpoint.CheckpointFunction.apply = lambda function, _preserve, *args: function(*args)
    checkpoint._checkpoint_without_reentrant_generator = no_checkpoint
    try:
        yield
    finally:
        if outer_apply is None:
            del checkpoint.CheckpointFunction.apply
        else:
            checkpoint.CheckpointFunction.apply = outer_apply
        checkpoint._checkpoint_without_reentrant_generator = original


def _restore_content(container: Any, content: Any) -> None:
    """Restore a list, dict or set in place to its earlier ``content``; only items that differ are written."""
    if isinstance(container, (list, deque)):
        if len(container) != len(content) or not all(map(is_, container, content)):
            container.clear()
            container.extend(content)
        return
    if isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
        return
    if len(container) == len(content) and all(
        map(is_, (*container, *container.values()), (*content, *content.values()))
    ):
        return
    for key in [key for key in container if key not in content]:
        del container[key]
    for key, value in content.items():
        if key not in container or container[key] is not value:
            container[key] = value
