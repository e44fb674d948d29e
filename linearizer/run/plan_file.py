"""Reads the plan of a run, or of the page, from a file, which may have been edited since it was written."""

from __future__ import annotations

from pathlib import Path

from linearizer.errors import RequestError
from linearizer.run.files import unseal
from linearizer.run.plan import Plan


def read_plan(path: Path) -> Plan:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{str(path)!r} cannot be read ({error.strerror}): name a plan.json") from error
    return parse_plan(str(path), content)


def parse_plan(name: str, content: bytes) -> Plan:
    try:
        return Plan.from_json(unseal(content.decode(), check=False))
    except (UnicodeDecodeError, RequestError) as error:
        raise RequestError(f"{name!r} cannot be read ({error.__cause__ or error}): name a plan.json") from error
