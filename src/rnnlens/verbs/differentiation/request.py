"""The request of ``rl.gradients``: a target, the tensors to differentiate it by, and their resolved names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import Batch, Port
from ...arguments import as_name, text
from ...arguments.data import is_source
from ...errors import InputError, UnsupportedError, short_repr
from ...layout import Layout
from ...recurrence.trajectory import Adjoint
from ...settings import current, parse_memory
from ...typing import Array
from ..axes import BatchAxes, refuse_unknown
from ..names import Catalogue, TensorName, read, read_one
from ..recurrent_layers import ReplayedCall, ReplayedLayers
from ..request import ModelRequest
from ..weight_layout import sources
from .target import Combine, Reduction, Target

Of = str | Callable[..., Any] | Sequence[Any]

_OF = '"loss", "output", "layer.output", "layer.hidden", "layer.cell" or "layer.final_hidden"'
#: Kinds of tensors that cannot be a target: the framework has no value of them, or nothing precedes them.
_NO_TARGET = ("gates", "gate_preactivation", "weight", "initial_state", "input")


@dataclass(frozen=True)
class GradientArguments:
    """The arguments of ``rl.gradients`` as the user passed them."""

    of: Of
    wrt: str | Iterable[str]
    at: Mapping[str, Any]
    reduce: Reduction
    per_sample: bool
    measure: str | None = None
    across: str | None = None
    combine: Combine | None = None
    clip: Any = None
    memory: str | int | None = None
    axes: Mapping[str, Layout] | None = None


@dataclass(frozen=True)
class GradientRequest(ModelRequest):
    """A target and the tensors to differentiate it by, with every name resolved."""

    #: Arguments of the user's call.
    arguments: GradientArguments
    #: The tensors of which the target is a function; None for all outputs of the model.
    named: tuple[TensorName, ...] | None
    #: A callable of these, on framework tensors; None if the target is a named tensor itself.
    function: Callable[..., Any] | None
    target: Target
    #: The tensors to differentiate by, and those that the user requested. Clipping needs further ones.
    wrt: tuple[TensorName, ...]
    requested: tuple[TensorName, ...] = ()
    #: Whether the user requested one tensor by its own name.
    lone: bool = False
    #: Loss scale: cotangents are multiplied by it, and gradients divided at the end.
    scale: float = 1.0
    #: Bytes that per-sample gradients of weights may use at a time.
    memory: int = 2 * 1024**3
    #: Known cotangents of the tensors in ``named``; the target is then not evaluated. None otherwise.
    cotangents: tuple[Array, ...] | None = None

    @property
    def leaves(self) -> tuple[TensorName, ...]:
        """Tensors that are the arguments of the target, such as the loss or an output."""
        return tuple(read("output", self.catalogue)) if self.named is None else self.named

    @property
    def with_loss(self) -> bool:
        """Whether the target uses a loss."""
        return any(leaf.kind == "loss" for leaf in self.named or ())

    @property
    def of_loss(self) -> bool:
        """Whether the target is the loss itself, and not a function of it."""
        return self.with_loss and self.function is None

    @property
    def samples(self) -> int:
        """Number of samples of the batch."""
        return self.axes.samples(self.batch)

    @property
    def kind(self) -> Hashable:
        """Value that is equal for requests of which one certificate answers for all; steps and weights may differ."""
        arguments, reduce = self.arguments, self.arguments.reduce
        functions = [getattr(f, "__code__", None) or type(f) for f in (self.function, reduce) if callable(f)]
        reduction = reduce if isinstance(reduce, str | None) else np.shape(reduce)
        further = (arguments.per_sample, arguments.measure, arguments.across, self.scale, self.cotangents is None)
        return (self.target.text, *functions, self.leaves, self.wrt, reduction, tuple(arguments.at), *further)

    @property
    def is_linear(self) -> bool:
        """Whether the target is linear in one tensor, so that its cotangent depends on the tensor's shape alone."""
        is_of_one_tensor = self.function is None and self.cotangents is None and len(self.leaves) == 1
        return is_of_one_tensor and not self.with_loss and self.target.is_linear

    def of_batch(self, batch: Batch, target: Target) -> BatchRequest:
        """Return the request for one batch of the data: with ``target``, the part of the target for its samples."""
        partial = is_source(self.batch.x) or self.axes.samples(batch) < self.samples
        return BatchRequest(**{**vars(self), "batch": batch, "target": target}, partial=partial)

    def evaluate(self, batch_axes: BatchAxes, values: Sequence[xr.DataArray]) -> tuple[Array, Sequence[Array]]:
        """Evaluate the target on the values of its leaves; return its value and the cotangents of the leaves."""
        function, target = self.function, self.target
        if function is None:
            _check_samples(target, values[0])
            value, cotangent = target.evaluate(values[0], self._differentiate)
            return value, [cotangent]
        ports = [leaf.port() if self.catalogue.is_free(leaf) else None for leaf in self.leaves]
        arrays = [v.values if p is None else batch_axes.fold(p, v) for p, v in zip(ports, values, strict=True)]

        def on_list(*tensors: Any) -> Any:
            """Call the user's function with the list of all model outputs."""
            return function(list(tensors))

        result, pull = self._differentiate(on_list if self.named is None and len(arrays) > 1 else function, arrays)
        named_result = batch_axes.named_result(result, pull, ports, arrays)
        _check_samples(target, named_result)
        value, cotangent = target.evaluate(named_result, self._differentiate)
        return value, pull(cotangent.astype(result.dtype))

    def _differentiate(self, function: Callable[..., Any], arrays: Sequence[Array]) -> Any:
        return self.adapter.differentiate(function, arrays, self.model)


