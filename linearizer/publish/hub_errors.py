"""Errors of the Hub in words: what failed, why, what to do, and whether the same request may succeed later."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError

from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from linearizer.errors import FaultError, LinearizerError, PublishError, first_line
from linearizer.model.hub import SIGN_IN

NOTHING_SENT = "nothing was sent"
HUB_ERRORS = (HfHubHTTPError, HTTPError, ConnectionError, JSONDecodeError, RuntimeError)


@contextmanager
def explain_errors(what: str, kept: str = NOTHING_SENT) -> Iterator[None]:
    """Turn an error of the Hub into one sentence: what failed, why, what to do, and what was kept."""
    try:
        yield
    except HFValidationError as error:
        raise PublishError(
            f"{what} is no name for a repository: write OWNER/NAME with letters, digits, - _ and ., 96 at most; {kept}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FaultError(f"{what} cannot be reached, no network: connect, then try again; {kept}") from error
    except HUB_ERRORS as error:
        raise describe_error(what, find_cause(error), kept) from error
    except (ValueError, OSError) as error:  # a card that the Hub refuses; a file that cannot be read
        raise PublishError(
            f"{what} cannot be written, something is wrong with what would be sent ({redact(error)}): repair it, "
            f"then try again; {kept}"
        ) from error


def describe_error(what: str, error: BaseException, kept: str) -> LinearizerError:
    """Choose the sentence for an error of the Hub."""
    if not isinstance(error, HTTPError | ConnectionError | JSONDecodeError):
        return FaultError(f"{what} cannot be written, the upload broke ({redact(error)}): try again; {kept}")
    if not isinstance(error, HfHubHTTPError):
        return FaultError(f"{what} cannot be reached, the Hub does not answer: connect, then try again; {kept}")
    if is_temporary(error):
        when = f"in {seconds} seconds" if (seconds := requested_wait(error)) else "later"
        return FaultError(f"{what} cannot be written now, {name_reason(error)}: try again {when}; {kept}")
    status = error.response.status_code
    detail = " ".join((error.server_message or "it does not say why").split())[:200].rstrip(".")
    remedy = {
        401: f"the token in use was refused: {sign_in_advice()} again",
        402: f"the account's plan does not allow it ({detail}): change the plan, or choose another owner",
        403: f"the token in use may not write there ({detail}): use another token, or choose another owner",
        404: "it is not there, or not to be seen with this token: check the name, and whether it was deleted meanwhile",
        409: f"the name is taken, or it is being changed by someone else ({detail}): try again, or choose another name",
        412: "someone else has changed it meanwhile: look at it, then try again",
    }.get(status, f"the Hub does not accept it ({status}: {detail})")
    return PublishError(f"{what} cannot be written, {remedy}; {kept}")


def find_cause(error: BaseException) -> BaseException:
    """Find the error beneath the client's `Error while uploading`."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error


def is_temporary(error: BaseException) -> bool:
    """Tell whether the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError | JSONDecodeError)  # a broken server answers with a page


def requested_wait(error: BaseException) -> int:
    """Read how many seconds the Hub asks to wait."""
    header = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(header) if header.isdecimal() else 0


def name_reason(error: BaseException) -> str:
    """Say in words why the Hub did not serve a request."""
    if not isinstance(error, HfHubHTTPError):
        return "the Hub does not answer"
    status = error.response.status_code
    return "the Hub is asked too often (429)" if status == 429 else f"the Hub answered {status}"


def redact(error: BaseException) -> str:
    """Shorten an error to its first line, without the signed addresses and tokens that a client may put there."""
    return re.sub(r"\?\S+|hf_\w+", "…", first_line(error))


def sign_in_advice() -> str:
    """Say how to sign in: on a Space there is a button."""
    return "press the button that signs in" if os.environ.get("SPACE_ID") else SIGN_IN
