"""This app as a Space: the files it needs, and the front matter that tells the Hub how to run it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from linearizer.errors import RequestError
from linearizer.publish.upload import Content

PACKAGE = Path(__file__).parents[1]
WRITTEN = ("README.md", "requirements.txt")  # fitted to a Space
TOP = ("app.py", "LICENSE", "pyproject.toml", *WRITTEN)
CARRIED = ("project", "assets")  # where an installed package carries what lies beside it in a checkout
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
    """List what a Space needs, as a checkout has it; an installed package carries all of it but the pictures."""
    project, assets = (carried(name) for name in CARRIED)
    missing = [str(path) for path in (*(project / name for name in TOP), assets / "demo-model") if not path.exists()]
    if missing:
        raise RequestError(
            f"{missing[0]!r} is missing, which a Space needs: install the package again, or run "
            f"`python -m linearizer push --space {repo_id}` in a checkout of the project"
        )
    found: dict[str, Content] = {name: project / name for name in TOP}
    for folder, place in (("linearizer", PACKAGE), ("assets", assets)):
        for path in sorted(place.rglob("*")):
            name = path.relative_to(place)
            inside = place == PACKAGE and name.parts[0] in CARRIED
            if path.is_file() and not path.is_symlink() and not inside and not hidden(name):
                found[f"{folder}/{name.as_posix()}"] = path
    readme, lines = ((project / name).read_text(encoding="utf-8") for name in WRITTEN)
    written = (front_matter() + without_pictures(readme, found), requirements(lines))
    return {**found, **{name: text.encode() for name, text in zip(WRITTEN, written, strict=True)}}


def carried(name: str) -> Path:
    """Find a part of the project: inside the package where it was installed, beside it in a checkout."""
    if (PACKAGE / name).is_dir():
        return PACKAGE / name
    return PACKAGE.parent if name == "project" else PACKAGE.parent / name


def without_pictures(readme: str, found: Mapping[str, Content]) -> str:
    """Leave out the pictures that are not there."""
    return re.sub(r"!\[[^\]]*\]\(([^)]*)\)\n", lambda one: one[0] if one[1] in found else "", readme)


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
