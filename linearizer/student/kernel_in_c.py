"""Kernels in C for a CPU, which the machine's own compiler builds on first use.

On a CPU a student's attention is many small operations, and their calls take longer than their work. A kernel takes
integers (explained in its source) and addresses of tensors; it returns whether memory sufficed. Without a compiler, or
with LINEARIZER_KERNELS=0, PyTorch replaces it. As any kernel, it must first pass a trial.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .state import is_traced

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-lm", "-pthread")
X86, WIDEST = ("x86_64", "AMD64"), ("-mprefer-vector-width=512",)  # or compilers use vectors of half the width
KINDS = {torch.float32: "float", torch.float64: "double"}  # types that kernels compute in

Tensor = torch.Tensor
Kernel = Callable[[Any, Any], int]

COMMON = r"""
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A vector fills a register; twice ROWS vectors fill all registers except those of the factors. */
#if defined(__AVX512F__) && WIDE
enum { BYTES = 64, ROWS = 8 };
#else
enum { BYTES = 32, ROWS = 4 };
#endif
typedef REAL vec __attribute__((vector_size(BYTES), aligned(BYTES), may_alias));
typedef __typeof__((vec){0} < (vec){0}) mask;
typedef REAL vec32 __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
typedef __typeof__((vec32){0} < (vec32){0}) mask32;
enum { LANES = BYTES / sizeof(REAL), TILE = 2 * LANES, PARTIAL = 32 / sizeof(REAL), TRIES = 3 };

static const REAL EMPTY = -1e30, TINIEST = 0x1p-100, TRIED[TRIES] = {1.0, 0.85, 0.7};

static long padded(long size, long by) { return (size + by - 1) / by * by; }

static const long MOST_KEPT = 1 << 24;
static pthread_key_t kept_memory;

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&kept_memory, free); }

/* Return memory of this thread, kept from call to call, since new pages take as long as the work on them; 0: none. */
static char *take_memory(long size) {
    long *memory = pthread_getspecific(kept_memory);
    if (!memory || *memory < size) {
        free(memory);
        if ((memory = aligned_alloc(BYTES, padded(size, BYTES) + BYTES))) *memory = size;
        pthread_setspecific(kept_memory, memory);
    }
    return memory ? (char *)memory + BYTES : 0;
}

/* Free memory that is too large for many threads to keep. */
static void keep_little(void) {
    long *memory = pthread_getspecific(kept_memory);
    if (memory && *memory > MOST_KEPT) free(memory), pthread_setspecific(kept_memory, 0);
}

/* Choose the lanes of x where the mask `first` is set, and those of y elsewhere. */
static inline vec choose(mask first, vec x, vec y) { return (vec)((first & (mask)x) | (~first & (mask)y)); }

static uint32_t bits_of(REAL x) {
    float y = (float)x;
    uint32_t bits;
    memcpy(&bits, &y, 4);
    return bits;
}

