"""Packages of recurrent layers: liquid networks, minimal and light units, state-space layers, xLSTM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from programs import Program, WithHead, batch, program, replaced
from torch import nn
from torch.nn import functional


@program("ncps", "CfC")
def ncps_cfc() -> Program:
    from ncps.torch import CfC

    return _sequence(WithHead(CfC(3, 6), 6))


@program("ncps", "CfC with a wiring")
def ncps_wired_cfc() -> Program:
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    return _sequence(WithHead(CfC(3, AutoNCP(8, 2)), 2))


@program("ncps", "CfC with mixed memory")
def ncps_mixed_cfc() -> Program:
    from ncps.torch import CfC

    return _sequence(WithHead(CfC(3, 6, mixed_memory=True), 6), dtype=torch.float32)


@program("ncps", "LTC with a wiring")
def ncps_ltc() -> Program:
    from ncps.torch import LTC
    from ncps.wirings import AutoNCP

    return _sequence(WithHead(LTC(3, AutoNCP(8, 2)), 2), dtype=torch.float32)


@program("minGRU-pytorch", "minGRU")
def min_gru() -> Program:
    from minGRU_pytorch import minGRU

    return _sequence(WithHead(minGRU(3), 3), hints={"heinsen_associative_scan_log": _log_scan_declared})


@program("minGRU-pytorch", "minGRU, expanded")
def min_gru_expanded() -> Program:
    from minGRU_pytorch import minGRU

    return _sequence(
        WithHead(minGRU(3, expansion_factor=2.0), 3), hints={"heinsen_associative_scan_log": _log_scan_declared}
    )


@contextmanager
def _log_scan_declared() -> Iterator[dict[str, Any]]:
    """Declare the package's scan of logarithms by ``rl.torch.scan``, as the error says for a scan of (a, b)."""
    import importlib

    import rnnlens as rl

    module = importlib.import_module("minGRU_pytorch.minGRU")
    scan = module.heinsen_associative_scan_log

    def of_numbers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return scan(a.log(), b.log())

    module.heinsen_associative_scan_log = lambda a, b: rl.torch.scan(a.exp(), b.exp(), function=of_numbers)
    try:
        yield {}
    finally:
        module.heinsen_associative_scan_log = scan


@program("light-recurrent-unit-pytorch", "LightRecurrentUnit")
def light_recurrent_unit() -> Program:
    from light_recurrent_unit_pytorch import LightRecurrentUnit

    return _sequence(WithHead(LightRecurrentUnit(3, depth=2), 3))


@program("light-recurrent-unit-pytorch", "GatedLightRecurrentUnit")
def gated_light_recurrent_unit() -> Program:
    from light_recurrent_unit_pytorch import GatedLightRecurrentUnit

    return _sequence(WithHead(GatedLightRecurrentUnit(3), 3))


@program("conv-lstm", "ConvLSTM on frames")
def conv_lstm() -> Program:
    from conv_lstm import ConvLSTM

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ConvLSTM(input_dim=1, hidden_dim=2, kernel_size=3)
            self.head = nn.Conv2d(2, 1, 1)

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            states = self.layer(frames)[0][0]
            return torch.stack([self.head(state) for state in states.unbind(1)], 1)

    return Program(
        Net().double(),
        batch(3, 4, 1, 4, 5),
        batch(3, 4, 1, 4, 5),
        functional.mse_loss,
        input_axes=("sample", "time", "feature", "height", "width"),
        output_axes=("sample", "time", "channel", "height", "width"),
    )


@program("xlstm", "xLSTMBlockStack, mLSTM")
def xlstm_mlstm() -> Program:
    return _sequence(WithHead(_xlstm(slstm_at=[]), 8), features=8, dtype=torch.float32)


@program("xlstm", "xLSTMBlockStack, sLSTM")
def xlstm_slstm() -> Program:
    return _sequence(WithHead(_xlstm(slstm_at=[0]), 8), features=8, dtype=torch.float32)


