"""Rate networks and dynamic neural fields, as packages of neuroscience have them."""

from __future__ import annotations

from typing import Any

import torch
from programs import Program, batch, program
from torch import nn
from torch.nn import functional


@program("neuralrnn", "CTRNN")
def neuralrnn_ctrnn() -> Program:
    from neuralrnn.models.ctrnn import CTRNNConfig, CTRNNModel

    config = CTRNNConfig(input_dim=3, latent_dim=6, output_dim=2, activation="tanh")
    return _outputs_in_a_container(CTRNNModel(config))


@program("neuralrnn", "EIRNN")
def neuralrnn_eirnn() -> Program:
    from neuralrnn.models.ctrnn import EIRNNConfig, EIRNNModel

    return _outputs_in_a_container(EIRNNModel(EIRNNConfig(input_dim=3, latent_dim=10, output_dim=2)))


def _outputs_in_a_container(model: nn.Module) -> Program:
    def loss(returned: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(returned.outputs, target)

    return Program(
        model,
        batch(5, 7, 3, dtype=torch.float32),
        batch(5, 7, 2, dtype=torch.float32),
        loss,
        output=lambda returned: returned.outputs,
        of="output[outputs]",
    )


@program("neuralfields", "NeuralField")
def neural_field() -> Program:
    from neuralfields import NeuralField

    model = NeuralField(input_size=3, hidden_size=9, output_size=2, conv_kernel_size=3)
    return _outputs_and_potentials(model)


@program("neuralfields", "SimpleNeuralField")
def simple_neural_field() -> Program:
    from neuralfields import SimpleNeuralField, pd_cubic

    model = SimpleNeuralField(input_size=3, output_size=2, potentials_dyn_fcn=pd_cubic)
    return _outputs_and_potentials(model)


def _outputs_and_potentials(model: nn.Module) -> Program:
    def loss(returned: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(returned[0], target)

    return Program(
        model,
        batch(5, 7, 3, dtype=torch.float32),
        batch(5, 7, 2, dtype=torch.float32),
        loss,
        output=lambda returned: returned[0],
        of="output[0]",
    )
