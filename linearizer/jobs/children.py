"""Other processes of a run, one for each further device, that work on some of its layers.

They are forked as the processes of runs are. Such a process loads the teacher at once, and reads its tasks from the
pipe that its request came through, a line each; it writes its progress to another pipe, as JSON. Most of what it
computes is in files of the run. It ends when its tasks do, so that it dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from linearizer.errors import FaultError, LinearizerError
from linearizer.jobs.processes import CAN_FORK, start_process
from linearizer.model.devices import choose_device, device_kind, device_name, visible_name
from linearizer.progress import Progress, Steps
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.sharing import HELPED, Helpers, Share

Product = TypeVar("Product")
PROCESSES = "LINEARIZER_PROCESSES"  # how many work on the layers of a run; else one for each GPU
POLL_SECONDS = 0.05  # between two looks at what the children write
END_SECONDS = 10.0  # that a child may take to save what it has
ERROR = "error"  # the step of the progress that says why a child ends
STANDARD_ERROR = 2


def devices_of(plan: Plan) -> list[str]:
    """Name the devices that the processes of a run work on, the run's own first."""
    device, asked = choose_device(plan.device), os.environ.get(PROCESSES, "")
    count = max(1, int(asked)) if asked.isdigit() else None
    if device != "cuda":  # a single device, which several processes may share if they are asked for
        return [device_name(device)] * (count if count and device == "cpu" else 1)
    import torch

    return [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())][:count]


def devices_to_hold(run: Run) -> list[str]:
    """Name the devices that a run waits for; an evaluation has the first alone, unless only all hold the model."""
    plan = run.plan
    if choose_device(plan.device) == "cuda":
        from linearizer.model.streaming import rooms_for_weights, spreads

        if spreads(run.inspection, plan.dtype, plan.device):
            return [device_name(device) for device in rooms_for_weights(plan.device)]
    return devices_of(plan) if run.job is None else devices_of(plan)[:1]


def may_have_helpers(plan: Plan) -> bool:
    """Tell whether a run may have several devices, without a look at them: that would begin CUDA in this process."""
    if asked := os.environ.get(PROCESSES, ""):
        return asked not in ("0", "1")
    if plan.device == "cpu":
        return False
    import torch

    return torch.backends.cuda.is_built()


def seen_by(number: int, device: str) -> dict[str, str]:
    """Give the variables by which a process sees its own device alone, the run's device being number 0."""
    return {"CUDA_VISIBLE_DEVICES": visible_name(number)} if device_kind(device) == "cuda" else {}


class Children(Helpers):
    """The processes that help with a run."""

    def __init__(self, run: Run, token: str | None = None) -> None:
        self.run, self.token = run, token
        self.started: list[Child] = []

    @property
    def count(self) -> int:
        """The number of processes, with that of the run itself."""
        return len(devices_of(self.run.plan))

    def begin(self) -> None:
        """Start the children, unless they are at work."""
        devices = devices_of(self.run.plan)
        for number in range(len(self.started) + 1, len(devices)):
            self.started.append(Child(self.run, Share(number, len(devices)), devices[number], self.token))

    def prepare(self, task: str) -> None:
        """Let the children prepare for a task that is to come."""
        self.begin()
        for child in self.started:
            child.hand_over(task)

    def beside(self, task: str, steps: Steps[Product]) -> Steps[tuple[Product, list[Any]]]:
        """Let the children do their shares of a task while the steps of this process's share are taken."""
        self.prepare(task)
        if not self.started:
            return (yield from steps), []
        newest: list[Progress | None] = [None] * (1 + len(self.started))
        try:
            while True:
                try:
                    newest[0] = next(steps)
                except StopIteration as end:
                    product = end.value
                    break
                self.look(newest)
                yield join_progress(newest)
            while any(child.tasks for child in self.started):
                time.sleep(POLL_SECONDS)
                self.look(newest)
                if any(newest):
                    yield join_progress(newest)
        except BaseException:
            steps.close()
            self.close()
            raise
        return product, [child.product for child in self.started]

    def look(self, newest: list[Progress | None]) -> None:
        """Take in how far the children have come."""
        for place, child in enumerate(self.started, 1):
            for progress in child.reports():
                newest[place] = progress

    def close(self) -> None:
        """End the children, which save what they have."""
        for child in self.started:
            child.let_end()
        for child in self.started:
            child.end()
        self.started = []


