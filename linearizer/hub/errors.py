"""Errors of the Hub as sentences: what failed, why, what to do, and whether the same request may succeed later.

Reading, publishing and jobs differ in a few remedies, each in its `Use`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from linearizer.errors import TOKEN, FaultError, LinearizerError, RequestError, first_line

ANSWER_ERRORS = (HfHubHTTPError, HTTPError, ConnectionError, LocalEntryNotFoundError)
HUB_ERRORS = (*ANSWER_ERRORS, JSONDecodeError, RuntimeError)  # a broken server answers with a page; Xet raises the last
SIGN_IN = "sign in with `hf auth login`, or set HF_TOKEN"
REMEDIES = {  # by status
    401: "the token in use was refused: {sign_in} again",
    403: "the token in use may not do that ({detail}): {sign_in} with another token",
}


@dataclass(frozen=True)
class Use:
    """A use of the Hub: the wording of its errors, and the exceptions that they become."""

    verb: str  # in "cannot be …"
    refusal: type[LinearizerError] = RequestError  # the Hub does not accept the request
    failure: type[LinearizerError] = FaultError  # the same request may succeed later
    connect: str = "connect, then try again"  # without a network
    remedies: Mapping[int, str] = field(default_factory=dict)  # by status, before REMEDIES
    page: str = ""  # of a repository that is read: it may be gated, or hidden
    signed_in: bool = True


def describe_error(subject: str, error: BaseException, use: Use, note: str = "") -> LinearizerError:
    """Describe an error of the Hub about a `subject`; `note` ends the sentence."""
    error = find_cause(error)
    cannot, end = f"{subject} cannot be {use.verb}", f"; {note}" if note else ""
    if use.page and isinstance(error, GatedRepoError):
        return use.refusal(f"{subject} is gated: accept its terms at {use.page}, then {sign_in_advice()}{end}")
    if use.page and isinstance(error, RepositoryNotFoundError):
        return use.refusal(describe_missing(subject, use.signed_in) + end)
    if isinstance(error, HfHubHTTPError) and not is_temporary(error):
        return use.refusal(f"{cannot}, {describe_refusal(error, use)}{end}")
    if isinstance(error, HfHubHTTPError):
        time = f"in {seconds} seconds" if (seconds := requested_wait(error)) else "later"
        return use.failure(f"{cannot} now, {name_reason(error)}: try again {time}{end}")
    if isinstance(error, (*ANSWER_ERRORS, JSONDecodeError)):
        return use.failure(f"{cannot}, {name_reason(error)}: {use.connect}{end}")
    return use.failure(f"{cannot}, the transfer broke ({redact(error)}): try again{end}")


def describe_missing(name: str, signed_in: bool) -> str:
    """Describe a repository that is missing or hidden: the Hub does not distinguish these."""
    if signed_in:
        return (
            f"{name} is not on the Hub, or is private and the token in use may not see it: check the spelling, or "
            "use a token of its owner"
        )
    return (
        f"{name} is not a folder here and not on the Hub, or it is private: check the spelling, or {sign_in_advice()}"
    )


def describe_refusal(error: HfHubHTTPError, use: Use) -> str:
    """Describe why the Hub does not accept a request, and what to do."""
    status = error.response.status_code
    message = " ".join((error.server_message or "it does not say why").split())
    detail = re.sub(TOKEN, "…", message)[:200].rstrip(".")
    remedy = {**REMEDIES, **use.remedies}.get(status, "the Hub does not accept it ({status}: {detail})")
    return remedy.format(status=status, detail=detail, sign_in=sign_in_advice())


def find_cause(error: BaseException) -> BaseException:
    """Return the cause of the client's `Error while uploading`."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error


def is_temporary(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError | JSONDecodeError)


def requested_wait(error: BaseException) -> int:
    """Read how many seconds the Hub asks to wait."""
    header = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(header) if header.isdecimal() else 0


def name_reason(error: BaseException) -> str:
    """Describe why the Hub did not serve a request."""
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return "no network"
    if not isinstance(error, HfHubHTTPError):
        return "the Hub does not answer"
    status = error.response.status_code
    return "the Hub received too many requests (429)" if status == 429 else f"the Hub answered {status}"


def redact(error: BaseException) -> str:
    """Shorten an error to its first line, without signed addresses and tokens, which a client may put there."""
    return re.sub(rf"\?\S+|{TOKEN}", "…", first_line(error))


def sign_in_advice() -> str:
    """Describe how to sign in: on a Space, by a button."""
    return "press the button that signs in" if os.environ.get("SPACE_ID") else SIGN_IN
