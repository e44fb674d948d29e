"""The setup of an evaluation, and its subjects: teacher, student, and controls, which are the model with other
heads."""

from __future__ import annotations

import copy
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

import linearizer
from linearizer.errors import ModelNotAvailable, RequestError, TextError
from linearizer.method import checkpoint
from linearizer.method.initialise import initialise
from linearizer.method.measure_run import sample_teacher
from linearizer.method.recorder import SAMPLES, Samples, samples_of
from linearizer.method.substitute import exchange_students
from linearizer.method.texts import TextsOfRun, texts_to_learn
from linearizer.plan.allocation import Allocation, window_control
from linearizer.plan.head_bytes import Layer, cache_bytes
from linearizer.progress import finish, quiet
from linearizer.run.folder import Run
from linearizer.run.results import MadeWith, Recall
from linearizer.student.cache import change_layer
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.devices import choose_device, describe_device, describe_kernels
from linearizer.teacher.load import load_teacher_of, read_kept_texts
from linearizer.teacher.logits import Tensor, bytes_held, fresh_cache, logits_at_once
from linearizer.teacher.observing import attending_as_teacher
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.teacher.text import pack_texts, read_for_length, read_texts, start_tokens
from linearizer.teacher.token_loop import placed, read_tokens

ENDS_AT_ONCE = 5  # texts whose ends are predicted together
MAX_BRANCH_BYTES = 2**30  # of the copies of a cache from which continuations of a text are read together
PACKAGES = ("torch", "transformers", "lm_eval")


@dataclass(frozen=True)
class Subject:
    """A model that is measured by the same code on the same text as all other subjects."""

    name: str
    model: PreTrainedModel
    allocation: Allocation | None = None  # None: a teacher, whose state grows with the text
    heads: Sequence[nn.Module] | None = None  # these replace the model's own students
    softmax: bool = False  # a student that attends as its teacher

    @contextmanager
    def prepared(self) -> Iterator[PreTrainedModel]:
        """Yield the model, prepared to attend like this subject."""
        if self.softmax:
            with attending_as_teacher(self.model):
                yield self.model
        elif self.heads is None:
            yield self.model
        else:
            with exchange_students(self.model, self.heads):
                yield self.model

    def fresh_cache(self) -> Cache:
        """Make an empty cache of this subject's kind."""
        with self.prepared() as model:
            return fresh_cache(model)

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Count the bytes of cache or state once `length` tokens have been read."""
        return cache_bytes(layers, length) if self.allocation is None else self.allocation.state_bytes(layers, length)


Pieces = Iterator[tuple[Tensor, list[Tensor]]]  # places in a text, and each subject's logits there
Read = Callable[[Sequence[Subject], Tensor, Tensor], Pieces]


@torch.inference_mode()
def read_together(subjects: Sequence[Subject], ids: Tensor, places: Tensor) -> Pieces:
    """Let all subjects read the same texts; yield places, and each's logits there (texts, places, vocabulary).

    Where memory has no room for all logits, texts are read in pieces, each subject with a cache of its own kind.
    """
    if logits_at_once(subjects[0].model, len(ids)) >= len(places):
        yield places, read_alike(subjects, ids, [None] * len(subjects), places)
    else:
        yield from read_into(subjects, ids, [subject.fresh_cache() for subject in subjects], places)


@torch.inference_mode()
def read_into(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache], places: Tensor) -> Pieces:
    """Let all subjects read the same texts into their caches, in pieces with as many logits as memory allows."""
    size = logits_at_once(subjects[0].model, len(ids)) * (ids.shape[1] // max(1, len(places)) or 1)
    for begin in range(0, ids.shape[1], size):
        inside = places[(places >= begin) & (places < begin + size)]
        yield inside, read_alike(subjects, ids[:, begin : begin + size], caches, inside - begin)


def read_alike(
    subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache | None], places: Tensor
) -> list[Tensor]:
    """Let all subjects read on from their caches, and return their logits at some places."""
    return [read_logits(subject, ids, cache, places) for subject, cache in zip(subjects, caches, strict=True)]


@torch.inference_mode()
def read_branches(
    subject: Subject, ends: Tensor, cache: Cache, places: Tensor
) -> Tensor:  # (texts, branches, places, vocabulary)
    """Let a subject read on from its cache several ends of each text (texts, branches, tokens)."""
    logits = []
    for chunk in ends.split(max(1, MAX_BRANCH_BYTES // max(bytes_held(cache), 1)), 1):
        branches = copy.deepcopy(cache)
        for layer in branches.layers:
            change_layer(layer, partial(torch.repeat_interleave, repeats=chunk.shape[1], dim=0))
        logits.append(read_logits(subject, chunk.flatten(0, 1), branches, places).unflatten(0, chunk.shape[:2]))
    return torch.cat(logits, 1)


def read_logits(subject: Subject, ids: Tensor, cache: Cache | None, keep: int | Tensor = 0) -> Tensor:
    """Let a subject read on from its cache; return the logits of the last `keep` tokens, of some places, or of all."""
    with subject.prepared() as model, torch.inference_mode():
        keep = keep.to(model.device) if isinstance(keep, Tensor) else keep
        ids = ids.to(model.device)
        given = {"input_ids": ids} if cache is None else placed(model, ids, cache)
        return model(logits_to_keep=keep, use_cache=cache is not None, **given).logits.float()


def read_into_cache(subject: Subject, ids: Tensor, cache: Cache) -> None:
    """Let a subject read on without computing logits."""
    with subject.prepared() as model:
        for _ in read_tokens(model, ids, cache):
            pass


def read_end(subject: Subject, ids: Tensor, begin: int, cache: Cache) -> Tensor:
    """Let a subject read on from its cache; return the logits of the tokens from `begin` on."""
    read_into_cache(subject, ids[:, :begin], cache)
    return read_logits(subject, ids[:, begin:], cache)


def read_last(subject: Subject, texts: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits that predict the last tokens of each text, `counts` of them: (count, vocabulary)."""
    for first in range(0, len(texts), ENDS_AT_ONCE):
        ids, numbers = texts[first : first + ENDS_AT_ONCE], counts[first : first + ENDS_AT_ONCE]
        begin = ids.shape[1] - max(numbers) - 1
        logits = read_end(subject, ids, begin, subject.fresh_cache())[:, :-1]
        yield from (row[-count:] for row, count in zip(logits, numbers, strict=True))


