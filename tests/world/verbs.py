"""Every verb on one program, in two orders, compared with the truth.

python tests/world/verbs.py PACKAGE NAME      one JSON object a line: verb, result, detail
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from order_of_calls import facts  # noqa: E402
from programs import NamedProgram, Program, load_programs  # noqa: E402
from truth import Truth, close, matching, sizes, snapshot, truth_of, with_flat_ends  # noqa: E402

import rnnlens as rl  # noqa: E402

#: Results of a row of the table, the best first; a program's row of a verb is the worst of both orders.
RESULTS = ("right", "refused, the hint worked", "refused", "foreign error", "wrong", "changed")
#: Calls of a verb until its hints count as not working.
MOST_HINTS = 4


class MismatchError(Exception):
    """A result that is not the truth."""


class NumberedAxesError(Exception):
    """A result that has numbers in place of names of axes, with what it says to type."""


def bound_of(program: Program) -> float:
    """Return the relative difference that rounding explains; in float32 many steps of both computations round."""
    return 1e-9 if program.x.dtype == torch.float64 or not program.x.is_floating_point() else 2e-3


# -- one function per verb: it calls the verb and raises MismatchError where a number is not the truth --


def layers(program: Program, truth: Truth, **_: Any) -> Any:
    without_data = rl.layers(program.model).names
    names, traced = rl.layers(program.model, program.inputs).names, tuple(rl.trace(program.model, program.inputs))
    if names != traced:
        raise MismatchError(f"rl.layers(model, x) has {names}, a trace has {traced}")
    return [without_data, names]


def trace(program: Program, truth: Truth, **options: Any) -> Any:
    result = rl.trace(program.model, program.inputs, program.y, loss=program.loss, **options)
    for name, layer in result.items():
        calls = truth.calls.get(name) or truth.calls.get(name.split("/")[0].split("#")[0])
        if calls is not None:
            _compare_layer(name, layer, calls, bound_of(program))
    _no_failed_certificate(result)
    return result


def _compare_layer(name: str, layer: Any, calls: Any, bound: float) -> None:
    """Compare the tensors of a traced layer that its module takes or returns, and their gradients."""
    dataset = layer.dataset if hasattr(layer, "dataset") else layer
    variables = {str(key): np.asarray(value.values) for key, value in dataset.items()}
    pairs = [("input", "input_grad")]
    pairs += [("hidden", "hidden_grad"), ("cell", "cell_grad")] if calls.is_loop else [("output", "output_grad")]
    for value, gradient in pairs:
        if value not in variables or gradient not in variables:
            continue
        found = matching(calls.values, variables[value], bound)
        if found and not any(
            close(variables[gradient], calls.gradients[at].transpose(order), bound)
            for at, order in _all_matching(calls.values, variables[value], bound)
        ):
            raise MismatchError(f"{name}.{gradient} is not autograd's")


def _all_matching(values: list[np.ndarray], wanted: np.ndarray, bound: float) -> list[tuple[int, tuple[int, ...]]]:
    """Return every array that ``wanted`` is: a module may return one value as several tensors."""
    found = [(at, matching([value], wanted, bound)) for at, value in enumerate(values)]
    return [(at, match[1]) for at, match in found if match]


def gradients(program: Program, truth: Truth, **options: Any) -> Any:
    by_weights = rl.gradients(program.model, program.inputs, program.y, loss=program.loss, **options)
    arrays = [np.asarray(variable) for dataset in by_weights.values() for variable in dataset.values()]
    _compare_sizes("gradients of weights", sizes(arrays), truth.weight_gradients, bound_of(program))
    _no_failed_certificate(by_weights)
    if not program.x.is_floating_point():
        return by_weights
    by_input = rl.gradients(program.model, program.inputs, program.y, loss=program.loss, wrt=program.wrt, **options)
    order = [list(by_input.dims).index(axis) for axis in program.input_axes if axis in by_input.dims]
    if len(order) != by_input.ndim and any(str(axis).startswith("axis_") for axis in by_input.dims):
        raise NumberedAxesError(f"axes {by_input.dims}: {by_input.attrs.get('flagged')}")
    if len(order) != by_input.ndim:
        raise MismatchError(f"axes of the input's gradient are {by_input.dims}, not {tuple(program.input_axes)}")
    if not close(by_input.values.transpose(order), truth.input_gradient, bound_of(program)):
        raise MismatchError("gradient of the input is not autograd's")
    return by_input


def _compare_sizes(what: str, actual: np.ndarray, expected: np.ndarray, bound: float) -> None:
    length = max(len(actual), len(expected))
    padded = [np.pad(values, (0, length - len(values))) for values in (actual, expected)]
    if not close(*padded, bound):
        raise MismatchError(f"{what} are not autograd's")


def jacobian(program: Program, truth: Truth, **options: Any) -> Any:
    if not program.x.is_floating_point():
        return rl.jacobian(program.model, program.inputs, of=program.of, wrt=program.wrt, measure="norm", **options)
    result = rl.jacobian(program.model, program.inputs, of=program.of, wrt=program.wrt, **options)
    names = ["sample", *truth.jacobian_axes]
    for end, prefix in (("out_unit", "out_"), ("in_feature", "in_")):  # units of images have places as coordinates
        places = [f"{prefix}{axis}" for axis in ("channel", "height", "width")]
        if set(places) <= set(result.coords):
            result = result.set_index({end: places}).unstack(end)
            result = result.rename(in_channel="in_feature") if end == "in_feature" else result
    expected = truth.jacobian
    if set(result.dims) != set(names):
        names, expected = with_flat_ends(names, expected)
    if set(result.dims) != set(names):
        raise MismatchError(f"axes of the Jacobian are {result.dims}, not {tuple(names)}")
    if not close(result.transpose(*names).values, expected, bound_of(program)):
        raise MismatchError("Jacobian is not autograd's")
    return result


def weights(program: Program, truth: Truth, **_: Any) -> Any:  # its result has no axis of the inputs
    result = rl.weights(program.model, program.inputs, program.y, loss=program.loss)
    arrays = [
        np.asarray(variable)
        for name in result
        for key, variable in result.dataset(name).items()
        if str(key).endswith("_grad")
    ]
    _compare_sizes("gradients of weights", sizes(arrays), truth.weight_gradients, bound_of(program))
    return result


def find_nonfinite(program: Program, truth: Truth, **options: Any) -> Any:
    finite = rl.find_nonfinite(program.model, program.inputs, program.y, loss=program.loss, **options)
    if "none" not in repr(finite).split("\n")[0]:
        raise MismatchError(f"a finite model: {finite!r}")
    if not program.x.is_floating_point():
        return repr(finite)
    damaged = program.x.clone()
    place = tuple(size // 2 for size in damaged.shape)
    damaged[place] = float("nan")
    report = repr(rl.find_nonfinite(program.model, program.given(damaged), program.y, loss=program.loss, **options))
    step, sample = (place[list(program.input_axes).index(axis)] for axis in ("time", "sample"))
    has_names = not any(axis.startswith("axis_") for axis in program.input_axes)
    if has_names and f"sample {sample}: {program.wrt}, axis_" in report:
        raise NumberedAxesError(report)
    if f"step {step} of sample {sample}" not in report:
        raise MismatchError(f"NaN in step {step} of sample {sample}: {report}")
    return report


def diagnose(program: Program, truth: Truth, **options: Any) -> Any:
    return rl.diagnose(program.model, program.inputs, program.y, loss=program.loss, **options)


def report(program: Program, truth: Truth, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        parts = {"loss": program.loss, "diagnosis": False, "jacobian": False}  # verbs of their own
        rl.report(program.model, program.inputs, program.y, path, **parts, **options)
        if "</html>" not in path.read_text():
            raise MismatchError("the page is not whole")


def _no_failed_certificate(result: Any) -> None:
    if result.certificate is not None and result.certificate.state == "failed":
        failed = [str(check) for check in result.certificate.checks if not check.ok]
        raise MismatchError(f"the certificate failed: {failed[0] if failed else result.certificate.why}")


VERBS: dict[str, Callable[..., Any]] = {
    verb.__name__: verb for verb in (layers, trace, gradients, jacobian, weights, find_nonfinite, diagnose, report)
}


def rows_of(named: NamedProgram) -> list[dict[str, str]]:
    """Return a row of the table for each verb: the worst of what the two orders gave."""
    truth, bound = truth_of(named.build()), bound_of(named.build())
    forward = _run(named, list(VERBS), truth)
    backward = _run(named, list(reversed(VERBS)), truth)
    rows = []
    for verb in VERBS:
        result, detail = max(forward[verb][:2], backward[verb][:2], key=lambda row: RESULTS.index(row[0]))
        difference = _difference(forward[verb][2], backward[verb][2], bound)
        if result == "right" and difference:
            result, detail = "wrong", f"another order, another answer: {difference}"
        rows.append({"package": named.package, "model": named.name, "verb": verb, "result": result, "detail": detail})
    return rows


def _run(named: NamedProgram, order: list[str], truth: Truth) -> dict[str, tuple[str, str, Any]]:
    """Call verbs in one order on one copy of a program; return the result, its detail and the facts for each."""
    program = named.build()
    outcomes = {}
    for verb in order:
        before = snapshot(program)
        outcomes[verb] = _outcome(partial(VERBS[verb], program, truth), program)
        after = snapshot(program)
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if changed:
            outcomes[verb] = "changed", ", ".join(changed[:4]), None
            program = named.build()
    return outcomes


def _outcome(call: Callable[..., Any], program: Program) -> tuple[str, str, Any]:
    """Call a verb, and again as often as an error says what to type; return the result, its detail and the facts."""
    options = {"axes": program.axes} if program.axes else {}
    hints: list[str] = []
    with ExitStack() as followed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(MOST_HINTS):
            try:
                result = call(**options)
            except MismatchError as error:
                return "wrong", str(error), None
            except (rl.errors.RnnlensError, NumberedAxesError) as error:
                if isinstance(error, rl.errors.UserCodeError):
                    return "foreign error", _one_line(error), None
                typed = _typed(str(error), options)
                if typed is None:
                    typed = _prepared(str(error), program, options, followed, hints)
                if typed is None:
                    return "refused", _one_line(error), None
                hints.append(_one_line(error))
                options = typed
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                return "foreign error", f"{_one_line(error)} ({Path(where.filename).name}:{where.lineno})", None
            else:
                return RESULTS[1] if hints else RESULTS[0], " then ".join(hints), _facts(result)
    return "refused", " then ".join(hints), None


def _prepared(
    text: str, program: Program, options: dict[str, Any], followed: ExitStack, hints: list[str]
) -> dict[str, Any] | None:
    """Do what a message's hint says, by the program's ``hints``; None where it has none, or did that before."""
    for part, prepare in program.hints.items():
        if part in text and not any(part in hint for hint in hints):
            return options | followed.enter_context(prepare())
    return None


def _typed(text: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options with ``axes=`` as the message says to type it; None where it says nothing else."""
    for found in re.finditer(r"axes=(\{)", text):
        for end in range(found.start(1), len(text)):
            if text[end] == "}":
                axes = _literal(text[found.start(1) : end + 1])
                if axes and (options.get("axes") or {}) != axes:
                    return options | {"axes": axes}
    return None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' | '.join(str(error).split(chr(10)))}"


def _facts(result: Any) -> dict[str, Any]:
    if hasattr(result, "findings"):
        return {"findings": [str(finding.code) for finding in result.findings]}
    return facts(result) if not isinstance(result, list) else {"value": result}


def _difference(one: dict[str, Any] | None, other: dict[str, Any] | None, bound: float) -> str:
    """Return the name of a fact in which two orders differ, but for certificates, which may rest on earlier ones."""
    if one is None or other is None:
        return ""
    for name in one.keys() | other.keys():
        if name in ("certificate", "text"):
            continue
        first, second = one.get(name), other.get(name)
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.dtype.kind in "fc":
            if not np.array_equal(np.isnan(first), np.isnan(second)):
                return name
            if not close(np.nan_to_num(first), np.nan_to_num(second), bound):
                return name
        elif not (np.array_equal(first, second) if isinstance(first, np.ndarray) else first == second):
            return name
    return ""


def main() -> None:
    """Print the rows of the program that the command line names."""
    package, name = sys.argv[1:]
    torch.set_num_threads(1)
    named = next(p for p in load_programs() if (p.package, p.name) == (package, name))
    for row in rows_of(named):
        print("ROW", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
