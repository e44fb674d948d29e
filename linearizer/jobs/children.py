"""Other processes of a run, one for each further device, that work on some of its layers.

python -m linearizer.jobs.children RUN NUMBER COUNT is such a process. It reads the token and then its tasks from
standard input, a line each, and writes its progress to standard output, as JSON; what it computes is in files of the
run. It ends when its standard input does, so that it dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError
from linearizer.jobs.processes import environment
from linearizer.model.devices import choose_device, device_name
from linearizer.progress import Progress, Steps
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.sharing import HELPED, Share

Product = TypeVar("Product")
PROCESSES = "LINEARIZER_PROCESSES"  # how many work on the layers of a run; else one for each GPU
POLL_SECONDS = 0.2  # between two looks at what the children write
END_SECONDS = 10.0  # that a child may take to save what it has
ERROR = "error"  # the step of the progress that says why a child ends


def devices_of(plan: Plan) -> list[str]:
    """Name the devices that the processes of a run work on, the run's own first."""
    device, asked = choose_device(plan.device), os.environ.get(PROCESSES, "")
    count = max(1, int(asked)) if asked.isdigit() else None
    if device != "cuda":  # a single device, which several processes may share if they are asked for
        return [device_name(device)] * (count if count and device == "cpu" else 1)
    import torch

    return [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())][:count]


class Children:
    """The processes that help with a run, which start with the first task."""

    def __init__(self, run: Run, token: str | None = None) -> None:
        self.run, self.token = run, token
        self.started: list[Child] = []

    @property
    def count(self) -> int:
        """The number of processes, with that of the run itself."""
        return len(devices_of(self.run.plan))

    def beside(self, task: str, steps: Steps[Product]) -> Steps[Product]:
        """Let the children do their shares of a task while the steps of this process's share are taken."""
        if self.count == 1:
            return (yield from steps)
        self.start()
        for child in self.started:
            child.hand_over(task)
        newest: list[Progress | None] = [None] * (1 + len(self.started))
        try:
            while True:
                try:
                    newest[0] = next(steps)
                except StopIteration as end:
                    product = end.value
                    break
                self.look(newest)
                yield together(newest)
            while any(child.busy for child in self.started):
                time.sleep(POLL_SECONDS)
                self.look(newest)
                if any(newest):
                    yield together(newest)
        except BaseException:
            steps.close()
            self.close()
            raise
        return product

    def start(self) -> None:
        """Start the children, unless they are at work."""
        if not self.started:
            devices = devices_of(self.run.plan)
            for number, device in enumerate(devices[1:], 1):
                self.started.append(Child(self.run, Share(number, len(devices)), device, self.token))

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
        self.device, self.busy = device, False
        words = [str(run.folder), str(share.number), str(share.count)]
        kind, _, index = device.partition(":")
        visible = {"CUDA_VISIBLE_DEVICES": index} if kind == "cuda" else {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "linearizer.jobs.children", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ctrl-C reaches the run's own process, which ends this one
            env={**environment(), **visible},
        )
        self.written: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.say(token or "")

    def read(self) -> None:
        """Read what the process writes (in a thread)."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.written.put(json.loads(line))
        self.written.put(None)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it is gone, which its output tells
            pass

    def hand_over(self, task: str) -> None:
        """Give the process something to do."""
        self.busy = True
        self.say(task)

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
                self.busy = False
            else:
                yield progress

    def describe_end(self) -> str:
        """Say how the process died."""
        code = self.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the process that helps on {self.device} {how}: resume the run, and it goes on from what was saved"

    def let_end(self) -> None:
        """Let the process end where it can save what it has."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        """Wait until the process has ended and its output is read, but not for long."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()


def together(newest: Sequence[Progress | None]) -> Progress:
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


def main(arguments: Sequence[str]) -> int:
    """Help with a run until standard input ends."""
    folder, number, count = arguments
    token = sys.stdin.readline().strip() or None
    tasks: queue.Queue[str | None] = queue.Queue()
    over = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            tasks.put(line.strip())
        over.set()
        tasks.put(None)
        time.sleep(END_SECONDS)
        os._exit(1)  # it is at something that takes long

    threading.Thread(target=listen, daemon=True).start()
    from linearizer.model.quiet import quiet
    from linearizer.pipeline import help_with  # once the token was read, which waits in the pipe

    steps = help_with(Run(Path(folder)), iter(tasks.get, None), Share(int(number), int(count)), token)
    try:
        with quiet():
            for progress in steps:
                report(progress)
                if over.is_set():
                    steps.close()
                    break
    except LinearizerError as error:
        report(Progress(ERROR, 0, 0, str(error)))
        return error.exit_code
    return 0


def report(progress: Progress) -> None:
    """Write progress as a line of standard output."""
    content = {**vars(progress), "details": dict(progress.details)}
    print(json.dumps(content), flush=True)  # noqa: T201


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
