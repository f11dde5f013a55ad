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


def hold(what: str, got: Any, oracle: Any, dtype: str) -> None:
    """Print how far an answer is from its oracle; end with an error where that is too far."""
    got, oracle = np.asarray(got, dtype=np.float64), np.asarray(oracle)
    assert got.shape == oracle.shape, (what, got.shape, oracle.shape)
    off = float(np.abs(got - oracle).max() / np.abs(oracle).max())
    assert off < BOUNDS[dtype], f"{what} is off by {off:.1e}"
    print(f"{what}: equal to the oracle ({off:.0e}, allowed {BOUNDS[dtype]:.0e})")
