"""The mean of a time Jacobian over the samples of a data set, in the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import InputError, UnsupportedError, message
from ...results.array import ResultArray, record
from ...results.checks import Check
from .request import Options


def refuse_without_mean(options: Options) -> None:
    """Refuse what cannot be had batch by batch.

    Raises
    ------
    InputError
        If samples would be kept.
    UnsupportedError
        If the answers to batches do not make up that of the data set.
    """
    if options.across is None:
        expected = 'across="mean"; or one batch, whose samples are kept'
        raise InputError(message("The time Jacobian of a data set keeps no samples.", expected=expected))
    for name in ("sketch", "rtol", "out"):
        if getattr(options, name) is not None:
            what = f"{name}= is for one batch: its errors, or its file, are those of a batch."
            raise UnsupportedError(message(what, got=f"{name}= and a data set", expected="one batch"))


def mean_over(jacobians: Iterable[tuple[ResultArray, int]]) -> ResultArray:
    """The mean of means over so many samples each; checks are the worst of all batches.

    Raises
    ------
    InputError
        If batches differ in length.
    """
    first: ResultArray | None = None
    total, samples, checks = np.zeros(()), 0, dict[tuple[str, str], Check]()
    for found, count in jacobians:
        first = found if first is None else first
        if found.shape != first.shape:
            got, hint = f"{found.sizes} after {first.sizes}", "pad all batches to one length"
            raise InputError(message("Batches differ in length, so they have no mean.", got=got, hint=hint))
        total, samples = total + found.values.astype(np.float64) * count, samples + count
        for check in found.checks:
            known = checks.setdefault((check.name, check.layer), check)
            if check.residual / check.bound > known.residual / known.bound:
                checks[check.name, check.layer] = check
    assert first is not None
    mean = first.copy(data=(total / samples).astype(first.dtype))
    compared = {(check.name, check.layer) for check in first.certificate.checks}
    own = [check for key, check in checks.items() if key not in compared]
    mean.attrs |= record(own, first.certificate) | {"samples": samples}
    return ResultArray(mean)
