"""A run is a folder: what was asked, what came of it, and a log of events that is the only truth.

RUN/begun.json      the id of the run, and what was asked where plan.json holds what was decided
RUN/plan.json inspection.json profile.json prices.json gates.json allocation.json events.jsonl
RUN/state/          what resuming needs: the samples of queries and keys, and of training
RUN/checkpoint/     what loads with transformers
RUN/lock            held by the process that works on the run
RUN/stop use        requests to that process, removed when they are taken up
RUN/worker.log      what a process in the background wrote to standard error
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from linearizer.errors import FolderError, RequestError
from linearizer.run import locks
from linearizer.run.allocation import Allocation
from linearizer.run.events import (
    Event,
    EventName,
    append_event,
    events_named,
    events_of_student,
    newest_events,
    read_events,
)
from linearizer.run.files import UNFINISHED, write_whole, writing
from linearizer.run.head_bytes import Layer
from linearizer.run.inspection import Inspection
from linearizer.run.locks import Lock
from linearizer.run.plan import Plan
from linearizer.run.prices import Prices
from linearizer.run.profile import Profile
from linearizer.run.results import RESULTS, Part, read_part

Product = TypeVar("Product")
OWN = {
    "begun.json", "plan.json", "inspection.json", "profile.json", "prices.json", "gates.json", "allocation.json",
    "evaluation.json", "events.jsonl", "state", "checkpoint", "lock", "stop", "use", "worker.log",
}  # fmt: skip
DECIDED = ("model", "prices")  # choices of a plan that `pipeline.begin` makes definite
ENDS = (EventName.STARTED, EventName.DONE)  # the newest of these tells whether a run is done
EVALUATION = "evaluate"
UNBOUNDED = 8192  # tokens; the length of a text where a teacher's positions set none


@dataclass(frozen=True)
class Run:
    """One run's folder, and which work on it is meant: its events are told from others' in the log."""

    folder: Path
    job: str | None = None  # None: what the plan asks for; "evaluate": what is asked of the student afterwards

    @staticmethod
    def open(folder: Path) -> Run:
        """Open a run that is there."""
        if not (folder / "plan.json").is_file():
            raise FolderError(f"{str(folder)!r} holds no run: start one with `linearizer run MODEL --out {folder}`")
        return Run(folder)

    @staticmethod
    def is_begun(folder: Path, resume: bool = False) -> bool:
        """Tell whether a folder holds a run to resume; refuse it where a run can neither begin nor resume."""
        begun = (folder / "plan.json").exists()
        if begun and not resume:
            raise FolderError(
                f"{str(folder)!r} holds a run already: add --resume to go on with it, or name another folder"
            )
        present = {path.name.removesuffix(UNFINISHED) for path in folder.iterdir()} if folder.is_dir() else set()
        if folder.exists() and (not folder.is_dir() or present - OWN):
            raise FolderError(f"{str(folder)!r} holds something else: name a folder that is new or empty")
        return begun

    @staticmethod
    def create(folder: Path, plan: Plan, inspection: Inspection | None = None, asked: Plan | None = None) -> Run:
        """Make the folder of a run; `asked` is its plan before anything was decided for it."""
        Run.is_begun(folder)
        with writing(folder):
            (folder / "state").mkdir(parents=True, exist_ok=True)
        run, asked = Run(folder), asked or plan
        run.write("begun.json", json.dumps({"id": uuid4().hex, **{name: getattr(asked, name) for name in DECIDED}}))
        if inspection is not None:
            run.write("inspection.json", inspection.to_json())
        run.write("plan.json", plan.to_json())  # last: with it the folder is a run
        return run

    @property
    def id(self) -> str:
        """The id of the run; a later run in a folder of the same name has another."""
        return self.parse_file("begun.json", json.loads, again=False)["id"]

    @property
    def key(self) -> tuple[Path, str]:
        """Tell this run also from copies of its folder."""
        return self.folder, self.id

    def check_same(self, asked: Plan) -> None:
        """Refuse to resume with another plan than the run was begun with."""
        begun = self.parse_file("begun.json", json.loads, again=False)
        undecided = {name: begun[name] for name in DECIDED if getattr(asked, name) == begun[name]}
        if differences := asked.differences(replace(self.plan, **undecided)):
            raise RequestError(
                f"{str(self.folder)!r} was begun with another plan ({'; '.join(differences)}): ask for the same, or "
                "name another folder"
            )

    @property
    def evaluating(self) -> Run:
        """The evaluation job of the same folder."""
        return replace(self, job=EVALUATION)

    def owns_event(self, event: Event) -> bool:
        """Tell whether an event belongs to this job."""
        return event.get("job") == self.job

    @property
    def plan(self) -> Plan:
        return self.parse_file("plan.json", Plan.from_json, again=False)

    @property
    def inspection(self) -> Inspection:
        """What the teacher is."""
        return self.parse_file("inspection.json", Inspection.from_json, again=False)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.inspection.layers

    @property
    def positions(self) -> int:
        """How far the teacher's positions reach."""
        return self.inspection.max_positions or UNBOUNDED

    @property
    def profile(self) -> Profile | None:
        return self.parse_file("profile.json", Profile.from_json) if self.has_file("profile.json") else None

    @property
    def prices(self) -> Prices | None:
        return self.parse_file("prices.json", Prices.from_json) if self.has_file("prices.json") else None

    @property
    def gates(self) -> list[list[float]] | None:
        """How much each KV head needs its whole cache, where gates were learned."""
        return self.parse_file("gates.json", read_gates) if self.has_file("gates.json") else None

    @property
    def allocation(self) -> Allocation | None:
        return self.parse_file("allocation.json", Allocation.from_json) if self.has_file("allocation.json") else None

    @property
    def evaluation_parts(self) -> dict[str, dict[str, Any]]:
        """What was measured of the student, part by part: when it was made, and what `linearizer evaluate` added."""
        return self.evaluation_file["parts"]

    @property
    def results(self) -> dict[str, Part]:
        """The parts of the evaluation, typed, by their names."""
        try:
            return {name: read_part(name, plain) for name, plain in self.evaluation_parts.items() if name in RESULTS}
        except (TypeError, KeyError, RequestError) as error:
            raise self.damaged_file_error("evaluation.json", error, "evaluation.json") from error

    @property
    def evaluation_file(self) -> dict[str, Any]:
        """All that evaluation.json holds: parts, and with what the student was made."""
        try:
            held = json.loads(self.read("evaluation.json")) if self.has_file("evaluation.json") else {}
        except ValueError as error:
            path = str(self.folder / "evaluation.json")
            raise FolderError(f"{path!r} cannot be read ({error}): remove it, and evaluate again") from error
        return {"parts": {}, "made_with": {}, **held}

    def write_evaluation(self, **changes: Any) -> None:
        """Write parts, or with what the student was made; what is not named stays."""
        self.write("evaluation.json", json.dumps({**self.evaluation_file, **changes}))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        told = (event["event"] for event in newest_events(self.log_file) if self.owns_event(event))
        return self.checkpoint.is_dir() and next((name for name in told if name in ENDS), None) == EventName.DONE

    def has_file(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(f"{str(self.folder / name)!r} cannot be read ({error}): start a new run") from error

    def parse_file(self, name: str, parse: Callable[[str], Product], again: bool = True) -> Product:
        """Read what a file holds, or say what is wrong with it; `again`: going on with the run makes it anew."""
        try:
            return parse(self.read(name))
        except (ValueError, TypeError, KeyError, RequestError) as error:
            raise self.damaged_file_error(name, error.__cause__ or error, name if again else "") from error

    def damaged_file_error(self, name: str, what: object, remove: str) -> FolderError:
        """Say that a file cannot be used, and what to remove so that it is made anew; where that is nothing, how on."""
        it = "it" if remove == name else repr(str(self.folder / remove))
        remedy = f"remove {it}, and `linearizer runs resume {self.folder}` makes it anew"
        if not remove or self.checkpoint.exists():  # what has made its student makes nothing anew
            remedy = "start a new run"
        return FolderError(f"{str(self.folder / name)!r} cannot be read ({what}): {remedy}")

    def write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)

    def remove_unstarted(self) -> None:
        """Remove a run that has made nothing, and its folder if that leaves it empty."""
        made = ("plan.json", "plan.json" + UNFINISHED, "begun.json", "inspection.json", "events.jsonl")
        for name in (*made, "stop", "use", "worker.log", "lock"):
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.folder / "state", self.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def log(self, event: str, **details: Any) -> None:
        """Append an event; the time is seconds since 1970."""
        append_event(self.log_file, event, details if self.job is None else {"job": self.job, **details})

    def events(self) -> list[Event]:
        """Read all events, of whatever work."""
        return read_events(self.log_file)[0]

    @property
    def published(self) -> Event | None:
        """Where the student was published last: {"repo_id", "revision", "url", "snippet", "private", "time"}."""
        return next(reversed(events_named(self.log_file, EventName.PUBLISHED)), None)

    @property
    def log_file(self) -> Path:
        return self.folder / "events.jsonl"

    def take_lock(self) -> Lock:
        """Keep other processes from writing this run; a process that dies frees its lock."""
        with writing(self.folder):
            lock = locks.take_lock(self.folder / "lock")
        if lock is None:
            raise FolderError(f"{str(self.folder)!r} is being written by another process: wait for it, or stop it")
        self.clear_request("stop")  # it was for a process that is gone
        return lock

    @property
    def is_locked(self) -> bool:
        """Whether a live process holds this run."""
        return locks.is_held(self.folder / "lock")

    def make_request(self, name: str, why: str = "") -> None:
        """Request of the process that works on this run to `stop`, or to `use` the training as it is."""
        if why:
            self.write(name, why)
            return
        with writing(self.folder):
            (self.folder / name).touch()

    def request_reason(self, name: str) -> str | None:
        """Give the reason of a request, if one was given."""
        try:
            return self.read(name) or None
        except FolderError:  # it was not requested, or is settled
            return None

    def has_request(self, name: str) -> bool:
        return self.has_file(name)

    def clear_request(self, name: str) -> None:
        """Remove a request that was served, or whose process is gone."""
        with writing(self.folder):
            (self.folder / name).unlink(missing_ok=True)


