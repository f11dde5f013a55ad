"""Following ``model`` through ``rl.jacobian``, a reader opens few files, and none of them from two places."""

import functools
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens import verbs

VERBS = Path(verbs.__file__).parent
MOST_FILES = 9


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def holds(value, model, depth=4):
    """Whether a value is the model, or has it: in a container, a partial call, or an object of a class of ours."""
    if value is model:
        return True
    if depth == 0 or isinstance(value, (str, int, float, torch.Tensor, nn.Module)):
        return False
    if isinstance(value, functools.partial):
        inner = [*value.args, *value.keywords.values()]
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif type(value).__module__.startswith("rnnlens.verbs"):
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else []
    else:
        inner = []
    return any(holds(one, model, depth - 1) for one in inner)


def way_of(model, call):
    """Files below ``verbs/`` in which a function of ours is called with the model, by the files that it is called from.

    Counted is every call of a function, method, property or generator whose arguments or closure have the model, as
    ``holds`` says, from the first line of the verb to its last, the certificate included. The file that it is called
    from is that of the nearest function below ``verbs/`` that is still running. What runs within an adapter, within
    other packages of ours and on arrays alone is not counted.
    """
    entered = defaultdict(set)

    def place(frame):
        path = Path(frame.f_code.co_filename)
        return path.relative_to(VERBS).as_posix() if path.is_relative_to(VERBS) else None

    def listen(frame, event, argument):
        file = place(frame) if event == "call" else None
        if file is None or not any(holds(value, model) for value in frame.f_locals.values()):
            return
        caller = frame.f_back
        while caller is not None and place(caller) is None:
            caller = caller.f_back
        entered[file].add(None if caller is None else place(caller))

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file: callers - {file} for file, callers in entered.items()}


ENDS = {
    "input to output": {},
    "state to state": {"of": "rnn.hidden", "wrt": "rnn.cell"},
    "input to state": {"of": "rnn.cell"},
    "norm": {"reduce": "norm"},
}


@pytest.mark.parametrize("ends", ENDS)
def test_the_model_is_followed_through_few_files_each_entered_from_one(ends):
    model = Tagger()
    with rl.options(certify="always"):
        way = way_of(model, lambda: rl.jacobian(model, torch.randn(2, 5, 3), **ENDS[ends]))
    assert {"jacobian.py", "time_jacobian/request.py", "time_jacobian/network.py"} <= set(way), "nothing was counted"
    assert {file: callers for file, callers in way.items() if len(callers) > 1} == {}
    assert len(way) <= MOST_FILES, sorted(way)
