"""Shared parts of the fuzz scripts: comparison of numbers, and counts of the outcomes of checks."""

from __future__ import annotations

import argparse
import collections
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import rnnlens as rl

KINDS = ("right", "no check", "refused", "accused", "wrong", "foreign", "altered")
BAD = ("accused", "wrong", "foreign", "altered")


class WrongError(Exception):
    """Raised when a number of rnnlens differs from the framework's."""


def assert_close(label: str, actual: Any, expected: Any, bound: float) -> None:
    """Compare two arrays, relative to the reference's largest absolute value."""
    a, b = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    if a.shape != b.shape:
        raise WrongError(f"{label}: shape {a.shape}, framework {b.shape}")
    mismatch = np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-12)
    if not mismatch < bound:
        raise WrongError(f"{label}: off by {mismatch:.1e}")


def sum_of_squares(result: Any) -> float:
    """Return the sum of squares of all weight gradients."""
    return sum(float((np.asarray(array) ** 2).sum()) for layer in result for array in result[layer].dataset.values())


def run_check(check: Callable[[], Any], weights: Callable[[], Mapping[str, Any]]) -> tuple[str, str]:
    """Run one check; return its outcome and a sentence. ``weights`` returns the state of the user's model.

    A check returns a certificate, or None if it does not apply to the model: "no check".
    """
    before = {name: np.array(value) for name, value in weights().items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            certificate = check()
    except WrongError as error:
        return "wrong", str(error)
    except rl.errors.RnnlensError as error:
        return "refused", str(error).replace("\n", " ")[:200]
    except Exception as error:
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{last_frame.filename.rsplit('/', 2)[-1]}:{last_frame.lineno}"
        return "foreign", f"{type(error).__name__}: {str(error)[:120]} ({location})"
    if any(not np.array_equal(value, np.asarray(weights()[name])) for name, value in before.items()):
        return "altered", "weights or buffers changed"
    if certificate is None:
        return "no check", ""
    if certificate.state == "failed":
        return "accused", str(certificate)[:150]
    return "right", certificate.state


class Table:
    """Counts of outcomes by check, printed model by model and at the end."""

    def __init__(self, checks: Mapping[str, Any], show_all: bool) -> None:
        self._counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in checks}
        self._show_all = show_all

    def add(self, number: int, name: str, outcome: str, sentence: str, choices: Mapping[str, Any]) -> None:
        """Count one outcome, and print it if it is not right."""
        self._counts[name][outcome] += 1
        if outcome not in ("right", "no check") or self._show_all:
            notable_choices = {key: value for key, value in choices.items() if value not in (False, "none")}
            print(f"{number} {name} {outcome.upper()}: {sentence}\n      {notable_choices}", flush=True)

    def finish(self) -> int:
        """Print the table; return 1 if anything was accused, wrong, foreign or altered."""
        print(f"\n{'':12}" + "".join(f"{kind:>10}" for kind in KINDS))
        for name, counts in self._counts.items():
            print(f"{name:12}" + "".join(f"{counts[kind]:>10}" for kind in KINDS))
        return int(any(counts[kind] for counts in self._counts.values() for kind in BAD))


def make_parser(document: str, count: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments common to all fuzz scripts."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="draw no further model after that time")
    parser.add_argument("--only", type=int, help="the number of one model, with its choices")
    return parser


def model_numbers(arguments: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of the models to draw until the time is over; print their count."""
    if arguments.only is not None:
        yield arguments.only
        return
    deadline, count = time.monotonic() + arguments.seconds, 0
    for number in range(arguments.count):
        if time.monotonic() > deadline:
            break
        yield number
        count += 1
    print(f"{count} models")
