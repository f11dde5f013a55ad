"""Tiny Hugging Face models with whole-sequence layers, built from configurations without a download.

The weights are large enough that the recurrence matters: with the library's initialisation its part of the output, and
with it an error in it, would vanish in rounding.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as hf

VOCABULARY = 23

_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 3, "mamba_n_groups": 2, "mamba_expand": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
_KIMI = {"linear_head_dim": 4, "linear_num_heads": 3, "head_dim": 8, "mlp_layer_types": ["dense", "dense"]}

#: By family: the kind of recurrence in results, the stem of the Hugging Face class names, and configuration options.
MODELS = {
    "mamba": ("mamba", "Mamba", {"state_size": 4, "time_step_rank": 4}),
    "falcon_mamba": ("mamba", "FalconMamba", {"state_size": 4, "time_step_rank": 4}),
    "jamba": (
        "mamba",
        "Jamba",
        {**_ATTENTION, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4}
        | {"mamba_dt_rank": 4, "expert_layer_period": 10, "expert_layer_offset": 9},
    ),
    "zamba": (
        "mamba",
        "Zamba",
        {**_ATTENTION, "mamba_d_state": 4, "mamba_dt_rank": 4, "n_mamba_heads": 2}
        | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3}
        | {"attention_head_dim": 16, "num_key_value_heads": 2},
    ),
    "mamba2": (
        "mamba2",
        "Mamba2",
        {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    ),
    "zamba2": (
        "mamba2",
        "Zamba2",
        {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 8}
        | {"mamba_ngroups": 1, "num_attention_heads": 2, "chunk_size": 8, "num_mem_blocks": 1, "hybrid_layer_ids": [1]},
    ),
    "bamba": ("mamba2", "Bamba", {**_ATTENTION, **_MAMBA2, "attn_layer_indices": [1], "mamba_chunk_size": 8}),
    "nemotron_h": (
        "mamba2",
        "NemotronH",
        {**_ATTENTION, "hybrid_override_pattern": "M*", "head_dim": 8, "ssm_state_size": 4, "mamba_num_heads": 4}
        | {"mamba_head_dim": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "falcon_h1": (
        "mamba2",
        "FalconH1",
        {**_ATTENTION, **_MAMBA2, "mamba_d_ssm": 32, "mamba_chunk_size": 8, "head_dim": 8},
    ),
    "granitemoehybrid": (
        "mamba2",
        "GraniteMoeHybrid",
        {**_ATTENTION, **_MAMBA2, "layer_types": ["mamba", "attention"], "mamba_chunk_size": 8, "num_local_experts": 0}
        | {"shared_intermediate_size": 16},
    ),
    "qwen3_next": (
        "gated_delta",
        "Qwen3Next",
        {**_ATTENTION, **_DELTA, "head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1},
    ),
    "olmo_hybrid": ("gated_delta", "OlmoHybrid", {**_ATTENTION, **_DELTA}),
    "kimi_linear": ("kimi_delta", "KimiLinear", {"num_attention_heads": 2, "num_key_value_heads": 2, **_KIMI}),
    "recurrent_gemma": (
        "rg_lru",
        "RecurrentGemma",
        {**_ATTENTION, "lru_width": 16, "attention_window_size": 32, "head_dim": 8, "num_hidden_layers": 3},
    ),
    "rwkv": ("rwkv", "Rwkv", {"context_length": 64, "attention_hidden_size": 16}),
    "xlstm": (
        "mlstm",
        "xLSTM",
        {"num_heads": 2, "chunk_size": 8, "pad_token_id": 0},
    ),
    "minimax": (
        "lightning",
        "MiniMax",
        {**_ATTENTION, "head_dim": 8, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["linear_attention", "full_attention"], "experts_implementation": "eager"},
    ),
}

_KINDS = [kind for kind, *_ in MODELS.values()]

#: The families as test cases: the first of each kind of recurrence runs always, the others only with `full`.
CASES = [
    pytest.param(name, marks=() if _KINDS.index(_KINDS[index]) == index else pytest.mark.full)
    for index, name in enumerate(MODELS)
]


def build(name: str, *, seed: int = 0, scale: float = 0.3, **options: object) -> torch.nn.Module:
    """Return a causal language model of a family in evaluation mode."""
    _, class_stem, family_options = MODELS[name]
    common = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = getattr(hf, f"{class_stem}Config")(**{**common, "pad_token_id": 0, **family_options, **options})
    torch.manual_seed(seed)
    model = getattr(hf, f"{class_stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2 and not key.endswith("A_log"):
                weight.normal_(0.0, scale)
        if name == "rwkv":
            model(tokens(1, 2))  # RWKV's first evaluation pass rescales the weights
    return model


def tokens(samples: int = 2, steps: int = 40, seed: int = 0) -> torch.Tensor:
    """Return token ids (sample, time) without the padding token 0."""
    return torch.randint(1, VOCABULARY, (samples, steps), generator=torch.Generator().manual_seed(seed))
