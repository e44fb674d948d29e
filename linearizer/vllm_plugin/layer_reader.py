"""Reads the tokens of a step with one layer's student: those of all requests, from and into their rows of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from linearizer.kernels.c.rows import RowReader, pack_texts
from linearizer.kernels.door import reads_in_c
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

    def of_text(self, text: Text) -> list[Tensor]:
        """Return the queries, keys and values of one text: (1, heads, tokens, dim)."""
        _, first, tokens, _ = text
        return [x[first : first + tokens].transpose(0, 1)[None] for x in (self.q, self.k, self.v)]


class HeadsInRows:
    """All heads of a layer, whose states lie in rows; the kernel in C reads all texts in one call where it serves all
    heads, else the student's own code reads those with one token as a batch, and each part of a prompt."""

    def __init__(self, student: LayerStudent, row: StateRow) -> None:
        self.student, self.row = student, row
        self.in_c: RowReader | None = None
        self.prepared: tuple | None = None  # the pool and the scale that `in_c` was made for

    def read(self, pool: Tensor, texts: tuple[Text, ...], packed: Any, given: Inputs) -> None:
        """Read texts, also given as a kernel takes them."""
        if not texts:
            return
        if self.prepare(pool, given):
            assert self.in_c is not None
            group, (_, learned_sinks) = given.q.shape[1] // given.k.shape[1], given.scores or (None, None)
            q, out = given.q.unflatten(1, (-1, group)), given.out.unflatten(1, (-1, group))
            self.in_c.read(q, given.k, given.v, packed, out, learned_sinks)
            return
        single = [[text for text in texts if text[2] == 1 and (text[3] > 0) == begun] for begun in (True, False)]
        for alike in [*filter(None, single), *([text] for text in texts if text[2] > 1)]:
            self.read_alike(pool, alike, given)

    def prepare(self, pool: Tensor, given: Inputs) -> bool:
        """Prepare the kernel at the first step, after weights and pool have come; return whether it serves all."""
        place = pool.data_ptr(), given.scale
        if self.prepared != place:
            self.prepared, group = place, given.q.shape[1] // given.k.shape[1]
            q, k, v = (x[:1].transpose(0, 1)[None] for x in (given.q, given.k, given.v))
            like = q.unflatten(1, (-1, group)), k, v
            trusted, (cap, _) = reads_in_c(self.student, *like, bool(given.scores)), given.scores or (None, None)
            arguments = self.student, pool, self.row.places(), like, given.scale, cap
            self.in_c = RowReader.of(*arguments) if trusted else None
        return self.in_c is not None

    def read_alike(self, pool: Tensor, texts: list[Text], given: Inputs) -> None:
        """Read texts that have equally many new tokens, and that all have read some before or none."""
        device = given.out.device
        index, first, tokens, read = (torch.tensor(numbers, device=device) for numbers in zip(*texts, strict=True))
        places = first[:, None] + torch.arange(int(tokens[0]), device=device)
        rows = pool.index_select(0, index)
        states = self.row.read(rows, read) if texts[0][3] else []
        q, k, v = (x[places].transpose(1, 2) for x in (given.q, given.k, given.v))
        found = LayerStudent.forward(self.student, q, k, v, given.scale, None, states, *given.scores)
        self.row.write(rows, states)
        pool.index_copy_(0, index, rows)
        given.out[places] = found.transpose(1, 2)


