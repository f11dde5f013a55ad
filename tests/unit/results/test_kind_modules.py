"""A saved result is opened in a process that has not made one of its kind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rnnlens.results

CODE = """
import sys
from rnnlens.results.base import result_class
assert result_class(sys.argv[1]) is not None
"""


def kinds():
    """Every kind that a class of the package registers, from the source."""
    folder = Path(rnnlens.results.__file__).parent
    return sorted({k for file in folder.rglob("*.py") for k in re.findall(r'class .*kind="(\w+)"', file.read_text())})


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_is_found_in_a_fresh_process(kind):
    subprocess.run([sys.executable, "-c", CODE, kind], check=True)
