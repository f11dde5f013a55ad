"""Run every benchmark of this folder in turn, each in its own process.

    python benchmarks/run_all.py [--small]

``--small`` runs each benchmark at its toy size: to see that it works, not how fast.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run all, also after one has failed; return the number of failures."""
    failed = []
    for script in sorted(HERE.glob("*.py")):
        if script.name.startswith(("_", "fuzz_", "count_", "hostile_", "speed")) or script == Path(__file__):
            continue
        print(f"\n{'=' * 20} {script.name} {'=' * 20}", flush=True)
        if subprocess.run([sys.executable, script, *sys.argv[1:]], check=False).returncode:
            failed.append(script.name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
