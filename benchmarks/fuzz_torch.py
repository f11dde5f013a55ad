"""Compare every verb with torch's own autograd on random models.

    python benchmarks/fuzz_torch.py --count 300 --seed 0

Each model is drawn from the parts below by its number, so that `--only 17` builds number 17 again. The reference
is autograd on the user's untouched model in float64. A model counts as *right*, *refused* (an error of rnnlens, listed
with its first sentence), *accused* (right numbers, failed certificate), *wrong* or *foreign* (another exception).
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import _fuzz
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

import rnnlens as rl

STEPS, SAMPLES, FEATURES, UNITS = 6, 4, 3, 5
HABITS = ["none", "none", "feedback", "zoneout", "detach", "scale", "random zoneout", "decay", "euler", "in place"]
HABITS += ["mixed by a module", "detach every two", "float32 part"]
#: Changes to the states of a library layer between its calls.
CHANGES = ["none", "norm", "decay", "reset", "reset of some", "detach", "noise"]
#: Largest accepted difference by dtype; a part in float32 rounds differently in batches of another size.
TOLERANCE = {"float64": 1e-8, "float32 part": 1e-4}


class LeakyCell(nn.Module):
    """A leaky cell, h' = (1 - a) h + a tanh(W x + U h)."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.inner, self.recurrent = nn.Linear(inputs, units), nn.Linear(units, units, bias=False)
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, h):
        return (1 - self.rate) * h + self.rate * torch.tanh(self.inner(x) + self.recurrent(h))


class SubclassedLSTM(nn.LSTM):
    def forward(self, x, state=None):
        out, state = super().forward(x * 0.9, state)
        return out * 1.1, state


class SubclassedGRU(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, state)


class SubclassedGRUCell(nn.GRUCell):
    def forward(self, x, h=None):
        return super().forward(torch.tanh(x), h)


class OwnGRUCell(nn.GRUCell):
    def forward(self, x, h):
        gx, gh = x @ self.weight_ih.T + self.bias_ih, h @ self.weight_hh.T + self.bias_hh
        (rx, zx, nx), (rh, zh, nh) = gx.chunk(3, -1), gh.chunk(3, -1)
        r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        return (1 - z) * torch.tanh(nx + r * nh) + z * h


class Loop(nn.Module):
    """A cell called in a Python loop, with one user-written change of its state, input or output (``habit``)."""

    def __init__(self, cell: nn.Module, units: int, habit: str, *, two_states: bool, backward: bool) -> None:
        super().__init__()
        self.cell, self.units, self.habit, self.two_states, self.backward = cell, units, habit, two_states, backward
        self.gain = nn.Linear(units, units) if habit == "feedback" else None
        self.decay = nn.Parameter(torch.ones(units)) if habit == "decay" else None
        self.field = nn.Linear(units, units) if habit in ("euler", "mixed by a module", "float32 part") else None

    def forward(self, x):
        h = x.new_zeros(len(x), self.units)
        c = x.new_zeros(len(x), self.units)
        outs = []
        steps = range(x.shape[1])
        for t in reversed(steps) if self.backward else steps:
            before, step = h, x[:, t]
            if self.habit == "feedback" and self.gain is not None:
                step = step + torch.tanh(self.gain(h))[:, : step.shape[1]]
            if self.two_states:
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
            if self.habit == "zoneout":
                h = 0.2 * before + 0.8 * h
            if self.habit == "random zoneout":  # one mask for all samples: the reference runs them one by one
                mask = torch.bernoulli(torch.full_like(h[:1], 0.3), generator=torch.Generator().manual_seed(t))
                h = mask * before + (1 - mask) * h
            if self.decay is not None:  # as in GRU-D; none at every third step
                h = h * torch.exp(-torch.relu(self.decay * 0.1 * (t % 3)))
            for _ in range(2 if self.habit == "euler" else 0):  # as in GRU-ODE
                h = h + 0.1 * torch.tanh(self.field(h))
            if self.habit == "mixed by a module":
                h = torch.tanh(self.field(h))
            if self.habit == "in place":
                h *= 0.9
            if self.habit == "detach every two" and t % 2:
                h, c = h.detach(), c.detach()
            if self.habit == "detach" and t == x.shape[1] // 2:
                h, c = h.detach(), c.detach()
            if self.habit == "scale":
                h = h * 0.9
            outs.append(h.clone() if self.habit == "in place" else h)
            if self.habit == "float32 part":
                outs[-1] = h + torch.tanh(self.field(h.float())).double()
        return torch.stack(outs[::-1] if self.backward else outs, 1)


