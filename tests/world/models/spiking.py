"""Spiking neurons: states that a loop hands on, or that a neuron keeps in itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from programs import Program, WithHead, batch, program, replaced
from torch import nn
from torch.nn import functional


@program("snntorch", "Leaky, states in the loop")
def snntorch_leaky() -> Program:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(4, 6), snn.Leaky(beta=0.9)
            self.fc2, self.lif2 = nn.Linear(6, 2), snn.Leaky(beta=0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.lif1.init_leaky(), self.lif2.init_leaky()
            potentials = []
            for current in x.unbind(0):
                spikes, first = self.lif1(self.fc1(current), first)
                spikes, second = self.lif2(self.fc2(spikes), second)
                potentials.append(second)
            return torch.stack(potentials)

    return _spiking(Net())


@program("snntorch", "Leaky, states in the neurons")
def snntorch_hidden() -> Program:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(4, 6), snn.Leaky(beta=0.9, init_hidden=True)
            self.fc2, self.lif2 = nn.Linear(6, 2), snn.Leaky(beta=0.9, init_hidden=True, output=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lif1.reset_mem()
            self.lif2.reset_mem()
            return torch.stack([self.lif2(self.fc2(self.lif1(self.fc1(current))))[1] for current in x.unbind(0)])

    net = Net()
    spiking = _spiking(net)
    declared = partial(_declared, net.lif1, net.lif2)
    spiking.hints = {"state='self.mem')": declared, "rl.layers(model, x) says why": declared}
    return spiking


@contextmanager
def _declared(*neurons: nn.Module) -> Iterator[dict[str, Any]]:
    """Type the lines of the error for each neuron."""
    import rnnlens as rl

    with ExitStack() as stack:
        for neuron in neurons:
            stack.enter_context(rl.torch.cell(neuron, state="self.mem"))
        yield {}


@program("snntorch", "SLSTM")
def snntorch_slstm() -> Program:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slstm, self.head = snn.SLSTM(4, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            synapse, potential = self.slstm.init_slstm()
            outputs = []
            for current in x.unbind(0):
                _, synapse, potential = self.slstm(current, synapse, potential)
                outputs.append(self.head(potential))
            return torch.stack(outputs)

    return _spiking(Net())


@program("snntorch", "RSynaptic")
def snntorch_rsynaptic() -> Program:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)
            self.neuron = snn.RSynaptic(alpha=0.8, beta=0.9, linear_features=6)
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spikes, synapse, potential = self.neuron.init_rsynaptic()
            outputs = []
            for current in x.unbind(0):
                spikes, synapse, potential = self.neuron(self.fc(current), spikes, synapse, potential)
                outputs.append(self.head(potential))
            return torch.stack(outputs)

    return _spiking(Net())


@program("norse", "SequentialState of LIF cells")
def norse_sequential() -> Program:
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = norse.SequentialState(nn.Linear(4, 6), norse.LIFCell(), nn.Linear(6, 2), norse.LICell())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, outputs = None, []
            for current in x.unbind(0):
                output, state = self.layers(current, state)
                outputs.append(output)
            return torch.stack(outputs)

    return _spiking(Net())


@program("norse", "LSNNRecurrent")
def norse_lsnn() -> Program:
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lsnn, self.readout = norse.LSNNRecurrent(4, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spikes, _ = self.lsnn(x)
            return self.readout(spikes)

    net = Net()
    spiking = _spiking(net)
    spiking.hints = {"h = rl.torch.step(": partial(_by_step, net.lsnn)}
    return spiking


def _by_step(layer: Any) -> AbstractContextManager[dict[str, Any]]:
    """Write the step of a layer's loop as the error says."""
    import rnnlens as rl

    def step(x: torch.Tensor, state: Any, *weights: Any) -> Any:
        return rl.torch.step(lambda x, state: activation(x, state, *weights), x, state)

    activation = layer.activation
    return replaced(layer, "activation", step)


@program("norse", "LIFRecurrentCell in a loop")
def norse_lif_recurrent() -> Program:
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head, self.readout = norse.LIFRecurrentCell(4, 6), nn.Linear(6, 2), norse.LICell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = readout_state = None
            outputs = []
            for current in x.unbind(0):
                spikes, state = self.cell(current, state)
                output, readout_state = self.readout(self.head(spikes), readout_state)
                outputs.append(output)
            return torch.stack(outputs)

    return _spiking(Net())


def _spiking(model: nn.Module, dtype: torch.dtype = torch.float32) -> Program:
    """Return a program of currents with steps first, and potentials of every step."""
    model.to(dtype)
    return Program(
        model,
        x=3 * torch.rand(6, 5, 4, dtype=dtype),
        y=batch(6, 5, 2, dtype=dtype),
        loss=functional.mse_loss,
        input_axes=("time", "sample", "feature"),
        output_axes=("time", "sample", "unit"),
    )


@program("spikingjelly", "LIFNode, one step a call")
def spikingjelly_steps() -> Program:
    from spikingjelly.activation_based import functional as spiking
    from spikingjelly.activation_based import layer, neuron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                layer.Linear(4, 6), neuron.LIFNode(tau=2.0), layer.Linear(6, 2), neuron.LIFNode(tau=2.0)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spiking.reset_net(self)
            return torch.stack([self.layers(current) for current in x.unbind(0)])

    return _spiking(Net())


@program("spikingjelly", "LIFNode, all steps in one call")
def spikingjelly_multi_step() -> Program:
    from spikingjelly.activation_based import functional as spiking
    from spikingjelly.activation_based import layer, neuron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(layer.Linear(4, 6), neuron.LIFNode(tau=2.0), layer.Linear(6, 2))
            spiking.set_step_mode(self.layers, "m")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spiking.reset_net(self)
            return self.layers(x)

    return _spiking(Net())


@program("spikingjelly", "SpikingLSTM")
def spikingjelly_lstm() -> Program:
    from spikingjelly.activation_based import rnn

    return _spiking(WithHead(rnn.SpikingLSTM(4, 6, 1), 6))