class Child:
    """One process that helps with a run."""

    def __init__(self, run: Run, share: Share, device: str, token: str | None) -> None:
        self.device, self.product = device, object()  # of the task that it did last
        self.tasks = 0  # that it has not done yet
        self.pid: int | None = None  # as soon as it says so
        self.status: int | None = None  # that it ended with
        request = {"folder": str(run.folder), "number": share.number, "count": share.count, "token": token}
        answers, theirs = os.pipe()
        try:
            self.handed = start_process(request, [theirs], STANDARD_ERROR, seen_by(share.number, device))
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        self.written: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self.reader = threading.Thread(target=self.read, args=(answers,), daemon=True)
        self.reader.start()

    def read(self, answers: int) -> None:
        """Read what the process writes (in a thread)."""
        with open(answers) as lines:
            for line in lines:
                with suppress(ValueError):  # it died within a line
                    content = json.loads(line)
                    self.pid, self.status = content.pop("pid", self.pid), content.pop("status", self.status)
                    if content:
                        self.written.put(content)
        self.written.put(None)

    def hand_over(self, task: str) -> None:
        """Give the process something to do."""
        self.tasks += 1
        with suppress(BrokenPipeError):  # it is gone, which its output tells
            self.handed.write(task + "\n")
            self.handed.flush()

    def reports(self) -> Iterator[Progress]:
        """Give the progress since the last look."""
        while not self.written.empty():
            content = self.written.get()
            if content is None:
                raise FaultError(self.describe_end())
            progress = Progress(**content)
            if progress.step == ERROR:
                raise FaultError(f"the process that helps on {self.device} cannot go on: {progress.unit}")
            if progress.step == HELPED:
                self.tasks -= 1
                self.product = progress.details["product"]
            else:
                yield progress

    def describe_end(self) -> str:
        """Say how the process died."""
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        how = "has ended" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the process that helps on {self.device} {how}: resume the run, and it goes on from what was saved"

    def let_end(self) -> None:
        """Let the process end where it can save what it has."""
        with suppress(BrokenPipeError):
            self.handed.close()

    def end(self) -> None:
        """Wait until the process has ended and its output is read, but not for long."""
        self.reader.join(END_SECONDS + 1)
        if self.reader.is_alive() and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reader.join()


def join_progress(newest: Sequence[Progress | None]) -> Progress:
    """Put the progress of several processes on one task together."""
    known = [progress for progress in newest if progress is not None]
    alike = [progress for progress in known if (progress.step, progress.unit) == (known[0].step, known[0].unit)]
    done, total = ([getattr(progress, name) for progress in alike] for name in ("done", "total"))
    layers = [progress.details["layers"] for progress in alike if "layers" in progress.details]
    details = dict(known[0].details)
    if layers:
        details["layers"] = {str(index): loss for own in layers for index, loss in own.items()}  # type: ignore[attr-defined]
    if known[0].unit == "prices":  # each counts its own
        return replace(known[0], done=sum(done), total=sum(total), details=details)
    return replace(known[0], done=min(done), total=max(total), details=details)


def help_watched(tasks: IO[str], answers: int, **details: Any) -> int:
    """Help with a run, in a process that is watched by this one: that says how it ended, whatever ended it."""
    pid = os.fork() if CAN_FORK else 0
    with os.fdopen(answers, "w") as written:
        if not pid:
            return help_until_end(tasks, written, **details)
        tasks.close()
        _, status = os.waitpid(pid, 0)
        written.write(f"\n{json.dumps({'status': status})}\n")
    return 0


def help_until_end(tasks: IO[str], written: IO[str], folder: str, number: int, count: int, token: str | None) -> int:
    """Help with a run until there are no more tasks."""
    handed: queue.Queue[str | None] = queue.Queue()
    over = threading.Event()

    def write(content: Mapping[str, Any]) -> None:
        written.write(json.dumps(content) + "\n")
        written.flush()

    def listen() -> None:
        for line in tasks:
            handed.put(line.strip())
        over.set()
        if handed.unfinished_tasks:
            handed.put(None)
            time.sleep(END_SECONDS)  # it may save what it has, unless it is at something that takes long
        os._exit(0)

    write({"pid": os.getpid()})
    threading.Thread(target=listen, daemon=True).start()
    from linearizer.model.quiet import quiet
    from linearizer.pipeline import help_with

    with suppress(OSError):  # other systems than Linux have none
        Path("/proc/self/comm").write_text(f"help {Path(folder).name}")  # its name in a list of processes
    steps = help_with(Run(Path(folder)), iter(handed.get, None), Share(number, count), token)
    try:
        with quiet():
            for progress in steps:
                write({**vars(progress), "details": dict(progress.details)})
                if progress.step == HELPED:
                    handed.task_done()
                if over.is_set():
                    steps.close()
                    break
    except LinearizerError as error:
        write(vars(Progress(ERROR, 0, 0, str(error))))
        return error.exit_code
    return 0
