"""An oracle for programs of JAX: the user's function with every ``lax.scan`` run as a loop in Python."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np


@contextmanager
def scans_in_python(taps=None, cut=None):
    """Within the block ``lax.scan`` is a Python loop; yield the states of each loop, one list of steps for each.

    ``taps``: for each loop, zeros (time, ...) that are added to its float states, also where the step returns the very
    same array as output. ``cut``: number of the loop whose recurrence passes no gradient on.
    """
    original, seen = jax.lax.scan, []

    def scan(f, init, xs=None, length=None, reverse=False, **_options):
        number = len(seen)
        states = seen.append([]) or seen[number]
        steps = length if xs is None or not jax.tree.leaves(xs) else jax.tree.leaves(xs)[0].shape[0]
        carry, outputs = init, [None] * steps
        for t in reversed(range(steps)) if reverse else range(steps):
            before = jax.tree.map(_without_gradient, carry) if cut == number else carry
            after, output = f(before, jax.tree.map(lambda a, t=t: a[t], xs))
            leaves, tree = jax.tree.flatten(after)
            tapped = list(leaves)
            for i, (j, leaf) in enumerate((j, a) for j, a in enumerate(leaves) if _is_float(a)):
                if taps is not None and number < len(taps):
                    tapped[j] = leaf + taps[number][i][t]
            same = {id(a): b for a, b in zip(leaves, tapped, strict=True)}
            outputs[t] = jax.tree.map(lambda a, same=same: same.get(id(a), a), output)
            carry = jax.tree.unflatten(tree, tapped)
            states.append([a for a in tapped if _is_float(a)])
        if reverse:
            states.reverse()
        return carry, jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    jax.lax.scan = scan
    try:
        yield seen
    finally:
        jax.lax.scan = original


def unrolled(function, cut=None):
    """Return states (time, ...) of every loop of ``function()``, and the gradients of its value by them."""
    with scans_in_python() as seen:
        shapes = jax.eval_shape(lambda: (function(), [[*map(list, states)] for states in seen])[1])
    taps = [[jnp.zeros((len(states), *leaf.shape), leaf.dtype) for leaf in states[0]] for states in shapes]

    def value(taps):
        with scans_in_python(taps, cut) as seen:
            result = function()
        return result, [[jnp.stack(column) for column in zip(*states, strict=True)] for states in seen]

    (_, states), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(taps)
    as_numpy = lambda loops: [[np.asarray(a) for a in loop] for loop in loops]  # noqa: E731
    return as_numpy(states), as_numpy(grads)


def difference(a, b):
    """Return the largest difference, relative to the largest value."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max(initial=0)) / max(float(np.abs(b).max(initial=0)), 1e-300)


def _is_float(a):
    return jnp.issubdtype(jnp.result_type(a), jnp.inexact)


def _without_gradient(a):
    return jax.lax.stop_gradient(a) if _is_float(a) else a