def _xlstm(slstm_at: list[int]) -> nn.Module:
    from xlstm import (
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMBlockStack,
        xLSTMBlockStackConfig,
    )

    mlstm = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2))
    slstm = sLSTMBlockConfig(
        slstm=sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4),
        feedforward=FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
    )
    return xLSTMBlockStack(
        xLSTMBlockStackConfig(
            mlstm_block=mlstm,
            slstm_block=slstm,
            context_length=7,
            num_blocks=2,
            embedding_dim=8,
            slstm_at=slstm_at,
        )
    )


@program("mambapy", "Mamba, parallel scan")
def mambapy_parallel() -> Program:
    from mambapy.mamba import Mamba, MambaConfig

    return _sequence(WithHead(Mamba(MambaConfig(d_model=4, n_layers=2, d_state=3)), 4), features=4)


@program("mambapy", "Mamba, step by step")
def mambapy_sequential() -> Program:
    from mambapy.mamba import Mamba, MambaConfig

    return _sequence(WithHead(Mamba(MambaConfig(d_model=4, n_layers=1, d_state=3, pscan=False)), 4), features=4)


@program("s5-pytorch", "S5Block")
def s5_block() -> Program:
    from s5 import S5Block

    return _sequence(WithHead(S5Block(4, 6, bidir=False), 4), features=4, dtype=torch.float32)


@program("s5-pytorch", "S5Block, bidirectional")
def s5_both_ways() -> Program:
    from s5 import S5Block

    hints = dict.fromkeys(("(rl.torch.scan)", "outside of torch.vmap"), _s5_by_scans)
    return _sequence(WithHead(S5Block(4, 6, bidir=True), 4), features=4, dtype=torch.float32, hints=hints)


def _s5_by_scans() -> AbstractContextManager[dict[str, Any]]:
    """Write the two scans of a bidirectional S5 on the whole batch as the errors say."""
    from s5.s5_model import S5

    import rnnlens as rl

    def forward(self: Any, signal: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        layer = self.seq
        b_tilde, c_tilde = layer.get_BC_tilde()
        a, b = layer.discretize(layer.Lambda, b_tilde, torch.exp(layer.log_step))
        u = signal.to(a.dtype) @ b.mT
        forth = rl.torch.scan(a.expand_as(u), u, name="forth")
        back = rl.torch.scan(a.expand_as(u), u.flip(1), name="back").flip(1)
        return (torch.cat([forth, back], -1) @ c_tilde.mT).real + layer.D * signal

    return replaced(S5, "forward", forward)


@program("lru-pytorch", "LRU")
def lru() -> Program:
    from LRU_pytorch import LRU

    return _sequence(WithHead(LRU(in_features=3, out_features=4, state_features=5), 4), dtype=torch.float32)


def _sequence(model: nn.Module, features: int = 3, dtype: torch.dtype = torch.float64, **known: Any) -> Program:
    """Return a program of sequences with samples first, and an output at every step."""
    if dtype is torch.float64:  # .float() would discard the imaginary parts of complex parameters
        model.double()
    return Program(model, batch(5, 7, features, dtype=dtype), batch(5, 7, 2, dtype=dtype), functional.mse_loss, **known)


@program("torchrecurrent", "PeepholeLSTM")
def peephole_lstm() -> Program:
    from torchrecurrent import PeepholeLSTM

    return _sequence(WithHead(PeepholeLSTM(3, 5, batch_first=True), 5), dtype=torch.float32)


@program("torchrecurrent", "IndRNN")
def ind_rnn() -> Program:
    from torchrecurrent import IndRNN

    return _sequence(WithHead(IndRNN(3, 5, batch_first=True), 5), dtype=torch.float32)


@program("torchrecurrent", "FastGRNN")
def fast_grnn() -> Program:
    from torchrecurrent import FastGRNN

    return _sequence(WithHead(FastGRNN(3, 5, batch_first=True), 5), dtype=torch.float32)


@program("cerebral-lstm", "CerebralLSTM, steps first")
def cerebral_lstm() -> Program:
    from cerebral_lstm import CerebralLSTM

    model = WithHead(CerebralLSTM(3, 5), 5)
    steps = ("time", "sample")
    return Program(
        model,
        batch(7, 5, 3, dtype=torch.float32),
        batch(7, 5, 2, dtype=torch.float32),
        functional.mse_loss,
        input_axes=(*steps, "feature"),
        output_axes=(*steps, "unit"),
    )
