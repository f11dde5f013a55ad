"""The user's own model, run plainly, and whether numbers of it can be relied on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, ReferenceRun
from ..autodiff.tensors import like
from ..errors import CertificateError
from ..recurrence.rounding import one_rounding
from ..results.certificate import Certificate
from ..results.checks import epsilon, residual
from ..results.schema import to_host

T = TypeVar("T")

#: What is waited for: the plain run, or why there is none.
Attempt = Callable[[], tuple[ReferenceRun | None, str]]


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """A plain run, or why there is none: the user's model failed by itself, or would do something else."""
    try:
        return run(), ""
    except CertificateError as reason:
        return None, str(reason)
    except AttributeError as error:
        if error.name == "plain":
            return None, "the adapter of this framework cannot run a model plainly"
        return None, _raised(error)
    except Exception as error:
        return None, _raised(error)


def _raised(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"the model, run plainly, raised {type(error).__name__}: {first}"


def steadied(failed: Certificate, adapter: Adapter, model: Any, batch: Batch, first: ReferenceRun) -> Certificate:
    """A certificate that failed, unless the plain run itself gives other numbers each time: then that is said."""
    again = _difference(adapter, model, batch, first)
    if again > 1e-6:
        return _could_not(failed, "the model, run plainly twice, does not give the same numbers")
    if batch.training and _difference(adapter, model, replace(batch, seed=(batch.seed or 0) + 1), first) > 1e-6:
        why = "the model draws random numbers in training mode, and drew others when it was looked into"
        return _could_not(failed, why)
    unit = epsilon(adapter.provenance(model).get("dtype"))
    moved = _difference(
        adapter, model, replace(batch, x=data.map_leaves(lambda leaf: _perturbed(leaf, unit), batch.x)), first
    )
    if all(check.ok or check.residual <= check.bound * moved / unit for check in failed.checks):
        why = f"the model is chaotic: of data that are off by one rounding it makes outputs that are off by {moved:.1g}"
        return _could_not(failed, why)
    return failed


def _could_not(failed: Certificate, why: str) -> Certificate:
    return Certificate("could not", failed.against, why=why)


def _difference(adapter: Adapter, model: Any, batch: Batch, first: ReferenceRun) -> float:
    """How far outputs and loss of another plain run are from those of the first, relatively; 0 where one has none."""
    again, _ = attempt(lambda: adapter.reference_run(model, batch, gradients=False))
    if again is None:
        return 0.0
    pairs = list(zip(again.outputs, first.outputs, strict=True))
    if again.loss is not None and first.loss is not None:
        pairs.append((again.loss, first.loss))
    both = ((np.asarray(to_host(a), dtype=float), np.asarray(to_host(b), dtype=float)) for a, b in pairs)
    return max((residual(a, b) for a, b in both), default=0.0)


def _perturbed(leaf: Any, unit: float) -> Any:
    """Numbers that are off by one rounding, up or down; whole numbers and packed sequences stay."""
    if data.is_packed(leaf) or to_host(leaf).dtype.kind != "f":
        return leaf
    values: Any = to_host(leaf)
    return like(one_rounding(np, unit)(values), leaf)
