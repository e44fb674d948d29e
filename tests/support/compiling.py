"""Compile every kernel for a GPU that need not be there: python -m tests.support.compiling 90 prints what each takes.

Chips are 80, 90 and so on of NVIDIA, and gfx942 of AMD.

Further words are sizes: 128x128 is the width of a head and its features, 128x128xfp32 the same without bf16, and
64x64xg3xs4000 has 3 query heads a KV head (4 where that is not said), and 4,000 slots (64).

Compiling takes minutes, so results are kept in compiled.json, each under a hash of all that it depends on: the source
of the kernel and of what it calls, wherever in a file it stands, its arguments, the chip, and Triton's version. A
kernel that changed is compiled anew; python -m tests.support.compiling --record compiles all and keeps the results,
--all prints them, and --prepare compiles nothing: it says what would be compiled, also for texts of many sizes, with
the results that are kept.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linearizer.kernels.triton import (
    common,
    merge_workspace,
    packed_rows,
    state_pool,
    text_features,
    text_gradients,
    text_slots,
    token,
)
from linearizer.student.layer_student import StoredBasis
from linearizer.train import attention_loss_kernels

for name in [name for name in sys.modules if name.startswith("linearizer.")]:
    for function in vars(sys.modules[name]).values():
        if isinstance(function, JITFunction):
            function.starting_line_number = 1  # Triton hashes it, and a kernel that only moved is not compiled again

CASES = [
    *((chip, "128x128") for chip in (80, 89, 90, 100, 120, "gfx942")),
    *((90, "256x128"), (90, "64x64xg3xs4000"), (89, "128x128xfp32")),
]
COUNTS = (("g", 4), ("s", 64))  # in the name of a size
AMD_COUNTS = ("vgpr_count", "private_segment_fixed_size")
RECORD = Path(__file__).with_name("compiled.json")


@dataclass
class Chip:
    """The driver of a GPU that need not be there: Triton prepares what it would launch."""

    target: GPUTarget

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)  # for which Triton keeps what it prepared

    def get_current_stream(self, device):
        return 0


def launches(chip, call):
    """What Triton would compile for such a chip where `call` launches kernels: (source, warps and stages)."""
    result = []

    def capture(kernel, key, signature, device, constants, options, attributes, warmup):
        taken = {"num_warps": options.num_warps, "num_stages": options.num_stages}
        result.append((ASTSource(kernel, signature, constants, attributes), taken))

    by_amd = isinstance(chip, str)
    with (
        patch.object(JITFunction, "_do_compile", capture),
        patch.object(driver, "_active", Chip(target_of(chip))),
        patch.object(common, "chip", lambda _: None if by_amd else chip),
        patch.object(torch.version, "hip", "6" if by_amd else None),
    ):
        for kept in (
            merge_workspace.merging_constants,
            text_slots.text_constants,
            token.token_constants,
        ):
            kept.cache_clear()  # of other chips
        call()
    return result


def target_of(chip):
    return GPUTarget("hip", chip, 64) if isinstance(chip, str) else GPUTarget("cuda", chip[0] * 10 + chip[1], 32)


def draw(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def everything(dim, features, dtype, group, slots, window=64, sinks=4):
    """Call all that launches: attention and its gradients, both losses."""
    inputs = attention_inputs(1, 8, group, 2048, dim, features, dtype, window, sinks)
    q, k, *_, u, w, level, mean = inputs
    attention_and_gradients(inputs, window)
    text_features.run_text_features(*inputs[:7], None, None, level, mean, window)
    attention_loss_kernels.losses(u, w, q, k[:, :, window:], window, sinks)
    for bits in (4, 16):
        for tokens in (1, 2048):
            read_in_pool(dim, dtype, group, sinks, bits, tokens, max(window, slots), slots, scored=bits == 4)


def read_in_pool(dim, dtype, group, sinks, bits, tokens, window=64, slots=64, heads=8, scored=False):
    """Read a text, or a token, with heads of 16 bits or of any; and with scores that the model caps."""
    table, count = draw(heads, packed_rows.FIELDS.value, dtype=torch.int64), draw(1, dtype=torch.int64)
    merging = [draw(heads, dim + 1, dim + 1).float(), draw(heads).float()] if slots else []
    turns = state_pool.turning(StoredBasis(heads, dim, dim).to("meta"), torch.float32) if bits < 16 else []
    k, q = draw(1, heads, tokens, dim, dtype=dtype), draw(1, heads, group, tokens, dim, dtype=dtype)
    block = max(16, slots // 8) if slots else 0
    pool, sizes = draw(1, 2**20, dtype=torch.uint8), [sinks, slots, block, window + slots, bits, window, block]
    texts, learned = [count, count], (table, merging, turns)  # counts stand for rows
    given = q, k, k, [0.125, 50.0], q, pool, texts
    for rows in (None, draw(1, tokens, heads, group, 2).float())[: 1 + scored]:
        if tokens == 1:
            token.launch_token(*given, *learned, sizes[:5], rows)
        else:
            text_slots.launch_text(*given, *learned, sizes, rows)


def read_many_texts(dim=64, group=2):
    """Read texts of several lengths, windows, slots, sinks and numbers of heads, with windows alone and with slots."""
    for tokens, window, slots, sinks, heads in ((2048, 64, 64, 4, 8), (500, 7, 33, 0, 1), (130, 128, 400, 1, 3)):
        for length in (tokens, tokens // 3):
            read_in_pool(dim, torch.bfloat16, group, sinks, 4, length, window, slots, heads)
        inputs = attention_inputs(1, heads, group, tokens, dim, 0, torch.bfloat16, window, sinks)
        text_features.run_text_features(*inputs[:7], None, None, *inputs[-2:], window)


def attention_inputs(batch, heads, group, tokens, dim, features, dtype, window, sinks):
    """Queries, keys, values, sinks, counts, log-features, and a state."""
    q = draw(batch, heads, group, tokens, dim, dtype=dtype)
    k, sink = (draw(batch, heads, size, dim, dtype=dtype) for size in (tokens + window, sinks))
    u, w = (draw(batch, heads, *shape, tokens, features, dtype=torch.float32) for shape in ((group,), ()))
    level, mean = draw(batch, heads, features).float(), draw(batch, heads, features, dim).float()
    count = draw(batch, dtype=torch.int64)
    return q, k, k, sink, sink, count, count, u, w, level, mean


def attention_and_gradients(inputs, window):
    """Attend, and pass gradients back."""
    out, lse, last_level, last_mean, kept = text_features.run_text_features(*inputs, window)

    class Context:
        saved_tensors = (*inputs, out, lse, last_level, last_mean, *kept)

    Context.window = window
    text_gradients.FeatureAttention.backward(Context, inputs[0], *inputs[-2:])


def key_of(source, options, chip):
    """The hash of all that the result depends on."""
    return hashlib.sha256(
        repr((triton.__version__, source.hash(), chip, sorted(options.items()))).encode()
    ).hexdigest()[:32]


def compiled(source, options, chip):
    """Compile a launch: its registers, its spilled bytes, its shared memory."""
    if isinstance(chip, str):
        return compiled_for_amd(source, options, chip)
    with unassembled():
        built = triton.compile(source, target=target_of(chip), options=options)
    report = assemble(built.asm["ptx"])
    return {
        "kernel": source.fn.__name__,
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
        "shared": built.metadata.shared,
        "warps": options.get("num_warps", 4),
        "tensor_cores": bool(re.search(r"wgmma|mma\.sync|tcgen05", built.asm["ptx"])),
    }


def compiled_for_amd(source, options, chip):
    """Compile a launch for a chip of AMD, whose assembler is Triton's own."""
    built = triton.compile(source, target=target_of(chip), options=options)
    program = built.asm["amdgcn"]
    counted = {name: int(re.search(rf"\.{name}:\s+(\d+)", program)[1]) for name in AMD_COUNTS}
    return {
        "kernel": source.fn.__name__,
        "registers": counted["vgpr_count"],
        "spilled": counted["private_segment_fixed_size"],
        "shared": built.metadata.shared,
        "warps": options.get("num_warps", 4),
        "tensor_cores": "v_mfma" in program,
    }


