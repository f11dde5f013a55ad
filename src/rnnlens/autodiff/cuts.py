"""Operations of a program at which a gradient ends: the result of the search, and the recorder that finds none."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..typing import Array

#: ``"constant"``: the value goes on, and its gradient does not (``detach``, ``no_grad``). ``"discrete"``: the same, by
#: conversion to integers or bool (``argmax``, ``>``). ``"selection"``: the value is left out, as by a slice.
CutKind = Literal["constant", "discrete", "selection"]

#: File, line and bytecode offset of a call in the user's code.
UserCall = tuple[str, int, int]

#: Frames of rnnlens end the search for the user's line; frames of frameworks are passed over.
_OWN = str(Path(__file__).parents[1])
_PACKAGES = ("keras", "tf_keras", "tensorflow", "jax", "jaxlib", "torch")
FRAMEWORKS = (
    *(str(Path(sysconfig.get_paths()["purelib"]) / name) + os.sep for name in _PACKAGES),
    *("<frozen ", "<string>", "<eval_with_key>"),
)


@dataclass(frozen=True)
class Cut:
    """A line of code whose operations receive the gradient of an entry of the input, and do not pass it on.

    Attributes
    ----------
    operation
        Name of the operation, as ``"detach"``, or ``"relu in torch.no_grad()"``.
    file, line, code
        Where the user's program calls it, and the text of that line.
    shape, index
        Shape of the tensor that goes in, and the index of a selection as text, as ``"[:, 0]"``.
    takes_input, passes_other
        Whether the input itself goes in, and whether the gradient of other entries comes out.
    """

    kind: CutKind
    operation: str
    file: str
    line: int
    code: str
    shape: tuple[int, ...] = ()
    index: str = ""
    takes_input: bool = False
    passes_other: bool = False

    @property
    def place(self) -> str:
        """File, line and code as text: ``model.py, line 12: out = self.head(out[:, 0])``."""
        return f"{self.file.rpartition('/')[2]}, line {self.line}: {self.code}"


class CutRecorder:
    """Recorder of the operations of a program; this one, for engines that cannot observe operations, records none."""

    def find(self, values: Sequence[Array], entries: Sequence[Array], others: Sequence[Array]) -> list[Cut]:
        """Return the lines at which the gradient of some entries of the program's inputs ends, in order of execution.

        It is called between the forward and the backward pass of the program.

        Parameters
        ----------
        values
            Inputs of the program, by which its tensors are found.
        entries
            Masks of bool, shaped as the inputs: the entries whose gradient is followed.
        others
            The same, of other entries: whether these pass is said in each result.
        """
        return []


def shown_index(index: Any) -> str:
    """Return an index as it is written in Python: ``(slice(None), 0)`` as ``"[:, 0]"``."""

    def one(item: Any) -> str:
        if isinstance(item, slice):
            start, stop, step = (("" if part is None else str(part)) for part in (item.start, item.stop, item.step))
            return f"{start}:{stop}" + (f":{step}" if step else "")
        if item is Ellipsis:
            return "..."
        return str(item) if isinstance(item, int | bool | type(None)) else "<indices>"

    items = index if isinstance(index, tuple) else (index,)
    return f"[{', '.join(map(one, items))}]"


@dataclass
class CutSite:
    """A call in the user's code whose result has no gradient although its arguments have one."""

    call: UserCall
    operation: str
    count: int = 0

    @property
    def code(self) -> str:
        """Text of the line."""
        return linecache.getline(*self.call[:2]).strip()


def user_call(*excluded: str) -> UserCall | None:
    """Return the innermost call in the user's code; None in code of rnnlens, and in files of ``excluded`` folders."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if excluded and file.startswith(excluded):
            return None
        if file.startswith(_OWN):
            if frame.f_code.co_name != "__torch_function__":
                return None
        elif not file.startswith(FRAMEWORKS):
            return file, frame.f_lineno, frame.f_lasti
        frame = frame.f_back
    return None
