"""Files of rnnlens among the files of a traceback, a call stack or a profile."""

from __future__ import annotations

import os
from pathlib import Path

import rnnlens

PACKAGE = str(Path(rnnlens.__file__).parent) + os.sep
TESTS = str(Path(__file__).resolve().parents[1]) + os.sep


def package_path(file: str) -> str | None:
    """Return the path of a source file relative to the folder of the package rnnlens, or None for any other file.

    The folder is that of the imported package. A clone called ``rnnlens`` does not count: it may hold an environment
    with every framework.
    """
    return file.removeprefix(PACKAGE).replace(os.sep, "/") if file.startswith(PACKAGE) else None
