"""The terms of a run in jobs of the Hub: its hardware, its maximum time and the account that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linearizer.plan.json_products import JsonProduct
from linearizer.run.events import Event, EventName, newest_events
from linearizer.run.folder import Run

FILE = "hub_job.json"


@dataclass(frozen=True)
class HubJob(JsonProduct):
    """The terms that a run's owner agreed to: a job costs at most `cap`, and a resumed run may need another job."""

    owner: str  # the account that pays and owns the bucket
    flavor: str  # of the hardware
    minutes: int  # after which the Hub ends the job
    usd_per_hour: float
    push: str | None = None  # the repository that the job publishes the student in

    @property
    def cap(self) -> float:
        """The most that one job costs, in USD, rounded up to a cent."""
        return math.ceil(round(100 * self.usd_per_hour * self.minutes / 60, 6)) / 100

    @property
    def in_words(self) -> str:
        return (
            f"a job on {self.flavor} costs {self.owner} ${self.usd_per_hour:.2f} an hour, and at most ${self.cap:.2f} "
            f"for {self.minutes} minutes"
        )


def read_hub_job(run: Run) -> HubJob | None:
    """Read the terms of a run in jobs; None: it works on this machine."""
    if run.task is not None or not run.has_file(FILE):
        return None
    return run.parse_file(FILE, HubJob.from_json, again=False)


def open_job(run: Run) -> Event | None:
    """Return the start of the newest job, {"id", "url", "flavor", "cap"}, if its end is not known yet."""
    newest = next(newest_events(run.log_file, EventName.HUB_JOB), None)
    return None if newest is None or "stage" in newest else newest


def agreed_cap(run: Run) -> float:
    """Return the amount in USD that was agreed to when the run was last queued; 0: no new job may begin."""
    queued = filter(run.owns_event, newest_events(run.log_file, EventName.QUEUED))
    return float(next(queued, {}).get("cap", 0.0))
