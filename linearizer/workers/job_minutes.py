"""How long a run takes in a job of the Hub, on the slowest hardware of its kind."""

from __future__ import annotations

import math
from dataclasses import replace

from linearizer.hub.jobs_api import Hardware
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.teacher.streaming import FILLED
from linearizer.workers.forecast import READ_RATE, Speeds, forecast_seconds

MIN_MINUTES, MAX_MINUTES = 15, 7 * 60  # limits of a job: the token of a sign-in lasts for eight hours
MACHINE_SECONDS = 300.0  # until a machine is ready and has installed the packages
MARGIN = 2.0  # factor for errors of a forecast
# The speeds of the slowest hardware on offer: a CPU with two cores, and a GPU, on which students and spectra are
# assumed not to be faster.
CPU_SPEEDS = Speeds(products=3e10, small_products=1e10, students=2e5, spectra=8e8, reads=READ_RATE)
GPU_SPEEDS = replace(CPU_SPEEDS, products=8e12, small_products=3e13)
DOWNLOAD_RATE = 1e8  # bytes in a second, inside the Hub


def guess_minutes(plan: Plan, inspection: Inspection, hardware: Hardware) -> int:
    """Return twice the forecast time of a run on the slowest GPU, or the slowest CPU, on offer."""
    room = FILLED * hardware.memory_bytes or math.inf
    speeds = replace(GPU_SPEEDS if hardware.gpu else CPU_SPEEDS, room=room)
    dtype = "float32" if plan.dtype == "auto" and not hardware.gpu else plan.dtype
    placed = replace(plan, device="cuda" if hardware.gpu else "cpu", dtype=dtype)
    seconds = MACHINE_SECONDS + inspection.weight_bytes / DOWNLOAD_RATE + forecast_seconds(placed, inspection, speeds)
    return min(MAX_MINUTES, max(MIN_MINUTES, round(MARGIN * seconds / 60)))
