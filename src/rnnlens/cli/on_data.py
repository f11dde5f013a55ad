"""Call of a public function on the data of a file, with one kind of error for data that do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..errors import InputError, RnnlensError
from .data import Data


def on_data(run: Callable[..., Any], model: Any, batch: Data, **arguments: Any) -> Any:
    """Return ``run(model, x, y, ...)``; convert exceptions of the framework to an InputError.

    Raises
    ------
    InputError
        If the framework raises; the message has the shapes and the first line of the original error.
    """
    weighted = {} if batch.sample_weight is None else {"sample_weight": batch.sample_weight}
    try:
        with warnings.catch_warnings():
            # torch broadcasts targets of another shape, and only warns
            warnings.filterwarnings("error", message="Using a target size")
            return run(model, batch.x, batch.y, **weighted, **arguments)
    except RnnlensError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        got = f"{batch}: {type(error).__name__}: {reason}"
        hint = "look whether x and y have the shapes that the model and its loss expect; --debug shows where it failed"
        raise InputError("The model or its loss cannot be run on these data.", got=got, hint=hint) from error


def loss_of(text: str | None) -> Any:
    """Return the function that ``package.module:function`` names; any other loss name unchanged."""
    from .models import resolve

    return resolve(text) if text is not None and ":" in text else text