class Fused(nn.Module):
    """A library layer of which the model uses only the sequence output."""

    def __init__(self, layer: nn.Module, initial: str, units: int) -> None:
        super().__init__()
        self.layer, self.initial = layer, initial
        if initial == "learned":
            count = layer.num_layers * (2 if layer.bidirectional else 1)
            self.start = nn.Parameter(torch.randn(count, 1, units) * 0.3)

    def forward(self, x):
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        samples = x.shape[0 if self.layer.batch_first else 1]
        state = None
        if self.initial == "learned":
            h = self.start.expand(-1, samples, -1).contiguous()
            state = (h, torch.zeros_like(h)) if isinstance(self.layer, nn.LSTM) else h
        out = self.layer(x, state)[0]
        return out if self.layer.batch_first else out.transpose(0, 1)


class Segmented(nn.Module):
    """A library layer called on consecutive segments of the sequence, with its states changed in between."""

    def __init__(self, layer: nn.Module, units: int, segment: int, change: str) -> None:
        super().__init__()
        self.layer, self.units, self.segment, self.change = layer, units, segment, change
        self.norm, self.decay = nn.LayerNorm(units), nn.Parameter(torch.tensor(0.7))
        self.register_buffer("noise", torch.randn(STEPS, 1, units))

    def changed(self, state: torch.Tensor, t: int, x: torch.Tensor) -> torch.Tensor:
        kept_samples = (x[:, t, 0] > 0).to(state)[None, :, None]
        return {
            "none": lambda: state,
            "norm": lambda: self.norm(state),
            "decay": lambda: state * self.decay,
            "reset": lambda: state * float(t % 4 != 0),
            "reset of some": lambda: state * kept_samples,
            "detach": lambda: state.detach() if t == 2 * self.segment else state,
            "noise": lambda: state + 0.1 * self.noise[t],
        }[self.change]()

    def forward(self, x):
        state, outs = None, []
        for t in range(0, x.shape[1], self.segment):
            if state is not None:
                pair = isinstance(state, tuple)
                state = tuple(self.changed(s, t, x) for s in state) if pair else self.changed(state, t, x)
            out, state = self.layer(x[:, t : t + self.segment], state)
            outs.append(out)
        return torch.cat(outs, 1)


