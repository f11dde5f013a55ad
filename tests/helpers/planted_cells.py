"""Cells whose backward step is wrong by a factor, a fault that certificates have to detect."""

from rnnlens.recurrence.cells import SimpleRNN


def plant_scaled_gradient(monkeypatch, factor):
    """Multiply the gate gradients of SimpleRNN by ``factor`` for one test."""
    original = SimpleRNN.pull_back

    def scaled_pull_back(*args):
        gates, states, direct = original(*args)
        return gates * factor, states, direct

    monkeypatch.setattr(SimpleRNN, "pull_back", scaled_pull_back)
