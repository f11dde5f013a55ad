"""Time of ``import rnnlens``, against importing NumPy and xarray, which every result needs.

Each import runs in a fresh process, which measures the time itself, so that starting Python does not count. Also
measured: the import with the public functions loaded, as the first call of any of them does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PEER = "import numpy, xarray"
BAR = 2.0
CASES = {
    "import rnnlens": "import rnnlens",
    "and rl.trace, rl.open, rl.options": "import rnnlens as rl; rl.trace, rl.open, rl.options",
}


def seconds(code: str) -> float:
    """Return the seconds of one import in its own process."""
    script = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(completed.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="five rounds instead of fifteen")
    rounds = 5 if parser.parse_args().small else 15
    codes = {PEER: PEER, **CASES}
    for code in codes.values():
        seconds(code)  # compiles missing bytecode
    times = {label: [] for label in codes}
    for _ in range(rounds):
        for label, code in codes.items():
            times[label].append(seconds(code))
    medians = {label: statistics.median(values) for label, values in times.items()}
    print(f"{'':36}{'median':>10}{'ratio':>8}   bar (medians of {rounds}, fresh processes, interleaved)")
    print(f"{PEER:36}{medians[PEER]:9.3f}s{1:8.2f}")
    for label in CASES:
        ratio = medians[label] / medians[PEER]
        print(f"{label:36}{medians[label]:9.3f}s{ratio:8.2f}   <= {BAR:g}: {'met' if ratio <= BAR else 'MISSED'}")


if __name__ == "__main__":
    main()
