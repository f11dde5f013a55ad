"""The plan of a time Jacobian is data: which route, which way, in which pieces; made without computing anything."""

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

B, T, F, H = 3, 5, 3, 4


class Tagger(nn.Module):
    """Recurrent layers with a head at every step."""

    def __init__(self, outputs=2, layers=1, **options):
        super().__init__()
        self.rnn = nn.LSTM(F, H, num_layers=layers, batch_first=True, **options)
        self.head = nn.Linear(H * (2 if self.rnn.bidirectional else 1), outputs)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Feedback(nn.Module):
    """A cell that is fed what it said before, through a head."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(F + 2, H), nn.Linear(H, 2)

    def forward(self, x):
        h, y, said = x.new_zeros(len(x), H), x.new_zeros(len(x), 2), []
        for t in range(x.shape[1]):
            h = self.cell(torch.cat([x[:, t], y], 1), h)
            y = self.head(h)
            said.append(y)
        return torch.stack(said, 1)


@contextmanager
def planned(model, of="output", wrt="input", memory=2**31, **options):
    request = read_request(model, Batch(torch.randn(B, T, F)), (of, wrt), JacobianOptions(memory, **options), None)
    with open_network(request) as network:
        yield plan.make_plan(request.options, network)


@pytest.fixture
def nothing_computed(monkeypatch):
    for module, name in ((execute, "reverse"), (execute, "forward"), (composed, "reverse"), (sweeps, "reverse")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("swept"))


@pytest.mark.usefixtures("nothing_computed")
class TestRoutes:
    def test_one_recurrence_with_local_layers_around_it(self):
        with planned(Tagger(), at={"out_time": [4]}) as found:
            assert (found.parts[0].route, found.parts[0].mode) == ("direct", "reverse")
            assert found.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
            assert found.shape == (B, 1, 2, T, F)
            assert found.dtype == np.float32

    def test_few_features_and_many_units_go_forward(self):
        with planned(Tagger(outputs=40)) as found:
            assert (found.parts[0].route, found.parts[0].mode) == ("direct", "forward")

    def test_two_layers_are_composed(self):
        with planned(Tagger(layers=2)) as found:
            assert (found.parts[0].route, found.parts[0].mode) == ("composed", "reverse")
            assert found.network.path.recurrences == {0, 1}

    def test_feedback_is_left_to_the_framework(self):
        with planned(Feedback()) as found:
            assert found.parts[0].route == "uncut"

    def test_only_what_lies_on_the_path_is_gone_through(self):
        with planned(Tagger(layers=3), of="rnn[1].hidden", wrt="rnn[0].output") as found:
            assert found.network.path.recurrences == {1}
            assert found.parts[0].route == "direct"

    def test_both_directions_have_a_part_each(self):
        with planned(Tagger(bidirectional=True), of="rnn.hidden") as found:
            assert [dict(part.direction_index) for part in found.parts] == [{"direction": 0}, {"direction": 1}]
            assert {part.route for part in found.parts} == {"direct"}

    def test_it_prints(self):
        with planned(Tagger(), at={"out_time": [4, 1]}, mode="reverse") as found:
            head, part = str(found).splitlines()
        assert head.startswith("d output / d input: sample 3, out_time 2, out_unit 2, in_time 5, in_feature 3; ")
        assert part == "  direct, reverse: samples 0:3, outs 0:2, ins 0:5"


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("room", [500, 3000, 20_000])
@pytest.mark.parametrize(("layers", "mode"), [(1, "reverse"), (1, "forward"), (2, "reverse")])
def test_pieces_cover_everything_once(room, layers, mode, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_ROOM", room)
    with planned(Tagger(layers=layers), mode=mode) as whole:
        size = int(np.prod(whole.shape)) * 4
    with planned(Tagger(layers=layers), mode=mode, memory=size) as found:
        (part,) = found.parts
        covered = np.zeros((B, T, T), dtype=int)
        for piece in part.pieces:
            covered[piece.samples, piece.outs, piece.ins] += 1
    assert (covered == 1).all()
    assert room > 500 or len(part.pieces) > 1


@pytest.mark.usefixtures("nothing_computed")
def test_what_does_not_fit_is_refused_while_planning():
    with pytest.raises(rl.errors.TooLargeError), planned(Tagger(), memory=1000):
        pass
