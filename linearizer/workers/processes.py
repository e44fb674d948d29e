"""Starts processes of this package: that of a run, and those that help with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def start_process(
    module: str, request: Mapping[str, Any], variables: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Start a process that works on the folder of a request, which only that process can read; it outlives this one."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, request["folder"]],  # the folder is for who reads a list of processes
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # ctrl-C is for this process alone
        env={**environment_to_import(), **(variables or {})},
        **streams,
    )
    with suppress(BrokenPipeError):  # a process that died at once shows as lost
        process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    return process


def environment_to_import() -> dict[str, str]:
    """Let a process import this package, and nothing from the working directory."""
    home, paths = Path(__file__).parents[2], os.environ.get("PYTHONPATH")
    if home.name not in ("site-packages", "dist-packages"):  # which a process searches after the standard library
        paths = os.pathsep.join(filter(None, (str(home), paths)))
    return {**os.environ, "PYTHONPATH": paths or "", "PYTHONSAFEPATH": "1"}
