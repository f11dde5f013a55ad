"""Programs of the world: a model of a public package, built as the package's documentation builds it, with one batch.

A module of ``models/`` defines the programs of some packages. A program is a function that builds everything anew, so
that each order of calls, and the truth, gets a copy of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Program:
    """A model with one batch, and what its author knows about it.

    ``model`` is given to the verbs; ``call`` is the author's own call of it, by which the truth is computed.
    ``input_axes`` and ``output_axes`` name the axes as they are. ``output`` selects the output that Jacobians are of
    from what the call returns, ``of`` is its name. Where the model takes more than ``x``, ``given`` makes its input of
    it, in which ``x`` has the name ``wrt``. ``hints`` has, for a text in an error, a context manager that does what the
    hint says and yields the arguments that it says to type, where these cannot be read from the message.
    """

    model: Any
    x: torch.Tensor
    y: Any
    loss: Callable[..., torch.Tensor]
    input_axes: Sequence[str] = ("sample", "time", "feature")
    output_axes: Sequence[str] = ("sample", "time", "unit")
    call: Callable[[torch.Tensor], Any] | None = None
    modules: Sequence[nn.Module] = ()
    output: Callable[[Any], torch.Tensor] = lambda outputs: outputs
    of: str = "output"
    given: Callable[[torch.Tensor], Any] = lambda x: x
    wrt: str = "input"
    axes: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Callable[[], AbstractContextManager[dict[str, Any]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call = self.call or (lambda x: self.model(self.given(x)))
        self.modules = self.modules or (self.model,)
        for module in self.modules:
            module.eval()

    @property
    def inputs(self) -> Any:
        """The model's input with the program's batch."""
        return self.given(self.x)


@dataclass(frozen=True)
class NamedProgram:
    """A program of a package, by name; ``build`` makes it anew, always with the same numbers."""

    package: str
    name: str
    function: Callable[[], Program]

    def build(self) -> Program:
        torch.manual_seed(0)
        return self.function()


TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")

PROGRAMS: dict[tuple[str, str], NamedProgram] = {}


def program(package: str, name: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Register a function that builds a program, under the package as it is installed and a name of the model."""

    def register(function: Callable[[], Program]) -> Callable[[], Program]:
        PROGRAMS[package, name] = NamedProgram(package, name, function)
        return function

    return register


def load_programs() -> list[NamedProgram]:
    """Import every module of ``models/``; they import the packages only within their programs.

    A CPU-only torch cannot load the operators of a torchvision or torchaudio that was built for CUDA, and packages that
    import it fail. No program calls these operators: they are declared without a kernel, or said to be absent.
    """
    with contextlib.suppress(ImportError):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in ("nms", "qnms"):
                TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with contextlib.suppress(ImportError):
        try:
            importlib.import_module("torchaudio")
        except OSError:
            absent: Any = types.ModuleType("torchaudio._extension")
            absent._IS_TORCHAUDIO_EXT_AVAILABLE = absent._IS_ALIGN_AVAILABLE = False
            absent.fail_if_no_align = lambda function: function
            sys.modules["torchaudio._extension"] = absent
    for module in pkgutil.iter_modules(importlib.import_module("models").__path__):
        importlib.import_module(f"models.{module.name}")
    return list(PROGRAMS.values())


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a batch of random numbers."""
    return torch.randn(*shape, dtype=dtype)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[dict[str, Any]]:
    """Edit a package within the block, as a user edits the line that a hint is about; nothing is to be typed."""
    original = inspect.getattr_static(owner, name)  # a static method as such
    setattr(owner, name, value)
    try:
        yield {}
    finally:
        setattr(owner, name, original)


class WithHead(nn.Module):
    """A layer that returns a sequence, alone or first in a tuple, and a linear readout of every step."""

    def __init__(self, layer: nn.Module, units: int, classes: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(units, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        returned = self.layer(x)
        return self.head(returned[0] if isinstance(returned, tuple) else returned)