@dataclass(frozen=True)
class Setup:
    """Everything that the parts of an evaluation need."""

    run: Run
    student: LinearizedForCausalLM
    control: LinearizedForCausalLM  # the student with its teacher's weights: itself, if it has them
    tokenizer: PreTrainedTokenizerBase
    teacher: PreTrainedModel | None  # may be the control's own base
    alone: str | None  # why there is no teacher
    kept: torch.Tensor | None = None  # texts excluded from training, if the run has just made its student
    recall_read: list[Recall] = field(default_factory=list)  # measured while the language part read texts
    samples: Samples | None = None  # if the run does not store them
    ranks: Ranks = ALONE  # which share the texts
    token: str | None = field(default=None, repr=False)  # by which texts of the Hub are read

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.run.layers

    @cached_property
    def allocation(self) -> Allocation:
        return self.run.require_allocation()

    def subjects(self, length: int) -> list[Subject]:
        """List teacher, student, and a plain window of the student's bytes at a length."""
        student = Subject("student", self.student, self.allocation)
        return [*filter(None, [self.teacher_subject]), student, self.window(length)]

    @property
    def teacher_subject(self) -> Subject | None:
        """The teacher, if there is one."""
        if self.teacher is None:
            return None
        return Subject("teacher", self.teacher, softmax=self.teacher is self.control)

    def window(self, length: int) -> Subject:
        """Make a plain window that takes the student's bytes at a length."""
        control, seed = window_control(self.allocation, self.layers, length), self.run.plan.seed
        heads = checkpoint.make_layer_students(self.control, self.layers, control, seed)
        sampled = self.samples is not None or self.run.has_file(SAMPLES)
        if control.bits < 16 and sampled:  # without turns from samples, few bits would harm the control more
            with exchange_students(self.control, heads):
                initialise(self.control, self.samples or samples_of(self.run))
        return Subject(control.strategy, self.control, control, heads)

    @property
    def usual_length(self) -> int:
        """The length of the run's own texts."""
        return self.run.plan.resolved_length(self.run.positions)

    def beyond(self, length: int) -> bool:
        """Whether a text is longer than the teacher's positions; refuse it if these are learned."""
        inspection, max_tokens = self.run.inspection, self.run.inspection.max_positions
        if max_tokens is None or length <= max_tokens:
            return False
        if inspection.positions == "learned":
            learned = f"{inspection.name!r} has learned {max_tokens} positions"
            raise RequestError(f"length {length} is not allowed: {learned}; ask for at most {max_tokens}")
        return True

    def windows(self, source: str | None, length: int, count: int, seed: int) -> torch.Tensor:  # (≤ count, length)
        """Take text that the student was neither measured nor trained on: after its own, or from another source."""
        plan = self.run.plan
        if self.kept is not None and source is None and length == self.usual_length:
            return self.kept[:count]
        source = source or plan.text
        if source != plan.text or source == "self":
            teacher = self.teacher_subject
            if source == "self" and teacher is None:
                raise TextError("'self' is text that the teacher writes, which is not available: name another source")
            new_seed = seed + plan.seed + 1  # for other texts than those of the training
            read = partial(read_texts, source, self.tokenizer, length, count, least=1, seed=new_seed, token=self.token)
            with nullcontext() if teacher is None else teacher.prepared() as model:
                return read(model=model)
        start = len(start_tokens(self.tokenizer))
        learnt = max(self.run.evaluation_file["made_with"].get("learnt", texts_to_learn(plan)), plan.texts_measured)
        skipped = -(-learnt * (self.usual_length - start) // (length - start))
        stored, _ = read_kept_texts(self.run)
        if length == self.usual_length and len(stored) >= skipped + count:
            return stored[skipped : skipped + count]
        stream = pack_texts(read_for_length(source, self.usual_length, token=self.token), self.tokenizer, length)
        windows = list(islice(stream, skipped, skipped + count))
        if not windows:
            raise TextError(
                f"{source!r} holds no text that the student was not trained on, or less than a text of {length} "
                "tokens: ask for a shorter --length, or name another source with --text"
            )
        return torch.stack(windows)

    def made_with(self) -> MadeWith:
        """Name the software, the device and the teacher of the measurements."""
        teacher = None if self.teacher is None else self.student.config.linearized["teacher"]
        kernels = describe_kernels(next(self.student.parameters()).device)
        return MadeWith(**environment(self.student), teacher=teacher, alone=self.alone, kernels=kernels)


def environment(model: torch.nn.Module) -> dict[str, Any]:
    """Name versions, device and number type of a measured model: they explain why results differ."""
    weight = next(model.parameters())
    versions = {"python": platform.python_version(), "linearizer": linearizer.__version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    dtype = str(weight.dtype).removeprefix("torch.")
    return {"versions": versions, "device": describe_device(weight.device), "dtype": dtype}


@contextmanager
def assembled(run: Run, token: str | None = None) -> Iterator[Setup]:
    """Load the student of a run, and its teacher."""
    run.require_student()
    with quiet():
        try:
            teacher = load_teacher_of(run.plan, token, run.inspection)
        except ModelNotAvailable as error:
            student = checkpoint.load_student(run, choose_device(run.plan.device), dtype=run.plan.dtype)
            yield Setup(run, student, student, checkpoint.load_tokenizer_of(run), None, str(error), token=token)
            return
        student = control = checkpoint.load_beside(run, teacher.model)
        adapted = student is not teacher.model and not share_weights(student, teacher.model)
        if adapted:
            control = checkpoint.load_student(run, teacher.model.device, dtype=teacher.model.dtype)
            share_weights(control, teacher.model, different=True)
        yield Setup(run, student, control, teacher.tokenizer, teacher.model, None, token=token)


def make_again(run: Run, token: str | None = None) -> Setup:
    """Make again the student of a run without training, around its teacher's weights; do not change the run."""
    plan, allocation = run.plan, run.require_allocation()
    with quiet(), TemporaryDirectory() as folder:
        teacher = load_teacher_of(plan, token, run.inspection)
        copy = Run(Path(shutil.copytree(run.folder, Path(folder) / "run")))
        (copy.folder / "state").mkdir()
        samples = finish(sample_teacher(plan, teacher, TextsOfRun.of(copy, teacher, token)))
        how = plan.feature_map, plan.seed, None, allocation.exact_until(run.layers)
        student = checkpoint.put_student_into(teacher.model, run.layers, allocation, *how)
        initialise(student, samples)
    return Setup(run, student.eval(), student, teacher.tokenizer, teacher.model, None, samples=samples, token=token)


def share_weights(base: torch.nn.Module, teacher: torch.nn.Module, different: bool = False) -> bool:
    """Let a student use those of its teacher's weights that equal its own, or all; return whether all were equal."""
    weights, all_equal = dict(teacher.named_parameters()), True
    for name, parameter in base.named_parameters():
        if name in weights:
            equal = torch.equal(parameter, weights[name])
            all_equal = all_equal and equal
            if equal or different:
                parameter.data = weights[name].data
    return all_equal
