"""Import the large libraries once the page is open, so that neither the page nor the first inspection waits.

transformers replaces its own module while it is imported, so another thread may see the first module, which lacks
nearly everything. So one thread imports it, and all others wait for that thread. The end of the process waits, too,
because libraries abort if the process ends while they are being loaded.
"""

from __future__ import annotations

import threading
from importlib import import_module

_first = threading.Lock()
_whole = threading.Event()


def begin_import() -> None:
    """Start the import, once."""
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
        _whole.set()  # an error shows where the library is imported again
    import_module("linearizer.pipeline")
