"""How long finished runs of a model took here, beside their forecasts: forecasts of the next ones are corrected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from linearizer.errors import LinearizerError
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.run.events import WorkTime
from linearizer.run.folder import Run
from linearizer.run.hub_job import read_hub_job
from linearizer.workers.control import modified
from linearizer.workers.forecast import RunForecast, Speeds, forecast_seconds

NEWEST = 3  # finished runs of a model whose times count


@dataclass(frozen=True)
class PastRuns:
    """How many times their forecasts the newest finished runs of a model took."""

    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, home: Path, inspection: Inspection, speeds_of: Callable[[Plan], Speeds]) -> PastRuns:
        """Read the runs in a folder that made a student of this model in processes of this machine."""
        logs = sorted(home.glob("*/events.jsonl"), key=modified, reverse=True)
        shares = (share_of(Run(log.parent), inspection, speeds_of) for log in logs)
        return cls(tuple(islice((share for share in shares if share is not None), NEWEST)))

    def correct(self, forecast: RunForecast) -> RunForecast:
        """Return the forecast as these runs correct it, with the least and the most seconds that it may take."""
        if not self.shares:
            return forecast
        seconds = sorted(share * forecast.seconds for share in self.shares)
        return replace(forecast, seconds=seconds[len(seconds) // 2], least=seconds[0], most=seconds[-1])


def share_of(run: Run, inspection: Inspection, speeds_of: Callable[[Plan], Speeds]) -> float | None:
    """Return how many times its forecast a run took; None: it is no finished run of this model on this machine."""
    with suppress(LinearizerError, OSError):  # it may be damaged, or deleted meanwhile
        if run.is_encoder_run or not run.done or read_hub_job(run) is not None:
            return None
        if (run.inspection.name, run.inspection.revision) == (inspection.name, inspection.revision):
            seconds = WorkTime.of(filter(run.owns_event, run.events())).seconds
            return seconds / forecast_seconds(run.plan, run.inspection, speeds_of(run.plan)) if seconds > 0 else None
    return None
