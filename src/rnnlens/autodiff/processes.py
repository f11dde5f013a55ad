"""Which engines hold threads in this process: their own they lose when it is forked, and wait for them for ever."""

from __future__ import annotations

import sys


def awake() -> set[str]:
    """Engines that the user has run here, as far as that can be seen without loading any. Of torch it cannot."""
    found = set()
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        found.add("jax")
    eager = sys.modules.get("tensorflow.python.eager.context")
    if eager is not None and getattr(getattr(eager, "_context", None), "_context_handle", None) is not None:
        found.add("tensorflow")
    return found


def needs_no_threads(engine: str) -> bool:
    """Torch computes in the calling thread where it may use no other, as in the workers of its own data loaders."""
    return engine == "torch" and sys.modules["torch"].get_num_threads() == 1
