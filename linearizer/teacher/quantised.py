"""Decides which quantised models serve as teachers: some unchanged, others with weights expanded while they load.

transformers expands most of them. Checkpoints of GPTQ and AWQ are read here: a matrix of both is (q - zero) · scale,
with a zero and a scale for every group of inputs and every output. GPTQ packs q along the inputs and names each input's
group; AWQ packs along the outputs, eight of them in an order of its own. Both pack zeros along the outputs, and GPTQ's
first format stores them minus 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from linearizer.errors import UnsupportedModel
from linearizer.hub.weight_files import GGUF, damaged_weights
from linearizer.teacher.layers import is_transposed, matrices
from linearizer.teacher.support import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BEFORE = "name the model that it was quantised from"
# The weights of PACKED are not changed; those of other methods are expanded to a floating type while they load.
PACKED = "bitsandbytes"
OF_PACKED = re.compile(r"\.(weight\.absmax|SCB)$")  # ends the names of tensors beside a packed matrix
READ_HERE = ("gptq", "awq")  # not by transformers
PACKAGES = {PACKED: "bitsandbytes", "compressed-tensors": "compressed_tensors", GGUF: "gguf"}  # that load them
METHODS = (*PACKAGES, *READ_HERE, "fp8", "mxfp4")
MXFP4_KIND = "gpt_oss"
Tensor = torch.Tensor
WORD = 32  # bits
WORDS, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # the first is the default
NO_BIAS = torch.zeros(1)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the numbers in a word


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config's description of the quantisation of its weights; {} if they are not quantised."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return {}
    content = dict(stated) if isinstance(stated, dict) else stated.to_dict()
    bitsandbytes = content.get("load_in_4bit") or content.get("load_in_8bit")
    return {**content, "quant_method": content.get("quant_method") or (PACKED if bitsandbytes else "unknown")}


def state_quantisation(config: PreTrainedConfig) -> None:
    """Let a whole model's config state the quantisation that only the config of its text tower states."""
    text = config.get_text_config(decoder=True)
    if text is not config and (stated := text.__dict__.pop("quantization_config", None)) is not None:
        config.quantization_config = getattr(config, "quantization_config", None) or stated


def name_unpacked(
    config: PreTrainedConfig, model: PreTrainedModel, names: Mapping[str, str], stored: Collection[str]
) -> None:
    """Let a text tower's config list the matrices that are not packed, which its whole model calls otherwise.

    `names` maps patterns of the names in its files to those in `model`.
    """
    if is_packed(config):
        inner = [name_in_tower(key, names) or "" for key in stored]
        packed = {OF_PACKED.sub("", key) for key in inner if OF_PACKED.search(key)}
        unpacked = [place for place, module in model.named_modules() if matrices(module)[:1] == [module]]
        unpacked = [place for place in unpacked if place not in packed]
        config.quantization_config = {**quantisation_of(config), "llm_int8_skip_modules": unpacked}


def name_in_tower(name: str, names: Mapping[str, str]) -> str | None:
    """Return a text tower's name of what a whole model's files call `name`; None if it is not in the tower."""
    return next((re.sub(pattern, new, name) for pattern, new in names.items() if re.match(pattern, name)), None)


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
    if name == "mxfp4" and config.get_text_config(decoder=True).model_type != MXFP4_KIND:
        raise Refused(f"its weights are quantised by mxfp4, which transformers expands for {MXFP4_KIND} alone", BEFORE)
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


def keep_as_stored(model: torch.nn.Module) -> None:
    """Do not convert packed weights: a second form for some CPUs rounds differently, and has no gradients."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def forget_quantisation(model: PreTrainedModel) -> None:
    """Make an ordinary model from a model with expanded weights."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model._weight_conversions = None  # or it would be saved with the names of packed weights


def check_few_bits(method: str, stated: Mapping[str, Any], remedy: str) -> None:
    """Refuse a layout of GPTQ or AWQ that is not read here."""
    if (layout := layout_of(method, stated)) not in LAYOUTS[method]:
        raise Refused(f"its weights are quantised by {method} in the layout {layout}, which is not served", remedy)
    if (count := stated.get("bits", stated.get("w_bit", 4))) not in BITS[method]:
        raise Refused(f"its weights are quantised by {method} to {count} bits, which is not served", remedy)


def layout_of(method: str, stated: Mapping[str, Any]) -> str:
    """Name the layout of the weights by their config; tools name it in several ways, or not at all."""
    name = stated.get("checkpoint_format" if method == "gptq" else "version") or stated.get("format")
    return str(name or LAYOUTS[method][0]).lower()


