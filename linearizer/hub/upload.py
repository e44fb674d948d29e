"""All network code that writes: files as one commit of a repository of the Hub.

An upload that broke is repeated by the same call: the client asks the Hub which large files it has, and skips them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.utils import get_session, hf_raise_for_status
from huggingface_hub.utils.sha import git_hash

from linearizer.errors import FaultError
from linearizer.hub.errors import HUB_ERRORS, find_cause, is_temporary, name_reason, requested_wait
from linearizer.hub.models import HUB_SECONDS, access_token
from linearizer.hub.repository import KEPT, Info, Repository, explain_publish_errors, list_files, without_bars
from linearizer.progress import Progress, Steps

Product = TypeVar("Product")

LARGE_BYTES = 10**7  # a file of at least this size is uploaded alone, so that progress is shown after it
RETRY_SECONDS = (1, 2, 4, 8, 16)  # pauses before a commit that the Hub could not serve is tried again
MAX_WAIT_SECONDS = 120  # a longer wait that the Hub requests is an error
HEARTBEAT_SECONDS = 1.0  # between two reports of progress during a request

Content = Path | bytes


def upload(
    repo: Repository, files: Mapping[str, Content], message: str, obsolete: Collection[str], token: str | None
) -> Steps[str]:
    """Make a repository hold these files as of one commit, check them by their hashes, and return the revision."""
    sending = Upload(HfApi(token=access_token(token)), repo, message, obsolete)
    with explain_publish_errors(repr(repo.repo_id)):
        check_card(repo, files["README.md"])
        if repo.head is None:
            sdk = "gradio" if repo.kind == "space" else None
            sending.hub.create_repo(repo.repo_id, private=repo.private, repo_type=repo.kind, space_sdk=sdk)
    with explain_publish_errors(repr(repo.repo_id), KEPT), without_bars():
        additions = yield from watch(
            lambda: [CommitOperationAdd(name, content) for name, content in sorted(files.items())],  # computes hashes
            Progress("publish", 0, len(files), "files"),
        )
        return (yield from sending.send(additions))


@dataclass(frozen=True)
class Upload:
    """One commit of a repository."""

    hub: HfApi
    repo: Repository
    message: str
    obsolete: Collection[str]

    def send(self, additions: list[CommitOperationAdd]) -> Steps[str]:
        """Send files, commit them, and check what the Hub then holds."""
        total = yield from self.upload_large(additions)
        at = Progress("publish", total, total, "bytes", {"file": "the commit"})
        yield at
        revision = yield from retry(lambda: self.commit(additions), at)
        at = Progress("publish", 0, len(additions), "files checked")
        info = yield from retry(lambda: self.look(revision), at)
        for path in list_differing(info, additions):
            raise FaultError(
                f"{self.repo.repo_id!r} at {revision} does not hold {path} as it was sent: try again; {KEPT}"
            )
        return revision

    def upload_large(self, additions: list[CommitOperationAdd]) -> Steps[int]:
        """Upload what is too large for a commit, one file after the other; the client retries by itself."""
        total, done = sum(file.upload_info.size for file in additions), 0
        small = [file for file in additions if file.upload_info.size < LARGE_BYTES]
        for group in [small, *([file] for file in additions if file.upload_info.size >= LARGE_BYTES)]:
            at = Progress("publish", done, total, "bytes", {"file": group[-1].path_in_repo} if group else {})
            yield at
            repo_id, kind = self.repo.repo_id, self.repo.kind
            send = partial(self.hub.preupload_lfs_files, repo_id, group, repo_type=kind, free_memory=False)
            yield from watch(send, at)
            done += sum(file.upload_info.size for file in group)
        return total

    def look(self, revision: str | None = None) -> Info:
        """Ask the Hub what the repository holds."""
        return self.hub.repo_info(self.repo.repo_id, repo_type=self.repo.kind, revision=revision, files_metadata=True)

    def commit(self, additions: list[CommitOperationAdd]) -> str:
        """Make a commit, unless the repository holds all files already: the answer to an earlier try may be lost."""
        info = self.look()
        deletions = [CommitOperationDelete(path) for path in self.obsolete if path in list_files(info)]
        if info.sha and not deletions and not list_differing(info, additions):
            return str(info.sha)
        return self.hub.create_commit(
            self.repo.repo_id,
            [*additions, *deletions],
            commit_message=self.message,
            repo_type=self.repo.kind,
            parent_commit=info.sha,
        ).oid


def bytes_of(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def check_card(repo: Repository, content: Content) -> None:
    """Let the Hub check the metadata of a card before the repository is created; the client does so only later."""
    address = f"{constants.ENDPOINT}/api/validate-yaml"  # older clients' RepoCard.validate asks another Hub
    answer = get_session().post(
        address, json={"content": bytes_of(content).decode(), "repoType": repo.kind}, timeout=HUB_SECONDS
    )
    if answer.status_code == 400:
        faults = "; ".join(str(error.get("message")) for error in answer.json().get("errors", ()))
        raise ValueError(f"the metadata of its card: {faults}")
    hf_raise_for_status(answer)


def list_differing(info: Info, additions: list[CommitOperationAdd]) -> list[str]:
    """List the files that a repository lacks or holds with other content."""
    files = list_files(info)
    return [sent.path_in_repo for sent in additions if not same_content(files.get(sent.path_in_repo), sent)]


def same_content(found: Any, sent: CommitOperationAdd) -> bool:
    """Compare a file of a repository, or None, with one of ours by the hash that the Hub keeps of it."""
    if found is None:
        return False
    if found.lfs is not None:
        return bool(found.lfs.sha256 == sent.upload_info.sha256.hex())
    with sent.as_file() as file:
        return bool(found.blob_id == git_hash(file.read()))


def retry(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Repeat a request that the Hub cannot serve for a while, after growing pauses or as long as the Hub requests."""
    for pause in RETRY_SECONDS:
        try:
            return (yield from watch(call, at))
        except HUB_ERRORS as error:
            cause = find_cause(error)
            requested = requested_wait(cause)
            if not is_temporary(cause) or requested > MAX_WAIT_SECONDS:
                raise
            for left in range(max(pause, requested), 0, -1):
                yield replace(at, details={**at.details, "waiting": left, "because": name_reason(cause)})
                time.sleep(1)
    return (yield from watch(call, at))


def watch(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Wait for a call in a daemon thread: progress goes on every second, and the wait can be left at once."""
    answer: Future[Product] = Future()

    def answer_call() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    began = time.monotonic()
    threading.Thread(target=answer_call, daemon=True).start()
    while not wait([answer], HEARTBEAT_SECONDS).done:
        yield replace(at, details={**at.details, "seconds": round(time.monotonic() - began)})
    return answer.result()
