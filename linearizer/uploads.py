"""The network code that writes: who may, where, and files as one commit; what has arrived is not sent again."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    SpaceInfo,
    constants,
    hf_hub_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from linearizer.errors import FaultError, LinearizerError, PublishError
from linearizer.hub import SECONDS, SIGN_IN, access_token, first_line
from linearizer.progress import Progress, Steps

Content = Path | bytes
Product = TypeVar("Product")

PAUSES = (1, 2, 4, 8, 16)  # seconds before a request that the Hub could not serve is made again
LONGEST = 120  # seconds that the Hub may ask us to wait
SMALL = 10**7  # bytes of the files that are announced together
FRESH = {".gitattributes", "README.md"}  # what a repository holds that was just made
NOTHING = "nothing was sent"
KEPT = "what is here is untouched, and what has arrived is not sent again"


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
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
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
    with explained(repr(place.repo_id), KEPT):
        got = hf_hub_download(place.repo_id, path, revision=revision, repo_type=place.kind, token=access_token(token))
    return Path(got)


def send(
    place: Place, files: Mapping[str, Content], message: str, obsolete: Collection[str] = (), token: str | None = None
) -> Steps[str]:
    """Make a repository hold these files as of one commit, checked by their hashes, and return its revision."""
    hub = HfApi(token=access_token(token))
    if place.head is None:
        with explained(repr(place.repo_id)):
            hub.create_repo(
                place.repo_id,
                private=place.private,
                repo_type=place.kind,
                space_sdk="gradio" if place.kind == "space" else None,
            )
    with explained(repr(place.repo_id), KEPT):
        yield from send_large(hub, place, (prepared := additions(files)))
        revision = yield from commit(hub, place, files, prepared, message, obsolete)
        verify(hub, place, revision, prepared)
    return revision


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


def verify(hub: HfApi, place: Place, revision: str, prepared: list[CommitOperationAdd]) -> None:
    """Compare what the Hub holds with what was sent, by hash."""
    info = look(hub, place.kind, place.repo_id, revision=revision, files_metadata=True)
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


def patiently(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Repeat a request that the Hub could not serve for a while, longer and longer, or as long as it asks for."""
    for pause in PAUSES:
        try:
            return call()
        except (HfHubHTTPError, HTTPError, ConnectionError, RuntimeError) as error:
            cause = root_of(error)
            asked = wait_asked(cause)
            if not passing(cause) or asked > LONGEST:
                raise
            yield replace(at, details={**at.details, "waiting": max(pause, asked), "because": reason(cause)})
            time.sleep(max(pause, asked))
    return call()


def root_of(error: BaseException) -> BaseException:
    """Find what went wrong beneath the client's `Error while uploading`."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error


def passing(error: BaseException) -> bool:
    """Tell what may pass by itself from what will not."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError)


def wait_asked(error: BaseException) -> int:
    """Read how many seconds the Hub asks to wait."""
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(asked) if asked.isdecimal() else 0


def reason(error: BaseException) -> str:
    """Say in words what the Hub answered."""
    if not isinstance(error, HfHubHTTPError):
        return "the Hub does not answer"
    status = error.response.status_code
    return {429: "the Hub is asked too often (429)"}.get(status, f"the Hub answered {status}")


def redacted(error: BaseException) -> str:
    """Shorten an error to its first line, without the signed addresses and tokens that a client may put there."""
    return re.sub(r"\?\S+|hf_\w+", "…", first_line(error))


def sign_in() -> str:
    """Say how to sign in: on a Space there is a button."""
    return "press the button that signs in" if os.environ.get("SPACE_ID") else SIGN_IN


@contextmanager
def explained(what: str, kept: str = NOTHING) -> Iterator[None]:
    """Turn what the Hub answers to who writes into one sentence: what, why, what to do, what was kept."""
    try:
        yield
    except HFValidationError as error:
        raise PublishError(
            f"{what} is no name for a repository: write OWNER/NAME with letters, digits, - _ and ., 96 at most; {kept}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FaultError(f"{what} cannot be reached, no network: connect, then try again; {kept}") from error
    except (HfHubHTTPError, HTTPError, ConnectionError, RuntimeError) as error:
        raise refusal(what, root_of(error), kept) from error


def refusal(what: str, error: BaseException, kept: str) -> LinearizerError:
    """Find the sentence for an answer of the Hub."""
    if not isinstance(error, HTTPError | ConnectionError):
        return FaultError(f"{what} cannot be written, the upload broke ({redacted(error)}): try again; {kept}")
    if not isinstance(error, HfHubHTTPError):
        return FaultError(f"{what} cannot be reached, the Hub does not answer: connect, then try again; {kept}")
    status = error.response.status_code
    if passing(error):
        later = f"in {asked} seconds" if (asked := wait_asked(error)) else "later"
        return FaultError(f"{what} cannot be written now, {reason(error)}: try again {later}; {kept}")
    said = " ".join((error.server_message or "it does not say why").split())[:200].rstrip(".")
    remedy = {
        401: f"the token in use was refused: {sign_in()} again",
        402: f"the account's plan does not allow it ({said}): change the plan, or choose another owner",
        403: f"the token in use may not write there ({said}): use one that may, or choose another owner",
        404: "it is not there, or not to be seen with this token: check the name, and whether it was deleted meanwhile",
        409: f"the name is taken, or it is being changed by someone else ({said}): try again, or choose another name",
        412: "someone else has changed it meanwhile: look at it, then try again",
    }.get(status, f"the Hub does not accept it ({status}: {said})")
    return PublishError(f"{what} cannot be written, {remedy}; {kept}")
