"""Writes a checkpoint around the files of its teacher's weights, which stay as they are: linked, or else copied.

Beside them lie one small file with what the student adds, and an index of both. A linked file takes no room on the
disk, and outlives the folder that it came from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from linearizer.model.quiet import quiet
from linearizer.model.safetensors import INDEX, SINGLE, read_header
from linearizer.run.weight_digests import TEACHER_FILES
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

STUDENT = "student.safetensors"  # not SINGLE, which transformers prefers to an index
TEACHER = "teacher-{number:05}-of-{count:05}.safetensors"


def save_around(student: LinearizedForCausalLM, folder: Path, files: Sequence[Path]) -> bool:
    """Write config and weights of a student whose teacher has these files; tell whether it loads from them.

    It does not, and they are removed, where a teacher's class alone translates the names in its files.
    """
    student.save_pretrained(folder, state_dict={name: x for name, x in student.state_dict().items() if is_own(name)})
    held = []
    if (folder / SINGLE).exists():  # a student of windows has no weights of its own
        held.append((folder / SINGLE).rename(folder / STUDENT))
    originals = {TEACHER.format(number=place + 1, count=len(files)): file for place, file in enumerate(files)}
    for name, file in originals.items():
        link_or_copy(file, folder / name)
        held.append(folder / name)
    write_index(folder, held, {name: file.name for name, file in originals.items()})
    if loads_whole(folder):
        return True
    for path in (*held, folder / INDEX):
        path.unlink()
    return False


def is_own(name: str) -> bool:
    """Tell whether a weight is the student's own, not its teacher's."""
    return ".student." in name


def link_or_copy(file: Path, target: Path) -> None:
    """Give a file a second name; copy it where the system cannot, as on another disk."""
    try:
        os.link(file.resolve(), target)  # a symbolic link would end with the cache that it points into
    except OSError:
        shutil.copyfile(file, target)


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
    """Tell whether transformers finds every weight of a student in a folder, without reading any."""
    with quiet():
        _, report = LinearizedForCausalLM.from_pretrained(folder, device_map="meta", output_loading_info=True)
    return not report["missing_keys"] and not report["mismatched_keys"]
