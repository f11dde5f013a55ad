"""A torch model made of a forward function and its parts, and random float64 inputs for it."""

import torch
from torch import nn


class Model(nn.Module):
    """A module with the given forward function and submodules."""

    def __init__(self, run, **submodules):
        super().__init__()
        self.run = run
        for name, module in submodules.items():
            setattr(self, name, module)

    def forward(self, *x):
        return self.run(self, *x)


def make_model(run, **submodules):
    torch.manual_seed(0)
    return Model(run, **submodules).double()


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
