"""An oracle for programs of JAX: the user's function with every ``lax.scan`` run as a loop in Python."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from rnnlens.adapters.jax.jaxprs import bind


@contextmanager
def scans_in_python(taps=None, cut=None):
    """Within the block ``lax.scan`` is a Python loop; yield the states of each loop, one list of steps for each.

    Loops within its steps stay as they are.

    ``taps``: for each loop, zeros (time, ...) that are added to its float states where these are computed, so that the
    step itself reads the sum as well. ``cut``: number of the loop whose recurrence passes no gradient on.
    """
    original, seen = jax.lax.scan, []

    def scan(f, init, xs=None, length=None, reverse=False, **_options):
        number = len(seen)
        states = seen.append([]) or seen[number]
        steps = length if xs is None or not jax.tree.leaves(xs) else jax.tree.leaves(xs)[0].shape[0]
        carry, outputs = init, [None] * steps
        for t in reversed(range(steps)) if reverse else range(steps):
            before = jax.tree.map(_without_gradient, carry) if cut == number else carry
            own_taps = [tap[t] for tap in taps[number]] if taps is not None else []
            jax.lax.scan = original  # for loops within the step
            carry, outputs[t] = _step(f, before, jax.tree.map(lambda a, t=t: a[t], xs), own_taps)
            jax.lax.scan = scan
            states.append([a for a in jax.tree.leaves(carry) if _is_float(a)])
        if reverse:
            states.reverse()
        return carry, jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    jax.lax.scan = scan
    try:
        yield seen
    finally:
        jax.lax.scan = original


def _step(f, carry, x, taps):
    """Run one step equation by equation, and add ``taps`` to the new float states where they are computed."""
    program, shapes = jax.make_jaxpr(f, return_shape=True)(carry, x)
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, jax.tree.leaves((carry, x)), strict=True)
    states = [v for v in jaxpr.outvars[: len(jax.tree.leaves(carry))] if _is_float(v.aval)]
    tapped = dict(zip(states, taps, strict=False))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        for v, value in zip(equation.outvars, bind(equation, [read(v) for v in equation.invars]), strict=True):
            values[v] = value + tapped[v] if v in tapped else value
    return jax.tree.unflatten(jax.tree.structure(shapes), [read(v) for v in jaxpr.outvars])


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
    return jnp.issubdtype(a.dtype, jnp.inexact)


def _without_gradient(a):
    return jax.lax.stop_gradient(a) if _is_float(a) else a
