"""Alerts during training: false alarms on healthy trainings, and misses on trainings with a planted fault.

    python benchmarks/alerts.py --small

Healthy: LSTM, GRU and tanh RNN on three tasks with Adam or SGD, sizes and learning rates drawn by the seed. Faults, at
a step drawn by the seed: the recurrent kernel is enlarged (exploding) or made small (vanishing), or the gates' biases
are shifted (saturated); training continues after that.
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


def draw_batch(task: str, rng: np.random.Generator, samples: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch (x, y): the sum of two marked numbers, the first number, or an exponentially weighted sum."""
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


def break_net(net: Net, fault: str, rng: np.random.Generator) -> None:
    """Plant a fault: enlarge or shrink the recurrent weights, or saturate the gates."""
    cell, units = net.rnn, net.rnn.hidden_size
    with torch.no_grad():
        if fault == "exploding":
            cell.weight_hh_l0.mul_(6.0)
            net.head.weight.mul_(10.0)
        elif fault == "vanishing":
            cell.weight_hh_l0.mul_(0.02)
            if isinstance(cell, nn.LSTM):
                cell.bias_hh_l0[units : 2 * units] -= 6.0
            if isinstance(cell, nn.GRU):
                cell.bias_hh_l0[units : 2 * units] -= 6.0
        elif not isinstance(cell, nn.RNN):
            cell.bias_hh_l0[: 2 * units] += torch.tensor(rng.choice([-9.0, 9.0]), dtype=torch.float32)


def record_training(seed: int, records: int, interval: int, fault: str = "") -> tuple[list[TrainingRecord], int]:
    """Return the records of one training and the step at which the fault was planted."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    cell = str(rng.choice(["lstm", "gru", "rnn"] if fault != "saturated" else ["lstm", "gru"]))
    task = str(rng.choice(["adding", "recall", "smooth"]))
    units, steps = int(rng.integers(8, 25)), int(rng.integers(15, 41))
    net = Net(cell, units)
    rate = 10 ** rng.uniform(-3, -2)
    optimizer = (
        torch.optim.Adam(net.parameters(), lr=rate)
        if rng.random() < 0.7
        else torch.optim.SGD(net.parameters(), lr=10 * rate)
    )
    probe, trace_records = draw_batch(task, rng, 16, steps), []
    broken_at = int(rng.integers(records // 2, records - 5)) if fault else records
    for i in range(records):
        if i == broken_at:
            break_net(net, fault, rng)
        with rl.options(certify="never"):
            scalars, _ = summary(rl.trace(net, *probe, loss=nn.functional.mse_loss))
        trace_records.append(TrainingRecord(i * interval, 0, "probe", scalars))
        for _ in range(interval):
            x, y = draw_batch(task, rng, 32, steps)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return trace_records, broken_at * interval


def raised_alerts(records: list[TrainingRecord]) -> list[Alert]:
    """Return the alerts raised by the records of one training."""
    alerts = Alerts()
    for record in records:
        alerts.examine(record)
    return alerts.raised_alerts


def report_false_alarms(first: int, seeds: int, records: int, interval: int) -> None:
    """Print how many healthy trainings raised alerts."""
    alerts_by_seed = {
        seed: raised_alerts(record_training(seed, records, interval)[0]) for seed in range(first, first + seeds)
    }
    false_alarms = [(seed, alert.sentence) for seed, alerts in alerts_by_seed.items() for alert in alerts]
    print(f"healthy: {len({seed for seed, _ in false_alarms})} of {seeds} trainings alarmed, {seeds * records} records")
    for seed, sentence in false_alarms:
        print(f"    {seed}: {sentence}")


def report_detection(fault: str, first: int, seeds: int, records: int, interval: int) -> None:
    """Print in how many faulty trainings the fault was found, and how soon."""
    delays = []
    for seed in range(first + 1000, first + 1000 + seeds):
        run_records, broken_at = record_training(seed, records, interval, fault)
        steps = [
            alert.step for alert in raised_alerts(run_records) if alert.finding == fault and alert.step >= broken_at
        ]
        delays += [(min(steps) - broken_at) // interval] if steps else []
    print(
        f"{fault}: found in {len(delays)} of {seeds}, first {np.median(delays) if delays else np.nan:.0f} records after"
    )


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
    report_false_alarms(args.first, seeds, records, args.every)
    for fault in ("exploding", "vanishing", "saturated"):
        report_detection(fault, args.first, seeds, records, args.every)


if __name__ == "__main__":
    main()
