"""The user's own model, run plainly, and whether numbers of it can be relied on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, PlainRun
from ..autodiff.tensors import like
from ..errors import CertificateError
from ..results.certificate import Certificate
from ..results.checks import epsilon, residual
from ..results.schema import plain

T = TypeVar("T")

#: What is waited for: the plain run, or why there is none.
Attempt = Callable[[], tuple[PlainRun | None, str]]


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


def steadied(failed: Certificate, adapter: Adapter, model: Any, batch: Batch, first: PlainRun) -> Certificate:
    """A certificate that failed, unless the plain run itself gives other numbers each time: then that is said."""
    again = _apart(adapter, model, batch, first)
    if again > 1e-6:
        return _could_not(failed, "the model, run plainly twice, does not give the same numbers")
    if batch.training and _apart(adapter, model, replace(batch, seed=(batch.seed or 0) + 1), first) > 1e-6:
        why = "the model draws random numbers in training mode, and drew others when it was looked into"
        return _could_not(failed, why)
    unit = epsilon(adapter.provenance(model).get("dtype"))
    moved = _apart(adapter, model, replace(batch, x=data.map_leaves(lambda leaf: _off(leaf, unit), batch.x)), first)
    if all(check.ok or check.residual <= check.bound * moved / unit for check in failed.checks):
        why = f"the model is chaotic: of data that are off by one rounding it makes outputs that are off by {moved:.1g}"
        return _could_not(failed, why)
    return failed


def _could_not(failed: Certificate, why: str) -> Certificate:
    return Certificate("could not", failed.against, why=why)


def _apart(adapter: Adapter, model: Any, batch: Batch, first: PlainRun) -> float:
    """How far outputs and loss of another plain run are from those of the first, relatively; 0 if there is none."""
    again, _ = attempt(lambda: adapter.plain(model, batch, gradients=False))
    if again is None:
        return 0.0
    pairs = zip((*again.outputs, again.loss or 0.0), (*first.outputs, first.loss or 0.0), strict=True)
    return max(residual(np.asarray(plain(a), dtype=float), np.asarray(plain(b), dtype=float)) for a, b in pairs)


def _off(leaf: Any, unit: float) -> Any:
    """Numbers that are off by one rounding, up or down; whole numbers and packed sequences stay."""
    if data.is_packed(leaf) or plain(leaf).dtype.kind != "f":
        return leaf
    values = plain(leaf)
    signs = 2.0 * np.random.default_rng(0).integers(0, 2, size=values.shape) - 1.0
    return like(values * (1.0 + unit * signs), leaf)
