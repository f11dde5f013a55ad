"""Alerts during training: false alarms on healthy trainings, misses on trainings that are broken on purpose.

    python benchmarks/alerts.py --small

Healthy: LSTM, GRU and tanh RNN on three tasks with Adam or SGD, sizes and learning rates drawn by the seed. Broken, at
a step drawn by the seed: the recurrent kernel made larger (exploding), made small (vanishing), the biases of the gates
pushed away (saturated); training goes on after that. The peer is the same data with a fixed threshold.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import numpy as np
import torch
from torch import nn

import rnnlens as rl
from rnnlens.tracking.alerts import Alert, Alerts
from rnnlens.tracking.records import TrainingRecord, summary

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Net(nn.Module):
    def __init__(self, cell: str, units: int) -> None:
        super().__init__()
        self.rnn, self.head = CELLS[cell](2, units, batch_first=True), nn.Linear(units, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def batch(task: str, rng: np.random.Generator, samples: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two marked numbers; recall the first; smooth the past (a task of short memory)."""
    x = rng.uniform(size=(samples, steps, 2))
    if task == "adding":
        x[:, :, 1] = 0
        for row in x:
            row[rng.choice(steps, 2, replace=False), 1] = 1
        y = (x[:, :, 0] * x[:, :, 1]).sum(1)
    else:
        weights = np.eye(steps)[0] if task == "recall" else 0.7 ** np.arange(steps)[::-1]
        y = x[:, :, 0] @ weights
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y[:, None], dtype=torch.float32)


def broken(net: Net, how: str, rng: np.random.Generator) -> None:
    """Break a net as it is known to happen."""
    cell, units = net.rnn, net.rnn.hidden_size
    with torch.no_grad():
        if how == "exploding":
            cell.weight_hh_l0.mul_(6.0)
            net.head.weight.mul_(10.0)
        elif how == "vanishing":
            cell.weight_hh_l0.mul_(0.02)
            if isinstance(cell, nn.LSTM):
                cell.bias_hh_l0[units : 2 * units] -= 6.0
            if isinstance(cell, nn.GRU):
                cell.bias_hh_l0[units : 2 * units] -= 6.0
        elif not isinstance(cell, nn.RNN):
            cell.bias_hh_l0[: 2 * units] += torch.tensor(rng.choice([-9.0, 9.0]), dtype=torch.float32)


def training(seed: int, records: int, every: int, how: str = "") -> tuple[list[TrainingRecord], int]:
    """One training, as its records; the step at which it was broken."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    cell = str(rng.choice(["lstm", "gru", "rnn"] if how != "saturated" else ["lstm", "gru"]))
    task = str(rng.choice(["adding", "recall", "smooth"]))
    units, steps = int(rng.integers(8, 25)), int(rng.integers(15, 41))
    net = Net(cell, units)
    rate = 10 ** rng.uniform(-3, -2)
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=rate)
        if rng.random() < 0.7
        else torch.optim.SGD(net.parameters(), lr=10 * rate)
    )
    probe, found = batch(task, rng, 16, steps), []
    at = int(rng.integers(records // 2, records - 5)) if how else records
    for i in range(records):
        if i == at:
            broken(net, how, rng)
        with rl.options(certify="never"):
            scalars, _ = summary(rl.trace(net, *probe, loss=nn.functional.mse_loss))
        found.append(TrainingRecord(i * every, 0, "probe", scalars))
        for _ in range(every):
            x, y = batch(task, rng, 32, steps)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return found, at * every


def watched(records: list[TrainingRecord]) -> list[Alert]:
    """What is found in the records of one training."""
    alerts = Alerts()
    for record in records:
        alerts.examine(record)
    return alerts.raised_alerts


def healthy(first: int, seeds: int, records: int, every: int) -> None:
    """False alarms."""
    found = {seed: watched(training(seed, records, every)[0]) for seed in range(first, first + seeds)}
    false = [(seed, alert.sentence) for seed, alerts in found.items() for alert in alerts]
    print(f"healthy: {len({seed for seed, _ in false})} of {seeds} trainings alarmed, {seeds * records} records")
    for seed, sentence in false:
        print(f"    {seed}: {sentence}")


def faults(how: str, first: int, seeds: int, records: int, every: int) -> None:
    """Of trainings that were broken, how many were found, and how soon."""
    late = []
    for seed in range(first + 1000, first + 1000 + seeds):
        made, at = training(seed, records, every, how)
        steps = [alert.step for alert in watched(made) if alert.finding == how and alert.step >= at]
        late += [(min(steps) - at) // every] if steps else []
    print(f"{how}: found in {len(late)} of {seeds}, first {np.median(late) if late else np.nan:.0f} records after")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="the first seed: rules were settled on 0, and on 1000")
    parser.add_argument("--records", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rnnlens").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    seeds, records = (3, 30) if args.small else (args.seeds, args.records)
    healthy(args.first, seeds, records, args.every)
    for how in ("exploding", "vanishing", "saturated"):
        faults(how, args.first, seeds, records, args.every)


if __name__ == "__main__":
    main()
