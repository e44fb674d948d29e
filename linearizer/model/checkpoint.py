"""Students as folders: make one from a teacher, save it, load it.

What is saved loads with transformers alone: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from linearizer.errors import RequestError
from linearizer.run.allocation import Allocation, check
from linearizer.run.files import replacing
from linearizer.run.head_bytes import Head, Layer
from linearizer.runtime.layer_student import LayerStudent
from linearizer.runtime.modeling_linearized import LinearizedConfig, LinearizedForCausalLM

SHARD = "1GB"  # what is sent again at most where an upload breaks

# Code that is installed is preferred to the copy in a checkpoint, with and without trust_remote_code.
AutoConfig.register(LinearizedConfig.model_type, LinearizedConfig, exist_ok=True)
AutoModelForCausalLM.register(LinearizedConfig, LinearizedForCausalLM, exist_ok=True)


def linearize(
    teacher: PreTrainedModel,
    layers: Sequence[Layer],
    allocation: Allocation,
    feature_map: str = "prf",
    seed: int = 0,
    origin: dict[str, str | None] | None = None,
) -> LinearizedForCausalLM:
    """Put an untrained student into every layer of a teacher, which is changed in place and keeps all its weights."""
    check(allocation, layers)
    base = {name: value for name, value in teacher.config.to_dict().items() if not name.startswith("_")}
    config = LinearizedConfig(
        base=base,
        layers=[held(heads, layer) for heads, layer in zip(allocation.heads, layers, strict=True)],
        sinks=allocation.sinks,
        feature_map=feature_map,
        teacher=origin or {},
    )
    return LinearizedForCausalLM.from_teacher(teacher, config, seed)


def students_of(
    student: LinearizedForCausalLM, layers: Sequence[Layer], allocation: Allocation, seed: int = 0
) -> tuple[LayerStudent, ...]:
    """Make what would attend in a student's layers if another allocation were its own; features are untrained."""
    check(allocation, layers)
    rows = [held(heads, layer) for heads, layer in zip(allocation.heads, layers, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in (row for row in rows if row is not None):
        layer = LayerStudent(row["heads"], allocation.sinks, row["key_dim"], student.config.feature_map)
        made.append(layer.to(next(student.parameters()).device).eval())
        layer.reset(generator)
    return tuple(made)


def held(heads: Sequence[Head], layer: Layer) -> dict[str, Any] | None:
    """Say in a config what the heads of a layer hold; nothing where the layer stays as it is."""
    if layer.native_window is not None:
        return None
    return {"heads": [head.held for head in heads], "key_dim": layer.key_dim}


def save(student: LinearizedForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write weights, config, runtime code and tokenizer; an older checkpoint stays until the new one is whole."""
    with replacing(folder) as unfinished:
        student.save_pretrained(unfinished, max_shard_size=SHARD)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)


def load(folder: str | Path, **how: object) -> LinearizedForCausalLM:
    """Load a student with the code of this package; `how` goes to from_pretrained (dtype, device_map, …)."""
    if not (Path(folder) / "config.json").is_file():
        raise RequestError(f"{folder} holds no checkpoint: there is no config.json in it")
    return LinearizedForCausalLM.from_pretrained(folder, **how).eval()
