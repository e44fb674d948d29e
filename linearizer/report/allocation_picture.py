"""An allocation as a picture: layers down, KV heads across, in each cell what the head holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.report.allocation_charts import KINDS, WHOLE, all_parts, held_parts

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

CELL, HEIGHT, GAP = 132, 46, 4  # pixels
LEFT, TOP, MARGIN = 96, 116, 20
PAPER, INK, FAINT, EMPTY = "#ffffff", "#1f2430", "#5b6472", "#eef0f3"
UNCHANGED_LAYER = "unchanged: the teacher itself has a window here"
MIN_WIDTH = 640  # pixels that the legend needs


def draw_picture(allocation: Allocation, layers: Sequence[Layer]) -> bytes:
    """Draw an allocation as a PNG."""
    from PIL import Image, ImageDraw

    heads = max(1, *map(len, allocation.heads))
    size = (max(LEFT + heads * CELL + MARGIN, MIN_WIDTH), TOP + len(layers) * HEIGHT + MARGIN)
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    held = all_parts(allocation, layers)
    draw_legend(pen, allocation, [kind for kind in KINDS if any(parts.get(kind) for parts in held)])
    pen.text((LEFT - 12, TOP - 16), "KV head", FAINT, anchor="rm", font_size=15)
    for number in range(heads):
        pen.text((LEFT + number * CELL + (CELL - GAP) / 2, TOP - 16), str(number), FAINT, anchor="mm", font_size=15)
    most = max((sum(parts.values()) for parts in held), default=1.0) or 1.0
    for index, (row, layer) in enumerate(zip(allocation.heads, layers, strict=True)):
        top = TOP + index * HEIGHT
        pen.text((LEFT - 12, top + (HEIGHT - GAP) / 2), f"layer {index}", FAINT, anchor="rm", font_size=15)
        if not row:
            pen.text((LEFT, top + (HEIGHT - GAP) / 2), UNCHANGED_LAYER, FAINT, anchor="lm", font_size=15)
        for number, head in enumerate(row):
            draw_cell(pen, LEFT + number * CELL, top, head, held_parts(head, layer, allocation.sinks), most)
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def draw_legend(pen: ImageDraw, allocation: Allocation, kinds: Sequence[str]) -> None:
    """Draw the legend of the colours; the cells say the same in words."""
    sinks = f"; {allocation.sinks} of the exact tokens are the first of the text" if allocation.sinks else ""
    pen.text((MARGIN, 24), "What every KV head keeps", INK, anchor="lm", font_size=20)
    pen.text((MARGIN, 50), f"bars: tokens of the teacher's cache{sinks}", FAINT, anchor="lm", font_size=15)
    at = float(MARGIN)
    for kind in kinds:
        pen.rectangle((at, 68, at + 14, 82), fill=KINDS[kind][0])
        pen.text((at + 22, 75), kind, INK, anchor="lm", font_size=15)
        at += 46 + pen.textlength(kind, font_size=15)


def draw_cell(pen: ImageDraw, left: float, top: float, head: Head, parts: Mapping[str, float], most: float) -> None:
    """Draw one head: words, and below them a bar of what it keeps relative to the largest head."""
    right, bottom = left + CELL - GAP, top + HEIGHT - GAP
    pen.rectangle((left, top, right, bottom), fill=EMPTY)
    line, at = bottom - 8, left
    for name, tokens in parts.items():
        width = (right - left) * (1 if name == WHOLE else tokens / most)
        if width >= 1:
            pen.rectangle((at, line, at + width, bottom), fill=KINDS[name][0])
            at += width
    size = min(14.0, 14 * (right - left - 8) / pen.textlength(head.in_brief, font_size=14))
    pen.text(((left + right) / 2, (top + line) / 2), head.in_brief, INK, anchor="mm", font_size=size)
