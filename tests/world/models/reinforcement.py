"""Reinforcement learning: recurrent policies, whose steps of all environments lie folded in one axis."""

from __future__ import annotations

from typing import Any

import torch
from programs import Program, batch, program
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
