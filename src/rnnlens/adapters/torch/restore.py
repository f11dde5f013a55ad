"""Runs a model for one forward pass and restores its state afterwards, also after an error.

A forward pass can change train/eval flags, buffers (running statistics, the vectors of a spectral norm), attributes
that a forward writes (``self.hidden = h`` would keep the graph in memory), and random states, also those of Python and
NumPy (teacher forcing is mostly decided by ``random.random()``).
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...autodiff.torch import set_seed

#: Torch's recurrences of all steps; packed sequences have one argument more.
_FUSED = tuple(getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


@contextmanager
def borrowed_model(model: torch.nn.Module, *, training: bool, seed: int | None) -> Iterator[None]:
    """Run the block with ``model`` in the requested mode and gradients on; restore everything afterwards.

    Compiled submodules run as the plain modules that they wrap, because hooks do not run inside a compiled graph.
    """
    with ExitStack() as stack:
        _restore_random_states(stack, model)
        stack.enter_context(restored_attributes(model))
        stack.enter_context(_restored_buffers(model))
        modules = list(model.modules())
        # A frozen TorchScript module has no training flag, and its parent cannot set one.
        with_training_flag = [module for module in modules if hasattr(module, "training")]
        for module in with_training_flag:
            stack.callback(setattr, module, "training", module.training)
        if len(with_training_flag) == len(modules):
            model.train(training)
        else:
            for module in with_training_flag:
                module.training = training
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(eager_mode())
        stack.enter_context(_without_checkpoints())
        if not training and any(parameter.is_cuda for parameter in model.parameters()):
            stack.enter_context(_DifferentiableKernels())
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  the state that user code draws from
            set_seed(seed)
        yield


@contextmanager
def differentiable_weights(model: torch.nn.Module, is_needed: bool = True) -> Iterator[None]:
    """Let frozen weights require gradients within the block; do nothing if ``is_needed`` is False."""
    with ExitStack() as stack:
        for parameter in model.parameters() if is_needed else ():
            if not parameter.requires_grad and parameter.is_floating_point():
                stack.callback(parameter.requires_grad_, False)
                parameter.requires_grad_(True)
        yield


def eager_mode() -> AbstractContextManager[Any]:
    """Run compiled code as plain Python within the block; the compiler is not loaded if nothing was compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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


def _restore_random_states(stack: ExitStack, model: torch.nn.Module) -> None:
    """Restore the global random states, and those of generators that modules contain, when ``stack`` closes."""
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, random.Random):
            stack.callback(value.setstate, value.getstate())
        elif isinstance(value, np.random.Generator):
            stack.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif isinstance(value, np.random.RandomState | torch.Generator):
            stack.callback(value.set_state, value.get_state())
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))


@contextmanager
def _restored_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Replace all buffers by copies within the block, and restore their values afterwards.

    Tensors saved for the backward pass are thus not overwritten when the block ends. :func:`restored_attributes`
    restores each module's table of buffers.
    """
    saved_values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    copies = {id(buffer): buffer.detach().clone() for buffer, _ in saved_values}
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            for name, buffer in module._buffers.items():
                module._buffers[name] = copies.get(id(buffer), buffer)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved_values:
                # Compare values: batch statistics change without a change of the tensor's version.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def restored_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules after the block, including the content of containers within them."""
    saved_attributes = [
        (module.__dict__, dict(module.__dict__)) for module in model.modules() if hasattr(module, "__dict__")
    ]
    contents: dict[int, tuple[Any, Any]] = {}
    pending = [
        value for _, attributes in saved_attributes for value in attributes.values() if type(value) in _CONTAINERS
    ]
    while pending:
        value = pending.pop()
        if id(value) not in contents:
            contents[id(value)] = value, value.copy()
            items = value.values() if isinstance(value, dict) else value
            pending += [item for item in items if type(item) in _CONTAINERS]
    try:
        yield
    finally:
        for container, content in (*saved_attributes, *contents.values()):
            _restore_content(container, content)


def _restore_content(container: Any, content: Any) -> None:
    """Restore a list, dict or set in place to its earlier ``content``; only items that differ are written."""
    if isinstance(container, (list, deque)):
        if len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
            container.clear()
            container.extend(content)
        return
    if isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
        return
    for key in [key for key in container if key not in content]:
        del container[key]
    for key, value in content.items():
        if key not in container or container[key] is not value:
            container[key] = value
