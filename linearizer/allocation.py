"""Profile + budget -> Allocation: how much state every KV head gets. Pure arithmetic, one function per strategy."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.cost import Head


@dataclass(frozen=True)
class Allocation:
    """What every KV head of every layer holds; a layer that the teacher already bounds has no heads here."""

    strategy: str
    sinks: int
    heads: tuple[tuple[Head, ...], ...]  # [layer][kv head]
