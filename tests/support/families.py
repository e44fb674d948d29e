"""Tiny configs of every supported family: three layers, random weights, nothing downloaded."""

from transformers import AutoConfig, PreTrainedConfig

WINDOW = 8  # of native sliding layers

ALL = dict(vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ALL["initializer_range"] = 0.2  # attention far from uniform, so that a wrong one is seen
BLOCKS = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
SIZES = {**ALL, **BLOCKS, "max_position_embeddings": 256}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {**PLAIN, "partial_rotary_factor": 0.5}
GPT = dict(ALL, n_embd=64, n_layer=3, n_head=4, n_positions=256)
FEW = {**SIZES, "num_key_value_heads": 2}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)

FAMILIES: dict[str, dict] = {
    "gpt2": GPT,
    "gpt_neox": {**SIZES, "rope_parameters": PARTIAL},
    "gpt_bigcode": {**GPT, "multi_query": True},
    "opt": {
        **{k: v for k, v in SIZES.items() if k not in ("intermediate_size", "initializer_range")},
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "init_std": 0.2,
    },
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, **EXPERTS, "sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "qwen3_moe": {**GROUPED, **EXPERTS, "moe_intermediate_size": 32},
    "gemma": GROUPED,
    "gemma3_text": {
        **GROUPED,
        "query_pre_attn_scalar": 32,  # scores are scaled by 32^-½, not by head_dim^-½
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "phi": {**FEW, "rope_parameters": PARTIAL},
    "phi3": {**FEW, "original_max_position_embeddings": 256},
    "olmo2": FEW,
    "granite": {**FEW, "attention_multiplier": 0.1},
    "smollm3": {**FEW, "no_rope_layers": [1, 1, 0]},
    "stablelm": {**FEW, "rope_parameters": PARTIAL},
    "starcoder2": {**FEW, "sliding_window": None},
    "cohere": {**FEW, "logit_scale": 1.0},
    "glm4": {**GROUPED, "rope_parameters": PARTIAL},
    "apertus": {**FEW, "rope_parameters": PLAIN},
    "arcee": GROUPED,
    "cohere2": {**GROUPED, **SLIDING, "logit_scale": 1.0},
    "deepseek_v2": {**SIZES, "num_key_value_heads": 4, **ROUTED, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**SIZES, "num_key_value_heads": 4, **ROUTED, **LATENT, "first_k_dense_replace": 1},
    "ernie4_5": GROUPED,
    "exaone4": {**GROUPED, **SLIDING},
    "glm": {**GROUPED, "rope_parameters": PARTIAL},
    "glm4_moe": {**GROUPED, **ROUTED, "rope_parameters": PARTIAL},
    "helium": GROUPED,
    "hunyuan_v1_dense": GROUPED,
    "minimax_m2": {**GROUPED, **EXPERTS},
    "olmo": FEW,
    "olmo3": {**FEW, **SLIDING},
    "olmoe": {**FEW, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**FEW, **EXPERTS},
    "qwen2_moe": {**FEW, "num_experts": 4, "num_experts_per_tok": 2, **dict.fromkeys(EXPERT_SIZES, 32)},
    "seed_oss": GROUPED,
}

ALTERED: dict[str, dict] = {  # that cap their scores, or have learned sinks
    "gemma2": dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "vaultgemma": dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
}


def tiny_config(family: str, **overrides: object) -> PreTrainedConfig:
    """Build the config of a family's smallest member that has all its traits."""
    return AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
