"""What one visitor may use on a public Space, checked before work starts. On your own machine nothing is limited.

The owner of a Space changes limits by variables: LINEARIZER_SPACE_MINUTES=90, and so on for every field of Limits.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from linearizer.errors import LinearizerError, RequestError
from linearizer.page.sending import is_leaving
from linearizer.page.visitors import Visitor, on_space
from linearizer.plan.json_products import adapter_of, explained_faults
from linearizer.plan.plan import Plan
from linearizer.run import events
from linearizer.run.disk import NUMBER
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.hub_job import read_hub_job
from linearizer.run.names import HubName, id_of_address, runs_root
from linearizer.run.results import Request
from linearizer.workers import control

if TYPE_CHECKING:
    from linearizer.plan.encoder_plan import EncoderInspection, EncoderPlan
    from linearizer.plan.inspection import Inspection

MIN_BUDGET, MAX_BUDGET = 32, 4096  # that sliders reach at one's own machine
MAX_OF_PLAN = {"budget": 2048, "features": 1024, "window": 2048, "sinks": 256}
MAX_OF_PLAN |= {"texts": 32, "length": 4096, "steps": 300, "batch": 8, "lora": 64}
MAX_OF_REQUEST = {"texts": 32, "length": 8192, "lengths": 6, "seconds": 15, "limit": 200, "tasks": 4}
MAX_COMPARED_TOKENS = 256  # of a comparison, from each model
MAX_PROMPT_TOKENS = 4096  # of a prompt and what is written after it, on a Space
MAX_DOCUMENT_CHARACTERS = 200_000  # that models read on a Space
MAX_FILE = (64 if on_space() else 4000) * 10**6  # bytes that a visitor may send: a text, or a state with its budget
MAX_CHATS = 64  # of all visitors, whose texts are kept
MAX_STATE_BYTES = 2**30  # of the states of chats; the newest is always kept
CHAT_SECONDS = 3600.0  # that a chat is kept after its last turn
GUARD_SECONDS = 30.0  # between two checks of how long runs have been running
ELSEWHERE = "do this on your own machine, or in a Space of your own"
VARIABLE_PREFIX = "LINEARIZER_SPACE_"


@dataclass(frozen=True)
class Limits:
    """The limits of a Space."""

    gigabytes: float = 4.0  # of a model's weights
    memory: float = 12.0  # gigabytes that a run is forecast to take at once
    disk: float = 8.0  # gigabytes of one visitor's runs
    runs: float = 2.0  # of one visitor, waiting or running
    queue: float = 12.0  # runs of all visitors, waiting or running
    minutes: float = 45.0  # that a run may take at a time
    days: float = 3.0  # that a run is kept after it last changed

    @staticmethod
    def of(environment: Mapping[str, str]) -> Limits:
        """Read what the owner of a Space set."""
        from pydantic import Field

        values = {}
        for name in (field.name for field in fields(Limits)):
            if text := environment.get(variable := VARIABLE_PREFIX + name.upper()):
                with explained_faults(variable):
                    values[name] = adapter_of(Annotated[float, Field(ge=0)]).validate_python(text)
        return Limits(**values)

    def in_words(self) -> str:
        return (
            f"This is a public Space: models up to {self.gigabytes:g} GB, up to {self.runs:g} of your runs at a time, "
            f"{self.minutes:g} minutes each. Runs are kept for up to {self.days:g} days; publish what you want to "
            "keep. The files of jobs stay in your bucket until you delete their run."
        )


LIMITS = Limits.of(os.environ)
CHECKING, NAMING = threading.Lock(), threading.Lock()
STARTING: list[Path] = []  # the folders of visitors who are starting a run, which is not queued yet


def check_model(name: str, text: str = "builtin", pictures: str | None = None) -> None:
    """Refuse, before anything is read, the names of files, which only the owner of a machine may use."""
    if not on_space():
        return
    name = id_of_address(name)
    outside = name != "demo" and (is_local(name) or HubName.of(name).repo_id.count("/") != 1)
    if outside or "\0" in name:
        raise RequestError("on a Space, name a model by its id on the Hub, `org/name`, or take the demo")
    if text.partition(":")[0] not in ("builtin", "self") and not is_hub_dataset(text):
        raise RequestError("on a Space text comes from `builtin`, `self` or `dataset:ID`: it cannot read your files")
    if pictures is not None and not is_hub_dataset(pictures):
        raise RequestError("on a Space pictures come from `dataset:ID`: it cannot read your folders")


def is_hub_dataset(source: str) -> bool:
    """Whether a source of texts or pictures is a data set of the Hub, not a folder of this machine."""
    kind, _, dataset = source.partition(":")
    return kind == "dataset" and not is_local(dataset.partition(":")[0])


def is_local(name: str) -> bool:
    """Whether a name is a path, such as `~/texts`, or that of a file or folder of this machine."""
    return name.startswith((".", "/", "~")) or os.path.exists(name)  # which is false for names that are too long


def check_plan(plan: Plan, inspection: Inspection, limits: Limits = LIMITS) -> None:
    """Refuse a plan that takes more than a public Space gives one visitor."""
    if not on_space():
        return
    from linearizer.workers.forecast import run_memory

    check_weights(inspection.name, inspection.expanded_bytes, limits)
    check_amounts(amounts_of(plan, inspection), MAX_OF_PLAN)
    check_memory(run_memory(plan, inspection), limits)


def check_encoder_plan(plan: EncoderPlan, inspection: EncoderInspection, limits: Limits = LIMITS) -> None:
    """Refuse such a plan of an encoder's run."""
    from linearizer.workers.forecast import encoder_memory

    if on_space():
        check_weights(inspection.name, NUMBER * inspection.parameters, limits)
        amounts = {name: getattr(plan, name) for name in ("budget", "texts", "steps", "batch")}
        check_amounts({**amounts, "length": plan.length or inspection.tokens}, MAX_OF_PLAN)
        check_memory(encoder_memory(plan, inspection), limits)