def read_gates(text: str) -> list[list[float]]:
    """Read how much each KV head needs its whole cache."""
    return [[float(gate) for gate in layer] for layer in json.loads(text)]


def newest_request(run: Run) -> tuple[dict[str, Any], bool, tuple[str, ...]]:
    """Give what an evaluation was last asked for, whether all of it anew, and which parts are done since."""
    done: list[str] = []
    for event in newest_events(run.log_file):
        if run.evaluating.owns_event(event):
            if event["event"] == EventName.EXAMINED:
                done.append(event["part"])
            if "request" in event:
                return event["request"], event.get("again", False), tuple(done)
    raise RequestError(f"{str(run.folder)!r} was not asked for an evaluation: `linearizer evaluate` asks for one")


@dataclass(frozen=True)
class Trained:
    """Steps of all phases of a training."""

    done: int
    asked: int

    @property
    def early(self) -> bool:
        return self.done < self.asked


def trained(run: Run) -> Trained:
    """Read from the log of a run how its training ended; a phase that was taken up again counts as it ended last."""
    ends = {event.get("phase", 0): event for event in events_of_student(run.events(), EventName.DISTILLED)}
    done = sum(event["steps"] for event in ends.values())
    return Trained(done, sum(int(event.get("asked") or event["steps"]) for event in ends.values()))
