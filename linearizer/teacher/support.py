"""Decides which models can be linearized, and says why the others cannot.

A model's own code runs on a few tokens, without weights, which shows how every layer attends. Of a model whose pictures
are not served (whole_models.py) the text tower is loaded: it has the whole model's logits on text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linearizer.errors import UnsupportedModel, first_line
from linearizer.plan.head_bytes import WITHOUT_ATTENTION, Layer
from linearizer.progress import quiet
from linearizer.student.attention_interface import attention_modules, decoder_of, scores_of
from linearizer.student.cache import CACHE, recurrent_tensors
from linearizer.student.modeling_linearized import reads_pictures
from linearizer.teacher.devices import compute_anywhere
from linearizer.teacher.observing import observing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

Product = TypeVar("Product")
WATCHED_TOKENS = 4

# Kinds that are tested from end to end, with three layers and random weights. Other kinds that pass the same checks
# are supported, too.
TESTED = frozenset(
    "apertus arcee bailing_hybrid bamba cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma "
    "gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite "
    "granitemoehybrid helium hunyuan_v1_dense kimi_linear lfm2 lfm2_moe lfm3 llama minimax_m2 mistral mixtral "
    "nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text "
    "qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 vaultgemma zaya".split()
)
# Kinds whose whole models, which read pictures, are tested in the same way.
TESTED_WHOLE = frozenset(
    "aya_vision cohere2_vision gemma4 idefics3 internvl llava mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl "
    "smolvlm".split()
)
SOFTMAX_LAYERS = frozenset(["attention", "full_attention", "sliding_attention", "chunked_attention"])
UNCHANGED_LAYERS = frozenset(["linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp"])
OTHER_INPUTS = ("text", "vision", "audio", "image", "video", "vq")  # in the names of the parts of a multimodal config
POSITION_BIAS = "its layers add a learned bias for distances to their scores, which merged tokens cannot have"
ALTERED = {"position_bias": POSITION_BIAS}  # by the argument that a layer passes to its attention
OWN_WAYS = {  # of hybrids, by their kind
    "jamba": "its recurrent layers cannot continue a text by several tokens at once in transformers' code",
    "minimax": "its linear layers keep their states in a cache of their own, which transformers cannot copy",
    "recurrent_gemma": "its recurrent layers keep their states in the model instead of a cache, so no text can be kept",
    "zamba": "its layers share one attention module",
}
ALIBI = "its positions are ALiBi, which its code adds to the scores outside transformers' attention interface"
MASKED = "its layers mask tokens with custom numbers, which a state of fixed size cannot follow"
ENCODER = "it is an encoder, which reads in both directions"
BOTH_WAYS = "its text tower reads a prompt in both directions, and a state of fixed size reads a text once"
ENCODERS = "the page and `linearizer run` without --job also linearize encoders, in runs of their own"
ANOTHER = "name a decoder-only language model with plain softmax attention, such as llama, qwen3 or qwen3_5"
PACKED_WEIGHT = re.compile(r"(qweight|weight_packed)$")  # in the names of quantised weights
NO_TEXT = "its text tower ({}) is of a kind that transformers cannot load alone"
# Towers without a class of their own. Text has equal positions in all directions, so another kind computes the same.
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v_moe_text": ("glm4_moe", {}),
    "glm4v_text": ("glm4", {}),
    "glm_ocr_text": ("glm4", {"attention_bias": False}),
    "granite4_vision_text": ("granite", {}),
    "granite_docling_text": ("granite", {}),
    "qwen2_5_omni_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen3_omni_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl_text": ("qwen3", {}),
}


class Refused(UnsupportedModel):
    """Says why a model cannot be linearized, and what to do instead."""

    def __init__(self, reason: str, remedy: str = ANOTHER) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason, self.remedy = reason, remedy


def check_config(config: PreTrainedConfig, pictures: bool = False, blind_because: str | None = None) -> None:
    """Refuse a model that is not a decoder with softmax attention, by its config alone.

    It may read `pictures`, or the reason why these are not served is given.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise Refused("it is an encoder–decoder: its decoder also reads the output of the encoder")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise Refused(ENCODER, ENCODERS)
    parts = [name for name in config.sub_configs if any(word in name for word in OTHER_INPUTS)]
    if parts and not pictures:
        raise refuse_multimodal(config, parts, blind_because)
    if not pictures and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        remedy = ENCODERS if getattr(config, "patch_size", None) else ANOTHER
        raise Refused(f"{config.model_type} models do not continue text", remedy)
    if getattr(config, "num_hidden_layers", 1) < 1:
        raise Refused(f"its config says that it has {config.num_hidden_layers} layers", "repair its config.json")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - SOFTMAX_LAYERS - UNCHANGED_LAYERS)
    if odd:
        raise Refused(f"it has layers that choose or compress the tokens they attend to ({', '.join(odd)})")
    if config.model_type in OWN_WAYS:
        raise Refused(OWN_WAYS[config.model_type])
    by_name = getattr(config, "position_embedding_type", None) == "alibi" or config.model_type == "bloom"
    if by_name or any(getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None))):
        raise Refused(ALIBI)


