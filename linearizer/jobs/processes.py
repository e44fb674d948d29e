"""Start the processes of runs and of their helpers, each a fork of a process that has imported what runs need.

The imports take seconds of processor time: the first run of a page or program waits for them, all others begin at once.
`worker.main` is the process that forks. For each new process it is sent the open files: a pipe with the request, the
files that the request is about, and the file for standard error. It ends with the process that began it; runs outlive
both. A run that was forked keeps a fork of itself, made before any work, and its helpers are forked from that. Only on
Linux can a process fork safely once libraries are loaded: elsewhere each process imports for itself.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

CAN_FORK = sys.platform == "linux"
# Whether there are GPUs is asked without beginning to use them, which would leave none to processes that are forked.
COUNT_ONLY = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
OWN_PREFIX = "LINEARIZER_"  # how the environment's variables begin that this package reads: a request brings them


class ForkingProcess:
    """The process that forks, as its parent sees it; it has the environment and working directory of when it began."""

    def __init__(self, connection: socket.socket) -> None:
        self.inherited, self.connection = inherited(), connection

    @staticmethod
    def begun(log: int) -> ForkingProcess:
        """Begin one that imports what runs need."""
        connection, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "linearizer.jobs.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,  # what ends it while it imports is told by the run that it was begun for
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**environment_to_import(), **COUNT_ONLY},
                )
        except BaseException:
            connection.close()
            raise
        threading.Thread(target=process.wait, daemon=True).start()  # leave no zombie
        return ForkingProcess(connection)

    def send(self, files: Sequence[int]) -> None:
        """Send the open files of a process that is to be forked."""
        socket.send_fds(self.connection, [b"."], files)


_current: ForkingProcess | None = None
_changing = threading.Lock()  # _current


def start_process(
    request: Mapping[str, Any], files: Sequence[int], log: int, variables: Mapping[str, str] | None = None
) -> IO[str]:
    """Start a process with some open files; give the pipe that its request went through, which no other can read.

    The process gets the variables that this package reads, and the variables that are given.
    """
    read, write = os.pipe()
    try:
        send_files([read, *files, log], log)
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    pipe = os.fdopen(write, "w")
    with suppress(BrokenPipeError):  # a process that died at once shows as lost
        pipe.write(json.dumps({**request, "environment": {**own_environment(), **(variables or {})}}) + "\n")
        pipe.flush()
    return pipe


def send_files(files: Sequence[int], log: int) -> None:
    """Send files to the process that forks, which is begun where there is none, or none that inherits the same."""
    global _current
    with _changing:
        if _current is not None and _current.inherited == inherited():
            with suppress(BrokenPipeError, ConnectionResetError):  # it was killed
                return _current.send(files)
        end()
        _current = ForkingProcess.begun(log)
        _current.send(files)
        if not CAN_FORK:
            end()


def fork_from(connection: socket.socket) -> None:
    """Let the processes that this one starts be forked by the process at the other end of a connection."""
    global _current
    _current = ForkingProcess(connection)


@atexit.register
def end() -> None:
    """Let the process that forks end once it has forked what was sent."""
    global _current
    if _current is not None:
        _current.connection.close()
        _current = None


def inherited() -> tuple[dict[str, str], str, str]:
    """Give what a process inherits that libraries may read when they are imported, and what it runs."""
    kept = {
        name: value for name, value in environment_to_import().items() if not name.startswith((OWN_PREFIX, "PYTEST_"))
    }
    return kept, os.getcwd(), sys.executable


def own_environment() -> dict[str, str]:
    """Give the variables that this package reads."""
    return {name: value for name, value in os.environ.items() if name.startswith(OWN_PREFIX)}


def replace_own_environment(values: Mapping[str, str]) -> None:
    """Replace the variables that this package reads by others."""
    for name in own_environment():
        del os.environ[name]
    os.environ.update(values)


def environment_to_import() -> dict[str, str]:
    """Let a process import this package, and nothing from the working directory."""
    home, paths = Path(__file__).parents[2], os.environ.get("PYTHONPATH")
    if home.name not in ("site-packages", "dist-packages"):  # which a process searches after the standard library
        paths = os.pathsep.join(filter(None, (str(home), paths)))
    return {**os.environ, "PYTHONPATH": paths or "", "PYTHONSAFEPATH": "1"}
