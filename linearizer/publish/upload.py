"""The network code that writes: who may, where, and files as one commit; what has arrived is not sent again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    SpaceInfo,
    constants,
    hf_hub_download,
)
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

from linearizer.errors import FaultError, PublishError
from linearizer.model.hub import SECONDS, access_token
from linearizer.progress import Progress, Steps
from linearizer.publish.answers import KEPT, NOTHING, explained, sign_in
from linearizer.publish.patience import patiently, watched

Content = Path | bytes

SMALL = 10**7  # bytes of the files that are announced together
FRESH = {".gitattributes", "README.md"}  # what a repository holds that was just made


@dataclass(frozen=True)
class Place:
    """A repository of the Hub, there already or yet to be made, that the account may write."""

    repo_id: str
    private: bool
    kind: str  # "model" or "space"
    head: str | None  # its latest commit; None: it is yet to be made
    files: frozenset[str]

    @property
    def fresh(self) -> bool:
        """Tell whether nothing of worth is in it."""
        return self.files <= FRESH

    @property
    def url(self) -> str:
        """Give its address."""
        return f"{constants.ENDPOINT}/{'spaces/' if self.kind == 'space' else ''}{self.repo_id}"


def account(token: str | None = None) -> tuple[str, ...]:
    """Name the signed-in account, and the organisations that it may write to."""
    chosen = access_token(token)
    if not chosen:
        raise PublishError(f"nobody is signed in, so nothing can be published: {sign_in()}")
    with explained("the Hub"):
        me = HfApi(token=chosen).whoami()
    token_of = (me.get("auth") or {}).get("accessToken") or {}  # a visitor's sign-in has none
    if token_of.get("role") == "read":
        raise PublishError(
            f"the token of {me['name']!r} may only read: make one that may write at "
            f"{constants.ENDPOINT}/settings/tokens, then {sign_in()} with it; {NOTHING}"
        )
    return me["name"], *(org["name"] for org in me.get("orgs", ()) if org.get("roleInOrg") != "read")


def find_place(name: str, private: bool, token: str | None = None, kind: str = "model") -> Place:
    """Find where to publish, NAME or OWNER/NAME, and check that the account may write there; nothing is sent."""
    owners = account(token)
    repo_id = name if "/" in name else f"{owners[0]}/{name}"
    with explained(repr(repo_id)):
        validate_repo_id(repo_id)
        owner = repo_id.partition("/")[0]
        if owner not in owners:
            raise PublishError(
                f"{owner!r} is not an owner that {owners[0]!r} may publish for: choose from {', '.join(owners)}"
            )
        hub = HfApi(token=access_token(token))
        try:
            info = look(hub, kind, repo_id, timeout=SECONDS)
        except RepositoryNotFoundError:
            return Place(repo_id, private, kind, None, frozenset())
        hub.auth_check(repo_id, repo_type=kind, write=True)
    if bool(info.private) != private:
        there, remedy = ("private", "leave out --public") if info.private else ("public", "add --public")
        raise PublishError(
            f"{repo_id!r} exists and is {there}: {remedy}, change that in its settings, or choose another name; "
            f"{NOTHING}"
        )
    return Place(repo_id, private, kind, info.sha, frozenset(file.rfilename for file in info.siblings or ()))


def look(hub: HfApi, kind: str, repo_id: str, **how: Any) -> ModelInfo | SpaceInfo:
    """Ask what a repository holds."""
    return hub.space_info(repo_id, **how) if kind == "space" else hub.model_info(repo_id, **how)


def refuse_taken(place: Place) -> None:
    """Say that a repository holds something else."""
    some = ", ".join(sorted(place.files - FRESH)[:3])
    raise PublishError(
        f"{place.repo_id!r} exists and holds something else ({len(place.files)} files: {some}, …): choose another "
        f"name, or delete it on its settings page; {NOTHING}"
    )


def fetch_file(place: Place, path: str, revision: str, token: str | None = None) -> Path:
    """Download one small file of a repository."""
    with explained(repr(place.repo_id), KEPT), without_bars():
        got = hf_hub_download(place.repo_id, path, revision=revision, repo_type=place.kind, token=access_token(token))
    return Path(got)


def send(
    place: Place, files: Mapping[str, Content], message: str, obsolete: Collection[str] = (), token: str | None = None
) -> Steps[str]:
    """Make a repository hold these files as of one commit, checked by their hashes, and return its revision."""
    hub = HfApi(token=access_token(token))
    with explained(repr(place.repo_id)):
        check_card(place, files["README.md"])
        if place.head is None:
            sdk = "gradio" if place.kind == "space" else None
            hub.create_repo(place.repo_id, private=place.private, repo_type=place.kind, space_sdk=sdk)
    with explained(repr(place.repo_id), KEPT), without_bars():
        prepared = yield from watched(lambda: additions(files), Progress("publish", 0, len(files), "files"))
        yield from send_large(hub, place, prepared)
        revision = yield from commit(hub, place, files, prepared, message, obsolete)
        yield from verify(hub, place, revision, prepared)
    return revision


def check_card(place: Place, content: Content) -> None:
    """Let the Hub judge the metadata of a card, before anything large is sent."""
    text = content.decode() if isinstance(content, bytes) else content.read_text(encoding="utf-8")
    answer = get_session().post(
        f"{constants.ENDPOINT}/api/validate-yaml", json={"content": text, "repoType": place.kind}
    )
    if answer.status_code == 400:
        wrong = "; ".join(str(error.get("message")) for error in answer.json().get("errors", ()))
        raise ValueError(f"the metadata of its card: {wrong}")
    hf_raise_for_status(answer)


def additions(files: Mapping[str, Content]) -> list[CommitOperationAdd]:
    """Describe files to the Hub's client, which computes their hashes."""
    return [CommitOperationAdd(path, content) for path, content in sorted(files.items())]


