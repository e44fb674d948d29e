"""What would be published, and what was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preview:
    """What would be published, and where."""

    repo_id: str
    private: bool
    card: str
    files: tuple[tuple[str, int], ...]  # name, bytes
    bytes: int
    notes: tuple[str, ...] = ()  # what the user should know before publishing
    checked: bool = True  # whether the Hub was asked if it may be published there, which needs an account


@dataclass(frozen=True)
class Published:
    """What was published, at which revision, and the lines that load it."""

    repo_id: str
    revision: str
    url: str
    snippet: str
