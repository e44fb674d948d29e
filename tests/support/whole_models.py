"""Tiny whole models of every supported family that reads pictures: random weights, nothing downloaded."""

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from linearizer.hub.models import find_model
from linearizer.method.checkpoint import put_student_into
from linearizer.teacher.devices import compute_anywhere
from linearizer.teacher.inspect_model import inspect_model
from tests.support.families import FAMILIES, GROUPED
from tests.support.hybrids import HYBRIDS, SOURCE
from tests.support.models import allocation_of

EYE = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
QWEN = dict(depth=1, hidden_size=32, num_heads=2, patch_size=8, intermediate_size=32)
ROPE = dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e4)
HALF = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4, partial_rotary_factor=0.5)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
TEXT = {
    "aria": dict(GROUPED, moe_num_experts=4, moe_topk=2),
    "cohere2_vision": dict(FAMILIES["cohere2"], model_type="cohere2"),
    "exaone4_5": dict(FAMILIES["exaone4"], model_type="exaone4"),
    "gemma4": dict(HYBRIDS["gemma4_text"]),
    "glm4v": dict(GROUPED, rope_parameters=HALF),
    "hyperclovax_vision_v2": dict(GROUPED, model_type="hyperclovax"),
    "lfm2_vl": dict(HYBRIDS["lfm2"], model_type="lfm2"),
    "lighton_ocr": dict(GROUPED, model_type="qwen3"),
    "qwen3_5": HYBRIDS["qwen3_5_text"],
    "qwen3_vl_moe": dict(GROUPED, rope_parameters=ROPE, **EXPERTS),
    "video_llama_3": dict(GROUPED, model_type="qwen2"),
    "aya_vision": dict(FAMILIES["cohere"], model_type="cohere"),
    "gemma3": dict(FAMILIES["gemma3_text"], model_type="gemma3_text"),
    "internvl": dict(GROUPED, model_type="qwen2"),
    "mistral3": dict(GROUPED, model_type="mistral", sliding_window=None),
    "qwen2_vl": dict(GROUPED, rope_parameters=ROPE),
    "qwen2_5_vl": dict(GROUPED, rope_parameters=ROPE),
    "qwen3_vl": dict(GROUPED, rope_parameters=ROPE),
}
SIGHT = {
    "aria": EYE,
    "cohere2_vision": dict(EYE, model_type="siglip_vision_model"),
    "deepseek_vl": dict(EYE, model_type="siglip_vision_model"),
    "exaone4_5": dict(QWEN, out_hidden_size=64),
    "gemma4": dict(EYE, num_key_value_heads=2, head_dim=16, position_embedding_size=16),
    "glm4v": dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64),
    "hyperclovax_vision_v2": dict(QWEN, out_hidden_size=64),
    "idefics3": EYE,
    "lfm2_vl": dict(EYE, model_type="siglip_vision_model"),
    "lighton_ocr": dict(EYE, model_type="pixtral", head_dim=16),
    "qwen3_5": dict(QWEN, out_hidden_size=64),
    "qwen3_vl_moe": dict(QWEN, out_hidden_size=64, deepstack_visual_indexes=[0]),
    "smolvlm": EYE,
    "video_llama_3": EYE,
    "video_llava": dict(EYE, model_type="clip_vision_model"),
    "vipllava": dict(EYE, model_type="clip_vision_model"),
    "gemma3": dict(EYE, model_type="siglip_vision_model"),
    "internvl": dict(EYE, image_size=[16, 16], patch_size=[8, 8]),
    "mistral3": dict(EYE, model_type="pixtral", head_dim=16),
    "aya_vision": dict(EYE, model_type="siglip_vision_model"),
    "llava_onevision": dict(EYE, model_type="siglip_vision_model"),
    "qwen2_vl": dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=8),
    "qwen2_5_vl": dict(QWEN, out_hidden_size=64),
    "qwen3_vl": dict(QWEN, out_hidden_size=64, deepstack_visual_indexes=[0]),
}
WHOLE = sorted({*TEXT, *SIGHT, "llava", "llava_next"})


def whole_config(family, **options):
    text = TEXT.get(family, dict(GROUPED, model_type="llama"))
    sight = SIGHT.get(family, dict(EYE, model_type="clip_vision_model"))
    return AutoConfig.for_model(family, **{"text_config": text, "vision_config": sight, **options})


