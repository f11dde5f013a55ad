"""A file of weights, a state dict as ``torch.save`` writes it, into a module."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ...errors import FileError, message


def load_weights(model: torch.nn.Module, path: Path, *, unsafe: bool = False) -> None:
    """See :meth:`rnnlens.adapters.protocol.Adapter.load_weights`."""
    state = _read_state(path, unsafe)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise FileError(message("These weights do not fit the model.", got=f"{path}: {error}")) from error


def _read_state(path: Path, unsafe: bool) -> Any:
    """A state dict; also out of a checkpoint that keeps it under its customary name."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=not unsafe)
    except pickle.UnpicklingError as error:
        raise FileError(
            message(
                "This weights file is not loaded, because doing so could run code that it contains.",
                got=f"{path}: more than tensors (torch.load with weights_only=True refuses it)",
                expected="torch.save(model.state_dict(), path)",
                hint="--unsafe, if you trust whoever made the file",
            )
        ) from error
    except Exception as error:  # a damaged file raises RuntimeError, EOFError, KeyError, ...
        raise FileError(message("This weights file cannot be read.", got=f"{path}: {type(error).__name__}")) from error
    if isinstance(state, torch.nn.Module):
        return state.state_dict()
    for key in ("state_dict", "model_state_dict"):
        if isinstance(state, dict) and key in state:
            return state[key]
    return state
