"""Writes a checkpoint around the files of its teacher's weights, which stay as they are: linked, or else copied.

Next to them lie one small file with what the student adds, and an index of both. A linked file takes no room on the
disk, and outlives the folder that it came from. Streamed weights that cannot be linked are written file by file.
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
    """Write config and weights of a student whose teacher has these files; tell whether it loads from them.

    It does not, and they are removed, where a teacher's class alone translates the names in its files.
    """
    student.save_pretrained(folder, state_dict={name: x for name, x in student.state_dict().items() if is_own(name)})
    held = []
    if (folder / SINGLE).exists():  # a student of windows has no weights of its own
        held.append((folder / SINGLE).rename(folder / STUDENT_FILE))
    originals = {TEACHER_FILE.format(number=place + 1, count=len(files)): file for place, file in enumerate(files)}
    for name, file in originals.items():
        link_or_copy(file, folder / name)
        held.append(folder / name)
    write_index(folder, held, {name: file.name for name, file in originals.items()})
    if loads_whole(folder):
        return True
    for path in (*held, folder / INDEX):
        path.unlink()
    return False


def save_streamed(student: LinearizedForCausalLM, folder: Path, most: int, stored: torch.dtype | None) -> None:
    """Write a whole student whose weights are not all in memory, in files of `most` bytes, and of the stored type.

    The tensors of one file are in memory at a time.
    """
    student.save_pretrained(folder, state_dict={name: x for name, x in student.state_dict().items() if is_own(name)})
    (folder / SINGLE).unlink(missing_ok=True)
    kept = student.state_dict().keys()
    held = {name: x for name, x in (*student.named_parameters(), *student.named_buffers()) if name in kept}
    types = {
        name: x.dtype if stored is None or is_own(name) or not x.is_floating_point() else stored
        for name, x in held.items()
    }
    elsewhere = {
        f"{name}.{part}": (hook, part)
        for name, module, hook in offload_hooks(student)
        for part, _ in module.named_parameters(recurse=False)
    }
    parts = share_out_to_files({name: x.numel() * types[name].itemsize for name, x in held.items()}, most)
    for file, names in parts.items():
        read = {name: elsewhere[name][0].weights_map[elsewhere[name][1]] for name in names if held[name].is_meta}
        tensors = {name: read.get(name, held[name]).detach().to("cpu", types[name]).contiguous() for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
    if len(parts) > 1:
        write_index(folder, [folder / file for file in parts], {})


def share_out_to_files(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Lay tensors, in their order, into files of no more than `most` bytes, as far as a tensor allows."""
    parts: list[list[str]] = [[]]
    for name, count in sizes.items():
        if parts[-1] and sum(map(sizes.__getitem__, parts[-1])) + count > most:
            parts.append([])
        parts[-1].append(name)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{place:05}-of-{len(parts):05}.safetensors": names for place, names in enumerate(parts, 1)}


def is_own(name: str) -> bool:
    """Whether a weight is the student's own, not its teacher's."""
    return ".student." in name


def link_or_copy(file: Path, target: Path) -> None:
    """Link a file by a second name; copy it where the system cannot, as on another disk."""
    try:
        os.link(file.resolve(), target)  # a symbolic link would end with the cache that it points into
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
        del config.quantization_config  # which asks for numbers
    how = dict(config=config, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=packed)
    with quiet():
        _, report = LinearizedForCausalLM.from_pretrained(folder, **how)
    return not report["missing_keys"] and (packed or not report["mismatched_keys"])
