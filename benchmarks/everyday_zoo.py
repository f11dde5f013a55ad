"""Findings of ``rl.diagnose`` on everyday bugs: networks with each bug, and healthy networks; one table.

    python benchmarks/everyday_zoo.py [--small] [--networks 40] [--healthy 400] [--paths 300] [--only BUG] [--first 0]
    python benchmarks/everyday_zoo.py --watched                  findings of recorded trainings instead

Thresholds were set on odd seeds; the table counts even ones. A network without a bug is each network with another one,
and each healthy one. NO_PATH is counted on drawn models that cut the gradient in many ways, by torch's own gradient at
the missed step; PATH_OPEN may not be said there where that gradient is 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import drawn_paths
import everyday_bugs
from everyday_bugs import BUGS, MSE, draw

import rnnlens as rl

#: Findings that accuse a network of a bug.
ACCUSATIONS = {*BUGS, "NO_PATH"}
PATHS = ("NO_PATH", "VANISHING", "PATH_OPEN")
#: Findings of a recorded training, and the steps of the training.
OF_A_RUN, STEPS = ("UPDATES_TOO_SMALL", "UPDATES_TOO_LARGE", "WEIGHTS_WITHOUT_GRADIENT", "FROZEN"), 60


def codes(bug: str, seed: int) -> set[str]:
    """Diagnose a network that is drawn from a seed; return the codes of its findings."""
    case = draw(bug, seed)
    return set(rl.diagnose(case.model, case.x, case.y, loss=case.loss, optimizer=case.optimizer).codes)


def codes_of_run(bug: str, seed: int) -> set[str]:
    """Train a network that is drawn from a seed in a watch; return the codes of the findings on the run."""
    plain_train, found = everyday_bugs.train, set()

    def watched_train(model, x, y, loss, iterations, optimizer):  # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.zarr"
            every = 1 + seed // 4 % 5
            # A probe in half of the runs, and where no gradient reaches the layer: its batches are not recorded.
            has_probe = seed // 2 % 2 or bug in ("FROZEN", "WEIGHTS_WITHOUT_GRADIENT")
            probe = {"probe": (x[:32], y[:32]), "loss": loss} if has_probe else {}
            with rl.torch.watch(model, path, every=every, **probe):
                plain_train(model, x, y, loss, max(iterations, STEPS), optimizer)
            found.update(finding.code for finding in rl.open(path).findings)
        return model.eval()

    with mock.patch.object(everyday_bugs, "train", watched_train):
        draw(bug, seed)
    return found


@dataclass
class Count:
    """How often a finding is said of networks that have the fault, and of others."""

    hits: int = 0
    faulty: int = 0
    false: int = 0
    sound: int = 0

    def add(self, *, has_fault: bool, is_said: bool) -> None:
        """Count one network."""
        if has_fault:
            self.faulty, self.hits = self.faulty + 1, self.hits + is_said
        else:
            self.sound, self.false = self.sound + 1, self.false + is_said

    @property
    def row(self) -> str:
        """The cells of a table: found, false alarms, balanced accuracy."""
        accuracy = (self.hits / self.faulty + 1 - self.false / self.sound) / 2 if self.faulty and self.sound else np.nan
        return f"{self.hits:>4} of {self.faulty:<4} {self.false:>4} of {self.sound:<5} {accuracy:.3f}"


def count_everyday(options: argparse.Namespace) -> dict[str, Count]:
    """Count the findings of everyday bugs on networks of even seeds, and print the healthy ones that are accused."""
    counts = {bug: Count() for bug in (OF_A_RUN if options.watched else BUGS) if options.only in (None, bug)}
    networks = [(bug, seed) for bug in counts for seed in range(options.first, options.first + options.networks)]
    networks += [("", seed) for seed in range(options.first, options.first + options.healthy)]
    accused = {}
    for bug, seed in networks:
        if seed % 2 != options.odd:
            continue
        said = codes_of_run(bug, seed) if options.watched else codes(bug, seed)
        for other, count in counts.items():
            count.add(has_fault=bug == other, is_said=other in said)
        if not bug and ACCUSATIONS & said:
            accused[seed] = sorted(ACCUSATIONS & said)
    print(f"healthy: {len(accused)} of {len(range(0, options.healthy, 2))} accused {accused or ''}", flush=True)
    return counts


def count_paths(options: argparse.Namespace) -> Count:
    """Count NO_PATH on drawn models where a step is missed, and print where PATH_OPEN is said without a gradient."""
    count, said, wrong = Count(), dict.fromkeys(PATHS, 0), []
    for seed in range(options.first, options.first + options.paths):
        model, x, y, _ = drawn_paths.draw(seed)
        for finding in rl.diagnose(model, x, y, loss=MSE, samples=192).findings:
            if finding.code not in PATHS:
                continue
            said[finding.code] += 1
            size = drawn_paths.gradient_size(model, x, drawn_paths.STEPS - 1 - finding.evidence["lag"])
            count.add(has_fault=size == 0, is_said=finding.code == "NO_PATH")
            if finding.code == "PATH_OPEN" and size == 0:
                wrong.append(seed)
    print(f"paths: {options.paths} models, {said}; PATH_OPEN without a gradient: {wrong or 'none'}", flush=True)
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a toy size: to see that it works")
    parser.add_argument("--networks", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=400)
    parser.add_argument("--paths", type=int, default=300)
    parser.add_argument("--only")
    parser.add_argument("--watched", action="store_true", help="trainings that a watch records")
    parser.add_argument("--odd", action="store_true", help="the seeds by which thresholds are set")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.networks, arguments.healthy, arguments.paths = 2, 4, 4
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = count_everyday(arguments)
    if arguments.only is None and not arguments.watched:
        table["NO_PATH"] = count_paths(arguments)
    print(f"\n{'finding':32} {'found':>12} {'false alarms':>14} balanced accuracy")
    for code, counted in table.items():
        print(f"{code:32} {counted.row}")
