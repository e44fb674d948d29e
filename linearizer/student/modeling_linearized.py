"""A language model of transformers whose attention layers have a state of fixed size; it may read pictures, too.

Its class is a subclass of its teacher's, so that weights, adapters, quantisation, losses and generation are the
teacher's; each attention module has a `student`, which transformers calls in place of its attention
(attention_interface.py).

Terms in these files:
  teacher             the model with softmax attention that this one was made from
  student             the module that attends in its place (layer_student.py)
  KV head             a key and a value per token, shared by a group of query heads; a student has a state per KV head
  cache, state        a teacher keeps all keys and values; a student keeps a state of fixed size
  sink, window        the first tokens of a text, and the last ones: both are attended to exactly
  slot                a token, or the mean of several tokens that were merged, with their number
  budget              the size of the whole state, as the number of tokens whose cache is as large

Read attention_of_student first: it defines what a layer computes, and what a state is. layer_student holds the weights
of a layer and asks for kernels; attention_interface and cache connect both to transformers. Checkpoints whose heads
hold something else than windows and slots carry further files (OTHER_CODE).
"""

import functools
import os
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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
    decoder_of,
    hand_over_state,
    leave_out_weights,
    serve_decoder,
)
from .cache import CACHE, LinearizedCache, empty_cache, take_cache
from .layer_student import LayerStudent, SharedStudent, code_of, find_kernels, named_head
from .picture_positions import deltas_of, numbering_part, place_tokens

NOT_BATCHED = (
    "continuous batching keeps keys in pages, and a linearized model keeps a state: "
    "call generate with a padded batch, whose texts take the same state at any length"
)
BEYOND = (
    "the text is longer than the {} positions that the teacher of this linearized model was made for: its state does "
    "not grow, but the model may write worse from here on, which was not measured"
)
TABLE = "the text is longer than the table of {} positions that this model has, as its teacher: give a shorter text"
CODE = (
    *("modeling_linearized", "attention_interface", "attention_of_student", "layer_student", "cache"),
    "picture_positions",
)
OF_FEATURES = ("other_heads", "columns", "features_torch", "feature_maps")
OTHER_CODE = {  # by the module of its entry, which imports it
    "other_heads": ("other_heads",),
    "feature_maps": OF_FEATURES,
    "matrix_rule": (*OF_FEATURES, "matrix_rule", "update_rules"),
}
logger = logging.get_logger(__name__)
FORMAT = 3  # of configs: 1 and 2 hold the teacher's config as `base`
OWN = {"layers": [], "sinks": 0, "exact_tokens": 0, "feature_map": "prf", "teacher": {}, "made_by": None}  # by default


class LinearizedConfig(PreTrainedConfig):
    """Reads the config of a linearized model: its teacher's, with an entry `linearized`, which names

    layers: for each layer what its KV heads keep (LayerStudent), no heads if it `reads` those of another layer, null if
    it is unchanged; sinks; feature_map; exact_tokens: of the longest text that is read as the teacher reads it;
    teacher: its name and revision; teacher_type; format: of these entries; made_by: the version that wrote them.
    """

    model_type = "linearized"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config_dict = in_this_format(config_dict)
        kind = config_like(CONFIG_MAPPING[config_dict["linearized"]["teacher_type"]])
        return kind.from_dict(config_dict, **kwargs)


def in_this_format(content: dict[str, Any]) -> dict[str, Any]:
    """Return a config of this format or of an older one, as the class of its teacher's configs reads it."""
    entries = dict(content.get("linearized") or {"format": 1})
    if "base" in content:
        named = {name: content.pop(name) for name in (*OWN, "base", "format") if name in (content := {**content})}
        base, entries = named.pop("base"), {"format": 1, **named}
        kept = {name: content[name] for name in ("dtype", "auto_map", "quantization_config") if content.get(name)}
        content, entries["teacher_type"] = {**base, **kept}, base["model_type"]
    if entries["format"] > FORMAT:
        raise ValueError(
            f"this model has format {entries['format']}, and this code reads {FORMAT}: load it with newer code"
        )
    return {**content, "linearized": complete(entries), "model_type": entries["teacher_type"]}


