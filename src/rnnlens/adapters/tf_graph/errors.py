"""What TensorFlow says of a run that failed, said as rnnlens says things."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow.compat.v1 as tf

from ...errors import InputError, UserCodeError, message
from .public import Net

_UNFED = re.compile(r"You must feed a value for placeholder tensor '([^']+)'")

#: Lines of an error of TensorFlow that say where, not what.
_NOISE = ("Graph execution error", "Detected at node", "node ", "Node: ", "File ", "(0)", "(1)", "Errors may have")


@contextmanager
def said_clearly(net: Net) -> Iterator[None]:
    """Within the block, errors of a run become ours.

    Raises
    ------
    InputError
        If a placeholder is not fed.
    UserCodeError
        If the user's graph fails on this batch.
    """
    try:
        yield
    except tf.errors.OpError as error:
        unfed = _UNFED.search(error.message or "")
        if unfed:
            known = [tensor.op.name for alike in net.targets for tensor in alike]
            hint = f"of rl.tf1.graph: feed={{{unfed[1]!r}: ...}}, or targets={unfed[1]!r} if it is what y is fed to"
            hint = "y, which is fed to targets=" if unfed[1] in known else hint
            raise InputError(
                message(f"The placeholder {unfed[1]!r} is not fed.", expected="a value in every run", hint=hint)
            ) from error
        said = [line.strip() for line in (error.message or "").splitlines() if line.strip()]
        told = [line for line in said if not line.startswith(_NOISE)]
        first = next(iter(told or said), type(error).__name__)
        raise UserCodeError(
            message("The graph failed on this batch.", got=f"{type(error).__name__}: {first}")
        ) from error
