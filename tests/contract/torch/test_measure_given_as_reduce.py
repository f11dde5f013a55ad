"""``rl.jacobian`` with a measure such as "norm" in ``reduce=`` raises an error that names ``measure=``."""

import numpy as np
import pytest
import torch

import rnnlens as rl
from rnnlens.errors import InputError


@pytest.mark.parametrize("measure", ["norm", "spectral", "abs_mean"])
def test_a_measure_in_the_place_of_a_contraction_is_told_where_it_belongs(measure):
    with pytest.raises(InputError, match=f"measure='{measure}'"):
        rl.jacobian(torch.nn.LSTM(2, 3), np.zeros((4, 1, 2), "float32"), reduce=measure)
