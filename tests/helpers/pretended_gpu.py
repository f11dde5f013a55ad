"""pytest plugin that simulates a GPU: every tensor is reported on the GPU until it is copied to the CPU.

Tensors created by a test are on the GPU, those created by the library on the device it states. NumPy cannot read GPU
tensors, and operations refuse tensors on both devices. All is computed on the CPU.
"""

from __future__ import annotations

import sys

import torch
from own_files import TESTS, package_path
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FACTORIES = _device_constructors()
#: Operations that may take tensors on both devices.
MIXED_DEVICE_OPS = ("__get__", "__set__", "__getitem__", "__setitem__", "to", "cpu", "copy_", "index_put_", "type_as")
#: Torch's own modules whose checks would fail on a simulated GPU tensor.
CHECKING_FILES = ("utils/rnn.py", "fake_tensor.py")

without_functions = torch._C.DisableTorchFunction
real_numpy, real_to, real_from_numpy = torch.Tensor.numpy, torch.Tensor.to, torch.from_numpy


def called_by_library():
    """Return whether the library, not a test, is the nearest caller apart from torch and function modes."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        path = package_path(code.co_filename)
        if code.co_filename.startswith(TESTS) or (path is not None and path.startswith("testing/")):
            return False
        if path is not None and not code.co_name.startswith("__torch_"):
            return True
        frame = frame.f_back
    return False


class OnCpu(torch.Tensor):
    """A tensor on the simulated CPU; results computed from it are on the CPU, too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        with without_functions():
            devices = {isinstance(leaf, OnCpu) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(devices) == 2 and name not in MIXED_DEVICE_OPS:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cpu and cuda:0")
        return super().__torch_function__(func, types, args, kwargs or {})


def move_to(tensor, on_cpu):
    """Return the tensor on the simulated CPU or GPU."""
    with without_functions():
        return tensor.as_subclass(OnCpu if on_cpu else torch.Tensor) if isinstance(tensor, OnCpu) != on_cpu else tensor


def numpy(self, *args, **kwargs):
    if not isinstance(self, OnCpu) and called_by_library():
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
    with without_functions():
        return real_numpy(self.as_subclass(torch.Tensor), *args, **kwargs)


def array(self, dtype=None, **_):
    if not isinstance(self, OnCpu) and called_by_library():
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
    with without_functions():
        values = real_numpy(self.as_subclass(torch.Tensor))
    return values if dtype is None else values.astype(dtype)


def cpu(self, *_, **__):
    return move_to(self, True)


def to(self, *args, **kwargs):
    target, other_args = kwargs.pop("device", None), []
    for arg in args:
        if isinstance(arg, (torch.device, str)):
            target = arg
        elif isinstance(arg, torch.Tensor):
            target = "cpu" if isinstance(arg, OnCpu) else "cuda"
            other_args.append(arg.dtype)
        else:
            other_args.append(arg)
    if target is not None:
        self = move_to(self, torch.device(target).type == "cpu" and called_by_library())
    if not other_args and not kwargs:
        return self
    on_cpu = isinstance(self, OnCpu)
    with without_functions():
        result = real_to(self, *other_args, **kwargs)
    return move_to(result, on_cpu)


def from_numpy(values):
    return move_to(real_from_numpy(values), called_by_library())


def device(self):
    in_check = sys._getframe(1).f_code.co_filename.endswith(CHECKING_FILES)
    return CPU if isinstance(self, OnCpu) or in_check or self.is_meta else GPU


class Factories(TorchFunctionMode):
    """Function mode that puts new tensors on the stated device; without one, on the device of their data or creator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func not in FACTORIES:
            return func(*args, **kwargs)
        target, data = kwargs.pop("device", None), args[0] if args else None
        by_library = called_by_library()
        result = func(*args, **kwargs)
        if target is None and isinstance(data, torch.Tensor):
            on_cpu = isinstance(data, OnCpu)
        else:
            on_cpu = by_library and (target is None or torch.device(target).type == "cpu")
        return move_to(result, on_cpu) if isinstance(result, torch.Tensor) else result


def pytest_configure():
    for name, value in {"numpy": numpy, "__array__": array, "cpu": cpu, "to": to, "device": property(device)}.items():
        setattr(torch.Tensor, name, value)
    torch.nn.Parameter.device = property(device)
    torch.from_numpy = from_numpy
    torch.cuda.get_rng_state = torch.cuda.set_rng_state = lambda *_, **__: None
    Factories().__enter__()
