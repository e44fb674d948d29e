"""What rounding.py does with vectors, in one launch each, as Triton kernels: texts call it for all that heads hold."""

from __future__ import annotations

import functools

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import count_parts, load_tile, on_device_of_first, padded, precision
from .kernel_packed_rows import PackedConstants, kind_of, load_codes, round_rows, store_rows
from .rounding import SCALE_BYTES, Vectors, packed_bytes
from .state import working_dtype

Tensor = torch.Tensor
ROWS = 16  # of a program


@triton.jit(do_not_specialize=["COUNT", "BITS"])
def round_kernel(x_ptr, out_ptr, COUNT, BITS, C: tl.constexpr):
    """Round rows; grid (part of the rows,)."""
    rows, od = tl.program_id(0).to(tl.int64) * C.BT + tl.arange(0, C.BT), tl.arange(0, C.DP)
    x = load_tile(x_ptr, rows, od, COUNT, C.D).to(C.ACC)
    codes, scale = round_rows(x, C.LEAST, 1 << BITS, C.D, C.DP)
    to_ptr = out_ptr + rows[:, None] * C.D + od[None, :]
    out = (codes * scale[:, None]).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, out, mask=(rows < COUNT)[:, None] & (od < C.D)[None, :])


@triton.jit(do_not_specialize=["COUNT", "BITS"])
def pack_kernel(x_ptr, packed_ptr, codes_ptr, COUNT, BITS, C: tl.constexpr):
    """Write rows as bytes; grid (part of the rows,)."""
    rows, od = tl.program_id(0).to(tl.int64) * C.BT + tl.arange(0, C.BT), tl.arange(0, C.DP)
    x = load_tile(x_ptr, rows, od, COUNT, C.D).to(C.ACC)
    codes_ptr += tl.program_id(0).to(tl.int64) * C.BT * C.DP
    store_rows(packed_ptr, rows, rows < COUNT, x, BITS, codes_ptr, C.D, C.DP, C.LEAST, C)


@triton.jit(do_not_specialize=["COUNT", "BITS"])
def unpack_kernel(packed_ptr, out_ptr, COUNT, BITS, C: tl.constexpr):
    """Read rows of bytes; grid (part of the rows,)."""
    rows, od = tl.program_id(0).to(tl.int64) * C.BT + tl.arange(0, C.BT), tl.arange(0, C.DP)
    codes, scale = load_codes(packed_ptr, rows, rows < COUNT, BITS, C.D, C.DP, C.LEAST, C)
    to_ptr = out_ptr + rows[:, None] * C.D + od[None, :]
    out = (codes * scale[:, None]).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, out, mask=(rows < COUNT)[:, None] & (od < C.D)[None, :])


@functools.cache  # or the host would take longer to launch a kernel than it runs
def constants_of(dim: int, work: torch.dtype, kind: int) -> PackedConstants:
    """Return what kernels are compiled for, for vectors of a size."""
    return PackedConstants(D=dim, DP=padded(dim), BT=ROWS, LEAST=kind, **precision(work))


@on_device_of_first
def round_vectors(x: Tensor, bits: int) -> Tensor:
    """Round vectors (…, dim) to a number of bits."""
    out = torch.empty_like(x := x.contiguous())
    if count := x.numel() // x.shape[-1]:
        grid = (count_parts(count, ROWS),)
        round_kernel[grid](x, out, count, bits, constants_of(x.shape[-1], working_dtype(x), kind_of(bits)), num_warps=4)
    return out


@on_device_of_first
def pack_vectors(x: Tensor, bits: int) -> Tensor:
    """Write vectors (…, dim) as bytes."""
    x, dim = x.contiguous(), x.shape[-1]
    packed = x.new_empty(*x.shape[:-1], packed_bytes(dim, bits), dtype=torch.int8 if bits == 8 else torch.uint8)
    if count := x.numel() // dim:
        grid = (count_parts(count, ROWS),)
        codes = x.new_empty(grid[0] * ROWS * padded(dim), dtype=torch.uint8)
        constants = constants_of(dim, working_dtype(x), kind_of(bits))
        pack_kernel[grid](x, packed.view(torch.uint8), codes, count, bits, constants, num_warps=4)
    return packed


@on_device_of_first
def unpack_vectors(x: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """Read what `pack_vectors` wrote."""
    x, dim = x.contiguous(), x.shape[-1] - 1 if bits == 8 else (x.shape[-1] - SCALE_BYTES) * 8 // bits
    out = x.new_empty(*x.shape[:-1], dim, dtype=dtype)
    if count := out.numel() // dim:
        constants = constants_of(dim, working_dtype(out), kind_of(bits))
        unpack_kernel[(count_parts(count, ROWS),)](x.view(torch.uint8), out, count, bits, constants, num_warps=4)
    return out


BY_KERNELS = Vectors(round_vectors, pack_vectors, unpack_vectors)
