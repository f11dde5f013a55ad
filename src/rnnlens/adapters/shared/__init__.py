"""Code that the adapters of several frameworks share; it imports no framework.

The substitutes and hooks below act only in the thread that installed them: the user's model may run in other threads
during a call of rnnlens, and those forward passes remain unchanged.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def substitute_in_this_thread(substitute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the substitute in the current thread and the original in every other."""
    here = threading.get_ident()

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (substitute if threading.get_ident() == here else original)(*args, **kwargs)

    return either


def hook_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs only in the current thread and returns None in others."""
    return substitute_in_this_thread(hook, lambda *args, **kwargs: None)
