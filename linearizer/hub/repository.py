"""Finds the repositories of the Hub that an account may publish in, and writes files there as one commit.

The same call repeats an upload that broke: the client asks the Hub which large files it has, and skips them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)
from huggingface_hub.utils.sha import git_hash

from linearizer.errors import FaultError, PublishError
from linearizer.hub.errors import (
    HUB_ERRORS,
    Use,
    describe_error,
    find_cause,
    is_temporary,
    name_reason,
    redact,
    requested_wait,
    sign_in_advice,
)
from linearizer.hub.models import HUB_SECONDS, access_token
from linearizer.progress import Progress, Steps

Info = Any  # ModelInfo or SpaceInfo
NOBODY = "YOUR-ACCOUNT"  # owner in names while nobody is signed in
INITIAL_FILES = {".gitattributes", "README.md"}  # of a repository that was just created
NOTHING_SENT = "nothing was sent"
KEPT = "local files are unchanged, and uploaded files will not be sent again"

WRITING = Use(
    "written",
    PublishError,
    remedies={
        402: "the account's plan does not allow it ({detail}): change the plan, or choose another owner",
        403: "the token in use may not write there ({detail}): use another token, or choose another owner",
        404: "it does not exist, or is hidden from this token: check the name, and whether it was deleted meanwhile",
        409: "the name is taken, or it is being changed by someone else ({detail}): try again, or choose another name",
        412: "someone else has changed it meanwhile: look at it, then try again",
    },
)
Product = TypeVar("Product")

LARGE_BYTES = 10**7  # a file of at least this size is uploaded alone, so that progress is shown after it
RETRY_SECONDS = (1, 2, 4, 8, 16)  # pauses before a commit that the Hub could not serve is tried again
MAX_WAIT_SECONDS = 120  # a longer wait that the Hub requests is an error
HEARTBEAT_SECONDS = 1.0  # between two reports of progress during a request

Content = Path | bytes


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub that the account may write to, and that may not exist yet."""

    repo_id: str
    private: bool
    kind: str  # "model", "space" or "dataset"
    head: str | None  # its latest commit; None: it does not exist yet
    files: frozenset[str]

    @property
    def fresh(self) -> bool:
        """Whether the repository contains no file of a user."""
        return self.files <= INITIAL_FILES

    @property
    def url(self) -> str:
        """The address of the repository's page."""
        return f"{constants.ENDPOINT}/{'' if self.kind == 'model' else f'{self.kind}s/'}{self.repo_id}"


@contextmanager
def explain_publish_errors(subject: str, note: str = NOTHING_SENT) -> Iterator[None]:
    """Turn an error of the Hub into one sentence: what failed, why and what to do; `note` ends it."""
    try:
        yield
    except HFValidationError as error:
        raise PublishError(
            f"{subject} is not a name for a repository: write OWNER/NAME, at most 96 letters, digits, - _ and .; {note}"
        ) from error
    except HUB_ERRORS as error:
        raise describe_error(subject, error, WRITING, note) from error
    except (ValueError, OSError) as error:  # a card that the Hub refuses; a file that cannot be read
        raise PublishError(
            f"{subject} cannot be written, since a file to be sent is wrong ({redact(error)}): repair it, then try "
            f"again; {note}"
        ) from error


def list_owners(token: str | None = None) -> tuple[str, ...]:
    """Name the signed-in account, and the organisations that it may write to."""
    chosen = access_token(token)
    if not chosen:
        raise PublishError(f"nobody is signed in, so nothing can be published: {sign_in_advice()}")
    with explain_publish_errors("the Hub"):
        me = HfApi(token=chosen).whoami()
    token_facts = (me.get("auth") or {}).get("accessToken") or {}  # the token of a Space's visitor has none
    if token_facts.get("role") == "read":
        raise PublishError(
            f"the token of {me['name']!r} may only read: make a token that may write at "
            f"{constants.ENDPOINT}/settings/tokens, then {sign_in_advice()} with it; {NOTHING_SENT}"
        )
    return me["name"], *organisations_of(me)


