"""The shapes of published models: sizes, kinds of layers and flags, as far as they decide whether a model is served.

Each has the number of its layers whose keys and values grow with the text, or the reason why it is not served. What is
not stated has the defaults of transformers, which belong to a published model of the kind.
"""

from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class Published:
    """A model of the Hub: its kind, the result of inspection, and its config."""

    kind: str
    grows: int | str  # layers, or a part of the reason why there are none
    config: dict

    def build(self) -> PreTrainedConfig:
        return AutoConfig.for_model(self.kind, **self.config)


def shape(hidden, layers, heads, kv_heads, inner, **more):
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner)
    return {**sizes, "num_key_value_heads": kv_heads, **more}


def text(**config):
    return {"text_config": config}


def at(count, places, kind, other):
    return [kind if index in places else other for index in range(count)]


FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
BLOCKS = {"M": LINEAR, "-": "mlp", "*": FULL}
E2B = [FULL if index % 5 == 4 else "sliding_attention" for index in range(35)]
SMALLER = dict(attention_k_eq_v=True, num_global_key_value_heads=4)  # keys that are values, too
PER_LAYER = dict(num_kv_shared_layers=20, hidden_size_per_layer_input=256)
HALF_ROTARY = dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 12, 12], partial_rotary_factor=0.5)
CHOSEN, UNSEEN = "choose or compress the tokens they attend to", "does not hand its attention"
RECURRENT, ALIBI = "all of its layers are recurrent", "ALiBi"

FP8 = dict(quant_method="fp8", weight_block_size=[128, 128])
DOTS = dict(n_routed_experts=128, num_experts_per_tok=6, first_k_dense_replace=1, n_shared_experts=2, head_dim=128)
GREEDY = dict(q_lora_rank=None, topk_method="greedy", num_experts_per_tok=6, n_routed_experts=64)

