"""A log of events, one JSON object a line; a line that was cut off by a kill or a full disk is no event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from linearizer.run.files import writing

READ_BYTES = 2**14  # bytes that are read at once


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
    EXCHANGE = "exchange"
    GATES = "gates"
    DISTILL = "distill"
    EVALUATE = "evaluate"

    # the result of a step
    PROFILED = "profiled"
    TRIED = "tried"
    PRICED = "priced"
    DROPPED = "dropped"  # a damaged file is not used
    EXCHANGED = "exchanged"
    ALLOCATED = "allocated"
    TIMED = "timed"
    DISTILLED = "distilled"
    EVALUATED = "evaluated"  # the student, when it was made
    EXAMINED = "examined"  # a part of a requested evaluation
    PUBLISHED = "published"

    __str__ = str.__str__


STEPS = tuple(map(EventName, ("profile", "try", "price", "exchange", "gates", "distill", "evaluate")))  # with progress
Event = dict[str, Any]  # {"time": seconds since 1970, "event": its name, …}


def append_event(path: Path, event: str, details: Mapping[str, Any]) -> None:
    """Append an event."""
    with writing(path), path.open("ab+") as file:
        torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        line = json.dumps({"time": round(time.time(), 3), "event": event, **details})
        file.write((b"\n" if torn else b"") + line.encode() + b"\n")


def read_events(path: Path, begin: int = 0) -> tuple[list[Event], int]:
    """Read the events from a byte on, and say where the next will begin; a line that is being written is left there."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read()
    except FileNotFoundError:
        return [], begin
    whole = content[: content.rfind(b"\n") + 1]
    found = (parse_line(line) for line in whole.split(b"\n"))
    return [event for event in found if event is not None], begin + len(whole)


def first_event(path: Path) -> Event | None:
    """Read the first event."""
    try:
        with path.open("rb") as file:
            return next((event for line in file if (event := parse_line(line)) is not None), None)
    except FileNotFoundError:
        return None


def newest_events(path: Path) -> Iterator[Event]:
    """Read the events backwards; who wants the newest pays for a few lines, however long the log."""
    try:
        with path.open("rb") as file:
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
    except FileNotFoundError:
        return


def events_named(path: Path, event: str) -> list[Event]:
    """Read the events of one name; the others are hardly looked at."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = (parse_line(line) for line in lines if b'"event": "' + event.encode() + b'"' in line)
    return [one for one in found if one is not None and one["event"] == event]


def events_of_student(events: Sequence[Event], name: str) -> list[Event]:
    """Keep the events of one name that tell of the student as it is allocated now, not of one before another budget."""
    changes = [
        number for number, event in enumerate(events) if event["event"] == EventName.ALLOCATED and event.get("changed")
    ]
    return [event for event in events[changes[-1] if changes else 0 :] if event["event"] == name]


def parse_line(line: bytes) -> Event | None:
    """Read one line, if it is an event."""
    try:
        found = json.loads(line)
    except ValueError:  # among them what is no UTF-8
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) and "time" in found else None