def organisations_of(me: Mapping[str, Any]) -> list[str]:
    """Name the organisations that an account may write to."""
    return [org["name"] for org in me.get("orgs", ()) if org.get("roleInOrg") != "read"]


def name_repository(name: str, private: bool, kind: str = "model", owner: str = NOBODY) -> Repository:
    """Name a repository without asking the Hub."""
    repo_id = name if "/" in name else f"{owner}/{name}"
    with explain_publish_errors(repr(repo_id)):
        validate_repo_id(repo_id)
    return Repository(repo_id, private, kind, None, frozenset())


def unchecked_note() -> str:
    """Describe what was not checked without an account, and how to sign in."""
    return f"nobody is signed in, so the Hub was not asked whether this may be published there: {sign_in_advice()}"


def find_repository(name: str, private: bool, token: str | None = None, kind: str = "model") -> Repository:
    """Find the repository NAME or OWNER/NAME, and check that the account may write there; send nothing."""
    owners = list_owners(token)
    named = name_repository(name, private, kind, owners[0])
    owner, repo_id = named.repo_id.partition("/")[0], named.repo_id
    if owner not in owners:
        raise PublishError(
            f"{owner!r} is not an owner that {owners[0]!r} may publish for: choose from {', '.join(owners)}"
        )
    hub = HfApi(token=access_token(token))
    with explain_publish_errors(repr(repo_id)):
        try:
            info = hub.repo_info(repo_id, repo_type=kind, timeout=HUB_SECONDS)
        except RepositoryNotFoundError:
            return named
        hub.auth_check(repo_id, repo_type=kind, write=True)
    if bool(info.private) != private:
        visibility, remedy = ("private", "leave out --public") if info.private else ("public", "add --public")
        raise PublishError(
            f"{repo_id!r} exists and is {visibility}: {remedy}, change this in its settings, or choose another name; "
            f"{NOTHING_SENT}"
        )
    return Repository(repo_id, private, kind, info.sha, frozenset(list_files(info)))


def list_files(info: Info) -> dict[str, Any]:
    """List the files of a repository by name."""
    return {file.rfilename: file for file in info.siblings or ()}


def refuse_other_content(repo: Repository) -> None:
    """Raise the error for a repository with other content."""
    files = f"{len(repo.files)} files: {', '.join(sorted(repo.files - INITIAL_FILES)[:3])}, …"
    raise PublishError(
        f"{repo.repo_id!r} exists and holds something else ({files}): choose another name, or delete it on its "
        f"settings page; {NOTHING_SENT}"
    )


def fetch_file(repo: Repository, path: str, revision: str, token: str | None = None) -> Path:
    """Download one small file of a repository."""
    with explain_publish_errors(repr(repo.repo_id), KEPT), without_bars():
        chosen = access_token(token)
        return Path(hf_hub_download(repo.repo_id, path, revision=revision, repo_type=repo.kind, token=chosen))


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the Hub's client from drawing progress bars: we show our own progress."""
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


@dataclass(frozen=True)
class Preview:
    """The files to be published, and their repository."""

    repo_id: str
    private: bool
    card: str
    files: tuple[tuple[str, int], ...]  # name, bytes
    bytes: int
    notes: tuple[str, ...] = ()  # for the user to know before publishing
    checked: bool = True  # whether the Hub was asked if the account may publish there


@dataclass(frozen=True)
class Published:
    """The published repository, its revision, and the lines that load it."""

    repo_id: str
    revision: str
    url: str
    snippet: str


