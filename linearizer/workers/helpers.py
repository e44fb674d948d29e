"""Other processes that price some of the heads of a run, one for each further device.

python -m linearizer.workers.helpers FOLDER is such a process. It loads the teacher at once. Its request and its tasks
come through standard input, a line each, and it answers each task with a line; the prices are in files of the run. It
ends when standard input does, so that it dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError
from linearizer.progress import Steps
from linearizer.run.folder import Run
from linearizer.run.sharing import Helpers, Share
from linearizer.run.stopping import check_stop, memory_explained
from linearizer.teacher.devices import choose_device, device_kind, device_name, visible_name
from linearizer.workers.control import end_process, start_process

Product = TypeVar("Product")
PROCESSES = "LINEARIZER_PROCESSES"  # how many price the heads of a run; else one for each GPU
POLL_SECONDS = 0.1  # between two looks for a request to stop


def devices_of(run: Run) -> list[str]:
    """Name the devices that a run works on, its own first: several only while its heads are to be priced."""
    device, processes = choose_device(run.plan.device), os.environ.get(PROCESSES, "")
    if device not in ("cpu", "cuda"):
        return [device_name(device)]
    count = max(1, int(processes)) if processes.isdigit() else None
    if run.job is not None or run.prices is not None or run.plan.rules.decided_by != "prices":
        count = 1
    if device == "cpu":  # several processes share it if they are asked for
        return [device_name(device)] * (count or 1)
    import torch

    return [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())][:count]


def devices_to_hold(run: Run) -> list[str]:
    """Name the devices that a run waits for: those that it works on, or all if only all hold the model."""
    plan = run.plan
    if choose_device(plan.device) == "cuda":
        from linearizer.teacher.streaming import rooms_for_weights, spreads

        if spreads(run.inspection, plan.dtype, plan.device):
            return [device_name(device) for device in rooms_for_weights(plan.device)]
    return devices_of(run)


def seen_by(number: int, device: str) -> dict[str, str]:
    """Return the variables by which a process sees only its own device; the run's device is number 0."""
    return {"CUDA_VISIBLE_DEVICES": visible_name(number)} if device_kind(device) == "cuda" else {}


class HelperProcesses(Helpers):
    """The processes that help with a run."""

    def __init__(self, run: Run, token: str | None = None) -> None:
        self.run, self.token = run, token
        self.started: list[subprocess.Popen[str]] = []

    @cached_property
    def devices(self) -> list[str]:
        """The devices of all processes, that of the run's own first."""
        return devices_of(self.run)

    @property
    def count(self) -> int:
        """The number of processes, with that of the run itself."""
        return len(self.devices)

    def begin(self) -> None:
        """Start the helpers, unless they are at work."""
        for number in range(len(self.started) + 1, self.count):
            request = {"folder": str(self.run.folder), "number": number, "count": self.count, "token": self.token}
            seen = seen_by(number, self.devices[number])
            self.started.append(start_process("linearizer.workers.helpers", request, seen, stdout=subprocess.PIPE))

    def beside(self, task: str, steps: Steps[Product]) -> Steps[Product]:
        """Let the helpers do their shares of a task while the steps of this process's share are taken."""
        self.begin()
        for process in self.started:
            with suppress(BrokenPipeError):  # it is gone, which its output tells
                process.stdin.write(task + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        product = yield from self.watched(steps)
        for number in range(1, self.count):
            self.wait_for(number)
        return product

    def watched(self, steps: Steps[Product]) -> Steps[Product]:
        """Take steps as long as no helper has died."""
        while True:
            try:
                progress = next(steps)
            except StopIteration as end:
                return end.value
            for number, process in enumerate(self.started, 1):
                if process.poll() is not None:
                    self.wait_for(number)
            yield progress

    def wait_for(self, number: int) -> None:
        """Wait until a helper has done its task."""
        process, answer = self.started[number - 1], {}
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
            check_stop(self.run)
        with suppress(ValueError):  # it died within a line, or before
            answer = json.loads(process.stdout.readline())
        if "done" in answer:
            return
        code = process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        if "error" in answer:
            how = f"cannot go on: {answer['error']}"
        raise FaultError(
            f"the process that helps on {self.devices[number]} {how}: "
            "resume the run, and it goes on from what was saved"
        )

    def close(self) -> None:
        """End the helpers; each price that they have measured is saved."""
        for process in self.started:
            with suppress(BrokenPipeError), process:
                process.kill()
        self.started = []


def main() -> int:
    """Help with a run until there are no more tasks."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the output of libraries is not an answer

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    return help_until_end(answer, **json.loads(sys.stdin.readline()))


def help_until_end(answer: Callable[..., None], folder: str, number: int, count: int, token: str | None) -> int:
    """Do a share of each task, and return an exit code."""
    tasks: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=listen, args=(tasks,), daemon=True).start()
    from linearizer.pipeline import help_with
    from linearizer.quiet import quiet

    try:
        with quiet(), memory_explained():
            for _ in help_with(Run(Path(folder)), iter(tasks.get, None), Share(number, count), token):
                answer(done=True)
    except LinearizerError as error:
        answer(error=str(error))
        return error.exit_code
    return 0


def listen(tasks: queue.Queue[str | None]) -> None:
    """Take tasks in; when there are no more, end at once whatever is at work: the run has ended, or was killed."""
    for line in sys.stdin:
        tasks.put(line.strip())
    os._exit(0)


if __name__ == "__main__":
    end_process(main)
