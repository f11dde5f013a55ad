"""Count the outcomes of single flipped bits in a saved result, each in a new process, since some crash it.

python flips.py FORMAT COUNT SEED [unsealed]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import rnnlens as rl
from rnnlens.errors import RnnlensError
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

SAME, REFUSED, DIFFERENT, FOREIGN = 0, 10, 11, 12
NAMES = {SAME: "as saved", REFUSED: "refused", DIFFERENT: "silently different", FOREIGN: "an error not ours"}


def make_trace() -> Trace:
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(4, 20, 8)).astype("float32") for name in ("hidden", "cell", "hidden_grad")}
    arrays["gates"] = rng.normal(size=(4, 20, 4, 8)).astype("float16")
    info = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 8, "direction": "forward"}
    return Trace({"lstm": layer_dataset(arrays, info=info)}, loss=0.5, notes=["a note"])


def outcome(path: Path, expected: Any) -> int:
    try:
        result = rl.open(path)
    except RnnlensError:
        return REFUSED
    except Exception:
        return FOREIGN
    if not isinstance(expected, Trace):
        same = result.identical(expected)
    elif same := repr(result) == repr(expected) and result._meta() == expected._meta():
        same = all(result.dataset(name).identical(expected.dataset(name)) for name in expected)
    return SAME if same else DIFFERENT


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def outcome_of_flip(saved: Path, rng: random.Random, expected: Any) -> str:
    """Flip one bit of a copy, uniformly over the bits of all files, and return the outcome of opening it in a child."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / saved.name
        shutil.copytree(saved, copy) if saved.is_dir() else shutil.copy(saved, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size) or [copy]
        flip(rng.choices(files, [path.stat().st_size for path in files])[0], rng)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os._exit(outcome(copy, expected))
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "hung" if os.WTERMSIG(status) == signal.SIGALRM else "crashed the interpreter"
    return NAMES[os.WEXITSTATUS(status)]


def main(suffix: str, count: int, seed: int, *, unsealed: bool) -> Counter[str]:
    rng = random.Random(seed)
    expected: Any = make_trace()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / f"run{suffix}"
        if unsealed:  # as another program would write it
            expected = expected["lstm"].hidden
            expected.to_netcdf(saved) if suffix == ".nc" else expected.to_dataset().to_zarr(saved, zarr_format=2)
        else:
            expected.save(saved)
        return Counter(outcome_of_flip(saved, rng, expected) for _ in range(count))


if __name__ == "__main__":
    suffix, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(main(suffix, count, seed, unsealed="unsealed" in sys.argv)))
