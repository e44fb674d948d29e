"""Publish the student of a run as a model of the Hub, or this app as a Space, in one commit, with a preview."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from linearizer.amounts import size
from linearizer.errors import FaultError, RequestError
from linearizer.hub.repository import (
    Preview,
    Published,
    Repository,
    fetch_file,
    find_repository,
    is_signed_in,
    name_repository,
    refuse_other_content,
    unchecked_note,
)
from linearizer.hub.upload import Content, HubFile, size_of, upload
from linearizer.hub.weight_files import teacher_files
from linearizer.plan.json_products import parse_object
from linearizer.progress import Progress, Steps
from linearizer.publish import space
from linearizer.publish.card import card_files, write_snippet
from linearizer.publish.card_metadata import CitedTeacher
from linearizer.report.verdict import judge_run
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE as HUB_JOB
from linearizer.run.weight_digests import OF_THIS_MACHINE, check_weights, read_digests

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
MODEL_TYPE = "linearized"  # of every student
APP_FILES = {"app.py", "linearizer/__main__.py"}
REPLACED_SUFFIXES = (".safetensors", ".safetensors.index.json", ".py")  # of an earlier push, if the new one lacks them


def preview(run: Run, repo_id: str, private: bool = True, token: str | None = None) -> Preview:
    """Check that a run can be published, and list what would be sent; send nothing.

    Where nobody is signed in, what would be sent is listed all the same.
    """
    check_student(run)
    repo = find_target(repo_id, private, token) if is_signed_in(token) else name_repository(repo_id, private)
    return build_preview(repo, model_files(run, repo.repo_id), list_notes(run, repo), is_signed_in(token))


def publish(run: Run, repo_id: str, *, private: bool = True, token: str | None = None) -> Steps[Published]:
    """Publish the student of a run. Calling it again after an interruption sends only what is missing."""
    yield Progress("publish", 0, 1, "checks")
    check_student(run)
    repo = find_target(repo_id, private, token)
    files = model_files(run, repo.repo_id)
    obsolete = [name for name in repo.files if name.endswith(REPLACED_SUFFIXES) and name not in files]
    revision = yield from upload(repo, files, "Publish a linearized model", obsolete, token)
    check_published_config(run, repo, revision, token)
    done = Published(repo.repo_id, revision, f"{repo.url}/tree/{revision}", write_snippet(repo.repo_id, revision))
    run.log(EventName.PUBLISHED, **asdict(done), private=repo.private)
    return done


def preview_space(repo_id: str, private: bool = True, token: str | None = None) -> Preview:
    """Check that this app can be published, and list what would be sent; send nothing."""
    named = repo_id, private
    repo = find_target(*named, token, "space") if is_signed_in(token) else name_repository(*named, "space")
    return build_preview(repo, space.list_space_files(repo.repo_id), (), is_signed_in(token))


def publish_space(repo_id: str, *, private: bool = True, token: str | None = None) -> Steps[Published]:
    """Publish this app as a Space."""
    yield Progress("publish", 0, 1, "checks")
    repo = find_target(repo_id, private, token, "space")
    files = space.list_space_files(repo.repo_id)
    obsolete = [name for name in repo.files if name.startswith("linearizer/") and name not in files]
    revision = yield from upload(repo, files, "Publish Linearizer as a Space", obsolete, token)
    return Published(repo.repo_id, revision, repo.url, repo.url)


def check_target(repo_id: str, token: str | None = None) -> str:
    """Check before a student is made that it can be published there, privately, and give the repository's full name."""
    return find_target(repo_id, True, token).repo_id


def check_student(run: Run) -> None:
    """Refuse a run that has no student to publish."""
    if not (run.checkpoint / CONFIG).is_file() or run.allocation is None:
        raise RequestError(f"{str(run.folder)!r} has no student yet: `linearizer run --resume` makes it")
    if run.has_file(HUB_JOB):
        from linearizer.method.checkpoint import link_missing_weights

        link_missing_weights(run)
    check_weights(run, but=files_on_hub(run))  # these are compared with the Hub's


def find_target(repo_id: str, private: bool, token: str | None, kind: str = "model") -> Repository:
    """Find the repository: a new one, or one that holds an earlier student, or as a Space an earlier app."""
    repo = find_repository(repo_id, private, token, kind=kind)
    held = APP_FILES <= repo.files if kind == "space" else holds_student(repo, token)
    if not repo.fresh and not held:
        refuse_other_content(repo)
    return repo


