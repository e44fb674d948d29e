"""Keys and values in 8 bits a number: what a state may hold in half the bytes.

A vector becomes whole numbers from -127 to 127 times one power of two, the least that lets its largest number fit. What
is rounded once stays what it is when it is rounded again, and every such number is exact in bf16, fp16 and fp32: so a
token is the same whether it is attended to in the call that read it or out of the state of a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .state import is_exact, least_count, remember_token, tensors, working_dtype

MAX_CODE = 127
LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none

KEYS_AND_VALUES = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v")

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rounded:
    """Vectors of 8 bits a number, to compute with and to keep."""

    exact: Tensor  # (…, dim) what was rounded
    codes: Tensor  # (…, dim)
    exponent: Tensor  # (…, 1)

    @staticmethod
    def of(x: Tensor) -> Rounded:
        return Rounded(x, *codes_of(x.detach()))

    @cached_property
    def numbers(self) -> Tensor:  # (…, dim)
        return numbers_of(self.exact, self.codes, self.exponent)

    @cached_property
    def bytes(self) -> Tensor:  # (…, dim + 1)
        return torch.cat([self.codes, self.exponent.to(self.codes.dtype)], -1).to(torch.int8)

    def __getitem__(self, heads: Any) -> Rounded:
        return Rounded(self.exact[:, heads], self.codes[:, heads], self.exponent[:, heads])


def attend_in_8_bits(
    group: nn.Module, q: Tensor, k: Rounded, v: Rounded, scale: float, real: Tensor | None, held: Any, keep: bool
) -> tuple[Tensor, Any]:
    """Let heads attend whose state is kept as bytes; give the state, too, where it is to be kept."""
    before = None if held is None else unpack_state(held, k.numbers.dtype, v.numbers.dtype)
    alone = keep and before is not None and real is None and q.shape[-2] == 1
    if alone and is_exact(held):
        remember_token(held, k.bytes, v.bytes, least_count(held.count))  # before the group counts the token, in place
    out, after = group(q, k.numbers, v.numbers, scale, real, None if before is None else replace(before))
    if not keep:
        return out, None
    return out, pack_token(held, before, after, k.bytes, v.bytes) if alone else pack_state(after)


def round_vectors(x: Tensor) -> Tensor:
    """Round vectors (…, dim) to what 8 bits can hold."""
    return numbers_of(x, *codes_of(x.detach()))


def round_together(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Round keys and values, in one go where they are alike: a call of an operation takes longer than its work."""
    if k.shape != v.shape or k.dtype != v.dtype:
        return round_vectors(k), round_vectors(v)
    k, v = round_vectors(torch.stack([k, v]))
    return k, v


def numbers_of(x: Tensor, codes: Tensor, exponent: Tensor) -> Tensor:
    """Give the numbers that x became; gradients pass as if nothing were rounded."""
    numbers = (codes * power(exponent)).to(x.dtype)
    return numbers + (x - x.detach()) if x.requires_grad else numbers


def pack_vectors(x: Tensor) -> Tensor:
    """Write vectors (…, dim) as bytes: their whole numbers, then the exponent."""
    return Rounded.of(x).bytes


def unpack_vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Read what `packed` wrote."""
    return (x[..., :-1] * power(x[..., -1:])).to(dtype)


def pack_state(state: Any) -> Any:
    """Give a state whose keys and values are bytes."""
    return replace(state, **{name: pack_vectors(x) for name, x in keys_and_values(state).items()})


def unpack_state(state: Any, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Give a state whose keys and values can be computed with."""
    dtypes = {"k": key_dtype, "v": value_dtype}
    return replace(state, **{name: unpack_vectors(x, dtypes[name[-1]]) for name, x in keys_and_values(state).items()})


def pack_token(held: Any, before: Any, after: Any, k: Tensor, v: Tensor) -> Any:
    """Pack what a token has changed beside window and sinks: `held` is `before`, packed, which became `after`."""
    changed = {name: x for name, x in tensors(after).items() if name not in KEYS_AND_VALUES}
    if not is_exact(held):
        return replace(held, k=torch.cat([held.k, k], -2), v=torch.cat([held.v, v], -2), **changed)
    merged = [name for name in ("slot_k", "slot_v") if getattr(after, name, None) is not getattr(before, name, None)]
    return replace(held, **changed, **{name: pack_vectors(getattr(after, name)) for name in merged})


def keys_and_values(state: object) -> dict[str, Tensor]:
    return {name: x for name, x in tensors(state).items() if name in KEYS_AND_VALUES}


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Give the whole numbers of vectors, and the exponent of each: (…, dim), (…, 1)."""
    work = x.to(working_dtype(x))
    if not work.numel():
        return work, work.new_zeros(*work.shape[:-1], 1, dtype=torch.int32)
    largest = work.abs().amax(-1, keepdim=True).float().view(torch.int32)
    # an fp32 number has its exponent in the bits from 23 on; what is above 127/128 of a power of two takes the next
    exponent = (largest + (0x1FFFF - (133 << 23))).bitwise_right_shift_(23).clamp_(LOWEST, HIGHEST)
    return (work * power(-exponent)).round_(), exponent


def power(exponent: Tensor) -> Tensor:
    """2 to a whole number, exactly: its exponent is written into an fp32 number."""
    return (exponent.to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)
