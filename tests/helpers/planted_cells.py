"""Cells whose backward step is wrong by a factor, a fault that certificates have to detect."""

from rnnlens.recurrence.cells import SimpleRNN


def plant(monkeypatch, factor):
    """A SimpleRNN whose gate gradients are multiplied by ``factor``."""
    right = SimpleRNN.pull_back

    def wrong(*given):
        gates, states, own = right(*given)
        return gates * factor, states, own

    monkeypatch.setattr(SimpleRNN, "pull_back", wrong)