class LayerReader:
    """Stands for the attention of one layer. Texts of at most `most` tokens keep the teacher's keys and values in their
    rows; with the first token too many, its heads read all of them and take the rows over."""

    def __init__(self, heads: HeadsInRows, exact: HeadsInRows | None, most: int) -> None:
        self.heads, self.exact, self.most = heads, exact, most
        self.memory: StateMemory | None = None

    def parts(self) -> tuple[HeadsInRows, HeadsInRows | None]:
        """Return what lies in rows: in one row there are states of either of both."""
        return self.heads, self.exact

    def end(self) -> int:
        """Return the byte behind what this layer uses of a row."""
        return max(part.row.end for part in self.parts() if part is not None)

    def forget_weights(self) -> None:
        """Prepare kernels anew at the next step."""
        self.heads.prepared = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, scores: tuple = ()) -> Tensor:
        """Return (tokens, query heads, dim) for q of that shape, and k and v (tokens, heads, dim)."""
        given = Inputs(q, k, v, scale, scores, v.new_zeros(len(q), q.shape[1], v.shape[-1]))
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        if metadata is not None:  # else vLLM measures its memory
            assert self.memory is not None
            plan, pool = plan_of(metadata[self.memory.name], self.most, self.memory.pool), self.memory.pool
            self.heads.read(pool, plan.long, plan.packed_long, given)
            if self.exact is not None:
                self.exact.read(pool, plan.short, plan.packed_short, given)
            for text, row in zip(plan.turning, plan.rows, strict=True):
                self.turn(text, row[None], given)
        return given.out

    def turn(self, text: Text, row: Tensor, given: Inputs) -> None:
        """Read a text that becomes too long: up to `most` tokens exactly, and all with the heads; `row` is a copy."""
        assert self.exact is not None and self.memory is not None
        at, first, tokens, read = text
        q, k, v = given.of_text(text)
        states = self.exact.row.read(row, torch.tensor([read], device=row.device)) if read else []
        all_k, all_v = k, v
        if read:
            all_k, all_v = (
                torch.cat([stored[:, :, :read], x], 2)
                for stored, x in ((states[0].window_k, k), (states[0].window_v, v))
            )
        behind = torch.cat([q.new_zeros(1, q.shape[1], read, q.shape[3]), q], 2)
        if exact := self.most - read:
            some = q[:, :, :exact], k[:, :, :exact], v[:, :, :exact], given.scale
            found = LayerStudent.forward(self.exact.student, *some, None, states, *given.scores)
            given.out[first : first + exact] = found[0].transpose(0, 1)
        of_heads: list = []
        found = LayerStudent.forward(
            self.heads.student, behind, all_k, all_v, given.scale, None, of_heads, *given.scores
        )
        given.out[first + exact : first + tokens] = found[0, :, self.most :].transpose(0, 1)
        self.heads.row.write(self.memory.pool[at : at + 1], of_heads)


@dataclass
class Plan:
    """The texts of a step that are read exactly, those that become too long for it, and those that were before."""

    short: tuple[Text, ...]
    turning: tuple[Text, ...]
    long: tuple[Text, ...]
    packed_short: Any
    packed_long: Any
    rows: Tensor  # of turning texts, copied before any layer changes them: a layer's heads overwrite others' keys


def plan_of(step: StepMetadata, most: int, pool: Tensor) -> Plan:
    """Return the plan of a step, which its first layer makes."""
    if step.plan is None:
        short = tuple(text for text in step.texts if text[2] + text[3] <= most)
        turning = tuple(text for text in step.texts if 0 < most < text[2] + text[3] and text[3] <= most)
        long = tuple(text for text in step.texts if text[3] > most or not most)
        rows = pool[[text[0] for text in turning]]
        step.plan = Plan(short, turning, long, pack_texts(short), pack_texts(long), rows)
    plan: Plan = step.plan
    return plan


def add_reader(
    readers: list[LayerReader], student: LayerStudent, query_heads: int, dims: tuple[int, int], dtype: torch.dtype,
    most: int,
) -> LayerReader:  # fmt: skip
    """Make the reader of the next layer, whose states lie in rows behind those of the layers before."""
    before = readers[-1] if readers else None
    begin = 0 if before is None else before.heads.row.end
    heads, exact = HeadsInRows(student, StateRow.of(student, query_heads, dims, dtype, begin)), None
    if most:
        window = LayerStudent([{"window": most}] * student.kv_heads, 0, dims[0], "prf", dims[1]).eval()
        begin = 0 if before is None or before.exact is None else before.exact.row.end
        exact = HeadsInRows(window, StateRow.of(window, query_heads, dims, dtype, begin))
    readers.append(LayerReader(heads, exact, most))
    return readers[-1]
