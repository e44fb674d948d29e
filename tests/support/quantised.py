"""Writes the files of quantised models by hand, as the tools of each method do, and what their numbers stand for."""

import importlib.util
import re
import shutil

import pytest
import torch
from safetensors.torch import load, save_file

from tests.support.damage import change_json

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, from the lowest bits of a word on
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=False)
AWQ = dict(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True)
FP8 = dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")
MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.embed_tokens", "lm_head"])
INT8 = dict(
    quant_method="compressed-tensors",
    format="int-quantized",
    quantization_status="compressed",
    config_groups={
        "group_0": {"targets": ["Linear"], "weights": dict(num_bits=8, type="int", strategy="channel", symmetric=True)}
    },
    ignore=["lm_head"],
)
MATRICES, EXPERTS = r"(?<=_proj\.)weight$", r"(?<=_proj)$"  # what of their names is replaced by names of parts
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def save_quantised(model, folder, stated, extra=None):
    """Save a model with its matrices quantised; give the model that they stand for."""
    model.save_pretrained(folder)
    shutil.copytree(folder, plain := folder / "plain")
    path, tensors, generator = folder / "model.safetensors", {}, torch.Generator().manual_seed(0)
    quantise = {"fp8": fp8, "mxfp4": mxfp4, "compressed-tensors": int8}.get(stated["quant_method"])
    state = load(path.read_bytes())
    for name, x in state.items():
        turned = ".c_" in name and name.endswith("weight")  # of GPT-2: (inputs, outputs)
        if turned or re.search(EXPERTS if quantise is mxfp4 else MATRICES, name) and min(x.shape) >= 32:
            x = x.T if turned else x
            parts, meant = quantise(x) if quantise else pack(x, stated, generator)
            state[name] = meant.T.contiguous() if turned else meant
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            tensors[name] = x
    save_file({**tensors, **(extra or {})}, path, {"format": "pt"})
    change_json(folder / "config.json", quantization_config=stated)
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(plain, dtype=torch.float32).eval()


def fp8(weight):
    """Give a weight in blocks of 32 x 32 float8 numbers, with their scales, and what they stand for."""
    blocks = weight.unfold(0, 32, 32).unfold(1, 32, 32)
    scales = blocks.abs().amax((-1, -2)) / 448
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    small = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, small.float() * spread


def int8(weight):
    """Give a weight as 8-bit integers with a scale for every row, and what they stand for."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    small = (weight / scales).round().to(torch.int8)
    return {"weight": small, "weight_scale": scales}, small * scales


def mxfp4(weight):  # (experts, inputs, outputs)
    """Give weights as 4-bit numbers, two a byte, with an exponent for each 32 inputs, and what they stand for."""
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / FP4.max()).log2().ceil()[..., None]
    numbers = (groups / exponents.exp2()).unsqueeze(-1).sub(FP4).abs().argmin(-1)
    blocks, scales = numbers[..., 0::2] + 16 * numbers[..., 1::2], exponents[..., 0] + 127
    parts = {"_blocks": blocks.to(torch.uint8), "_scales": scales.to(torch.uint8)}
    return parts, (FP4[numbers] * exponents.exp2()).flatten(-2).mT.contiguous()


def pack(weight, stated, generator):
    """Round a matrix (outputs, inputs) to few bits; give what a file of GPTQ or AWQ holds, and what it stands for."""
    inputs, bits = weight.shape[1], stated["bits"]
    size = stated["group_size"] if stated["group_size"] > 0 else inputs
    groups = torch.arange(inputs) // size
    if stated.get("desc_act"):
        groups = groups[torch.randperm(inputs, generator=generator)]
    count = inputs // size
    scales = (weight.abs().max() / 2 ** (bits - 1) * (0.5 + torch.rand(count, len(weight), generator=generator))).half()
    zeros = torch.randint(1, 2**bits, (count, len(weight)), generator=generator)
    spread = scales.float()[groups], zeros[groups]
    numbers = (weight.T / spread[0] + spread[1]).round().clamp(0, 2**bits - 1).long()  # (inputs, outputs)
    meant = ((numbers - spread[1]) * spread[0]).T.contiguous()
    if stated["quant_method"] == "awq":
        words = {"qweight": pack_rows(numbers, 4, AWQ_COLUMNS), "qzeros": pack_rows(zeros, 4, AWQ_COLUMNS)}
        return {**words, "scales": scales}, meant
    stored = zeros if stated.get("checkpoint_format") else zeros - 1
    words = {"qweight": pack_rows(numbers.T, bits).T.contiguous(), "qzeros": pack_rows(stored, bits)}
    return {**words, "scales": scales, "g_idx": groups.int()}, meant


def pack_rows(numbers, bits, columns=None):
    """Pack every row of a matrix."""
    if columns is not None:
        numbers = numbers.unflatten(1, (-1, 8))[:, :, list(columns)].flatten(1)
    return torch.tensor([words_of(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def words_of(numbers, bits):
    """Write whole numbers one after the other, the lowest bits first, and cut that into words of 32 bits."""
    text = "".join(format(number, f"0{bits}b")[::-1] for number in numbers)
    words = [int(text[place : place + 32][::-1], 2) for place in range(0, len(text), 32)]
    return [word - 2**32 * (word >= 2**31) for word in words]