@dataclass(frozen=True)
class KnownStart:
    """Start of the differentiation in later batches of the same shapes, as the first batch showed it."""

    #: States that are the output of their layer at every step, so that the framework differentiates them itself.
    states: frozenset[TensorName]
    #: Cotangents by port. They are the same for every batch, since the target is linear.
    cotangents: Mapping[Port, Array]


@dataclass(frozen=True)
class BatchRequest(GradientRequest):
    """A request on one batch, with its part of the target.

    ``partial``: whether the data of the call has further samples. ``start``: the start of the differentiation if the
    first batch showed it; None for the first batch. ``replayed``: the recurrent layers of this batch if the caller has
    replayed them; None to capture them.
    """

    partial: bool = False
    start: KnownStart | None = None
    replayed: ReplayedLayers | None = None

    @property
    def framework_states(self) -> frozenset[TensorName]:
        """States that the framework differentiates, as outputs of their layers."""
        return frozenset() if self.start is None else self.start.states


@dataclass
class BatchGradients:
    """Gradients of one batch by tensor, None where no path leads there, and the names of their axes.

    ``swept`` has, by layer, the sweeps that gave these gradients; certificates need them. ``start``: where
    differentiation can start in later batches of the same shapes; None if that is not known.
    """

    value: Array
    samples: int
    gradients: dict[TensorName, Array | None]
    dims: dict[TensorName, tuple[str, ...]]
    swept: dict[str, list[tuple[ReplayedCall, Adjoint]]] = field(default_factory=dict)
    start: KnownStart | None = None


def read_request(model: Any, run: Batch, arguments: GradientArguments) -> GradientRequest:
    """Resolve all names of ``rl.gradients`` against the model and check the arguments."""
    texts = [arguments.wrt] if isinstance(arguments.wrt, str) else list(arguments.wrt)
    resolved = ModelRequest.resolve(model, run, arguments.axes, [arguments.of, *texts])
    catalogue = resolved.catalogue
    leaves, function, target_text = _read_target(arguments.of, catalogue)
    requested, is_single = _read_tensors(arguments.wrt, catalogue)
    if leaves and leaves[0].kind == "loss" and function is None and (arguments.at or arguments.reduce is not None):
        raise InputError("The loss is one number, so at= and reduce= do not apply.", got="at= or reduce=")
    wrt = requested if arguments.clip is None else _add_clipped_weights(requested, arguments, catalogue)
    return GradientRequest(
        **vars(resolved),
        arguments=arguments,
        named=leaves,
        function=function,
        target=Target(target_text, arguments.at, arguments.reduce, arguments.per_sample),
        wrt=tuple(wrt),
        requested=tuple(requested),
        lone=is_single,
        scale=catalogue.facts.loss_scale if leaves and leaves[0].kind == "loss" else 1.0,
        memory=current().memory if arguments.memory is None else parse_memory(arguments.memory),
    )


