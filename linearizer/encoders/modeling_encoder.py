"""An encoder of transformers whose attention takes time linear in the tokens.

The teacher's modelling code runs unchanged inside `base`; each attention module that reads in both directions has a
`both_ways`, which transformers calls in place of its attention (attention_interface.py). All weights keep the teacher's
names. attention_both_ways.py describes the computation.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from .attention_both_ways import BothWays, HeadsOfLayer, read_layers
from .attention_interface import GRID, IMPLEMENTATION, attention_modules, replaced_modules

CLASSES = {  # of teachers
    each.__name__: each
    for each in (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForImageClassification)
}
OWN = {"base", "auto_class", "ways", "heads", "first", "last", "teacher", "auto_map"}  # of a config
CONTENT = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")  # of a module
TRAITS = (  # of the base, which transformers reads from a model
    "base_model_prefix",
    "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
)
NO_WEIGHTS = (
    "a linearized encoder computes no weights between tokens, so its attentions are None: ask its teacher for them"
)
logger = logging.get_logger(__name__)


class LinearizedEncoderConfig(PreTrainedConfig):
    """base: the teacher's config; auto_class: the class of transformers that loads it; ways: the heads' ways to attend,
    each a block and a number of slots; heads: the index of each head's way, layer by layer, or nothing if all have the
    first; first, last: global tokens. Attributes of the teacher's config are read from it and written to it."""

    model_type = "linearized_encoder"

    def __init__(
        self,
        base: dict | PreTrainedConfig | None = None,
        auto_class: str = "AutoModel",
        ways: list | None = None,
        heads: list | None = None,
        first: int = 0,
        last: int = 0,
        teacher: dict | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(base, dict):
            base = AutoConfig.for_model(**base) if base else None
        super().__init__(**{"dtype": getattr(base, "dtype", None), **kwargs})
        self.auto_class, self.ways, self.heads = auto_class, list(ways or []), list(heads or [])
        self.first, self.last, self.teacher = first, last, teacher or {}
        self.base = base

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base")
        if base is None or name in OWN or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("base")
        if name in self.__dict__ or name in OWN or name.startswith("_") or not hasattr(base, name):
            super().__setattr__(name, value)
        else:
            setattr(base, name, value)

    def read_ways(self) -> BothWays | list[HeadsOfLayer]:
        """Return how all heads attend, or how the heads of each layer do."""
        layers = read_layers(self.ways, self.heads or [[0]], self.first, self.last)
        return layers if self.heads else layers[0].ways[0]

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return self.__dict__.get("base") or self

    def to_dict(self) -> dict:
        """Leave out the teacher's path."""
        content = super().to_dict()
        base = content["base"] or {}
        return {**content, "base": {name: x for name, x in base.items() if not name.startswith("_")}}


class LinearizedEncoder(PreTrainedModel):
    """`base` is the teacher's model. It is no child: its children are also this model's."""

    config_class = LinearizedEncoderConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LinearizedEncoderConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if base is None:
            settings = {"attn_implementation": IMPLEMENTATION, "dtype": torch.get_default_dtype()}
            if config.auto_class not in CLASSES:
                raise ValueError(f"auto_class={config.auto_class!r} is not one of {', '.join(CLASSES)}")
            base = CLASSES[config.auto_class].from_config(config.base, **settings)
        config.base = base.config
        self.__dict__["base"] = base
        self.__dict__.update({name: base.__dict__[name] for name in CONTENT})
        for name in TRAITS:
            setattr(self, name, getattr(base, name))
        self.main_input_name = base.main_input_name
        self.attend_with(config.read_ways())
        self.post_init()

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, config: LinearizedEncoderConfig) -> "LinearizedEncoder":
        """Make a teacher attend linearly; it is changed in place and shares all its weights."""
        for module in teacher.modules():
            module._is_hf_initialized = True  # else its weights might be drawn again
        student = cls(config, base=teacher)
        teacher.set_attn_implementation(IMPLEMENTATION)
        return student.train(teacher.training)

    def attend_with(self, ways: Any) -> None:
        """Make all layers attend in another way, or each in its way from a list."""
        modules = replaced_modules(self.base)
        for module, way in zip(modules, ways if isinstance(ways, list) else [ways] * len(modules), strict=True):
            module.both_ways = way

    def _init_weights(self, module: nn.Module) -> None:
        self.base._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.base.set_output_embeddings(value)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # by its name transformers' Trainer knows that a model takes them
        **kwargs: Any,
    ) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs |= {"inputs_embeds": inputs_embeds, "pixel_values": pixel_values, "labels": labels}
        if kwargs.get("output_attentions"):
            logger.warning_once(NO_WEIGHTS)
            kwargs["output_attentions"] = False
        if self.config.output_hidden_states:  # `base` reads only its own config
            kwargs.setdefault("output_hidden_states", True)
        grid = () if pixel_values is None else grid_of(self.base.config, pixel_values)
        if grid and torch.is_grad_enabled():
            for module in attention_modules(self.base):
                module.__dict__["grid"] = grid
        token = GRID.set(grid)
        try:
            return self.base(**{name: x for name, x in inputs.items() if x is not None}, **kwargs)
        finally:
            GRID.reset(token)

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"attn_implementation={attn_implementation!r}: the attention of a linearized encoder is its own and cannot "
            "be exchanged; load the teacher to attend with softmax"
        )


def grid_of(config: PreTrainedConfig, pixels: torch.Tensor) -> tuple[int, int]:
    """Count the patches of pictures (pictures, channels, height, width) along each axis."""
    size = config.patch_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return pixels.shape[-2] // height, pixels.shape[-1] // width


LinearizedEncoderConfig.register_for_auto_class()
LinearizedEncoder.register_for_auto_class("AutoModel")
