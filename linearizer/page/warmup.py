"""The large libraries, imported once the page is open, so that neither the page nor the first look at a model waits.

transformers puts another module in its own place while it is imported: a thread that asks for it meanwhile may be
given the first, which lacks nearly everything. So one thread imports it, and whoever needs it waits for that, also the
end of the process: libraries abort that are still being loaded then.
"""

from __future__ import annotations

import threading
from importlib import import_module

_first = threading.Lock()
_whole = threading.Event()


def begin_import() -> None:
    """Begin to import, once."""
    if _first.acquire(blocking=False):
        threading.Thread(target=_import).start()


def wait_for_import() -> None:
    """Return when transformers can be imported by any thread."""
    begin_import()
    _whole.wait()


def _import() -> None:
    try:
        import_module("transformers")
    finally:
        _whole.set()  # what is wrong with it, whoever needs it is told when they import it
    import_module("linearizer.pipeline")
