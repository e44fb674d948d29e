"""Turn causal language models of the Hub into ones with a state of fixed size.

run = begin("RUN", Plan("demo", budget=64, recipe="best"))
finish(linearize(run))
finish(evaluate_run(run, Request(("language", "recall"))))
student = load(run.checkpoint)
finish(read(run, text, "text.state"))
print("".join(ask(run, "In short:", "text.state")))
fork("text.state", "other.state")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from linearizer.errors import LinearizerError as LinearizerError
    from linearizer.method.checkpoint import load as load
    from linearizer.pipeline import begin as begin
    from linearizer.pipeline import compare_run as compare_run
    from linearizer.pipeline import evaluate_run as evaluate_run
    from linearizer.pipeline import inspect as inspect
    from linearizer.pipeline import linearize as linearize
    from linearizer.pipeline import reallocate as reallocate
    from linearizer.plan.plan import Plan as Plan
    from linearizer.progress import finish as finish
    from linearizer.run.folder import Run as Run
    from linearizer.run.results import Request as Request
    from linearizer.serve.kept_state import ask as ask
    from linearizer.serve.kept_state import read as read
    from linearizer.serve.state_files import fork as fork
    from linearizer.workers.hub_jobs import run_in_job as run_in_job

HOMES = {
    "LinearizerError": "errors",
    "Plan": "plan.plan",
    "Request": "run.results",
    "Run": "run.folder",
    "ask": "serve.kept_state",
    "begin": "pipeline",
    "compare_run": "pipeline",
    "evaluate_run": "pipeline",
    "finish": "progress",
    "fork": "serve.state_files",
    "inspect": "pipeline",
    "linearize": "pipeline",
    "load": "method.checkpoint",
    "read": "serve.kept_state",
    "reallocate": "pipeline",
    "run_in_job": "workers.hub_jobs",
}
__all__ = ["__version__", *HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: torch and transformers take seconds."""
    if name not in HOMES:
        raise AttributeError(f"module 'linearizer' has no attribute {name!r}")
    return getattr(import_module(f"linearizer.{HOMES[name]}"), name)
