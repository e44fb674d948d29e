"""An environment that holds torch, transformers and what they require, and nothing else: what an outsider has."""

import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def required(names):
    """The distributions of these names and all that they require here."""
    result: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in result:
            continue
        try:
            result[name] = distribution(name)
        except PackageNotFoundError:
            continue  # required on other platforms only
        waiting += [re.match(r"[\w.-]+", line)[0] for line in result[name].requires or () if "extra ==" not in line]
    return result.values()


def make_bare_environment(folder):
    """Link the packages into a folder that serves as the only place to import from."""
    for package in required(["torch", "transformers"]):
        for name in {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__", "bin"}:
            link = folder / name
            if not link.exists():
                link.symlink_to(package.locate_file(name))
    return folder


def run_bare(environment, program, *arguments, cwd, **known):
    """Run a program there in a process of its own; fail with what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(environment), "HF_HOME": str(cwd / "hub"), "HF_HUB_OFFLINE": "1", **known},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
