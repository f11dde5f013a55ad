"""Record the files of rnnlens to which a call passes a followed object, and the files from which each is entered.

Rules:

* The followed object is the value of one parameter in the body of a public function, and then the first object of each
  of the types that replace it (the request made from it, the plan made from the request).
* A file is entered when a function in it is called with the followed object among its arguments (also in ``*args``)
  and the calling rnnlens function, ignoring other packages in between, is in another file.
* Nothing below a function of ``rnnlens.adapters`` counts, and no method of the object itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from own_files import package_path

BOUNDARY = "adapters/"


class Trail:
    """Files entered, in the order of first entry, each with the files from which it was entered."""

    def __init__(self, start: str) -> None:
        self.entered: dict[str, dict[str, None]] = {start: {}}

    @property
    def files(self) -> list[str]:
        return list(self.entered)

    @property
    def entered_twice(self) -> dict[str, list[str]]:
        """Return the files that were entered from more than one other file."""
        return {file: list(callers) for file, callers in self.entered.items() if len(callers) > 1}


def trail(call: Callable[[], Any], verb: Callable[..., Any], parameter: str, *stands_for_it: type) -> Trail:
    """Make the call, and return the trail of the value that ``verb`` is given for ``parameter``."""
    code = _body(verb)
    result = Trail(package_path(code.co_filename))
    followed: dict[Any, Any] = {}

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (file := package_path(frame.f_code.co_filename)) is None:
            return
        if frame.f_code is code and parameter not in followed:
            followed[parameter] = frame.f_locals[parameter]
            return
        if parameter not in followed or not _passes_any(frame, followed, stands_for_it):
            return
        caller = frame.f_back
        while caller is not None and package_path(caller.f_code.co_filename) is None:
            caller = caller.f_back
        outer, caller_file = caller, package_path(caller.f_code.co_filename) if caller is not None else None
        while outer is not None and outer.f_code is not code:
            if (package_path(outer.f_code.co_filename) or "").startswith(BOUNDARY):
                return
            outer = outer.f_back
        if outer is not None and caller_file != file and not file.startswith(BOUNDARY):
            result.entered.setdefault(file, {})[caller_file] = None

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert parameter in followed, f"{verb.__name__} was not called"
    return result


def _passes_any(frame: FrameType, followed: dict[Any, Any], stands_for_it: tuple[type, ...]) -> bool:
    """Return whether a followed object is among the arguments of a call, apart from ``self`` and ``cls``."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    arguments = [frame.f_locals[name] for name in names if name not in ("self", "cls") and name in frame.f_locals]
    variadic = code.co_varnames[count : count + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)]
    for name in variadic:
        value = frame.f_locals.get(name, ())
        arguments += list(value.values() if isinstance(value, dict) else value)
    for argument in arguments:
        if isinstance(argument, stands_for_it):
            followed.setdefault(type(argument), argument)
        if any(argument is item for item in followed.values()):
            return True
    return False


def _body(verb: Callable[..., Any]) -> CodeType:
    """Return the code of a function without its decorators."""
    while hasattr(verb, "__wrapped__"):
        verb = verb.__wrapped__
    return verb.__code__
