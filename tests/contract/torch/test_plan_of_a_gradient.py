"""The plan of a gradient is data: how each tensor's gradient is obtained, before anything is differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rnnlens.adapters.protocol import Batch, Port
from rnnlens.verbs.differentiation.plan import layers_inside, plan
from rnnlens.verbs.differentiation.pull import fits_one_capture
from rnnlens.verbs.differentiation.request import GradientArguments, read_request
from rnnlens.verbs.recurrent_layers import ReplayedLayers

pytestmark = pytest.mark.check


class Net(nn.Module):
    """Model of a bidirectional GRU, a GRU cell in a loop, and a linear layer."""

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


def plan_gradient(of, wrt, **options):
    torch.manual_seed(0)
    model = Net()
    batch = Batch(torch.randn(2, 5, 3), torch.randn(2, 2), loss=nn.functional.mse_loss)
    arguments = GradientArguments(
        of, wrt, options.pop("at", {}), options.pop("reduce", None), **{"per_sample": False, **options}
    )
    full_request = read_request(model, batch, arguments)
    question = full_request.of_batch(batch, full_request.target)
    inner_layers = ReplayedLayers.capture_layers(question.adapter, model, batch, layers_inside(question))
    return question, plan(question, inner_layers)


def accesses_by_name(gradient_plan):
    return {access.name.text: access for access in gradient_plan.wrt}


def test_states_and_gates_are_swept_and_all_else_is_the_frameworks():
    _, gradient_plan = plan_gradient("loss", ["rnn.hidden", "rnn.gates", "head.output", "input", "rnn/kernel"])
    by_name = accesses_by_name(gradient_plan)
    assert [name for name, access in by_name.items() if access.is_swept] == ["rnn.hidden", "rnn.gates"]
    assert [name for name, access in by_name.items() if access.is_free] == ["head.output", "input"]
    assert by_name["rnn.hidden"].ports == ()
    assert {port.direction for port in by_name["rnn.hidden"].upper_ports} == {"forward", "backward"}
    assert gradient_plan.starts == [Port("loss")]


def test_a_weight_of_two_directions_is_two_of_the_frameworks():
    _, gradient_plan = plan_gradient("loss", "rnn/recurrent_kernel")
    (ports,) = gradient_plan.weights.values()
    assert len(ports) == 2
    assert list(ports) == gradient_plan.ends
    assert all(port.kind == "weight" and port.layer == "rnn" for port in ports)


def test_states_of_a_loop_are_tensors_of_the_framework():
    _, gradient_plan = plan_gradient("cell.final_hidden", ["cell.hidden", "cell.final_hidden"], reduce="sum")
    assert all(access.stepwise and not access.is_swept for access in (*gradient_plan.leaves, *gradient_plan.wrt))
    assert accesses_by_name(gradient_plan)["cell.final_hidden"].upper_ports == (Port("state", "cell", key="ending"),)


def test_the_loss_is_taken_apart_by_sample_at_the_outputs():
    _, batch_plan = plan_gradient("loss", "head/weight")
    _, sample_plan = plan_gradient("loss", "head/weight", per_sample=True)
    assert batch_plan.outputs == ()
    assert sample_plan.outputs == (Port("output"),)
    assert Port("output") in sample_plan.starts
    assert Port("output") in sample_plan.ends


@pytest.mark.parametrize(
    ("of", "wrt", "options", "fits"),
    [
        ("loss", ["rnn.hidden", "rnn.output"], {}, True),
        ("loss", ["rnn.hidden", "input"], {}, False),
        ("loss", "rnn.hidden", {"per_sample": True}, False),
        ("output", "rnn.hidden", {"reduce": "sum"}, False),
    ],
)
def test_the_short_way_is_for_the_loss_within_recurrent_layers(of, wrt, options, fits):
    question, _ = plan_gradient(of, wrt, **options)
    assert fits_one_capture(question) is fits
