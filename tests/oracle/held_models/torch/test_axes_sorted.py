"""Models that sort their samples by length before the recurrent layer and restore the order after it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rnnlens as rl
from rnnlens.errors import UnsupportedError

X = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([2, 6, 4, 5])


class Sorting(nn.Module):
    def __init__(self, bidirectional, last, undone=True):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=bidirectional)
        self.head, self.last, self.undone = nn.Linear(8 if bidirectional else 4, 2), last, undone

    def forward(self, x, lengths):
        sorted_lengths, order = lengths.sort(descending=True)
        outputs, (hidden, _) = self.lstm(pack_padded_sequence(x[order], sorted_lengths, batch_first=True))
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])
        features = hidden.transpose(0, 1).flatten(1) if self.last else outputs
        return self.head(features[order.argsort()] if self.undone else features)


def by_autograd(model):
    """Return the Jacobian (sample, [out_time,] out_unit, in_time, in_feature) by autograd."""
    full = torch.autograd.functional.jacobian(lambda x: model(x, LENGTHS), X)
    return np.stack([full[i, ..., i, :, :].numpy() for i in range(len(X))])


@pytest.mark.parametrize(
    "options", [{}, {"measure": "norm"}, {"across": "mean"}, {"measure": "norm", "across": "mean"}]
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_jacobian_has_the_order_of_the_input(bidirectional, last, options):
    model = Sorting(bidirectional, last).double()
    expected = by_autograd(model)
    if "measure" in options:
        expected = np.sqrt((expected**2).sum((-3, -1)))
    if "across" in options:
        expected = expected.mean(0)
    jacobian = rl.jacobian(model, (X, LENGTHS), **options)
    np.testing.assert_allclose(jacobian, expected, rtol=0, atol=1e-14)
    assert jacobian.certificate.state == "passed"


def test_on_disk_and_of_an_inner_state(tmp_path):
    model = Sorting(False, False).double()
    jacobian = rl.jacobian(model, (X, LENGTHS), out=tmp_path / "jacobian.zarr")
    np.testing.assert_allclose(jacobian, by_autograd(model), rtol=0, atol=1e-14)
    state_jacobian = rl.jacobian(model, (X, LENGTHS), of="lstm.hidden")
    assert state_jacobian.certificate.state == "passed"
    for sample, length in enumerate(LENGTHS.tolist()):  # padding steps have no influence
        assert np.any(state_jacobian.values[sample, :, :, length - 1] != 0)
        assert not np.any(state_jacobian.values[sample, :, :, length:])


def test_samples_left_in_another_order_are_refused():
    with pytest.raises(UnsupportedError, match="returns its samples in another order than it takes them"):
        rl.jacobian(Sorting(False, False, undone=False).double(), (X, LENGTHS))


def test_another_batch_of_the_same_shapes_has_an_order_of_its_own():
    model = Sorting(True, True).double()
    for lengths in (LENGTHS, torch.tensor([6, 5, 4, 2]), torch.tensor([3, 3, 6, 1])):
        full = torch.autograd.functional.jacobian(lambda x, lengths=lengths: model(x, lengths), X)
        expected = np.stack([full[i, :, i].numpy() for i in range(4)])
        np.testing.assert_allclose(rl.jacobian(model, (X, lengths)), expected, rtol=0, atol=1e-14)
