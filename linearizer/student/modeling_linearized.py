"""A causal language model of transformers whose attention layers have a state of fixed size.

The teacher's modelling code runs unchanged inside `base`; each attention module has a `student`, which transformers
calls in place of its attention (attention_interface.py).

Terms in these files:
  teacher             the model with softmax attention that this one was made from; base: its code and weights
  student             the module that attends in its place (layer_student.py)
  KV head             a key and a value per token, shared by a group of query heads; a student has a state per KV head
  cache, state        a teacher keeps all keys and values; a student keeps a state of fixed size
  sink, window        the first tokens of a text, and the last ones: both are attended to exactly
  far field           slots or features in place of all other tokens
  slot                a token, or the mean of several tokens that were merged, with their number
  feature             a sum over tokens, weighted by a function of their keys (features_torch.py, feature_maps.py)
  memory              another far field, written by a rule (update_rules.py, matrix_rule.py)
  degrees of freedom  how many features a head's scores need, as measured on text
  budget              the size of the whole state, as the number of tokens whose cache is as large

Read attention_of_student first: it defines what a layer computes, and what a state is. layer_student holds the weights
of a layer and asks for kernels; attention_interface, cache and saved_state connect both to transformers. Checkpoints
whose heads hold something else than windows and slots also carry other_heads, and what it imports.
"""

import os
import shutil
from pathlib import Path
from typing import Any, cast

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
from transformers.utils import logging

from .attention_interface import (
    IMPLEMENTATION,
    attention_by_layer,
    device_of,
    hand_over_state,
    leave_out_weights,
    serve_decoder,
)
from .cache import CACHE, LinearizedCache, empty_cache, take_cache
from .layer_student import LayerStudent, SharedStudent, find_kernels, generator_at, holds_more, named_head
from .saved_state import read_state

