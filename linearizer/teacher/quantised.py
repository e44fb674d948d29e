"""Which quantised models serve as teachers: some as they are, others with their weights expanded while they load."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from linearizer.hub.weight_files import GGUF
from linearizer.teacher.gptq_awq import check_few_bits
from linearizer.teacher.support import Refused

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound="torch.nn.Module")
BEFORE = "name the model that it was quantised from"
# The weights of PACKED stay as they are; those of others are expanded to a floating type while they load.
PACKED = "bitsandbytes"
READ_HERE = ("gptq", "awq")  # not by transformers
PACKAGES = {PACKED: "bitsandbytes", "compressed-tensors": "compressed_tensors", GGUF: "gguf"}  # that load them
METHODS = (*PACKAGES, *READ_HERE, "fp8")


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a config says of the quantisation of its weights; nothing where they are not quantised."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return {}
    content = dict(stated) if isinstance(stated, dict) else stated.to_dict()
    bitsandbytes = content.get("load_in_4bit") or content.get("load_in_8bit")
    return {**content, "quant_method": content.get("quant_method") or (PACKED if bitsandbytes else "unknown")}


def method_of(config: PreTrainedConfig) -> str | None:
    """Name the method that a model's weights are quantised by."""
    method = quantisation_of(config).get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def is_packed(config: PreTrainedConfig) -> bool:
    """Whether a model's weights stay quantised while it computes."""
    return method_of(config) == PACKED


def check_quantisation(config: PreTrainedConfig) -> None:
    """Refuse quantised weights that cannot be loaded here, or that no student's checkpoint can hold."""
    if (name := method_of(config)) is None:
        return
    if name not in METHODS or (name == GGUF and gguf_file(config) is None):
        raise Refused(f"its weights are quantised by {name}, which is not served", BEFORE)
    if (package := PACKAGES.get(name)) is not None and find_spec(package) is None:
        raise Refused(
            f"its weights are quantised by {name}, and {package} is not installed",
            f"`pip install {package.replace('_', '-')}`, or {BEFORE}",
        )
    size = quantisation_of(config).get("weight_block_size")
    pair = isinstance(size, (list, tuple)) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)
    if name == "fp8" and size is not None and not pair:  # transformers would divide by it
        raise Refused(
            f"its config gives its fp8 weights blocks of {size!r}", "repair its config.json: name two numbers above 0"
        )
    if name in READ_HERE:
        check_few_bits(name, quantisation_of(config), BEFORE)


def gguf_file(config: PreTrainedConfig) -> str | None:
    """Name the GGUF file that a config was read from."""
    return quantisation_of(config).get("file") if method_of(config) == GGUF else None


def describe_quantisation(config: PreTrainedConfig) -> str | None:
    """Describe how a model's weights are quantised; None where they are not."""
    if (method := method_of(config)) is None:
        return None
    content = quantisation_of(config)
    if method == PACKED:
        return f"{method}, {4 if content.get('load_in_4bit') else 8} bits"
    if method in READ_HERE:
        return f"{method}, {content.get('bits', content.get('w_bit', 4))} bits"
    if gguf_file(config):
        return f"GGUF, {content['stored']}"
    return method


def expand_while_loading(config: PreTrainedConfig) -> None:
    """Let a config ask transformers to expand the weights, if they are not to stay quantised."""
    if method_of(config) is not None and not is_packed(config):
        config.quantization_config = {**quantisation_of(config), "dequantize": True}


def keep_as_stored(model: torch.nn.Module) -> None:
    """Keep packed weights as they are: a second form for some CPUs rounds otherwise, and has no gradients."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def forget_quantisation(model: PreTrainedModel) -> None:
    """Make of a model whose weights were expanded an ordinary model."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model._weight_conversions = None  # or it would be saved with the names of packed weights


def to_device(model: Model, device: str | torch.device) -> Model:
    """Bring a model to a device; packed weights are loaded to theirs."""
    config = getattr(model, "config", None)
    return model if config is not None and is_packed(config) else model.to(device)
