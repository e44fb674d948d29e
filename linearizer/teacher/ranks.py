"""Ranks: the processes that work on a run together, each on a device of its own, numbered as torch.distributed does.

Rank 0 has the run: it alone decides, logs and writes products. It tells the other ranks what to do, does its own share,
and gathers theirs. What is shared is a list of parts that are computed one by one, so that the results do not depend on
the number of ranks. They send each other little, over gloo, whatever their devices: only the samples of a profile and
the gradients of an end-to-end loss are large. Where a rank ends, the next call of each other rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from linearizer.errors import RankEnded

Item = TypeVar("Item")
FOREVER = timedelta(days=365)  # a rank waits as long as another works, or as rank 0 waits for its turn


@dataclass(frozen=True)
class Ranks:
    """One of `count` ranks; of one alone each method returns what it was given."""

    number: int = 0
    count: int = 1
    group: Any = None  # of torch.distributed

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this rank, which follow each other; rank 0 has some if there are any."""
        begin, end = (-(-len(items) * number // self.count) for number in (self.number, self.number + 1))
        return items[begin:end]

    def hear(self, value: Any = None) -> Any:
        """Return the value of rank 0, which all ranks call together."""
        if self.count == 1:
            return value
        values = [value]
        with explained():
            distributed.broadcast_object_list(values, group=self.group)
        return values[0]

    def gather(self, value: Item) -> list[Item]:
        """Return the values of all ranks, which call this together; tensors lie on the CPU."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with explained():
            distributed.all_gather_object(values, value, self.group)
        return values

    def gather_shares(self, share: Sequence[Item]) -> list[Item]:
        """Return all items in their order, of which each rank has the share that `share` gave it."""
        return [item for of_rank in self.gather(share) for item in of_rank]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks, which call this together; all get the same bits."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([x.flatten().cpu() for x in tensors])
        with explained():
            distributed.all_reduce(flat, group=self.group)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))


ALONE = Ranks()


def connect(number: int, count: int, place: str = "env://", timeout: timedelta = FOREVER) -> Ranks:
    """Meet the other ranks, by the variables of a launcher or at a file."""
    with explained():
        distributed.init_process_group("gloo", init_method=place, rank=number, world_size=count, timeout=timeout)
        return Ranks(number, count, distributed.new_group(timeout=FOREVER))


@contextmanager
def explained() -> Iterator[None]:
    """Turn the error about a broken connection into a sentence."""
    try:
        yield
    except RuntimeError as error:
        raise RankEnded(
            "another process that works on this run has ended, and said why on its standard error: resume the run, on "
            "as many devices as there are"
        ) from error
