"""The finished example that comes with the package: a run of the demo model without weights, which is only read."""

from __future__ import annotations

from pathlib import Path

from linearizer.errors import RequestError
from linearizer.run.files import find_carried
from linearizer.run.folder import Run

EXAMPLE_NAME = "example-run"  # of its folder, too
EXAMPLE_NOTE = (
    "This is a finished example that comes with Linearizer: a run of the demo model, as it was measured. Its weights "
    "are left out, so it can be looked at in every step, but neither compared, evaluated further nor published."
)


def example_folder() -> Path:
    return find_carried(f"assets/{EXAMPLE_NAME}")


def has_example() -> bool:
    return (example_folder() / "plan.json").is_file()


def is_example(run: Run) -> bool:
    return run.folder == example_folder()


def refuse_example(run: Run) -> None:
    """Refuse what would change the example."""
    if is_example(run):
        raise RequestError("this is the example that comes with Linearizer, and is only read: start a run of your own")
