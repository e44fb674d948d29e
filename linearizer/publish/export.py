"""The export of a student as a graph for other runtimes: it maps tokens and the state to logits and the new state.

A state has a fixed size, so the graph has fixed shapes, and its runtime needs no cache of its own. Heads of few bits
keep the numbers that their bytes stand for, which take more memory, but need no operation that a runtime may lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from linearizer.errors import FolderError, RequestError, first_line
from linearizer.method import checkpoint
from linearizer.progress import Progress, Steps, quiet
from linearizer.publish.card import CitedTeacher
from linearizer.run.files import replacing, write_whole
from linearizer.run.folder import Run
from linearizer.student.cache import CACHE, LinearizedCache, LinearizedLayer
from linearizer.student.layer_student import FeatureGroup, SoftmaxGroup
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.student.state import EMPTY, tensors

Tensor = torch.Tensor
MODEL, STATE, ABOUT = "model.onnx", "empty_state.npz", "README.md"
NEEDED = ("onnx", "onnxscript")
COUNT = "count"  # of the tokens of each text that were read: the same in all states
NOT_EXPORTED = "; the checkpoint itself runs in transformers, and `linearizer serve` serves it"


@dataclass(frozen=True)
class Exported:
    """The folder of a graph, and the amounts that a call reads."""

    folder: str
    texts: int
    tokens: int
    state_bytes: int


class StudentStep(nn.Module):
    """A student that reads a fixed number of tokens; it takes and returns its state as a list of tensors."""

    def __init__(self, student: LinearizedForCausalLM, texts: int = 1) -> None:
        super().__init__()
        self.student, self.empty = student, empty_cache(student, texts)
        self.names = [*state_of(self.empty)]

    def forward(self, input_ids: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        cache, named = self.empty.fork(), dict(zip(self.names, state, strict=True))
        for index, layer in enumerate(linearized_layers(cache)):
            layer.tokens_read = 1  # so that attention reads the state; no code uses the number itself
            layer.memory = [
                replace(group, **{name: named.get(name_of(index, part, name), x) for name, x in tensors(group).items()})
                for part, group in enumerate(layer.memory)
            ]
        positions = named[COUNT][:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        output = self.student(input_ids=input_ids, position_ids=positions, use_cache=True, **{CACHE: cache})
        new_state = state_of(cache)
        return output.logits, [new_state[name] for name in self.names]


@torch.no_grad()
def empty_cache(student: LinearizedForCausalLM, texts: int) -> LinearizedCache:
    """Make the state that has read nothing; read a token to learn its sizes."""
    cache = student.empty_cache()
    with keeping_numbers(student):
        student(input_ids=torch.zeros(texts, 1, dtype=torch.long), use_cache=True, **{CACHE: cache})
    return cache.copied(lambda name, x: torch.full_like(x, EMPTY if name == "level" else 0))


@contextmanager
def keeping_numbers(student: LinearizedForCausalLM) -> Iterator[None]:
    """Let heads of few bits keep numbers instead of bytes, and turn C kernels off, inside the `with` block."""
    layers = student.students()
    modes = [(layer.keeps_bytes, layer.in_c) for layer in layers]
    for layer in layers:
        layer.keeps_bytes, layer.in_c = False, False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.keeps_bytes, layer.in_c = mode


def linearized_layers(cache: LinearizedCache) -> list[LinearizedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, LinearizedLayer)]


def name_of(layer: int, group: int, tensor: str) -> str:
    return COUNT if tensor == COUNT else f"{layer}.{group}.{tensor}"


def state_of(cache: LinearizedCache) -> dict[str, Tensor]:
    """Return the tensors of all states that are not empty, by name."""
    return {
        name_of(index, part, name): x
        for index, layer in enumerate(linearized_layers(cache))
        for part, group in enumerate(layer.memory)
        for name, x in tensors(group).items()
        if x.numel()
    }


def refuse_what_grows(student: LinearizedForCausalLM, tokens: int) -> None:
    """Refuse students that a graph of fixed shapes cannot compute."""
    groups = [group for layer in student.students() for group in layer.groups]
    if None in student.config.layers or any(isinstance(group, SoftmaxGroup) for group in groups):
        raise RequestError(
            "heads of this student keep a growing cache, or their teacher's own window, but a graph has fixed shapes: "
            f"allocate without --may-grow, if that was set{NOT_EXPORTED}"
        )
    if tokens > 1 and has_features(student):
        raise RequestError("heads with features or a memory can be traced only for single tokens")


def has_features(student: LinearizedForCausalLM) -> bool:
    groups = [group for layer in student.students() for group in layer.groups]
    return any(isinstance(group, FeatureGroup) and group.features for group in groups)


def trace(step: StudentStep, tokens: int = 1) -> torch.export.ExportedProgram:
    """Make the graph of a step that reads a number of tokens at once."""
    refuse_what_grows(step.student, tokens)
    state = state_of(step.empty)
    ids = torch.zeros(len(state[COUNT]), tokens, dtype=torch.long)
    try:
        with torch.no_grad(), keeping_numbers(step.student):
            return torch.export.export(step, (ids, [*state.values()]), strict=False)
    except Exception as error:  # may come from the code of the teacher's architecture
        raise RequestError(f"this architecture cannot be traced ({first_line(error)}){NOT_EXPORTED}") from error


def export_run(run: Run, folder: Path, texts: int = 1, tokens: int = 1) -> Steps[Exported]:
    """Write the student of a run as ONNX."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise RequestError(f"ONNX needs {' and '.join(missing)}: pip install 'linearizer[onnx]'")
    if min(texts, tokens) < 1:
        raise RequestError("--texts and --tokens must be at least 1")
    if folder.exists():
        raise FolderError(f"{str(folder)!r} exists already: name another folder with --out, or remove it")
    with quiet():
        student = checkpoint.load_student(run, dtype=torch.float32)
        tokenizer = checkpoint.load_tokenizer_of(run)
    name = CitedTeacher.of(run.inspection).name
    return (yield from write_onnx(student, tokenizer, name, folder, texts, tokens))


