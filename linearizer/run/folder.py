"""A run is a folder: its plan, its products, and a log of events, which alone decides the state of the run.

RUN/begun.json      the id of the run, and the caller's choices of options that were decided for plan.json
RUN/plan.json inspection.json profile.json prices.json allocation.json events.jsonl
RUN/state/          files for resuming: samples of queries and keys, the training
RUN/checkpoint/     the student, which transformers loads
RUN/lock            held by the process that works on the run
RUN/stop use        requests to that process, removed once they are served
RUN/worker.log      standard error of a process in the background
RUN/hub_job.json    hardware, price and owner of a run that works in jobs of the Hub

The run of an encoder has encoder.json for a plan, ways.json for an allocation, and quality.json and times.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from linearizer.errors import FolderError, RequestError
from linearizer.plan.allocation import Allocation
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.head_bytes import Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.json_products import JsonProduct, read_json
from linearizer.plan.options import differences
from linearizer.plan.plan import Plan
from linearizer.run import locks
from linearizer.run.events import Event, EventName, append_event, newest_events, read_events
from linearizer.run.files import UNFINISHED, link_error, open_in_place, remove, seal, unseal, write_whole, writing
from linearizer.run.locks import Lock
from linearizer.run.measured import CANDIDATES, Candidates, Prices, Profile
from linearizer.run.results import RESULTS, Part, Request, read_part

Product = TypeVar("Product")
FILES_OF_RUN = {
    "begun.json", "plan.json", "inspection.json", "profile.json", "prices.json", "gates.json", "allocation.json",
    "candidates.json", "evaluation.json", "events.jsonl", "state", "checkpoint", "lock", "stop", "use", "worker.log",
    "hub_job.json", "encoder.json", "ways.json", "quality.json", "times.json",
}  # fmt: skip
DECIDED = ("model", "dtype", "texts", "length")  # choices of a plan that `pipeline.begin` makes definite
ENDS = (EventName.STARTED, EventName.DONE)  # the newest of these tells whether a run is done
EVALUATION = "evaluate"
PLAN, ENCODER_PLAN = "plan.json", "encoder.json"
UNBOUNDED = 8192  # tokens; the length of a text where a teacher's positions set none


@dataclass(frozen=True)
class Begun(JsonProduct):
    """The start of a run: its id, and the caller's choices of options that were decided for its plan."""

    id: str
    model: str
    dtype: str
    texts: int | None
    length: int | None
    settled: bool  # whether everything is decided that depends on the machine of the run


