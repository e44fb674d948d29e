"""What a copy of this project holds and needs elsewhere: folders of the package, and packages that a job installs."""

from __future__ import annotations

import re
from importlib.metadata import version

from linearizer.run.files import project_folder

CARRIED_FOLDERS = ("project", "assets")  # in an installed package; in a checkout they are next to it
OF_THE_PAGE = ("gradio", "fastapi", "httptools", "uvicorn", "uvloop")  # no run needs them


def job_requirements(*extra: str) -> list[str]:
    """List what a job of the Hub installs: the versions installed here, so that all jobs of a run compute the same."""
    lines = (project_folder() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [name for name in map(package_name, lines) if name and name not in (*OF_THE_PAGE, "triton")]
    return [f"{name}=={version(name).partition('+')[0]}" for name in (*names, *extra)]


def package_name(line: str) -> str:
    """Return the name of a package at the beginning of a requirement; empty if there is none."""
    return re.match(r"[\w-]*", line)[0]  # type: ignore[index]
