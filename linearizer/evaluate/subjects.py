"""The subjects of an evaluation: the teacher, the student, and controls, which are the model with other heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from linearizer.model.swap import exchange_students
from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import SINKS, Head, Layer, cache_bytes, token_bytes
from linearizer.runtime.attention_interface import attending


@dataclass(frozen=True)
class Subject:
    """A model that goes through the same code on the same text as all other subjects."""

    name: str
    model: PreTrainedModel
    allocation: Allocation | None = None  # None: a teacher, whose state grows with the text
    heads: Sequence[nn.Module] | None = None  # what takes the place of the model's own students
    softmax: bool = False  # a student's base, attending as the teacher that it was

    @contextmanager
    def at_work(self) -> Iterator[PreTrainedModel]:
        """Give the model, attending as this subject does."""
        if self.softmax:
            with attending(self.model, "sdpa"):
                yield self.model
        elif self.heads is None:
            yield self.model
        else:
            with exchange_students(self.model, self.heads):
                yield self.model

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Give the bytes of cache or state once `length` tokens have been read."""
        return cache_bytes(layers, length) if self.allocation is None else self.allocation.state_bytes(layers, length)


def window_control(allocation: Allocation, layers: Sequence[Layer], length: int) -> Allocation:
    """Give every head a plain window and sinks, in the student's bits, that together take its bytes at a length."""
    bits = allocation.bits
    bytes_per_token = sum(
        len(row) * token_bytes(layer, bits) for row, layer in zip(allocation.heads, layers, strict=True)
    )
    tokens = allocation.state_bytes(layers, length) // max(bytes_per_token, 1)
    sinks = min(SINKS, tokens // 8)  # its own: a student with slots may need none
    rows = tuple((Head(window=max(tokens - sinks, 1), bits=bits),) * len(row) for row in allocation.heads)
    return Allocation("window", sinks, rows)
