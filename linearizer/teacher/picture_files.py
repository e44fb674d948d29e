"""Reads pictures that others send, within bounds."""

from __future__ import annotations

import os
from base64 import b64decode
from io import BytesIO
from typing import IO, TYPE_CHECKING

from linearizer.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS, MAX_SIDE = 50_000_000, 1536  # of a picture as sent, as kept
MAX_PICTURES = 8  # of a chat
TOO_LARGE = f"the picture has more than {MAX_PIXELS // 10**6} million points: send a smaller one"
NO_PICTURE = "the file is no picture that can be read: send a whole PNG, JPEG, WebP, GIF, BMP or TIFF file"
NO_URL = "{!r} is no picture: send it as data:image/…;base64,…, as nothing is fetched"
DATA, BASE64, MAX_MEDIA = "data:image/", ";base64,", 64  # a picture in a URL, and characters up to its content


def is_picture_url(url: str) -> bool:
    return url.startswith(DATA) and BASE64 in url[:MAX_MEDIA]


def read_picture_url(url: str) -> Image.Image:
    """Read the picture that a data: URL holds; nothing is fetched."""
    if not is_picture_url(url):
        raise RequestError(NO_URL.format(url[:40]))
    try:
        return read_picture(BytesIO(b64decode(url.partition(BASE64)[2], validate=True)))
    except ValueError as error:
        raise RequestError(NO_PICTURE) from error


def read_picture(file: str | IO[bytes] | None) -> Image.Image:
    """Read a picture that somebody has sent, of bounded size and without what cameras add."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file or os.devnull, formats=FORMATS) as sent:
            if sent.width * sent.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            picture = ImageOps.exif_transpose(sent).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(TOO_LARGE) from error
    except Exception as error:  # formats raise errors of many types
        raise RequestError(NO_PICTURE) from error
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture
