"""Random arguments to each verb on a torch model give a result or one clear error, in bounded time and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hostile import diagnosis_targets, faults, run_calls, verb_targets
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.top = nn.Linear(4, 2)

    def forward(self, x):
        return self.top(self.lstm(x)[0])


FOREIGN = {
    "requires grad": lambda: torch.ones(2, 5, 3, requires_grad=True),
    "bfloat16": lambda: torch.ones(2, 5, 3, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(2, 5, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 5, 3).to_sparse(),
    "long": lambda: torch.ones(2, 5, 3, dtype=torch.long),
    "complex tensor": lambda: torch.ones(2, 5, 3, dtype=torch.complex64),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "loader": lambda: DataLoader(TensorDataset(torch.ones(4, 5, 3), torch.ones(4, 5, 2)), batch_size=2),
    "data set": lambda: TensorDataset(torch.ones(4, 5, 3)),
    "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)]),
    "module": lambda: nn.Linear(3, 2),
    "empty model": nn.Sequential,
    "double": lambda: nn.LSTM(3, 4, batch_first=True).double(),
    "meta model": lambda: nn.LSTM(3, 4, device="meta"),
    "loss class": lambda: nn.MSELoss,
    "loss": nn.MSELoss,
    "unreduced loss": lambda: nn.MSELoss(reduction="none"),
}


def make_cases(tmp_path):
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4")
    return verb_targets(Net(), x, np.zeros((2, 5, 2), "f4"), nn.functional.mse_loss, tmp_path)


@pytest.mark.parametrize("seed", [0])
def test_every_call_ends_in_a_result_or_in_one_error_of_ours(seed, tmp_path):
    outcomes = run_calls(make_cases(tmp_path), FOREIGN, 350, seed)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > 35  # many calls must give a result


def test_every_diagnosis_ends_in_a_result_or_in_one_error_of_ours(tmp_path):
    model, x, y = (make_cases(tmp_path)[1].good[name]() for name in ("model", "x", "y"))
    outcomes = run_calls(diagnosis_targets(model, x, y), FOREIGN, 160, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > 20


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_so_do_thousands_of_diagnoses(seed, tmp_path):
    model, x, y = (make_cases(tmp_path)[1].good[name]() for name in ("model", "x", "y"))
    assert not faults(run_calls(diagnosis_targets(model, x, y), FOREIGN, 1500, seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_so_do_thousands(seed, tmp_path):
    assert not faults(run_calls(make_cases(tmp_path), FOREIGN, 2000, seed))


def test_hostile_calls_leave_the_model_and_the_process_as_they_were(tmp_path):
    cases = make_cases(tmp_path)
    model = cases[0].good["model"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training_flags = [module.training for module in model.modules()]
    hook_counts = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    random_state = torch.get_rng_state()
    run_calls(cases, {}, 150, 9)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == training_flags
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hook_counts
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
