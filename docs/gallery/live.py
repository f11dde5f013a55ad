"""Draw docs/live.gif: the live page of a training, a frame for every few records, in the Chromium of this machine.

    python docs/gallery/live.py

A GRU learns to say what it read 15 steps ago, while `watch.serve()` shows the run.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from torch import nn

import rnnlens as rl

PICTURE = Path(__file__).resolve().parents[1] / "live.gif"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STEPS, RECORDS, LAG = 480, 24, 16
#: Width of the window and of the picture in pixels, and milliseconds of a frame.
WINDOW, WIDTH, FRAME = (1120, 800), 800, 280
LARGEST = 1_000_000


class Recall(nn.Module):
    """GRU that names the number that it read first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (sample, 4) of x (sample, time, 4)."""
        return self.head(self.gru(x)[0][:, -1])


def sequences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random letters, one-hot, and the first letter of each sequence."""
    letters = torch.randint(0, 4, (count, LAG))
    return nn.functional.one_hot(letters, 4).float(), letters[:, 0]


def frames(folder: Path) -> list[Image.Image]:
    """Train, and return a picture of the live page after each record."""
    torch.manual_seed(1)
    model, taken = Recall(), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss = nn.functional.cross_entropy
    every = STEPS // RECORDS
    with (
        rl.torch.watch(model, folder / "run.zarr", probe=sequences(64), loss=loss, every=every) as watch,
        sync_playwright() as player,
    ):
        browser_path = next(filter(None, map(shutil.which, BROWSERS)))
        browser = player.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        width, height = WINDOW
        sheet = browser.new_page(viewport={"width": width, "height": height})
        server = watch.serve(port=0)
        sheet.goto(server.address)
        for step in range(1, STEPS + 1):
            x, y = sequences(64)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if step % every == 0:
                sheet.locator("#runs", has_text=f"step {step}, ").wait_for()
                sheet.wait_for_timeout(300)  # until the figures are drawn
                taken.append(Image.open(io.BytesIO(sheet.screenshot())))
        server.close()
        browser.close()
    return taken


def main() -> int:
    """Write the picture; return 1 if it is too large."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = frames(Path(folder))
    height = WINDOW[1] * WIDTH // WINDOW[0]
    small = [picture.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS) for picture in pictures]
    palette = small[-1].quantize(48, dither=Image.Dither.NONE)
    still = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in small]
    pauses = [FRAME] * (len(still) - 1) + [2500]
    still[0].save(PICTURE, save_all=True, append_images=still[1:], duration=pauses, loop=2, optimize=True)
    size = PICTURE.stat().st_size
    sys.stdout.write(f"{PICTURE.name}  {size / 1000:.0f} kB, {len(still)} frames\n")
    return int(size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
