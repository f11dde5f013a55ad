"""``rl.verify``, and its way for scan functions and kernels: a float64 adjoint, and the gradients of known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arguments import checked
from ..errors import InputError, did_you_mean, raised_by
from ..recurrence.sequence import SequenceCell, SequenceChunk, real_like
from ..results.checks import rounding_bound
from .frameworks import Runner, runner
from .model_design import ModelDesign
from .model_verification import Verification, WrongTensor, verify_model
from .scan_recurrences import RECURRENCES, SIZES, Arrays, Recurrence


@checked()
def verify(
    function: Any,
    recurrence: Any,
    *,
    state: Any = None,
    step: bool = False,
    arguments: Mapping[str, Any] | None = None,
    time_first: bool | None = None,
    framework: str | None = None,
    dtype: str = "float32",
    chunk: int = 64,
    initial: bool = False,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Verification:
    """Verify the gradient of a recurrence: of a scan function or kernel, of a cell, of a layer or of a model.

    A scan function runs with decays close to 1, so that gradients reach every step, with several samples, and with
    lengths around the borders of chunks. Its gradients are compared with an independent float64 adjoint.

    A cell, layer or model runs on the example input, cut to lengths around the borders of chunks, with its own weights
    and with weights of slow decay that a search finds. The gradients by the input of single samples and steps, by the
    initial state and by all weights are compared with differences of its forward pass in float64, which use no backward
    pass. Where it does not run in float64, they are differences in its own dtype.

    Both use cotangents at every step, and at the last step alone. A wrong gradient is located, and compared with the
    gradients of known mistakes. The model is left as it is.

    Parameters
    ----------
    function
        A scan function, called with the arguments of the recurrence in order, as tensors (sample, time, ...), and with
        the initial state behind them if ``initial``; it returns the outputs, or the outputs and the last state. Or a
        torch module, a built layer or model of Keras 3, a module of Flax NNX or Equinox, or ``rl.jax.model(function,
        params)``: called as ``model(x)``, or as ``model(x, state)``. It runs as at inference.
    recurrence
        For a scan function, its name. ``"diagonal"`` and ``"complex_diagonal"``: ``(a, b)`` (sample, time, unit),
        states s_t = a_t s_{t-1} + b_t.
        ``"selective_scan"``: ``(x, dt, A, B, C)``; x, dt (sample, time, channel), A (channel, state), B, C (sample,
        time, state). ``"ssd"``, ``"gla"``: ``(q, k, v, g)``; S_t = e^{g_t} S_{t-1} + k_t v_t^T, y_t = q_t^T S_t /
        sqrt(key); q, k (sample, time, head, key), v (..., value), and g per head or per key. ``"gated_delta"``,
        ``"kda"``: ``(q, k, v, g, beta)``; S_t = (I - beta_t k_t k_t^T) e^{g_t} S_{t-1} + beta_t k_t v_t^T, g per head
        or per key. ``"rwkv7"``: ``(r, w, k, v, a, b)``; S_t = e^{w_t} S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, y_t =
        r_t^T S_t. For a cell, layer or model, an example input (sample, time, ...) of at least two samples; integers
        are token ids.
    state
        Initial state of a cell, layer or model: an array, or nested ones; its gradient is compared, too. Keras layers
        receive it as ``initial_state``.
    step
        Whether the model is a cell, called at every step with the input of that step and the state: ``cell(x_t,
        state)``, in JAX ``cell(state, x_t)``. It returns the next state, or ``(output, state)``, in JAX ``(state,
        output)``.
    arguments
        Further named arguments of the model, such as a mask.
    time_first
        Whether the axes of the example are (time, sample, ...); by default that of a torch RNN without ``batch_first``.
    framework
        Of a scan function, ``"torch"``, ``"jax"`` or ``"tensorflow"``; by default the first of these that is loaded.
    dtype
        Dtype of the tensors: float64, float32, float16 or bfloat16. The reference reads the rounded values.
    chunk
        Chunk size of the kernel: lengths are 1, chunk - 1, chunk, chunk + 1 and 2 chunk + 5; of an example input those
        that it has steps for, and its own.
    initial
        Whether the scan function takes the state before the first step: (sample, unit), (sample, channel, state) or
        (sample, head, key, value).
    sizes
        Sizes of axes, for a kernel that needs certain ones: "sample", "head", "key", "value", "unit", "state".
    seed
        Seed of the drawn values.

    Returns
    -------
    Verification
        ``.ok``, the wrong tensors with their steps and samples, and the likeliest cause.

    Raises
    ------
    InputError
        For an unknown recurrence, framework or size, a function that returns something else, an example of one sample,
        and a model with other outputs on a second call.

    References
    ----------
    Adjoint of a recurrence: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5. Extrapolated differences:
    Richardson 1911, doi:10.1098/rsta.1911.0009.

    Examples
    --------
    >>> import torch, rnnlens as rl
    >>> print(rl.verify(rl.torch.scan, "diagonal", chunk=8).ok)
    True
    >>> print(rl.verify(torch.nn.LSTMCell(3, 4), torch.randn(2, 9, 3), state=(torch.zeros(2, 4),) * 2, step=True).ok)
    True
    """
    if not isinstance(recurrence, str):
        if time_first is None:
            time_first = getattr(function, "batch_first", True) is False
        time = 0 if time_first else 1
        design = ModelDesign(recurrence, state, step, dict(arguments or {}), time, chunk)
        return verify_model(function, design, dtype, seed)
    if recurrence not in RECURRENCES:
        known = ", ".join(RECURRENCES)
        raise InputError(
            f"verify knows no recurrence {recurrence!r}.",
            expected=f"one of: {known}",
            hint=did_you_mean(recurrence, RECURRENCES),
        )
    unknown = set(sizes or {}) - SIZES.keys()
    if unknown or chunk < 2:
        raise InputError(
            "verify needs a chunk of at least 2 steps and known sizes.",
            got=f"chunk={chunk}, sizes={dict(sizes or {})}",
            expected=f"sizes of {', '.join(SIZES)}",
        )
    run = runner(framework)
    rule, rng, lengths = RECURRENCES[recurrence], np.random.default_rng(seed), _lengths(chunk)
    cases = []
    for length in lengths:
        arguments = run.rounded(rule.draw(rng, length, {**SIZES, **(sizes or {})}), dtype)
        cell = rule.cell(arguments, None)
        start = rng.normal(size=cell.start().shape) if initial else np.zeros(cell.start().shape)
        start = run.rounded({"initial": start + (0j if np.iscomplexobj(cell.writes()) else 0)}, dtype)["initial"]
        reference = _Reference(rule, arguments, rule.cell(arguments, start))
        inputs = arguments | ({"initial": start} if initial else {})
        cases.append(_Case(function, run, inputs, dtype, reference, rng))
    wrong_cases = [(case, wrong) for case in cases if (wrong := case.wrong_tensors())]
    verification = Verification(recurrence, dtype, lengths, compared=tuple(cases[0].compared))
    if not wrong_cases:
        return verification
    # The shortest run shows the place, the longest one tells mistakes apart.
    (shortest, wrong), (longest, _) = wrong_cases[0], wrong_cases[-1]
    return replace(verification, wrong=tuple(wrong), lag=shortest.first_wrong_lag(), cause=longest.cause())


def _lengths(chunk: int) -> tuple[int, ...]:
    return tuple(sorted({1, chunk - 1, chunk, chunk + 1, 2 * chunk + 5}))


class _SubstitutedChunk(SequenceChunk):
    """Steps of a cell with substitutes of the states before each step."""

    previous: Any

    def previous_states(self, at: Sequence[int] | None = None) -> Any:
        return self.previous if at is None else self.previous[:, list(at)]


class _Reference:
    """Outputs and gradients of a cell in float64, step by step, also with a known mistake in the adjoint."""

    def __init__(self, rule: Recurrence, arguments: Arrays, cell: SequenceCell) -> None:
        self.rule, self.arguments, self.cell = rule, arguments, cell
        self.steps = slice(0, cell.steps)
        self.forward = SequenceChunk(cell, self.steps, cell.start)
        self.states = self.forward.states()
        self.outputs, self.last_state = self.forward.outputs(), self.states[:, -1]
        self.previous = self.forward.previous_states()

    def gradients(self, direct: Any, last: Any, **mistake: Any) -> Arrays:
        """Return the gradients of all arguments and of the initial state.

        ``mistake``: ``conjugate``, ``shift``, ``border``, ``order`` change how a gradient is pulled back (see
        :func:`_pull`); ``states`` and ``previous`` are substitutes of S_t and S_{t-1}; ``zero`` names a part whose
        gradient is 0.
        """
        states, previous = mistake.pop("states", self.states), mistake.pop("previous", self.previous)
        zero = mistake.pop("zero", None)
        chunk = _SubstitutedChunk(self.cell, self.steps, self.cell.start)
        chunk._states, chunk.direct, chunk.previous = states, direct, previous
        chunk._grads, initial = _pull(self.cell, direct, last, **mistake)
        parts = chunk.part_grads()
        for name, part in self.cell.parts.items():  # sums over steps and samples that share a part
            if name in parts and part.shape[1] == 1:
                parts[name] = parts[name].sum(1, keepdims=True)
        if zero in parts:
            parts[zero] = np.zeros_like(parts[zero])
        named = self.rule.pull(self.arguments, parts)
        return {name: real_like(named[name], self.arguments[name]) for name in self.rule.arguments} | {
            "initial": real_like(initial, self.cell.start())
        }


def _pull(
    cell: SequenceCell,
    direct: Any,
    last: Any,
    *,
    conjugate: bool = True,
    shift: int = 0,
    border: int = 0,
    order: bool = False,
) -> tuple[Any, Any]:
    """Return dL/dS_t of all steps and dL/dS_0; the defaults are right, each option is one known mistake."""
    decays = np.broadcast_to(cell.decays(), (cell.shape[0], cell.steps, *cell.decays().shape[2:]))
    decays = np.roll(decays, shift, axis=1)
    conj = np.conj if conjugate else np.asarray
    grads, later = [], last
    for t in reversed(range(cell.steps)):
        if border and (t + 1) % border == 0 and t + 1 < cell.steps:
            later = np.zeros_like(later)
        read = None if cell.read is None else cell.read[:, 0 if cell.read.shape[1] == 1 else t]
        here = direct[:, t] if read is None else conj(read) * np.expand_dims(direct[:, t], cell.axis)
        total = later + here
        grads.append(total)
        later = total
        if cell.right is not None:
            left, right = cell.left_vector[:, t], cell.right[:, t]
            first = conj(decays[:, t]) * total if order else total
            removed = right * (left * first).sum(cell.axis, keepdims=True)
            later = first - removed if order else conj(decays[:, t]) * (total - removed)
        else:
            later = conj(decays[:, t]) * total
    return np.stack(grads[::-1], axis=1), later


class _Case:
    """One length: the function's outputs and gradients, under dense cotangents and under one at the last step alone."""

    def __init__(self, function: Any, run: Runner, inputs: Arrays, dtype: str, reference: _Reference, rng: Any) -> None:
        self.reference, self.length = reference, reference.cell.steps
        self.bound = rounding_bound(dtype, self.length)
        self.shared = [name for name, value in inputs.items() if value.shape[:2] != reference.outputs.shape[:2]]

        def normal(shape: Sequence[int]) -> Any:
            values = rng.normal(size=shape)
            return values + 1j * rng.normal(size=shape) if np.iscomplexobj(reference.outputs) else values

        dense = run.rounded({"y": normal(reference.outputs.shape), "s": normal(reference.last_state.shape)}, dtype)
        last_only = np.zeros_like(dense["y"])
        last_only[:, -1] = dense["y"][:, -1]
        outputs, last, pull = _call(function, run, inputs, dtype)
        no_state = np.zeros_like(dense["s"])
        self.cotangents = [(dense["y"], dense["s"] if last is not None else no_state), (last_only, no_state)]
        self.results: list[tuple[str, Any, Any]] = [("output", outputs, reference.outputs)]
        if last is not None:
            self.results.append(("last state", last, reference.last_state))
        self.gradients = [pull(y, s) for y, s in self.cotangents]
        self.expected = [reference.gradients(y, s) for y, s in self.cotangents]
        self.names = list(inputs)
        self.compared = [name for name, *_ in self.results] + [f"gradient of {name}" for name in self.names]

    def wrong_tensors(self) -> list[WrongTensor]:
        """Return the tensors that differ, under either cotangent."""
        named = list(self.results)
        for gradients, expected in zip(self.gradients, self.expected, strict=True):
            named += [(f"gradient of {name}", gradients[name], expected[name]) for name in self.names]
        wrong: dict[str, WrongTensor] = {}
        for name, actual, expected in named:
            tensor = self._compare(name, actual, expected)
            if tensor is not None:
                wrong.setdefault(name, tensor)
        return list(wrong.values())

    def _compare(self, name: str, actual: Any, expected: Any) -> WrongTensor | None:
        if actual is None:
            actual = np.zeros_like(expected)
        if actual.shape != expected.shape:
            raise InputError(
                f"The {name} has another shape than the recurrence.",
                got=str(actual.shape),
                expected=str(expected.shape),
            )
        # The unit is the largest value of the reference, or 1 where everything is exactly zero.
        unit = float(np.abs(expected).max(initial=0.0)) or 1.0
        differs = ~(np.abs(actual - expected) <= self.bound * unit)
        if not differs.any():
            return None
        error = float(np.max(np.abs(actual - expected))) / unit
        is_shared = name.rpartition(" ")[2] in (*self.shared, "state")
        by_sample = differs.shape[0] == self.reference.outputs.shape[0] and not (is_shared and "initial" not in name)
        rows = _positions(differs, 0) if by_sample else ()
        steps = () if is_shared else _positions(differs, 1)
        return WrongTensor(name, self.length, error, self.bound, steps, rows)

    def first_wrong_lag(self) -> int | None:
        """Return the smallest lag at which the gradient of the last step alone is wrong."""
        lags = []
        for name in self.names:
            tensor = self._compare(f"gradient of {name}", self.gradients[1][name], self.expected[1][name])
            if tensor is not None and tensor.steps:
                lags.append(self.length - 1 - tensor.steps[-1])
        return min(lags, default=None)

    def cause(self) -> str:
        """Return the first known mistake that gives the function's gradients, or ""."""
        forward = [name for name, actual, expected in self.results if self._compare(name, actual, expected)]
        if forward:
            return f"the forward pass is wrong ({', '.join(forward)}); its gradient cannot be judged"
        for text, mistaken in self._mistakes():
            if all(self._agree(g, e) for g, e in zip(self.gradients, mistaken, strict=True)):
                return text
        return self._cause_by_pattern()

    def _agree(self, gradients: Arrays, expected: Arrays) -> bool:
        return all(self._compare(f"gradient of {name}", gradients[name], expected[name]) is None for name in self.names)

    def _mistakes(self) -> Iterator[tuple[str, list[Arrays]]]:
        """Yield known mistakes, each with the gradients that it gives under both cotangents."""
        reference, cell = self.reference, self.reference.cell
        options: list[tuple[str, Mapping[str, Any]]] = [
            ("the adjoint lacks the complex conjugate", {"conjugate": False}),
            ("the adjoint reads a_t in place of a_{t+1}", {"shift": 1}),
            ("the adjoint reads a_{t+2} in place of a_{t+1}", {"shift": -1}),
            ("the factors of A_t are applied in the wrong order", {"order": True}),
        ]
        options += [
            (f"the gradient is truncated at borders of {border} steps", {"border": border})
            for border in (2, 4, 8, 16, 32, 64, 128, 256)
            if border < self.length
        ]
        options += [
            ("the gradient of the read uses S_{t-1} in place of S_t", {"states": reference.previous}),
            ("the gradient of the decay uses S_t in place of S_{t-1}", {"previous": reference.states}),
        ]
        options += [(f"the path through {_PARTS.get(part, part)} is missing", {"zero": part}) for part in cell.parts]
        for text, mistake in options:
            yield text, [reference.gradients(y, s, **dict(mistake)) for y, s in self.cotangents]
        without_last = [reference.gradients(y, np.zeros_like(s)) for y, s in self.cotangents]
        yield "the gradient of the last state is missing", without_last

    def _cause_by_pattern(self) -> str:
        """Name the mistake by how each wrong gradient is related to the right one."""
        causes = []
        for name in self.names:
            actual, expected = self.gradients[0][name], self.expected[0][name]
            text = f"gradient of {name}"
            if self._compare(text, actual, expected) is None:
                continue
            actual = np.zeros_like(expected) if actual is None else actual
            square = float(np.vdot(expected, expected).real)
            ratio = float(np.vdot(expected, actual).real) / (square or 1.0)
            rows = [i for i in range(len(expected)) if self._compare(text, actual[i : i + 1], expected[i : i + 1])]
            if not np.isfinite(actual).all():
                causes.append(f"the {text} is not finite")
            elif not actual.any():
                causes.append(f"the {text} is missing")
            elif self._compare(text, actual, ratio * expected) is None:
                causes.append(f"the {text} has the factor {ratio:.4g}")
            elif name not in self.shared and self._compare(text, actual, np.flip(expected, 1)) is None:
                causes.append(f"the {text} is reversed in time")
            elif self._compare(text, actual, np.conj(expected)) is None:
                causes.append(f"the {text} is the complex conjugate")
            elif name in self.shared and name != "initial" and self._one_sample(name, actual):
                causes.append(f"the {text} is not summed over samples")
            elif name not in self.shared and 0 < len(rows) < len(expected):
                causes.append(f"the {text} is right in {len(expected) - len(rows)} of {len(expected)} samples")
        return "; ".join(causes)

    def _one_sample(self, name: str, actual: Any) -> bool:
        """Return whether a shared argument's gradient is that of one sample, or their mean."""
        total, (y, s) = self.expected[0][name], self.cotangents[0]
        for sample in range(len(y)):
            mask = (np.arange(len(y)) == sample).reshape(-1, *(1,) * (y.ndim - 1))
            state_mask = mask.reshape(-1, *(1,) * (s.ndim - 1))
            part = self.reference.gradients(y * mask, s * state_mask)[name]
            if self._compare(f"gradient of {name}", actual, part) is None:
                return True
        return self._compare(f"gradient of {name}", actual, total / len(y)) is None