def refuse_multimodal(config: PreTrainedConfig, parts: list[str], blind_because: str | None) -> Refused:
    """Explain why neither a multimodal model nor its text tower is served."""
    sibling, tower = "name its text-only sibling", config.get_text_config(decoder=True)
    if tower is config:
        return Refused(f"it is multimodal ({', '.join(parts)}), and has no text tower of its own", sibling)
    pictures = f", its pictures are not served ({blind_because})" if blind_because else ""
    return Refused(f"it is multimodal{pictures}, and {NO_TEXT.format(tower.model_type)}", sibling)


def check_attention(query: torch.Tensor, key: torch.Tensor, arguments: Mapping[str, object]) -> None:
    """Refuse a layer whose scores are more than a scaled product, or whose KV heads have unequal groups."""
    for argument, reason in ALTERED.items():
        if arguments.get(argument) is not None:
            raise Refused(reason)
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and (mask.dtype != torch.bool or mask.shape[1] > 1):  # not transformers' own
        raise Refused(MASKED)
    if query.shape[1] % key.shape[1]:
        heads = f"its {query.shape[1]} query heads cannot share {key.shape[1]} KV heads evenly"
        raise Refused(heads, "repair its config.json")


def check_layers(watched: list[AttentionLayer], cache: Cache | None, expected: int) -> None:
    """Refuse a model in which a layer does not attend exactly once, or attends to keys that no layer has."""
    indices = [layer.index for layer in watched]
    layers = dict(enumerate(getattr(cache, "layers", ())))
    cached = {index for index, layer in layers.items() if getattr(layer, "keys", None) is not None}
    others = {index for index in set(range(expected)) - set(indices) if not keeps_no_keys(layers.get(index))}
    if -1 in indices:
        raise Refused(f"{len(indices)} of its {expected} layers share one attention module")
    if len(set(indices)) < len(indices) or others or not expected:
        counts = f"{len(set(indices))} of its {expected} layers were seen attending, {len(indices)} times in all"
        raise Refused(f"{counts}, and each of them should attend once")
    if not cached:
        raise Refused("it keeps no cache of keys and values that transformers knows")
    own = {layer.index for layer in watched if layer.shape.reads is None}
    if cached != own:
        count = len(own ^ cached)
        raise Refused(f"the keys and values of {count} of its {expected} layers are not those that its cache keeps")
    if own != set(indices) and len(layers) < expected:
        raise Refused("this version of transformers keeps no place for layers without keys", "update transformers")
    if any(isinstance(getattr(layer, "recurrent_states", {}), torch.Tensor | None) for layer in layers.values()):
        raise Refused("this version of transformers cannot continue its recurrent layers", "update transformers")


def keeps_no_keys(layer: object) -> bool:
    """Whether a layer of a cache is recurrent, a convolution, or keeps nothing."""
    return hasattr(layer, "recurrent_states") or type(layer).__name__ == "DummyLayer"


def check_windows(windows: list[int | None]) -> None:
    """Refuse a model whose layers all have native windows: its cache does not grow."""
    if all(window is not None for window in windows):
        attending = "every layer that attends" if 0 in windows else "every layer"
        raise Refused(
            f"{attending} already attends to a window, of {max(w for w in windows if w is not None)} tokens at most, "
            f"so its cache does not grow",
            "there is nothing to do, use it unchanged",
        )


@dataclass(frozen=True)
class AttentionLayer:
    """The shape of one attention layer, as it ran; a layer without attention has none."""

    index: int
    shape: Layer
    scaling: float


