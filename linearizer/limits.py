"""What a public Space lets one visitor use, said before work starts. At one's own machine nothing is limited."""

from __future__ import annotations

import time
from pathlib import Path

from linearizer import jobs
from linearizer.errors import LinearizerError, RequestError
from linearizer.inspection import Inspection
from linearizer.jobs import LIVE
from linearizer.plan import Plan
from linearizer.visitors import Visitor, on_space

WEIGHTS = 4e9  # bytes of a model
DISK = 8e9  # bytes of one visitor's runs
RUNS = 2  # of one visitor that wait or work
QUEUE = 12  # runs that wait or work, of all visitors
SECONDS = 45 * 60  # that a run may work
KEPT = 3 * 24 * 3600  # seconds that a run is kept after it last changed
MOST = {"texts": 32, "length": 2048, "samples": 4096, "steps": 300, "minutes": 30, "batch": 8}
TOKENS = 256  # that a comparison writes
PROMPT = 4000  # characters of a prompt
ELSEWHERE = "do this at your own machine, or in a Space of your own"
WORDS = (
    f"This is a public Space: models up to {WEIGHTS / 1e9:.0f} GB, {RUNS} runs of yours at a time, "
    f"{SECONDS // 60} minutes of work each. Runs are kept for {KEPT // 86400} days; publish what you want to keep."
)


def check_model(name: str, text: str = "builtin") -> None:
    """Refuse, before anything is read, what only the owner of a machine may name: its files."""
    if not on_space():
        return
    outside = name != "demo" and (name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).exists())
    if outside or "\0" in name:
        raise RequestError("on a Space a model is named by its id on the Hub, `org/name`, or is the demo")
    kind, _, rest = text.partition(":")
    if kind not in ("builtin", "self", "dataset") or (kind == "dataset" and Path(rest.partition(":")[0]).exists()):
        raise RequestError("on a Space text comes from `builtin`, `self` or `dataset:ID`: files of yours are not here")


def check(visitor: Visitor, plan: Plan, inspection: Inspection, root: Path) -> None:
    """Refuse what a public Space cannot do for one visitor among many."""
    if not on_space():
        return
    if inspection.weight_bytes > WEIGHTS:
        raise RequestError(
            f"{inspection.name!r} has {inspection.weight_bytes / 1e9:.1f} GB of weights, and this Space serves up to "
            f"{WEIGHTS / 1e9:.0f} GB: choose a smaller model, or {ELSEWHERE}"
        )
    for field, most in MOST.items():
        if (getattr(plan, field) or 0) > most:
            raise RequestError(f"{field} {getattr(plan, field)} is more than this Space serves ({most}): {ELSEWHERE}")
    check_turn(visitor, root)


def check_turn(visitor: Visitor, root: Path) -> None:
    """Refuse a visitor more runs or more disk than their share, and everyone a queue that is too long."""
    mine = jobs.runs_in(visitor.home)
    if sum(one.state in LIVE for one in mine) >= RUNS:
        raise RequestError(f"{RUNS} runs of yours are at work or wait: let one end, or stop it")
    if sum(one.disk_bytes for one in mine) > DISK:
        raise RequestError(f"your runs fill {DISK / 1e9:.0f} GB: delete one under `Runs`")
    waiting = sum(jobs.state_of(one.run) in LIVE for folder in folders(root) for one in jobs.runs_in(folder))
    if waiting >= QUEUE:
        raise RequestError(f"{waiting} runs wait here already: try again later, or {ELSEWHERE}")


def folders(root: Path) -> list[Path]:
    """List the visitors' folders."""
    return [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []


def enforce(root: Path, now: float) -> None:
    """Stop the runs that have worked too long, and remove those that nobody has looked after for days."""
    for folder in folders(root):
        for one in jobs.runs_in(folder):
            try:
                if one.state == "running" and now - worked_since(one) > SECONDS:
                    jobs.stop(one.run)
                elif one.state not in LIVE and now - one.changed > KEPT:
                    jobs.delete(one.run)
            except LinearizerError:
                continue  # it ended meanwhile, or its owner was faster


def worked_since(status: jobs.Status) -> float:
    """Say when a run's process last began to work."""
    begins = [event["time"] for event in status.run.events() if event["event"] == "started"]
    return begins[-1] if begins else status.begun


def guard(root: Path, often: float = 30.0) -> None:
    """Enforce the limits for ever."""
    while True:
        enforce(root, time.time())
        time.sleep(often)
