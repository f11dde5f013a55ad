"""Small networks for reports, and a report read back from its file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

HOSTILE = "<script>document.title='taken'</script>"


class Classifier(nn.Module):
    """A two-layer LSTM with a readout of its last step."""

    def __init__(self, units=6, **options):
        super().__init__()
        self.rnn = nn.LSTM(3, units, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(units * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


#: Tokens at which ``Sentences`` updates its state.
KEY_WORDS = (1, 2)


class Sentences(nn.Module):
    """A GRU of one unit that keeps its state at every token (update gate 0.9997) except at two key words (0.5).

    dh_T/dx_t is about 1e-3 of its peak at all other tokens, by construction. Token 0 is padding; ``masked`` packs it.
    """

    def __init__(self, masked=True):
        super().__init__()
        self.masked = masked
        self.embedding, self.gru, self.head = nn.Embedding(12, 2), nn.GRU(2, 1, batch_first=True), nn.Linear(1, 1)
        with torch.no_grad():
            for weight in self.gru.parameters():
                weight.zero_()
            self.embedding.weight[:, 0] = 0.3 * torch.randn(12, generator=torch.Generator().manual_seed(0))
            self.embedding.weight[:, 1] = -1.0
            self.embedding.weight[list(KEY_WORDS)] = torch.tensor([[0.9, 1.0], [-0.7, 1.0]])
            self.gru.weight_ih_l0[1, 1], self.gru.bias_ih_l0[1] = -4.0, 4.0  # the update gate
            self.gru.weight_ih_l0[2, 0] = 1.0  # the candidate
            self.head.weight.fill_(1.0)
            self.head.bias.zero_()

    def forward(self, x):
        embedded = self.embedding(x)
        if not self.masked:
            return self.head(self.gru(embedded)[0][:, -1])
        lengths = (x != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


def sentences(count=24, steps=20):
    """Return padded tokens (sample, time) with one of each key word per sentence, and the key words' steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, 12, (count, steps), generator=generator)
    key_word_steps = []
    for row, length in zip(x, torch.randint(6, steps - 2, (count,), generator=generator), strict=True):
        first, second = torch.randperm(int(length), generator=generator)[:2].tolist()
        row[first], row[second] = KEY_WORDS
        row[length:] = 0
        key_word_steps.append({first, second})
    return x, key_word_steps


@dataclass
class Page:
    """A report file with its text and its numbers."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.S)[1])

    def figure(self, id: str) -> dict[str, Any]:
        return next(figure for figure in self.data["figures"] if figure["id"] == id)
