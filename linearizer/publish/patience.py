"""Requests that take long, or that the Hub cannot serve for a while: told every second, repeated, and left at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from json import JSONDecodeError
from queue import Empty, Queue
from typing import NoReturn, TypeVar

from huggingface_hub.errors import HfHubHTTPError, HTTPError

from linearizer.progress import Progress, Steps
from linearizer.publish.answers import passing, reason, root_of, wait_asked

Product = TypeVar("Product")

PAUSES = (1, 2, 4, 8, 16)  # seconds before a request that the Hub could not serve is made again
LONGEST = 120  # seconds that the Hub may ask us to wait
BEAT = 1.0  # seconds between two signs of life


def patiently(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Repeat a request that the Hub could not serve for a while, longer and longer, or as long as it asks for."""
    for pause in PAUSES:
        try:
            return (yield from watched(call, at))
        except (HfHubHTTPError, HTTPError, ConnectionError, JSONDecodeError, RuntimeError) as error:
            cause = root_of(error)
            asked = wait_asked(cause)
            if not passing(cause) or asked > LONGEST:
                raise
            for left in range(max(pause, asked), 0, -1):
                yield replace(at, details={**at.details, "waiting": left, "because": reason(cause)})
                time.sleep(1)
    return (yield from watched(call, at))


def watched(call: Callable[[], Product], at: Progress) -> Steps[Product]:
    """Wait for a call in a thread: who watches hears every second that it goes on, and may stop waiting for it."""
    answers: Queue[Callable[[], Product]] = Queue()

    def ask() -> None:
        try:
            found = call()
        except BaseException as error:
            answers.put(partial(again, error))  # for the thread that waits
        else:
            answers.put(lambda: found)

    begin = time.monotonic()
    threading.Thread(target=ask, daemon=True).start()
    while True:
        try:
            return answers.get(timeout=BEAT)()
        except Empty:
            yield replace(at, details={**at.details, "seconds": round(time.monotonic() - begin)})


def again(error: BaseException) -> NoReturn:
    """Raise an error."""
    raise error
