"""Makes a student from a teacher, saves it as a checkpoint, and loads it.

A checkpoint loads with transformers alone: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), or
AutoModelForImageTextToText if it reads pictures.
It has the unchanged files of the teacher's weights, linked or else copied, a small file with the student's own weights,
and an index of both. A linked file takes no space on the disk, and outlives its original folder. Streamed weights that
cannot be linked are written file by file.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from linearizer import __version__
from linearizer.amounts import size
from linearizer.errors import FolderError, RequestError, first_line
from linearizer.hub.models import fetch, find_model
from linearizer.hub.weight_files import INDEX, SINGLE, TEACHER_FILES, read_header, teacher_files
from linearizer.method.recorder import Samples
from linearizer.method.substitute import make_students
from linearizer.plan.allocation import Allocation, check_allocation
from linearizer.plan.head_bytes import Layer
from linearizer.plan.json_products import parse_json
from linearizer.progress import quiet
from linearizer.run.files import UNFINISHED, replacing, writing
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE as HUB_JOB
from linearizer.run.stopping import is_out_of_memory
from linearizer.run.weight_digests import OF_THIS_MACHINE, check_weights, weight_files
from linearizer.student.modeling_linearized import LinearizedConfig, LinearizedForCausalLM
from linearizer.teacher.devices import choose_device, compute_anywhere
from linearizer.teacher.load import load_teacher_of
from linearizer.teacher.picture_prompts import load_processor
from linearizer.teacher.quantised import is_packed, keep_as_stored
from linearizer.teacher.ram import free_bytes
from linearizer.teacher.streaming import is_streamed, offload_hooks, spreads, streams

MAX_SHARD = 10**9  # bytes: bounds what is sent again after an upload broke
STUDENT_FILE = "student.safetensors"  # not SINGLE, which transformers prefers to an index
PROCESSOR_FILE = "processor_config.json"
TEACHER_FILE = "teacher-{number:05}-of-{count:05}.safetensors"


# The installed code is preferred to the copy in a checkpoint, with and without trust_remote_code.
AutoConfig.register(LinearizedConfig.model_type, LinearizedConfig, exist_ok=True)


def put_student_into(
    teacher: PreTrainedModel,
    layers: Sequence[Layer],
    allocation: Allocation,
    feature_map: str = "prf",
    seed: int = 0,
    origin: dict[str, str | None] | None = None,
    exact_tokens: int = 0,
) -> LinearizedForCausalLM:
    """Put an untrained student into every layer of a teacher, which is changed in place and keeps all its weights."""
    entries = {
        "layers": layer_configs(allocation, layers),
        "sinks": allocation.sinks,
        "exact_tokens": exact_tokens,
        "feature_map": feature_map,
        "teacher": origin or {},
        "made_by": f"linearizer {__version__}",
    }
    return LinearizedForCausalLM.from_teacher(teacher, entries, seed)


def make_layer_students(
    student: LinearizedForCausalLM, layers: Sequence[Layer], allocation: Allocation, seed: int = 0
) -> tuple[nn.Module, ...]:
    """Make untrained layer students of another allocation, to exchange for a student's own."""
    drawn = Samples((None,) * len(layers), seed)
    entries = student.config.linearized
    made = make_students(student, layers, allocation, drawn, entries["feature_map"], entries["exact_tokens"])
    return tuple(made.values())


def layer_configs(allocation: Allocation, layers: Sequence[Layer]) -> list[dict[str, Any] | None]:
    """Make the config of each layer; None for a native layer, which does not change."""
    check_allocation(allocation, layers)
    configs: list[dict[str, Any] | None] = []
    for heads, layer in zip(allocation.heads, layers, strict=True):
        if layer.native_window is None:
            named = [head.to_config() for head in heads]
            configs.append({"heads": named, "key_dim": layer.key_dim, "value_dim": layer.value_dim})
        else:
            has_source = layer.reads is not None and configs[layer.reads] is not None
            configs.append({"reads": layer.reads, "heads": []} if has_source else None)
    return configs


def restore_type(student: LinearizedForCausalLM, stored: torch.dtype | None) -> None:
    """Convert a base's weights to the type that its teacher is stored in, where they were computed in a larger type."""
    for weight in list_larger(student, stored):
        weight.data = weight.to(stored)