PUBLISHED: dict[str, Published] = {
    name: Published(*row)
    for name, row in {
        "openai-community/gpt2": ("gpt2", 12, {}),
        "EleutherAI/pythia-1.4b": ("gpt_neox", 24, shape(2048, 24, 16, 16, 8192)),
        "facebook/opt-1.3b": ("opt", 24, dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=32)),
        "bigcode/starcoder2-3b": ("starcoder2", 30, shape(3072, 30, 24, 2, 12288, sliding_window=None)),
        "stabilityai/stablelm-2-1_6b": ("stablelm", 24, shape(2048, 24, 32, 32, 5632)),
        "HuggingFaceTB/SmolLM2-135M": ("llama", 30, shape(576, 30, 9, 3, 1536)),
        "HuggingFaceTB/SmolLM3-3B": ("smollm3", 36, shape(2048, 36, 16, 4, 11008)),
        "meta-llama/Llama-3.2-1B": ("llama", 16, shape(2048, 16, 32, 8, 8192, head_dim=64)),
        "meta-llama/Llama-3.1-8B": ("llama", 32, shape(4096, 32, 32, 8, 14336)),
        "meta-llama/Llama-3.3-70B-Instruct": ("llama", 80, shape(8192, 80, 64, 8, 28672)),
        "meta-llama/Llama-4-Scout-17B-16E": (
            "llama4",
            12,
            text(**shape(5120, 48, 40, 8, 8192, head_dim=128, num_local_experts=16)),
        ),
        "mistralai/Mistral-7B-v0.3": ("mistral", 32, shape(4096, 32, 32, 8, 14336, sliding_window=None)),
        "mistralai/Mixtral-8x7B-v0.1": ("mixtral", 32, shape(4096, 32, 32, 8, 14336, sliding_window=None)),
        "mistralai/Mistral-Small-3.1-24B-Base-2503": (
            "mistral3",
            40,
            text(**shape(5120, 40, 32, 8, 32768, head_dim=128), model_type="mistral", sliding_window=None),
        ),
        "Qwen/Qwen2.5-7B": ("qwen2", 28, shape(3584, 28, 28, 4, 18944)),
        "Qwen/Qwen3-0.6B": ("qwen3", 28, shape(1024, 28, 16, 8, 3072, head_dim=128)),
        "Qwen/Qwen3-8B": ("qwen3", 36, shape(4096, 36, 32, 8, 12288, head_dim=128)),
        "Qwen/Qwen3-30B-A3B": (
            "qwen3_moe",
            48,
            shape(2048, 48, 32, 4, 6144, head_dim=128, num_experts=128, moe_intermediate_size=768),
        ),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", 12, shape(2048, 48, 16, 2, 5120, head_dim=256)),
        "Qwen/Qwen3.5 (dense)": ("qwen3_5", 8, {}),
        "Qwen/Qwen3.5 (mixture)": ("qwen3_5_moe", 10, {}),
        "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", 28, text(**shape(3584, 28, 28, 4, 18944))),
        "Qwen/Qwen3-VL-8B-Instruct": ("qwen3_vl", 36, text(**shape(4096, 36, 32, 8, 12288, head_dim=128))),
        "Qwen/Qwen3-VL-30B-A3B-Instruct": (
            "qwen3_vl_moe",
            48,
            text(**shape(2048, 48, 32, 4, 6144, head_dim=128, num_experts=128, moe_intermediate_size=768)),
        ),
        "Qwen/Qwen2-Audio-7B": ("qwen2_audio", 32, {}),
        "google/gemma-2b": ("gemma", 18, shape(2048, 18, 8, 1, 16384, head_dim=256)),
        "google/gemma-2-2b": ("gemma2", 13, {}),
        "google/vaultgemma-1b": ("vaultgemma", 13, {}),
        "google/gemma-3-1b-it": ("gemma3_text", 4, shape(1152, 26, 4, 1, 6912, head_dim=256)),
        "google/gemma-3-4b-it": ("gemma3", 5, text(**shape(2560, 34, 8, 4, 10240, head_dim=256))),
        "google/gemma-3n-E4B-it": ("gemma3n", 4, {}),
        "google/gemma-4-E2B-it": ("gemma4", 3, text(**shape(1536, 35, 8, 1, 6144, layer_types=E2B, **PER_LAYER))),
        "google/gemma-4-31B-it": (
            "gemma4",
            10,
            text(**shape(5376, 60, 32, 16, 21504, hidden_size_per_layer_input=0, **SMALLER)),
        ),
        "google/paligemma-3b-pt-224": ("paligemma", "reads a prompt in both directions", {}),
        "google/recurrentgemma-2b": ("recurrent_gemma", "keep their states in the model", {}),
        "openai/gpt-oss-20b": (
            "gpt_oss",
            12,
            dict(num_hidden_layers=24, num_local_experts=32, quantization_config=dict(quant_method="mxfp4")),
        ),
        "microsoft/phi-2": ("phi", 32, shape(2560, 32, 32, 32, 10240)),
        "microsoft/Phi-3-mini-4k-instruct": ("phi3", 32, shape(3072, 32, 32, 32, 8192, sliding_window=None)),
        "microsoft/phi-4": ("phi3", 40, shape(5120, 40, 40, 10, 17920)),
        "microsoft/Phi-4-mini-instruct": ("phi3", 32, shape(3072, 32, 24, 8, 8192)),
        "microsoft/Phi-4-multimodal-instruct": ("phi4_multimodal", "no text tower of its own", {}),
        "microsoft/Phi-3.5-MoE-instruct": ("phimoe", 32, {"sliding_window": None}),
        "deepseek-ai/DeepSeek-V2-Lite": (
            "deepseek_v2",
            27,
            shape(2048, 27, 16, 16, 10944, **GREEDY),
        ),
        "deepseek-ai/DeepSeek-V3": ("deepseek_v3", 61, dict(quantization_config=FP8)),
        "deepseek-ai/DeepSeek-V3.2": ("deepseek_v32", CHOSEN, {}),
        "deepseek-ai/DeepSeek-V4": ("deepseek_v4", CHOSEN, {}),
        "moonshotai/Kimi-K2.5": ("kimi_k25", 61, text(model_type="deepseek_v3")),
        "moonshotai/Kimi-Linear-48B-A3B-Instruct": ("kimi_linear", 6, {}),
        "zai-org/GLM-4-9B-0414": ("glm4", 40, shape(4096, 40, 32, 2, 13696, head_dim=128)),
        "zai-org/GLM-4.5-Air": ("glm4_moe", 46, {}),
        "zai-org/GLM-4.1V-9B-Thinking": ("glm4v", 40, text(rope_parameters=HALF_ROTARY)),
        "zai-org/GLM-5": ("glm_moe_dsa", CHOSEN, {}),
        "MiniMaxAI/MiniMax-Text-01": ("minimax", "a cache of their own", {}),
        "MiniMaxAI/MiniMax-M2": ("minimax_m2", 62, dict(quantization_config=FP8)),
        "nvidia/Nemotron-H-8B-Base-8K": ("nemotron_h", 4, dict(layers_block_type=[BLOCKS[x] for x in NEMOTRON])),
        "ibm-granite/granite-3.3-2b-base": ("granite", 40, shape(2048, 40, 32, 8, 8192)),
        "ibm-granite/granite-4.0-h-tiny": (
            "granitemoehybrid",
            4,
            {
                **shape(1536, 40, 12, 4, 512, num_local_experts=64, num_experts_per_tok=6, mamba_n_heads=48),
                **dict(mamba_d_head=64, mamba_d_state=128, layer_types=at(40, (5, 15, 25, 35), FULL, LINEAR)),
            },
        ),
        "tiiuae/Falcon-H1-0.5B-Base": (
            "falcon_h1",
            36,
            shape(1024, 36, 8, 2, 2048, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64),
        ),
        "tiiuae/falcon-7b": ("falcon", UNSEEN, {}),
        "LiquidAI/LFM2-1.2B": (
            "lfm2",
            6,
            shape(2048, 16, 32, 8, 12288, layer_types=at(16, (2, 5, 8, 10, 12, 14), FULL, CONV)),
        ),
        "LiquidAI/LFM2-8B-A1B": (
            "lfm2_moe",
            6,
            shape(2048, 24, 32, 8, 7168, layer_types=at(24, (2, 6, 10, 14, 18, 21), FULL, CONV)),
        ),
        "LiquidAI/LFM2-VL-1.6B": (
            "lfm2_vl",
            6,
            text(
                model_type="lfm2",
                **shape(2048, 16, 32, 8, 12288, layer_types=at(16, (2, 5, 8, 10, 12, 14), FULL, CONV)),
            ),
        ),
        "ai21labs/Jamba-v0.1": ("jamba", "several tokens at once", {}),
        "ibm-ai-platform/Bamba-9B-v1": ("bamba", 3, dict(attn_layer_indices=[9, 18, 27], mamba_d_state=128)),
        "Zyphra/Zamba2-2.7B": ("zamba2", "share one attention module", {}),
        "Zyphra/ZAYA1": ("zaya", 40, {}),
        "allenai/OLMo-2-1124-7B": ("olmo2", 32, shape(4096, 32, 32, 32, 11008)),
        "allenai/Olmo-3-7B": ("olmo3", 8, shape(4096, 32, 32, 32, 11008)),
        "allenai/Olmo-Hybrid-7B": ("olmo_hybrid", 8, {}),
        "CohereLabs/c4ai-command-r7b-12-2024": ("cohere2", 8, shape(4096, 32, 32, 8, 14336)),
        "CohereLabs/aya-vision-8b": (
            "aya_vision",
            8,
            {
                **text(model_type="cohere2", **shape(4096, 32, 32, 8, 14336)),
                "vision_config": dict(
                    model_type="siglip_vision_model",
                    hidden_size=1152,
                    intermediate_size=4304,
                    num_hidden_layers=27,
                    num_attention_heads=16,
                    image_size=364,
                    patch_size=14,
                ),
            },
        ),
        "baidu/ERNIE-4.5-0.3B-PT": ("ernie4_5", 18, shape(1024, 18, 16, 2, 3072, head_dim=128)),
        "LGAI-EXAONE/EXAONE-4.0-1.2B": (
            "exaone4",
            30,
            shape(2048, 30, 32, 8, 4096, sliding_window=None, layer_types=[FULL] * 30),
        ),
        "ByteDance-Seed/Seed-OSS-36B-Base": ("seed_oss", 64, shape(5120, 64, 80, 8, 27648, head_dim=128)),
        "swiss-ai/Apertus-8B-2509": ("apertus", 32, shape(4096, 32, 32, 8, 21504)),
        "HuggingFaceTB/SmolVLM-500M-Instruct": (
            "smolvlm",
            32,
            text(model_type="llama", **shape(960, 32, 15, 5, 2560)),
        ),
        "HuggingFaceM4/Idefics3-8B-Llama3": ("idefics3", 32, text(model_type="llama", **shape(4096, 32, 32, 8, 14336))),
        "OpenGVLab/InternVL3-8B-hf": ("internvl", 28, text(model_type="qwen2", **shape(3584, 28, 28, 4, 18944))),
        "llava-hf/llava-1.5-7b-hf": ("llava", 32, text(model_type="llama")),
        "XiaomiMiMo/MiMo-V2-Flash": ("mimo_v2_flash", 9, {}),
        "tencent/Hunyuan-7B-Instruct": ("hunyuan_v1_dense", 32, shape(4096, 32, 32, 8, 14336, head_dim=128)),
        "tencent/Hunyuan-A13B-Instruct": (
            "hunyuan_v1_moe",
            32,
            shape(4096, 32, 32, 8, 3072, head_dim=128, num_experts=64, moe_topk=8, moe_intermediate_size=3072),
        ),
        "nvidia/Minitron-4B-Base": ("nemotron", 32, shape(3072, 32, 24, 8, 9216, head_dim=128)),
        "rednote-hilab/dots.llm1.base": (
            "dots1",
            62,
            shape(4096, 62, 32, 32, 10944, moe_intermediate_size=1408, **DOTS),
        ),
        "databricks/dbrx-base": (
            "dbrx",
            40,
            dict(d_model=6144, n_heads=48, n_layers=40, attn_config=dict(clip_qkv=8, kv_n_heads=8, rope_theta=5e5)),
        ),
        "bigscience/bloom-560m": ("bloom", ALIBI, {}),
        "mosaicml/mpt-7b": ("mpt", ALIBI, {}),
        "state-spaces/mamba-2.8b-hf": ("mamba", RECURRENT, {}),
        "google/t5-v1_1-base": ("t5", "encoder–decoder", {}),
    }.items()
}
