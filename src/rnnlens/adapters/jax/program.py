"""A model's program at given shapes: traced once, with its recurrent layers and where their weights come from."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from ...autodiff import Memo
from ...errors import InputError, ModelError, raised_by
from ...recurrence.cells import Cell
from ...typing import Array, leaves_of, map_leaves, signature
from ..protocol import Batch
from ..shared.call_errors import explain_program
from .arguments import Data, call, data_parameters, loss_value, refuse_options, scalar, shape_of
from .axes import AxisRoles, find_roles
from .jaxprs import flatten, variables
from .layers import RecurrentLayer, find_layers
from .loops import REORDERED, Loop, find_loops, sequential_associative_scans
from .models import OpenedModel, open_model
from .numeric import evaluate
from .recognise import StepValues, extract_weights, make_cell

#: Largest number of programs that are kept.
_MOST_PROGRAMS = 64
_programs: dict[Hashable, Program] = {}
#: Compiled programs of all models, by their text.
_executables: dict[bytes, Any] = {}


@dataclass(frozen=True)
class Call:
    """One call of a model: its arrays, its data, the target, and the user's function of all of them."""

    batch: Batch
    opened: OpenedModel
    x: Data
    y: Data
    weight: Data
    #: Names of the data arguments of the user's function, and the user's names of layers.
    parameters: tuple[str, ...] | None
    names: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, batch: Batch) -> Call:
        """Open a model and convert its data."""
        refuse_options(model, batch)
        with raised_by("Your model"):
            opened = open_model(model, training=batch.training)
        x, y, weight = (Data.of(getattr(batch, name), name) for name in ("x", "y", "sample_weight"))
        return cls(batch, opened, x, y, weight, data_parameters(model), getattr(model, "names", {}))

    @property
    def arrays(self) -> list[Any]:
        """All arrays that the function takes: the model's, x, y and the sample weights."""
        return [*self.opened.values, *self.x.leaves, *self.y.leaves, *self.weight.leaves]

    @property
    def counts(self) -> tuple[int, int]:
        """Number of arrays of the model, and of the model and x together."""
        return len(self.opened.values), len(self.opened.values) + len(self.x.leaves)

    @property
    def has_loss(self) -> bool:
        """Whether the function returns a loss: a loss was given, or the model itself takes the target."""
        return self.batch.loss is not None or self.batch.y is not None

    def function(self, arrays: Sequence[Any], *, with_loss: bool) -> tuple[Any, Any]:
        """Run the user's model and loss; return the outputs as the model nests them, and the loss or None."""
        values, (count, stop) = list(arrays), self.counts
        x = self.x.nested(values[count:stop])
        target = self.y.nested(values[stop : stop + len(self.y.leaves)])
        takes_target = self.batch.loss is None and self.batch.y is not None
        explain = partial(explain_program, x, target, takes_target=takes_target)
        if takes_target:  # loss_fn(params, x, y)
            with raised_by("Your model", explain):
                arguments = (*x, target) if isinstance(x, tuple) else (x, target)
                outputs = self.opened.apply(values[:count], *arguments)
            return outputs, scalar(outputs, "the model") if with_loss else None
        with raised_by("Your model", explain):
            outputs = call(lambda *a, **k: self.opened.apply(values[:count], *a, **k), x, self.parameters)
        return outputs, self.loss_of(outputs, values) if with_loss and self.batch.loss is not None else None

    def loss_of(self, outputs: Any, arrays: Sequence[Any]) -> Any:
        """Return the loss of outputs, nested as the model returns them; ``arrays`` as in :attr:`arrays`."""
        if self.batch.loss is None:
            return scalar(outputs, "the model")
        start = self.counts[1]
        stop = start + len(self.y.leaves)
        target, weight = self.y.nested(arrays[start:stop]), self.weight.nested(arrays[stop:])
        return loss_value(self.batch.loss, outputs, self.batch, target, weight)

    def without_loss(self) -> Call:
        """Return the call without target, sample weights and loss."""
        return replace(self, batch=self.batch.without_loss(), y=Data([], None), weight=Data([], None))

    def key(self, with_loss: bool) -> Hashable | None:
        """Return a key of the program of this call; None if it cannot be compared."""
        shapes = tuple((tuple(a.shape), str(a.dtype)) for a in self.arrays)
        settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
        places = tuple(signature(data.template) for data in (self.x, self.y, self.weight))
        key = (self.opened.key, shapes, places, with_loss, self.batch.loss if with_loss else None, settings)
        try:
            hash(key)
        except TypeError:
            return None
        return None if self.opened.key is None else key