def expand_weights(
    name: str,
    paths: Sequence[Path],
    method: str,
    stated: Mapping[str, Any],
    model: PreTrainedModel,
    dtype: torch.dtype,
    tower: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Read the weights of a quantised model as those of an ordinary model, in a type; `model` needs no weights.

    `tower` maps patterns of names in the files to names in a text tower: other tensors are not read.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        read = {key: partial(file.get_tensor, key) for file in files for key in file.keys()}  # noqa: SIM118
        if tower:
            read = {new: x for key, x in read.items() if (new := name_in_tower(key, tower)) is not None}
        packed = sorted(key.removesuffix(f".{WORDS}") for key in read if key.endswith(f".{WORDS}"))
        parts = {f"{module}.{part}" for module in packed for part in (WORDS, ZEROS, SCALES, GROUPS)}
        if scaled := sorted(key for key in read.keys() - parts if key.endswith(f".{SCALES}")):
            raise UnsupportedModel(  # AWQ does so where it cannot scale the matrix before them
                f"{name!r} cannot be linearized, because its quantisation scales activations ({scaled[0]}), which is "
                "not served: name the model that it was quantised from"
            )
        weights = {
            key: x.to(dtype) if (x := read_tensor()).is_floating_point() else x
            for key, read_tensor in read.items()
            if key not in parts
        }
        for place in packed:
            names = {part: f"{place}.{part}" for part in (WORDS, ZEROS, SCALES, GROUPS)}
            tensors = {part: read[key]() for part, key in names.items() if key in read}
            try:
                less_one = layout_of(method, stated) == LAYOUTS["gptq"][0]
                matrix = expand_gptq(tensors, less_one) if method == "gptq" else expand_awq(tensors)
            except (LookupError, RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
                raise damaged_weights(name, f"{place} cannot be unpacked: {error}") from error
            module = modules.get(place)
            weights[f"{place}.weight"] = (matrix if is_transposed(module) else matrix.T).to(dtype).contiguous()
            bias = f"{place}.bias"  # some tools write a bias of zeros for matrices that have none
            if module is not None and getattr(module, "bias", None) is None and weights.pop(bias, NO_BIAS).any():
                raise damaged_weights(name, f"{place} has a bias that the model has no place for")
    return weights


def expand_gptq(parts: Mapping[str, Tensor], less_one: bool) -> Tensor:  # (inputs, outputs)
    """Expand a matrix of GPTQ; its shape shows its bits, as these may differ from matrix to matrix."""
    scales, words = parts[SCALES].float(), parts[WORDS]
    bits = parts[ZEROS].shape[1] * WORD // scales.shape[1]
    if bits not in BITS["gptq"]:
        raise ValueError(f"{bits} bits")
    zeros = unpack(parts[ZEROS].T, bits).T
    if less_one:
        zeros = add_one(parts[ZEROS], zeros, bits)
    numbers = unpack(words, bits)
    groups = parts[GROUPS].long() if GROUPS in parts else torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
    return (numbers.float() - zeros.float()[groups]) * scales[groups]


def add_one(words: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Add the 1 that was subtracted, to whole words if no number spans two: a zero of 0 borrowed from the next."""
    if WORD % bits:
        return (zeros + 1) & (2**bits - 1)
    ones = sum(1 << place for place in range(0, WORD, bits))
    return unpack((words + ones).T, bits).T


def expand_awq(parts: Mapping[str, Tensor]) -> Tensor:  # (inputs, outputs)
    """Expand a matrix of AWQ."""
    scales = parts[SCALES].float()
    words = (unpack(parts[part].T, 4).unflatten(0, (-1, len(AWQ_ORDER))) for part in (WORDS, ZEROS))
    numbers, zeros = (word[:, list(AWQ_ORDER)].flatten(0, 1).T for word in words)  # in the order of the outputs
    size = len(numbers) // len(scales)
    return (numbers.float() - zeros.float().repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)


def unpack(words: Tensor, bits: int) -> Tensor:  # (words, columns) -> (numbers, columns), of 8 bits
    """Take numbers out of words of 32 bits, the first from the lowest bits; some may span two words."""
    shared = gcd(WORD, bits)
    blocks = words.contiguous().unflatten(0, (-1, bits // shared))
    numbers = torch.empty(len(blocks), WORD // shared, words.shape[1], dtype=torch.uint8)
    for place in range(WORD // shared):
        word, shift = divmod(bits * place, WORD)
        number = (blocks[:, word] >> shift) & (2 ** min(bits, WORD - shift) - 1)
        if shift + bits > WORD:
            number = number | (blocks[:, word + 1] << (WORD - shift))
        numbers[:, place] = number & (2**bits - 1)
    return numbers.flatten(0, 1)
