"""Reads the tokens of a step with one layer's student: those of all requests, from and into their rows of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from linearizer.kernels.c.rows import RowReader, pack_texts
from linearizer.kernels.door import reads_in_c, reads_in_triton
from linearizer.kernels.triton.rows import PoolRow
from linearizer.student.layer_student import LayerStudent
from linearizer.vllm_plugin.state_memory import StateMemory, StepMetadata, Text
from linearizer.vllm_plugin.state_rows import StateRow

Tensor = torch.Tensor


@dataclass
class Inputs:
    """What one layer attends with in a step: q (tokens, query heads, dim), k and v (tokens, heads, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    scores: tuple  # the cap and the learned sinks of a model that has them
    out: Tensor


@dataclass
class Alike:
    """Texts of a step that have equally many new tokens, and that all have read some before or none."""

    rows: Tensor  # (texts,)
    tokens: Tensor | slice  # their new tokens in the step, text by text
    counts: Tensor  # (texts,) tokens read before
    least: int  # of these

    @staticmethod
    def of(texts: Sequence[Text], device: torch.device) -> Alike:
        rows, firsts, (tokens, *_), counts = zip(*texts, strict=True)
        index, first, read = torch.tensor([rows, firsts, counts], device=device)
        if firsts == tuple(range(firsts[0], firsts[0] + len(texts) * tokens, tokens)):  # then nothing is copied
            places: Tensor | slice = slice(firsts[0], firsts[0] + len(texts) * tokens)
        else:
            places = (first[:, None] + torch.arange(tokens, device=device)).flatten()
        return Alike(index, places, read, min(counts))

    def take(self, x: Tensor) -> Tensor:
        """Return what belongs to the new tokens, (texts, heads, tokens, dim), of that of all tokens of a step."""
        return x[self.tokens].unflatten(0, (len(self.rows), -1)).transpose(1, 2)


@dataclass
class Texts:
    """Texts of a step, those with one token first, as the kernel in C takes them, and as all other code does."""

    texts: tuple[Text, ...]
    device: torch.device

    @cached_property
    def packed(self) -> Any:
        return pack_texts(self.texts)

    @cached_property
    def alike(self) -> list[Alike]:
        """The texts with one token as one or two batches, and each part of a prompt."""
        single = [[text for text in self.texts if text[2] == 1 and (text[3] > 0) == begun] for begun in (True, False)]
        batches = [*filter(None, single), *([text] for text in self.texts if text[2] > 1)]
        return [Alike.of(batch, self.device) for batch in batches]


class HeadsInRows:
    """All heads of a layer, whose states lie in rows; kernels read them there where they serve all heads: in C all
    texts in one call, in Triton those with one token. Else the student's own code reads copies of rows."""

    def __init__(self, student: LayerStudent, row: StateRow | PoolRow) -> None:
        self.student, self.row = student, row
        self.in_c: RowReader | None = None
        self.prepared: tuple | None = None  # the pool and the scale that `in_c` was made for

    def read(self, pool: Tensor, texts: Texts, given: Inputs) -> None:
        """Read the new tokens of texts."""
        if not texts.texts:
            return
        if self.prepare(pool, given):
            assert self.in_c is not None
            group, (_, learned_sinks) = given.q.shape[1] // given.k.shape[1], given.scores or (None, None)
            q, out = given.q.unflatten(1, (-1, group)), given.out.unflatten(1, (-1, group))
            self.in_c.read(q, given.k, given.v, texts.packed, out, learned_sinks)
            return
        for alike in texts.alike:
            self.read_alike(pool, alike, given)

    def prepare(self, pool: Tensor, given: Inputs) -> bool:
        """Prepare the kernel in C at the first step, after weights and pool have come; return whether it serves all."""
        if isinstance(self.row, PoolRow):
            return False
        place = pool.data_ptr(), given.scale
        if self.prepared != place:
            self.prepared, group = place, given.q.shape[1] // given.k.shape[1]
            q, k, v = (x[:1].transpose(0, 1)[None] for x in (given.q, given.k, given.v))
            like = q.unflatten(1, (-1, group)), k, v
            trusted, (cap, _) = reads_in_c(self.student, *like, bool(given.scores)), given.scores or (None, None)
            arguments = self.student, pool, self.row.places(), like, given.scale, cap
            self.in_c = RowReader.of(*arguments) if trusted else None
        return self.in_c is not None

    def read_alike(self, pool: Tensor, alike: Alike, given: Inputs) -> None:
        """Read the new tokens of texts with equally many."""
        texts = self.student, pool, alike.rows, alike.counts, alike.least
        inputs = *map(alike.take, (given.q, given.k, given.v)), given.scale, *given.scores
        given.out[alike.tokens] = self.row.read_texts(*texts, *inputs).transpose(1, 2).flatten(0, 1)

    def forget_weights(self) -> None:
        """Prepare kernels anew at the next step."""
        self.prepared = None
        if isinstance(self.row, PoolRow):
            self.row.forget_weights()


class LayerReader:
    """Stands for the attention of one layer. Texts of at most `most` tokens keep the teacher's keys and values in their
    rows; with the first token too many, its heads read all of them and take the rows over."""

    def __init__(self, heads: HeadsInRows, exact: HeadsInRows | None, most: int) -> None:
        self.heads, self.exact, self.most = heads, exact, most
        self.memory: StateMemory | None = None

    def parts(self) -> tuple[StateRow | PoolRow, StateRow | PoolRow]:
        """Return what lies in rows: in one row there are states of either of both."""
        return self.heads.row, (self.exact or self.heads).row

    def forget_weights(self) -> None:
        """Prepare kernels anew at the next step."""
        self.heads.forget_weights()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, scores: tuple = ()) -> Tensor:
        """Return (tokens, query heads, dim) for q of that shape, and k and v (tokens, heads, dim)."""
        given = Inputs(q, k, v, scale, scores, v.new_zeros(len(q), q.shape[1], v.shape[-1]))
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        if metadata is not None:  # else vLLM measures its memory
            assert self.memory is not None
            pool = self.memory.pool
            plan = plan_of(metadata[self.memory.name], self.most, pool)
            self.heads.read(pool, plan.long, given)
            if self.exact is not None:
                self.exact.read(pool, plan.short, given)
            for text, row in zip(plan.turning, plan.rows, strict=True):
                self.turn(text, row[None], given)
        return given.out

    def turn(self, text: Text, row: Tensor, given: Inputs) -> None:
        """Read a text that becomes too long: up to `most` tokens exactly, and all with the heads; `row` is a copy."""
        assert self.exact is not None and self.memory is not None
        at, first, tokens, read = text
        new, k, v = slice(first, first + tokens), given.k, given.v
        q, k, v = (torch.cat([x.new_zeros(read, *x.shape[1:]), x[new]]) for x in (given.q, k, v))
        if read:
            for x, stored in zip((k, v), self.exact.row.stored(row), strict=True):
                x[:read] = stored[:, :read].transpose(0, 1)
        whole = Inputs(q, k, v, given.scale, given.scores, v.new_zeros(len(q), q.shape[1], v.shape[-1]))
        self.heads.read_alike(self.memory.pool, Alike.of([(at, 0, read + tokens, 0)], q.device), whole)
        if exact := self.most - read:
            self.exact.read_alike(row, Alike.of([(0, read, exact, read)], q.device), whole)
        given.out[new] = whole.out[read:]


