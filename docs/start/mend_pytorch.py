import numpy as np
import torch
from torch import nn

import rnnlens as rl

x = torch.from_numpy(np.random.default_rng(0).normal(size=(768, 20, 1)).astype("float32"))
y = x[:, 5]  # the answer stands 14 steps before the last one
train, held_out = slice(512), slice(512, None)


class Recall(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gru = nn.GRU(1, 24, **options)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out[:, -1])


def trained(**options):
    torch.manual_seed(0)
    model = Recall(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        for batch in torch.randperm(512).split(64):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[train][batch]), y[train][batch]).backward()
            optimizer.step()
    return model


def examine(name, model):
    loss = nn.functional.mse_loss(model(x[held_out]), y[held_out]).item()
    print(f"{name}: loss {loss:.2f} on held-out samples; a constant has {y[held_out].var().item():.2f}")
    print(rl.diagnose(model, x[held_out], y[held_out], loss=nn.functional.mse_loss))


examine("as written", trained())
mended = trained(batch_first=True)
examine("mended", mended)
gradient = rl.trace(mended, x[held_out], y[held_out], loss=nn.functional.mse_loss)["gru"].input_grad
rl.plot.input_map(gradient, x[held_out]).mark(5).save("mended.svg")