@contextmanager
def unassembled():
    """Let Triton stop at the program's text, which is assembled here once, with a report."""
    make, CUDABackend.make_cubin = CUDABackend.make_cubin, lambda *_: b""
    try:
        yield
    finally:
        CUDABackend.make_cubin = make


def assemble(ptx):
    """Have Triton's own assembler say what a program takes."""
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "kernel.ptx")
        path.write_text(ptx)
        for assembler in sorted(folder.glob("ptxas*")):  # newer programs may need the second one
            command = [assembler, "-v", f"--gpu-name={target}", path, "-o", Path(work, "out")]
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode:
                return done.stderr
    raise RuntimeError(done.stderr)


def prepared(chip, size):
    """List what is launched in one size on one chip, each kernel once for all equal launches, by their hashes."""
    dim, features, *more = size.split("x")
    dim, features, dtype = int(dim), int(features), torch.float32 if "fp32" in more else torch.bfloat16
    group, slots = (next((int(word[1:]) for word in more if word[0] == letter), usual) for letter, usual in COUNTS)
    chip = chip if isinstance(chip, str) else divmod(chip, 10)
    found = launches(chip, lambda: everything(dim, features, dtype, group, slots))
    return {key_of(*launch, chip): (*launch, chip) for launch in found}


def report(chip, size, record):
    """Describe all kernels of one size on one chip."""
    return {key: record.get(key) or compiled(*launch) for key, launch in prepared(chip, size).items()}


def named_chip(name):
    return int(name) if name.isdigit() else name


def main():
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if sys.argv[1] == "--record":
        rows = {}
        for case in CASES:  # after each, so that little is lost where this is stopped
            rows |= report(*case, record)
            kept = rows if case == CASES[-1] else {**record, **rows}
            lines = ",\n".join(f'"{key}": {json.dumps(kept[key])}' for key in sorted(kept))
            RECORD.write_text(f"{{\n{lines}\n}}\n")
        return
    if sys.argv[1] == "--prepare":
        for chip, size in CASES:
            for key, (source, *_) in prepared(chip, size).items():
                kept = record.get(key, {"kernel": source.fn.__name__})
                sys.stdout.write(json.dumps({"chip": chip, "size": size, **kept}) + "\n")
        for source, _ in {key_of(*launch, 90): launch for launch in launches((9, 0), read_many_texts)}.values():
            sys.stdout.write(json.dumps({"chip": 90, "size": "texts", "kernel": source.fn.__name__}) + "\n")
        return
    chosen = (
        CASES if sys.argv[1] == "--all" else [(named_chip(sys.argv[1]), size) for size in sys.argv[2:] or ["128x128"]]
    )
    for chip, size in chosen:
        for row in report(chip, size, record).values():
            sys.stdout.write(json.dumps({"chip": chip, "size": size, **row}) + "\n")


if __name__ == "__main__":
    main()
