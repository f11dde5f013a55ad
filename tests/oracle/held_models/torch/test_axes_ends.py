"""The output of a recurrent layer, both directions, as either end of a time Jacobian, in torch's time-first layout."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H, CLASSES = 3, 5, 2, 6, 4


class TwoLayers(nn.Module):
    def __init__(self, **options):
        super().__init__()
        directions = 2 if options.get("bidirectional") else 1
        self.lower, self.upper = nn.GRU(F, H, **options), nn.LSTM(directions * H, H, **options)
        self.head = nn.Linear(directions * H, CLASSES)

    def forward(self, x):
        return self.above(self.lower(x)[0])

    def above(self, y):
        return self.head(self.upper(y)[0])


def sample_jacobians(function, x):
    """Return Jacobians (sample, out step, out unit, in step, in feature) of a function of (step, sample, feature)."""
    full = torch.autograd.functional.jacobian(function, x)
    return torch.stack([full[:, b, :, :, b] for b in range(B)]).numpy()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
def test_outputs_of_recurrent_layers_as_ends(layers, bidirectional):
    torch.manual_seed(0)
    model, x = (
        TwoLayers(num_layers=layers, bidirectional=bidirectional).double(),
        torch.randn(T, B, F, dtype=torch.float64),
    )
    suffix = "[1]" if layers == 2 else ""
    lower = model.lower(x)[0].detach()
    upper = model.upper(lower)[0].detach()
    for arguments, expected in (
        ({"wrt": f"lower{suffix}.output"}, sample_jacobians(model.above, lower)),
        ({"wrt": f"upper{suffix}.output"}, sample_jacobians(model.head, upper)),
        ({"of": f"lower{suffix}.output"}, sample_jacobians(lambda v: model.lower(v)[0], x)),
        (
            {"of": f"upper{suffix}.output", "wrt": f"lower{suffix}.output"},
            sample_jacobians(lambda v: model.upper(v)[0], lower),
        ),
    ):
        jacobian = rl.jacobian(model, x, **arguments)
        assert jacobian.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
        assert jacobian.shape == expected.shape, arguments
        assert np.abs(jacobian.values - expected).max() <= 1e-12, arguments
