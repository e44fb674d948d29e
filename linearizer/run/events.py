"""A log of events, one JSON object a line; a line that a kill or a full disk cut off is no event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from linearizer.errors import FolderError
from linearizer.plan.json_products import parse_json
from linearizer.run.files import open_in_place, writing

READ_BYTES = 2**14  # bytes that are read at once
LAST_SECOND = 2**36  # of a time: some two thousand years after 1970


class EventName(str, Enum):
    """The names of events; the progress of a part of an evaluation has the name of the part."""

    # the state of a run
    QUEUED = "queued"
    STARTED = "started"
    SLICE = "slice"  # a lent device was given back; the work goes on in the next slice
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"

    # progress of a step: {"done", "total", "unit", …}
    PROFILE = "profile"
    TRY = "try"
    PRICE = "price"
    CHECK = "check"
    GATES = "gates"
    DISTILL = "distill"
    EVALUATE = "evaluate"

    # the result of a step
    PROFILED = "profiled"
    TRIED = "tried"
    PRICED = "priced"
    DROPPED = "dropped"  # a damaged file is not used
    CHECKED = "checked"  # the student that was allocated, with plain students of the same bytes
    ALLOCATED = "allocated"
    TIMED = "timed"
    DISTILLED = "distilled"
    EVALUATED = "evaluated"  # the student, when it was made
    EXAMINED = "examined"  # a part of a requested evaluation
    PUBLISHED = "published"
    UNPUBLISHED = "unpublished"  # a student that was made in a job could not be published: {"error"}

    # of a run in jobs of the Hub: the beginning {"id", "url", "flavor", "cap"}, or the end {"id", "stage"} of a job
    HUB_JOB = "hub job"

    __str__ = str.__str__


STEPS = tuple(map(EventName, ("profile", "try", "price", "gates", "check", "distill", "evaluate")))  # with progress
Event = dict[str, Any]  # {"time": seconds since 1970, "event": its name, …}


def append_event(path: Path, event: str, details: Mapping[str, Any]) -> None:
    """Append an event."""
    append_line(path, json.dumps({"time": round(time.time(), 3), "event": event, **details}).encode())


def append_line(path: Path, line: bytes) -> None:
    """Append a line, and end a line before it that was cut off."""
    with writing(path), open(path, "ab+", opener=open_in_place) as file:
        torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + line + b"\n")


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a log to read it; a log that does not exist is empty."""
    try:
        file: BinaryIO = path.open("rb")
    except FileNotFoundError:
        file = BytesIO()
    except OSError as error:
        raise FolderError(f"{str(path)!r} cannot be read ({error.strerror}): remove it, or start a new run") from error
    with file:
        yield file


def read_events(path: Path, begin: int = 0) -> tuple[list[Event], int]:
    """Read the events from a byte on, and say where the next will begin; a line that is being written is left there."""
    with open_log(path) as file:
        file.seek(begin)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    events = (parse_line(line) for line in whole.split(b"\n"))
    return [event for event in events if event is not None], begin + len(whole)


def first_event(path: Path) -> Event | None:
    """Read the first event."""
    with open_log(path) as file:
        return next((event for line in file if (event := parse_line(line)) is not None), None)


def newest_events(path: Path) -> Iterator[Event]:
    """Read the events backwards: the newest take a few lines, however long the log."""
    with open_log(path) as file:
        end = file.seek(0, os.SEEK_END)
        cut = b""  # the beginning of a line, which belongs to the part before
        whole = False  # the last line may still be being written
        while end > 0:
            begin = max(0, end - READ_BYTES)
            file.seek(begin)
            lines = (file.read(end - begin) + cut).split(b"\n")
            cut, end = lines[0] if begin else b"", begin
            for line in reversed(lines[1 if begin else 0 :]):
                if whole and (event := parse_line(line)) is not None:
                    yield event
                whole = True


def events_named(path: Path, name: str) -> list[Event]:
    """Read the events of a name; the lines of others are not parsed."""
    with open_log(path) as file:
        lines = file.read().split(b"\n")[:-1]
    events = (parse_line(line) for line in lines if b'"event": "' + name.encode() + b'"' in line)
    return [event for event in events if event is not None and event["event"] == name]


def events_of_student(events: Sequence[Event], name: str) -> list[Event]:
    """Keep the events of one name that tell of the student as it is allocated now, not of one before another budget."""
    changes = [
        number for number, event in enumerate(events) if event["event"] == EventName.ALLOCATED and event.get("changed")
    ]
    return [event for event in events[changes[-1] if changes else 0 :] if event["event"] == name]


def parse_line(line: bytes) -> Event | None:
    """Read one line, if it is an event."""
    try:
        event = parse_json(line)
    except ValueError:  # also where it is no UTF-8
        return None
    return event if is_event(event) else None


def is_event(value: Any) -> bool:
    """Tell whether a value is an event; progress has a part, a whole and a unit."""
    if not isinstance(value, dict) or not isinstance(value.get("event"), str) or not is_time(value.get("time")):
        return False
    if "done" not in value or "total" not in value:
        return True
    counts = (value["done"], value["total"])
    return all(type(count) is int and 0 <= count < 2**63 for count in counts) and isinstance(value.get("unit"), str)


def is_time(value: Any) -> bool:
    """Tell whether a value is a time in seconds since 1970 that a calendar has."""
    return type(value) in (int, float) and 0 <= value < LAST_SECOND