def _call(function: Any, run: Runner, inputs: Arrays, dtype: str) -> tuple[Any, Any, Pulled]:
    """Return outputs, last state (or None), and a function from their cotangents to gradients by name."""
    tensors = [run.tensor(value, dtype) for value in inputs.values()]
    with raised_by("Your function"):
        results, differentiate = run.differentiate(lambda *arguments: _results(function(*arguments)), tensors)
    values = [run.array(result) for result in results]

    def pull(output_grad: Any, last_grad: Any) -> Arrays:
        cotangents = [output_grad, last_grad][: len(results)]
        with raised_by("The backward pass of your function"):
            grads = differentiate(cotangents)
        return {name: None if grad is None else run.array(grad) for name, grad in zip(inputs, grads, strict=True)}

    return values[0], values[1] if len(values) > 1 else None, pull


def _results(value: Any) -> list[Any]:
    results = [part for part in value if part is not None] if isinstance(value, (tuple, list)) else [value]
    if len(results) not in (1, 2) or not all(hasattr(result, "shape") for result in results):
        raise InputError(
            "The function returns something else than tensors.",
            got=type(value).__name__,
            expected="the outputs, or the outputs and the last state",
        )
    return results


def _positions(differs: Any, axis: int) -> tuple[int, ...]:
    """Return the positions of an axis at which anything differs."""
    other_axes = tuple(i for i in range(differs.ndim) if i != axis)
    return tuple(map(int, np.flatnonzero(differs.any(other_axes))))


Pulled = Callable[[Any, Any], Arrays]

#: Parts of a cell in the words of messages.
_PARTS = {
    "decay_0": "the decay",
    "decay_1": "the second factor of the decay",
    "write_0": "the first factor of the write",
    "write_1": "the second factor of the write",
    "read": "the read",
    "left": "the left vector of the rank-one part",
    "right": "the right vector of the rank-one part",
}
