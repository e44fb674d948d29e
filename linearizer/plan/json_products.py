"""Frozen dataclasses as JSON: written as plain values, and read back by the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from linearizer.errors import RequestError

P = TypeVar("P", bound="JsonProduct")
MAX_SHOWN = 40  # characters of a wrong value that a message repeats
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a dictionary"}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; text that is nested too deeply raises ValueError, as any other that cannot be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    if not isinstance(content := parse_json(text), dict):
        raise ValueError("it is no object")
    return content


class JsonProduct:
    """A frozen dataclass of numbers, text, tuples, dictionaries and other dataclasses, which is written as JSON."""

    # no annotations: what reads the types of the fields, as Gradio does, would read these, too
    json_indent = None  # type: int | None  # spaces a level, where people read the file
    json_remedy = "start a new run"  # where the JSON cannot be read

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=self.json_indent)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[P], text: str) -> P:
        """Read what `to_json` wrote; an error names the field that is missing, unknown or of another kind."""
        try:
            return read_value(cls, parse_json(text), "it")
        except (ValueError, RequestError) as error:
            raise RequestError(f"the {cls.__name__.lower()} cannot be read ({error}): {cls.json_remedy}") from error


@cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Give the type of every field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def read_value(kind: Any, value: Any, name: str) -> Any:
    """Give a plain value the type of a field, lists as tuples; `name` says in messages whose value it is."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return read_fields(kind, value, "" if name == "it" else f"{name}.")
    if origin in (Union, UnionType):
        return None if value is None else read_value(without_none(kind), value, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(read_value(arguments[0], each, f"{name}[{place}]") for place, each in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: read_value(arguments[1], each, f"{name}.{key}") for key, each in value.items()}
    if kind is Any or (origin is Literal and value in arguments) or (isinstance(kind, type) and is_a(kind, value)):
        return value
    raise RequestError(f"{name} {quote(value)} is not allowed: give {in_words(kind)}")


def read_fields(kind: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
    """Make a dataclass of plain values by their names."""
    types = field_types(kind)
    check_names(kind, given)
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [prefix + name for name in needed if name not in given]:
        raise RequestError(f"{', '.join(missing)} is missing")
    return kind(**{name: read_value(types[name], value, prefix + name) for name, value in given.items()})


def check_names(kind: Any, given: Iterable[str]) -> None:
    """Refuse names that no field has."""
    if unknown := sorted(set(given) - set(field_types(kind))):
        raise RequestError(f"{', '.join(unknown)} is unknown: there are {', '.join(sorted(field_types(kind)))}")


def is_a(kind: type, value: object) -> bool:
    """Tell whether a value is of a kind; a whole number may stand for a number, and truth for neither."""
    kinds = (int, float) if kind is float else (kind,)
    return isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))


def without_none(kind: Any) -> Any:
    """Give the type of a field that may be None where it is not."""
    kinds = [each for each in get_args(kind) if each is not NoneType] if is_optional(kind) else [kind]
    assert len(kinds) == 1, f"{kind} is read in no single way"
    return kinds[0]


def is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def in_words(kind: Any) -> str:
    """Say what a field takes."""
    kind = without_none(kind)
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return WORDS.get(get_origin(kind) or kind, "a dictionary")


def quote(value: object) -> str:
    """Repeat a value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
