"""Publish the student of a run as a model of the Hub, or this app as a Space, in one commit, with a preview."""

from __future__ import annotations

import json
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
from linearizer.progress import Progress, Steps
from linearizer.publish import space
from linearizer.publish.card import CitedTeacher, write_card, write_snippet
from linearizer.report.verdict import judge_run
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE as HUB_JOB
from linearizer.run.weight_digests import check_weights, read_digests

CONFIG = "config.json"
MODEL_TYPE = "linearized"  # of every student
APP_FILES = {"app.py", "linearizer/__main__.py"}
REPLACED_SUFFIXES = (".safetensors", ".safetensors.index.json", ".py")


def preview(run: Run | None, repo_id: str, private: bool = True, token: str | None = None) -> Preview:
    """Check that a run's student, or without a run this app, can be published; list what would be sent, send nothing.

    Where nobody is signed in, what would be sent is listed all the same.
    """
    if run is not None:
        check_student(run)
    signed_in, kind = is_signed_in(token), "space" if run is None else "model"
    repo = find_target(repo_id, private, token, kind) if signed_in else name_repository(repo_id, private, kind)
    files = files_to_send(run, repo)
    sizes = tuple((name, size_of(content)) for name, content in sorted(files.items()))
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
    gone = [name for name in repo.files if is_replaced(name, repo) and name not in files]
    title = "Publish Linearizer as a Space" if run is None else "Publish a linearized model"
    revision = yield from upload(repo, files, title, gone, token)
    if run is None:
        return Published(repo.repo_id, revision, repo.url, repo.url)
    check_published_config(run, repo, revision, token)
    done = Published(repo.repo_id, revision, f"{repo.url}/tree/{revision}", write_snippet(repo.repo_id, revision))
    run.log(EventName.PUBLISHED, **asdict(done), private=repo.private)
    return done


def files_to_send(run: Run | None, repo: Repository) -> dict[str, Content]:
    """List the files of a student, or of the app."""
    return space.list_space_files(repo.repo_id) if run is None else model_files(run, repo.repo_id)


def is_replaced(name: str, repo: Repository) -> bool:
    """Whether a file belongs to an earlier push, so that it goes where the new push lacks it."""
    return name.startswith("linearizer/") if repo.kind == "space" else name.endswith(REPLACED_SUFFIXES)


def check_target(repo_id: str, token: str | None = None) -> str:
    """Check before a student is made that it can be published privately; return the repository's full name."""
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
    """Whether a repository holds an earlier student."""
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
    return {**files, **files_on_hub(run), "README.md": write_card(run, repo_id).encode()}


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
