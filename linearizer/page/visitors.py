"""The runs of a visitor: on your own machine all runs; on a Space the runs in a folder that nobody else can guess.

A name that a browser sends is the name of one folder, and never leads out of the visitor's own. All visitors also see a
finished example that comes with the package: a run of a model of the Hub without its weights.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from linearizer.errors import RequestError
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.json_products import quote
from linearizer.plan.plan import Plan
from linearizer.run.files import find_carried
from linearizer.run.folder import Run
from linearizer.run.names import fresh_folder, runs_root
from linearizer.workers import control
from linearizer.workers.control import Status

RUN_NAME = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9._@+-]{0,199}")
MIN_SECRET_CHARACTERS = 16
EXAMPLE_NAME = "example-run"  # of its folder, too


def on_space() -> bool:
    """Whether this is a Space, where anybody may visit."""
    return bool(os.environ.get("SPACE_ID"))


def signs_in() -> bool:
    """Whether visitors can sign in: on a Space with an OAuth application of the Hub."""
    return on_space() and bool(os.environ.get("OAUTH_CLIENT_ID"))


def example_folder() -> Path:
    return find_carried(f"assets/{EXAMPLE_NAME}")


def is_example(run: Run) -> bool:
    return run.folder == example_folder()


@dataclass(frozen=True)
class Visitor:
    """A visitor of the page: the folder of their runs, and their own token."""

    folder: Path | None  # None: a visitor of a Space without account or secret
    token: str | None = None
    name: str | None = None  # of their account, where they signed in
    earlier: Path | None = None  # the folder of the runs that they began before they signed in

    def __repr__(self) -> str:
        return f"Visitor({self.name!r})"

    @property
    def home(self) -> Path:
        """The folder of this visitor's runs."""
        if self.folder is None:
            raise RequestError(
                "this Space does not know you: sign in, or send a secret of your own of at least "
                f"{MIN_SECRET_CHARACTERS} characters, with which you find your runs again"
            )
        return self.folder

    @property
    def homes(self) -> list[Path]:
        """The folders of all of this visitor's runs."""
        return [self.home, *([self.earlier] if self.earlier else [])]

    def runs(self, newest: int | None = None) -> list[Status]:
        """Return the status of all of this visitor's runs, or of the newest; the newest first."""
        found = [status for home in self.homes for status in control.runs_in(home, newest)]
        return sorted(found, key=lambda status: status.begun, reverse=True)[:newest]

    def find_run(self, name: str) -> Run:
        """Open one of this visitor's runs, or the example, to read it."""
        if name == EXAMPLE_NAME and (self.folder is None or not (self.home / name).exists()):
            return Run(example_folder())
        if isinstance(name, str) and RUN_NAME.fullmatch(name):
            for run in (Run(home / name) for home in self.homes):
                if not run.folder.is_symlink() and (run.folder / run.plan_file).is_file():
                    return run
        raise RequestError(
            f"{quote(name)} is not one of your runs, or was renamed or deleted: choose one that `Runs` lists"
        )

    def find_own_run(self, name: str) -> Run:
        """Open one of this visitor's runs, to change it."""
        if is_example(run := self.find_run(name)):
            raise RequestError(
                "this is the example that comes with Linearizer, and cannot be changed: start a run of your own"
            )
        return run

    def fresh_folder(self, plan: Plan | EncoderPlan) -> Path:
        """Choose the folder of a new run; on a Space nobody can guess its name."""
        home = self.home
        if on_space():
            return home / f"r{secrets.token_urlsafe(16)}"
        return fresh_folder(plan, home)


def find_visitor(account: str | None = None, token: str | None = None, secret: str = "") -> Visitor:
    """Identify a visitor by the account, or else by the secret that their browser keeps."""
    root = runs_root().absolute()
    if not on_space():
        return Visitor(root, token)
    is_known = isinstance(secret, str) and len(secret) >= MIN_SECRET_CHARACTERS
    without_account = root / hash_identity(f"secret {secret}") if is_known else None
    if account:
        return Visitor(root / hash_identity(f"account {account}"), token, account, without_account)
    return Visitor(without_account)


def check_name(name: str) -> None:
    """Refuse a text that cannot be the name of a run."""
    if not RUN_NAME.fullmatch(name) or name.startswith("-") or name == EXAMPLE_NAME:
        raise RequestError(
            f"{quote(name)} cannot be the name of a run: take up to 200 letters, digits and ._@+-, beginning with "
            f"a letter or a digit, and not {EXAMPLE_NAME!r}"
        )


def hash_identity(identity: str) -> str:
    """Return a name for a visitor's folder that does not reveal who the visitor is."""
    return hashlib.sha256(identity.encode()).hexdigest()[:40]
