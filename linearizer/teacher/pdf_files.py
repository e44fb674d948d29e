"""Reads the text of a PDF in a process of its own, which ends in time: a file of somebody else may ask for anything."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress

from linearizer.errors import TextError

BEGINS = b"%PDF-"  # of every such file
SECONDS = 60  # that the pages of a file may take
MEMORY = 2**31  # bytes that the process may take
MISSING = 3  # exit code where the package is not installed


def read_pdf(name: str, content: bytes) -> str:
    """Return the text of the pages of a PDF."""
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "linearizer.teacher.pdf_files"],
            input=content,
            capture_output=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        raise TextError(f"{name!r} takes longer than {SECONDS} s to read: send its text as a text file") from error
    if done.returncode == MISSING:
        raise TextError(
            f"{name!r} is a PDF, and the package that reads these is not installed: `pip install pypdf`, or send its "
            "text as a text file"
        )
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode or not text.strip():
        why = "cannot be read as a PDF" if done.returncode else "holds no text, only pictures perhaps"
        raise TextError(f"{name!r} {why}: send its text as a text file")
    return text


def write_text() -> int:
    """Write the text of the PDF at the standard input to the standard output."""
    import resource

    with suppress(ValueError, OSError):  # not every system bounds memory so; time is bounded everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        from pypdf import PdfReader
    except ModuleNotFoundError:
        return MISSING
    pages = PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages
    for page in pages:
        sys.stdout.buffer.write(f"{page.extract_text()}\n\n".encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(write_text())
