"""Spiking neurons: states that a loop hands on, or that a neuron keeps in itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
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

    program = _spiking(Net())
    program.hints = dict.fromkeys(STEP_HINTS, _multi_step_by_step)
    return program


#: What an error says where a loop over a function's own equations is to be written with ``rl.torch.step``.
STEP_HINTS = ("h = rl.torch.step(", "rl.layers(model, x) says why")


def _multi_step_by_step() -> AbstractContextManager[dict[str, Any]]:
    """Write the loop of a spikingjelly neuron over its own equations as the error says."""
    from spikingjelly.activation_based.neuron import LIFNode

    import rnnlens as rl

    def loop(self: Any, x_seq: torch.Tensor) -> torch.Tensor:
        def step(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (spikes,), (v,) = self.single_step_functional_forward((x,), (v,))
            return spikes, v

        v, spikes = torch.zeros_like(x_seq[0]), []
        for x in x_seq:
            spike, v = rl.torch.step(step, x, v)
            spikes.append(spike)
        return torch.stack(spikes)

    return replaced(LIFNode, "multi_step_forward", loop)


def _sinabs_by_step() -> AbstractContextManager[dict[str, Any]]:
    """Write the step of sinabs's loops as the error says."""
    import rnnlens as rl

    lif: Any = importlib.import_module("sinabs.layers.functional.lif")
    original = lif.lif_forward_single

    def single(input_data: torch.Tensor, state: dict[str, Any], **constants: Any) -> tuple[Any, dict[str, Any]]:
        def step(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spikes, after = original(input_data=x, state={"v_mem": v}, **constants)
            return spikes, after["v_mem"]

        spikes, v = rl.torch.step(step, input_data, state["v_mem"])
        return spikes, {**state, "v_mem": v}

    return replaced(lif, "lif_forward_single", single)


def _rockpool_by_step() -> AbstractContextManager[dict[str, Any]]:
    """Write the loop of rockpool's neurons without recurrent weights and noise as the error says."""
    from rockpool.nn.modules import LIFTorch

    import rnnlens as rl

    def loop(self: Any, data: torch.Tensor) -> torch.Tensor:
        def step(x: torch.Tensor, current: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
            current = (current + x) * self.beta.expand(self.size_out, 1)[:, 0]
            v = v * self.alpha + current + self.bias
            spikes = self.spike_generation_fn(v, self.threshold, self.learning_window, self.max_spikes_per_dt)
            return spikes, (current, v - spikes * self.threshold)

        current, v, spikes = torch.zeros_like(data[:, 0]), torch.zeros_like(data[:, 0]), []
        for x in data.unbind(1):
            spike, (current, v) = rl.torch.step(step, x, current, v)
            spikes.append(spike)
        return torch.stack(spikes, 1)

    return replaced(LIFTorch, "forward", loop)


@program("spikingjelly", "SpikingLSTM")
def spikingjelly_lstm() -> Program:
    from spikingjelly.activation_based import rnn

    return _spiking(WithHead(rnn.SpikingLSTM(4, 6, 1), 6))


@program("snntorch", "Synaptic")
def snntorch_synaptic() -> Program:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.neuron, self.head = nn.Linear(4, 6), snn.Synaptic(alpha=0.8, beta=0.9), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            synapse, potential = self.neuron.init_synaptic()
            outputs = []
            for current in x.unbind(0):
                _, synapse, potential = self.neuron(self.fc(current), synapse, potential)
                outputs.append(self.head(potential))
            return torch.stack(outputs)

    return _spiking(Net())


@program("sinabs", "LIFRecurrent")
def sinabs_recurrent() -> Program:
    from sinabs.layers import LIFRecurrent

    return _samples_first(LIFRecurrent(tau_mem=20.0, rec_connect=nn.Linear(6, 6)), _sinabs_by_step)


@program("sinabs", "ExpLeak")
def sinabs_leak() -> Program:
    from sinabs.layers import ExpLeak

    return _samples_first(ExpLeak(tau_mem=20.0), _sinabs_by_step)


@program("rockpool", "LIFTorch")
def rockpool_lif() -> Program:
    from rockpool.nn.modules import LIFTorch

    return _samples_first(LIFTorch((6, 6), tau_mem=0.02, tau_syn=0.02, dt=0.001, has_rec=False), _rockpool_by_step)


def _samples_first(neurons: nn.Module, by_step: Callable[[], Any]) -> Program:
    """Return a program of a layer of neurons between two linear layers, of (sample, time, feature), in float32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.neurons, self.head = nn.Linear(4, 6), neurons, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for reset in ("reset_states", "reset_state"):
                getattr(self.neurons, reset, lambda: None)()
            returned = self.neurons(self.fc(x))
            return self.head(returned[0] if isinstance(returned, tuple) else returned)

    hints = dict.fromkeys(STEP_HINTS, by_step)
    return Program(
        Net(), 3 * torch.rand(5, 6, 4), batch(5, 6, 2, dtype=torch.float32), functional.mse_loss, hints=hints
    )
