"""A log of events, one JSON object per line; a line that a kill or a full disk cut off is not an event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from linearizer.errors import FolderError
from linearizer.plan.json_products import parse_json
from linearizer.run.files import open_in_place, writing

LAST_SECOND = 2**36  # of a time: some two thousand years after 1970


class EventName(str, Enum):
    """The names of events; the progress of a part of an evaluation has the name of the part."""

    # the state of a run
    QUEUED = "queued"
    STARTED = "started"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"
    WAITED = "waited"  # while shorter work went first: {"seconds"}

    # progress of a step: {"done", "total", "unit", …}
    PROFILE = "profile"
    TRY = "try"
    PRICE = "price"
    CHECK = "check"
    DISTILL = "distill"
    EVALUATE = "evaluate"

    # the result of a step
    PROFILED = "profiled"
    TRIED = "tried"
    PRICED = "priced"
    DROPPED = "dropped"  # a damaged file is not used
    CHECKED = "checked"  # the allocated student, with plain students of the same bytes
    ALLOCATED = "allocated"
    DISTILLED = "distilled"
    EVALUATED = "evaluated"  # the student, when it was made
    EXAMINED = "examined"  # a part of a requested evaluation
    PUBLISHED = "published"
    UNPUBLISHED = "unpublished"  # a student that was made in a job could not be published: {"error"}

    # of a run in jobs of the Hub: the start {"id", "url", "flavor", "cap"}, or the end {"id", "stage"} of a job
    HUB_JOB = "hub job"

    __str__ = str.__str__


STEPS = tuple(map(EventName, ("profile", "try", "price", "check", "distill", "evaluate")))  # with progress
Event = dict[str, Any]  # {"time": seconds since 1970, "event": its name, …}


@dataclass
class WorkTime:
    """The seconds that a run worked, without those in which it waited or was stopped."""

    seconds: float = 0.0  # until it last ended
    started: float | None = None
    newest: float = 0.0  # time of the last sign of work: a run that was killed does not log its end

    @classmethod
    def of(cls, events: Iterable[Event]) -> WorkTime:
        result = cls()
        for event in events:
            result.add(event)
        return result

    def add(self, event: Event) -> None:
        """Add the time between each start of the run and what ended it."""
        if event["event"] == EventName.STARTED:
            self.seconds += 0.0 if self.started is None else max(0.0, self.newest - self.started)
            self.started = event["time"]
        elif event["event"] == EventName.WAITED and self.started is not None:
            self.started += event["seconds"]
        elif event["event"] in (EventName.DONE, EventName.STOPPED, EventName.FAILED) and self.started is not None:
            self.seconds += event["time"] - self.started
            self.started = None
        if event["event"] != EventName.QUEUED:
            self.newest = event["time"]


def append_event(path: Path, event: str, details: Mapping[str, Any]) -> None:
    append_line(path, json.dumps({"time": round(time.time(), 3), "event": event, **details}).encode())


def append_line(path: Path, line: bytes) -> None:
    """Append a line, after ending an incomplete line before it."""
    with writing(path), open(path, "ab+", opener=open_in_place) as file:
        torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + line + b"\n")


def read_lines(path: Path, begin: int = 0) -> bytes:
    """Read the complete lines of a log from a byte on; a log that does not exist is empty."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise FolderError(f"{str(path)!r} cannot be read ({error.strerror}): remove it, or start a new run") from error
    return content[: content.rfind(b"\n") + 1]


def parse_lines(lines: Iterable[bytes]) -> Iterator[Event]:
    """Parse the lines that are events, each on demand."""
    return (event for line in lines if (event := parse_line(line)) is not None)


def read_events(path: Path, begin: int = 0) -> tuple[list[Event], int]:
    """Read the events from a byte on; return also the byte where the next begins, without an incomplete line."""
    content = read_lines(path, begin)
    return list(parse_lines(content.split(b"\n"))), begin + len(content)


def first_event(path: Path) -> Event | None:
    return next(parse_lines(read_lines(path).split(b"\n")), None)


def newest_events(path: Path, name: str = "") -> Iterator[Event]:
    """Read the events backwards, or those of one name; parse lines on demand."""
    lines = (line for line in reversed(read_lines(path).split(b"\n")) if name.encode() in line)
    return (event for event in parse_lines(lines) if name in ("", event["event"]))


def events_of_student(events: Sequence[Event], name: str) -> list[Event]:
    """List the events of one name since another budget was last allocated to the student."""
    matching: list[Event] = []
    for event in events:
        if event["event"] == EventName.ALLOCATED and event.get("changed"):
            matching = []
        elif event["event"] == name:
            matching.append(event)
    return matching


def parse_line(line: bytes) -> Event | None:
    """Parse a line; None: it is not an event with a name and a valid time."""
    try:
        event = parse_json(line)
    except ValueError:  # also if it is not UTF-8
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if type(event.get("time")) not in (int, float) or not 0 <= event["time"] < LAST_SECOND:
        return None
    if "done" in event and "total" in event:  # progress
        counts = (event["done"], event["total"])
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts) or not isinstance(event.get("unit"), str):
            return None
    return event
