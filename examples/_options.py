"""What every example takes: ``--full`` for the size of the question, ``--out`` for the folder of its figure."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(question: str | None) -> argparse.Namespace:
    """Read the command line; the folder is made."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size of the question, not of a test")
    parser.add_argument("--out", type=Path, default=Path("example-output"), help="folder for the figure")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen
