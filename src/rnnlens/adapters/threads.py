"""What is put into a user's model for the length of a call is heard by the thread that makes the call alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def heard_here(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``ours`` in the thread that asks for it now, ``theirs`` in every other: the user's own forward pass there."""
    here = threading.get_ident()

    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == here else theirs)(*args, **kwargs)

    return either


def hook_here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that other threads pass by."""
    here = threading.get_ident()

    def heard(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == here else None

    return heard
