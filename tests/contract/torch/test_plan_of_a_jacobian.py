"""The plan of a time Jacobian is data (route, mode, pieces), made without computing any Jacobian."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Batch
from rnnlens.recurrence import jacobian as sweeps
from rnnlens.verbs.time_jacobian import composed, execute, plan
from rnnlens.verbs.time_jacobian.network import open_network
from rnnlens.verbs.time_jacobian.request import JacobianOptions, read_request

pytestmark = pytest.mark.check

B, T, F, H = 3, 5, 3, 4


class Tagger(nn.Module):
    """LSTM layers with a linear head at every step."""

    def __init__(self, outputs=2, layers=1, **options):
        super().__init__()
        self.rnn = nn.LSTM(F, H, num_layers=layers, batch_first=True, **options)
        self.head = nn.Linear(H * (2 if self.rnn.bidirectional else 1), outputs)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Feedback(nn.Module):
    """GRU cell that is fed its previous output, computed by a linear head."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(F + 2, H), nn.Linear(H, 2)

    def forward(self, x):
        h, y, outputs = x.new_zeros(len(x), H), x.new_zeros(len(x), 2), []
        for t in range(x.shape[1]):
            h = self.cell(torch.cat([x[:, t], y], 1), h)
            y = self.head(h)
            outputs.append(y)
        return torch.stack(outputs, 1)


@contextmanager
def plan_jacobian(model, of="output", wrt="input", memory=2**31, **options):
    request = read_request(model, Batch(torch.randn(B, T, F)), (of, wrt), JacobianOptions(memory, **options), None)
    with open_network(request) as network:
        yield plan.make_plan(request.options, network)


@pytest.fixture
def no_computation(monkeypatch):
    for module, name in ((execute, "reverse"), (execute, "forward"), (composed, "reverse"), (sweeps, "reverse")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("swept"))


@pytest.mark.usefixtures("no_computation")
class TestRoutes:
    def test_one_recurrence_with_local_layers_around_it(self):
        with plan_jacobian(Tagger(), at={"out_time": [4]}) as jacobian_plan:
            assert (jacobian_plan.parts[0].route, jacobian_plan.parts[0].mode) == ("direct", "reverse")
            assert jacobian_plan.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
            assert jacobian_plan.shape == (B, 1, 2, T, F)
            assert jacobian_plan.dtype == np.float32

    def test_few_features_and_many_units_go_forward(self):
        with plan_jacobian(Tagger(outputs=40)) as jacobian_plan:
            assert (jacobian_plan.parts[0].route, jacobian_plan.parts[0].mode) == ("direct", "forward")

    def test_two_layers_are_composed(self):
        with plan_jacobian(Tagger(layers=2)) as jacobian_plan:
            assert (jacobian_plan.parts[0].route, jacobian_plan.parts[0].mode) == ("composed", "reverse")
            assert jacobian_plan.network.path.recurrences == {0, 1}

    def test_feedback_is_left_to_the_framework(self):
        with plan_jacobian(Feedback()) as jacobian_plan:
            assert jacobian_plan.parts[0].route == "uncut"

    def test_only_what_lies_on_the_path_is_gone_through(self):
        with plan_jacobian(Tagger(layers=3), of="rnn[1].hidden", wrt="rnn[0].output") as jacobian_plan:
            assert jacobian_plan.network.path.recurrences == {1}
            assert jacobian_plan.parts[0].route == "direct"

    def test_both_directions_have_a_part_each(self):
        with plan_jacobian(Tagger(bidirectional=True), of="rnn.hidden") as jacobian_plan:
            assert [dict(part.direction_index) for part in jacobian_plan.parts] == [{"direction": 0}, {"direction": 1}]
            assert {part.route for part in jacobian_plan.parts} == {"direct"}

    def test_it_prints(self):
        with plan_jacobian(Tagger(), at={"out_time": [4, 1]}, mode="reverse") as jacobian_plan:
            header, part_line = str(jacobian_plan).splitlines()
        assert header.startswith("d output / d input: sample 3, out_time 2, out_unit 2, in_time 5, in_feature 3; ")
        assert part_line == "  direct, reverse: samples 0:3, outs 0:2, ins 0:5"


@pytest.mark.usefixtures("no_computation")
@pytest.mark.parametrize("least_room", [500, 3000, 20_000])
@pytest.mark.parametrize(("layers", "mode"), [(1, "reverse"), (1, "forward"), (2, "reverse")])
def test_pieces_cover_everything_once(least_room, layers, mode, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_ROOM", least_room)
    with plan_jacobian(Tagger(layers=layers), mode=mode) as default_plan:
        size = int(np.prod(default_plan.shape)) * 4
    with plan_jacobian(Tagger(layers=layers), mode=mode, memory=size) as jacobian_plan:
        (part,) = jacobian_plan.parts
        covered = np.zeros((B, T, T), dtype=int)
        for piece in part.pieces:
            covered[piece.samples, piece.outs, piece.ins] += 1
    assert (covered == 1).all()
    assert least_room > 500 or len(part.pieces) > 1


@pytest.mark.usefixtures("no_computation")
def test_what_does_not_fit_is_refused_while_planning():
    with pytest.raises(rl.errors.TooLargeError), plan_jacobian(Tagger(), memory=1000):
        pass