def amounts_of(plan: Plan, inspection: Inspection) -> dict[str, float]:
    """Return the amounts that a plan asks for, including those it leaves out."""
    plan = plan.sized(inspection.max_positions)
    amounts: dict[str, float] = {name: getattr(plan, name) or 0 for name in MAX_OF_PLAN}
    return amounts | {"window": plan.resolved_window, "sinks": plan.resolved_sinks, "lora": plan.resolved_lora}


def check_weights(name: str, weight_bytes: float, limits: Limits) -> None:
    if weight_bytes > limits.gigabytes * 1e9:
        raise RequestError(
            f"{name!r} has {weight_bytes / 1e9:.1f} GB of weights, and this Space serves up to "
            f"{limits.gigabytes:g} GB: choose a smaller model, or {ELSEWHERE}"
        )


def check_memory(needed: float, limits: Limits) -> None:
    """Refuse a run that would take the memory of other visitors' runs."""
    if needed > limits.memory * 1e9:
        raise RequestError(
            f"this plan would take some {needed / 1e9:.1f} GB of memory, and this Space gives a run {limits.memory:g} "
            f"GB: ask for shorter texts, fewer features or a smaller batch, or {ELSEWHERE}"
        )


def check_request(request: Request) -> None:
    """Refuse an evaluation that takes more than a public Space gives one visitor."""
    if not on_space():
        return
    check_model("demo", request.text or "builtin")
    if request.task_folder is not None:
        raise RequestError(f"a Space knows only lm_eval's own tasks: to use a folder of tasks, {ELSEWHERE}")
    if request.tasks and request.limit is None:
        raise RequestError(
            f"tasks with all their samples take too long here: set a limit up to {MAX_OF_REQUEST['limit']}"
        )
    longest = max(request.lengths, default=0)
    amounts = {"texts": request.texts, "length": max(request.length or 0, longest), "seconds": request.seconds}
    amounts |= {"limit": request.limit or 0, "tasks": len(request.tasks), "lengths": len(request.lengths)}
    check_amounts(amounts, MAX_OF_REQUEST)