@dataclass(frozen=True)
class Watched:
    """All layers of a model as they ran, and what recurrent ones keep of one text."""

    layers: tuple[AttentionLayer, ...] = ()
    recurrent_layers: int = 0
    recurrent_bytes: int = 0
    alters_scores: bool = False  # whether a layer caps its scores, or has learned sinks


class MetaValues(TorchDispatchMode):
    """Invents values of meta tensors, which have none, where code reads them; no shape of attention depends on them."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.nonzero.default and args[0].is_meta:  # no token goes to any expert
            return args[0].new_empty(0, args[0].ndim, dtype=torch.long)
        return func(*args, **(kwargs or {}))


def build_blueprint(config: PreTrainedConfig, auto_class: Any = None) -> PreTrainedModel:
    """Build a model without weights, on the meta device: it takes no memory, regardless of its size."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = auto_class or (AutoModelForImageTextToText if reads_pictures(type(config)) else AutoModelForCausalLM)
    # float32, too: while a model of another type is made, this is the type of new tensors in all threads of the process
    eager = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    with torch.device("meta"), refusing_config(), quiet():
        model = auto_class.from_config(deepcopy(config), **eager).eval()
    compute_anywhere(model)
    return model


def run_blueprint(run: Callable[[], Product]) -> Product:
    """Run code of a model without weights."""
    with MetaValues(), refusing_config(), quiet():
        return run()


@contextmanager
def refusing_config() -> Iterator[None]:
    """Refuse a config that does not fit its model's code, which does not check its numbers itself."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and (lacking := re.search(r"pip install ([\w.-]*\w)", str(error))):
            raise Refused(
                f"its code needs {lacking[1]}, which is not installed", f"`pip install {lacking[1]}`"
            ) from error
        refusal = f"transformers cannot build it from its config ({first_line(error)})"
        raise Refused(refusal, "check its config.json") from error


def watch_layers(model: PreTrainedModel) -> Watched:
    """Run a model on a few tokens, and record how each of its layers attends."""
    watched: list[AttentionLayer] = []
    keys: list[torch.Tensor] = []
    altered: list[bool] = []

    def observe(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, kwargs: dict
    ) -> None:
        check_attention(query, key, kwargs)
        altered.append(bool(scores_of(module, kwargs)))
        index = int(module.layer_idx)  # type: ignore[arg-type]
        window = native_window(config, index, kwargs)
        shape = Layer(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], window)
        source = next((layer.index for layer, other in zip(watched, keys, strict=True) if other is key), None)
        if source is not None:
            shape = replace(shape, kv_heads=0, native_window=window or 0, reads=source)
        watched.append(AttentionLayer(index, shape, float(scale)))
        keys.append(key)

    modules, config = attention_modules(model), model.config.get_text_config(decoder=True)
    if not modules:
        raise refuse_unseen(model)
    if any(getattr(module, "is_causal", None) is False for module in modules):
        raise Refused(BOTH_WAYS if whole_of(model.config) else ENCODER)
    tokens = torch.zeros(1, WATCHED_TOKENS, dtype=torch.long, device=model.device)
    with torch.no_grad(), quiet(), observing(model, observe):
        cache = getattr(model(input_ids=tokens, use_cache=True), CACHE, None)
    count = getattr(config, "num_hidden_layers", 0)
    check_layers(watched, cache, count)
    by_index = {layer.index: count_readers(layer, watched) for layer in watched}
    layers = tuple(by_index.get(index, AttentionLayer(index, WITHOUT_ATTENTION, 0.0)) for index in range(count))
    held = [[states[key] for _, states, key in recurrent_tensors(layer)] for layer in getattr(cache, "layers", ())]
    recurrent_bytes = sum(x.numel() * x.element_size() for tensors in held for x in tensors)
    return Watched(layers, sum(map(bool, held)), recurrent_bytes, any(altered))


def count_readers(layer: AttentionLayer, watched: list[AttentionLayer]) -> AttentionLayer:
    """Return a layer with the number of the layers that attend to its keys; refuse readers of another shape."""
    readers = [other for other in watched if other.shape.reads == layer.index]
    if any((x.shape.query_heads, x.scaling) != (layer.shape.query_heads, layer.scaling) for x in readers):
        raise Refused(f"layers that attend to the keys of its layer {layer.index} have other query heads or scales")
    return replace(layer, shape=replace(layer.shape, readers=len(readers)))


def refuse_unseen(model: PreTrainedModel) -> Refused:
    """Explain that no layer of a model can be replaced."""
    if model._is_stateful:
        return Refused("all of its layers are recurrent, with a state of fixed size", "use it unchanged")
    kinds = {*(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    if kinds and kinds <= UNCHANGED_LAYERS:
        return Refused(f"none of its layers attends ({', '.join(sorted(kinds))})", "use it unchanged")
    return Refused("its code does not hand its attention to transformers' attention interface, so no layer is seen")


def native_window(config: PreTrainedConfig, index: int, arguments: dict) -> int | None:
    """Return the number of tokens that a layer of the teacher attends to; None if it is not bounded."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else None
    if kind == "chunked_attention":
        return config.attention_chunk_size
    if kind == "sliding_attention":
        return config.sliding_window
    return arguments.get("sliding_window")