static REAL float_of_bits(uint32_t bits) {
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static REAL as_bf16(REAL x) {
    uint32_t bits = bits_of(x);
    return float_of_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

#define ROUND(x) (sizeof(REAL) == 4 ? (REAL)rintf((float)(x)) : (REAL)rint(x))
#define MAGNITUDE(x) (sizeof(REAL) == 4 ? (REAL)fabsf((float)(x)) : (REAL)fabs(x))
#define ROUND_DOWN(x) (sizeof(REAL) == 4 ? (REAL)floorf((float)(x)) : (REAL)floor(x))

/* Round a number to a half-integer within a limit. */
static inline REAL code_of(REAL x, REAL scale, REAL limit) {
    REAL code = ROUND_DOWN(x / (scale > TINIEST ? scale : TINIEST)) + (REAL)0.5;
    return code < -limit ? -limit : code > limit ? limit : code;
}

/* Return the larger numbers: compilers do not know that a maximum may be taken in any order. */
static inline vec32 larger(vec32 x, vec32 y) {
    mask32 first = x > y;
    return (vec32)((first & (mask32)x) | (~first & (mask32)y));
}

static REAL largest(const REAL *x, long dim) {
    vec32 lanes = {0};
    long d = 0;
    for (; d + PARTIAL <= dim; d += PARTIAL) {
        vec32 chunk = *(const vec32 *)(x + d);
        lanes = larger(larger(chunk, -chunk), lanes);
    }
    REAL top = 0;
    for (long l = 0; l < PARTIAL; l++) top = lanes[l] > top ? lanes[l] : top;
    for (; d < dim; d++) top = MAGNITUDE(x[d]) > top ? MAGNITUDE(x[d]) : top;
    return top;
}

/* Return the square error of a vector that is rounded with a scale; the same bits in vectors of any width. */
static inline REAL error_of(const REAL *x, long dim, REAL scale, REAL limit) {
    REAL error = 0, lanes[PARTIAL] = {0};
    for (long d = 0; d < dim; d += PARTIAL)
        for (long l = 0; l < PARTIAL; l++) {
            REAL difference = code_of(x[d + l], scale, limit) * scale - x[d + l];
            lanes[l] += difference * difference;
        }
    for (long l = 0; l < PARTIAL; l++) error += lanes[l];
    return error;
}

/* Return the tried scale with the least error of a vector, the first of equals. */
static REAL best_scale(const REAL *x, long dim, REAL limit) {
    REAL top = largest(x, dim) / limit, scale[TRIES], error[TRIES];
    for (int t = 0; t < TRIES; t++) scale[t] = as_bf16(top * TRIED[t]), scale[t] = scale[t] > TINIEST ? scale[t] : 0;
    if (!((error[0] = error_of(x, dim, scale[0], limit)) > 0)) return scale[0];  /* it was rounded before */
    for (int t = 1; t < TRIES; t++) error[t] = error_of(x, dim, scale[t], limit);
    int best = 0;
    for (int t = 1; t < TRIES; t++) best = error[t] < error[best] ? t : best;
    return scale[best];
}

/* Return e^x for x up to 0; 0 where it nearly underflows. */
static inline REAL exponential(REAL x) {
    if (sizeof(REAL) == 8) return exp(x);
    float y = x < -87 ? -87 : x, exponent = rintf(y * 1.44269504f);
    float r = y - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f, sum = sum * r + 8.3334519073e-3f, sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f, sum = sum * r + 5.0000001201e-1f, sum = sum * r * r + r + 1;
    return x < -87 ? 0 : sum * (float)float_of_bits(((int32_t)exponent + 127) << 23);
}

static inline __attribute__((always_inline)) void add_and_subtract(REAL *x, long count, long apart) {
    for (long i = 0; i < count; i += 2 * apart)
        for (long j = i; j < i + apart; j++) {
            REAL a = x[j], b = x[j + apart];
            x[j] = a + b, x[j + apart] = a - b;
        }
}

/* Multiply vectors of `size` numbers, a power of two, `step` apart, by Hadamard's matrix of 1 and -1: by sums and
   differences of two numbers each, in loops of fixed steps that compilers vectorise. */
static void rotate(REAL *x, long count, long step, long size) {
    for (long apart = step; apart < size * step; apart *= 2) {
        if (apart == 1) add_and_subtract(x, count, 1);
        else if (apart == 2) add_and_subtract(x, count, 2);
        else if (apart == 4) add_and_subtract(x, count, 4);
        else if (apart == 8) add_and_subtract(x, count, 8);
        else add_and_subtract(x, count, apart);
    }
}

/* Multiply ROWS rows, with numbers `step` apart, by columns of a matrix, and add in the order of the matrix's rows: a
   row has the same bits whatever the other rows are. */
static inline __attribute__((always_inline)) void multiply_columns(
    const REAL *const *a, long step, long inner, const REAL *b, long width, int count, REAL *out, long out_width,
    int accumulate) {
    vec sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < count; c++) sum[r][c] = accumulate ? *(vec *)(out + r * out_width + c * LANES) : (vec){0};
    for (long d = 0; d < inner; d++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < count; c++) sum[r][c] += a[r][d * step] * *(const vec *)(b + d * width + c * LANES);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < count; c++) *(vec *)(out + r * out_width + c * LANES) = sum[r][c];
}

