"""Turn any causal language model of the Hub into one with a state of fixed size.

run = Run.begin(Path("RUN"), Plan("demo", budget=64))
finish(linearize(run))
student = load(run.checkpoint)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linearizer.errors import LinearizerError
    from linearizer.model.checkpoint import load
    from linearizer.pipeline import inspect, linearize
    from linearizer.progress import finish
    from linearizer.run.folder import Run
    from linearizer.run.plan import Plan

__version__ = "0.1.0"
__all__ = ["LinearizerError", "Plan", "Run", "finish", "inspect", "linearize", "load"]

HOMES = {"load": "checkpoint", "LinearizerError": "errors", "inspect": "pipeline", "linearize": "pipeline"}
HOMES |= {"Plan": "plan", "finish": "progress", "Run": "run"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and transformers take seconds."""
    if name not in HOMES:
        raise AttributeError(f"module 'linearizer' has no attribute {name!r}")
    return getattr(import_module(f"linearizer.{HOMES[name]}"), name)