def holds_student(repo: Repository, token: str | None) -> bool:
    """Tell whether a repository holds an earlier student."""
    if CONFIG not in repo.files or repo.head is None:
        return False
    try:
        config = json.loads(fetch_file(repo, CONFIG, repo.head, token).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def model_files(run: Run, repo_id: str) -> dict[str, Content]:
    """List the files to publish: the checkpoint with its card, without hidden files and symbolic links."""
    files: dict[str, Content] = {}
    for path in sorted(run.checkpoint.rglob("*")):
        name = path.relative_to(run.checkpoint)
        if path.is_file() and not path.is_symlink() and not any(part.startswith((".", "__")) for part in name.parts):
            files[name.as_posix()] = path
    if TOKENIZER_CONFIG in files:
        files[TOKENIZER_CONFIG] = portable_settings(run)
    return {**files, **files_on_hub(run), **card_files(run, repo_id)}


def portable_settings(run: Run) -> Content:
    """Leave out of a tokenizer's settings where it was read from, which earlier versions wrote there."""
    settings = run.checkpoint / TOKENIZER_CONFIG
    content = run.parse_file(f"{run.checkpoint.name}/{TOKENIZER_CONFIG}", parse_object)
    kept = {name: value for name, value in content.items() if name not in OF_THIS_MACHINE}
    return settings if kept == content else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def files_on_hub(run: Run) -> dict[str, HubFile]:
    """List the weight files of a checkpoint that a teacher on the Hub holds, too."""
    teacher, digests = CitedTeacher.of(run), read_digests(run)
    if teacher.repo_id is None or teacher.revision is None:
        return {}
    return {
        name: HubFile(run.checkpoint / name, digests[name], teacher.repo_id, teacher.revision, original)
        for name, original in teacher_files(run.checkpoint).items()
        if name in digests
    }


def build_preview(repo: Repository, files: Mapping[str, Content], notes: tuple[str, ...], signed_in: bool) -> Preview:
    """Describe the files that would be sent."""
    sizes = tuple((name, size_of(content)) for name, content in sorted(files.items()))
    card = files["README.md"]
    assert isinstance(card, bytes)
    notes = notes if signed_in else (*notes, unchecked_note())
    return Preview(repo.repo_id, repo.private, card.decode(), sizes, sum(size for _, size in sizes), notes, signed_in)


def list_warnings(run: Run) -> tuple[str, ...]:
    """List what speaks against publishing a student: the verdict on it, where that is bad."""
    verdict = judge_run(run)
    return () if verdict is None or verdict.kind != "bad" else (verdict.sentence,)


def list_notes(run: Run, repo: Repository) -> tuple[str, ...]:
    """List what a user should know before a student is published, what speaks against it first."""
    teacher = CitedTeacher.of(run)
    notes = [*list_warnings(run)]
    if repo.head is not None and not repo.fresh:
        notes.append(f"{repo.repo_id} holds an earlier student: it stays in the history, at revision {repo.head}")
    if copied := sum(size_of(file) for file in files_on_hub(run).values()):
        notes.append(f"{size(copied)} of it are files of {teacher.name}, which the Hub copies if it can")
    if not repo.private:
        notes.append("everyone will see it")
    if teacher.gated:
        notes.append(f"{teacher.name} is gated: check that its licence lets you share what is made from it")
    if not teacher.terms.get("license"):
        notes.append(f"{teacher.name} states no licence: ask its author before you share what is made from it")
    if teacher.repo_id is None and teacher.name != "demo":  # which comes with every Linearizer
        notes.append(f"{teacher.name} is a local folder, so nobody else can make this again")
    return tuple(notes)


def check_published_config(run: Run, repo: Repository, revision: str, token: str | None) -> None:
    """Load the published config as users will, and compare it with the run's."""
    from linearizer.student.modeling_linearized import LinearizedConfig

    published = LinearizedConfig.from_pretrained(fetch_file(repo, CONFIG, revision, token).parent)
    if published.to_dict() != LinearizedConfig.from_pretrained(run.checkpoint).to_dict():
        raise FaultError(f"{repo.repo_id!r} at {revision} has another config than the run: publish again")
