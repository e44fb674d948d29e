"""Frozen dataclasses as JSON: written as plain values, and read back by pydantic, by the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from linearizer.errors import RequestError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Extra = Literal["forbid", "ignore"]
P = TypeVar("P", bound="JsonProduct")
MAX_SHOWN = 40  # characters of a wrong value that a message repeats
FAULTS = {  # by pydantic's names
    "json_invalid": "is not JSON: {error}",
    "missing": "is missing",
    "unexpected_keyword_argument": "is unknown: leave it out",
}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; text that is nested too deeply raises ValueError, like any other invalid text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    if not isinstance(content := parse_json(text), dict):
        raise ValueError("it is not an object")
    return content


class JsonProduct:
    """A frozen dataclass of numbers, text, tuples, dictionaries and other dataclasses, which is written as JSON."""

    # no annotations: code that reads the types of the fields, such as Gradio's, would also read these
    json_indent = None  # type: int | None  # spaces a level, where people read the file

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=self.json_indent)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[P], text: str) -> P:
        """Read the output of `to_json`; an error names the field that is missing, unknown or of another type."""
        return read_json(cls, text)


def read_plain(kind: Any, plain: Mapping[str, Any], extra: Extra = "forbid") -> Any:
    """Make a dataclass from plain values by their names, with lists as tuples."""
    return read_json(kind, json.dumps(plain), extra)


def read_json(kind: Any, text: str, extra: Extra = "forbid") -> Any:
    """Read a value of a type from JSON; `extra` says whether unknown names are refused or ignored."""
    with explained_faults():
        return adapter_of(kind).validate_json(text, strict=True, extra=extra)


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Make what checks the values of a type; pydantic takes a fifth of a second to import."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@contextmanager
def explained_faults(name: str = "", refusal: type[RequestError] = RequestError) -> Iterator[None]:
    """Turn pydantic's errors into a sentence: the first wrong value, and what it should be."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        fault = error.errors()[0]
        place = name + "".join(f".{key}" if str(key).isidentifier() else f"[{quote(key)}]" for key in fault["loc"])
        if fault["type"] in FAULTS:
            wrong = FAULTS[fault["type"]].format(**fault.get("ctx", {}))
        else:
            rule = fault["msg"].replace("Input", "it", 1).partition(", unable to parse")[0]  # which adds nothing
            wrong = f"{quote(fault['input'])} is not allowed: {rule}"
        raise refusal(f"{place.removeprefix('.') or 'it'} {wrong}") from error


def quote(value: object) -> str:
    """Write a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