def check_amounts(amounts: Mapping[str, float], maxima: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        if amount > maxima[name]:
            raise RequestError(
                f"{name} {amount} is more than this Space serves: ask for at most {maxima[name]}, or {ELSEWHERE}"
            )


def budget_reach(positions: int | None = None, planned: int | None = None) -> tuple[int, int]:
    """Return the least and the largest budget that a slider reaches, for a model with so many positions.

    A budget out of reach that is already `planned` is in reach, so that no slider changes it; checks may refuse it.
    """
    most = MAX_OF_PLAN["budget"] if on_space() else MAX_BUDGET
    least, largest = MIN_BUDGET, max(2 * MIN_BUDGET, min(most, positions or most))
    if planned is not None and not least <= planned <= most:
        return min(least, planned), max(largest, planned)
    return least, largest


def shortened(plan: Plan) -> Plan:
    """Shorten the texts of a plan that leaves their length open to what a Space serves, so that any budget fits."""
    most = MAX_OF_PLAN["length"]
    return replace(plan, length=most) if on_space() and plan.resolved_length(None) > most else plan


def naming() -> AbstractContextManager[object]:
    """Let one run at a time begin at one's own machine, where each takes the first free name."""
    return nullcontext() if on_space() else NAMING


@contextmanager
def turn(visitor: Visitor, limits: Limits = LIMITS) -> Iterator[None]:
    """Let a visitor start a run, if they may have one more; while it starts, it counts as a running one."""
    if not on_space():
        yield
        return
    home = visitor.home
    with CHECKING:
        check_turn(visitor, limits)
        STARTING.append(home)
    try:
        yield
    finally:
        STARTING.remove(home)


def check_turn(visitor: Visitor, limits: Limits) -> None:
    """Refuse more runs or disk than a visitor may use, and any run while the queue is full."""
    mine = visitor.runs()
    if sum(status.live for status in mine) + sum(map(STARTING.count, visitor.homes)) >= limits.runs:
        raise RequestError(f"at most {limits.runs:g} of your runs may run or wait: wait until one ends, or stop it")
    if sum(status.disk_bytes for status in mine) > limits.disk * 1e9:
        raise RequestError(f"your runs fill {limits.disk:g} GB: delete a run under `Runs`")
    waiting = sum(map(count_at_work, visitor_folders())) + len(STARTING)
    if waiting >= limits.queue:
        raise RequestError(f"the queue is full, with {waiting} of {limits.queue:g}: try again later, or {ELSEWHERE}")


def count_at_work(home: Path) -> int:
    """Count a visitor's runs that wait or run, by their locks alone, without reading their logs and files."""
    working = 0
    for file in home.glob("*/lock"):
        with suppress(OSError):  # its lock is damaged, so no process runs it
            working += Run(file.parent).is_locked
    return working


def visitor_folders() -> list[Path]:
    """List the visitors' folders."""
    root = runs_root()
    return [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []


def enforce_limits(now: float) -> None:
    """Stop runs that have taken too long, and delete runs that have not changed for days."""
    for folder in visitor_folders():
        with keep_guarding():
            for status in control.runs_in(folder):
                with keep_guarding():
                    enforce_limit(status, now)


@contextmanager
def keep_guarding() -> Iterator[None]:
    """Keep the limits of other runs whatever one run raises; log unexpected exceptions."""
    try:
        yield
    except LinearizerError:
        pass  # the run ended meanwhile, or its owner was faster
    except Exception:  # a run's files may be damaged in many ways, and other runs are checked after it
        traceback.print_exc()


def enforce_limit(status: control.Status, now: float) -> None:
    """Stop a run that has taken too long; delete it if it has not changed for days and its student is not being sent.

    A bucket of its jobs stays: only the token of its owner may delete it, and the Space keeps no tokens.
    """
    works = [job for job in (status, status.evaluation) if job and job.state == "running"]
    works = [job for job in works if read_hub_job(job.run) is None]  # a job takes no time of this Space
    if any(now - worked_since(job) > LIMITS.minutes * 60 for job in works):
        control.stop(
            status.run,
            f"it has run for {LIMITS.minutes:g} minutes, the limit of this Space for a run at a time: resume it, and "
            f"it goes on from here when its turn comes again, or {ELSEWHERE}",
        )
    elif not status.live and now - status.changed > LIMITS.days * 24 * 3600 and not is_leaving(status.run):
        control.delete(status.run)


def worked_since(status: control.Status) -> float:
    """Return the time at which a run, or its evaluation, started after it was last queued, without its pauses."""
    begun, waited = status.begun, 0.0
    for event in filter(status.run.owns_event, events.newest_events(status.run.log_file)):
        if event["event"] == EventName.STARTED:
            begun = event["time"]
        elif event["event"] == EventName.WAITED:
            waited += event["seconds"]
        elif event["event"] == EventName.QUEUED:
            break
    return begun + waited


def guard_runs(end_old_chats: Callable[[], None]) -> None:
    """Enforce the limits forever."""
    while True:
        enforce_limits(time.time())
        end_old_chats()
        time.sleep(min(GUARD_SECONDS, LIMITS.minutes * 6))
