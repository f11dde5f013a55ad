"""Whole torch programs from tutorials and in the style of users, each with its data and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

B, T, N, H, V = 3, 5, 4, 6, 7


@dataclass
class Program:
    """A model with its input, its loss, and the layers and states of its trace.

    Attributes
    ----------
    build, x, loss
        The model's class, its input and a function of its output.
    layers
        Layers of a trace, in the order of the calls.
    states
        Modules of which every call is one step of one recurrence, with the indices of the returned state tensors.
    wrt, of
        Input of the Jacobian ("input", the output of a module that runs once, or a state), and its output.
    arranged
        Function that brings the first output to (sample, ...).
    options
        Further keywords of every call.
    """

    build: Callable[[], nn.Module]
    x: Callable[[], Any]
    layers: list[str]
    states: dict[str, tuple[int, ...]] = field(default_factory=dict)
    wrt: str = "input"
    of: str = "output"
    arranged: Callable[[torch.Tensor], torch.Tensor] = lambda output: output
    options: dict[str, Any] = field(default_factory=dict)


def numbers() -> torch.Tensor:
    return torch.randn(B, T, N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def ids() -> torch.Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))


def leaves(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "__dataclass_fields__"):
        output = vars(output)
    values = output.values() if isinstance(output, dict) else output
    return [leaf for value in values if value is not None for leaf in leaves(value)]


def wave_loss(output: Any) -> torch.Tensor:
    """Return a loss that weights every number of the first output differently."""
    first = leaves(output)[0]
    return (first * torch.cos(torch.arange(first.numel(), dtype=first.dtype)).reshape(first.shape)).sum()


# Tutorials.


class NameRNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, input, hidden):
        combined = torch.cat((input, hidden), 1)
        hidden = torch.tanh(self.i2h(combined))
        return self.softmax(self.h2o(hidden)), hidden

    def init_hidden(self, batch):
        return torch.zeros(batch, self.hidden_size, dtype=self.i2h.weight.dtype)


class NameClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = NameRNN(N, H, V)

    def forward(self, line):
        hidden = self.rnn.init_hidden(len(line))
        for i in range(line.size(1)):
            output, hidden = self.rnn(line[:, i], hidden)
        return output


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class BahdanauAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = functional.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    """A decoder with attention; ``carry`` selects how the state is passed from step to step."""

    def __init__(self, hidden_size, output_size, carry="hidden", layers=1, kind=nn.GRU):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = kind(2 * hidden_size, hidden_size, layers, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.carry, self.layers = carry, layers

    def forward(self, encoder_outputs, encoder_hidden):
        decoder_input = torch.zeros(len(encoder_outputs), 1, dtype=torch.long)
        hidden = encoder_hidden.repeat(self.layers, 1, 1)
        if isinstance(self.gru, nn.LSTM):
            hidden = (hidden, torch.zeros_like(hidden))
        outputs = []
        for _ in range(4):
            output, hidden = self.forward_step(decoder_input, hidden, encoder_outputs)
            outputs.append(output)
            decoder_input = output.topk(1)[1].squeeze(-1).detach()
        return functional.log_softmax(torch.cat(outputs, dim=1), dim=-1)

    def forward_step(self, input, hidden, encoder_outputs):
        last = hidden[0] if isinstance(hidden, tuple) else hidden
        context, _ = self.attention(last[-1:].permute(1, 0, 2), encoder_outputs)
        output, new = self.gru(torch.cat((self.embedding(input), context), dim=2), hidden)
        if self.carry == "output":
            new = output.transpose(0, 1)
        elif self.carry == "contiguous output":
            new = output[:, -1].unsqueeze(0).contiguous()
        elif self.carry == "mixed":
            new = 0.1 * hidden + 0.9 * new
        elif self.carry == "mixed output":
            new = 0.1 * hidden + 0.9 * output.transpose(0, 1)
        elif self.carry == "dropout":
            new = functional.dropout(new, 0.2, self.training)
        return self.out(output), new


class Translation(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.encoder, self.decoder = EncoderRNN(V, H), AttnDecoderRNN(H, V, **options)

    def forward(self, x):
        return self.decoder(*self.encoder(x))


class WordByWord(nn.Module):
    """A translator of one sentence that calls the encoder and the decoder word by word."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(V, H), nn.GRU(H, H)
        self.decoder_gru, self.out = nn.GRU(H, H), nn.Linear(H, V)

    def forward(self, sentence):
        hidden = torch.zeros(1, 1, H, dtype=self.out.weight.dtype)
        for word in sentence[0]:
            _, hidden = self.gru(self.embedding(word).view(1, 1, -1), hidden)
        word, outputs = torch.tensor([[0]]), []
        for _ in range(4):
            output = functional.relu(self.embedding(word).view(1, 1, -1))
            output, hidden = self.decoder_gru(output, hidden)
            outputs.append(functional.log_softmax(self.out(output[0]), dim=1))
            word = outputs[-1].topk(1)[1].detach()
        return torch.stack(outputs, 1)