def send_large(hub: HfApi, place: Place, prepared: list[CommitOperationAdd]) -> Steps[None]:
    """Send what is too large for a commit, one file after the other; the Hub says which it has already."""
    total, done = sum(one.upload_info.size for one in prepared), 0
    small = [one for one in prepared if one.upload_info.size < SMALL]
    groups = [small, *([one] for one in prepared if one.upload_info.size >= SMALL)]
    for group in groups:
        at = Progress("publish", done, total, "bytes", {"file": group[-1].path_in_repo} if group else {})
        yield at

        def announce(group: list[CommitOperationAdd] = group) -> None:
            hub.preupload_lfs_files(place.repo_id, group, repo_type=place.kind, free_memory=False)

        yield from patiently(announce, at)
        done += sum(one.upload_info.size for one in group)
    yield Progress("publish", done, total, "bytes", {"file": "the commit"})


def commit(
    hub: HfApi,
    place: Place,
    files: Mapping[str, Content],
    prepared: list[CommitOperationAdd],
    message: str,
    obsolete: Collection[str],
) -> Steps[str]:
    """Make one commit; if the answer to an earlier try was lost, there is nothing left to change and none is made."""
    unused = [prepared]

    def try_once() -> str:
        now = look(hub, place.kind, place.repo_id)
        there = {file.rfilename for file in now.siblings or ()}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*(unused.pop() if unused else additions(files))]
        operations += [CommitOperationDelete(path) for path in obsolete if path in there]
        return hub.create_commit(
            place.repo_id, operations, commit_message=message, repo_type=place.kind, parent_commit=now.sha
        ).oid

    total = sum(one.upload_info.size for one in prepared)
    return (yield from patiently(try_once, Progress("publish", total, total, "bytes", {"file": "the commit"})))


def verify(hub: HfApi, place: Place, revision: str, prepared: list[CommitOperationAdd]) -> Steps[None]:
    """Compare what the Hub holds with what was sent, by hash."""

    def ask() -> ModelInfo | SpaceInfo:
        return look(hub, place.kind, place.repo_id, revision=revision, files_metadata=True)

    info = yield from patiently(ask, Progress("publish", 0, len(prepared), "files checked"))
    held = {file.rfilename: file for file in info.siblings or ()}
    for one in prepared:
        found = held.get(one.path_in_repo)
        if found is not None and found.lfs is not None:
            same = found.lfs.sha256 == one.upload_info.sha256.hex()
        else:
            same = found is not None and found.blob_id == git_hash(one)
        if not same:
            raise FaultError(
                f"{place.repo_id!r} at {revision} does not hold {one.path_in_repo} as it was sent: try again; {KEPT}"
            )


def git_hash(one: CommitOperationAdd) -> str:
    """Compute what git calls a file's content."""
    found = hashlib.sha1(b"blob %d\0" % one.upload_info.size)
    with one.as_file() as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the Hub's client from drawing bars of its own: what it does is told by our progress."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
