"""``rl.gradients``: a number of a model differentiated by anything in it, and the reason where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from ..adapters.protocol import Batch
from ..adapters.registry import adapter_for
from ..arguments import (
    anything,
    axes_by_name,
    checked,
    class_weights,
    data_set,
    many_examples,
    memory,
    names,
    one_of,
    seed,
    states,
    switch,
    text,
    whole,
)
from ..arguments import loss as a_loss
from ..arguments.data import is_source
from ..errors import DisconnectedError, InputError, UnsupportedError, message, shown
from ..results.gradients import Gradients
from ..results.schema import labelled
from ..settings import current, parse_memory
from ..typing import Array
from ..vocabulary import GATE
from .axes import Axes, an_axes_table
from .differentiation.batches import Feed, Gathered, gather, on_list
from .differentiation.clipping import a_clipping, clipped, rule
from .differentiation.question import Question, repeatable
from .differentiation.reasons.explain import Explanation
from .differentiation.target import Reduction, Target, a_reduction
from .loss_words import with_reduction
from .names import Catalogue, TensorName, catalogue, read, read_all, read_one, with_named_outputs
from .turns import in_turn
from .weight_keys import sources

__all__ = ["Gradients", "gradients"]

Of = str | Callable[..., Any] | Sequence[Any]


def a_target(name: str, value: Any) -> Any:
    """A name, a function of the output, or a function and the names of what it takes."""
    if isinstance(value, str):
        return text(name, value)
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    function, *of_what = parts or (None,)
    is_one = callable(function) and not isinstance(function, type)
    if not is_one or (value is not function and not of_what) or not all(isinstance(part, str) for part in of_what):
        expected = f"{_OF}; a callable; (callable, name, ...)"
        raise InputError(message(f"{name}= is not understood.", got=shown(value), expected=expected))
    return value if value is function else parts


@checked(
    model=anything,
    x=data_set,
    y=many_examples,
    of=a_target,
    wrt=names,
    at=axes_by_name,
    reduce=a_reduction,
    per_sample=switch,
    loss=a_loss,
    sample_weight=many_examples,
    class_weight=class_weights,
    training=switch,
    initial_state=states,
    seed=seed,
    batch_size=whole(least=1),
    combine=one_of("mean", "sum"),
    across=one_of("mean", "sum", "norm"),
    clip=a_clipping,
    memory=memory,
    axes=an_axes_table,
)
@in_turn
def gradients(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    of: Of = "loss",
    wrt: str | Iterable[str] = "weights",
    at: Mapping[str, Any] | None = None,
    reduce: Reduction = None,
    per_sample: bool = False,
    loss: str | Callable[..., Any] | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = False,
    initial_state: Mapping[str, Sequence[Any]] | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    combine: Literal["mean", "sum"] | None = None,
    across: Literal["mean", "sum", "norm"] | None = None,
    clip: str | Mapping[str, float] | None = None,
    memory: str | int | None = None,
    axes: Mapping[str, Any] | None = None,
) -> xr.DataArray | Gradients:
    """Differentiate one number of a model with respect to any of its tensors.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; left exactly as found.
    x, y
        One batch, or a data set: arrays, a ``tf.data.Dataset``, a torch ``DataLoader``, a generator, a Zarr array.
        Sources bring their own targets.
    of
        What to differentiate: ``"loss"``; ``"output"``, ``"output[name]"``; ``"dense.output"``; ``"lstm.hidden"``,
        ``"lstm.cell"``, ``"lstm.final_hidden"``; a callable of the model's output (of the list of them, where there are
        several) in the framework's own operations; or ``(callable, name, ...)``, a callable of named tensors.
    wrt
        With respect to what: the names above, ``"input"``, ``"input[name]"``, ``"lstm.initial_hidden"``,
        ``"lstm.gates"``, ``"lstm.gate_preactivation"``, ``"lstm.weights"``, ``"lstm*/recurrent_kernel"``,
        ``"weights"``; or several of them.
    at
        Steps and units of the target, by dimension: ``{"time": 10, "unit": [0, 1]}``. Selected before differentiation.
    reduce
        How a target of many numbers becomes one: ``"sum"``, ``"mean"``, ``"norm"``, weights to multiply and sum with,
        or a callable in the framework's own operations. Never done silently.
    per_sample
        Reduce within each sample only. Weights get a ``sample`` axis then. Of the loss, a sample's gradient is its
        share: those of all samples sum to the gradient of the batch (without what a regulariser adds).
    loss, sample_weight, class_weight, training, initial_state, seed
        As in :func:`rnnlens.trace`. Initial states have one row per sample of ``x``, or one row for all.
    batch_size
        Samples at a time. Results are those of the whole data set as one batch, whatever the size. A loss that is no
        plain mean or sum over samples is evaluated on the outputs of all batches, for which the data is read twice.
    combine
        How the target of a data set follows from those of its batches, where that is not clear from ``reduce``.
    across
        Reduce the sample axis while streaming, in bounded memory: ``"mean"``, ``"sum"``, or ``"norm"``, the mean over
        samples of the norm of each sample's gradient over units or features: one number per time step.
    clip
        ``"optimizer"``: also give the gradients as the optimizer would clip them, in ``result.clipped``. Or how to:
        ``{"global_clipnorm": 1.0}``, ``{"clipnorm": ...}``, ``{"clipvalue": ...}``.
    memory
        What per-sample gradients of weights may use at a time, such as ``"1 GiB"``.
    axes
        What the axes of a tensor count, where that cannot be found out: ``{"input": ("time", "sample", "feature"),
        "y": ("time", "sample")}``; ``(("time", "sample"), "unit")`` where two are folded into one.

    Returns
    -------
    DataArray or Gradients
        For one tensor a DataArray with its dimensions. For a list, a pattern or ``"weights"`` a mapping by layer,
        ``g["conv1d"]["kernel"]``, with ``g.disconnected``: the tensors without gradient, and why.

    Raises
    ------
    DisconnectedError
        If the one tensor asked for has no gradient; ``error.reason`` has a code, a sentence and a remedy.
    InputError
        If the target is not one number and ``reduce`` does not say what to do, or an argument does not fit.
    LayerNotFoundError
        If a name names nothing.

    References
    ----------
    Gradients of and through recurrent states: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.
    """
    adapter = adapter_for(model)
    known = catalogue(adapter, model, x)
    if not is_source(x):
        texts = [of, wrt] if isinstance(wrt, str) else [of, *wrt]
        run = Batch(x, training=training, initial_state=initial_state, seed=seed)
        known = with_named_outputs(adapter, model, run, known, texts)
    room = Axes(adapter, model, axes, known)
    question = _question(room, known, of, wrt, Target("", at or {}, reduce, per_sample), clip, memory)
    with_loss = any(leaf.what == "loss" for leaf in question.leaves)
    if with_loss and question.function is None and (at or reduce is not None):
        raise InputError(message("The loss is one number: there is nothing to select or reduce.", got="at= or reduce="))
    template = Batch(None, None, None, class_weight, loss, training, initial_state, repeatable(adapter, seed, training))
    feed = Feed(x, y, sample_weight, batch_size, room, template, with_loss)
    question, gathered = gather(question, feed, combine, across)
    provenance = adapter.provenance(model)
    if with_loss:
        provenance = with_reduction(provenance, model, loss)
    return _result(question, gathered, wrt, clip, provenance)


def _question(
    axes: Axes,
    known: Catalogue,
    of: Of,
    wrt: str | Iterable[str],
    target: Target,
    clip: Any,
    memory: str | int | None,
) -> Question:
    leaves, function, text = _target(of, known)
    names = read(wrt, known) if isinstance(wrt, str) else read_all(wrt, known)
    if not names:
        raise InputError(message("wrt= names nothing.", got=repr(wrt), hint='wrt="weights"'))
    if clip is not None:
        if any(name.what != "weight" for name in names) or target.per_sample:
            raise InputError(
                message(
                    "Optimizers clip the gradients of weights, of a batch.",
                    got="clip= with other tensors or per_sample",
                )
            )
        names = list(dict.fromkeys([*names, *_trainable(known)]))
    adapter, model = axes.adapter, axes.model
    scale = _loss_scale(model) if leaves[0].what == "loss" else 1.0
    memory = current().memory if memory is None else parse_memory(memory)
    target = replace(target, text=text)
    return Question(adapter, model, known, leaves, function, target, tuple(names), axes, scale, memory, callable(of))


def _target(of: Of, known: Catalogue) -> tuple[tuple[TensorName, ...], Callable[..., Any] | None, str]:
    """The tensors that the target is made of, the function that makes it, and words for it."""
    if isinstance(of, str):
        leaf = read_one(of, known)
        if leaf.what in ("gates", "gate_preactivation", "weight", "initial_state", "input"):
            raise UnsupportedError(
                message(f"{of!r} cannot be differentiated; it can be differentiated with respect to.", expected=_OF)
            )
        return (leaf,), None, leaf.text
    if callable(of):
        leaves = tuple(read("output", known))
        function = of if len(leaves) == 1 else on_list(of)
        return leaves, function, _called(of)
    function, *of_what = tuple(of)
    return tuple(read_one(name, known) for name in of_what), function, _called(function)


_ROWS_APART = (
    "Keras on TensorFlow clips each looked-up row of an embedding by itself, before the rows of one id are added: "
    "where ids repeat in a batch, training clips by a slightly other norm than is shown here."
)
_OF = '"loss", "output", "layer.output", "layer.hidden", "layer.cell" or "layer.final_hidden"'


def _called(function: Callable[..., Any]) -> str:
    """What a callable target is called: ``<lambda>``, ``<mixed>``."""
    return f"<{getattr(function, '__name__', 'callable').strip('<>')}>"


def _result(
    question: Question, gathered: Gathered, wrt: str | Iterable[str], clip: Any, provenance: Mapping[str, str]
) -> xr.DataArray | Gradients:
    asked = read(wrt, question.known) if isinstance(wrt, str) else read_all(wrt, question.known)
    single = isinstance(wrt, str) and len(asked) == 1 and asked[0].text == _canonical(wrt, asked[0])
    explanation = gathered.explanation
    if single and asked[0] not in gathered.gradients:
        reason = explanation.disconnected[asked[0].text]
        error = DisconnectedError(
            message(
                f"There is no gradient of {question.target.text} with respect to {reason.name!r} [{reason.code}].",
                got=reason.sentence,
                hint=reason.remedy,
            )
        )
        error.reason = reason
        raise error
    arrays = {name: _label(question, name, gathered, provenance) for name in asked if name in gathered.gradients}
    if single and clip is None:
        arrays[asked[0]].attrs |= gathered.certificate.attributes()
        return _with_reasons(arrays[asked[0]], explanation)
    common: dict[str, Any] = {"of": question.target.text, "value": gathered.value, "provenance": provenance}
    result = Gradients(
        _datasets(arrays),
        disconnected=explanation.disconnected,
        flags=explanation.flags,
        notes=explanation.notes,
        certificate=gathered.certificate,
        **common,
    )
    if clip is not None:
        trainable = {
            name: gathered.gradients[name] for name in _trainable(question.known) if name in gathered.gradients
        }
        kind, threshold = rule(clip, question.model)
        after, norm = clipped(trainable, question.known, kind, threshold)
        both = replace_gradients(gathered, after)
        labels = {name: _label(question, name, both, provenance) for name in asked if name in both.gradients}
        sparse = any("touched_rows" in array.attrs for array in arrays.values())
        if sparse and provenance.get("engine", "").startswith("tensorflow"):
            result.notes.append(_ROWS_APART)
        result.clip = {"kind": kind, "threshold": threshold, "norm": norm}
        result.clipped = Gradients(_datasets(labels), **common)
    return result


def replace_gradients(gathered: Gathered, after: Mapping[TensorName, Array]) -> Gathered:
    """The same with some gradients changed."""
    return replace(gathered, gradients={**gathered.gradients, **after})


def _canonical(text: str, name: TensorName) -> str:
    """The name itself where ``text`` names one tensor in another spelling; "" for patterns and groups."""
    group = "*" in text or "?" in text or text.endswith("weights")
    return "" if group else name.text


def _with_reasons(array: xr.DataArray, explanation: Explanation) -> xr.DataArray:
    """Say on a lone array what the result class would show: zero throughout and why, frozen, masked."""
    for label, reasons in (("disconnected", explanation.disconnected), ("flagged", explanation.flags)):
        for reason in reasons.values():
            array.attrs[label] = str(reason)
    return array


def _label(question: Question, name: TensorName, gathered: Gathered, provenance: Mapping[str, str]) -> xr.DataArray:
    of, info = question.target.text, question.known.recurrent.get(str(name.layer).partition("#")[0])
    array, dims = gathered.gradients[name], gathered.dims[name]
    unit = "loss" if of == "loss" else "1"
    attrs: dict[str, Any] = {
        "long_name": f"gradient of {of} with respect to {name.text}",
        "units": unit,
        "definition": f"d {_described(question.target)} / d {name.text}",
        "tensor": name.text,
        "layer": name.layer or "model",
    }
    touched = _touched_rows(question, name, array, dims)
    if touched is not None:
        attrs["touched_rows"] = touched
    labels = {"cell": info.cell} if info is not None and GATE in dims else {}
    return labelled(array, dims, name=name.quantity, attrs=attrs, provenance=provenance, info=labels)


def _described(target: Target) -> str:
    """The target in words: what, where, how reduced."""
    where = "".join(f", {dim}={index!r}" for dim, index in target.at.items())
    how = "" if target.reduce is None else f"{target.reduce if isinstance(target.reduce, str) else 'weighted'} of "
    per = " of each sample" if target.per_sample else ""
    return f"{how}{target.text}{where}{per}"


def _touched_rows(question: Question, name: TensorName, array: Array, dims: Sequence[str]) -> int | None:
    """Rows of an embedding that the gradient reaches: all others were not looked up."""
    table = name.key == "embeddings" or (name.what == "weight" and _is_embedding(question.model, name))
    if not table or array.ndim < 2:
        return None
    return int(np.count_nonzero(np.abs(array).reshape(-1, *array.shape[-2:]).max(axis=(0, 2))))


def _is_embedding(model: Any, name: TensorName) -> bool:
    """A torch embedding: its weight is called ``weight`` like any other."""
    modules = getattr(model, "named_modules", None)
    if modules is None or hasattr(model, "get_layer"):
        return False
    return "Embedding" in type(dict(modules()).get(name.layer)).__name__


def _datasets(arrays: Mapping[TensorName, xr.DataArray]) -> dict[str, xr.Dataset]:
    """One dataset per layer; what belongs to no layer goes to ``"model"``."""
    by_layer: dict[str, dict[str, xr.DataArray]] = {}
    for name, array in arrays.items():
        variables = by_layer.setdefault(name.layer or "model", {})
        variables[name.quantity.replace("/", ".")] = _apart(array, variables)
    return {layer: xr.Dataset(variables, attrs={"layer": layer}) for layer, variables in by_layer.items()}


def _apart(array: xr.DataArray, others: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Axes of another length than those of the same name beside it get a name of their own."""
    sizes = {dim: size for other in others.values() for dim, size in other.sizes.items()}
    clashing = {dim: f"{array.name}_{dim}" for dim, size in array.sizes.items() if sizes.get(dim, size) != size}
    return array.rename(clashing) if clashing else array


def _trainable(known: Catalogue) -> list[TensorName]:
    names = read("weights", known)
    return [name for name in names if _is_trainable(name, known)]


def _is_trainable(name: TensorName, known: Catalogue) -> bool:
    weights = known.weights[str(name.layer)]
    return all(weights.trainable.get(source.key, True) for source in sources(weights)[name.key])


def _loss_scale(model: Any) -> float:
    """The factor by which mixed-precision training keeps small gradients from vanishing in float16."""
    optimizer = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "inner_optimizer"):
        return 1.0
    scale = getattr(optimizer, "dynamic_scale", None) if getattr(optimizer, "built", False) else None
    return float(np.asarray(scale)) if scale is not None else float(getattr(optimizer, "initial_scale", 1.0))
