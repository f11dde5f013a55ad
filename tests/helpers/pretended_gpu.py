"""pytest plugin: every tensor pretends to lie on a GPU until it is copied to the host; what NumPy or another device cannot read raises."""

import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
MADE = _device_constructors()


def from_source():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tests/" in name or "/testing/" in name:
            return False
        if "/rnnlens/" in name and not frame.f_code.co_name.startswith("__torch_"):
            return True
        frame = frame.f_back
    return False


class Host(torch.Tensor):
    """A tensor in the host's memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        leaves = [l for l in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(l, torch.Tensor)]
        if (
            name
            not in (
                "__get__",
                "to",
                "__set__",
                "copy_",
                "cpu",
                "__setitem__",
                "__getitem__",
                "index_put_",
                "type_as",
                "as_subclass",
            )
            and any(not isinstance(l, Host) and l.dim() for l in leaves)
            and any(isinstance(l, Host) and l.dim() for l in leaves)
        ):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0! ({name})"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result


old = {name: getattr(torch.Tensor, name) for name in ("numpy", "__array__", "to", "cpu")}


def numpy(self, *args, **kwargs):
    if not isinstance(self, Host) and from_source():
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )
    with torch._C.DisableTorchFunction():
        return old["numpy"](self.as_subclass(torch.Tensor), *args, **kwargs)


def __array__(self, dtype=None, **_):
    import numpy as np

    if not isinstance(self, Host) and from_source():
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )
    with torch._C.DisableTorchFunction():
        array = old["numpy"](self.as_subclass(torch.Tensor))
    return array if dtype is None else array.astype(dtype)


def cpu(self, *args, **kwargs):
    if isinstance(self, Host):
        return self
    with torch._C.DisableTorchFunction():
        return self.as_subclass(Host)


def to(self, *args, **kwargs):
    where = kwargs.pop("device", None)
    rest = []
    for a in args:
        if isinstance(a, torch.device) or (isinstance(a, str)):
            where = a
        elif isinstance(a, torch.Tensor):
            where, a = ("cpu" if isinstance(a, Host) else "cuda"), a.dtype
            rest.append(a)
        else:
            rest.append(a)
    result = self
    if where is not None:
        host = torch.device(where).type == "cpu" and from_source()
        with torch._C.DisableTorchFunction():
            result = self.as_subclass(Host if host else torch.Tensor) if isinstance(self, Host) != host else self
    if rest or kwargs:
        with torch._C.DisableTorchFunction():
            kind = Host if isinstance(result, Host) else None
            result = old["to"](result, *rest, **kwargs)
            if kind and not isinstance(result, Host):
                result = result.as_subclass(Host)
    return result


class OnGpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in MADE:
            where = kwargs.pop("device", None)
            data = args[0] if args else None
            result = func(*args, **kwargs)
            if isinstance(data, torch.Tensor) and where is None:
                host = isinstance(data, Host)
            else:
                host = torch.device(where).type == "cpu" if where is not None else from_source()
                host = host and from_source()
            with torch._C.DisableTorchFunction():
                if isinstance(result, torch.Tensor) and isinstance(result, Host) != host:
                    result = result.as_subclass(Host if host else torch.Tensor)
            return result
        return func(*args, **kwargs)


from_numpy_old = torch.from_numpy


def from_numpy(array):
    result = from_numpy_old(array)
    return result.as_subclass(Host) if from_source() else result


def device(self):
    if (
        isinstance(self, Host)
        or sys._getframe(1).f_code.co_filename.endswith(("utils/rnn.py", "fake_tensor.py"))
        or self.is_meta
    ):
        return CPU
    return GPU


def pytest_configure(config):
    for name, value in dict(numpy=numpy, __array__=__array__, cpu=cpu, to=to).items():
        setattr(torch.Tensor, name, value)
    torch.Tensor.device = property(device)
    torch.nn.Parameter.device = property(device)
    torch.from_numpy = from_numpy
    torch.cuda.get_rng_state = lambda device=None: None
    torch.cuda.set_rng_state = lambda state, device=None: None
    OnGpu().__enter__()
