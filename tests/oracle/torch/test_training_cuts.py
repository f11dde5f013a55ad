"""``rl.torch.cuts``: planted cuts are found by line, and the gradients are those of backpropagation by hand."""

from __future__ import annotations

import inspect
import linecache
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

STEPS, UNITS = 12, 5


class Program:
    """A recurrence over 12 steps with a loss at each, trained in one of several ways; the cut is marked in its line."""

    def __init__(self, seed, window):
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"cell": nn.GRUCell(2, UNITS), "head": nn.Linear(UNITS, 1)}).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.x, self.y = torch.randn(3, STEPS, 2).double(), torch.randn(3, STEPS, 1).double()
        self.window = window

    def loss_at(self, t, h):
        return ((self.model["head"](h) - self.y[:, t]) ** 2).mean()

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def full(self, first=0, cut=()):
        """Return the gradients of backpropagation by hand, full but for the steps ``cut``; ``first``: of the losses."""
        h, total = torch.zeros(3, UNITS).double(), 0.0
        for t in range(STEPS):
            h = h.detach() if t in cut else h
            h = self.model["cell"](self.x[:, t], h)
            total = total + (self.loss_at(t, h) if t >= first else 0.0)
        return torch.autograd.grad(total, list(self.model.parameters()))

    def windows(self):
        h = torch.zeros(3, UNITS).double()
        for start in range(0, STEPS, self.window):
            if start:
                h = h.detach()  # cut
            loss = 0.0
            for t in range(start, min(start + self.window, STEPS)):
                h = self.model["cell"](self.x[:, t], h)
                loss = loss + self.loss_at(t, h)
            self.update(loss)

    def repackaged(self):
        def repackage(state):
            return tuple(part.data for part in state)  # cut

        state = (torch.zeros(3, UNITS).double(),)
        for start in range(0, STEPS, self.window):
            state = repackage(state) if start else state
            loss = 0.0
            for t in range(start, min(start + self.window, STEPS)):
                state = (self.model["cell"](self.x[:, t], state[0]),)
                loss = loss + self.loss_at(t, state[0])
            self.update(loss)

    def one_step_gradient(self):
        h, loss = torch.zeros(3, UNITS).double(), 0.0
        for t in range(STEPS):
            kept = h if t % self.window else h.detach()  # cut
            h = self.model["cell"](self.x[:, t], kept)
            loss = loss + self.loss_at(t, h)
        self.update(loss)

    def burn_in(self):
        h, loss = torch.zeros(3, UNITS).double(), 0.0
        with torch.no_grad():
            for t in range(self.window):
                h = self.model["cell"](self.x[:, t], h)  # cut
        for t in range(self.window, STEPS):
            h = self.model["cell"](self.x[:, t], h)
            loss = loss + self.loss_at(t, h)
        self.update(loss)

    def in_place(self):
        h, loss = torch.zeros(3, UNITS).double(), 0.0
        for t in range(STEPS):
            if t and t % self.window == 0:
                h = h * 1.0
                h.detach_()  # cut
            h = self.model["cell"](self.x[:, t], h)
            loss = loss + self.loss_at(t, h)
        self.update(loss)


