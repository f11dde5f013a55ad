"""What every example does: take ``--full`` and ``--out``, save the figure that answers its question."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np


def options(question: str | None) -> argparse.Namespace:
    """Read the command line; the folder is made."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size of the question, not of a test")
    parser.add_argument("--out", type=Path, default=Path("example-output"), help="folder for the figure")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def save(axes: Any, path: Path) -> None:
    """Write the figure that the axes are in, and close it."""
    figure = np.ravel(axes)[0].figure
    while not hasattr(figure, "savefig"):  # a part of a figure
        figure = figure.figure
    figure.savefig(path, dpi=110)
    plt.close("all")
    print(f"figure: {path}")
