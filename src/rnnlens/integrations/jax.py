"""``rl.jax``: models of JAX as rnnlens takes them, and a watch of their training loops.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trace = rl.trace(rl.jax.model(module.apply, params), x, y, loss=loss)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..adapters.jax import JaxModel
from ..arguments import checked
from ..errors import InputError, short_repr
from ..tracking.jax.watch import JaxWatch, WatchOptions
from ..tracking.watch_arguments import Every, check_arguments

__all__ = ["model", "watch"]


@checked()
def model(
    source: Any,
    params: Any = None,
    *,
    rng: Any = None,
    example: Any = None,
    batched: bool = False,
    names: Mapping[str, str] | None = None,
) -> JaxModel:
    """Describe a model of JAX to rnnlens: a function with its parameters, or a module.

    Modules of Flax NNX and Equinox are also taken as they are, without this function.

    Parameters
    ----------
    source
        A function ``apply(params, x)`` that returns the outputs; one ``loss_fn(params, x, y)`` that returns the loss; a
        module of Flax (NNX or Linen) or Equinox; a Haiku transform. It is not changed.
    params
        The parameters of a function, a Linen module or a Haiku transform, nested in any way.
    rng
        A random key for a module that draws numbers: Haiku's ``rng``, Linen's ``rngs``, Equinox' ``key``, which is
        split among the samples.
    example
        One batch of data, of which only the shapes are used: for calls without data, such as ``rl.layers(model)``.
    batched
        Whether an Equinox module takes a whole batch. By default it takes one sample, and is vectorised over the first
        axis of the data.
    names
        Other names for recurrent layers, by the name that ``rl.layers`` shows: ``{"train.py:17": "rnn"}``.

    Returns
    -------
    JaxModel
        The model, for every function of rnnlens that takes one.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import rnnlens as rl
    >>> def apply(params, x):
    ...     step = lambda h, x_t: (jnp.tanh(x_t @ params["rnn"]["w"] + h @ params["rnn"]["u"]),) * 2
    ...     return jax.lax.scan(step, jnp.zeros((len(x), 4)), jnp.swapaxes(x, 0, 1))[0]
    >>> params = {"rnn": {"w": jnp.ones((2, 4)), "u": jnp.eye(4)}}
    >>> rl.trace(rl.jax.model(apply, params), jnp.ones((3, 9, 2)))["rnn"].hidden.shape
    (3, 9, 4)
    """
    if isinstance(source, Mapping):
        problem, expected = "The module or the function comes first, and then its parameters.", "model(source, params)"
        raise InputError(problem, got=short_repr(source), expected=expected, hint="rl.jax.model(module, params)")
    return JaxModel(source, params, rng=rng, example=example, batched=batched, names=names)


@check_arguments
def watch(
    model: Any,
    path: str | PathLike[str] | None = None,
    *,
    probe: Sequence[Any] | None = None,
    loss: Callable[..., Any] | None = None,
    every: Every = 50,
    epochs: Collection[int] = (),
    layers: str | Iterable[str] | None = None,
    keep: str | Iterable[str] = (),
    loggers: Any = None,
    stop_on: str | Iterable[str] = (),
    on_alert: Callable[[Any], object] | None = None,
    on_nonfinite: str | None = None,
    resume: bool = True,
    points: int | None = 64,
    step: int | None = None,
) -> JaxWatch:
    """Record a training loop: ``with rl.jax.watch(model, "runs/a.zarr", probe=(x, y), loss=loss) as watch: ...``.

    The loop calls ``watch.step(params)`` after each compiled step, with what the step returned. A *probe*, a fixed
    held-out batch, is traced between two steps; nothing enters the compiled step, and its results do not change.

    Parameters
    ----------
    model
        The model as rnnlens takes it, see :func:`model`, with the parameters from before training.
    path
        Folder of the run, ending in ``.zarr``; :func:`rnnlens.open` reads it, also during training. An existing run is
        continued. None writes nothing to disk.
    probe, loss
        A fixed batch ``(x, y)`` or ``(x, y, sample_weight)``, not used for training, that is traced in evaluation mode;
        and its loss, ``loss(output, target)``, which a model that returns its loss does not need.
    every, epochs
        When to record: a number of steps, with 0 for never; ``"powers of two"``; or a function ``(step, epoch) ->
        bool``. The probe is recorded before training as well, and at the end of ``epochs`` where the loop sets
        ``watch.epoch`` before the next step.
    layers
        Names of the layers to record; all recurrent layers by default.
    keep
        Quantities whose full arrays are recorded, such as ``"hidden_grad"``.
    loggers
        Further destinations of the records: a ``SummaryWriter``, a run of ``wandb`` or ``mlflow``, the name of a tool,
        an object with ``write(record)`` and ``close(reason)``, or a list of these.
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``. The loop must check
        ``watch.stop``. All three are logged once with their step, whether or not they end training.
    on_alert
        Function that is called with each new :class:`~rnnlens.results.training_run.Alert`, once; training goes on if it
        raises.
    on_nonfinite
        ``"report"``: the first step whose loss (``watch.step(params, loss=loss)``) or whose parameters are not finite
        is written to ``runs/a.nonfinite.nc``, with the parameters from before it and with ``batch=``; its first
        non-finite quantity is logged. Each step is then waited for, and its parameters are copied.
    resume
        Continue an existing run at ``path``; False replaces it.
    points
        Maximal number of points stored per profile over time; None stores every step.
    step
        Number of steps trained before; later records of an existing run are dropped. By default it is the last step of
        the run.

    Returns
    -------
    JaxWatch
        A context manager with ``step(params, loss=None, batch=None, steps=1)``: ``steps`` is the length of a compiled
        loop over training steps, which is recorded at its end.

    Raises
    ------
    InputError
        If an argument has an invalid value, or there is neither a probe nor ``on_nonfinite=``.
    LayerNotFoundError
        If ``layers`` names a layer that the model does not have.
    FileError
        If ``path`` exists and is no run, or if another process writes this run.

    Warns
    -----
    TrackingWarning
        At the end, if nothing was recorded, with the reason; once for each cause of failed records.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import rnnlens as rl
    >>> def apply(params, x):
    ...     step = lambda h, x_t: (jnp.tanh(x_t @ params["rnn"]["w"] + h @ params["rnn"]["u"]),) * 2
    ...     return jax.lax.scan(step, jnp.zeros((len(x), 4)), jnp.swapaxes(x, 0, 1))[0]
    >>> def loss(output, target):
    ...     return ((output - target) ** 2).mean()
    >>> params = {"rnn": {"w": jnp.ones((2, 4)), "u": jnp.eye(4)}}
    >>> x, y = jnp.ones((3, 9, 2)), jnp.zeros((3, 4))
    >>> with rl.jax.watch(rl.jax.model(apply, params), "run.zarr", probe=(x, y), loss=loss, every=1) as watch:
    ...     for _ in range(2):
    ...         value, gradients = jax.value_and_grad(lambda p: loss(apply(p, x), y))(params)
    ...         params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    ...         watch.step(params, loss=value)
    >>> rl.open("run.zarr").steps.values.tolist()
    [0, 1, 2]
    """
    options = WatchOptions(
        path=path,
        probe=probe,
        loss=loss,
        every=every,
        epochs=epochs,
        layers=layers,
        keep=keep,
        loggers=loggers,
        stop_on=stop_on,
        on_alert=on_alert,
        on_nonfinite=on_nonfinite,
        resume=resume,
        points=points,
        step=step,
    )
    return JaxWatch(model, options)