class WordLanguageModel(nn.Module):
    """A time-major language model with tied weights, whose hidden state is an argument and a result."""

    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.5), nn.Embedding(V, H)
        self.rnn = nn.LSTM(H, H, 2, dropout=0.5)
        self.decoder = nn.Linear(H, V)
        self.decoder.weight = self.encoder.weight

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, V)
        return functional.log_softmax(decoded, dim=1), hidden


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


class LSTMTagger(nn.Module):
    """A tagger of sentences (sample, time) with a time-major LSTM."""

    def __init__(self):
        super().__init__()
        self.word_embeddings, self.lstm = nn.Embedding(V, N), nn.LSTM(N, H)
        self.hidden2tag = nn.Linear(H, 3)

    def forward(self, sentences):
        lstm_out, _ = self.lstm(self.word_embeddings(sentences.t()))
        return functional.log_softmax(self.hidden2tag(lstm_out), dim=2).transpose(0, 1)


class Sequence(nn.Module):
    """The sine forecaster of PyTorch's examples: two cells, with predictions fed back as inputs."""

    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, H), nn.LSTMCell(H, H)
        self.linear = nn.Linear(H, 1)

    def forward(self, input, future=2):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), H, dtype=torch.double) for _ in range(4))
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


class PackedClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(N, H, batch_first=True), nn.Linear(H, V)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, hidden = self.rnn(packed)
        return self.fc(hidden.squeeze(0))


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, N, padding_idx=0)
        self.rnn = nn.LSTM(N, H, num_layers=2, bidirectional=True, dropout=0.5)
        self.fc, self.dropout = nn.Linear(2 * H, 1), nn.Dropout(0.5)

    def forward(self, text):
        _, (hidden, _) = self.rnn(self.dropout(self.embedding(text)).transpose(0, 1))
        return self.fc(self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class TruncatedBPTT(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(N, H, batch_first=True), nn.Linear(H, V)

    def forward(self, x):
        state, outputs = None, []
        for chunk in x.split(2, dim=1):
            if state is not None:
                state = repackage_hidden(state)
            out, state = self.lstm(chunk, state)
            outputs.append(out)
        return self.head(torch.cat(outputs, 1))


class RecurrentPolicy(nn.Module):
    """A PPO policy whose state is reset at the end of an episode."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(N, H), nn.Tanh())
        self.rnn, self.actor, self.critic = nn.GRUCell(H, H), nn.Linear(H, 3), nn.Linear(H, 1)

    def forward(self, obs, done):
        features = self.encoder(obs)
        h, logits, values = features.new_zeros(len(obs), H), [], []
        for t in range(obs.shape[1]):
            h = h * (1.0 - done[:, t]).unsqueeze(-1)
            h = self.rnn(features[:, t], h)
            logits.append(self.actor(h))
            values.append(self.critic(h).squeeze(-1))
        return torch.stack(logits, 1), torch.stack(values, 1)


class LitForecaster(nn.Module):
    """A module with the structure of Lightning's: hyperparameters, a network, and training steps besides forward."""

    def __init__(self, hidden=H, lr=1e-3):
        super().__init__()
        self.hparams = {"hidden": hidden, "lr": lr}
        self.net = nn.ModuleDict({"rnn": nn.LSTM(N, hidden, batch_first=True), "head": nn.Linear(hidden, 1)})
        self.criterion = nn.MSELoss()

    def forward(self, x):
        out, (h, _) = self.net["rnn"](x)
        return self.net["head"](h[-1] + out.mean(1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def sentence() -> torch.Tensor:
    return ids()[:1]


def language_batch() -> tuple[torch.Tensor, Any]:
    return ids().t().contiguous(), (torch.zeros(2, B, H).double(), torch.zeros(2, B, H).double())


def episodes() -> tuple[torch.Tensor, torch.Tensor]:
    done = torch.zeros(B, T, dtype=torch.float64)
    done[0, 2] = done[2, 3] = 1
    return numbers(), done


def lengths() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(), torch.tensor([5, 2, 3])


DECODER = {"decoder.gru": (0, 1)}
WORDS = "encoder.embedding.output"


def translation(**options: Any) -> Program:
    return Program(lambda: Translation(**options), ids, ["encoder.gru", "decoder.gru"], DECODER, WORDS)


TUTORIALS = {
    "names": Program(NameClassifier, numbers, ["rnn"], {"rnn": (1,)}),
    "translation": translation(),
    "translation, output carried": translation(carry="output"),
    "translation, last output carried": translation(carry="contiguous output"),
    "translation, state mixed": translation(carry="mixed"),
    "translation, output mixed": translation(carry="mixed output"),
    "translation, state dropped out": translation(carry="dropout"),
    "translation, LSTM": translation(kind=nn.LSTM),
    "translation, two layers": Program(
        lambda: Translation(layers=2), ids, ["encoder.gru", "decoder.gru[0]", "decoder.gru[1]"], wrt=WORDS
    ),
    "word by word": Program(
        WordByWord, sentence, ["gru", "decoder_gru"], {"gru": (0, 1), "decoder_gru": (0, 1)}, wrt="gru.hidden"
    ),
    "language model": Program(
        WordLanguageModel,
        language_batch,
        ["rnn[0]", "rnn[1]"],
        wrt="encoder.output",
        of="output[0]",
        arranged=lambda output: output.view(T, B, V).transpose(0, 1),
    ),
    "tagger": Program(LSTMTagger, ids, ["lstm"], wrt="word_embeddings.output"),
    "sines": Program(Sequence, lambda: numbers()[..., 0], ["lstm1", "lstm2"], {"lstm1": (0,), "lstm2": (0,)}),
    "packed": Program(PackedClassifier, lengths, ["rnn"], wrt="input[0]"),
    "sentiment": Program(Sentiment, ids, ["rnn[0]", "rnn[1]"], wrt="embedding.output"),
    "truncated": Program(TruncatedBPTT, numbers, ["lstm#0", "lstm#1", "lstm#2"]),
    "policy": Program(RecurrentPolicy, episodes, ["rnn"], {"rnn": (0,)}, of="output[0]", wrt="input[0]"),
    "forecaster": Program(LitForecaster, numbers, ["net.rnn"]),
}


# Programs in the style of users.


class ChunkedCell(nn.Module):
    """A loop detached between chunks, whose head reads only the last state."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(N, H), nn.Linear(H, V)

    def forward(self, x):
        h, c = x.new_zeros(len(x), H), x.new_zeros(len(x), H)
        for t in range(x.size(1)):
            if t and t % 2 == 0:
                h, c = h.detach(), c.detach()
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class OutputFedBack(nn.Module):
    """A loop in which each prediction, made through a layer norm, is part of the next input."""

    def __init__(self):
        super().__init__()
        self.cell, self.out, self.norm = nn.GRUCell(N + 2, H), nn.Linear(H, 2), nn.LayerNorm(H)

    def forward(self, x):
        h, y, ys = torch.zeros(len(x), H).to(x), torch.zeros(len(x), 2).to(x), []
        for t in range(x.size(1)):
            h = self.cell(torch.cat([x[:, t], y], -1), h)
            y = self.out(self.norm(h))
            ys.append(y)
        return torch.stack(ys, dim=1)


class AdditiveAttention(nn.Module):
    """An LSTMCell decoder that attends to the states of a bidirectional encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(N, H, batch_first=True, bidirectional=True)
        self.bridge, self.energy, self.v = nn.Linear(2 * H, H), nn.Linear(3 * H, H), nn.Linear(H, 1, bias=False)
        self.decoder, self.fc_out = nn.LSTMCell(2 * H, H), nn.Linear(3 * H, V)

    def forward(self, src):
        outputs, hidden = self.encoder(src)
        h = torch.tanh(self.bridge(torch.cat((hidden[-2], hidden[-1]), dim=1)))
        c, predictions = torch.zeros_like(h), []
        for _ in range(3):
            repeated = h.unsqueeze(1).repeat(1, src.shape[1], 1)
            energy = torch.tanh(self.energy(torch.cat((repeated, outputs), dim=2)))
            a = functional.softmax(self.v(energy).squeeze(2), dim=1)
            weighted = torch.bmm(a.unsqueeze(1), outputs).squeeze(1)
            h, c = self.decoder(weighted, (h, c))
            predictions.append(self.fc_out(torch.cat((h, weighted), dim=1)))
        return torch.stack(predictions, 1)


class PointerNetwork(nn.Module):
    """A pointer network: log-probabilities (sample, decoder step, encoder position)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(N, H, batch_first=True), nn.LSTMCell(N, H)
        self.W1, self.W2 = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.vt = nn.Linear(H, 1, bias=False)

    def forward(self, x):
        states, (h, c) = self.encoder(x)
        h, c, inp, pointers = h[0], c[0], x.new_zeros(len(x), N), []
        for _ in range(3):
            h, c = self.decoder(inp, (h, c))
            scores = self.vt(torch.tanh(self.W1(states) + self.W2(h).unsqueeze(1))).squeeze(-1)
            pointers.append(functional.log_softmax(scores, dim=-1))
            inp = (scores.softmax(-1).unsqueeze(-1) * x).sum(1)
        return torch.stack(pointers, 1)


class StatesInPlace(nn.Module):
    """Stacked cells with all states in one tensor (sample, layer, unit), written in place."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(N, H), nn.GRUCell(H, H)])
        self.head = nn.Linear(H, V)

    def forward(self, x):
        h = x.new_zeros(len(x), 2, H)
        outputs = x.new_zeros(len(x), x.size(1), H)
        for t in range(x.size(1)):
            inp = x[:, t]
            for i, cell in enumerate(self.cells):
                inp = cell(inp, h[:, i])
                h = h.clone()
                h[:, i] = inp
            outputs[:, t] = h[:, -1]
        return self.head(outputs)


class SharedCell(nn.Module):
    """One cell, run forward and backward in time, with one layer norm for both directions."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.head = nn.GRUCell(N, H), nn.LayerNorm(H), nn.Linear(2 * H, V)

    def run(self, steps):
        h, outputs = steps[0].new_zeros(len(steps[0]), H), []
        for step in steps:
            h = self.cell(step, h)
            outputs.append(self.norm(h))
        return outputs

    def forward(self, x):
        steps = list(x.unbind(1))
        ahead, back = self.run(steps), self.run(steps[::-1])[::-1]
        return self.head(torch.cat([torch.stack(ahead, 1), torch.stack(back, 1)], -1))


class MyGRU(nn.GRU):
    """A GRU subclass with its own forward: dropout on the input, a residual on the output."""

    def forward(self, x, hx=None):
        out, h = super().forward(functional.dropout(x, 0.3, self.training), hx)
        return out + 0.1 * x.mean(-1, keepdim=True), h


class UnusedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.heads = (
            MyGRU(N, H, batch_first=True),
            nn.ModuleDict({"a": nn.Linear(H, V), "b": nn.Linear(H, 2)}),
        )
        self.spare = nn.LSTMCell(H, H)

    def forward(self, x, task="a"):
        return self.heads[task](self.rnn(x)[0])


class StackedCells(nn.Module):
    """A list of cells and a list of their states, with dropout and residual connections between the layers."""

    def __init__(self, layers=2):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(N if i == 0 else H, H) for i in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(H, V)

    def forward(self, x):
        states = [(x.new_zeros(len(x), H), x.new_zeros(len(x), H)) for _ in self.cells]
        outputs = []
        for t in range(x.size(1)):
            inp = x[:, t]
            for i, cell in enumerate(self.cells):
                states[i] = cell(inp, states[i])
                inp = self.drop(states[i][0]) + (inp if i else 0)
            outputs.append(inp)
        return self.head(torch.stack(outputs).transpose(0, 1))


class LayerNormLSTMCell(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.ih, self.hh = nn.Linear(inputs, 4 * units, bias=False), nn.Linear(units, 4 * units)
        self.ln_ih, self.ln_hh, self.ln_c = nn.LayerNorm(4 * units), nn.LayerNorm(4 * units), nn.LayerNorm(units)

    def forward(self, input, state):
        hx, cx = state
        gates = self.ln_ih(self.ih(input)) + self.ln_hh(self.hh(hx))
        i, f, g, o = gates.chunk(4, 1)
        cy = self.ln_c(torch.sigmoid(f + 1.0) * cx + torch.sigmoid(i) * torch.tanh(g))
        hy = torch.sigmoid(o) * torch.tanh(cy)
        return hy, (hy, cy)


class LayerNormLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = LayerNormLSTMCell(N, H), nn.Linear(H, V)

    def forward(self, x):
        state, outputs = (x.new_zeros(len(x), H), x.new_zeros(len(x), H)), []
        for step in x.unbind(1):
            out, state = self.cell(step, state)
            outputs.append(out)
        return self.head(torch.stack(outputs, 1))


class Zoneout(nn.Module):
    def __init__(self, zc=0.3, zh=0.1):
        super().__init__()
        self.cell, self.head, self.zc, self.zh = nn.LSTMCell(N, H), nn.Linear(H, V), zc, zh

    def forward(self, x):
        h, c = x.new_zeros(len(x), H), x.new_zeros(len(x), H)
        for t in range(x.size(1)):
            hn, cn = self.cell(x[:, t], (h, c))
            if self.training:
                hn = torch.where(torch.rand_like(h) < self.zh, h, hn)
                cn = torch.where(torch.rand_like(c) < self.zc, c, cn)
            else:
                hn, cn = self.zh * h + (1 - self.zh) * hn, self.zc * c + (1 - self.zc) * cn
            h, c = hn, cn
        return self.head(h)


class SkipConnections(nn.Module):
    """GRU layers with residual connections; the head also reads the input."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(N, H)
        self.layers = nn.ModuleList(nn.GRU(H, H, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2))
        self.head = nn.Linear(H + N, V)

    def forward(self, x):
        z = self.proj(x)
        for rnn, norm in zip(self.layers, self.norms, strict=True):
            z = norm(z + rnn(z)[0])
        return self.head(torch.cat([z, x], -1))


class Compiled(nn.Module):
    """A network with a compiled feature extractor and a compiled cell."""

    def __init__(self):
        super().__init__()
        self.features = torch.compile(nn.Sequential(nn.Linear(N, H), nn.ReLU()), backend="eager")
        self.cell, self.head = torch.compile(nn.GRUCell(H, H), backend="eager"), nn.Linear(H, V)

    def forward(self, x):
        z = self.features(x)
        h = z.new_zeros(len(x), H)
        for t in range(x.size(1)):
            h = self.cell(z[:, t], h)
        return self.head(h)


@dataclass
class Prediction:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


class DataclassOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(N, H, batch_first=True), nn.Linear(H, V)

    def forward(self, x):
        out, (h, _) = self.rnn(x)
        return Prediction(self.head(out), h[-1])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.cell, self.head = nn.GRU(N, H, batch_first=True), nn.GRUCell(H, H), nn.Linear(H, V)

    def forward(self, x):
        z, _ = checkpoint(self.lower, x, use_reentrant=False)
        h = z.new_zeros(len(x), H)
        for t in range(x.size(1)):
            h = checkpoint(self.cell, z[:, t], h, use_reentrant=False)
        return self.head(h)


class FastWeights(nn.Module):
    """A cell run with weights that the model computes, by ``functional_call``."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.scale = nn.GRUCell(N, H), nn.Linear(H, V), nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        weights = {name: p * self.scale for name, p in self.cell.named_parameters()}
        h = x.new_zeros(len(x), H)
        for t in range(x.size(1)):
            h = torch.func.functional_call(self.cell, weights, (x[:, t], h))
        return self.head(h)


class Memory(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class OneStepLayer(nn.Module):
    """A library LSTM called once per step on (sample, 1, feature), with its state in a named tuple."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(N + H, H, batch_first=True), nn.Linear(H, V)

    def forward(self, x):
        zeros = x.new_zeros(1, len(x), H)
        memory, outputs = Memory(zeros, zeros), []
        for t in range(x.size(1)):
            read_vector = torch.softmax(memory.h[0], -1)
            out, state = self.lstm(torch.cat([x[:, t], read_vector], -1).unsqueeze(1), tuple(memory))
            memory = Memory(*state)
            outputs.append(self.head(out.squeeze(1)))
        return torch.stack(outputs, 1)


class MaskedLoop(nn.Module):
    """Sequences of different lengths: ended samples keep their state."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(N, H), nn.Linear(H, V)

    def forward(self, x, lengths):
        h, c = x.new_zeros(len(x), H), x.new_zeros(len(x), H)
        for t in range(x.size(1)):
            hn, cn = self.cell(x[:, t], (h, c))
            alive = (t < lengths).unsqueeze(1)
            h, c = torch.where(alive, hn, h), torch.where(alive, cn, c)
        return self.head(h)


class LearnedStart(nn.Module):
    """A GRUCell loop with a learned initial state, plus a projection of static features."""

    def __init__(self):
        super().__init__()
        self.h0, self.static = nn.Parameter(torch.randn(1, H) * 0.1), nn.Linear(N, H)
        self.rnn, self.head = nn.GRUCell(N, H), nn.Linear(H, V)

    def forward(self, x):
        h = self.h0.expand(len(x), -1) + self.static(x.mean(1))
        outputs = torch.empty(len(x), x.size(1), V, dtype=x.dtype)
        for t, step in enumerate(torch.unbind(x, 1)):
            h = self.rnn(step, h)
            outputs[:, t] = self.head(h)
        return outputs


class GatedState(nn.Module):
    """A learned gate scales the state before every step; the head reads an attention-weighted mean of the states."""

    def __init__(self):
        super().__init__()
        self.cell, self.gate, self.score, self.head = (
            nn.GRUCell(N, H),
            nn.Linear(H, 1),
            nn.Linear(H, 1),
            nn.Linear(H, V),
        )

    def forward(self, x):
        h, states = x.new_zeros(len(x), H), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h * torch.sigmoid(self.gate(h)))
            states.append(h)
        states = torch.stack(states, 1)
        return self.head((torch.softmax(self.score(states) / math.sqrt(H), 1) * states).sum(1))


HIDDEN = {"cell": (0,)}
STRANGERS = {
    "chunks": Program(ChunkedCell, numbers, ["cell#0", "cell#1", "cell#2"]),
    "feedback": Program(OutputFedBack, numbers, ["cell"], HIDDEN),
    "additive attention": Program(AdditiveAttention, numbers, ["encoder", "decoder"], {"decoder": (0,)}),
    "pointer": Program(
        PointerNetwork,
        numbers,
        ["encoder", "decoder"],
        {"decoder": (0,)},
        options={"axes": {"output": ("sample", "time", "unit")}},
    ),
    "states in place": Program(StatesInPlace, numbers, ["cells.0", "cells.1"], {"cells.0": (0,), "cells.1": (0,)}),
    "shared cell": Program(SharedCell, numbers, ["cell#0", "cell#1"]),
    "unused heads": Program(UnusedHeads, numbers, ["rnn"]),
    "stacked cells": Program(StackedCells, numbers, ["cells.0", "cells.1"], {"cells.0": (0,), "cells.1": (0,)}),
    "layer norm": Program(LayerNormLSTM, numbers, ["cell"], HIDDEN),
    "zoneout": Program(Zoneout, numbers, ["cell"], HIDDEN),
    "skips": Program(SkipConnections, numbers, ["layers.0", "layers.1"]),
    "compiled": Program(Compiled, numbers, ["cell"], HIDDEN),
    "dataclass": Program(DataclassOutput, numbers, ["rnn"], of="output[logits]"),
    "checkpointed": Program(Checkpointed, numbers, ["lower", "cell"]),
    "fast weights": Program(FastWeights, numbers, ["cell"]),
    "layer as a cell": Program(OneStepLayer, numbers, ["lstm"], {"lstm": (0, 1)}),
    "masked": Program(MaskedLoop, lengths, ["cell"], wrt="input[0]"),
    "learned start": Program(LearnedStart, numbers, ["rnn"], {"rnn": (0,)}),
    "gated state": Program(GatedState, numbers, ["cell"], HIDDEN),
}
