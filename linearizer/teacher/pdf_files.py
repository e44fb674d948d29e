"""Reads the text of a PDF in a process of its own with limits: a stranger's file may need any time and memory."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress

from linearizer.errors import TextError

BEGINS = b"%PDF-"  # the start of every PDF
SECONDS = 60  # that the pages of a file may take
MEMORY = 2**31  # bytes that the process may take
MISSING = 3  # exit code where the package is not installed


def read_pdf(name: str, content: bytes) -> str:
    """Return the text of the pages of a PDF."""
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        process = subprocess.run(
            [sys.executable, "-m", "linearizer.teacher.pdf_files"],
            input=content,
            capture_output=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        raise TextError(f"{name!r} takes longer than {SECONDS} s to read: send its text as a text file") from error
    if process.returncode == MISSING:
        raise TextError(
            f"{name!r} is a PDF, and the package that reads these is not installed: `pip install pypdf`, or send its "
            "text as a text file"
        )
    text = process.stdout.decode("utf-8", "replace")
    if process.returncode or not text.strip():
        reason = "cannot be read as a PDF" if process.returncode else "holds no text, only pictures perhaps"
        raise TextError(f"{name!r} {reason}: send its text as a text file")
    return text


def write_text() -> int:
    """Write the text of the PDF on standard input to standard output."""
    import resource

    with suppress(ValueError, OSError):  # not every system limits memory like this; time is limited everywhere
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