def whole_model(family, **options):
    torch.manual_seed(0)
    config = whole_config(family, **options)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()


IMAGE = "<image>"
PICTURE = 127  # the token that stands for a part of a picture
LARGE = dict(EYE, image_size=32)
GRID = dict(patch_size=8, spatial_merge_size=2)
FRAMES = {**QWEN, **GRID, "out_hidden_size": 64}
# Whole models whose pictures take four tokens, by family: the config of their towers for pictures, and their inputs.
PICTURED: dict[str, tuple[dict, str]] = {
    "llava": (dict(EYE, model_type="clip_vision_model"), "pixels"),
    "aya_vision": (dict(LARGE, model_type="siglip_vision_model"), "pixels"),
    "cohere2_vision": (dict(LARGE, model_type="siglip_vision_model"), "pixels"),
    "gemma4": (dict(SIGHT["gemma4"], pooling_kernel_size=2), "patches"),
    "idefics3": (LARGE, "several"),
    "internvl": (dict(EYE, image_size=[32, 32], patch_size=[8, 8]), "pixels"),
    "mistral3": (dict(LARGE, model_type="pixtral", head_dim=16), "sized"),
    "qwen2_vl": (dict(SIGHT["qwen2_vl"], spatial_merge_size=2), "grid"),
    "qwen2_5_vl": (FRAMES, "grid"),
    "qwen3_5": (FRAMES, "grid"),
    "qwen3_vl": (dict(FRAMES, deepstack_visual_indexes=[0]), "grid"),
    "smolvlm": (LARGE, "several"),
}


def pictured_model(family, **options):
    """A whole model whose pictures take four tokens."""
    names = {name: PICTURE for name in ("image_token_id", "image_token_index")}
    video = {"video_token_id": 126} if PICTURED[family][1] == "grid" else {}
    given = {"vision_config": PICTURED[family][0], **names, **video, **options}
    model = whole_model(family, **given)
    compute_anywhere(model)
    return model.requires_grad_(False)


def pictured_student(family, heads, exact_tokens=0):
    """The student of a whole model; its KV heads hold `heads` in turn."""
    teacher = pictured_model(family)
    layers = inspect_model(SOURCE, teacher.config).layers
    return put_student_into(teacher, layers, allocation_of(layers, heads, 2), exact_tokens=exact_tokens)


def inputs_of(family, before=(5, 6, 7), after=(8, 9, 10, 11), seed=0):
    """Tokens around the tokens of a picture, and the picture, as a model's processor makes them."""
    ids = torch.tensor([[*before, *[PICTURE] * 4, *after]])
    draw = torch.Generator().manual_seed(seed)
    kind = PICTURED[family][1]
    types = {"mm_token_type_ids": (ids == PICTURE).long()}
    size = PICTURED[family][0].get("image_size", 32)
    pixels = torch.randn(1, 3, *([size] * 2 if isinstance(size, int) else size), generator=draw)
    picture = {
        "pixels": lambda: {"pixel_values": pixels},
        "sized": lambda: {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]])},
        "several": lambda: {"pixel_values": pixels[None]},
        "grid": lambda: {
            "pixel_values": torch.randn(16, 3 * 2 * 64, generator=draw),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            **types,
        },
        "patches": lambda: {
            "pixel_values": torch.rand(1, 16, 3 * 64, generator=draw),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4))[None].flip(-1),
            **types,
        },
    }[kind]()
    return {"input_ids": ids, **picture}


def save_with_processor(folder):
    """Save a whole model with the demo model's words, and what prepares its pictures; return the model."""
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    number = tokenizer.convert_tokens_to_ids(IMAGE)
    text = dict(GROUPED, model_type="llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model = pictured_model("llava", text_config=text, image_token_id=number, image_token_index=number)
    model.save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    added = dict(vision_feature_select_strategy="default", num_additional_image_tokens=1)
    LlavaProcessor(image_processor=pixels, tokenizer=tokenizer, patch_size=8, **added).save_pretrained(folder)
    return model


def save_picture(path, colour):
    Image.new("RGB", (20, 24), colour).save(path)
    return path
