"""An allocation as a picture: layers down, KV heads across, in each cell what the head holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Head, Layer, head_bytes, pair_with_layers

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

CELL, HEIGHT, GAP = 108, 46, 4  # pixels
LEFT, TOP, MARGIN = 96, 116, 20
PAPER, INK, FAINT, EMPTY = "#ffffff", "#1f2430", "#5b6472", "#eef0f3"
WINDOW, FEATURES, SLOTS, WHOLE = "#0f9d8a", "#3b6fd4", "#8a5cc2", "#e0992e"
MIN_WIDTH = 640  # pixels that the legend needs


def draw_picture(allocation: Allocation, layers: Sequence[Layer]) -> bytes:
    """Draw an allocation as a PNG."""
    from PIL import Image, ImageDraw

    heads = max(1, *map(len, allocation.heads))
    size = (max(LEFT + heads * CELL + MARGIN, MIN_WIDTH), TOP + len(layers) * HEIGHT + MARGIN)
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    draw_legend(pen, allocation)
    write_text(pen, LEFT - 12, TOP - 16, "KV head", FAINT, anchor="rm")
    for number in range(heads):
        write_text(pen, LEFT + number * CELL + (CELL - GAP) / 2, TOP - 16, str(number), FAINT)
    fixed = (pair for pair in pair_with_layers(allocation.heads, layers) if not pair[0].softmax)
    most = max((head_bytes(head, layer, 0, 0) for head, layer in fixed), default=1) or 1
    for index, (row, layer) in enumerate(zip(allocation.heads, layers, strict=True)):
        top = TOP + index * HEIGHT
        write_text(pen, LEFT - 12, top + (HEIGHT - GAP) / 2, f"layer {index}", FAINT, anchor="rm")
        if not row:
            write_text(
                pen, LEFT, top + (HEIGHT - GAP) / 2, "unchanged: the teacher itself has a window here", FAINT, "lm"
            )
        for number, head in enumerate(row):
            draw_cell(pen, LEFT + number * CELL, top, head, layer, allocation.sinks, most)
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def list_kinds(allocation: Allocation) -> list[tuple[str, str]]:
    """Name what the heads hold, with its colour."""
    heads = [head for row in allocation.heads for head in row]
    named = [
        ("w: exact window, in tokens", WINDOW, any(head.window for head in heads)),
        ("f: features", FEATURES, any(head.features and not head.memory for head in heads)),
        ("f: rows of a memory", FEATURES, any(head.memory for head in heads)),
        ("s: slots of merged tokens", SLOTS, any(head.slots for head in heads)),
        ("softmax: grows", WHOLE, any(head.softmax for head in heads)),
    ]
    return [(name, colour) for name, colour, occurs in named if occurs]


def draw_legend(pen: ImageDraw, allocation: Allocation) -> None:
    """Draw the legend of the colours; the cells say the same in words."""
    write_text(pen, MARGIN, 24, "What every KV head keeps", INK, "lm", 20)
    sinks = f"; besides, {allocation.sinks} exact tokens at the start of the text" if allocation.sinks else ""
    note = f"bars: bytes of state{sinks}"
    write_text(pen, MARGIN, 50, note, FAINT, "lm")
    at = float(MARGIN)
    for name, colour in list_kinds(allocation):
        pen.rectangle((at, 68, at + 14, 82), fill=colour)
        write_text(pen, at + 22, 75, name, INK, "lm")
        at += 22 + pen.textlength(name, font=load_font(15)) + 24


def draw_cell(pen: ImageDraw, left: float, top: float, head: Head, layer: Layer, sinks: int, most: int) -> None:
    """Draw one head: words, and below them a bar of its bytes relative to the largest head."""
    right, bottom = left + CELL - GAP, top + HEIGHT - GAP
    pen.rectangle((left, top, right, bottom), fill=EMPTY)
    middle, line = (left + right) / 2, bottom - 8
    if head.softmax:
        pen.rectangle((left, line, right, bottom), fill=WHOLE)
        write_text(pen, middle, (top + line) / 2, "softmax", INK)
        return
    held = (("w", head.window), ("f", head.features), ("s", head.slots))
    words = [f"{letter} {count}" for letter, count in held if count]
    whole = right - left
    exact = whole * head_bytes(Head(window=head.window, bits=head.bits), layer, 0, 0) / most
    every = whole * head_bytes(head, layer, 0, 0) / most
    if exact >= 1:
        pen.rectangle((left, line, left + exact, bottom), fill=WINDOW)
    if every - exact >= 1:
        pen.rectangle((left + exact, line, left + every, bottom), fill=SLOTS if head.slots else FEATURES)
    write_text(pen, middle, (top + line) / 2, "  ".join(words) or ("sinks only" if sinks else "nothing"), INK, size=14)


def write_text(
    pen: ImageDraw, x: float, y: float, text: str, colour: str, anchor: str = "mm", size: float = 15
) -> None:
    """Write one line of text, anchored at its middle or an end."""
    pen.text((x, y), text, fill=colour, anchor=anchor, font=load_font(size))


@cache
def load_font(size: float) -> FreeTypeFont | ImageFont:
    """Load the font that Pillow carries."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
