"""What a link to the page shows where it is sent: title, description and a picture, drawn from the run that it names.

Gradio writes its own into every page; these take their place, and the style of the first paint stands beside them.
Whoever makes a preview is no visitor, so on a Space, where runs are their visitors' own, only the example has one;
other links show the recording of the first page.
"""

from __future__ import annotations

import io
import re
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linearizer.amounts import size
from linearizer.errors import LinearizerError
from linearizer.page.landing import SIDES, read_model
from linearizer.page.visitors import find_visitor, on_space
from linearizer.plan.allocation import StateSize
from linearizer.report.verdict import judge_run
from linearizer.run.folder import Run

PAGES = ("/", "/runs", "/runs/")
OTHERS = re.compile(rb'<meta\s+(?:property|name)="(?:og|twitter):[^>]*>\s*')
FIRST_STYLE = Path(__file__).with_name("first.css").read_text(encoding="utf-8")
SITE = "Linearizer: language models with a memory that does not grow"
COLOURS = {"teacher": "#7c8796", "student": "#2a83c4", "window": "#cf6f10"}
WIDTH, HEIGHT, MARGIN, BAR = 1200, 630, 70, 36  # pixels


class Preview(NamedTuple):
    """A title, a description, and the bytes that the picture compares: the colour, the name and the count of each."""

    title: str
    about: str
    bars: list[tuple[str, str, int]]


def preview_of(name: str) -> Preview:
    """Describe the run that a link names, or else the recording of the first page."""
    with suppress(LinearizerError):
        if name and (found := preview_of_run(find_visitor().find_run(name))) is not None:
            return found
    tokens, *sizes = read_model().recordings[0].readings[-1]
    held = zip(SIDES, sizes, strict=True)
    about = f"A text of {tokens:,} tokens, read by {read_model().model}, its student and a plain window."
    return Preview(SITE, about, [(COLOURS[side], title, count) for (side, title), count in held])


def preview_of_run(run: Run) -> Preview | None:
    """Describe the student of a run; None until it is judged."""
    if run.is_encoder_run or (verdict := judge_run(run)) is None or verdict.agreement is None:
        return None
    state, length = StateSize.of(run.require_allocation(), run.layers), verdict.length
    cache, held = state.teacher_bytes(length), state.student_bytes(length)
    model = run.plan.model.rstrip("/").rpartition("/")[2]
    part = f", 1/{cache / held:.0f} of its cache at {length:,} tokens" if cache > held else ""
    title = f"{model}: {verdict.agreement:.1%} alike in {size(held)}{part}"
    bars = [(COLOURS["teacher"], f"The cache at {length:,} tokens", cache), (COLOURS["student"], "The state", held)]
    return Preview(title, verdict.sentence, bars)


def draw_preview(preview: Preview) -> bytes:
    """Draw a picture of a preview: its title, and a bar for the bytes of each side."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, HEIGHT), "#121413")
    draw, most = ImageDraw.Draw(image), max(count for *_, count in preview.bars)
    large, small = ImageFont.load_default(56), ImageFont.load_default(34)
    lines = [""]
    for word in preview.title.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines, word] if draw.textlength(longer, large) > WIDTH - 2 * MARGIN else [*lines[:-1], longer]
    draw.multiline_text((MARGIN, MARGIN), "\n".join(lines[:3]), "#f3f3f0", large, spacing=14)
    top = HEIGHT - MARGIN - 100 * len(preview.bars)
    for row, (colour, name, count) in enumerate(preview.bars):
        y = top + 100 * row
        draw.text((MARGIN, y), f"{name}: {size(count)}", "#d3d3cc", small)
        draw.rectangle((MARGIN, y + 48, MARGIN + max(4, (WIDTH - 2 * MARGIN) * count // most), y + 48 + BAR), colour)
    image.save(written := io.BytesIO(), "PNG", optimize=True)
    return written.getvalue()


def send_picture(request: Request) -> Response:
    """Send the picture of the run that an address names."""
    picture = draw_preview(preview_of(request.query_params.get("run", "")))
    return Response(picture, media_type="image/png", headers={"Cache-Control": "max-age=300"})


ROUTE = Route("/preview.png", send_picture)


def write_tags(page: bytes, request: Request) -> bytes:
    """Put the tags of a preview in place of Gradio's, and the style of the first paint."""
    name = request.query_params.get("run", "")
    preview, asked = preview_of(name), f"?run={quote(name)}" if name else ""
    base = request.base_url.replace(scheme="https") if on_space() else request.base_url
    values = {
        "og:type": "website", "og:site_name": "Linearizer", "og:title": preview.title, "og:description": preview.about,
        "og:url": f"{base}{asked}", "og:image": f"{base}preview.png{asked}", "twitter:card": "summary_large_image",
    }  # fmt: skip
    tags = "".join(f'<meta property="{key}" content="{escape(value, quote=True)}">' for key, value in values.items())
    return OTHERS.sub(b"", page).replace(b"</head>", f"{tags}<style>{FIRST_STYLE}</style></head>".encode(), 1)


class LinkPreview:
    """Writes the tags of a preview into the pages that the application sends."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PAGES:
            return await self.app(scope, receive, send)
        kept: list[Message] = []

        async def keep(message: Message) -> None:
            kept.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                start, body = kept[0], b"".join(each.get("body", b"") for each in kept[1:])
                headers = MutableHeaders(raw=start["headers"])
                if headers.get("content-type", "").startswith("text/html"):
                    body = write_tags(body, Request(scope))
                    headers["content-length"] = str(len(body))
                await send({**start, "headers": headers.raw})
                await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, keep)