/* Do the same with all columns, which fill whole vectors; with `accumulate` add to `out`. */
static void multiply(const REAL *const *a, long step, long inner, const REAL *b, long width, long columns, REAL *out,
                     long out_width, int accumulate) {
    long j = 0;
    for (; j + TILE <= columns; j += TILE)
        multiply_columns(a, step, inner, b + j, width, 2, out + j, out_width, accumulate);
    if (j < columns) multiply_columns(a, step, inner, b + j, width, 1, out + j, out_width, accumulate);
}
"""


def may_run_in_c(*tensors: Tensor) -> bool:
    """Whether kernels in C, which compute no gradients, may read tensors."""
    if is_traced() or os.environ.get("LINEARIZER_KERNELS") == "0":
        return False
    gradients = torch.is_grad_enabled()
    for x in tensors:  # a generator would take longer than the rest, at each token of each layer
        if not x.is_cpu or (gradients and x.requires_grad):
            return False
    return True


def pack_numbers(*numbers: int) -> Any:
    """Pack integers into an array for a kernel."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def addresses_of(*tensors: Tensor | None) -> Any:
    """Pack the addresses of tensors for a kernel; the tensors must stay alive."""
    return (ctypes.c_void_p * len(tensors))(*[None if x is None else x.data_ptr() for x in tensors])


@functools.cache
def load_kernel(name: str, source: str, work: torch.dtype, wide: bool = False) -> Kernel | None:
    """Load or compile a kernel that computes in a type, with `wide` in vectors of 64 bytes; None: no compiler."""
    if work not in KINDS or os.name != "posix":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = Path(home) / "linearizer", Path(tempfile.gettempdir()) / f"linearizer-{os.getuid()}"
    for flags in (("-march=native", *WIDEST * (wide and platform.machine() in X86)), ()):
        command = [*FLAGS, *flags, f"-DREAL={KINDS[work]}", f"-DWIDE={wide:d}"]
        machine = platform.machine(), platform.processor(), cpu_flags(), *command
        key = hashlib.sha256(repr((COMMON, source, machine)).encode()).hexdigest()[:24]
        for folder in folders:
            try:
                return getattr(ctypes.CDLL(str(compiled(folder, key, COMMON + source, command))), name)
            except (OSError, subprocess.SubprocessError):
                continue
    return None


def find_compiler() -> str | None:
    """Find a C compiler."""
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def cpu_flags() -> str:
    """Return the processor's instruction sets, where the system lists them: machines may share a folder."""
    if sys.platform == "darwin":
        return output_of("sysctl", "hw.optional")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


@functools.cache
def output_of(*command: str) -> str:
    """Return what a program prints, or an empty text if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def library_of(folder: Path, key: str, compiler: str | None) -> Path:
    """Return the path of a kernel built by this version of a compiler, since the next version may fix its faults;
    without a compiler, the last one built."""
    if compiler is None:
        made = sorted(folder.glob(f"{key}-*.so"), key=lambda path: path.stat().st_mtime)
        return made[-1] if made else folder / f"{key}.so"
    version = hashlib.sha256(output_of(compiler, "--version").encode()).hexdigest()[:8]
    return folder / f"{key}-{version}.so"


def compiled(folder: Path, key: str, source: str, command: Sequence[str]) -> Path:
    """Compile a source into a folder of this user, unless it is compiled already."""
    if not folder.is_absolute():
        raise FileNotFoundError("this user has no home")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    library = library_of(folder, key, compiler := find_compiler())
    if not library.exists():
        if compiler is None:
            raise FileNotFoundError("no compiler")
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary) / "made.so"
            (Path(temporary) / "source.c").write_text(source, encoding="utf-8")
            arguments = [compiler, str(Path(temporary) / "source.c"), "-o", str(output), *command]
            subprocess.run(arguments, check=True, capture_output=True, timeout=60)
            output.chmod(0o700)
            os.replace(output, library)  # at once, whichever process is first
    check_owner(library)
    return library


def check_owner(path: Path) -> None:
    """Refuse a file that another user could have written: it would run with this user's rights."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"other users may write to {path}")
