"""Models of all JAX libraries as one thing: a function of parameters and data, and the names of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...autodiff.tensors import global_random_states_restored
from ...errors import InputError, UnsupportedError, short_repr
from ..shared.generators import held_generators_restored


class JaxModel:
    """A function of JAX with its parameters, as :func:`rnnlens.jax.model` returns it.

    ``source``: the user's module or function, which is not changed. ``names``: other names of recurrent layers.
    """

    def __init__(
        self,
        source: Any,
        params: Any = None,
        *,
        rng: Any = None,
        example: Any = None,
        batched: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.params, self.rng, self.example = source, params, rng, example
        self.batched, self.names = batched, dict(names or {})

    def __repr__(self) -> str:
        return f"rl.jax.model({short_repr(self.source)})"


@dataclass(frozen=True)
class OpenedModel:
    """A model as ``apply(values, *data)`` at one moment.

    ``values``: its arrays in order; ``weight_names``: the name of each, by its path in the library. ``trainable``:
    whether an optimizer changes it. ``key``: equal for models whose programs are equal at equal shapes; None if that is
    not known.
    """

    apply: Callable[..., Any]
    values: list[Any]
    weight_names: tuple[str, ...]
    trainable: tuple[bool, ...]
    library: str
    key: Hashable | None


def library_of(source: Any) -> str:
    """Return the library whose module an object is: "nnx", "equinox", "linen", "haiku", or ""."""
    modules = {cls.__module__ for cls in type(source).__mro__}
    libraries = {"flax.nnx": "nnx", "equinox": "equinox", "flax.linen": "linen", "haiku": "haiku"}
    return next(
        (name for prefix, name in libraries.items() if any(f"{m}.".startswith(f"{prefix}.") for m in modules)), ""
    )


def open_model(model: Any, *, training: bool) -> OpenedModel:
    """Return a model as a function of its arrays; dropout and statistics are those of inference unless ``training``."""
    given = model if isinstance(model, JaxModel) else JaxModel(model)
    library = library_of(given.source)
    if library == "nnx":
        return _open_nnx(given, training)
    if library == "equinox":
        return _open_equinox(given, training)
    if training:
        raise UnsupportedError(
            "training=True cannot be passed on to a function: only the function itself can use it.",
            got=short_repr(given.source),
            hint="rl.jax.model(lambda params, x: module.apply(params, x, train=True), params)",
        )
    if library == "linen":
        return _open_linen(given)
    if library == "haiku":
        return _open_haiku(given)
    if callable(given.source):
        return _opened(given, given.source, given.params, "function", given.source)
    raise InputError(
        "rl.jax.model takes a module or a function.",
        got=short_repr(given.source),
        expected="a module of Flax NNX or Equinox, or a Linen module, a Haiku transform or a function and its params",
        hint="rl.jax.model(apply, params)",
    )


def _open_nnx(given: JaxModel, training: bool) -> OpenedModel:
    from flax import nnx

    def apply(state: Any, *data: Any, **named: Any) -> Any:
        module = nnx.merge(graph, *state, copy=True)  # a copy: counters and statistics of the user's stay
        (module.train if training else module.eval)()
        return module(*data, **named)

    parts: Any = nnx.split(given.source, nnx.Param, ...)
    graph, weights, rest = parts
    opened = _opened(given, apply, (weights, rest), "nnx", (graph, training))
    count = len(jax.tree.leaves(weights))
    names = tuple(name.partition(".")[2].removesuffix(".value") for name in opened.weight_names)
    trainable = tuple(i < count for i in range(len(names)))
    return OpenedModel(opened.apply, opened.values, names, trainable, opened.library, opened.key)


def _open_equinox(given: JaxModel, training: bool) -> OpenedModel:
    import equinox

    source = equinox.nn.inference_mode(given.source, value=not training)
    arrays, static = equinox.partition(source, equinox.is_array)
    keys = () if given.rng is None else (given.rng,)

    def apply(arrays: Any, *data: Any, **named: Any) -> Any:
        module = equinox.combine(arrays, static)
        if given.batched:
            return module(*data, **named, **({"key": keys[0]} if keys else {}))
        if keys:
            samples = jnp.shape(jax.tree.leaves((data, named))[0])[0]
            split = jax.random.split(keys[0], samples)
            return jax.vmap(lambda d, n, key: module(*d, **n, key=key))(data, named, split)
        return jax.vmap(lambda d, n: module(*d, **n))(data, named)

    leaves, tree = jax.tree.flatten(static)
    key = (given.batched, str(given.rng), tuple(leaves), tree)
    return _opened(given, apply, arrays, "equinox", key)


def _open_linen(given: JaxModel) -> OpenedModel:
    source, params = given.source, given.params
    if params is None and source.scope is not None:  # a bound module
        source, params = source.unbind()
    _refuse_without_params(given, params)
    rngs = {} if given.rng is None else {"rngs": given.rng}
    return _opened(
        given, lambda p, *data, **named: source.apply(p, *data, **named, **rngs), params, "linen", (source, str(rngs))
    )


def _open_haiku(given: JaxModel) -> OpenedModel:
    _refuse_without_params(given, given.params)
    takes = inspect.signature(given.source.apply).parameters
    has_state, rng = "state" in takes, [given.rng] if "rng" in takes else []

    def apply(params: Any, *data: Any, **named: Any) -> Any:
        before = params if has_state else (params,)
        result = given.source.apply(*before, *rng, *data, **named)
        return result[0] if has_state else result

    return _opened(given, apply, given.params, "haiku", (given.source, str(rng)))


def _refuse_without_params(given: JaxModel, params: Any) -> None:
    if params is None:
        raise InputError(
            "A module of Linen or Haiku holds no parameters: pass them too.",
            got=short_repr(given.source),
            hint="rl.jax.model(module, params)",
        )


def _opened(given: JaxModel, apply: Callable[..., Any], params: Any, library: str, key: Any) -> OpenedModel:
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(_path_text(path) for path, _ in leaves)
    values = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for _, leaf in leaves]
    trainable = tuple(jnp.issubdtype(v.dtype, jnp.inexact) for v in values)
    full_key = (library, key, tree, tuple(given.names.items()))
    try:
        hash(full_key)
    except TypeError:
        full_key = None  # type: ignore[assignment]

    def apply_to_leaves(arrays: Any, *data: Any, **named: Any) -> Any:
        # Each run draws the same numbers, the reference run too.
        with global_random_states_restored(), held_generators_restored(given.source):
            return apply(jax.tree.unflatten(tree, arrays), *data, **named)

    return OpenedModel(apply_to_leaves, values, names, trainable, library, full_key)


def _path_text(path: Any) -> str:
    """Return the path of a parameter with dots: ``lstm.linear.w``."""
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return ".".join(parts).replace("/", ".").replace("~.", "") or "params"
