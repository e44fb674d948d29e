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
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from linearizer.kernels.compiled import is_traced

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-lm", "-pthread")
X86, WIDEST = ("x86_64", "AMD64"), ("-mprefer-vector-width=512",)  # or compilers use vectors of half the width
KINDS = {torch.float32: "float", torch.float64: "double"}  # types that kernels compute in

Tensor = torch.Tensor
Kernel = Callable[[Any, Any], int]

SOURCE = Path(__file__).with_name("attention.c")


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
def load_kernel(name: str, work: torch.dtype, wide: bool = False) -> Kernel | None:
    """Load or compile a kernel that computes in a type, with `wide` in vectors of 64 bytes; None: no compiler."""
    if work not in KINDS or os.name != "posix":
        return None
    source = SOURCE.read_text(encoding="utf-8")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = Path(home) / "linearizer", Path(tempfile.gettempdir()) / f"linearizer-{os.getuid()}"
    fault: Exception | None = None
    for flags in (("-march=native", *WIDEST * (wide and platform.machine() in X86)), ()):
        command = [*FLAGS, *flags, f"-DREAL={KINDS[work]}", f"-DWIDE={wide:d}"]
        machine = platform.machine(), platform.processor(), cpu_flags(), *command
        key = hashlib.sha256(repr((source, machine)).encode()).hexdigest()[:24]
        for folder in folders:
            try:
                return getattr(ctypes.CDLL(str(compiled(folder, key, source, command))), name)
            except (OSError, subprocess.SubprocessError) as error:
                fault = error
    if (compiler := find_compiler()) is not None:
        warnings.warn(
            f"PyTorch does the work of the kernels in C, which takes longer, because {compiler} built none "
            f"({type(fault).__name__}: {str(fault)[:200]})",
            RuntimeWarning,
            stacklevel=2,
        )
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
