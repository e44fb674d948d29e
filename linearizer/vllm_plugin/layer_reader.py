"""Reads the tokens of a step with one layer's student: those of all requests, from and into their rows of states."""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from linearizer.kernels.c.rows import RowReader, pack_texts
from linearizer.kernels.door import reads_in_c
from linearizer.student.layer_student import LayerStudent
from linearizer.vllm_plugin.state_memory import StateMemory, StepMetadata, Text
from linearizer.vllm_plugin.state_rows import StateRow

Tensor = torch.Tensor


class LayerReader:
    """Stands for the attention of one layer; the kernel in C reads all requests in one call where it serves all heads,
    else the student's own code reads those with one token as a batch, and each part of a prompt."""

    def __init__(self, student: LayerStudent, row: StateRow) -> None:
        self.student, self.row = student, row
        self.memory: StateMemory | None = None
        self.in_c: RowReader | None = None
        self.prepared: tuple | None = None  # the pool and the scale that `in_c` was made for

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, scores: tuple = ()) -> Tensor:
        """Return (tokens, query heads, dim) for q of that shape, and k and v (tokens, heads, dim)."""
        out = v.new_zeros(len(q), q.shape[1], v.shape[-1])
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        if metadata is None:  # vLLM measures its memory
            return out
        assert self.memory is not None
        step: StepMetadata = metadata[self.memory.name]
        if not scores and self.prepare(q, k, v, scale):
            assert self.in_c is not None
            if step.packed is None:
                step.packed = pack_texts(step.texts)
            group = q.shape[1] // k.shape[1]
            self.in_c.read(q.unflatten(1, (-1, group)), k, v, step.packed, out.unflatten(1, (-1, group)))
        else:
            self.read_as_student(step, (q, k, v), scale, scores, out)
        return out

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
        """Prepare the kernel at the first step, after weights and pool have come; return whether it serves all."""
        assert self.memory is not None
        place = self.memory.pool.data_ptr(), scale
        if self.prepared != place:
            self.prepared, group = place, q.shape[1] // k.shape[1]
            like = (
                q[:1].transpose(0, 1).unflatten(0, (-1, group))[None],
                *(x[:1].transpose(0, 1)[None] for x in (k, v)),
            )
            trusted = reads_in_c(self.student, *like)
            self.in_c = (
                RowReader.of(self.student, self.memory.pool, self.row.places(), like, scale) if trusted else None
            )
        return self.in_c is not None

    def read_as_student(
        self, step: StepMetadata, inputs: tuple[Tensor, ...], scale: float, scores: tuple, out: Tensor
    ) -> None:
        """Read by the definition, or by the kernels that serve some heads."""
        single = [[text for text in step.texts if text[2] == 1 and (text[3] > 0) == begun] for begun in (True, False)]
        for texts in [*filter(None, single), *([text] for text in step.texts if text[2] > 1)]:
            self.read_alike(texts, inputs, scale, scores, out)

    def read_alike(
        self, texts: list[Text], inputs: tuple[Tensor, ...], scale: float, scores: tuple, out: Tensor
    ) -> None:
        """Read texts that have equally many new tokens, and that all have read some before or none."""
        assert self.memory is not None
        pool, device = self.memory.pool, out.device
        index, first, tokens, read = (torch.tensor(numbers, device=device) for numbers in zip(*texts, strict=True))
        places = first[:, None] + torch.arange(int(tokens[0]), device=device)
        rows = pool.index_select(0, index)
        states = self.row.read(rows, read) if texts[0][3] else []
        q, k, v = (x[places].transpose(1, 2) for x in inputs)
        found = LayerStudent.forward(self.student, q, k, v, scale, None, states, *scores)
        self.row.write(rows, states)
        pool.index_copy_(0, index, rows)
        out[places] = found.transpose(1, 2)
