"""Writes a checkpoint around the unchanged files of its teacher's weights: linked, or else copied.

Next to them lie one small file with the student's own weights, and an index of both. A linked file takes no space on
the disk, and outlives its original folder. Streamed weights that cannot be linked are written file by file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from linearizer.hub.weight_files import INDEX, SINGLE, TEACHER_FILES, read_header
from linearizer.quiet import quiet
from linearizer.run.files import UNFINISHED
from linearizer.student.modeling_linearized import LinearizedConfig, LinearizedForCausalLM
from linearizer.teacher.streaming import offload_hooks

STUDENT_FILE = "student.safetensors"  # not SINGLE, which transformers prefers to an index
TEACHER_FILE = "teacher-{number:05}-of-{count:05}.safetensors"


def save_around(student: LinearizedForCausalLM, folder: Path, files: Sequence[Path]) -> bool:
    """Write config and weights of a student around its teacher's files; return whether it loads from them.

    If it does not, the files are removed: only the teacher's class translates the names in its files.
    """
    student.save_pretrained(folder, state_dict={name: x for name, x in student.state_dict().items() if is_own(name)})
    written = []
    if (folder / SINGLE).exists():  # a student of windows has no weights of its own
        written.append((folder / SINGLE).rename(folder / STUDENT_FILE))
    originals = {TEACHER_FILE.format(number=place + 1, count=len(files)): file for place, file in enumerate(files)}
    for name, file in originals.items():
        link_or_copy(file, folder / name)
        written.append(folder / name)
    write_index(folder, written, {name: file.name for name, file in originals.items()})
    if loads_whole(folder):
        return True
    for path in (*written, folder / INDEX):
        path.unlink()
    return False


def save_streamed(student: LinearizedForCausalLM, folder: Path, max_bytes: int, stored: torch.dtype | None) -> None:
    """Write a whole student with weights outside of memory, in files of at most `max_bytes`, in the stored type.

    Only the tensors of one file are in memory at a time.
    """
    student.save_pretrained(folder, state_dict={name: x for name, x in student.state_dict().items() if is_own(name)})
    (folder / SINGLE).unlink(missing_ok=True)
    saved = student.state_dict().keys()
    weights = {name: x for name, x in (*student.named_parameters(), *student.named_buffers()) if name in saved}
    types = {
        name: x.dtype if stored is None or is_own(name) or not x.is_floating_point() else stored
        for name, x in weights.items()
    }
    elsewhere = {
        f"{name}.{part}": (hook, part)
        for name, module, hook in offload_hooks(student)
        for part, _ in module.named_parameters(recurse=False)
    }
    parts = share_out_to_files({name: x.numel() * types[name].itemsize for name, x in weights.items()}, max_bytes)
    for file, names in parts.items():
        read = {name: elsewhere[name][0].weights_map[elsewhere[name][1]] for name in names if weights[name].is_meta}
        tensors = {name: read.get(name, weights[name]).detach().to("cpu", types[name]).contiguous() for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
    if len(parts) > 1:
        write_index(folder, [folder / file for file in parts], {})


def share_out_to_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors, in their order, over files of at most `max_bytes`, unless a single tensor is larger."""
    parts: list[list[str]] = [[]]
    for name, count in sizes.items():
        if parts[-1] and sum(map(sizes.__getitem__, parts[-1])) + count > max_bytes:
            parts.append([])
        parts[-1].append(name)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{place:05}-of-{len(parts):05}.safetensors": names for place, names in enumerate(parts, 1)}


def is_own(name: str) -> bool:
    """Whether a weight is the student's own, not its teacher's."""
    return ".student." in name


def link_or_copy(file: Path, target: Path) -> None:
    """Link a file by a second name; copy it if the system cannot, for instance on another disk."""
    try:
        os.link(file.resolve(), target)  # a symbolic link would break when the cache is removed
    except OSError:
        unfinished = target.with_name(target.name + UNFINISHED)
        shutil.copyfile(file, unfinished)
        unfinished.replace(target)


def write_index(folder: Path, files: Sequence[Path], originals: dict[str, str]) -> None:
    """Write the index of a checkpoint's weights."""
    headers = {path.name: read_header(path) for path in files}
    sizes = [end - begin for header in headers.values() for begin, end in header.values()]
    index = {
        "metadata": {"total_size": sum(sizes), TEACHER_FILES: originals},
        "weight_map": {name: file for file, header in headers.items() for name in header},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def loads_whole(folder: Path) -> bool:
    """Whether transformers finds every weight of a student in a folder, without reading any."""
    config = LinearizedConfig.from_pretrained(folder)
    packed = hasattr(config, "quantization_config")
    if packed:
        del config.quantization_config  # it needs true weights
    options = dict(config=config, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=packed)
    with quiet():
        _, report = LinearizedForCausalLM.from_pretrained(folder, **options)
    return not report["missing_keys"] and (packed or not report["mismatched_keys"])
