"""Which of eight recurrent networks remembers, how, and what does it cost?

    "An LSTM, a GRU, an Elman network, an LRU, Mamba, Mamba-2, a delta rule and a loop over depth learn one task. How
    far back does each look, how much of its state does it use, and how stable is it?"

A symbol is shown at the first step, then come random distractors, and at the last step the network has to name the
symbol. One call measures all of them: `rl.compare(models, x, y, loss=..., scorecard=True)`. The whole-sequence layers
are tiny ones of Hugging Face, built from their configurations; nothing is downloaded.

    python examples/h_scorecard.py            # some seconds: they have learned little
    python examples/h_scorecard.py --full     # until they recall; about a minute
"""

import torch
import transformers as hf
from _options import options, save
from torch import nn
from torch.nn import functional

import rnnlens as rl

SYMBOLS, STEPS, WIDTH = 4, 12, 16


class Net(nn.Module):
    """An embedding, a recurrent layer and a head that reads its last step."""

    def __init__(self, layer: nn.Module, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * SYMBOLS, WIDTH) if embedding is None else embedding
        self.layer, self.head = layer, nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (sample, symbol)."""
        outputs = self.layer(self.embedding(ids))
        if not isinstance(outputs, torch.Tensor):
            outputs = outputs.last_hidden_state if hasattr(outputs, "last_hidden_state") else outputs[0]
        return self.head(outputs[:, -1])


class LRU(nn.Module):
    """A linear recurrent unit (arXiv:2303.06349): complex decays, written as a scan."""

    def __init__(self) -> None:
        super().__init__()
        radius = 0.9 + 0.1 * torch.rand(WIDTH)
        self.log_rate, self.angle = nn.Parameter(torch.log(-torch.log(radius))), nn.Parameter(0.3 * torch.rand(WIDTH))
        self.log_gain = nn.Parameter(torch.log(1 - radius**2) / 2)
        self.into = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (sample, time, unit)."""
        decay = torch.exp(torch.complex(-self.log_rate.exp(), self.angle))
        written = torch.complex(*self.into(x).chunk(2, dim=-1)) * self.log_gain.exp()
        states = rl.torch.scan(decay.expand_as(written), written, name="lru")
        return x + functional.gelu(self.out(torch.cat([states.real, states.imag], dim=-1)))


class Depth(nn.Module):
    """A block that is called on its own output: each position reads its neighbours and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the state (sample, position, unit) after as many loops as there are positions."""
        state = torch.zeros_like(x)
        for _ in range(STEPS):
            state = self.block(state, x)
        return state


class Block(nn.Module):
    """One loop."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the next state."""
        padded = functional.pad(state, (0, 0, 1, 1))
        return self.norm(state + torch.tanh(self.mix(torch.cat([padded[:, :-2], state, padded[:, 2:], x], dim=-1))))


def networks() -> dict[str, nn.Module]:
    """Return the networks as initialised, by name."""
    sizes = {"vocab_size": 2 * SYMBOLS, "hidden_size": WIDTH, "num_hidden_layers": 1, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    delta = {"linear_value_head_dim": 8, "layer_types": ["linear_attention"], "num_experts": 0, "mlp_only_layers": [0]}
    mamba2 = {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
    library = {name: getattr(nn, kind)(WIDTH, WIDTH, batch_first=True) for name, kind in LIBRARY.items()}
    whole_sequence = {
        "Mamba": hf.MambaModel(hf.MambaConfig(**sizes, state_size=8)),
        "Mamba-2": hf.Mamba2Model(hf.Mamba2Config(**sizes, **mamba2)),
        "delta rule": hf.Qwen3NextModel(hf.Qwen3NextConfig(**sizes, **heads, **linear, **delta, pad_token_id=0)),
    }
    nets = {name: Net(layer) for name, layer in {**library, "LRU": LRU(), "depth": Depth()}.items()}
    return nets | {name: Net(layer, nn.Identity()) for name, layer in whole_sequence.items()}


LIBRARY = {"Elman": "RNN", "LSTM": "LSTM", "GRU": "GRU"}


def batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a symbol, then distractors from the other half of the vocabulary; the target is the symbol."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SYMBOLS, 2 * SYMBOLS, (samples, STEPS), generator=generator)
    ids[:, 0] = torch.randint(SYMBOLS, (samples,), generator=generator)
    return ids, ids[:, 0].clone()


def train(net: nn.Module, steps: int) -> nn.Module:
    """Train a network on fresh batches."""
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for seed in range(steps):
        ids, symbol = batch(32, seed)
        optimizer.zero_grad()
        functional.cross_entropy(net(ids), symbol).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net.eval()


args = options(__doc__)
torch.manual_seed(0)
models = {name: train(net.train(), 700 if args.full else 5) for name, net in networks().items()}
x, y = batch(256 if args.full else 128, 10**6)
comparison = rl.compare(models, x, y, loss=functional.cross_entropy, scorecard=True)
print(comparison)
card = comparison.scorecard
print(f"most weights: {card.name.values[card.value.sel(measure='weights').values.argmax()]}.")
save(rl.plot.scorecard(comparison), args.out / "h_scorecard.png")
