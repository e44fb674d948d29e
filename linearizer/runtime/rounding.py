"""Keys and values in 8 bits a number: what a state may hold in half the bytes.

A vector becomes whole numbers from -127 to 127 times one power of two, the least that lets its largest number fit. What
is rounded once stays what it is when it is rounded again, and every such number is exact in bf16, fp16 and fp32: so a
token is the same whether it is attended to in the call that read it or out of the state of a later one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from .state import tensors, working_dtype

MOST = 127
LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none

KEYS_AND_VALUES = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v")

Tensor = torch.Tensor
Held = TypeVar("Held")


def rounded(x: Tensor) -> Tensor:
    """Round vectors (…, dim) to what 8 bits can hold; gradients pass as if nothing were rounded."""
    codes, exponent = codes_of(x.detach())
    found = (codes * power(exponent)).to(x.dtype)
    return found + (x - x.detach()) if x.requires_grad else found


def packed(x: Tensor) -> Tensor:
    """Write vectors (…, dim) as bytes: their whole numbers, then the exponent."""
    codes, exponent = codes_of(x)
    return torch.cat([codes, exponent.to(codes.dtype)], -1).to(torch.int8)


def unpacked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Read what `packed` wrote."""
    return (x[..., :-1] * power(x[..., -1:])).to(dtype)


def pack(state: Held) -> Held:
    """Give a state whose keys and values are bytes."""
    return replace(state, **{name: packed(x) for name, x in keys_and_values(state).items()})  # type: ignore[type-var]


def unpack(state: Held, dtype: torch.dtype) -> Held:
    """Give a state whose keys and values can be computed with."""
    found = {name: unpacked(x, dtype) for name, x in keys_and_values(state).items()}
    return replace(state, **found)  # type: ignore[type-var]


def keys_and_values(state: object) -> dict[str, Tensor]:
    return {name: x for name, x in tensors(state).items() if name in KEYS_AND_VALUES}


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Give the whole numbers of vectors, and the exponent of each: (…, dim), (…, 1)."""
    work = x.to(working_dtype(x))
    if not work.numel():
        return work, work.new_zeros(*work.shape[:-1], 1, dtype=torch.int32)
    part, exponent = torch.frexp(work.abs().amax(-1, keepdim=True))
    exponent = (exponent - 7 + (part > MOST / 128)).clamp(LOWEST, HIGHEST)
    return (work * power(-exponent)).round(), exponent


def power(exponent: Tensor) -> Tensor:
    """2 to a whole number, exactly: its exponent is written into an fp32 number."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