@dataclass
class Plan:
    """The texts of a step that are read exactly, those that become too long for it, and those that were before."""

    short: Texts
    turning: tuple[Text, ...]
    long: Texts
    rows: Tensor  # of turning texts, copied before any layer changes them: a layer's heads overwrite others' keys


def plan_of(step: StepMetadata, most: int, pool: Tensor) -> Plan:
    """Return the plan of a step for layers that read so many tokens exactly; the first of them makes it."""
    if most not in step.plans:
        short = tuple(text for text in step.texts if text[2] + text[3] <= most)
        turning = tuple(text for text in step.texts if 0 < most < text[2] + text[3] and text[3] <= most)
        long = tuple(text for text in step.texts if text[3] > most or not most)
        rows = pool[[text[0] for text in turning]]
        step.plans[most] = Plan(Texts(short, pool.device), turning, Texts(long, pool.device), rows)
    plan: Plan = step.plans[most]
    return plan


def window_student(window: int, kv_heads: int, dims: tuple[int, int]) -> LayerStudent:
    """Make a student whose heads attend to the last tokens as softmax does."""
    return LayerStudent([{"window": window}] * kv_heads, 0, dims[0], "prf", dims[1]).eval()


def lay_out(
    student: LayerStudent, query_heads: int, dims: tuple[int, int], dtype: torch.dtype, begin: int
) -> StateRow | PoolRow:
    """Lay out the states of a layer from a byte on, as the code that will read them needs it."""
    device = torch.get_default_device()  # vLLM's, while it makes a model
    q, k, v = (torch.zeros(1, student.kv_heads, 2, dim, dtype=dtype, device=device) for dim in (dims[0], *dims))
    q = q[:, :, None].expand(-1, -1, query_heads // student.kv_heads, -1, -1)
    by_triton = all(
        reads_in_triton(student, q[..., :tokens, :], k[:, :, :tokens], v[:, :, :tokens], is_scored)
        for tokens in (1, 2)
        for is_scored in (False, True)
    )
    row = PoolRow.of(student, (k, v), begin) if by_triton else None
    return row or StateRow.of(student, query_heads, dims, dtype, begin)


def add_reader(
    readers: list[LayerReader], student: LayerStudent, query_heads: int, dims: tuple[int, int], dtype: torch.dtype,
    most: int, begin: int = 0,
) -> LayerReader:  # fmt: skip
    """Make the reader of the next layer, whose states lie in rows behind those of the layers before, or at a byte."""
    ends = [part.end for part in readers[-1].parts()] if readers else [begin, begin]
    heads, exact = HeadsInRows(student, lay_out(student, query_heads, dims, dtype, ends[0])), None
    if most:
        window = window_student(most, student.kv_heads, dims)
        exact = HeadsInRows(window, lay_out(window, query_heads, dims, dtype, ends[1]))
    readers.append(LayerReader(heads, exact, most))
    return readers[-1]