def complete(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config, with those that are not given, and with names of what heads hold."""
    layers = [layer and {**layer, "heads": [*map(named_head, layer["heads"])]} for layer in entries.get("layers", [])]
    return {**OWN, **entries, "layers": layers, "format": FORMAT}


class OfStudent:
    """What the config of a linearized model does in addition to its teacher's."""

    linearized: dict[str, Any]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(in_this_format(config_dict), **kwargs)  # type: ignore[misc]

    @property
    def output_attentions(self) -> bool:
        """Whether weights between tokens are requested; transformers' setter would refuse our implementation."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def __reduce__(self) -> tuple:
        return empty_of, (config_like, type(self).__bases__[1]), vars(self)

    def validate(self) -> None:
        """Check nothing: transformers would refuse a request for weights."""

    def of_teacher(self) -> dict[str, Any]:
        """Return what the teacher's config says, without how its weights are stored."""
        content = super().to_dict()  # type: ignore[misc]
        own = ("linearized", "auto_map", "quantization_config")
        return {name: x for name, x in content.items() if name not in own and not name.startswith("_")}

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "model_type": LinearizedConfig.model_type}  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike, *args: object, **kwargs: object) -> None:
        """Write the config, and the code that a model with these heads needs."""
        heads = [head for layer in filter(None, self.linearized["layers"]) for head in layer["heads"]]
        needed = {code_of(head, self.linearized["feature_map"]) for head in heads}
        entry = next((name for name in reversed(OTHER_CODE) if name in needed), CODE[0])
        classes = {"AutoConfig": "LinearizedConfig", "AutoModelForCausalLM": "LinearizedForCausalLM"}
        if reads_pictures(type(self).__bases__[1]):
            classes["AutoModelForImageTextToText"] = "LinearizedForCausalLM"
        self.auto_map = {auto: f"{entry}.{name}" for auto, name in classes.items()}
        os.makedirs(save_directory, exist_ok=True)
        for name in (*CODE, *OTHER_CODE.get(entry, ())):
            shutil.copyfile(Path(__file__).with_name(f"{name}.py"), Path(save_directory, f"{name}.py"))
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def draw_weights(module: nn.Module) -> None:
    """Draw weights for which there are no better ones."""
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.1)


