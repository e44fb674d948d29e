"""Other processes that price some of the heads of a run, one for each further device.

python -m linearizer.workers.helpers FOLDER is such a process. It reads its request from standard input, and writes its
prices into files of the run, whose own process measures what a dead helper has not. It ends when standard input does,
so that it dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from linearizer.errors import LinearizerError
from linearizer.progress import Steps
from linearizer.run.folder import Run
from linearizer.run.stopping import check_stop, memory_explained
from linearizer.teacher.devices import choose_device, device_kind, device_name, visible_name
from linearizer.workers.control import end_process, start_process

Product = TypeVar("Product")
PROCESSES = "LINEARIZER_PROCESSES"  # number of processes that price heads; default: one for each GPU
POLL_SECONDS = 0.1  # between two checks for their end, and for a request to stop


def devices_of(run: Run) -> list[str]:
    """Name the devices that a run works on, its own first: several only if its heads have no prices yet."""
    device, processes = choose_device(run.plan.device), os.environ.get(PROCESSES, "")
    if device not in ("cpu", "cuda"):
        return [device_name(device)]
    count = max(1, int(processes)) if processes.isdigit() else None
    if run.task is not None or run.prices is not None or run.plan.strategy_spec.decided_by != "prices":
        count = 1
    if device == "cpu":  # several processes share it if the user asks for them
        return [device_name(device)] * (count or 1)
    import torch

    return [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())][:count]


def devices_to_hold(run: Run) -> list[str]:
    """Name the devices that a run waits for: those that it works on, or all if only all hold the model."""
    if run.is_encoder_run:
        return [device_name(choose_device(run.encoder_plan.device))]
    plan = run.plan
    if choose_device(plan.device) == "cuda":
        from linearizer.teacher.streaming import rooms_for_weights, spreads

        if spreads(run.inspection, plan.dtype, plan.device):
            return [device_name(device) for device in rooms_for_weights(plan.device)]
    return devices_of(run)


def seen_by(number: int, device: str) -> dict[str, str]:
    """Return the variables by which a process sees only its own device; the run's device is number 0."""
    return {"CUDA_VISIBLE_DEVICES": visible_name(number)} if device_kind(device) == "cuda" else {}


class HelperProcesses:
    """The processes that help with a run (allocate_run.Helpers)."""

    def __init__(self, run: Run, token: str | None = None) -> None:
        self.run, self.token = run, token

    @cached_property
    def devices(self) -> list[str]:
        """The devices of all processes, that of the run's own first."""
        return devices_of(self.run)

    @property
    def count(self) -> int:
        return len(self.devices)

    def beside(self, sinks: int, steps: Steps[Product]) -> Steps[Product]:
        """Let the helpers price their shares while this process takes the steps of its own share."""
        helpers = [self.start(number, sinks) for number in range(1, self.count)]
        try:
            product = yield from steps
            while any(process.poll() is None for process in helpers):
                check_stop(self.run)
                time.sleep(POLL_SECONDS)
            return product
        finally:  # each price that they have measured is saved
            for process in helpers:
                process.kill()
                with suppress(BrokenPipeError), process:
                    pass

    def start(self, number: int, sinks: int) -> subprocess.Popen[str]:
        request = dict(folder=str(self.run.folder), number=number, count=self.count, sinks=sinks, token=self.token)
        variables = seen_by(number, self.devices[number])
        return start_process("linearizer.workers.helpers", request, variables, stdout=subprocess.DEVNULL)


def main() -> int:
    """Price a share of a run's heads; on failure write the reason to standard error."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_run, daemon=True).start()
    from linearizer.method.head_prices import Share
    from linearizer.pipeline import help_with
    from linearizer.progress import quiet

    run, share = Run(Path(request["folder"])), Share(request["number"], request["count"])
    try:
        with quiet(), memory_explained():
            help_with(run, request["sinks"], share, request["token"])
    except LinearizerError as error:
        sys.stderr.write(f"linearizer: helper {share.number} prices nothing more: {error}\n")
        return error.exit_code
    return 0


def end_with_run() -> None:
    """End at once when the process of the run has ended, or was killed."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    end_process(main)
