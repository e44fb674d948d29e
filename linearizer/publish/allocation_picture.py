"""An allocation as a picture: layers down, KV heads across, in each cell what the head holds."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Head, Layer, head_bytes

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

CELL, HEIGHT, GAP = 108, 46, 4  # pixels
LEFT, TOP, MARGIN = 96, 116, 20
PAPER, INK, FAINT, EMPTY = "#ffffff", "#1f2430", "#5b6472", "#eef0f3"
WINDOW, FEATURES, SLOTS, WHOLE = "#0f9d8a", "#3b6fd4", "#8a5cc2", "#e0992e"
LEAST = 640  # width that the legend needs


def draw(allocation: Allocation, layers: Sequence[Layer]) -> bytes:
    """Draw an allocation as a PNG."""
    from PIL import Image, ImageDraw

    heads = max(1, *map(len, allocation.heads))
    size = (max(LEFT + heads * CELL + MARGIN, LEAST), TOP + len(layers) * HEIGHT + MARGIN)
    image = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(image)
    legend(pen, allocation)
    write(pen, LEFT - 12, TOP - 16, "KV head", FAINT, anchor="rm")
    for number in range(heads):
        write(pen, LEFT + number * CELL + (CELL - GAP) / 2, TOP - 16, str(number), FAINT)
    most = max((held for row in sizes(allocation, layers) for held in row), default=1) or 1
    for index, (row, layer) in enumerate(zip(allocation.heads, layers, strict=True)):
        top = TOP + index * HEIGHT
        write(pen, LEFT - 12, top + (HEIGHT - GAP) / 2, f"layer {index}", FAINT, anchor="rm")
        if not row:
            write(pen, LEFT, top + (HEIGHT - GAP) / 2, "bounded by the teacher itself: stays as it is", FAINT, "lm")
        for number, head in enumerate(row):
            cell(pen, LEFT + number * CELL, top, head, layer, allocation.sinks, most)
    out = BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def sizes(allocation: Allocation, layers: Sequence[Layer]) -> list[list[int]]:
    """Give the bytes of windows and features, which all heads' sinks come on top of."""
    return [
        [head_bytes(head, layer, 0, 0) for head in row if not head.softmax]
        for row, layer in zip(allocation.heads, layers, strict=True)
    ]


def kinds(allocation: Allocation) -> list[tuple[str, str]]:
    """Name what occurs, and its colour."""
    heads = [head for row in allocation.heads for head in row]
    named = [
        ("w: exact window, in tokens", WINDOW, any(head.window for head in heads)),
        ("f: features", FEATURES, any(head.features for head in heads)),
        ("s: slots of merged tokens", SLOTS, any(head.slots for head in heads)),
        ("softmax: grows", WHOLE, any(head.softmax for head in heads)),
    ]
    return [(name, colour) for name, colour, occurs in named if occurs]


def legend(pen: ImageDraw, allocation: Allocation) -> None:
    """Say what the colours are; words in the cells say it, too."""
    write(pen, MARGIN, 24, "What every KV head keeps", INK, "lm", 20)
    sinks = f"; besides, {allocation.sinks} exact tokens at the start of the text" if allocation.sinks else ""
    note = f"bars: bytes of state{sinks}"
    write(pen, MARGIN, 50, note, FAINT, "lm")
    at = float(MARGIN)
    for name, colour in kinds(allocation):
        pen.rectangle((at, 68, at + 14, 82), fill=colour)
        write(pen, at + 22, 75, name, INK, "lm")
        at += 22 + pen.textlength(name, font=font(15)) + 24


def cell(pen: ImageDraw, left: float, top: float, head: Head, layer: Layer, sinks: int, most: int) -> None:
    """Draw one head: words, and below them a bar of its bytes beside the largest of the picture."""
    right, bottom = left + CELL - GAP, top + HEIGHT - GAP
    pen.rectangle((left, top, right, bottom), fill=EMPTY)
    middle, line = (left + right) / 2, bottom - 8
    if head.softmax:
        pen.rectangle((left, line, right, bottom), fill=WHOLE)
        write(pen, middle, (top + line) / 2, "softmax", INK)
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
    write(pen, middle, (top + line) / 2, "  ".join(words) or ("sinks only" if sinks else "nothing"), INK, size=14)


def write(pen: ImageDraw, x: float, y: float, text: str, colour: str, anchor: str = "mm", size: float = 15) -> None:
    """Write one line, held at its middle or at an end."""
    pen.text((x, y), text, fill=colour, anchor=anchor, font=font(size))


def font(size: float) -> FreeTypeFont | ImageFont:
    """Give the font that Pillow carries."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
