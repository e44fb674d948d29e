"""A causal language model of transformers whose attention layers have a state of fixed size.

The teacher's own modelling code runs unchanged inside `base`; each attention module carries a `student` that takes
over where transformers lets an attention implementation be chosen (attention_interface.py).

The words of these files:
  teacher             the model with softmax attention that this one was made from; base: its code and weights
  student             what attends in its place (layer_student.py)
  KV head             a key and a value per token, shared by a group of query heads; what a student holds is per KV head
  cache, state        a teacher keeps all keys and values; a student keeps a state whose size does not grow
  sink, window        the first tokens of a text, and the last ones: both are attended to exactly
  far field           what represents all other tokens: slots or features
  slot                a token, or the mean of several tokens that were merged, with their number (slots.py)
  feature             a sum over tokens, weighted by a function of their keys (features.py, feature_maps.py)
  degrees of freedom  how many features a head's scores call for, as measured on text
  budget              the size of the whole state, as the number of tokens whose cache is as large

Files: modeling_linearized, attention_interface, layer_student and cache connect it to transformers. Attention exists
for {features, slots} × {texts, single tokens} × {PyTorch, Triton kernels}, which the names of the files say.
"""

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from .attention_interface import IMPLEMENTATION, NOT_SERVED, attention_modules, hand_over_state
from .cache import LinearizedCache, LinearizedLayer, empty_cache
from .feature_maps import FEATURE_MAPS
from .layer_student import LayerStudent
from .state_file import read_state

COPIED_FROM_TEACHER = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "dtype",
)


class LinearizedConfig(PreTrainedConfig):
    """base: the teacher's config; layers: for each layer what its KV heads hold, or null where it stays as it was."""

    model_type = "linearized"

    def __init__(
        self,
        base: dict | None = None,
        layers: list | None = None,
        sinks: int = 0,
        feature_map: str = "prf",
        teacher: dict | None = None,
        use_cache: bool = True,
        **kwargs: object,
    ) -> None:
        self.base, self.layers = base or {}, layers or []
        self.sinks, self.feature_map = sinks, feature_map
        self.teacher = teacher or {}  # name and revision
        own = self.base_config() if self.base else None
        copied = {name: getattr(own, name) for name in COPIED_FROM_TEACHER if hasattr(own, name)}
        super().__init__(**{**copied, **kwargs})
        self.use_cache = use_cache

    def base_config(self) -> PreTrainedConfig:
        settings = {name: value for name, value in self.base.items() if name != "model_type"}
        return AutoConfig.for_model(self.base["model_type"], **settings)


class LinearizedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LinearizedConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _is_stateful = True  # the state cannot be rolled back
    _keep_in_fp32_modules_strict = ("student",)
    _skip_keys_device_placement = ("past_key_values", "linear_state")

    def __init__(self, config: LinearizedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if config.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map={config.feature_map!r} is none of {', '.join(FEATURE_MAPS)}")
        if base is None:
            how = {"attn_implementation": IMPLEMENTATION, "dtype": torch.get_default_dtype()}  # that asked for
            base = AutoModelForCausalLM.from_config(config.base_config(), **how)
        self.base = base
        modules = attention_modules(base)
        if len(modules) != len(config.layers):
            raise ValueError(f"the config describes {len(config.layers)} layers, the model has {len(modules)}")
        for module, held in zip(modules, config.layers, strict=True):
            if held is not None:
                module.student = LayerStudent(held["heads"], config.sinks, held["key_dim"], config.feature_map)
                module.register_forward_pre_hook(hand_over_state, with_kwargs=True)
        self.post_init()

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, config: LinearizedConfig, seed: int) -> "LinearizedForCausalLM":
        """Put untrained students into a teacher, which is changed in place and shares all its weights."""
        student = cls(config, base=teacher)
        teacher.set_attn_implementation(IMPLEMENTATION)
        generator = torch.Generator().manual_seed(seed)
        for layer in student.students():
            layer.to(next(teacher.parameters()).device).reset(generator)
        student.generation_config = teacher.generation_config
        return student.train(teacher.training)

    def students(self) -> list[LayerStudent]:
        return [module for module in self.base.modules() if isinstance(module, LayerStudent)]

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to draw: the base draws its own, and features come from a teacher or a checkpoint."""

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.base.set_output_embeddings(value)

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Module:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.base["vocab_size"] = embeddings.num_embeddings
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: object,
    ) -> object:
        if attention_mask is not None and getattr(attention_mask, "ndim", None) != 2:
            raise ValueError(NOT_SERVED)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is None and use_cache:
            past_key_values = self.empty_cache()
        return self.base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=self.refuse_other_cache(past_key_values),
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def empty_cache(self) -> LinearizedCache:
        return empty_cache(self)

    def load_cache(self, path: str) -> LinearizedCache:
        """Read a state that `cache.save(path)` wrote; one of another model, or a damaged one, is refused."""
        return read_state(self, path)

    def refuse_other_cache(self, cache: Cache | None) -> Cache | None:
        """Return the cache, unless it keeps keys, which students would not see."""
        layers = getattr(cache, "layers", [])
        mine = [isinstance(layer, LinearizedLayer) for layer in layers]
        if cache is not None and mine != [held is not None for held in self.config.layers]:
            raise ValueError(
                f"a linearized model keeps a state, not keys, and cannot use a {type(cache).__name__}: "
                "leave past_key_values out, or pass model.empty_cache()"
            )
        return cache

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *args: object, **kwargs: object
    ) -> None:
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={wanted!r}: a linearized model has a cache of its own; leave it out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.empty_cache()

    def set_attn_implementation(self, attn_implementation: str | dict, *args: object, **kwargs: object) -> None:
        raise ValueError(
            f"attn_implementation={attn_implementation!r}: the attention of a linearized model is its own and cannot "
            "be exchanged; load the teacher to attend with softmax"
        )


LinearizedConfig.register_for_auto_class()
LinearizedForCausalLM.register_for_auto_class("AutoModelForCausalLM")
