import numpy as np
import torch
from torch import nn

import rnnlens as rl

torch.manual_seed(0)
x = torch.from_numpy(np.random.default_rng(0).normal(size=(1024, 60, 1)).astype("float32"))
y = x[:, 5]  # the answer stands 54 steps before the last one
train, held_out = slice(512), slice(512, None)


class Recall(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])


model = Recall()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(8):
    for batch in torch.randperm(512).split(64):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[train][batch]), y[train][batch]).backward()
        optimizer.step()

print(rl.diagnose(model, x[held_out], y[held_out], loss=nn.functional.mse_loss))