@dataclass(frozen=True)
class WeightOrigin:
    """Where the entries of a weight come from: numbers among a layer's parameters, laid end to end, and factors.

    ``offset``: the weight where all parameters are zero. ``numbers`` is None for a weight that is no rearrangement of
    parameters.
    """

    numbers: Array | None = None
    factors: Array | None = None
    offset: Array | None = None


@dataclass(frozen=True)
class TracedFunction:
    """A flat program of a function, and its outputs with shapes in the place of arrays.

    ``structure``: the outputs as a tree of JAX, None if that has other leaves.
    """

    program: ClosedJaxpr
    template: Any
    structure: Any

    def outputs(self, arrays: Sequence[Any]) -> Any:
        """Run the program; return its outputs as the function nests them."""
        return jax.tree.unflatten(self.structure, jaxpr_as_fun(self.program)(*arrays))


class Program:
    """The program of a model, with or without a loss, at given shapes."""

    def __init__(self, call: Call, with_loss: bool) -> None:
        self.call, self.with_loss = without_arrays(call), with_loss
        self.memos: dict[Hashable, Memo] = {}
        self._traces: dict[Hashable, TracedFunction] = {}
        # With the target's values, by which an exception of the loss is explained.
        traced = self._trace([tuple(a.shape) for a in call.arrays], call.batch)
        self.program, self.output_template = traced.program, traced.template
        self.loops = self._loops(self.program)
        self.dtypes = [a.dtype for a in call.arrays]
        self._arrays_shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in call.arrays]

    @staticmethod
    def of(call: Call, with_loss: bool) -> Program:
        """Return the program of a call, traced anew only if none of its kind was before."""
        key = call.key(with_loss)
        if key is None:
            return Program(call, with_loss)
        if key not in _programs:
            while len(_programs) >= _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
            _programs[key] = Program(call, with_loss)
        return _programs[key]

    @staticmethod
    def of_any_samples(call: Call, with_loss: bool) -> Program:
        """Return the program of a call; for one without a loss, that of the same model with another number of samples.

        Weights are laid out alike in both, and nothing has to be traced.
        """
        key, count = call.key(with_loss), call.counts[1]
        if not with_loss and key is not None and key not in _programs:
            for other in _programs.values():
                others = other.call
                same_model = others.opened.key == call.opened.key and others.counts == call.counts
                if same_model and _shapes_of_samples(others, count) == _shapes_of_samples(call, count):
                    return other
        return Program.of(call, with_loss)

    def memo(self, key: Hashable) -> Memo:
        """Return what was compiled for a set of ports."""
        return self.memos.setdefault(key, Memo(_executables))

    def _trace(self, shapes: Sequence[tuple[int, ...]], batch: Batch | None = None) -> TracedFunction:
        """Trace the model, and the loss if there is one, with arrays of other shapes; once for each of these."""
        key = tuple(shapes)
        if key not in self._traces:
            call = self.call if batch is None else replace(self.call, batch=batch)
            self._traces[key] = self._traced(call, shapes)
        return self._traces[key]

    def _traced(self, call: Call, shapes: Sequence[tuple[int, ...]]) -> TracedFunction:
        model = self._model_at(shapes[: self.call.counts[1]])
        found: list[tuple[Any, Any]] = []

        def flat(*arrays: Any) -> list[Any]:
            if model is None:
                outputs, loss = call.function(arrays, with_loss=self.with_loss)
            else:
                outputs = model.outputs(arrays[: call.counts[1]])
                loss = call.loss_of(outputs, arrays)
            leaves = leaves_of(outputs)
            leaves_of_jax, structure = jax.tree.flatten(outputs)
            is_same = len(leaves) == len(leaves_of_jax) and all(map(operator.is_, leaves, leaves_of_jax))
            found.append((map_leaves(shape_of, outputs), structure if is_same else None))
            return [*leaves, *([] if loss is None else [loss])]

        structures = [
            jax.ShapeDtypeStruct(shape, a.dtype, weak_type=False)
            for shape, a in zip(shapes, self.call.arrays, strict=True)
        ]
        with sequential_associative_scans():
            program = flatten(jax.make_jaxpr(flat)(*structures))
        return TracedFunction(program, *found[-1])

    def _model_at(self, shapes: Sequence[tuple[int, ...]]) -> TracedFunction | None:
        """Return the model alone as the program without a loss traced it; None if the loss cannot follow on that."""
        if not self.with_loss or self.call.batch.loss is None or self.call.key(True) is None:
            return None
        traced = Program.of(self.call.without_loss(), False)._trace(shapes)
        return None if traced.structure is None else traced

    def _loops(self, program: ClosedJaxpr) -> list[Loop]:
        return find_loops(program, self.call.opened.weight_names, self.call.names)

    @property
    def outputs(self) -> list[Any]:
        """Variables of the program's outputs, without the loss."""
        outvars = self.program.jaxpr.outvars
        return list(outvars[:-1] if self.with_loss else outvars)

    @cached_property
    def roles(self) -> AxisRoles:
        """Axes of all variables that count samples and steps."""
        count = self.call.counts[0]
        shapes = [tuple(a.shape) for a in self.call.arrays]

        def retrace(data_shapes: Sequence[tuple[int, ...]]) -> tuple[ClosedJaxpr, list[Loop]] | None:
            try:
                program = self._trace([*shapes[:count], *data_shapes]).program
            except Exception:  # these sizes do not go together
                return None
            return program, self._loops(program)

        return find_roles(self.program, self.loops, shapes[count:], retrace)

    @cached_property
    def layers(self) -> list[RecurrentLayer]:
        """Recurrent layers in the order in which they run."""
        self._refuse_fixed_samples()
        return find_layers(self.program, self.loops, self.roles)

    def _refuse_fixed_samples(self) -> None:
        """Raise InputError where the data have an axis of samples that could not be varied."""
        roles, (count, stop) = self.roles, self.call.counts
        if roles.sample or not any(not loop.obstacle for loop in self.loops):
            return
        leaves = self.program.jaxpr.invars[count:stop]
        for leaf in leaves:
            features = 1 if jnp.issubdtype(leaf.aval.dtype, jnp.inexact) else 0
            others = [i for i in range(leaf.aval.ndim - features) if i != roles.time.get(leaf)]
            if any(leaf.aval.shape[i] > 1 for i in others):
                raise InputError(
                    "rnnlens could not find out which axis counts samples: the function works for this number only.",
                    got=f"data of shape {tuple(leaf.aval.shape)}",
                    expected="a function that takes any number of samples",
                    hint="make the initial state from the data, such as jnp.zeros((x.shape[0], units)); or jax.vmap "
                    "over the samples of a function of one",
                )

    def layer(self, name: str) -> RecurrentLayer | None:
        """Return the layer of a name, or None."""
        return next((layer for layer in self.layers if layer.name == name), None)

    def refuse_without_layers(self) -> None:
        """Raise ModelError if there is no recurrent layer, with what there is instead."""
        if self.layers:
            return
        closed_loops = [f"{loop.name} (in {loop.obstacle})" for loop in self.loops if loop.obstacle]
        raise ModelError(
            "There is no recurrent layer in this program: no lax.scan carries a state of floats.",
            got="; ".join(closed_loops) or f"{len(self.loops)} loops",
            hint="reverse or sort the sequences before the call, and pass them to the model in the order of its steps"
            if any(loop.obstacle == REORDERED for loop in self.loops)
            else "write the time loop as jax.lax.scan: a loop in Python leaves no trace of its steps",
        )

    # Weights of known cells.

    def weights_of(self, layer: RecurrentLayer, values: Sequence[Any]) -> dict[str, Array]:
        """Return the weights of a layer of a known cell, in the layout of rnnlens, from the model's arrays."""
        parts = [np.asarray(values[i]) for i in layer.loop.weights]
        flat = np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0)
        weights, computed = {}, None
        for key, origin in self.origins(layer).items():
            if origin.numbers is not None and origin.factors is not None and origin.offset is not None:
                padded = np.concatenate([flat, np.zeros(1, flat.dtype)])
                weights[key] = (padded[origin.numbers] * origin.factors + origin.offset).astype(flat.dtype)
            else:
                computed = self._extract(layer, values) if computed is None else computed
                weights[key] = computed[key].astype(layer.dtype(layer.state_variables[0]))
        return weights

    def cell_of(self, layer: RecurrentLayer, values: Sequence[Any]) -> Cell:
        """Return the known cell of a layer with its weights."""
        assert layer.cell is not None
        return make_cell(layer.cell, self.weights_of(layer, values))

    def origins(self, layer: RecurrentLayer) -> Mapping[str, WeightOrigin]:
        """Return where each weight of a layer of a known cell comes from."""
        if layer.base not in self._origins:
            self._origins[layer.base] = self._find_origins(layer)
        return self._origins[layer.base]

    def gradient_places(self, layer: RecurrentLayer, key: str) -> tuple[Array, Array] | None:
        """Return the number of the parameter whose gradient each entry of a weight has, and its factor.

        Where a GRU adds a recurrent bias to one that it has, outside of the reset gate, both have the same gradient.
        None if some entry has the gradient of no parameter.
        """
        origins = self.origins(layer)
        if key not in origins or origins[key].numbers is None:
            return None
        numbers, factors = np.asarray(origins[key].numbers), np.asarray(origins[key].factors)
        absent = numbers < 0
        shared = origins.get("bias", WeightOrigin())
        if absent.any():
            outside = np.arange(absent.shape[-1]) < 2 * absent.shape[-1] // 3
            if key != "recurrent_bias" or shared.numbers is None or (absent & ~outside).any():
                return None
            shared_numbers, shared_factors = np.asarray(shared.numbers), np.asarray(shared.factors)
            if (shared_numbers[absent] < 0).any():
                return None
            numbers = np.where(absent, shared_numbers, numbers)
            factors = np.where(absent, shared_factors, factors)
        return numbers, factors

    @cached_property
    def _origins(self) -> dict[str, Mapping[str, WeightOrigin]]:
        return {}

    def _find_origins(self, layer: RecurrentLayer) -> Mapping[str, WeightOrigin]:
        """Find each weight's parameters: by the weights of parameters that are zero, numbered, and random."""
        shapes = [s.shape for s in self._arrays_shapes]
        sizes = [int(np.prod(shapes[i])) for i in layer.loop.weights]
        total = sum(sizes)

        def weights_at(flat: Array) -> dict[str, Array]:
            values: list[Any] = [np.zeros(shape) for shape in shapes]
            for i, part in zip(layer.loop.weights, np.split(flat, np.cumsum(sizes)), strict=False):
                values[i] = part.reshape(shapes[i])
            return self._extract(layer, values)

        random = np.random.default_rng(0).normal(size=total)
        at_zero, at_numbers, at_random = map(weights_at, (np.zeros(total), np.arange(1.0, total + 1), random))
        origins = {}
        for key, offset in at_zero.items():
            signed = np.rint(at_numbers[key] - offset)
            numbers = np.abs(signed).astype(int) - 1
            factors = np.sign(signed)
            padded = np.append(random, 0.0)
            is_exact = numbers.max(initial=-1) < total and np.allclose(
                padded[numbers] * factors + offset, at_random[key], rtol=1e-6, atol=1e-9
            )
            if is_exact and key.endswith("bias") and not signed.any() and not offset.any():
                continue  # the library's cell has no such weight
            origins[key] = WeightOrigin(numbers, factors, offset) if is_exact else WeightOrigin()
        return origins

    def _extract(self, layer: RecurrentLayer, values: Sequence[Any]) -> dict[str, Array]:
        """Return the weights of a layer for given arrays of the model, from its step run in NumPy."""
        assert layer.cell is not None
        step = StepValues(layer.loop, self.roles.sample, self.roles.samples)
        known = {v: _wide(a) for v, a in zip(self.program.jaxpr.invars, values, strict=False)}
        constants = self._constants(layer.loop, self.program, known)
        return extract_weights(step, layer.cell, constants)

    def _constants(self, loop: Loop, program: ClosedJaxpr, known: Mapping[Var, Any]) -> dict[Var, Any]:
        """Return the values of the constants of a loop's body that consist of parameters."""
        for path in loop.inside:
            around = next(other for other in self.loops if other.path == path)
            known = self._constants_of(around, program, known)
            program = around.body
        return self._constants_of(loop, program, known)

    @staticmethod
    def _constants_of(loop: Loop, program: ClosedJaxpr, known: Mapping[Var, Any]) -> dict[Var, Any]:
        operands = loop.split(loop.equation.invars)[0]
        inner = loop.split(loop.body.jaxpr.invars)[0]
        fixed = [(v, atom) for v, atom, is_fixed in zip(inner, operands, loop.fixed, strict=True) if is_fixed]
        values = evaluate(program, known, [atom for _, atom in fixed])
        return {v: value for (v, _), value in zip(fixed, values, strict=True)}

    def is_tied(self, layer: RecurrentLayer) -> bool:
        """Return whether something besides the steps of a layer reads its weights."""
        own = set(layer.loop.weights)
        parameters = {self.program.jaxpr.invars[i] for i in own}
        made = dict.fromkeys(parameters)
        for index, equation in enumerate(self.program.jaxpr.eqns):
            operands = variables(equation.invars)
            if not any(v in made for v in operands) or str(index) == layer.loop.path.partition("/")[0]:
                continue
            if not all(v in made for v in operands) or equation.primitive.name == "scan":
                return True
            made.update(dict.fromkeys(equation.outvars))
        if any(v in made for v in variables(self.program.jaxpr.outvars)) or layer.loop.inside:
            return True
        body, others = layer.loop.body.jaxpr, layer.loop.split(layer.loop.equation.invars)
        atoms = [atom for part in others for atom in part]
        inner = {v for v, a in zip(body.invars, atoms, strict=True) if isinstance(a, Var) and a in made}
        return any(
            inner & set(variables(e.invars)) for i, e in enumerate(body.eqns) if i not in layer.loop.state_equations
        )


def without_arrays(call: Call) -> Call:
    """Return a call whose arrays are only shapes, so that a program that is kept keeps no data."""
    opened = OpenedModel(
        call.opened.apply,
        list(map(shape_of, call.opened.values)),
        call.opened.weight_names,
        call.opened.trainable,
        call.opened.library,
        call.opened.key,
    )
    x, y, weight = (Data(list(map(shape_of, data.leaves)), data.template) for data in (call.x, call.y, call.weight))
    batch = replace(call.batch, x=None, y=_mark(call.batch.y), sample_weight=_mark(call.batch.sample_weight))
    return Call(batch, opened, x, y, weight, call.parameters, call.names)


def _shapes_of_samples(call: Call, count: int) -> list[Hashable]:
    """Return shapes and dtypes of the first ``count`` arrays of a call, of its data without their first axis."""
    stop = call.counts[0]
    return [(tuple(a.shape)[i >= stop :], str(a.dtype)) for i, a in enumerate(call.arrays[:count])]


def _mark(data: Any) -> bool | None:
    """Return True in the place of data that are there."""
    return None if data is None else True


def _wide(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return np.asarray(array, dtype=np.float64)
    return array
