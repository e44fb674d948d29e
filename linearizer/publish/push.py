"""Publish the student of a run as a model on the Hub, or this app as a Space, in one commit, after a preview."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

from huggingface_hub import SpaceCardData

from linearizer.encoders.denoiser import PIPELINE
from linearizer.encoders.encoder_report import judge_any_run
from linearizer.encoders.sentence_files import FILES as SENTENCES
from linearizer.errors import FaultError, RequestError
from linearizer.hub.models import access_token
from linearizer.hub.repository import (
    Content,
    Preview,
    Published,
    Repository,
    fetch_file,
    find_repository,
    name_repository,
    refuse_other_content,
    unchecked_note,
    upload,
)
from linearizer.progress import Progress, Steps
from linearizer.publish.card import card_of
from linearizer.publish.packages import CARRIED_FOLDERS, package_name
from linearizer.run.events import EventName
from linearizer.run.files import PACKAGE, find_carried, project_folder
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE as HUB_JOB
from linearizer.run.weight_digests import PROCESSOR, TOKENIZER, check_weights

CONFIG = "config.json"
MODEL_TYPES = ("linearized", "linearized_encoder")  # of all students
APP_FILES = {"app.py", "linearizer/__main__.py"}
REPLACED = (  # files of an earlier student that another might load
    "*.safetensors", "*.safetensors.index.json", "*.py", "generation_config.json", *TOKENIZER, *PROCESSOR, *SENTENCES
)  # fmt: skip
FITTED_FILES = ("README.md", "requirements.txt")  # rewritten for a Space
TOP_FILES = ("app.py", "LICENSE", "pyproject.toml", *FITTED_FILES)
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


def preview(run: Run | None, repo_id: str, private: bool = True, token: str | None = None) -> Preview:
    """Check that a run's student, or without a run this app, can be published; list what would be sent, send nothing.

    The list needs no account.
    """
    if run is not None:
        check_student(run)
    signed_in, kind = bool(access_token(token)), "space" if run is None else "model"
    repo = find_target(repo_id, private, token, kind) if signed_in else name_repository(repo_id, private, kind)
    files = files_to_send(run, repo)
    sizes = tuple(
        (name, len(content) if isinstance(content, bytes) else content.stat().st_size)
        for name, content in sorted(files.items())
    )
    card = files["README.md"]
    assert isinstance(card, bytes)
    notes = (*(() if run is None else list_notes(run, repo)), *((unchecked_note(),) * (not signed_in)))
    total = sum(size for _, size in sizes)
    return Preview(repo.repo_id, repo.private, card.decode(), sizes, total, notes, signed_in)


def publish(run: Run | None, repo_id: str, *, private: bool = True, token: str | None = None) -> Steps[Published]:
    """Publish the student of a run, or without a run this app as a Space.

    Calling it again after an interruption sends only what is missing.
    """
    yield Progress("publish", 0, 1, "checks")
    if run is not None:
        check_student(run)
    repo = find_target(repo_id, private, token, "space" if run is None else "model")
    files = files_to_send(run, repo)
    earlier = repo.files - files.keys()
    replaced = ("linearizer/*",) if run is None else REPLACED
    removed = [name for name in earlier if any(fnmatchcase(name, pattern) for pattern in replaced)]
    title = "Publish Linearizer as a Space" if run is None else "Publish a linearized model"
    revision = yield from upload(repo, files, title, removed, token)
    if run is None:
        return Published(repo.repo_id, revision, repo.url, repo.url)
    check_published_config(run, repo, revision, token)
    snippet = card_of(run).write_snippet(repo.repo_id, revision)
    done = Published(repo.repo_id, revision, f"{repo.url}/tree/{revision}", snippet)
    run.log(EventName.PUBLISHED, **asdict(done), private=repo.private)
    return done


def files_to_send(run: Run | None, repo: Repository) -> dict[str, Content]:
    """List the files of a student: the checkpoint with its card; or those of the app."""
    if run is None:
        return list_space_files(repo.repo_id)
    files: dict[str, Content] = {}
    for path in sorted(run.checkpoint.rglob("*")):  # skips hidden files and symbolic links
        name = path.relative_to(run.checkpoint)
        if path.is_file() and not path.is_symlink() and not any(part.startswith((".", "__")) for part in name.parts):
            files[name.as_posix()] = path
    return {**files, "README.md": card_of(run).write(repo.repo_id).encode()}


def check_student(run: Run) -> None:
    """Refuse a run that has no student to publish."""
    run.require_student()
    if (run.checkpoint / PIPELINE).is_file():
        raise RequestError(f"push cannot publish a pipeline: upload {str(run.checkpoint)!r} with `hf upload`")
    if run.has_file(HUB_JOB):
        from linearizer.method.checkpoint import link_missing_weights

        link_missing_weights(run)
    check_weights(run)


def find_target(repo_id: str, private: bool, token: str | None, kind: str = "model") -> Repository:
    """Find the repository: a new one, or one that holds an earlier student, or as a Space an earlier app."""
    repo = find_repository(repo_id, private, token, kind=kind)
    is_ours = APP_FILES <= repo.files if kind == "space" else holds_student(repo, token)
    if not repo.fresh and not is_ours:
        refuse_other_content(repo)
    return repo


def holds_student(repo: Repository, token: str | None) -> bool:
    """Whether a repository holds an earlier student."""
    if CONFIG not in repo.files or repo.head is None:
        return False
    try:
        config = json.loads(fetch_file(repo, CONFIG, repo.head, token).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("model_type") in MODEL_TYPES


def list_warnings(run: Run) -> tuple[str, ...]:
    """List the reasons against publishing a student: the verdict on it, if that is bad."""
    verdict = judge_any_run(run)
    return () if verdict is None or verdict.kind != "bad" else (verdict.sentence,)


def list_notes(run: Run, repo: Repository) -> tuple[str, ...]:
    """List what a user should know before publishing a student, the warnings first."""
    teacher = card_of(run).teacher
    notes = [*list_warnings(run)]
    if repo.head is not None and not repo.fresh:
        notes.append(f"{repo.repo_id} holds an earlier student: it stays in the history, at revision {repo.head}")
    if not repo.private:
        notes.append("everyone will see it")
    if teacher.gated:
        notes.append(f"{teacher.name} is gated: check that its licence lets you share models made from it")
    if not teacher.terms.get("license"):
        notes.append(f"{teacher.name} states no licence: ask its author before you share models made from it")
    if teacher.repo_id is None and teacher.name != "demo":  # which comes with every Linearizer
        notes.append(f"{teacher.name} is a local folder, so nobody else can reproduce this student")
    return tuple(notes)


def check_published_config(run: Run, repo: Repository, revision: str, token: str | None) -> None:
    """Check that the published config, as users will load it, is the run's."""
    if fetch_file(repo, CONFIG, revision, token).read_bytes() != (run.checkpoint / CONFIG).read_bytes():
        raise FaultError(f"{repo.repo_id!r} at {revision} has another config than the run: publish again")


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
