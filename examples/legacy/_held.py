"""What every file here does: choose the floats, and hold an answer against its oracle."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

#: The largest difference allowed, relative to the largest value.
BOUNDS = {"float32": 1e-4, "float64": 1e-8}


def chosen_dtype(question: str | None) -> str:
    """``--dtype`` of the command line."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    return str(parser.parse_args().dtype)


def hold(label: str, actual: Any, oracle: Any, dtype: str) -> None:
    """Print how far an answer is from its oracle; end with an error where that is too far."""
    actual, oracle = np.asarray(actual, dtype=np.float64), np.asarray(oracle)
    assert actual.shape == oracle.shape, (label, actual.shape, oracle.shape)
    error = float(np.abs(actual - oracle).max() / np.abs(oracle).max())
    assert error < BOUNDS[dtype], f"{label} is off by {error:.1e}"
    print(f"{label}: equal to the oracle ({error:.0e}, allowed {BOUNDS[dtype]:.0e})")
