"""The text tower of a model that reads pictures, too: loaded alone, it gives the whole model's logits on text."""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from typing import TYPE_CHECKING

from linearizer.teacher.support import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Kinds whose own code hands text to the tower as it is, and lets every token read those before it alone.
TOWERS = frozenset(
    "aya_vision gemma3 internvl llava llava_next llava_onevision mistral3 qwen2_5_vl qwen2_vl qwen3_vl".split()
)
# Towers without a class of their own. Text has equal positions in all directions, so another kind computes the same.
ALIKE = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def text_tower(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a model's text tower, which names the whole model; else the config as it is."""
    from transformers import AutoConfig

    if config.model_type not in TOWERS or getattr(config, "quantization_config", None) is not None:
        return config
    tower = deepcopy(config.get_text_config(decoder=True))
    if kind := ALIKE.get(tower.model_type):
        content = {name: value for name, value in tower.to_dict().items() if name != "model_type"}
        tower = AutoConfig.for_model(kind, **content)
    tower.tie_word_embeddings = config.tie_word_embeddings  # some state it outside alone
    tower.dtype = tower.dtype or config.dtype
    tower.tower_of = (config.architectures or [config.model_type])[0]
    tower.architectures = None
    return tower


def whole_of(config: PreTrainedConfig) -> str | None:
    """Name the model that a text tower is a part of."""
    return getattr(config, "tower_of", None)


def names_in_files(tower: PreTrainedModel, stored: Collection[str]) -> dict[str, str]:
    """Find the names that a tower's weights have in the files of its whole model: pattern -> name in the tower."""
    prefix = f"{tower.base_model_prefix}."
    names = [name for name, _ in tower.named_parameters()]
    inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    places = {name.removesuffix(inner[0]) for name in stored if name.endswith(inner[0])}
    place = next((place for place in sorted(places) if all(place + name in stored for name in inner)), None)
    outer = {name: [own for own in stored if own.endswith(name)] for name in names if not name.startswith(prefix)}
    if place is None or not all(outer.values()):
        raise Refused(
            f"the weights of its text tower ({len(names)} of {len(stored)}) are not in its files by their names",
            "name its text-only sibling",
        )
    renamed = {min(own, key=len): name for name, own in outer.items()}
    return {f"^{re.escape(place)}": prefix, **{f"^{re.escape(own)}$": name for own, name in renamed.items()}}
