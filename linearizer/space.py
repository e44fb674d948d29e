"""This app as a Space: the files it needs, and the front matter that tells the Hub how to run it."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

from linearizer.errors import RequestError
from linearizer.uploads import Content

ROOT = Path(__file__).parent.parent
TOP = ("app.py", "LICENSE", "pyproject.toml")
FOLDERS = ("linearizer", "assets")
SPOKEN_FOR = ("gradio", "triton")  # the Hub installs the one by sdk_version, torch brings the other
TORCH = "torch>=2.8,<2.12"  # ZeroGPU has no newer one
MATTER: dict[str, object] = {
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
    "hf_oauth_scopes": ["contribute-repos", "gated-repos"],  # make repositories, touch only these; read gated teachers
    "hf_oauth_expiration_minutes": 480,
}


def files(repo_id: str) -> dict[str, Content]:
    """List what a Space needs, from a checkout of this project."""
    root = ROOT
    missing = [name for name in (*TOP, *FOLDERS, "README.md", "requirements.txt") if not (root / name).exists()]
    if missing:
        raise RequestError(
            f"{str(root)!r} lacks {missing[0]}: a Space is made from a checkout of the project, so run this in one, "
            f"as `python -m linearizer push --space {repo_id}`"
        )
    found: dict[str, Content] = {name: root / name for name in TOP}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and not path.is_symlink() and not hidden(name):
                found[name.as_posix()] = path
    readme = (root / "README.md").read_text(encoding="utf-8")
    lines = (root / "requirements.txt").read_text(encoding="utf-8")
    return {**found, "README.md": (front_matter() + readme).encode(), "requirements.txt": requirements(lines).encode()}


def hidden(name: Path) -> bool:
    """Tell what belongs to a working copy from what belongs to the project."""
    return any(part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in name.parts)


def front_matter() -> str:
    """Write the head of a Space's README; JSON is YAML, too."""
    held = {**MATTER, "sdk_version": version("gradio")}
    return (
        "---\n" + "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in held.items()) + "---\n"
    )


def requirements(lines: str) -> str:
    """Fit the project's requirements to a Space."""
    kept = []
    for line in lines.splitlines():
        name = re.match(r"[\w-]*", line)
        if name is not None and name[0] not in SPOKEN_FOR:
            kept.append(TORCH if name[0] == "torch" else line)
    return "\n".join(kept) + "\n"
