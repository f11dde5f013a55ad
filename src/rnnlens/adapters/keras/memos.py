"""What was compiled for a model, by question: used again as it is, or only where a new trace is the same.

A run that depends on nothing outside has a stamp, and what was compiled under that stamp serves it again. Any other run
is traced at every call, and shares no more than the executables of equal traces.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from ...autodiff import Memo
from ...settings import current
from .dialect import Dialect

_memos: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Memo]] = weakref.WeakKeyDictionary()


def memo_of(model: Any, question: Hashable, stamp: Hashable | None) -> Memo:
    """The memo of one question about ``model``; of an open run, ``stamp`` None, a new one with the old executables."""
    kept = _memos.setdefault(model, OrderedDict())
    memo = kept.setdefault((question, stamp), Memo())
    kept.move_to_end((question, stamp))
    while len(kept) > current().compiled:
        kept.popitem(last=False)
    return memo if stamp is not None else Memo(memo.executables)


def stamp_of_tensors(keras: Dialect, tree: Any) -> Hashable:
    """Structure, shapes and dtypes, and where JAX has them lie."""
    paths = keras.tree.flatten_with_path(tree)
    return tuple(
        (path, None if t is None else (tuple(t.shape), str(t.dtype), getattr(t, "sharding", None))) for path, t in paths
    )


def forget(model: Any, memo: Memo) -> None:
    """Drop a memo that was left half made."""
    kept = _memos.get(model, OrderedDict())
    for key in [key for key, one in kept.items() if one is memo]:
        del kept[key]
