"""Tiny configs of every family whose layers have keys of their own in part: four layers, random weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.method.checkpoint import put_student_into
from linearizer.teacher.devices import compute_anywhere
from linearizer.teacher.inspect_model import inspect_model
from tests.support.families import EXPERTS, GROUPED, LATENT, ROUTED, WINDOW
from tests.support.models import allocation_of

SOURCE = Source("tiny", None, "org/tiny", "c0ffee", False, Weights((), 1234, 5678), {"license": "mit"})

LAYERS = {**GROUPED, "num_hidden_layers": 4, "max_position_embeddings": 512}
ALTERNATING = ["linear_attention", "full_attention"] * 2
CONVOLVING = ["conv", "full_attention"] * 2
DELTA = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=ALTERNATING,
)
SHARED = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]  # the last three read the first two
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=16, mamba_d_conv=4)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
KIMI = dict(linear_head_dim=8, linear_num_heads=4, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32)

HYBRIDS: dict[str, dict] = {
    "qwen3_5_text": {**LAYERS, **DELTA},
    "qwen3_5_moe_text": {**LAYERS, **DELTA, **MIXTURE},
    "qwen3_next": {**LAYERS, **DELTA, **MIXTURE, "decoder_sparse_step": 1},
    "nemotron_h": {
        **{name: size for name, size in LAYERS.items() if name != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "full_attention"],
        **dict(ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=1, chunk_size=16, n_routed_experts=4),
        **dict(num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32),
    },
    "kimi_linear": {
        **LAYERS,
        **LATENT,
        **KIMI,
        "num_key_value_heads": 4,
        "layer_types": ALTERNATING,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "bamba": {**LAYERS, **MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**LAYERS, **MAMBA, **EXPERTS, "shared_intermediate_size": 32, "layer_types": ALTERNATING},
    "olmo_hybrid": {**LAYERS, **DELTA},
    "lfm2": {**LAYERS, "layer_types": CONVOLVING, "conv_L_cache": 3},
    "lfm2_moe": {**LAYERS, **MIXTURE, "layer_types": CONVOLVING, "conv_L_cache": 3, "num_dense_layers": 1},
    "falcon_h1": {**LAYERS, **MAMBA, "mamba_d_ssm": 128},
    "lfm3": {
        **LAYERS,
        "layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "bailing_hybrid": {
        **LAYERS,
        **ROUTED,
        **{**LATENT, "q_lora_rank": None},
        "num_key_value_heads": 4,
        **dict(head_dim=8, num_local_experts=4, layer_types=ALTERNATING, first_k_dense_replace=1),
    },
    "gemma3n_text": {
        **LAYERS,
        **dict(vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, laurel_rank=8, num_kv_shared_layers=3),
        **dict(num_hidden_layers=5, layer_types=SHARED, sliding_window=WINDOW, activation_sparsity_pattern=[0.0] * 5),
    },
    "gemma4_text": {
        **LAYERS,
        **dict(vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, num_kv_shared_layers=3),
        **dict(num_hidden_layers=5, layer_types=SHARED, sliding_window=WINDOW, global_head_dim=32),
    },
    "zaya": {**LAYERS, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
}


def tiny_hybrid(family: str, **overrides: object) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**HYBRIDS[family], **overrides})


def teacher_of(family, **overrides):
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(tiny_hybrid(family, **overrides), dtype=torch.float32)
    compute_anywhere(teacher)
    return teacher.eval().requires_grad_(False)


def student_of(family, heads, **overrides):
    layers = inspect_model(SOURCE, tiny_hybrid(family, **overrides)).layers
    return put_student_into(teacher_of(family, **overrides), layers, allocation_of(layers, heads, 2), exact_tokens=5)
