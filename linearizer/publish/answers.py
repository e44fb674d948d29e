"""What the Hub answers to who writes, as one sentence: what, why, what to do, and what was kept."""

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

NOTHING = "nothing was sent"
KEPT = "what is here is untouched, and what has arrived is not sent again"


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
    except (HfHubHTTPError, HTTPError, ConnectionError, JSONDecodeError, RuntimeError) as error:
        raise refusal(what, root_of(error), kept) from error
    except (ValueError, OSError) as error:  # a card that the Hub finds wrong; a file that cannot be read
        raise PublishError(
            f"{what} cannot be written, something is wrong with what would be sent ({redacted(error)}): repair it, "
            f"then try again; {kept}"
        ) from error


def refusal(what: str, error: BaseException, kept: str) -> LinearizerError:
    """Find the sentence for an answer of the Hub."""
    if not isinstance(error, HTTPError | ConnectionError | JSONDecodeError):
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


def root_of(error: BaseException) -> BaseException:
    """Find what went wrong beneath the client's `Error while uploading`."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error


def passing(error: BaseException) -> bool:
    """Tell what may pass by itself from what will not."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError | JSONDecodeError)  # a broken server answers with a page


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