WAYS = ("windows", "repackaged", "one_step_gradient", "burn_in", "in_place")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", range(1, 7))
def test_a_planted_cut_has_its_line_and_its_price(way, window):
    program = Program(window, window)
    before = [weight.clone() for weight in program.model.parameters()]
    found = rl.torch.cuts(getattr(program, way), program.model)
    assert all("# cut" in linecache.getline(cut.file, cut.line) for cut in found.cuts)
    assert len(found.cuts) == 1
    executions = {"burn_in": window, "one_step_gradient": (STEPS - 1) // window}.get(way, -(-STEPS // window) - 1)
    assert found.cuts[0].count == executions
    full = torch.cat([g.reshape(-1) for g in program.full(window if way == "burn_in" else 0)])
    for weight, kept in zip(program.model.parameters(), before, strict=True):
        assert torch.equal(weight, kept)
        assert weight.grad is None
    used = _gradient_in_use(program, way)
    assert found.price.norm_ratio == pytest.approx(float(used.norm() / full.norm()), rel=1e-10)
    assert found.price.cosine == pytest.approx(float(used @ full / used.norm() / full.norm()), rel=1e-10)
    assert found.by_window[1] == found.price
    assert set(found.by_weight) == dict(program.model.named_parameters()).keys()


def _gradient_in_use(program, way):
    """Return the sum of the gradients of the program's backward passes, with the weights held."""
    held = torch.optim.SGD(program.model.parameters(), 0.0)
    program.optimizer, total = held, torch.zeros(sum(p.numel() for p in program.model.parameters())).double()

    def update(loss):
        grads = torch.autograd.grad(loss, list(program.model.parameters()), allow_unused=True)
        total.add_(torch.cat([g.reshape(-1) for g in grads]))

    program.update = update
    getattr(program, way)()
    return total


@pytest.mark.parametrize("way", [way for way in WAYS if way != "burn_in"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_each_window_has_the_price_of_the_cuts_that_are_left(way, window):
    program = Program(window, window)
    found = rl.torch.cuts(getattr(program, way), program.model)
    full = torch.cat([g.reshape(-1) for g in program.full()])
    executed = range(window, STEPS, window)
    assert list(found.by_window) == [2**i for i in range(len(found.by_window))]
    assert max(found.by_window) * 2 >= len(executed)
    for every, price in found.by_window.items():
        used = torch.cat([g.reshape(-1) for g in program.full(cut=executed[::every])])
        assert price.norm_ratio == pytest.approx(float(used.norm() / full.norm()), rel=1e-10)
        assert price.cosine == pytest.approx(float(used @ full / used.norm() / full.norm()), rel=1e-10)


def test_longer_windows_come_closer_to_full_backpropagation():
    program = Program(0, 1)
    found = rl.torch.cuts(program.one_step_gradient, program.model)
    cosines = [price.cosine for price in found.by_window.values()]
    assert list(found.by_window) == [1, 2, 4, 8]
    assert cosines[-1] > cosines[0]
    assert "one_step" not in str(found)
    assert "kept = h if t % self.window else h.detach()" in str(found)


def test_a_step_without_cuts_says_so_and_leaves_all_as_it_was():
    program = Program(0, STEPS)
    program.model["drop"] = nn.Dropout(0.5)
    state = torch.random.get_rng_state()
    found = rl.torch.cuts(program.windows, program.model)
    assert found.cuts == []
    assert "No cut" in str(found)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_without_a_backward_pass_is_refused():
    program = Program(0, 3)
    with pytest.raises(rl.errors.InputError, match="calls no loss"):
        rl.torch.cuts(lambda: program.loss_at(0, torch.zeros(3, UNITS).double()), program.model)


def test_a_loss_that_is_detached_for_a_log_is_no_cut():
    program = Program(0, STEPS)
    kept = []
    program.update = lambda loss: (loss.backward(), kept.append(loss.detach().numpy()))
    assert rl.torch.cuts(program.windows, program.model).cuts == []
    assert np.isfinite(float(kept[0]))


@pytest.mark.parametrize("name", ["<stdin>", "<doctest page[0]>", "<ipython-input-1-abc>"])
def test_a_step_typed_at_a_prompt_has_its_cuts(name):
    typed = inspect.getsource(Program.one_step_gradient).replace("def one_step_gradient(self)", "def step(self)")
    names = {"torch": torch, "STEPS": STEPS, "UNITS": UNITS}
    exec(compile(textwrap.dedent(typed), name, "exec"), names)
    program = Program(0, 4)
    found = rl.torch.cuts(lambda: names["step"](program), program.model)
    assert [(cut.operation, cut.file, cut.line, cut.count) for cut in found.cuts] == [("detach", name, 4, 2)]
    assert f"detach in {name}, line 4, 2 times\n" in str(found)