def upload(
    repo: Repository, files: Mapping[str, Content], message: str, obsolete: Collection[str], token: str | None
) -> Steps[str]:
    """Write files to a repository in one commit, check them by their hashes, and return the revision."""
    hub = HfApi(token=access_token(token))
    with explain_publish_errors(repr(repo.repo_id)):
        check_card(repo, files["README.md"])
        if repo.head is None:
            sdk = "gradio" if repo.kind == "space" else None
            hub.create_repo(repo.repo_id, private=repo.private, repo_type=repo.kind, space_sdk=sdk)
    with explain_publish_errors(repr(repo.repo_id), KEPT), without_bars():
        additions = yield from watch(
            lambda: [CommitOperationAdd(name, content) for name, content in sorted(files.items())],  # computes hashes
            Progress("publish", 0, len(files), "files"),
        )
        total = yield from upload_large(hub, repo, additions)
        at = Progress("publish", total, total, "bytes", {"file": "the commit"})
        yield at
        revision = yield from retry(lambda: commit(hub, repo, additions, obsolete, message), at)
        at = Progress("publish", 0, len(additions), "files checked")
        info = yield from retry(lambda: look(hub, repo, revision), at)
        for path in list_differing(info, additions):
            raise FaultError(f"{repo.repo_id!r} at {revision} has another {path} than was sent: try again; {KEPT}")
        return revision


def upload_large(hub: HfApi, repo: Repository, additions: list[CommitOperationAdd]) -> Steps[int]:
    """Upload files that are too large for a commit, one after the other; the client retries by itself."""
    total, done = sum(file.upload_info.size for file in additions), 0
    small = [file for file in additions if file.upload_info.size < LARGE_BYTES]
    for group in [small, *([file] for file in additions if file.upload_info.size >= LARGE_BYTES)]:
        at = Progress("publish", done, total, "bytes", {"file": group[-1].path_in_repo} if group else {})
        yield at
        send = partial(hub.preupload_lfs_files, repo.repo_id, group, repo_type=repo.kind, free_memory=False)
        yield from watch(send, at)
        done += sum(file.upload_info.size for file in group)
    return total


def look(hub: HfApi, repo: Repository, revision: str | None = None) -> Info:
    """Ask the Hub for the content of a repository."""
    return hub.repo_info(repo.repo_id, repo_type=repo.kind, revision=revision, files_metadata=True)


def commit(
    hub: HfApi, repo: Repository, additions: list[CommitOperationAdd], obsolete: Collection[str], message: str
) -> str:
    """Make a commit, unless the repository already has all files: the answer to an earlier try may be lost."""
    info = look(hub, repo)
    deletions = [CommitOperationDelete(path) for path in obsolete if path in list_files(info)]
    if info.sha and not deletions and not list_differing(info, additions):
        return str(info.sha)
    parent = repo.head or info.sha  # the Hub refuses to overwrite what someone else has written since
    return hub.create_commit(
        repo.repo_id, [*additions, *deletions], commit_message=message, repo_type=repo.kind, parent_commit=parent
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
    """List the files that a repository lacks or has with other content."""
    files = list_files(info)
    return [sent.path_in_repo for sent in additions if not same_content(files.get(sent.path_in_repo), sent)]


def same_content(remote: Any, sent: CommitOperationAdd) -> bool:
    """Compare a file of a repository, or None, with one of ours by the Hub's hash of it."""
    if remote is None:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sent.upload_info.sha256.hex())
    with sent.as_file() as file:
        return bool(remote.blob_id == git_hash(file.read()))


def retry(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Repeat a request that the Hub cannot serve at the moment, after growing pauses or those that the Hub requests."""
    for pause in RETRY_SECONDS:
        try:
            return (yield from watch(call, at))
        except HUB_ERRORS as error:
            cause = find_cause(error)
            requested = requested_wait(cause)
            if not is_temporary(cause) or requested > MAX_WAIT_SECONDS:
                raise
            for seconds in range(max(pause, requested), 0, -1):
                yield replace(at, details={**at.details, "waiting": seconds, "because": name_reason(cause)})
                time.sleep(1)
    return (yield from watch(call, at))


def watch(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Wait for a call in a daemon thread; yield progress every second, so that the wait can be ended at once."""
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