def a_target(name: str, value: Any) -> Any:
    """Check ``of=``: a name, a function of the output, or a function with the names of its arguments."""
    value = as_name(value)
    if isinstance(value, str):
        return text(name, value)
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    function, *names = parts or (None,)
    is_function = callable(function) and not isinstance(function, type)
    if not is_function or (value is not function and not names) or not all(isinstance(part, str) for part in names):
        expected = f"{_OF}; a callable; (callable, name, ...)"
        raise InputError(f"{name}= is not understood.", got=short_repr(value), expected=expected)
    return value if value is function else parts


def trainable_weights(catalogue: Catalogue) -> list[TensorName]:
    """Return the names of all trainable weights."""
    return [name for name in read("weights", catalogue) if is_trainable(name, catalogue)]


def is_trainable(name: TensorName, catalogue: Catalogue) -> bool:
    """Return whether a weight is trained."""
    weights = catalogue.weights[str(name.layer)]
    return all(weights.trainable.get(source.key, True) for source in sources(weights)[name.key])


def _read_target(of: Of, catalogue: Catalogue) -> tuple[tuple[TensorName, ...] | None, Callable[..., Any] | None, str]:
    """Return the target's leaves (None for all outputs), its function or None, and its name for messages."""
    if isinstance(of, str):
        leaf = read_one(of, catalogue)
        if leaf.kind in _NO_TARGET:
            raise UnsupportedError(
                f"{of!r} cannot be differentiated; it can be differentiated with respect to.", expected=_OF
            )
        return (leaf,), None, leaf.text
    if callable(of):
        return None, of, _function_text(of)
    function, *names = tuple(of)
    return tuple(read_one(name, catalogue) for name in names), function, _function_text(function)


def _function_text(function: Callable[..., Any]) -> str:
    """Return the name of a target that is a function, for messages: ``<lambda>``, ``<mixed>``."""
    return f"<{getattr(function, '__name__', 'callable').strip('<>')}>"


def _read_tensors(wrt: str | Iterable[str], catalogue: Catalogue) -> tuple[list[TensorName], bool]:
    """Return the requested tensors, and whether ``wrt`` is one name; raise if that name has several tensors."""
    texts = [wrt] if isinstance(wrt, str) else wrt
    names = list(dict.fromkeys(name for text in texts for name in read(text, catalogue)))
    if not names:
        raise InputError("wrt= names nothing.", got=repr(wrt), hint='wrt="weights"')
    if not isinstance(wrt, str) or "*" in wrt or "?" in wrt or wrt.endswith("weights"):
        return names, False
    if len(names) > 1:
        listing = ", ".join(f'"{name.text}"' for name in names)
        expected = f'one of {listing}; or wrt=["{wrt}"] for all of them'
        raise InputError(f"{wrt!r} names several tensors.", got=f"wrt={wrt!r}", expected=expected)
    return names, True


def _add_clipped_weights(
    requested: Sequence[TensorName], arguments: GradientArguments, catalogue: Catalogue
) -> list[TensorName]:
    """Return the requested weights, then all other trainable ones, whose gradients the global clipping norm needs."""
    if any(name.kind != "weight" for name in requested) or arguments.per_sample or arguments.measure is not None:
        got = "clip= with other tensors, per_sample or measure"
        raise InputError("Optimizers clip the weight gradients of a whole batch.", got=got)
    return list(dict.fromkeys([*requested, *trainable_weights(catalogue)]))


def _check_samples(target: Target, value: xr.DataArray) -> None:
    if target.per_sample and target.text != "loss" and value.ndim:
        refuse_unknown("per_sample=True", target.text, [str(dim) for dim in value.dims])
