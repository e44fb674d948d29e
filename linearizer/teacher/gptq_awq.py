"""Reads checkpoints of GPTQ and AWQ: whole numbers of few bits, packed into words, become the weights they stand for.

A matrix of both is (q - zero) · scale, with a zero and a scale for every group of inputs and every output. GPTQ packs q
along the inputs and names each input's group; AWQ packs along the outputs, eight of them in an order of its own. Zeros
are packed along the outputs by both, and GPTQ's first format holds them less 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from linearizer.errors import UnsupportedModel
from linearizer.hub.weight_files import damaged_weights
from linearizer.teacher.layers import is_transposed
from linearizer.teacher.support import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensor = torch.Tensor
WORD = 32  # bits
PACKED, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
GPTQ_BITS: tuple[int, ...] = (2, 3, 4, 8)
AWQ_BITS: tuple[int, ...] = (4,)
GPTQ_LAYOUTS: tuple[str, ...] = ("gptq", "gptq_v2")  # the first holds zeros less 1
AWQ_LAYOUTS: tuple[str, ...] = ("gemm",)
NO_BIAS = torch.zeros(1)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of a word stand in it


def check_few_bits(method: str, stated: Mapping[str, Any], remedy: str) -> None:
    """Refuse a layout of GPTQ or AWQ that is not read here."""
    layouts, bits = (GPTQ_LAYOUTS, GPTQ_BITS) if method == "gptq" else (AWQ_LAYOUTS, AWQ_BITS)
    if (layout := layout_of(method, stated)) not in layouts:
        raise Refused(f"its weights are quantised by {method} in the layout {layout}, which is not served", remedy)
    if (count := stated.get("bits", stated.get("w_bit", 4))) not in bits:
        raise Refused(f"its weights are quantised by {method} to {count} bits, which is not served", remedy)


def layout_of(method: str, stated: Mapping[str, Any]) -> str:
    """Name how a config says that the weights are laid out; tools name it in several ways, or not at all."""
    name = stated.get("checkpoint_format" if method == "gptq" else "version") or stated.get("format")
    return str(name or (GPTQ_LAYOUTS if method == "gptq" else AWQ_LAYOUTS)[0]).lower()


def expand_weights(
    name: str, paths: Sequence[Path], method: str, stated: Mapping[str, Any], model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read the weights of a quantised model as an ordinary model has them, in a type; `model` needs no weights."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        held = {key: file for file in files for key in file.keys()}  # noqa: SIM118
        packed = sorted(key.removesuffix(f".{PACKED}") for key in held if key.endswith(f".{PACKED}"))
        parts = {f"{module}.{part}" for module in packed for part in (PACKED, ZEROS, SCALES, GROUPS)}
        if scaled := sorted(key for key in held.keys() - parts if key.endswith(f".{SCALES}")):
            raise UnsupportedModel(  # as AWQ does where it cannot scale a matrix before them
                f"{name!r} cannot be linearized, because its quantisation scales activations ({scaled[0]}), which is "
                "not served: name the model that it was quantised from"
            )
        weights = {
            key: x.to(dtype) if (x := file.get_tensor(key)).is_floating_point() else x
            for key, file in held.items()
            if key not in parts
        }
        for place in packed:
            names = {part: f"{place}.{part}" for part in (PACKED, ZEROS, SCALES, GROUPS)}
            own = {part: held[key].get_tensor(key) for part, key in names.items() if key in held}
            try:
                less_one = layout_of(method, stated) == GPTQ_LAYOUTS[0]
                matrix = expand_gptq(own, less_one) if method == "gptq" else expand_awq(own)
            except (KeyError, RuntimeError, ValueError, IndexError) as error:
                raise damaged_weights(name, f"{place} cannot be unpacked: {error}") from error
            module = modules.get(place)
            weights[f"{place}.weight"] = (matrix if is_transposed(module) else matrix.T).to(dtype).contiguous()
            bias = f"{place}.bias"  # some tools write a bias of zeros for matrices that have none
            if module is not None and getattr(module, "bias", None) is None and weights.pop(bias, NO_BIAS).any():
                raise damaged_weights(name, f"{place} has a bias that the model has no place for")
    return weights


def expand_gptq(parts: Mapping[str, Tensor], less_one: bool) -> Tensor:  # (inputs, outputs)
    """Expand a matrix of GPTQ; its bits show in its shape, as they may differ from matrix to matrix."""
    scales, words = parts[SCALES].float(), parts[PACKED]
    bits = parts[ZEROS].shape[1] * WORD // scales.shape[1]
    if bits not in GPTQ_BITS:
        raise ValueError(f"{bits} bits")
    zeros = unpack(parts[ZEROS].T, bits).T
    if less_one:
        zeros = add_one(parts[ZEROS], zeros, bits)
    numbers = unpack(words, bits)
    groups = parts[GROUPS].long() if GROUPS in parts else torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
    return (numbers.float() - zeros.float()[groups]) * scales[groups]


def add_one(words: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Add what was taken off: from whole words, so that a zero of 0 borrowed from the next, where none spans words."""
    if WORD % bits:
        return (zeros + 1) & (2**bits - 1)
    ones = sum(1 << place for place in range(0, WORD, bits))
    return unpack((words + ones).T, bits).T


def expand_awq(parts: Mapping[str, Tensor]) -> Tensor:  # (inputs, outputs)
    """Expand a matrix of AWQ."""
    scales = parts[SCALES].float()
    words = (unpack(parts[part].T, 4).unflatten(0, (-1, len(AWQ_ORDER))) for part in (PACKED, ZEROS))
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
