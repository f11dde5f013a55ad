"""Associative scans traced as sequential ones, whose steps have states like those of any other scan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


@contextmanager
def sequential_associative_scans() -> Iterator[None]:
    """Within the block, trace ``lax.associative_scan`` as a sequential scan over the same operator.

    Modules that imported the name are changed too, and restored at the end. The block is another trace context of JAX,
    so that functions compiled before are traced anew, and those traced here are not kept for the user.
    """
    original = lax.associative_scan
    places = [
        (module, name)
        for module in list(sys.modules.values())
        if module is not None and not getattr(module, "__name__", "").startswith("jax._src")
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]
    for module, name in places:
        setattr(module, name, _sequential)
    try:
        with set_xla_metadata(rnnlens="sequential"):
            yield
    finally:
        for module, name in places:
            setattr(module, name, original)


def _sequential(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combine the entries of ``elems`` along an axis one after the other, not in a tree."""
    leaves, tree = jax.tree.flatten(elems)
    inputs = [jnp.moveaxis(leaf, axis, 0) for leaf in leaves]
    first = [leaf[-1 if reverse else 0] for leaf in inputs]

    def step(carried: Any, entries: Any) -> Any:
        has_started, before = carried
        combined = jax.tree.leaves(fn(jax.tree.unflatten(tree, before), jax.tree.unflatten(tree, entries)))
        after = [jnp.where(has_started, a, b) for a, b in zip(combined, entries, strict=True)]
        return (jnp.bool_(True), after), after

    _, results = lax.scan(step, (jnp.bool_(False), first), inputs, reverse=reverse)
    return jax.tree.unflatten(tree, [jnp.moveaxis(result, 0, axis) for result in results])
