"""One table of all speed figures: rnnlens, its peer, its bar, and whether it is met; under 20 minutes.

    python benchmarks/speed.py [--small] [--demo] [--write] [--only SCRIPT ...]

Runs the benchmarks that measure speed in turn and collects their figures. ``--demo`` also times ``make demo`` in a
fresh clone, installation included. ``--write`` puts the table into docs/performance.md, where rows of scripts that
``--only`` leaves out stay as they are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _summary import COLLECT, Row, collect, read_rows
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- begin: benchmarks/speed.py --write -->", "<!-- end -->"
DEMO_BAR = 100.0

#: Scripts in the order of the table, with their options besides ``--small``.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "trace_torch.py": ("--device", "cpu"),
    "trace_keras.py": (),
    "trace_graph.py": (),
    "small_calls.py": (),
    "jax_programs.py": (),
    "time_jacobian.py": ("--only", "small"),
    "overhead.py": (),
    "example_a.py": (),
    "streaming.py": (),
    "diagnosis_cost.py": ("--passes",),
    "report.py": (),
}


def time_demo() -> None:
    """Time ``make demo`` in a clone of the last commit, up to the opened report."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(HERE.parent), folder], check=True)
        start = time.perf_counter()
        subprocess.run(["make", "demo"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        collect(
            Row(
                "Demo",
                "make demo in a fresh clone, installation included",
                time.perf_counter() - start,
                "s",
                bar=DEMO_BAR,
            )
        )


def figure(value: float, unit: str) -> str:
    """Return a figure with its unit, with three digits."""
    return f"{value:.3g} {unit}"


def cells_of(row: Row) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    bar = "" if row.bar is None else f"{'≥' if row.at_least else '≤'} {figure(row.bar, row.unit)}"
    met = {None: "", True: "met", False: "**missed**"}[row.is_met]
    return row.group, row.call, figure(row.value, row.unit), row.peer, bar, met


HEADINGS = ("", "call", "measured", "beside", "bar", "")


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in cells_of(row)))
    Console(width=150).print(table)


def write(rows: list[Row]) -> None:
    """Write rows into the table between its two marks in docs/performance.md; rows that were not measured stay."""
    before, tail = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old_table, after = tail.split(END, 1)
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in old_table.strip().splitlines()[2:]]
    new_rows = {cells[:2]: cells for cells in map(cells_of, rows)}
    old_rows = [new_rows.pop((cells[0], cells[1]), tuple(cells)) for cells in lines]
    table = [HEADINGS, ("---",) * len(HEADINGS), *old_rows, *new_rows.values()]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Run the benchmarks and print the table; return how many failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--demo", action="store_true", help="also make demo in a fresh clone")
    parser.add_argument("--write", action="store_true", help="write the table into docs/performance.md")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="some of the scripts")
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        os.environ[COLLECT] = str(path)
        for script, options in ((script, SCRIPTS[script]) for script in args.only):
            print(f"\n{script}", flush=True)
            command = [sys.executable, str(HERE / script), *options, *(["--small"] if args.small else [])]
            before = len(read_rows(path))
            subprocess.run(command, check=False)
            failed += [script] if len(read_rows(path)) == before else []
        if args.demo:
            time_demo()
        rows = read_rows(path)
    show(rows)
    if args.write:
        write(rows)
    if failed:
        print(f"printed no figure: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
