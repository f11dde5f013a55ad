"""The arguments and calls that error messages suggest run and return gradients."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check


class Ids(nn.Module):
    """A model of token ids, embedded all at once or step by step in a loop."""

    def __init__(self, stepwise, library):
        super().__init__()
        self.emb, self.stepwise, self.library = nn.Embedding(7, 3), stepwise, library
        self.cell = nn.GRUCell(3, 4) if stepwise else nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids, embedded=None):
        if not self.stepwise:
            return self.head(self.cell(self.emb(ids) if embedded is None else embedded)[0][:, -1])
        h = torch.zeros(len(ids), 4, dtype=self.head.weight.dtype)
        for t in range(ids.shape[1]):
            h = self.cell(self.emb(ids[:, t]) if embedded is None else embedded[:, t], h)
            if self.library == "scaled":
                h = h * 0.9
        return self.head(h)


@pytest.mark.parametrize(("stepwise", "kind"), [(False, "plain"), (True, "plain"), (True, "scaled")])
def test_what_to_differentiate_by_instead_of_ids(stepwise, kind):
    model = Ids(stepwise, kind).double()
    ids = torch.randint(0, 7, (3, 5))
    with pytest.raises(rl.errors.InputError) as error:
        rl.jacobian(model, ids)
    name = re.search(r'wrt="([^"]+)"', str(error.value))[1]
    assert name == "emb.output"
    jacobian = rl.jacobian(model, ids, wrt=name)

    def function(vectors):
        return model(vectors[None, :, 0].long(), vectors[None])[0]

    expected = [torch.autograd.functional.jacobian(function, v).numpy() for v in model.emb(ids).detach()]
    np.testing.assert_allclose(jacobian, np.stack(expected), atol=1e-12)
    with pytest.raises(rl.errors.DisconnectedError) as error:
        rl.gradients(model, ids, of="output", reduce="sum", wrt="input")
    suggestion = re.search(r"try: +(.+)", str(error.value))[1]
    gradients = eval(suggestion, {"rl": rl, "model": model, "x": ids})
    assert np.abs(gradients.values).max() > 0
