"""Reinforcement learning: recurrent policies, whose steps of all environments lie folded in one axis."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from programs import Program, WithHead, batch, program, replaced
from torch import nn
from torch.nn import functional


@program("sb3-contrib", "MlpLstmPolicy")
def recurrent_ppo() -> Program:
    import gymnasium as gym
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    import rnnlens as rl

    space = gym.spaces.Box(-5, 5, (3,))
    policy = RecurrentActorCriticPolicy(space, gym.spaces.Discrete(2), lambda _: 1e-3, lstm_hidden_size=6, net_arch=[5])

    def values(observations: torch.Tensor) -> torch.Tensor:
        sequences, steps, features = observations.shape
        state = (torch.zeros(1, sequences, 6), torch.zeros(1, sequences, 6))
        starts = torch.zeros(sequences * steps)
        flat = observations.reshape(-1, features)
        value, _log_prob, _entropy = policy.evaluate_actions(
            flat, torch.zeros(sequences * steps), RNNStates(state, state), starts
        )
        return value.reshape(sequences, steps, 1)

    model: Any = rl.torch.model(values, policy)
    return Program(
        model,
        batch(4, 6, 3, dtype=torch.float32),
        batch(4, 6, 1, dtype=torch.float32),
        functional.mse_loss,
        call=values,
        modules=(policy,),
    )


@program("tianshou", "Recurrent")
def tianshou_recurrent() -> Program:
    from tianshou.utils.net.common import Recurrent

    return Program(
        Recurrent(layer_num=2, state_shape=3, action_shape=2, hidden_layer_size=5),
        batch(4, 6, 3, dtype=torch.float32),
        batch(4, 2, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned[0], target),
        output_axes=("sample", "unit"),
        output=lambda returned: returned[0],
        of="output[0]",
    )


@program("tianshou", "RecurrentCritic")
def tianshou_critic() -> Program:
    from tianshou.utils.net.continuous import RecurrentCritic

    actions = batch(4, 2, dtype=torch.float32)
    critic = RecurrentCritic(layer_num=1, state_shape=(3,), action_shape=(2,), hidden_layer_size=5)
    return Program(
        critic,
        batch(4, 6, 3, dtype=torch.float32),
        batch(4, 1, dtype=torch.float32),
        functional.mse_loss,
        output_axes=("sample", "unit"),
        given=lambda x: {"obs": x, "act": actions},
        call=lambda x: critic(x, actions),
        wrt="input[obs]",
    )


@program("torchrl", "LSTM in Python")
def torchrl_lstm() -> Program:
    from torchrl.modules.tensordict_module.rnn import LSTM

    import rnnlens as rl

    cell = LSTM._lstm_cell

    def by_step(x: Any, h: Any, c: Any, *weights: Any) -> Any:
        return rl.torch.step(lambda x, h, c: cell(x, h, c, *weights), x, h, c)

    return _own_loop(LSTM(3, 6), "_lstm_cell", by_step)


@program("torchrl", "GRU in Python")
def torchrl_gru() -> Program:
    from torchrl.modules.tensordict_module.rnn import GRU

    import rnnlens as rl

    cell = GRU._gru_cell

    def by_step(x: Any, h: Any, *weights: Any) -> Any:
        return rl.torch.step(lambda x, h: cell(x, h, *weights), x, h)

    return _own_loop(GRU(3, 6), "_gru_cell", by_step)


def _own_loop(layer: nn.Module, method: str, by_step: Any) -> Program:
    """Return a program of a layer that loops over its own equations; the step is written as the error says."""
    model, hint = WithHead(layer, 6), partial(replaced, type(layer), method, staticmethod(by_step))
    hints: Any = dict.fromkeys(("h = rl.torch.step(", "rl.layers(model, x) says why"), hint)
    x, y = batch(4, 6, 3, dtype=torch.float32), batch(4, 6, 2, dtype=torch.float32)
    return Program(model, x, y, functional.mse_loss, hints=hints)


@program("torchrl", "LSTMModule, episodes that begin within the rollout")
def torchrl_lstm_module() -> Program:
    from torchrl.modules import LSTMModule

    return _of_tensordict(LSTMModule(input_size=3, hidden_size=6, in_key="observation", out_key="embed"))


@program("torchrl", "GRUModule, episodes that begin within the rollout")
def torchrl_gru_module() -> Program:
    from torchrl.modules import GRUModule

    return _of_tensordict(GRUModule(input_size=3, hidden_size=6, in_key="observation", out_key="embed"))


def _of_tensordict(recurrent: nn.Module) -> Program:
    """Return a program of a module of tensor dictionaries and a head; two episodes begin within the rollout."""
    from tensordict import TensorDict
    from torchrl.modules import set_recurrent_mode

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = recurrent, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
            data = TensorDict({"observation": x, "is_init": begins}, batch_size=x.shape[:2])
            with set_recurrent_mode(True):
                embedded: torch.Tensor = self.recurrent(data)["embed"]
            return self.head(embedded)

    begins = torch.zeros(4, 6, 1, dtype=torch.bool)
    begins[0, 3] = begins[2, 2] = True
    net = Net()
    return Program(
        net,
        batch(4, 6, 3, dtype=torch.float32),
        batch(4, 6, 2, dtype=torch.float32),
        functional.mse_loss,
        call=lambda x: net(x, begins),
        given=lambda x: {"x": x, "begins": begins},
        wrt="input[x]",
    )
