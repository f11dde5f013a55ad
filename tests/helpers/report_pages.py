"""A small network, and a report read back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

HOSTILE = "<script>document.title='taken'</script>"


class Classifier(nn.Module):
    """An LSTM of two layers that is read at its last step."""

    def __init__(self, units=6, **options):
        super().__init__()
        self.rnn = nn.LSTM(3, units, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(units * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@dataclass
class Page:
    """A report: its path, its text, and the numbers in it."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.S)[1])

    def figure(self, id: str) -> dict[str, Any]:
        return next(figure for figure in self.data["figures"] if figure["id"] == id)
