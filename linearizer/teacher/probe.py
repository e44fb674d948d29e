"""Runs a model's own code on a few tokens, and records the shapes with which every layer attends."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linearizer.errors import first_line
from linearizer.plan.head_bytes import Layer
from linearizer.quiet import quiet
from linearizer.student.attention_interface import observing
from linearizer.student.cache import CACHE
from linearizer.teacher.support import Refused, check_attention, check_layers, check_modules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Product = TypeVar("Product")
WATCHED_TOKENS = 4


@dataclass(frozen=True)
class AttentionLayer:
    """The shape of one attention layer, as it ran."""

    index: int
    shape: Layer
    scaling: float


class MetaValues(TorchDispatchMode):
    """Make up values of meta tensors, which have none, where code reads them; no shape of attention depends on them."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.nonzero.default and args[0].is_meta:  # no token goes to any expert
            return args[0].new_empty(0, args[0].ndim, dtype=torch.long)
        return func(*args, **(kwargs or {}))


def build_blueprint(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model without weights, on the meta device: it takes no memory, whatever its size."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet():
        try:
            return AutoModelForCausalLM.from_config(
                deepcopy(config), attn_implementation="eager", experts_implementation="eager"
            ).eval()
        except Exception as error:  # the model's own code runs with numbers that it does not check
            raise unbuildable(error) from error


def watch_blueprint(model: PreTrainedModel) -> list[AttentionLayer]:
    """Watch the layers of a model without weights."""
    return run_blueprint(lambda: watch_layers(model))


def run_blueprint(run: Callable[[], Product]) -> Product:
    """Run code of a model without weights."""
    with MetaValues(), quiet():
        try:
            return run()
        except Refused:
            raise
        except Exception as error:  # the model's own code runs with numbers that it does not check
            raise unbuildable(error) from error


def unbuildable(error: Exception) -> Refused:
    """Say that a config and its model's code do not fit together."""
    return Refused(f"transformers cannot build it from its config ({first_line(error)})", "check its config.json")


def watch_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Run a model on a few tokens, and record how each of its layers attends; each must attend once."""
    seen: list[AttentionLayer] = []

    def observe(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, more: dict
    ) -> None:
        check_attention(query, key, more)
        index = int(module.layer_idx)  # type: ignore[arg-type]
        window = native_window(model.config, index, more)
        shape = Layer(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], window)
        seen.append(AttentionLayer(index, shape, float(scaling)))

    check_modules(model)
    tokens = torch.zeros(1, WATCHED_TOKENS, dtype=torch.long, device=model.device)
    with torch.no_grad(), quiet(), observing(model, observe):
        cache = getattr(model(tokens, use_cache=True), CACHE, None)
    cached = {i for i, layer in enumerate(getattr(cache, "layers", ())) if getattr(layer, "keys", None) is not None}
    check_layers([layer.index for layer in seen], cached, getattr(model.config, "num_hidden_layers", 0))
    return sorted(seen, key=lambda layer: layer.index)


def native_window(config: PreTrainedConfig, index: int, arguments: dict) -> int | None:
    """Find how many tokens a layer of the teacher attends to, if that is bounded."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else None
    if kind == "chunked_attention":
        return config.attention_chunk_size
    if kind == "sliding_attention":
        return config.sliding_window
    return arguments.get("sliding_window")
