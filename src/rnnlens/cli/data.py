"""Data files of the command line: ``.npz`` and ``.npy``, never unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError, InputError, did_you_mean, message

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Data:
    """One batch out of a file. ``x`` is a tuple where the model has several inputs."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    def head(self, count: int | None) -> Data:
        """The first ``count`` samples; all of them for None."""
        if count is None:
            return self
        if count < 1:
            raise InputError(message("The number of samples must be positive.", got=f"--samples {count}"))
        return Data(_head(self.x, count), _head(self.y, count), _head(self.sample_weight, count))


def read_data(
    path: Path, x: Sequence[str] | None = None, y: Sequence[str] | None = None, sample_weight: str | None = None
) -> Data:
    """Read one batch.

    Parameters
    ----------
    x, y
        Names of the arrays in the file; ``x`` and ``y`` by default. A file with a single array needs no name for x.
    sample_weight
        Name of the array of weights; ``sample_weight`` by default, if there is one.

    Raises
    ------
    FileError
        If the file cannot be read, or holds Python objects, which could run code on loading.
    InputError
        If it has no array of that name.
    """
    arrays = _load(path)
    names = list(x or (["x"] if "x" in arrays or len(arrays) != 1 else arrays))
    targets = list(y or (["y"] if "y" in arrays else []))
    weight = sample_weight or ("sample_weight" if "sample_weight" in arrays else None)
    return Data(
        _pick(arrays, names, path), _pick(arrays, targets, path), _pick(arrays, [weight] if weight else [], path)
    )


def _load(path: Path) -> Arrays:
    if not path.is_file():
        raise FileError(
            message("There is no such data file.", got=str(path), expected="a .npz file, as numpy.savez writes")
        )
    try:
        with path.open("rb") as stream:  # NumPy itself leaves a damaged file open
            loaded = np.load(stream, allow_pickle=False)
            return {"x": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error)
        if "Object arrays" in reason:
            reason = "it holds Python objects, which could run code on loading"
        elif "pickle" in reason:  # what NumPy says of every file that is neither
            reason = "it is neither .npz nor .npy"
        expected = "plain arrays, saved with numpy.savez(path, x=..., y=...)"
        raise FileError(
            message("This data file cannot be read.", got=f"{path}: {reason}", expected=expected)
        ) from error


def _pick(arrays: Arrays, names: Sequence[str], path: Path) -> Any:
    for name in names:
        if name not in arrays:
            raise InputError(message(f"No array named {name!r} in {path}.", hint=did_you_mean(name, arrays)))
    picked = tuple(arrays[name] for name in names)
    return picked[0] if len(picked) == 1 else picked or None


def _head(arrays: Any, count: int) -> Any:
    if arrays is None:
        return None
    return tuple(a[:count] for a in arrays) if isinstance(arrays, tuple) else arrays[:count]
