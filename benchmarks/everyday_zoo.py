"""Findings of ``rl.diagnose`` on everyday bugs: networks with each bug, and healthy networks.

    python benchmarks/everyday_zoo.py [--networks 40] [--healthy 400] [--paths 300] [--only BUG] [--first SEED]

Thresholds were set on odd seeds; the table counts even ones. ``--paths`` draws models that cut the gradient in many
ways, and compares NO_PATH, VANISHING and PATH_OPEN with torch's own gradient.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import drawn_paths
from everyday_bugs import BUGS, MSE, draw

import rnnlens as rl

#: Findings that accuse a network of a bug.
ACCUSATIONS = {*BUGS, "NO_PATH"}
PATHS = ("NO_PATH", "VANISHING", "PATH_OPEN")


def codes(bug: str, seed: int) -> set[str]:
    """Diagnose a network that is drawn from a seed; return the codes of its findings."""
    case = draw(bug, seed)
    return set(rl.diagnose(case.model, case.x, case.y, loss=case.loss, samples=192).codes)


def check_bugs(options: argparse.Namespace) -> None:
    """Print, for each bug, how many even seeds with it and without it have its finding."""
    seeds = range(options.first, options.first + options.networks)
    found: dict[str, list[set[str]]] = {bug: [] for bug in BUGS if options.only in (None, bug)}
    for bug, results in found.items():
        results += [codes(bug, seed) for seed in seeds if seed % 2 == 0]
        hits = sum(bug in result for result in results)
        others = sum(bool(ACCUSATIONS & result - {bug}) for result in results)
        print(f"{bug:32} found in {hits} of {len(results)}, another bug named in {others}", flush=True)


def check_healthy(options: argparse.Namespace) -> None:
    """Print the healthy networks of even seeds that are accused of a bug."""
    seeds = [seed for seed in range(options.first, options.first + options.healthy) if seed % 2 == 0]
    accused = {seed: sorted(ACCUSATIONS & codes("", seed)) for seed in seeds}
    named = {seed: found for seed, found in accused.items() if found}
    print(f"healthy: {len(named)} of {len(seeds)} accused {named or ''}", flush=True)


def check_paths(options: argparse.Namespace) -> None:
    """Print how often a finding on the path says what torch's gradient says, on drawn models."""
    counts = dict.fromkeys(PATHS, 0)
    wrong = []
    for seed in range(options.first, options.first + options.paths):
        model, x, y, _ = drawn_paths.draw(seed)
        for finding in rl.diagnose(model, x, y, loss=MSE, samples=192).findings:
            if finding.code not in PATHS:
                continue
            counts[finding.code] += 1
            size = drawn_paths.gradient_size(model, x, drawn_paths.STEPS - 1 - finding.evidence["lag"])
            if (finding.code == "PATH_OPEN" and size == 0) or (finding.code == "NO_PATH" and size > 0):
                wrong.append(seed)
    print(f"paths: {options.paths} models, {counts}, wrong: {wrong}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=400)
    parser.add_argument("--paths", type=int, default=300)
    parser.add_argument("--only")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    check_bugs(arguments)
    if arguments.only is None:
        check_healthy(arguments)
        check_paths(arguments)
