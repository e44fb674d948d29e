"""The errors of this package. The command line turns each into one sentence and an exit code.

LinearizerError
├── RequestError          the request cannot be served: exit code 2
│   ├── UnsupportedModel  the model is of a kind that cannot be linearized
│   ├── ModelNotAvailable the model cannot be loaded: missing, private, gated, no network, damaged
│   ├── TextError         the text cannot be read, or is too short
│   ├── BudgetError       the budget is too small, or is not a number
│   ├── NotAgreed         a job would cost something that nobody has agreed to yet
│   ├── PublishError      the repository cannot be written: rights, a taken name, a refusal of the Hub
│   └── FolderError       the output folder holds something else, or cannot be written
├── FaultError            an unexpected exception: exit code 1
│   └── RankEnded         a process that works on the same run has ended
└── Stopped               the user stopped it: exit code 130

A message says what was received, why it is refused, and what to do.
"""

import re

MAX_QUOTED = 300
TOKEN = r"hf_[\w.-]+"  # of the Hub; that of a Space's visitor has several parts
LONG_QUOTATION = re.compile(rf"'[^']{{{MAX_QUOTED},}}'")


class LinearizerError(Exception):
    """Base of all errors that this package raises on purpose. A message has at most 300 letters of a quotation."""

    exit_code = 1

    def __str__(self) -> str:
        return LONG_QUOTATION.sub(lambda quotation: quotation[0][:MAX_QUOTED] + "…'", super().__str__())


class RequestError(LinearizerError):
    exit_code = 2


class UnsupportedModel(RequestError):
    pass


class ModelNotAvailable(RequestError):
    pass


class TextError(RequestError):
    pass


class BudgetError(RequestError):
    pass


class PublishError(RequestError):
    pass


class NotAgreed(RequestError):
    pass


class FolderError(RequestError):
    pass


class FaultError(LinearizerError):
    pass


class RankEnded(FaultError):
    pass


class Stopped(LinearizerError):
    exit_code = 130


def first_line(error: BaseException) -> str:
    """Shorten an error to its first meaningful line, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = lines[-1] if lines[0].endswith(":") else f"{type(error).__name__}: {lines[0]}"
    return text[:200].rstrip(".:!")
