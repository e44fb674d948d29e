"""Reads the text of a PDF in a process of its own with limits: a stranger's file may need any time and memory."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress

from linearizer.amounts import size
from linearizer.errors import TextError

BEGINS = b"%PDF-"  # the start of every PDF
SECONDS = 60  # that the pages of a file may take
MEMORY = 2**31  # bytes that the process may take
MOST_TEXT = 2**26  # bytes of it: a small file may hold any number
INHERITED = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment: a stranger's file must not find tokens
MISSING, TOO_LONG = 3, 4  # exit codes: the package is not installed, there is more text


def read_pdf(name: str, content: bytes) -> str:
    """Return the text of the pages of a PDF."""
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        process = subprocess.run(
            [sys.executable, "-m", "linearizer.teacher.pdf_files", str(MOST_TEXT)],
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            env={**{name: x for name, x in os.environ.items() if name in INHERITED}, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        raise TextError(f"{name!r} takes longer than {SECONDS} s to read: send its text as a text file") from error
    if process.returncode == MISSING:
        raise TextError(
            f"{name!r} is a PDF, and the package that reads these is not installed: `pip install pypdf`, or send its "
            "text as a text file"
        )
    if process.returncode == TOO_LONG:
        raise TextError(f"{name!r} holds more than {size(MOST_TEXT)} of text: send a part of it as a text file")
    text = process.stdout.decode("utf-8", "replace")
    if process.returncode or not text.strip():
        reason = "cannot be read as a PDF" if process.returncode else "holds no text, only pictures perhaps"
        raise TextError(f"{name!r} {reason}: send its text as a text file")
    return text


def write_text(most: int) -> int:
    """Write the text of the PDF on standard input, of so many bytes at most, to standard output."""
    import resource

    with suppress(ValueError, OSError):  # not every system limits memory like this; time is limited everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        from pypdf import PdfReader
    except ModuleNotFoundError:
        return MISSING
    pages = PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages
    for page in pages:
        text = f"{page.extract_text()}\n\n".encode("utf-8", "replace")
        if (most := most - len(text)) < 0:
            return TOO_LONG
        sys.stdout.buffer.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(write_text(int(sys.argv[1])))
