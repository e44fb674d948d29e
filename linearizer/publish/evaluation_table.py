"""An evaluation as a Markdown table: measures down, models across."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linearizer.evaluate.judging import EDGES


@dataclass(frozen=True)
class Measure:
    """One number that was found; None where it is not finite."""

    name: str
    value: float | None


def measures(row: dict[str, Any]) -> list[Measure]:
    """List what was measured of one model."""
    language = row["language"]
    edges = [*EDGES[1 : len(language["by_position"])], None]
    ends = ["" if edge is None else str(edge - 1) for edge in edges]
    found = [
        ("loss", language["loss"]),
        *(
            (f"loss at positions {begin}–{end}".rstrip("–") + " and later" * (not end), loss)
            for begin, end, loss in zip(EDGES, ends, language["by_position"], strict=False)
            if len(language["by_position"]) > 1
        ),
        ("KL to the teacher", language["kl"]),
        ("agreement with the teacher", language["agreement"]),
    ]
    for recall in row["recall"]:
        found += [(f"recall after {recall['gap']}", recall["second"])]
    return [Measure(name, value if math.isfinite(value) else None) for name, value in found]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out the measures of all models."""
    lines = [["", *(row["name"] for row in rows)], ["---"] * (len(rows) + 1)]
    lines.append(
        ["state, bytes", *("grows" if row["state_bytes"] is None else f"{row['state_bytes']:,}" for row in rows)]
    )
    for same in zip(*map(measures, rows), strict=True):
        lines.append([same[0].name, *("–" if one.value is None else f"{one.value:.4f}" for one in same)])
    if rows[0]["recall"]:
        firsts = (sum(recall["first"] for recall in row["recall"]) / len(row["recall"]) for row in rows)
        lines.append(["the passages, the first time", *(f"{first:.4f}" for first in firsts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
