"""Size of ``rl.report`` files, and the time until a browser shows and updates them.

Reports of the digits of the demo in 64 steps, and of an LSTM of two layers of 256 units on 64 samples of 500 steps,
also with a baseline. The bars: 2 MB, and 1 second in Chromium. Each report is opened from the disk five times in a
fresh page. "Opens": median time until the first figures are drawn. "Answers": median time from a click on "hardest"
until every figure in the window is drawn anew.

    python benchmarks/report.py [--small]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _summary import Row, collect
from torch import nn

import rnnlens as rl

MEGABYTE = 1e6
#: Largest number of seconds for writing the report of the 2 x 256-unit model.
REPORT_BAR = 20.0


class Network(nn.Module):
    """LSTM layers with a readout of the last step."""

    def __init__(self, features: int, units: int, layers: int, classes: int):
        super().__init__()
        self.lstm = nn.LSTM(features, units, num_layers=layers, batch_first=True)
        self.head = nn.Linear(units, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def digits_model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a network after two epochs on the digits, and held-out digits (x, y)."""
    from sklearn.datasets import load_digits

    pixels, names = load_digits(return_X_y=True)
    x = torch.tensor(((pixels - pixels.mean()) / pixels.std()).astype("float32")[:, :, None])
    y, model = torch.tensor(names), Network(1, 64, 1, 10)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(2):
        for start in range(0, 1400, 64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + 64]), y[start : start + 64]).backward()
            optimizer.step()
    return model, x[1437:], y[1437:]


def large_model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return an untrained network of two 256-unit layers, and noise (64, 500, 8), which does not compress well."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(64, 500, 8)).astype("float32"))
    return Network(8, 256, 2, 4), x, torch.tensor(rng.integers(0, 4, 64))


def load_times(path: Path) -> tuple[float, float]:
    """Return the seconds until the first figures are drawn, and from a click to the last figure in the window."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return float("nan"), float("nan")
    open_times, answer_times = [], []
    with sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(5):
            page = chromium.new_context(offline=True, viewport={"width": 1280, "height": 900}).new_page()
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector(".plot svg:not(.static)", state="attached")
            open_times.append(time.perf_counter() - start)
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            page.locator("#track-0-gradient").scroll_into_view_if_needed()
            page.wait_for_selector("#track-0-hidden .plot svg:not(.static)")
            page.evaluate("document.querySelectorAll('.plot > svg').forEach(svg => svg.classList.add('old'))")
            start = time.perf_counter()
            page.evaluate("document.querySelector('.pick-hardest').click()")
            page.wait_for_selector("#track-0-hidden .plot svg:not(.old)")
            answer_times.append(time.perf_counter() - start)
        chromium.close()
    return statistics.median(open_times), statistics.median(answer_times)


def main() -> int:
    """Print the table; return 1 if a bar is missed."""
    torch.manual_seed(0)
    print(f"{'network':34}{'size':>9}{'opens in':>12}{'answers in':>12}{'written in':>12}")
    bars_hold = True
    networks: tuple[Any, ...] = (
        ("digits, LSTM of 64", digits_model, {"baseline": "init"}),
        # These networks are untrained: a diagnosis would find nothing.
        ("2 x 256, 64 x 500", large_model, {"diagnosis": False}),
        ("2 x 256, 64 x 500, with baseline", large_model, {"diagnosis": False, "jacobian": False, "baseline": "init"}),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, make, options in networks[: 1 if "--small" in sys.argv else None]:
            model, x, y = make()
            start = time.perf_counter()
            path = rl.report(model, x, y, f"{folder}/report.html", loss=nn.functional.cross_entropy, **options)
            write_seconds, size = time.perf_counter() - start, path.stat().st_size / MEGABYTE
            open_seconds, answer_seconds = load_times(path)
            print(
                f"{name:34}{size:6.2f} MB{open_seconds:10.2f} s{answer_seconds:10.2f} s{write_seconds:10.1f} s",
                flush=True,
            )
            collect(
                Row(
                    "Report",
                    f"rl.report, {name}",
                    write_seconds,
                    "s",
                    bar=REPORT_BAR if name.startswith("2 x") else None,
                )
            )
            bars_hold = bars_hold and size <= 2 and not open_seconds > 1 and not answer_seconds > 1
    return 0 if bars_hold else 1


if __name__ == "__main__":
    sys.exit(main())
