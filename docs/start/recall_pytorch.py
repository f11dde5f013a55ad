import numpy as np
import torch
from torch import nn

import rnnlens as rl

torch.manual_seed(0)
x = torch.from_numpy(np.random.default_rng(0).normal(size=(512, 20, 1)).astype("float32"))
y = x[:, 5]  # what is asked for at the end came in at step 5, 15 steps from the end


class Recall(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out[:, -1])


model = Recall()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    for batch in torch.randperm(512).split(64):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()

loss = nn.functional.mse_loss  # called as loss(output, y)
trace = rl.trace(model, x[:64], y[:64], loss=loss)
print(trace)
print(rl.diagnose(model, x, y, loss=loss))
rl.plot.gradient_flow(trace).save("gradient.png")
