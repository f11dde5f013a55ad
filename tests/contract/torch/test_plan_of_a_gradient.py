"""The plan of a gradient is data: where every tensor of a question is met, before anything is differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rnnlens.adapters.protocol import Batch, Port
from rnnlens.verbs.differentiation.plan import layers_inside, plan
from rnnlens.verbs.differentiation.pull import fits_one_capture
from rnnlens.verbs.differentiation.request import GradientArguments, read_request
from rnnlens.verbs.recurrent_layers import ReplayedLayers


class Net(nn.Module):
    """A bidirectional GRU, a loop of a cell, a linear layer."""

    def __init__(self):
        super().__init__()
        self.rnn, self.cell = nn.GRU(3, 4, bidirectional=True, batch_first=True), nn.GRUCell(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        y, _ = self.rnn(x)
        h = y.new_zeros(len(y), 4)
        for t in range(y.shape[1]):
            h = self.cell(y[:, t], h)
        return self.head(h)


def planned(of, wrt, **options):
    torch.manual_seed(0)
    model = Net()
    batch = Batch(torch.randn(2, 5, 3), torch.randn(2, 2), loss=nn.functional.mse_loss)
    request = GradientArguments(
        of, wrt, options.pop("at", {}), options.pop("reduce", None), **{"per_sample": False, **options}
    )
    whole = read_request(model, batch, request)
    question = whole.of_batch(batch, whole.target)
    inside = ReplayedLayers.capture_layers(question.adapter, model, batch, layers_inside(question))
    return question, plan(question, inside)


def places(found):
    return {place.name.text: place for place in found.wrt}


def test_states_and_gates_are_swept_and_all_else_is_the_frameworks():
    _, found = planned("loss", ["rnn.hidden", "rnn.gates", "head.output", "input", "rnn/kernel"])
    by_name = places(found)
    assert [name for name, place in by_name.items() if place.is_swept] == ["rnn.hidden", "rnn.gates"]
    assert [name for name, place in by_name.items() if place.is_free] == ["head.output", "input"]
    assert by_name["rnn.hidden"].ports == ()
    assert {port.direction for port in by_name["rnn.hidden"].upper_ports} == {"forward", "backward"}
    assert found.starts == [Port("loss")]


def test_a_weight_of_two_directions_is_two_of_the_frameworks():
    _, found = planned("loss", "rnn/recurrent_kernel")
    (ports,) = found.weights.values()
    assert len(ports) == 2
    assert list(ports) == found.ends
    assert all(port.kind == "weight" and port.layer == "rnn" for port in ports)


def test_states_of_a_loop_are_tensors_of_the_framework():
    _, found = planned("cell.final_hidden", ["cell.hidden", "cell.final_hidden"], reduce="sum")
    assert all(place.stepwise and not place.is_swept for place in (*found.leaves, *found.wrt))
    assert places(found)["cell.final_hidden"].upper_ports == (Port("state", "cell", key="ending"),)


def test_the_loss_is_taken_apart_by_sample_at_the_outputs():
    _, whole = planned("loss", "head/weight")
    _, shares = planned("loss", "head/weight", per_sample=True)
    assert whole.outputs == ()
    assert shares.outputs == (Port("output"),)
    assert Port("output") in shares.starts
    assert Port("output") in shares.ends


@pytest.mark.parametrize(
    ("of", "wrt", "options", "short"),
    [
        ("loss", ["rnn.hidden", "rnn.output"], {}, True),
        ("loss", ["rnn.hidden", "input"], {}, False),
        ("loss", "rnn.hidden", {"per_sample": True}, False),
        ("output", "rnn.hidden", {"reduce": "sum"}, False),
    ],
)
def test_the_short_way_is_for_the_loss_within_recurrent_layers(of, wrt, options, short):
    question, _ = planned(of, wrt, **options)
    assert fits_one_capture(question) is short
