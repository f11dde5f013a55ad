"""`make test-world`: install public packages, run every verb on their models, and print one table.

    python tests/world/run.py                    all programs of all packages that are installed
    python tests/world/run.py --install          install the packages of packages.txt first
    python tests/world/run.py snntorch norse     the programs of these packages
    python tests/world/run.py --write            keep the rows in table.json, which the page "Works with" is made from

It runs in an environment of its own (`.venv-world`). Each install and each program is a process of its own: one that
fails, hangs or crashes is a row of the table and ends nothing else. The exit code is 1 if a number is wrong, an error
is not of rnnlens, or anything of a user's model is changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]

from verbs import VERBS, load_programs  # noqa: E402

PACKAGES, TABLE = HERE / "packages.txt", HERE / "table.json"
#: Results that make the command fail, and those that count as good.
BROKEN = ("wrong", "foreign error", "changed", "crashed")
GOOD = ("right", "refused, the hint worked")
INSTALL_SECONDS, PROGRAM_SECONDS = 900, 600


def requirement_lines() -> list[list[str]]:
    """Return the lines of packages.txt: each is installed by one command; a comment says why something is left out."""
    lines = [line.split("#")[0].split() for line in PACKAGES.read_text().splitlines()]
    return [line for line in lines if line]


def install() -> None:
    """Install each line of packages.txt; one that fails is reported, and its programs have no rows."""
    uv = os.environ.get("UV", "uv")
    for line in requirement_lines():
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *line]
        if "--no-deps" not in line:
            command.append("torch==2.13.0")
        try:
            subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"not installed: {' '.join(line)}: {error}", flush=True)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def rows_of(package: str, name: str) -> list[dict[str, str]]:
    """Run one program in a process of its own and return its rows."""
    try:
        completed = subprocess.run(
            [sys.executable, str(HERE / "verbs.py"), package, name],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_crash(package, name, f"not finished after {PROGRAM_SECONDS} s")]
    rows = [json.loads(line[4:]) for line in completed.stdout.splitlines() if line.startswith("ROW ")]
    if rows:
        return rows
    return [_crash(package, name, (completed.stderr.strip().splitlines() or ["no output"])[-1])]


def _crash(package: str, name: str, detail: str) -> dict[str, str]:
    return {"package": package, "model": name, "verb": "all", "result": "crashed", "detail": detail}


def print_row(row: dict[str, str]) -> None:
    detail = re.sub(r"\s+", " ", row["detail"])
    print(
        f"{row['package']:22} {row['model']:34} {row['verb']:14} {row['result']:26} {detail[:240]}".rstrip(), flush=True
    )


def keep(rows: list[dict[str, str]]) -> None:
    """Replace the rows of these models in table.json, and drop those of programs that do not exist."""
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else []
    run = {(row["package"], row["model"]) for row in rows}
    kept = [row for row in kept if (row["package"], row["model"]) not in run]
    order = [(program.package, program.name) for program in load_programs()]
    table = [row for row in [*kept, *rows] if (row["package"], row["model"]) in order]
    table.sort(key=lambda row: order.index((row["package"], row["model"])))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="packages whose programs are run; all by default")
    parser.add_argument("--install", action="store_true", help="install the packages first")
    parser.add_argument("--write", action="store_true", help="keep the table in tests/world/table.json")
    arguments = parser.parse_args()
    if arguments.install:
        install()
    rows, absent = [], set()
    for program in load_programs():
        if arguments.packages and program.package not in arguments.packages:
            continue
        version = installed_version(program.package)
        if version is None:
            absent.add(program.package)
            continue
        of_program = [{**row, "version": version} for row in rows_of(program.package, program.name)]
        for row in of_program:
            print_row(row)
        rows += of_program
        if arguments.write:
            keep(of_program)
    counts = Counter(row["result"] for row in rows)
    good, broken = sum(counts[result] for result in GOOD), sum(counts[result] for result in BROKEN)
    packages = len({row["package"] for row in rows})
    models = len({(row["package"], row["model"]) for row in rows})
    print(f"\n{packages} packages, {models} models, {len(rows)} rows of {len(VERBS)} verbs: {dict(counts)}")
    print(f"right, or refused with a hint that worked: {good} of {len(rows)} ({good / max(1, len(rows)):.1%})")
    if absent:
        print(f"not installed, so not tested: {', '.join(sorted(absent))}")
    sys.exit(1 if broken or not rows else 0)


if __name__ == "__main__":
    main()
