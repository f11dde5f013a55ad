"""The product of verbs: after any other verbs, a verb must return what it returns on a fresh copy of the model.

It holds for every framework: a test gives a factory of fresh copies, data, a loss and the name of a recurrent layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, Literal

import numpy as np
import xarray as xr

import rnnlens as rl


@dataclass
class Calls:
    """All verbs on fresh copies of one model.

    ``copy_model`` returns a fresh copy; ``x`` and ``y`` are one batch; ``loss`` is None where the model has its own;
    ``layer`` is a recurrent layer, ``left_out`` the verbs that this model refuses.
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
    certify: Literal["always", "auto", "first"] = "always"

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
            }.items()
            if name not in self.left_out
        }

    def pairs(self) -> list[tuple[str, ...]]:
        """Return all sequences of two verbs."""
        return list(product(self.verbs, repeat=2))

    def drawn(self, count: int, length: int = 2, seed: int = 0) -> list[tuple[str, ...]]:
        """Return ``count`` sequences of ``length`` verbs, drawn at random."""
        random, names = Random(seed), list(self.verbs)
        return [tuple(random.choice(names) for _ in range(length)) for _ in range(count)]

    def check(self, sequences: Iterable[tuple[str, ...]]) -> None:
        """Call each sequence of verbs on a fresh copy; the last result must be that of a call on another fresh copy."""
        alone: dict[str, dict[str, Any]] = {}
        differences = []
        with rl.options(certify=self.certify):
            for *earlier, last in sequences:
                if last not in alone:
                    alone[last] = facts(self.verbs[last](self.copy_model()))
                model = self.copy_model()
                for name in earlier:
                    self.verbs[name](model)
                difference = self._difference(alone[last], facts(self.verbs[last](model)))
                if difference:
                    differences.append(f"{last} after {', '.join(earlier)}: {difference}")
        assert not differences, "\n".join(differences)

    def _difference(self, expected: dict[str, Any], actual: dict[str, Any]) -> str:
        if expected.keys() != actual.keys():
            return f"{sorted(actual)} for {sorted(expected)}"
        for name, value in expected.items():
            other = actual[name]
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fc":
                is_same = np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other
                if not is_same:
                    return f"{name} is {other!r}, not {value!r}"
            elif value.shape != other.shape or not np.allclose(
                value, other, rtol=0, atol=self.rounding * max(1, np.abs(value).max(initial=0)), equal_nan=True
            ):
                return f"{name} has other numbers"
        return ""


def facts(result: Any) -> dict[str, Any]:
    """Return numbers, names of axes and labels of a result by name, and its certificate but for its residuals."""
    if result is None or isinstance(result, float | int | str):
        return {"value": result}
    datasets: dict[str, Any] = {}
    if isinstance(result, xr.DataArray):
        datasets = {"": result.to_dataset(name="value", promote_attrs=False)}
    elif hasattr(result, "dataset"):
        datasets = {layer: result.dataset(layer) for layer in result}
    found = {"text": ""} if datasets else {"text": str(result)}
    for layer, dataset in datasets.items():
        for name, variable in dataset.variables.items():
            found[f"{layer}/{name}"] = np.asarray(variable.values)
            found[f"{layer}/{name} axes"] = tuple(map(str, variable.dims))
    certificate = getattr(result, "certificate", None)
    if certificate is not None:
        names = (certificate.certified, certificate.resting, certificate.uncertified)
        compared = sorted({(check.name, check.layer) for check in certificate.checks})
        found["certificate"] = (certificate.state, certificate.against, *names, certificate.why, compared)
    return found