def write_onnx(
    student: LinearizedForCausalLM, tokenizer: PreTrainedTokenizerBase, name: str, folder: Path, texts: int, tokens: int
) -> Steps[Exported]:
    """Write a student as ONNX, with its tokenizer, its empty state and a description."""
    if has_features(student):
        raise RequestError(f"ONNX can be written for heads with windows and slots, not with features{NOT_EXPORTED}")
    yield Progress("export", 0, 3, "parts")
    step = StudentStep(student, texts)
    program = trace(step, tokens)
    yield Progress("export", 1, 3, "parts")
    model = to_onnx(program, step.names)
    yield Progress("export", 2, 3, "parts")
    state: dict[str, Any] = {name: x.numpy() for name, x in state_of(step.empty).items()}
    exported = Exported(str(folder), texts, tokens, sum(x.nbytes for x in state.values()))
    with replacing(folder) as unfinished:
        unfinished.mkdir(parents=True)
        model.save(unfinished / MODEL)
        numpy.savez(unfinished / STATE, **state)
        checkpoint.save_tokenizer(tokenizer, unfinished)
        write_whole(unfinished / ABOUT, describe(name, exported, state))
    yield Progress("export", 3, 3, "parts")
    return exported


def to_onnx(program: torch.export.ExportedProgram, names: list[str]) -> Any:
    """Translate a graph without optimising it, which would take longest: a runtime optimises it when it loads it."""
    from onnxscript import opset18 as op

    def sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """Sort as torch.sort does: TopK keeps equal numbers in their order."""
        size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
        return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)

    model: Any = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["input_ids", *names],
        output_names=["logits", *(f"{name}.after" for name in names)],
        custom_translation_table={torch.ops.aten.sort.stable: sort},
        optimize=False,
        verbose=False,
    )
    for node in model.model.graph.all_nodes():
        node.metadata_props.clear()  # lines of source files on this machine, which take most of the bytes
    return model


def describe(name: str, exported: Exported, state: dict[str, Any]) -> str:
    """Describe the inputs and outputs of a graph, and how to call it."""
    sizes = {"teacher": name, "texts": exported.texts, "tokens": exported.tokens}
    rows = "\n".join(f"| `{name}` | {x.dtype} | {' × '.join(map(str, x.shape))} |" for name, x in state.items())
    text = (Path(__file__).parent / "onnx.md").read_text(encoding="utf-8")
    return Template(text).substitute(sizes, rows=rows, megabytes=f"{exported.state_bytes / 1e6:.3g}")
