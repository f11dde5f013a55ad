"""Which past does a Mamba use to recall a symbol, and which does an LSTM use?

    "I train both on delayed recall. Do they keep the symbol in the same way, and does a frozen-gate picture of Mamba
    show it as it is?"

A symbol is shown at the first step, then come random distractors, and at the last step the network has to name the
symbol. A tiny Mamba of Hugging Face (built from its configuration, nothing is downloaded) and a tiny LSTM learn it. The
figure has, for both, the norm of the derivative of the answer by the embedding of each step; for Mamba both maps: the
total derivative, and the one with the coefficients of its scan held constant.

    python examples/g_memory_of_mamba_and_lstm.py            # some seconds: they have learned little
    python examples/g_memory_of_mamba_and_lstm.py --full     # until they recall; less than two minutes
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from _options import options, save
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

import rnnlens as rl

SYMBOLS, STEPS = 8, 10


class Recall(nn.Module):
    """An LSTM between an embedding and a head, as large as the Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(2 * SYMBOLS, 16), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2 * SYMBOLS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (sample, time, symbol)."""
        return self.head(self.lstm(self.embedding(ids))[0])


def batch(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a symbol, then distractors from the other half of the vocabulary."""
    ids = torch.randint(SYMBOLS, 2 * SYMBOLS, (samples, STEPS), generator=generator)
    ids[:, 0] = torch.randint(0, SYMBOLS, (samples,), generator=generator)
    return ids, ids[:, 0]


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last step."""
    outputs = model(ids)
    return (outputs if isinstance(outputs, torch.Tensor) else outputs.logits)[:, -1]


def train(model: nn.Module, steps: int) -> float:
    """Train on fresh batches; return the accuracy on a held-out one."""
    optimizer, generator = torch.optim.Adam(model.parameters(), 1e-2), torch.Generator().manual_seed(1)
    model.train()
    for _ in range(steps):
        ids, symbol = batch(64, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits(model, ids), symbol).backward()
        optimizer.step()
    model.eval()
    ids, symbol = batch(256, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((logits(model, ids).argmax(1) == symbol).float().mean())


args = options(__doc__)
torch.manual_seed(0)
config = MambaConfig(vocab_size=2 * SYMBOLS, hidden_size=16, state_size=8, num_hidden_layers=1, use_cache=False)
models = {"Mamba": (MambaForCausalLM(config), "backbone.embeddings"), "LSTM": (Recall(), "embedding")}
ids, _ = batch(4, torch.Generator().manual_seed(3))
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, (model, embedding) in models.items():
    accuracy = train(model, 700 if args.full else 20)
    spec = {"of": "output", "wrt": f"{embedding}.output", "measure": "norm", "at": {"out_time": [-1]}, "across": "mean"}
    maps = {"total": rl.jacobian(model, ids, **spec)}
    if name == "Mamba":
        maps["coefficients held"] = rl.jacobian(model, ids, frozen=True, **spec)
    for kind, J in maps.items():
        axes.semilogy(np.arange(STEPS), J.values[0], "--" if kind != "total" else "-", label=f"{name}, {kind}")
    share = float(maps["total"].values[0, 0] / maps["total"].values[0].sum())
    text = f"{name}: recalls {accuracy:.0%}; the symbol's step has {share:.0%} of the answer's sensitivity to the past"
    if name == "Mamba":
        layer = rl.trace(model, ids, layers="backbone.layers.0.mixer")["backbone.layers.0.mixer"]
        half = rl.measures.decay_half_life(layer.decay)
        ratio = float(maps["coefficients held"].values[0, 0] / maps["total"].values[0, 0])
        text += (
            f"; half of its states decay within {np.median(half):.1f} steps, and the frozen map shows {ratio:.2f} of it"
        )
    print(f"{text}.")
axes.set(xlabel="step of the input", ylabel="|d answer / d embedding|")
axes.legend()
save(axes, args.out / "g_memory.png")