@functools.cache
def config_like(teacher: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Make the class of the configs of students whose teachers have such configs."""
    kind = type(LinearizedConfig.__name__, (OfStudent, teacher), {})
    AutoModelForCausalLM.register(kind, LinearizedForCausalLM, exist_ok=True)
    if reads_pictures(teacher):
        AutoModelForImageTextToText.register(kind, LinearizedForCausalLM, exist_ok=True)
    return kind


def empty_of(like: Callable[[type], type], teacher: type) -> Any:
    """Make an object without attributes, in a process that may not have made its class yet."""
    return object.__new__(like(teacher))


def reads_pictures(kind: type[PreTrainedConfig]) -> bool:
    """Whether models with such configs read pictures and write text."""
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def class_of(kind: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the class of the models with such configs: of the whole model, if it reads pictures."""
    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_pictures(kind) else MODEL_FOR_CAUSAL_LM_MAPPING
    return kinds[kind]


@functools.cache
def model_like(teacher: type[PreTrainedModel]) -> type["LinearizedForCausalLM"]:
    """Make the class of students whose teachers have such a class."""
    forward, names = teacher.forward, [*signature(teacher.forward).parameters][1:]

    @functools.wraps(forward)  # generate and trainers look at the names of its arguments
    def read(self: LinearizedForCausalLM, *args: object, **kwargs: object) -> object:
        return self.read({**dict(zip(names, args, strict=False)), **kwargs})

    return type(LinearizedForCausalLM.__name__, (LinearizedForCausalLM, teacher), {"forward": read})


class LinearizedForCausalLM(PreTrainedModel, GenerationMixin):
    """What a linearized model does in addition to its teacher; every model has a subclass of this and its teacher's."""

    config_class = LinearizedConfig
    _is_stateful = True  # the state cannot be rolled back

    def __new__(cls, config: Any = None, *args: object, **kwargs: object) -> Any:
        if cls is LinearizedForCausalLM:
            cls = model_like(class_of(type(config).__bases__[1]))  # type: ignore[arg-type]
        return super().__new__(cls)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        text = config.get_text_config(decoder=True)
        parts = {key: IMPLEMENTATION for key in config.sub_configs if getattr(config, key, None) is text}
        config._attn_implementation = {"": IMPLEMENTATION, **parts}
        super().__init__(config, *args, **kwargs)
        self.add_students()
        self.post_init()

    def __reduce__(self) -> tuple:
        return empty_of, (model_like, type(self).__bases__[1]), vars(self)

    def add_students(self) -> None:
        """Add a student to every layer of which the config describes the heads."""
        find_kernels()  # torch.compile cannot look for them
        self.call_reader: Any = None  # by which kernels read a call of all layers
        most, words = getattr(self.text_config, "max_position_embeddings", None) or 0, self.get_input_embeddings()
        tables = (x for x in decoder_of(self).modules() if isinstance(x, nn.Embedding) and x is not words)
        self.has_table = any(0 <= table.num_embeddings - most <= 2 for table in tables)  # of positions, as gpt2 and opt
        modules, entries = attention_by_layer(self), self.config.linearized
        if len(entries["layers"]) != (count := self.text_config.num_hidden_layers):
            raise ValueError(f"the config describes {len(entries['layers'])} layers, the model has {count}")
        for index, layer in enumerate(entries["layers"]):
            if layer is not None:
                if (module := modules.get(index)) is None:
                    raise ValueError(f"the config describes heads of layer {index}, which has no softmax attention")
                if source := cast(Any, modules.get(layer.get("reads", -1))):
                    source.readers = getattr(source, "readers", 0) + 1
                    module.student = SharedStudent(source.student, layer["reads"])
                else:
                    sizes = layer["key_dim"], entries["feature_map"], layer.get("value_dim", layer["key_dim"])
                    student = LayerStudent(layer["heads"], entries["sinks"], *sizes, entries["exact_tokens"])
                    module.student = student.float()  # in a model of any dtype
                module.register_forward_pre_hook(hand_over_state, with_kwargs=True)
        serve_decoder(self, self.layers_with_states())
        for name, added in (
            ("_keep_in_fp32_modules_strict", ("student",)),
            ("_skip_keys_device_placement", ("cache", "past_key_values", "linear_state")),
        ):
            setattr(self, name, {*(getattr(self, name) or ()), *added})

    @property
    def text_config(self) -> Any:
        """The config of the part that reads text: the model's own, unless it has other parts."""
        return self.config.get_text_config(decoder=True)

    def students(self) -> list[LayerStudent]:
        return [module for module in self.modules() if isinstance(module, LayerStudent)]

    def layers_with_states(self) -> list[bool]:
        """Return whether each layer has a student with states of its own."""
        return [bool(layer and layer["heads"]) for layer in self.config.linearized["layers"]]

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that no checkpoint has: the teacher's outside of its decoder."""
        is_own = type(module).__module__.rpartition(".")[0] == __name__.rpartition(".")[0]
        if not is_own or not module._parameters:
            super()._init_weights(module)
        elif not any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
            getattr(module, "reset", functools.partial(draw_weights, module))()

    @classmethod
    def is_custom_code(cls) -> bool:
        """Answer no: a teacher's buffers that no file has (falcon_h1) would keep random numbers."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Do nothing: transformers would name the classes in the config, and copy less code."""

    def train(self, mode: bool = True) -> "LinearizedForCausalLM":
        if mode:
            self.call_reader = None  # whose memory is needed
        return super().train(mode)

    @property
    def attends_as_teacher(self) -> bool:
        """Whether something else than the students attends at the moment."""
        return self.config._attn_implementation != IMPLEMENTATION

    def read(self, arguments: dict[str, Any]) -> object:
        """Read tokens: the forward of every linearized model."""
        if self.attends_as_teacher:
            place_tokens(self, arguments, arguments.get(CACHE))
            return self.read_by_layers(**arguments)
        arguments = {"input_ids": None, "inputs_embeds": None, "logits_to_keep": 0, **arguments}
        cache, use_cache = take_cache(arguments), arguments.get("use_cache")
        use_cache = self.text_config.use_cache if use_cache is None else use_cache
        if cache is None and use_cache:
            cache = self.empty_cache()
        place_tokens(self, arguments, cache)
        arguments |= {"use_cache": use_cache, CACHE: cache}
        leave_out_weights(arguments, self.config)
        if torch.compiler.is_compiling():
            return self.read_by_layers(**arguments)
        inputs = arguments["input_ids"] if arguments["inputs_embeds"] is None else arguments["inputs_embeds"]
        self.check_positions(inputs, cache, arguments.get("position_ids"))
        if (kernels := find_kernels()) is not None and (out := kernels.read_call(self, arguments)) is not None:
            return out
        return self.read_by_layers(**arguments)

    def read_by_layers(self, **arguments: Any) -> Any:
        """Read tokens by the teacher's code."""
        return super().forward(**arguments)

    def check_positions(self, inputs: Any, cache: Cache | None, positions: torch.Tensor | None) -> None:
        """Warn that a text is longer than the teacher's positions: a state has room for any length, a table has not."""
        most = getattr(self.text_config, "max_position_embeddings", None)
        if most and inputs is not None and inputs.shape[1] + (0 if cache is None else cache.get_seq_length()) > most:
            if self.has_table and (positions is None or positions.max() >= most):  # fewer, with padding
                raise ValueError(TABLE.format(most))
            logger.warning_once(BEYOND.format(most))

    def empty_cache(self) -> LinearizedCache:
        return empty_cache(self.text_config, self.layers_with_states())

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if self.attends_as_teacher:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: a linearized model has a cache of its own; leave it out")
        cache = take_cache(model_kwargs)
        if cache is not None or generation_config.use_cache is not False:
            model_kwargs[CACHE] = self.empty_cache() if cache is None else cache
        return None

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict) -> torch.Tensor:
        if (part := numbering_part(self)) is not None:
            cache = model_kwargs.get(CACHE)
            part.rope_deltas = deltas_of(cache) if cache is not None and cache.get_seq_length() else None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def set_attn_implementation(self, attn_implementation: str | dict, *args: object, **kwargs: object) -> None:
        raise ValueError(
            f"attn_implementation={attn_implementation!r}: the attention of a linearized model is its own and cannot "
            "be exchanged; load the teacher to attend with softmax"
        )

    def init_continuous_batching(self, *args: object, **kwargs: object) -> None:
        raise ValueError(NOT_BATCHED)

    generate_batch = init_continuous_batching
