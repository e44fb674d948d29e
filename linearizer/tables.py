"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes with three digits: 512 B, 1.50 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows of cells, the first column to the left and the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in texts)
    return "\n".join("  ".join([row[0].strip().ljust(widths[0]), *row[1:]]).rstrip() for row in lines)
