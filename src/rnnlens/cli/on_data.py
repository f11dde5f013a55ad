"""A public function run on the data of a file: what does not fit becomes one error of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..errors import InputError, RnnlensError, message
from .data import Data


def on_data(run: Callable[..., Any], model: Any, batch: Data, **arguments: Any) -> Any:
    """``run(model, x, y, ...)``; what the framework says about data that do not fit becomes one error of ours.

    Raises
    ------
    InputError
        With the shapes, and the first line of what the framework said.
    """
    weighted = {} if batch.sample_weight is None else {"sample_weight": batch.sample_weight}
    try:
        with warnings.catch_warnings():
            # torch stretches targets of another shape over the output, and only mentions it
            warnings.filterwarnings("error", message="Using a target size")
            return run(model, batch.x, batch.y, **weighted, **arguments)
    except RnnlensError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        got = f"{batch}: {type(error).__name__}: {reason}"
        hint = "look whether x and y have the shapes that the model and its loss expect; --debug shows where it failed"
        raise InputError(message("The model or its loss cannot be run on these data.", got=got, hint=hint)) from error


def loss_of(text: str | None) -> Any:
    """A name that the framework knows, as it is; or the function that ``package.module:function`` stands for."""
    from .models import resolve

    return resolve(text) if text is not None and ":" in text else text