@dataclass(frozen=True)
class Run:
    """The folder of a run, and a task in it: its student, or its evaluation."""

    folder: Path
    task: str | None = None  # None: make the student; "evaluate": evaluate it; every event names it, as its "job"

    @staticmethod
    def open(folder: Path) -> Run:
        """Open an existing run."""
        if not (folder / Run(folder).plan_file).is_file():
            raise FolderError(f"{str(folder)!r} holds no run: start a run with `linearizer run MODEL --out {folder}`")
        return Run(folder)

    @staticmethod
    def is_begun(folder: Path, resume: bool = False) -> bool:
        """Whether a folder holds a run to resume; refuse a folder where a run can neither begin nor resume.

        So all that has the name of a file of the run is the run's, and may be removed with it.
        """
        with writing(folder):  # a name may be too long, or a loop of links
            begun = (folder / Run(folder).plan_file).exists()
            paths = [*folder.iterdir()] if folder.is_dir() and not begun else []
            is_other = (folder.exists() and not folder.is_dir()) or not all(map(is_remnant, paths))
        if begun and not resume:
            raise FolderError(
                f"{str(folder)!r} holds a run already: add --resume (in Python resume=True), or name another folder"
            )
        if is_other and not begun:
            raise FolderError(f"{str(folder)!r} holds something else: name a folder that is new or empty")
        return begun

    @staticmethod
    def create(
        folder: Path,
        plan: Plan | EncoderPlan,
        inspection: JsonProduct | None = None,
        given: Plan | EncoderPlan | None = None,
        settled: bool = True,
    ) -> Run:
        """Make the folder of a run; `given` is its plan before anything was decided for it."""
        Run.is_begun(folder)
        with writing(folder):
            (folder / "state").mkdir(parents=True, exist_ok=True)
        run = Run(folder)
        choices: dict[str, Any] = {name: getattr(given or plan, name, "float32") for name in DECIDED}
        with run.take_lock():
            Run.is_begun(folder)  # another process may have begun a run here meanwhile
            run.write_product("begun.json", Begun(uuid4().hex, **choices, settled=settled).to_json())
            if inspection is not None:
                run.write_product("inspection.json", inspection.to_json())
            file = ENCODER_PLAN if isinstance(plan, EncoderPlan) else PLAN
            run.write_product(file, plan.to_json())  # last: with it the folder is a run
        return run

    @property
    def id(self) -> str:
        """The id of the run; a later run in the same folder has another id."""
        return self.begun.id

    @property
    def begun(self) -> Begun:
        return self.parse_file("begun.json", Begun.from_json, again=False)

    def settle(self, plan: Plan) -> None:
        """Write a plan in which everything is decided."""
        self.write_product(PLAN, plan.to_json())
        self.write_product("begun.json", replace(self.begun, settled=True).to_json())

    @property
    def key(self) -> tuple[Path, str]:
        """Identify this run, also among copies of its folder."""
        return self.folder, self.id

    @property
    def requested(self) -> dict[str, Any]:
        """The caller's values of the options that were decided for the run."""
        begun = self.begun
        return {name: getattr(begun, name) for name in DECIDED}

    def check_same(self, plan: Plan | EncoderPlan) -> None:
        """Refuse to resume with another plan than the run was begun with."""
        undecided = {name: value for name, value in self.requested.items() if getattr(plan, name, None) == value}
        if changes := differences(asdict(plan), asdict(self.any_plan) | undecided):
            raise RequestError(
                f"{str(self.folder)!r} was begun with another plan ({'; '.join(changes)}): ask for the same, or "
                "name another folder"
            )

    @property
    def evaluating(self) -> Run:
        """The evaluation in the same folder."""
        return replace(self, task=EVALUATION)

    def owns_event(self, event: Event) -> bool:
        """Whether an event belongs to this task."""
        return event.get("job") == self.task

    @property
    def is_encoder_run(self) -> bool:
        """Whether this is the run of an encoder; encoders/encoder_folder.py reads its folder."""
        return self.has_file(ENCODER_PLAN)

    @property
    def plan_file(self) -> str:
        return ENCODER_PLAN if self.is_encoder_run else PLAN

    @property
    def plan(self) -> Plan:
        return self.parse_file(PLAN, Plan.from_json, again=False)

    @property
    def encoder_plan(self) -> EncoderPlan:
        return self.parse_file(ENCODER_PLAN, EncoderPlan.from_json, again=False)

    @property
    def any_plan(self) -> Plan | EncoderPlan:
        return self.encoder_plan if self.is_encoder_run else self.plan

    @property
    def inspection(self) -> Inspection:
        """The teacher: its layers, sizes and limits."""
        return self.parse_file("inspection.json", Inspection.from_json, again=False)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.inspection.layers

    @property
    def positions(self) -> int:
        """The largest number of tokens that the teacher's positions allow."""
        return self.inspection.max_positions or UNBOUNDED

    @property
    def profile(self) -> Profile | None:
        return self.product("profile.json", Profile.from_json)

    @property
    def prices(self) -> Prices | None:
        return self.product("prices.json", Prices.from_json)

    @property
    def allocation(self) -> Allocation | None:
        return self.product("allocation.json", Allocation.from_json)

    @property
    def candidates(self) -> Candidates | None:
        """The measurements of the allocation and of plain allocations."""
        return self.product(CANDIDATES, Candidates.from_json)

    def product(self, name: str, parse: Callable[[str], Product]) -> Product | None:
        """Return a product of the run; None: it does not exist yet."""
        return self.parse_file(name, parse) if self.has_file(name) else None

    def require_student(self) -> None:
        """Refuse a run that has no student."""
        if not self.checkpoint.is_dir():
            raise RequestError(f"{str(self.folder)!r} has no student yet: `linearizer run --resume` makes it")

    def require_allocation(self) -> Allocation:
        """Read the allocation of a run that has a student."""
        if (allocation := self.allocation) is None:
            raise FolderError(f"{str(self.folder)!r} has lost its allocation.json: start a new run")
        return allocation

    @property
    def evaluation_parts(self) -> dict[str, dict[str, Any]]:
        """The measured parts of the evaluation: from judging, and from `linearizer evaluate`."""
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
        """The content of evaluation.json: parts, and the versions and device with which the student was made."""
        text = self.read("evaluation.json") if self.has_file("evaluation.json") else "{}"
        try:
            return {"parts": {}, "made_with": {}, **read_json(dict[str, dict[str, Any]], unseal(text))}
        except (ValueError, RequestError) as error:
            path = str(self.folder / "evaluation.json")
            raise FolderError(f"{path!r} cannot be read ({error}): remove it, and evaluate again") from error

    def write_evaluation(self, **changes: Any) -> None:
        """Write `parts` or `made_with`; do not change the other."""
        self.write_product("evaluation.json", json.dumps({**self.evaluation_file, **changes}))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def done(self) -> bool:
        """Whether the task has finished."""
        if not self.checkpoint.is_dir():
            return False
        names = (event["event"] for event in newest_events(self.log_file) if self.owns_event(event))
        return next((name for name in names if name in ENDS), None) == EventName.DONE

    def has_file(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(f"{str(self.folder / name)!r} cannot be read ({error}): start a new run") from error

    def parse_file(self, name: str, parse: Callable[[str], Product], again: bool = True) -> Product:
        """Parse a file, or name the damage; `again`: resuming the run makes the file again."""
        try:
            return parse(unseal((self.folder / name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, RequestError) as error:
            raise self.damaged_file_error(name, error, name if again else "") from error

    def damaged_file_error(self, name: str, fault: object, remove: str) -> FolderError:
        """Return the error of a damaged file, with the file to remove so that resuming makes it again, if it can."""
        remedy = "start a new run"
        if remove and not self.checkpoint.exists():  # a run with a student makes nothing again
            target = "it" if remove == name else repr(str(self.folder / remove))
            remedy = f"remove {target}, and `linearizer runs resume {self.folder}` makes it again"
        return FolderError(f"{str(self.folder / name)!r} cannot be read ({fault}): {remedy}")

    def write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)

    def write_product(self, name: str, text: str) -> None:
        """Write a JSON object with its digest: damage of what decides the student must be noticed."""
        self.write(name, seal(text))

    def remove(self) -> None:
        """Remove the files of the run, and its folder, also behind a link, if nothing else is in it."""
        last = [self.plan_file, "lock"]  # while these are present, removing can be repeated
        for name in [*sorted(FILES_OF_RUN.difference(last)), *last]:
            for path in (self.folder / name, self.folder / (name + UNFINISHED)):
                remove(path)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            remove(self.folder.resolve())
            remove(self.folder)  # the link

    def log(self, event: str, **details: Any) -> None:
        """Append an event; the time is seconds since 1970."""
        append_event(self.log_file, event, details if self.task is None else {"job": self.task, **details})

    def events(self) -> list[Event]:
        """Read the events of all jobs."""
        return read_events(self.log_file)[0]

    @property
    def published(self) -> Event | None:
        """The last publication of the student: {"repo_id", "revision", "url", "snippet", "private", "time"}."""
        return next(newest_events(self.log_file, EventName.PUBLISHED), None)

    @property
    def unpublished(self) -> str | None:
        """Why a job could not publish its student; None if it did not try, or the student was published since."""
        newest = next(newest_events(self.log_file, EventName.UNPUBLISHED), None)
        if newest is None or ((published := self.published) and published["time"] > newest["time"]):
            return None
        return f"the student was not published: {newest['error']}; publish it with linearizer push"

    @property
    def log_file(self) -> Path:
        return self.folder / "events.jsonl"

    def take_lock(self) -> Lock:
        """Keep other processes from writing this run; a process that dies frees its lock."""
        below = (Path(place) / name for place, *names in os.walk(self.folder / "state") for name in sum(names, []))
        for path in (*(self.folder / name for name in sorted(FILES_OF_RUN)), *below):
            if path.is_symlink():  # writing to it changes its target
                raise link_error(path)
        with writing(self.folder):
            lock = locks.take_lock(self.folder / "lock")
        if lock is None:
            raise FolderError(f"{str(self.folder)!r} is being written by another process: wait for it, or stop it")
        try:
            self.clear_request("stop")  # it was meant for a process that has ended
        except FolderError:
            lock.release()
            raise
        return lock

    @property
    def is_locked(self) -> bool:
        """Whether a live process holds this run."""
        return locks.is_held(self.folder / "lock")

    def make_request(self, name: str, reason: str = "") -> None:
        """Ask the process that works on this run to `stop`, or to end the training and `use` its result."""
        if reason:
            self.write(name, reason)
            return
        with writing(self.folder):
            os.close(open_in_place(self.folder / name, os.O_WRONLY | os.O_CREAT))

    def request_reason(self, name: str) -> str | None:
        """Return the reason of a request, if one was given."""
        with suppress(FolderError):  # not requested, or already served
            return self.read(name).strip() or None
        return None

    has_request = has_file

    def clear_request(self, name: str) -> None:
        """Remove a request that was served, or whose process has ended."""
        with writing(self.folder):
            (self.folder / name).unlink(missing_ok=True)


def is_remnant(path: Path) -> bool:
    """Whether a run that was killed as it began may have left a file or folder: `state` is then empty."""
    return path.name.removesuffix(UNFINISHED) in FILES_OF_RUN and not (path.is_dir() and any(path.iterdir()))


def read_plan(path: Path) -> Plan:
    """Read a plan from a file, which may have been edited since it was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{str(path)!r} cannot be read ({error.strerror}): name a plan.json") from error
    return parse_plan(str(path), content)


def parse_plan(name: str, content: bytes) -> Plan:
    """Parse the content of such a file."""
    try:
        return Plan.from_json(unseal(content.decode(), check=False))
    except (UnicodeDecodeError, RequestError) as error:
        raise RequestError(f"{name!r} cannot be read ({error}): name a plan.json") from error


def newest_request(run: Run) -> tuple[Request, bool, tuple[str, ...]]:
    """Return the newest request for an evaluation, whether it measures all again, and the parts done since."""
    finished: list[str] = []
    for event in newest_events(run.log_file):
        if run.evaluating.owns_event(event):
            if event["event"] == EventName.EXAMINED:
                finished.append(event["part"])
            if "request" in event:
                return Request.of(event["request"]), event.get("again", False), tuple(finished)
    raise RequestError(f"{str(run.folder)!r} has no request for an evaluation: `linearizer evaluate` makes it")
