"""The names of runs, models and texts as users write them: folders, ids of the Hub, and addresses of its pages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from pathlib import Path

from linearizer.errors import FolderError, RequestError
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.plan import Plan
from linearizer.run.folder import ENCODER_PLAN, PLAN, Run

MAX_NAMES = 9  # names of runs that an error lists
USES = "`linearizer evaluate`, `push` and `runs` serve it, and its checkpoint loads with AutoModel"
MAX_MODEL = 100  # letters of a model that are part of the name of a run


def runs_root() -> Path:
    """Return the default folder of runs."""
    return Path(os.environ.get("LINEARIZER_RUNS") or "runs")


def find_run(name: str, root: Path | None = None, encoders: bool = False) -> Run:
    """Open a run by its name under the root, or by its folder; if there is none, suggest similar names.

    Refuse the run of an encoder unless the caller also serves `encoders`.
    """
    root = root or runs_root()
    for folder in (root / name, Path(name)):
        run = Run(folder)
        if os.path.isfile(folder / PLAN) or os.path.isfile(folder / ENCODER_PLAN):  # unlike Path's, it takes any name
            if not encoders:
                refuse_encoder(run)
            return run
    names = sorted(plan.parent.name for file in (PLAN, ENCODER_PLAN) for plan in root.glob(f"*/{file}"))
    if similar := get_close_matches(name, names, n=3, cutoff=0.5):
        advice = f"did you mean {' or '.join(similar)}?"
    elif names:
        advice = f"{str(root)!r} has {', '.join(names[:MAX_NAMES])}{', …' if len(names) > MAX_NAMES else ''}"
    else:
        advice = f"{str(root)!r} has none; start a run with `linearizer run MODEL`"
    hint = "that folder holds no run; " if os.path.isdir(name) else ""
    raise FolderError(f"there is no run {name!r}: {hint}{advice}")


def refuse_encoder(run: Run) -> None:
    """Refuse the run of an encoder: the caller serves only causal language models."""
    if run.is_encoder_run:
        raise RequestError(f"{str(run.folder)!r} is of an encoder, which writes no text and keeps no state: {USES}")


def fresh_folder(plan: Plan | EncoderPlan, root: Path | None = None) -> Path:
    """Choose a folder for a new run, by its model and its budget."""
    model = re.sub(r"[^A-Za-z0-9._+/-]", "-", plan.model).rstrip("/").split("/")[-1][:MAX_MODEL]
    features = plan.features if isinstance(plan, Plan) else None
    name = f"{model}-{plan.budget}" if features is None else f"{model}-c{features}"
    root = root or runs_root()
    return next(path for n in count(1) if not (path := root / (name if n == 1 else f"{name}-{n}")).exists())


ADDRESS = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([\w.-]+)(?:/(.*))?)?/?"
)
GGUF_NAME = re.compile(r"([^:@]+)(?:@([^:@]+))?:([^:@]+\.gguf)(?:@([^:@]+))?")


@dataclass(frozen=True)
class HubName:
    """A model of the Hub: its repository, a revision, and the file of its weights if these are GGUF."""

    repo_id: str
    revision: str | None = None
    file: str | None = None

    @staticmethod
    def of(name: str) -> HubName:
        """Read `org/name`, `org/name@revision`, `org/name:FILE.gguf` or `org/name:FILE.gguf@revision`."""
        if match := GGUF_NAME.fullmatch(name):
            return HubName(match[1], match[2] or match[4], match[3])
        repo_id, _, revision = name.partition("@")
        return HubName(repo_id, revision or None)

    def __str__(self) -> str:
        file, revision = (f":{self.file}" if self.file else ""), (f"@{self.revision}" if self.revision else "")
        return f"{self.repo_id}{file}{revision}"


def absolute_source(source: str) -> str:
    """Name a source of text so that it is found from any folder."""
    kind, _, name = source.partition(":")
    place, colon, options = (name, "", "") if kind == "file" else name.partition(":")
    return f"{kind}:{absolute_path(place)}{colon}{options}" if kind in ("file", "dataset") else source


def absolute_path(name: str) -> str:
    """Return the absolute path of a file or folder; return a name of neither unchanged."""
    path = os.path.expanduser(name)
    return os.path.abspath(path) if name and os.path.exists(path) else name


def id_of_address(name: str) -> str:
    """Turn the address of a model's page on the Hub into its id, with the revision and GGUF file in the address."""
    page = ADDRESS.fullmatch(name)
    if page is None:
        return name
    file = (page[3] or "").partition("?")[0]
    return str(HubName(page[1], page[2], file if file.endswith(".gguf") else None))