NOT_BATCHED = (
    "continuous batching keeps keys in pages, and a linearized model keeps a state: "
    "call generate with a padded batch, whose texts take the same state at any length"
)
BEYOND = (
    "the text is longer than the {} positions that the teacher of this linearized model was made for: its state does "
    "not grow, but the model may write worse from here on, which was not measured"
)
CODE = (
    *("modeling_linearized", "attention_interface", "attention_of_student", "layer_student", "exact_cache", "cache"),
    "saved_state",
)
CODE_OF_OTHER_HEADS = (
    *("modeling_with_other_heads", "other_heads", "columns", "softmax_parts", "features_torch", "feature_maps"),
    *("matrix_rule", "update_rules"),
)
logger = logging.get_logger(__name__)
FORMAT = 2  # of heads in a config
OWN = {
    "base",
    "layers",
    "sinks",
    "exact_tokens",
    "feature_map",
    "teacher",
    "format",
    "made_by",
    "auto_map",
}  # all else is the teacher's
SIZES = (  # of its teacher, which tools look for in config.json
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
CONTENT = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")  # of a module
TRAITS = (  # of the base, which transformers reads from a model
    "base_model_prefix",
    "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
)


class LinearizedConfig(PreTrainedConfig):
    """base: the teacher's config; layers: for each layer what its KV heads keep (LayerStudent), no heads if it `reads`
    those of another layer, null if it is unchanged; exact_tokens: of the longest text that is read as the teacher reads
    it; format: of these entries, of which older ones are read, too; made_by: the version that wrote them.

    All attributes of the teacher's config are read from it and written to it: vocab_size, logit_scale, use_cache, …
    """

    model_type = "linearized"

    def __init__(
        self,
        base: dict | PreTrainedConfig | None = None,
        layers: list | None = None,
        sinks: int = 0,
        feature_map: str = "prf",
        teacher: dict | None = None,
        format: int = 1,
        made_by: str | None = None,
        exact_tokens: int = 0,
        **kwargs: object,
    ) -> None:
        if format > FORMAT:
            raise ValueError(f"this model has format {format}, and this code reads {FORMAT}: load it with newer code")
        if isinstance(base, dict):
            base = AutoConfig.for_model(**base) if base else None
        of_base = {name: kwargs.pop(name) for name in [*kwargs] if belongs_to(base, name)}
        super().__init__(**{"dtype": getattr(base, "dtype", None), **kwargs})
        self.format, self.made_by, self.sinks, self.feature_map = FORMAT, made_by, sinks, feature_map
        self.exact_tokens = exact_tokens
        self.layers = [layer and {**layer, "heads": [*map(named_head, layer["heads"])]} for layer in layers or []]
        self.teacher = teacher or {}  # name and revision
        self.base = base
        for name, value in of_base.items():
            setattr(base, name, value)

    def __getattr__(self, name: str) -> object:
        if belongs_to(base := self.__dict__.get("base"), name):
            return getattr(base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        target = self if name in self.__dict__ or not belongs_to(self.__dict__.get("base"), name) else self.base
        super().__setattr__(name, value) if target is self else setattr(target, name, value)

    @property
    def output_attentions(self) -> bool:
        """Whether weights between tokens are requested; transformers' setter would refuse our implementation."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def save_pretrained(self, save_directory: str | os.PathLike, *args: object, **kwargs: object) -> None:
        """Write the config, and the code that a model with these heads needs."""
        others = any(holds_more(head) for layer in self.layers if layer is not None for head in layer["heads"])
        entry = CODE_OF_OTHER_HEADS[0] if others else CODE[0]
        classes = {"AutoConfig": "LinearizedConfig", "AutoModelForCausalLM": "LinearizedForCausalLM"}
        self.auto_map = {auto: f"{entry}.{name}" for auto, name in classes.items()}
        self._auto_class = None  # else transformers would name the classes, and copy less
        os.makedirs(save_directory, exist_ok=True)
        for name in (*CODE, *CODE_OF_OTHER_HEADS) if others else CODE:
            shutil.copyfile(Path(__file__).with_name(f"{name}.py"), Path(save_directory, f"{name}.py"))
        super().save_pretrained(save_directory, *args, **kwargs)

    def validate(self) -> None:
        """Check nothing: the teacher's config checks itself, by rules of its own."""

    def get_text_config(self, *args: object, **kwargs: object) -> PreTrainedConfig:
        return self.__dict__.get("base") or self

    def to_dict(self) -> dict:
        """Leave out the teacher's path; repeat its sizes and its quantisation for the whole model."""
        content = super().to_dict()
        base = {name: x for name, x in (content["base"] or {}).items() if not name.startswith("_")}
        quantised = base.pop("quantization_config", None)
        sizes = {name: getattr(self, name) for name in SIZES if belongs_to(self.base, name)}
        return {**content, **sizes, "base": base, **({"quantization_config": quantised} if quantised else {})}


def belongs_to(base: PreTrainedConfig | None, name: str) -> bool:
    """Whether an attribute of a LinearizedConfig is one of its teacher's config."""
    ours = name.startswith("_") or name in OWN or hasattr(PreTrainedConfig, name)
    try:
        return base is not None and not ours and hasattr(base, name)
    except RuntimeError:  # transformers has no number for all layers where they differ
        return False


class LinearizedForCausalLM(PreTrainedModel, GenerationMixin):
    """`base` is the teacher's model. It is no child: its children are also this model's, so that every weight keeps the
    name that it has in the teacher, and tools find `model` and `lm_head`."""

    config_class = LinearizedConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _is_stateful = True  # the state cannot be rolled back
    _keep_in_fp32_modules_strict = ("student",)
    _skip_keys_device_placement = ("cache", "past_key_values", "linear_state")

    def __init__(self, config: LinearizedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        find_kernels()  # torch.compile cannot look for them
        if base is None:
            kwargs = {"attn_implementation": IMPLEMENTATION, "dtype": torch.get_default_dtype()}  # the requested one
            base = AutoModelForCausalLM.from_config(config.base, **kwargs)
        config.base = base.config
        self.call_reader: Any = None  # by which kernels read a call of all layers
        self.hold(base)
        modules = attention_by_layer(base)
        if len(config.layers) != (count := base.config.get_text_config(decoder=True).num_hidden_layers):
            raise ValueError(f"the config describes {len(config.layers)} layers, the model has {count}")
        for index, layer in enumerate(config.layers):
            if layer is not None:
                if (module := modules.get(index)) is None:
                    raise ValueError(f"the config describes heads of layer {index}, which has no softmax attention")
                if source := cast(Any, modules.get(layer.get("reads", -1))):
                    source.readers = getattr(source, "readers", 0) + 1
                    module.student = SharedStudent(source.student, layer["reads"])
                else:
                    sizes = layer["key_dim"], config.feature_map, layer.get("value_dim", layer["key_dim"])
                    student = LayerStudent(layer["heads"], config.sinks, *sizes, config.exact_tokens)
                    module.student = student.float()  # in a model of any dtype
                module.register_forward_pre_hook(hand_over_state, with_kwargs=True)
        self.keeps_states = [bool(layer and layer["heads"]) for layer in config.layers]
        serve_decoder(base, self.keeps_states)
        self.post_init()

    def hold(self, base: PreTrainedModel) -> None:
        """Share the content of the base."""
        self.__dict__["base"] = base
        self.__dict__.update({name: base.__dict__[name] for name in CONTENT})
        for name in TRAITS:
            setattr(self, name, getattr(base, name))

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, config: LinearizedConfig, seed: int) -> "LinearizedForCausalLM":
        """Put untrained students into a teacher, which is changed in place and shares all its weights."""
        for module in teacher.modules():
            module._is_hf_initialized = True  # else its weights might be drawn again
        student = cls(config, base=teacher)
        teacher.set_attn_implementation(IMPLEMENTATION)
        for index, module in attention_by_layer(teacher).items():
            if isinstance(layer := getattr(module, "student", None), LayerStudent):
                layer.to(device_of(module, next(teacher.parameters()).device)).reset(generator_at(seed, index))
        student.generation_config = teacher.generation_config
        return student.train(teacher.training)

    def students(self) -> list[LayerStudent]:
        return [module for module in self.base.modules() if isinstance(module, LayerStudent)]

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that no checkpoint has: the base's outside of its decoder, and features."""
        is_own = type(module).__module__.rpartition(".")[0] == __name__.rpartition(".")[0]
        if not is_own or not module._parameters:
            self.base._init_weights(module)
        elif not any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
            cast(Any, module).reset(torch.Generator().manual_seed(int(torch.randint(2**31, ()))))

    @classmethod
    def is_custom_code(cls) -> bool:
        """Answer no: a base's buffers that no file has (falcon_h1) would keep random numbers."""
        return False

    def train(self, mode: bool = True) -> "LinearizedForCausalLM":
        self.base.training = mode
        if mode:
            self.call_reader = None  # whose memory is needed
        return super().train(mode)

    def _replicate_for_data_parallel(self) -> "LinearizedForCausalLM":
        replica = super()._replicate_for_data_parallel()
        base = self.base._replicate_for_data_parallel()
        base.__dict__.update({name: replica.__dict__[name] for name in CONTENT})
        replica.__dict__["base"] = base
        return replica

    def get_decoder(self) -> nn.Module:
        return self.base.get_decoder()

    def set_decoder(self, decoder: nn.Module) -> None:
        self.base.set_decoder(decoder)

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
        self.base.vocab_size = embeddings.num_embeddings
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,  # the older name of the cache
        **kwargs: object,
    ) -> object:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = self.empty_cache()
        for name in ("output_hidden_states", "return_dict"):
            if kwargs.get(name) is None and getattr(self.config, name) != getattr(self.base.config, name):
                kwargs[name] = getattr(self.config, name)
        leave_out_weights(kwargs, self.config)
        arguments = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: cache},
            **kwargs,
        )
        if torch.compiler.is_compiling():
            return self.base(**arguments)
        self.warn_beyond_positions(input_ids if inputs_embeds is None else inputs_embeds, cache)
        if (kernels := find_kernels()) is not None and (out := kernels.read_call(self, arguments)) is not None:
            return out
        return self.base(**arguments)

    def warn_beyond_positions(self, inputs: torch.Tensor | None, cache: Cache | None) -> None:
        """Warn that a text is longer than the teacher's positions: a state has room for any length."""
        most = getattr(self.config, "max_position_embeddings", None)
        if most and inputs is not None and inputs.shape[1] + (0 if cache is None else cache.get_seq_length()) > most:
            logger.warning_once(BEYOND.format(most))

    def empty_cache(self) -> LinearizedCache:
        return empty_cache(self.base.config, self.keeps_states, self)

    def load_cache(self, path: str) -> LinearizedCache:
        """Read a state that `cache.save(path)` wrote; refuse a damaged one, and one of another model."""
        return read_state(self, path)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *args: object, **kwargs: object
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: a linearized model has a cache of its own; leave it out")
        cache = take_cache(model_kwargs)
        if cache is not None or generation_config.use_cache is not False:
            model_kwargs[CACHE] = self.empty_cache() if cache is None else cache

    def set_attn_implementation(self, attn_implementation: str | dict, *args: object, **kwargs: object) -> None:
        raise ValueError(
            f"attn_implementation={attn_implementation!r}: the attention of a linearized model is its own and cannot "
            "be exchanged; load the teacher to attend with softmax"
        )

    def init_continuous_batching(self, *args: object, **kwargs: object) -> None:
        raise ValueError(NOT_BATCHED)

    generate_batch = init_continuous_batching
