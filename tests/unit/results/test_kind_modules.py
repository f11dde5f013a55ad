"""The class of a saved result is looked up in a process that has not imported the module of its kind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rnnlens.results

#: Looks each kind up in a separate fork, which has imported no module of a kind.
CODE = """
import os, sys
from rnnlens.results.base import result_class
for kind in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        found = False
        try:
            found = result_class(kind) is not None
        finally:
            os._exit(not found)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(kind)
"""


def kinds():
    """Return every kind that a class of the package registers, read from the source."""
    folder = Path(rnnlens.results.__file__).parent
    return sorted({k for file in folder.rglob("*.py") for k in re.findall(r'class .*kind="(\w+)"', file.read_text())})


@pytest.mark.linux
@pytest.mark.slow
def test_every_kind_is_found_in_a_fresh_process():
    assert len(kinds()) > 5
    lookup = [sys.executable, "-c", CODE, *kinds()]
    assert subprocess.run(lookup, check=True, capture_output=True, text=True).stdout == ""
    lookup[-1] = "nothing"
    assert subprocess.run(lookup, check=True, capture_output=True, text=True).stdout == "nothing\n"
