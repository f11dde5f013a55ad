"""The product of verbs: after any other verbs, a verb must return what it returns on a fresh copy of the model.

It holds for every framework: a test gives a factory of fresh copies, data, a loss and the name of a recurrent layer.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, product
from random import Random
from typing import Any, Literal

import numpy as np
import xarray as xr

import rnnlens as rl

Certify = Literal["always", "auto", "first"]
#: Attributes that measure a call, with rounding, and those that :func:`facts` reads by themselves.
UNCOMPARED = ("certificate", "record", "replay_residual")


@dataclass
class Calls:
    """All verbs on fresh copies of one model.

    ``copy_model`` returns a fresh copy; ``x`` and ``y`` are one batch; ``loss`` is None where the model has its own;
    ``layer`` is a recurrent layer, ``left_out`` names verbs that are not called.
    """

    copy_model: Callable[[], Any]
    x: Any
    y: Any
    loss: Any
    layer: str
    left_out: tuple[str, ...] = ()
    #: Largest difference of two numbers, as a share of the largest one.
    rounding: float = 1e-10
    #: Option of the calls; with "auto" a Jacobian whose like has passed repeats its certificate.
    certify: Certify = "always"

    def __post_init__(self) -> None:
        self._fresh: dict[str, dict[str, Any]] = {}

    @property
    def verbs(self) -> dict[str, Callable[[Any], Any]]:
        """Functions of a model by the name of the verb and its main argument."""
        x, y, state = self.x, self.y, f"{self.layer}.hidden"
        loss = {} if self.loss is None else {"loss": self.loss}
        return {
            name: verb
            for name, verb in {
                "trace": lambda m: rl.trace(m, x, y, **loss),
                "gradients by input": lambda m: rl.gradients(m, x, y, **loss, wrt="input"),
                "gradients by output": lambda m: rl.gradients(m, x, y, **loss, wrt="output"),
                "gradients by weights": lambda m: rl.gradients(m, x, y, **loss),
                "gradients by states": lambda m: rl.gradients(m, x, y, **loss, wrt=state),
                "gradients of the output": lambda m: rl.gradients(m, x, of="output", reduce="sum", wrt="input"),
                "gradients of samples": lambda m: rl.gradients(m, x, y, **loss, wrt="input", per_sample=True),
                "gradients in batches": lambda m: rl.gradients(m, x, y, **loss, wrt="input", batch_size=2),
                "weights": lambda m: rl.weights(m, x, y, **loss),
                "jacobian": lambda m: rl.jacobian(m, x),
                "jacobian, measured": lambda m: rl.jacobian(m, x, measure="norm"),
                "jacobian of states": lambda m: rl.jacobian(m, x, of=state),
                "find_nonfinite": lambda m: rl.find_nonfinite(m, x, y, **loss),
                "diagnose": lambda m: rl.diagnose(m, x, y, **loss),
                "layers": lambda m: rl.layers(m, x),
                "fixed_points": lambda m: rl.fixed_points(m, x, most=4),
                "lyapunov": lambda m: rl.lyapunov(m, x),
                "step_eigenvalues": lambda m: rl.step_eigenvalues(m, x),
            }.items()
            if name not in self.left_out
        }

    def walks(self) -> list[tuple[str, ...]]:
        """Return walks in which each verb is the first one once, and each ordered pair of verbs stands side by side.

        They are the rows of a square balanced for carry-over effects (Williams 1949, Aust. J. Sci. Res. A 2, 149): row
        i has the verbs i, i + 1, i - 1, i + 2, ... modulo their even number, and here its first verb twice.
        """
        names = [*self.verbs, *[""] * (len(self.verbs) % 2)]
        steps = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(len(names))]
        rows = [[names[i], *(names[(i + step) % len(names)] for step in steps)] for i in range(len(names))]
        return [tuple(filter(None, row)) for row in rows]

    def drawn(self, count: int, length: int = 2, seed: int = 0) -> list[tuple[str, ...]]:
        """Return ``count`` sequences of ``length`` verbs, drawn at random."""
        random, names = Random(seed), list(self.verbs)
        return [tuple(random.choice(names) for _ in range(length)) for _ in range(count)]

    def check_each_after_each(self, certify: Certify) -> None:
        """Check each walk on a fresh copy; where a certificate may be repeated, all of them in turn on one copy."""
        calls, walks = replace(self, certify=certify), self.walks()
        calls.check(walks if certify == "always" else [tuple(chain(*walks))])

    def check(self, sequences: Iterable[tuple[str, ...]]) -> None:
        """Call each sequence of verbs on a fresh copy; each result must be that of a call on another fresh copy."""
        shortest: dict[str, str] = {}
        for sequence in sequences:
            model = self.copy_model()
            for count, name in enumerate(sequence):
                difference = self._difference(name, model)
                if difference and name not in shortest:
                    shortest[name] = self._shortest(sequence[:count], name) or f"{sequence[: count + 1]}: {difference}"
        assert not shortest, "\n".join(shortest.values())

    def _shortest(self, earlier: tuple[str, ...], last: str) -> str:
        """Describe the shortest of the sequences of one or two earlier verbs after which the last verb differs."""
        names = tuple(dict.fromkeys(earlier))
        for before in (*product(names), *product(names, repeat=2)):
            model = self.copy_model()
            for name in before:
                answer(self.verbs[name], model, self.certify)
            if difference := self._difference(last, model):
                return f"{last} after {', '.join(before)}: {difference}"
        return ""

    def _difference(self, name: str, model: Any) -> str:
        """Call a verb, and describe the first difference from its result on a fresh copy."""
        if name not in self._fresh:
            self._fresh[name] = answer(self.verbs[name], self.copy_model(), self.certify)
        expected, actual = self._fresh[name], answer(self.verbs[name], model, self.certify)
        if expected.keys() != actual.keys():
            return f"{sorted(actual.keys() - expected.keys())} for {sorted(expected.keys() - actual.keys())}"
        for part, value in expected.items():
            other = actual[part]
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fc":
                is_same = np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other
                if not is_same:
                    return f"{part} is {other!r}, not {value!r}"
            elif value.shape != other.shape or not np.allclose(
                value, other, rtol=0, atol=self.rounding * max(1, np.abs(value).max(initial=0)), equal_nan=True
            ):
                return f"{part} has other numbers"
        return ""


def answer(verb: Callable[[Any], Any], model: Any, certify: Certify) -> dict[str, Any]:
    """Call a verb; return all that it shows, its warnings too, or the text of its refusal."""
    with warnings.catch_warnings(record=True) as caught, rl.options(certify=certify):
        warnings.simplefilter("always", rl.errors.SelfCheckWarning)
        try:
            shown = facts(verb(model))
        except rl.errors.RnnlensError as error:
            shown = {"refusal": f"{type(error).__name__}: {error}"}
    return shown | {"warnings": sorted({str(warning.message) for warning in caught})}


def facts(result: Any) -> dict[str, Any]:
    """Return numbers, axes, labels, attributes and notes of a result by name, and its certificate but its residuals."""
    if result is None or isinstance(result, float | int | str):
        return {"value": result}
    datasets: dict[str, Any] = {}
    if isinstance(result, xr.DataArray):
        datasets = {"": result.to_dataset(name="value", promote_attrs=False)}
    elif isinstance(result, xr.Dataset):
        datasets = {"": result}
    elif hasattr(result, "dataset"):
        datasets = {layer: result.dataset(layer) for layer in result}
    found = {"text": ""} if datasets else {"text": str(result)}
    for layer, dataset in datasets.items():
        for name, variable in [("", dataset), *dataset.variables.items()]:
            found |= {f"{layer}/{name}.{key}": value for key, value in variable.attrs.items() if key not in UNCOMPARED}
        for name, variable in dataset.variables.items():
            found[f"{layer}/{name}"] = np.asarray(variable.values)
            found[f"{layer}/{name} axes"] = tuple(map(str, variable.dims))
    found["notes"] = list(getattr(result, "notes", ()))
    certificate = getattr(result, "certificate", None)
    if certificate is not None:
        names = (certificate.certified, certificate.resting, certificate.uncertified)
        compared = sorted({(check.name, check.layer) for check in certificate.checks})
        found["certificate"] = (certificate.state, certificate.against, *names, certificate.why, compared)
    return found