def text_tower(config: PreTrainedConfig, stored: Collection[str] = ()) -> PreTrainedConfig:
    """Return the config of a model's text tower, which names the whole model; else return the config unchanged.

    `stored` are the names of the tensors in its files, as far as they are known.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    tower = config.get_text_config(decoder=True)
    has_class = type(tower) in MODEL_FOR_CAUSAL_LM_MAPPING or tower.model_type in ALIKE
    if tower is config or not has_class or config.is_encoder_decoder:
        return config
    tower = deepcopy(tower)
    if tower.model_type in ALIKE:
        kind, more = ALIKE[tower.model_type]
        content = {name: value for name, value in tower.to_dict().items() if name != "model_type"}
        tower = AutoConfig.for_model(kind, **{**content, **more})
    has_head = any(name.endswith("lm_head.weight") for name in stored)
    # Some models state it only outside of the tower, others only inside.
    tied = getattr(config, "tie_word_embeddings", getattr(tower, "tie_word_embeddings", False))
    tower.tie_word_embeddings = tied or bool(stored and not has_head)
    tower.dtype = tower.dtype or config.dtype
    tower.tower_of = (config.architectures or [config.model_type])[0]
    tower.architectures = None
    if (stated := getattr(config, "quantization_config", None)) is not None:
        tower.quantization_config = deepcopy(stated)
    return tower


def whole_of(config: PreTrainedConfig) -> str | None:
    """Name the model that contains a text tower."""
    return getattr(config, "tower_of", None)


def find_place(inner: list[str], stored: Collection[str]) -> str | None:
    """Find what stands before the names of a decoder's weights in the files of a model."""
    stored = {PACKED_WEIGHT.sub("weight", name) for name in stored}
    places = {name.removesuffix(inner[0]) for name in stored if name.endswith(inner[0])}
    plain = [name for name in inner if ".experts." not in name]  # files may hold experts one by one
    return next((place for place in sorted(places) if all(place + name in stored for name in plain)), None)


def check_names(model: PreTrainedModel, stored: Collection[str]) -> None:
    """Refuse files in which the weights of a text tower, or of the decoder of a whole model, are not found."""
    if whole_of(model.config):
        names_in_files(model, stored)
        return
    names = [name for name, _ in decoder_of(model).named_parameters()]
    if find_place(names, stored) is None:
        raise refuse_names(len(names), len(stored))


def names_in_files(tower: PreTrainedModel, stored: Collection[str]) -> dict[str, str]:
    """Find the names that a tower's weights have in the files of its whole model: pattern -> name in the tower."""
    names = [name for name, _ in tower.named_parameters()]
    prefix = f"{names[0].partition('.')[0]}."  # of the decoder, which begins with embeddings
    place = find_place([name.removeprefix(prefix) for name in names if name.startswith(prefix)], stored)
    plain = {PACKED_WEIGHT.sub("weight", key) for key in stored}
    outer = {name: [key for key in plain if key.endswith(name)] for name in names if not name.startswith(prefix)}
    if place is None or not all(outer.values()):
        raise refuse_names(len(names), len(stored))
    renamed = {min(keys, key=len).removesuffix("weight"): name.removesuffix("weight") for name, keys in outer.items()}
    return {f"^{re.escape(place)}": prefix, **{f"^{re.escape(key)}": name for key, name in renamed.items()}}


def refuse_names(count: int, stored: int) -> Refused:
    reason = f"the weights of its text tower ({count} of {stored}) are not in its files by their names"
    return Refused(reason, "name its text-only sibling")