class Attention(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.score = nn.Linear(units, 1)

    def forward(self, x):
        return (torch.softmax(self.score(x), 1) * x).sum(1)


class Stranger(nn.Module):
    """A random user model: recurrent parts in sequence, operations between them, and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.choices: dict[str, Any] = {}
        choose = self._chooser(draw)
        self.ids = choose("input", ["numbers", "numbers", "numbers", "ids"]) == "ids"
        if self.ids:
            self.embed = nn.Embedding(11, FEATURES)
        width, parts = FEATURES, []
        for i in range(choose("parts", [1, 1, 2, 3])):
            part, width = self._part(choose, i, width)
            parts.append(part)
        self.parts = nn.ModuleList(parts)
        self.shared = choose("shared", [False, False, False, True]) and parts[-1:] != [] and width == FEATURES
        self.between = choose("between", ["none", "none", "norm", "dropout", "relu"])
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.3)
        self.pool = choose("pool", ["last", "all", "mean", "max", "attention", "sum of steps"])
        self.attention = Attention(width)
        self.head = nn.Linear(width, 2)
        if choose("unused head", [False, False, True]):
            self.spare = nn.Linear(width, 3)
            self.spare_rnn = nn.GRU(width, 4, batch_first=True)
        self.returns = choose("returns", ["tensor", "tensor", "tuple", "dict"])
        self.residual = choose("residual", [False, False, True])

    def _chooser(self, draw: random.Random) -> Callable[[str, list[Any]], Any]:
        def choose(name: str, options: list[Any]) -> Any:
            self.choices[name] = draw.choice(options)
            return self.choices[name]

        return choose

    def _part(self, choose: Callable[[str, list[Any]], Any], i: int, width: int) -> tuple[nn.Module, int]:
        kind = choose(f"{i} kind", ["LSTM", "GRU", "RNN", "subclass", "loop", "loop", "segments", "segments"])
        units = choose(f"{i} units", [FEATURES, UNITS])
        if kind == "loop":
            cells = {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell, "leaky": LeakyCell}
            cells |= {"subclassed": SubclassedGRUCell, "own equations": OwnGRUCell}
            name = choose(f"{i} cell", list(cells))
            habit = choose(f"{i} habit", HABITS)
            backward = choose(f"{i} backward", [False, False, True])
            return Loop(
                cells[name](width, units), units, habit, two_states=name == "LSTMCell", backward=backward
            ), units
        if kind == "segments":
            options: dict[str, Any] = {"num_layers": choose(f"{i} layers", [1, 1, 2])}
            options["bidirectional"] = choose(f"{i} both", [False, True])
            inner = getattr(nn, choose(f"{i} layer", ["LSTM", "GRU", "RNN"]))(width, units, batch_first=True, **options)
            segment, change = choose(f"{i} segment", [1, 1, 2, 3]), choose(f"{i} change", CHANGES)
            return Segmented(inner, units, segment, change), units * (2 if inner.bidirectional else 1)
        if kind == "subclass":
            layer: nn.Module = choose(f"{i} class", [SubclassedLSTM, SubclassedGRU])(width, units, batch_first=True)
            return Fused(layer, "zeros", units), units
        options = {
            "num_layers": choose(f"{i} layers", [1, 1, 2]),
            "batch_first": choose(f"{i} first", [True, True, False]),
        }
        options["bidirectional"] = choose(f"{i} both", [False, False, True])
        options["bias"] = choose(f"{i} bias", [True, True, False])
        if kind == "RNN":
            options["nonlinearity"] = choose(f"{i} nonlinearity", ["tanh", "relu"])
        layer = getattr(nn, kind)(width, units, **options)
        if choose(f"{i} parametrised", [False, False, False, True]):
            parametrizations.weight_norm(layer, "weight_hh_l0")
        return Fused(layer, choose(f"{i} initial", ["zeros", "learned"]), units), units * (
            2 if layer.bidirectional else 1
        )

    def forward(self, x):
        x = self.embed(x) if self.ids else x
        for part in self.parts:
            x = part(x)
            if x.shape[-1] == self.norm.normalized_shape[0]:
                modules = {"norm": self.norm, "dropout": self.drop, "relu": torch.relu}
                between = modules.get(self.between, nn.Identity())(x)
                x = x + between if self.residual else between
        if self.shared:
            x = self.parts[-1](x) if x.shape[-1] == FEATURES else x
        pooled = {
            "last": lambda: x[:, -1],
            "all": lambda: x,
            "mean": lambda: x.mean(1),
            "max": lambda: x.max(1).values,
            "attention": lambda: self.attention(x),
            "sum of steps": lambda: x[:, 0] + x[:, x.shape[1] // 2],
        }[self.pool]()
        y = self.head(pooled)
        return {"tensor": y, "tuple": (y, pooled), "dict": {"y": y, "features": pooled}}[self.returns]


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the first output."""
    first = output["y"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(first, target)


def data_for(model: Stranger, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch and a target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SAMPLES, STEPS)
    x = (
        torch.randint(0, 11, shape, generator=generator)
        if model.ids
        else torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64)
    )
    target_shape = (SAMPLES, STEPS, 2) if model.pool == "all" else (SAMPLES, 2)
    return x, torch.randn(*target_shape, generator=generator, dtype=torch.float64)


def assert_close(label: str, actual: Any, expected: Any, model: Stranger) -> None:
    """Compare two arrays in float64."""
    _fuzz.assert_close(
        label, actual, expected, TOLERANCE["float32 part" if "float32 part" in model.choices.values() else "float64"]
    )


def reference(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss and its gradients with respect to input and parameters, by autograd."""
    leaf = x.clone().requires_grad_(not model.ids)
    with torch.enable_grad():
        loss = loss_of(model(leaf), y)
        leaves = ([] if model.ids else [leaf]) + list(model.parameters())
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), [*([None] if model.ids else []), *grads]


def check_trace(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the loss of ``rl.trace`` with the reference."""
    trace = rl.trace(model, x, y, loss=loss_of)
    loss, _ = reference(model, x, y)
    assert_close("trace: loss", trace.loss, loss, model)
    return trace.certificate


def check_gradients(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the gradients with respect to input and weights."""
    _, (by_input, *by_weight) = reference(model, x, y)
    if not model.ids:
        assert_close("gradients: input", rl.gradients(model, x, y, loss=loss_of, wrt="input"), by_input, model)
    result = rl.gradients(model, x, y, loss=loss_of, wrt="weights")
    if any(value for name, value in model.choices.items() if name.endswith("parametrised")):
        return result.certificate  # rnnlens: by the weight itself; autograd: by its parametrisation
    total = sum(float((grad**2).sum()) for grad in by_weight if grad is not None)
    assert_close("gradients: norm of all weights", _fuzz.sum_of_squares(result), total, model)
    return result.certificate


def check_weights(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the gradients that ``rl.weights`` returns with the weights."""
    result = rl.weights(model, x, y, loss=loss_of)
    if any(value for name, value in model.choices.items() if name.endswith("parametrised")):
        return result.certificate  # see check_gradients
    _, (_, *by_weight) = reference(model, x, y)
    total = sum(float((grad**2).sum()) for grad in by_weight if grad is not None)
    grads = [array for layer in result for name, array in result[layer].items() if name.endswith("_grad")]
    assert_close("weights: norm of all gradients", sum(float((array**2).sum()) for array in grads), total, model)
    return result.certificate


def check_states(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the total gradient of the first loop's state with autograd's at the tensors that its cell returned."""
    loops = [(i, loop) for i, loop in enumerate(model.parts) if isinstance(loop, Loop) and "detach" not in loop.habit]
    if not loops or model.shared:
        return None
    i, loop = loops[0]
    computed = rl.gradients(model, x, y, loss=loss_of, wrt=f"parts.{i}.cell.hidden")
    taps: list[torch.Tensor] = []

    def record_state(module, inputs, output):
        taps.append(output[0] if isinstance(output, tuple) else output)
        return (taps[-1].clone(), *output[1:]) if isinstance(output, tuple) else taps[-1].clone()

    handle = loop.cell.register_forward_hook(record_state)
    with torch.enable_grad():
        loss = loss_of(model(x), y)
    handle.remove()
    grads = torch.autograd.grad(loss, taps, allow_unused=True)
    filled = [torch.zeros_like(tap) if grad is None else grad for tap, grad in zip(taps, grads, strict=True)]
    assert_close("gradients: hidden", computed, torch.stack(filled, 1), model)
    return computed.certificate


def check_layers(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare gradients at outputs of non-recurrent layers with autograd's at zeros added there."""
    kinds = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Embedding, Attention)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds) and ".cell" not in name]
    taps: dict[str, list[torch.Tensor]] = {}

    def add_zero(name, module, inputs, output):
        taps.setdefault(name, []).append(torch.zeros_like(output, requires_grad=True))
        return output + taps[name][-1]

    handles = [module.register_forward_hook(functools.partial(add_zero, name)) for name, module in layers]
    with torch.enable_grad():
        loss = loss_of(model(x), y)
    for handle in handles:
        handle.remove()
    trace = rl.trace(model, x, y, loss=loss_of, layers=list(taps))
    for name, zeros in taps.items():
        for i, grad in enumerate(torch.autograd.grad(loss, zeros, retain_graph=True)):
            number = f"#{i}" if len(zeros) > 1 else ""
            if isinstance(model.get_submodule(name.rpartition(".")[0]), Segmented):  # dims (layer, sample, unit)
                grad = grad.transpose(0, 1)
            assert_close(f"trace: {name}{number}", trace[f"{name}{number}"].output_grad, grad, model)
    return trace.certificate


def check_jacobian(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the time Jacobian of the first output with respect to the input."""
    if model.ids:
        return None
    target = {"tensor": "output", "tuple": "output[0]", "dict": "output[y]"}[model.returns]
    computed = rl.jacobian(model, x, of=target)

    def function(sample: torch.Tensor) -> torch.Tensor:
        out = model(sample[None])
        return (out["y"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out)[0]

    from_torch = np.stack([torch.autograd.functional.jacobian(function, sample).numpy() for sample in x])
    assert_close("jacobian", computed, from_torch, model)
    return computed.certificate


def check_inner(model: Stranger, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compare the Jacobian of the last loop's states with respect to the output of the part before it, or the input."""
    # A detached state starts a recurrence of its own, cell#1.
    loops = [i for i, part in enumerate(model.parts) if isinstance(part, Loop) and "detach" not in part.habit]
    below_index = loops[-1] - 1 if loops else 0
    if not loops or model.shared or (below_index < 0 and model.ids):
        return None
    below = model.parts[below_index] if below_index >= 0 else None
    if below is not None and not isinstance(below, Loop | Fused | Segmented):
        return None
    cell, lower, upper = model.parts[loops[-1]].cell, [], []

    def record_input(module, inputs, output):
        lower.append(output.clone() if below is not None else None)
        return lower[-1].clone()

    def record_state(module, inputs, output):
        upper.append(output[0] if isinstance(output, tuple) else output)
        return tuple(o.clone() for o in output) if isinstance(output, tuple) else output.clone()

    handles = [cell.register_forward_hook(record_state)]
    handles += [below.register_forward_hook(record_input)] if below is not None else []
    source = x.clone().requires_grad_(not model.ids)
    with torch.enable_grad():
        model(source)
        states = torch.stack(upper, 1)
    for handle in handles:
        handle.remove()
    start = source if below is None else lower[0]
    rows = [torch.autograd.grad(n, start, retain_graph=True, allow_unused=True)[0] for n in states.flatten(1).sum(0)]
    rows = [torch.zeros_like(start) if row is None else row for row in rows]
    wrt = "input" if below is None else f"parts.{below_index}.output"
    computed = rl.jacobian(model, x, of=f"parts.{loops[-1]}.cell.hidden", wrt=wrt)
    expected = torch.stack(rows, 1).reshape(len(x), *states.shape[1:], *start.shape[1:])
    assert_close(f"jacobian: cell.hidden by {wrt}", computed, expected, model)
    return computed.certificate


CHECKS = {
    "trace": check_trace,
    "layers": check_layers,
    "gradients": check_gradients,
    "weights": check_weights,
    "states": check_states,
    "jacobian": check_jacobian,
    "inner": check_inner,
}


def main() -> int:
    """Draw the models; print a table and every model that is not right."""
    arguments = _fuzz.make_parser(__doc__, 300).parse_args()
    torch.set_num_threads(1)
    table = _fuzz.Table(CHECKS, arguments.only is not None)
    numbers = _fuzz.model_numbers(arguments)
    for number in numbers:
        torch.manual_seed(arguments.seed * 100_000 + number)
        model = Stranger(random.Random(f"{arguments.seed} {number}")).double().eval()
        for layer in model.parts:
            if isinstance(layer, Loop) and layer.habit == "float32 part":
                layer.field.float()
        x, y = data_for(model, number)
        try:
            reference(model, x, y)
        except RuntimeError as error:
            print(f"{number} no model: {error}")
            continue
        for name, check in CHECKS.items():
            run = functools.partial(check, model, x, y)
            table.add(number, name, *_fuzz.run_check(run, model.state_dict), model.choices)
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
