"""Training steps of torch in the shapes of well-known programs, and the same gradient by one uncut loop.

Each program runs two windows of a recurrence with a loss at each step; the lines that cut are marked.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

STEPS, WINDOW, UNITS, SAMPLES = 8, 4, 5, 3


class Program:
    """An LSTM cell with a head, float64, and the windows of one sequence."""

    #: Texts of lines that cut on purpose what is no state.
    keep: tuple[str, ...] = ()

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"cell": nn.LSTMCell(2, UNITS), "head": nn.Linear(UNITS, 1)}).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.x, self.y = torch.randn(SAMPLES, STEPS, 2).double(), torch.randn(SAMPLES, STEPS, 1).double()
        self.is_init = torch.zeros(SAMPLES, STEPS, 1).double()
        self.is_init[:, 0], self.is_init[1, 6] = 1, 1

    def start(self):
        return torch.zeros(SAMPLES, UNITS).double(), torch.zeros(SAMPLES, UNITS).double()

    def advance(self, t, state):
        """Run the cell from a state that is 0 where an episode begins."""
        kept = tuple(part * (1 - self.is_init[:, t]) for part in state)
        return self.model["cell"](self.x[:, t], kept)

    def loss_at(self, t, state):
        return ((self.model["head"](state[0]) - self.y[:, t]) ** 2).mean()

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run_window(self, start, state):
        loss = 0.0
        for t in range(start, start + WINDOW):
            state = self.advance(t, state)
            loss = loss + self.loss_at(t, state)
        return loss, state

    def total_loss(self, is_cut):
        """Return the sum of all losses of one loop, in which the state loses its gradient before some steps."""
        state, loss = self.start(), 0.0
        for t in range(STEPS):
            state = tuple(part.detach() for part in state) if is_cut(t) else state
            state = self.advance(t, state)
            loss = loss + self.loss_at(t, state)
        return loss

    def gradients_by_hand(self, is_cut=lambda t: False):
        grads = torch.autograd.grad(self.total_loss(is_cut), list(self.model.parameters()))
        return torch.cat([grad.reshape(-1) for grad in grads]).numpy()


class RepackagedHidden(Program):
    """Recursive detaching of a nested state between windows, as in word_language_model."""

    def step(self):
        def repackage(state):
            if isinstance(state, torch.Tensor):
                return state.detach()  # cut
            return tuple(repackage(part) for part in state)

        state = self.start()
        for start in range(0, STEPS, WINDOW):
            state = repackage(state)
            loss, state = self.run_window(start, state)
            self.update(loss)


class SplitBatch(Program):
    """Windows of a batch that is split along time, hidden states returned in a dict, as in Lightning."""

    def training_step(self, start, hiddens):
        loss, state = self.run_window(start, hiddens)
        return {"loss": loss, "hiddens": [part.detach() for part in state]}  # cut

    def step(self):
        hiddens = self.start()
        for start in range(0, STEPS, WINDOW):
            result = self.training_step(start, hiddens)
            hiddens = result["hiddens"]
            self.update(result["loss"])


class StateUnderNoGrad(Program):
    """States of a rollout without gradient, from which the update of the next one starts, as in CleanRL."""

    def step(self):
        state = self.start()
        for start in range(0, STEPS, WINDOW):
            first = tuple(part.clone() for part in state)
            with torch.no_grad():
                for t in range(start, start + WINDOW):
                    state = self.advance(t, state)
            loss, _ = self.run_window(start, first)
            self.update(loss)

    def advance(self, t, state):
        kept = tuple(part * (1 - self.is_init[:, t]) for part in state)  # cut
        return self.model["cell"](self.x[:, t], kept)  # cut


class StateInArrays(StateUnderNoGrad):
    """The same with states stored in a buffer of NumPy, and read back as tensors, as in sb3-contrib."""

    def step(self):
        buffer = np.zeros((2, STEPS // WINDOW, SAMPLES, UNITS))
        state = self.start()
        for i, start in enumerate(range(0, STEPS, WINDOW)):
            for stored, part in zip(buffer, state, strict=True):
                stored[i] = part.cpu().numpy()  # cut
            with torch.no_grad():
                for t in range(start, start + WINDOW):
                    state = self.advance(t, state)
            loss, _ = self.run_window(start, tuple(torch.tensor(stored[i]) for stored in buffer))
            self.update(loss)


class StateInTable(StateUnderNoGrad):
    """States of a collector in a table with ``is_init``, detached when they are stored, as in TorchRL."""

    def step(self):
        table, state = {}, self.start()
        for start in range(0, STEPS, WINDOW):
            for name, part in zip(("h", "c"), state, strict=True):
                table[start, name] = part.detach()  # cut
            with torch.no_grad():
                for t in range(start, start + WINDOW):
                    state = self.advance(t, state)
            loss, _ = self.run_window(start, (table[start, "h"], table[start, "c"]))
            self.update(loss)


class OneStepGradient(Program):
    """A looped block: all iterations but the last without gradient, then one with, as in HRM."""

    def step(self):
        state = self.start()
        with torch.no_grad():
            for t in range(STEPS - 1):
                state = self.model["cell"](self.x[:, t], self.reset(t, state))  # cut
        state = tuple(part.detach() for part in state)  # cut
        state = self.model["cell"](self.x[:, -1], self.reset(STEPS - 1, state))
        self.update(self.loss_at(STEPS - 1, state))

    def reset(self, t, state):
        return tuple(part * (1 - self.is_init[:, t]) for part in state)  # cut

    def total_loss(self, is_cut):
        state = self.start()
        for t in range(STEPS):
            state = tuple(part.detach() for part in state) if is_cut(t) else state
            state = self.advance(t, state)
        return self.loss_at(STEPS - 1, state)


class FrozenTarget(SplitBatch):
    """Windows whose loss has a target computed without gradient, which is meant to be constant."""

    keep = ("target = ",)

    def run_window(self, start, state):
        loss = 0.0
        for t in range(start, start + WINDOW):
            state = self.advance(t, state)
            target = self.model["head"](state[0]).detach()
            loss = loss + self.loss_at(t, state) + (self.model["head"](state[0]) * target).mean()
        return loss, state

    def total_loss(self, is_cut):
        state, loss = self.start(), 0.0
        for t in range(STEPS):
            state = tuple(part.detach() for part in state) if is_cut(t) else state
            state = self.advance(t, state)
            value = self.model["head"](state[0])
            loss = loss + self.loss_at(t, state) + (value * value.detach()).mean()
        return loss


#: Programs, the steps before which the gradient of the state ends, and the number of lines that cut.
PROGRAMS = {
    "word_language_model": (RepackagedHidden, lambda t: t == WINDOW, 1),
    "Lightning": (SplitBatch, lambda t: t == WINDOW, 1),
    "CleanRL": (StateUnderNoGrad, lambda t: t == WINDOW, 2),
    "sb3-contrib": (StateInArrays, lambda t: t == WINDOW, 3),
    "TorchRL": (StateInTable, lambda t: t == WINDOW, 3),
    "one-step gradient": (OneStepGradient, lambda t: t == STEPS - 1, 3),
    "frozen target": (FrozenTarget, lambda t: t == WINDOW, 1),
}
