"""This app as a Space: the files it needs, and the front matter that tells the Hub how to run it."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from huggingface_hub import SpaceCardData

from linearizer.errors import RequestError
from linearizer.hub.repository import Content
from linearizer.run.files import PACKAGE, find_carried, project_folder

FITTED_FILES = ("README.md", "requirements.txt")  # rewritten for a Space
TOP_FILES = ("app.py", "LICENSE", "pyproject.toml", *FITTED_FILES)
CARRIED_FOLDERS = ("project", "assets")  # in an installed package; in a checkout they are next to it
OF_THE_PAGE = ("gradio", "fastapi", "httptools", "uvicorn", "uvloop")  # no run needs them
PREINSTALLED = ("gradio", "triton")  # gradio by the Space's sdk_version, triton by torch
TORCH = "torch>=2.8,<2.12"  # ZeroGPU supports no newer one
FRONT_MATTER: dict[str, Any] = {
    "title": "Linearizer",
    "emoji": "📏",
    "colorFrom": "blue",
    "colorTo": "green",
    "sdk": "gradio",
    "python_version": "3.12",
    "app_file": "app.py",
    "short_description": "Language models with a state of fixed size",
    "license": "apache-2.0",
    "tags": ["linear-attention", "distillation", "long-context"],
    "suggested_hardware": "zero-a10g",
    "startup_duration_timeout": "30m",
    "pinned": False,
    "hf_oauth": True,
    "hf_oauth_scopes": ["contribute-repos", "gated-repos", "jobs"],  # write new repositories; read gated ones
    "hf_oauth_expiration_minutes": 480,
}


def list_space_files(repo_id: str) -> dict[str, Content]:
    """List the files of a Space, from a checkout or from an installed package, which lacks only the pictures."""
    project, assets = project_folder(), find_carried("assets")
    needed = *(project / name for name in TOP_FILES), assets / "demo-model"
    if missing := [str(path) for path in needed if not path.exists()]:
        raise RequestError(
            f"a Space needs {missing[0]!r}, which is missing: install the package again, or run "
            f"`python -m linearizer push --space {repo_id}` in a checkout of the project"
        )
    files: dict[str, Content] = {**{name: project / name for name in TOP_FILES}, **package_files()}
    readme, lines = ((project / name).read_text(encoding="utf-8") for name in FITTED_FILES)
    front_matter = SpaceCardData(**FRONT_MATTER, sdk_version=version("gradio")).to_yaml(line_break="\n")
    readme = re.sub(r"!\[[^\]]*\]\(([^)]*)\)\n", lambda picture: picture[0] if picture[1] in files else "", readme)
    needs = {name: line for line in lines.splitlines() if (name := package_name(line)) and name not in PREINSTALLED}
    fitted = (f"---\n{front_matter}\n---\n{readme}", "\n".join({**needs, "torch": TORCH}.values()) + "\n")
    return {**files, **{name: text.encode() for name, text in zip(FITTED_FILES, fitted, strict=True)}}


def package_files() -> dict[str, Content]:
    """List the files of the package and of its assets by their paths in a checkout."""
    files: dict[str, Content] = {}
    for folder, place in (("linearizer", PACKAGE), ("assets", find_carried("assets"))):
        for path in sorted(place.rglob("*")):
            name = path.relative_to(place)
            inside = place == PACKAGE and name.parts[0] in CARRIED_FOLDERS
            hidden = any(part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in name.parts)
            if path.is_file() and not path.is_symlink() and not inside and not hidden:
                files[f"{folder}/{name.as_posix()}"] = path
    return files


def job_requirements(*extra: str) -> list[str]:
    """List what a job of the Hub installs: the versions installed here, so that all jobs of a run compute the same."""
    lines = (project_folder() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [name for name in map(package_name, lines) if name and name not in (*OF_THE_PAGE, "triton")]
    return [f"{name}=={version(name).partition('+')[0]}" for name in (*names, *extra)]


def package_name(line: str) -> str:
    """Return the name of a package at the beginning of a requirement; empty if there is none."""
    return re.match(r"[\w-]*", line)[0]  # type: ignore[index]
