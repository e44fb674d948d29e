"""The repositories of the Hub that an account may publish in: names, owners and files; what would be published there.

Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from linearizer.errors import PublishError
from linearizer.hub.errors import HUB_ERRORS, Use, describe_error, redact, sign_in_advice
from linearizer.hub.models import HUB_SECONDS, access_token

Info = Any  # ModelInfo or SpaceInfo
NOBODY = "YOUR-ACCOUNT"  # owns what is named while nobody is signed in
INITIAL_FILES = {".gitattributes", "README.md"}  # of a repository that was just created
NOTHING_SENT = "nothing was sent"
KEPT = "what is here is untouched, and what has arrived is not sent again"

WRITING = Use(
    "written",
    PublishError,
    remedies={
        402: "the account's plan does not allow it ({detail}): change the plan, or choose another owner",
        403: "the token in use may not write there ({detail}): use another token, or choose another owner",
        404: "it is not there, or hidden from this token: check the name, and whether it was deleted meanwhile",
        409: "the name is taken, or it is being changed by someone else ({detail}): try again, or choose another name",
        412: "someone else has changed it meanwhile: look at it, then try again",
    },
)


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub, existing or to be created, that the account may write."""

    repo_id: str
    private: bool
    kind: str  # "model" or "space"
    head: str | None  # its latest commit; None: it does not exist yet
    files: frozenset[str]

    @property
    def fresh(self) -> bool:
        """Whether the repository holds nothing that a user put there."""
        return self.files <= INITIAL_FILES

    @property
    def url(self) -> str:
        """The address of the repository's page."""
        return f"{constants.ENDPOINT}/{'spaces/' if self.kind == 'space' else ''}{self.repo_id}"


@contextmanager
def explain_publish_errors(what: str, kept: str = NOTHING_SENT) -> Iterator[None]:
    """Turn an error of the Hub into one sentence: what failed, why, what to do, and what was kept."""
    try:
        yield
    except HFValidationError as error:
        raise PublishError(
            f"{what} is not a name for a repository: write OWNER/NAME, of at most 96 letters, digits, - _ and .; {kept}"
        ) from error
    except HUB_ERRORS as error:
        raise describe_error(what, error, WRITING, kept) from error
    except (ValueError, OSError) as error:  # a card that the Hub refuses; a file that cannot be read
        raise PublishError(
            f"{what} cannot be written, something is wrong with what would be sent ({redact(error)}): repair it, "
            f"then try again; {kept}"
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


def name_repository(name: str, private: bool, kind: str = "model") -> Repository:
    """Name a repository without asking the Hub, since nobody is signed in."""
    repo_id = name if "/" in name else f"{NOBODY}/{name}"
    with explain_publish_errors(repr(repo_id)):
        validate_repo_id(repo_id)
    return Repository(repo_id, private, kind, None, frozenset())


def unchecked_note() -> str:
    """Describe what was not checked without an account, and how to sign in."""
    return f"nobody is signed in, so the Hub was not asked whether this may be published there: {sign_in_advice()}"


def find_repository(name: str, private: bool, token: str | None = None, kind: str = "model") -> Repository:
    """Find the repository NAME or OWNER/NAME, and check that the account may write there; send nothing."""
    owners = list_owners(token)
    repo_id = name if "/" in name else f"{owners[0]}/{name}"
    with explain_publish_errors(repr(repo_id)):
        validate_repo_id(repo_id)
        owner = repo_id.partition("/")[0]
        if owner not in owners:
            raise PublishError(
                f"{owner!r} is not an owner that {owners[0]!r} may publish for: choose from {', '.join(owners)}"
            )
        hub = HfApi(token=access_token(token))
        try:
            info = hub.repo_info(repo_id, repo_type=kind, timeout=HUB_SECONDS)
        except RepositoryNotFoundError:
            return Repository(repo_id, private, kind, None, frozenset())
        hub.auth_check(repo_id, repo_type=kind, write=True)
    if bool(info.private) != private:
        visibility, remedy = ("private", "leave out --public") if info.private else ("public", "add --public")
        raise PublishError(
            f"{repo_id!r} exists and is {visibility}: {remedy}, change that in its settings, or choose another name; "
            f"{NOTHING_SENT}"
        )
    return Repository(repo_id, private, kind, info.sha, frozenset(list_files(info)))


def list_files(info: Info) -> dict[str, Any]:
    """List the files of a repository by name."""
    return {file.rfilename: file for file in info.siblings or ()}


def refuse_other_content(repo: Repository) -> None:
    """Raise the error for a repository that holds something else."""
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
    """Keep the Hub's client from drawing bars: our own progress shows what it does."""
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


@dataclass(frozen=True)
class Preview:
    """The files that would be published, and where."""

    repo_id: str
    private: bool
    card: str
    files: tuple[tuple[str, int], ...]  # name, bytes
    bytes: int
    notes: tuple[str, ...] = ()  # what the user should know before publishing
    checked: bool = True  # whether the Hub was asked if it may be published there, which needs an account


@dataclass(frozen=True)
class Published:
    """The repository that was published, its revision, and the lines that load it."""

    repo_id: str
    revision: str
    url: str
    snippet: str