def round_to_type(student: LinearizedForCausalLM, stored: torch.dtype | None) -> None:
    """Round the same weights to what that type can hold, in the type that they were computed in."""
    for weight in list_larger(student, stored):
        weight.data = weight.to(stored).to(weight.dtype)


def list_larger(student: LinearizedForCausalLM, stored: torch.dtype | None) -> list[torch.nn.Parameter]:
    """List a base's weights in a larger type, without those that are read from files in every pass."""
    return [
        weight
        for name, weight in student.named_parameters()
        if stored is not None and weight.dtype.itemsize > stored.itemsize and not (weight.is_meta or is_own(name))
    ]


def save(
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    files: Sequence[Path] = (),
    stored: torch.dtype | None = None,
    pictured: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write weights, config, the student's code and tokenizer; an older checkpoint stays until the new one is complete.

    `files` hold the teacher's weights, if the student has the same: they become part of the checkpoint unchanged.
    Other weights are written in the model's type, and those that are read in every pass in the `stored` type.
    `pictured` are the files that say how pictures are prepared.
    """
    with replacing(folder) as unfinished:
        if not files or not save_around(student, unfinished, files):
            if is_streamed(student):
                save_streamed(student, unfinished, MAX_SHARD, stored)
            else:
                student.save_pretrained(unfinished, max_shard_size=MAX_SHARD)
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished)
        for name, content in name_processor(student, pictured or {}).items():
            (unfinished / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        readable = (unfinished / "config.json").stat().st_mode
        for shard in unfinished.glob("*.safetensors"):
            if shard.stat().st_nlink == 1:
                shard.chmod(readable)  # safetensors writes through a temporary file, which its owner alone may read


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer, without transformers' notes of the place that it was read from."""
    for name in OF_THIS_MACHINE:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def name_processor(student: LinearizedForCausalLM, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the files of a processor with its class, which transformers else finds by the kind of the teacher."""
    kind = PROCESSOR_MAPPING_NAMES.get(student.config.linearized["teacher_type"])
    if not files or not isinstance(kind, str) or any("processor_class" in content for content in files.values()):
        return dict(files)
    own = files.get(PROCESSOR_FILE, {})
    return {**files, PROCESSOR_FILE: {**own, "processor_class": kind}}


def link_missing_weights(run: Run, token: str | None = None, in_job: bool = False) -> None:
    """Complete a checkpoint that a job of the Hub made: the job does not store its teacher's weights."""
    originals = {
        name: file for name, file in teacher_files(run.checkpoint).items() if not (run.checkpoint / name).is_file()
    }
    if not originals or not (in_job or run.has_file(HUB_JOB)):
        return
    if os.environ.get("SPACE_ID"):
        raise RequestError(
            "the student was made in a job, and its teacher's weights are not here: publish it from a job, and use it "
            "from the Hub, or download the teacher at your own machine"
        )
    folder = fetch(find_model(run.plan.model, token), tuple(originals.values()), token)
    with writing(run.checkpoint):
        for name, file in originals.items():
            link_or_copy(folder / file, run.checkpoint / name)


def load_student(run: Run, device: str | torch.device = "cpu", **options: object) -> LinearizedForCausalLM:
    """Load the student of a run to a device, and refuse weights that have changed since the run wrote them."""
    run.require_student()
    link_missing_weights(run)
    needed, free = loaded_bytes(run.checkpoint, options.get("dtype")), free_bytes(torch.device("cpu"))
    if needed > free:
        raise RequestError(
            f"{str(run.checkpoint)!r} has weights that take {size(needed)}, and {size(free)} of memory are free: free "
            "memory, or use a larger machine"
        )
    check_weights(run)
    try:
        student = load(run.checkpoint, **options)
        return student if is_packed(student.config) else student.to(device)  # packed weights are on their device
    except Exception as error:  # each library checks a config in its own way, with errors of many types
        if is_out_of_memory(error) or isinstance(error, RequestError):
            raise
        raise damaged_checkpoint(run, "cannot be loaded", error) from error


def damaged_checkpoint(run: Run, fault: str, error: Exception) -> FolderError:
    """Explain the remedy for a checkpoint that cannot be used."""
    return FolderError(
        f"{str(run.checkpoint)!r} {fault} ({first_line(error)}): remove it, and `linearizer runs resume {run.folder}` "
        "makes it again"
    )


def load_beside(run: Run, teacher: PreTrainedModel) -> LinearizedForCausalLM:
    """Load the student of a run to its teacher's device; around its weights, where these lie on several devices."""
    several = len(set(getattr(teacher, "hf_device_map", {}).values())) > 1
    if several and not run.plan.changes_weights:
        return load_around(run, teacher)
    return load_student(run, teacher.device, dtype=teacher.dtype)


def load_around(run: Run, teacher: PreTrainedModel) -> LinearizedForCausalLM:
    """Load the student of a run around its teacher's weights, wherever they lie: the teacher becomes the student."""
    link_missing_weights(run)
    check_weights(run)
    entries = LinearizedConfig.from_pretrained(run.checkpoint).linearized
    student = LinearizedForCausalLM.from_teacher(teacher, entries, run.plan.seed)
    names = {name for name in student.state_dict() if is_own(name)}
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(run.checkpoint):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in names & set(file.keys())}
    if missing := sorted(names - weights.keys()):
        raise RequestError(f"{run.checkpoint} lacks {len(missing)} weights, such as {missing[0]}: write it again")
    student.load_state_dict(weights, strict=False)
    return student.eval()


def loaded_bytes(folder: Path, dtype: object) -> float:
    """Estimate the memory that the weights of a checkpoint take in a type that may differ from the stored type."""
    stored_bytes = sum(path.stat().st_size for path in weight_files(folder))
    try:
        stored = getattr(torch, parse_json((folder / "config.json").read_bytes())["dtype"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return stored_bytes  # loading explains the fault of the config
    target = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return stored_bytes * target.itemsize / stored.itemsize if isinstance(target, torch.dtype) else stored_bytes


def load_of_run(run: Run) -> tuple[LinearizedForCausalLM, PreTrainedTokenizerBase]:
    """Load the student of a run with its tokenizer, to the devices and in the dtype of its plan.

    A model that one device cannot hold lies where its teacher lay: the teacher's weights are loaded for it.
    """
    plan, weights = run.plan, (run.inspection, run.plan.dtype, run.plan.device)
    with quiet():
        if run.checkpoint.is_dir() and not plan.changes_weights and (spreads(*weights) or streams(*weights)):
            student = load_around(run, load_teacher_of(plan, inspection=run.inspection).model)
        else:
            student = load_student(run, choose_device(plan.device), dtype=plan.dtype)
        return student, load_tokenizer_of(run)


def load_tokenizer_of(run: Run) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run's student."""
    try:
        return AutoTokenizer.from_pretrained(run.checkpoint, trust_remote_code=False)
    except Exception as error:  # each kind reads its files in its own way, with errors of many types
        raise damaged_checkpoint(run, "has no tokenizer that can be loaded", error) from error


def load_processor_of(run: Run) -> Any:
    """Load what prepares pictures for the student of a run; None: it reads none."""
    return load_processor(run.checkpoint) if run.inspection.reads_pictures else None


def load(folder: str | Path, **options: object) -> LinearizedForCausalLM:
    """Load a student with the code of this package; `options` go to from_pretrained (dtype, device_map, …)."""
    if not (Path(folder) / "config.json").is_file():
        raise RequestError(f"{folder} holds no checkpoint: there is no config.json in it")
    student, report = LinearizedForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise RequestError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}: write the checkpoint again")
    keep_as_stored(student)
    compute_anywhere(student)
    return student.eval()


def save_own(student: LinearizedForCausalLM, folder: Path) -> None:
    """Write the config, the code and the student's own weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded")  # these are not written here
        own = {name: x for name, x in student.state_dict().items() if is_own(name)}
        student.save_pretrained(folder, state_dict=own)


def save_around(student: LinearizedForCausalLM, folder: Path, files: Sequence[Path]) -> bool:
    """Write config and weights of a student around its teacher's files; return whether it loads from them.

    If it does not, the files are removed: only the teacher's class translates the names in its files.
    """
    save_own(student, folder)
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
    save_own(student, folder)
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
