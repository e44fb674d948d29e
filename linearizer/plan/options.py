"""Options: dataclass fields that declare their limits and meaning, from which checks, `--help` and forms derive."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from types import GenericAlias, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from linearizer.errors import RequestError
from linearizer.plan.json_products import adapter_of, explained_faults

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LARGEST = 2**63 - 1


@dataclass(frozen=True)
class FieldLimits:
    """The facts about a field other than its name, type and default."""

    about: str = ""  # its meaning, with the unit
    default_text: str = ""  # for a default that is None or depends on other options
    least: float | None = None
    above: float | None = None  # a lower bound that is not allowed itself
    most: float | None = None
    choices: tuple[Any, ...] = ()
    former: tuple[Any, ...] = ()  # choices of stored products, which are not offered
    hidden: bool = False  # accepted, but not shown by `--help`: recipes decide it
    group: str = ""  # the title under which `--help` shows the option; none: it is not an option of a command
    error: type[RequestError] = RequestError  # raised for a value out of bounds


def option(default: Any, about: str = "", default_text: str = "", **limits: Any) -> Any:
    """Declare a field of a dataclass; `limits` are the other fields of FieldLimits."""
    return field(default=default, metadata={"limits": FieldLimits(about, default_text, **limits)})


@dataclass(frozen=True)
class Option:
    """A field of a dataclass as an option."""

    name: str
    kind: Any  # the type of the field
    default: Any
    limits: FieldLimits

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_optional(self) -> bool:
        return NoneType in get_args(self.kind)

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def value_kind(self) -> Any:
        """The type of a value, or of each value of a list."""
        return get_args(self.kind)[0] if self.is_list or self.is_optional else self.kind

    @property
    def help(self) -> str:
        """The meaning of the option, its choices and its default, in words."""
        shown = "" if self.default is False or self.default == () else self.usual
        default = self.limits.default_text or shown
        text = ": ".join(filter(None, (self.limits.about, ", ".join(map(str, self.limits.choices)))))
        return f"{text} (default: {default})" if default else text

    @property
    def usual(self) -> str:
        """The default in words; empty if there is none."""
        return self.limits.default_text or ("" if self.default is None else str(self.default))

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """The check of a value: its type, the choices, and the bounds; whole numbers have 63 bits."""
        from pydantic import Field

        bounds: dict[str, Any] = {"ge": self.limits.least, "gt": self.limits.above, "le": self.limits.most}
        if self.value_kind is int:
            bounds = {"ge": -LARGEST, "le": LARGEST} | {name: x for name, x in bounds.items() if x is not None}
        choices = (*self.limits.choices, *self.limits.former)
        kind: Any = Literal[choices] if self.limits.choices else Annotated[self.value_kind, Field(**bounds)]
        kind = GenericAlias(tuple, (kind, ...)) if self.is_list else kind
        return adapter_of(kind | None if self.is_optional else kind)

    def check(self, value: Any) -> None:
        """Refuse a value of another type or out of bounds."""
        with self.explained_faults():
            self.adapter.validate_python(value, strict=True)

    def parse(self, text: str) -> Any:
        """Read a value from text; commas separate the values of a list."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        with self.explained_faults():
            value = adapter_of(self.kind).validate_python(parts if self.is_list else text)
        self.check(value)
        return value

    def explained_faults(self) -> AbstractContextManager[None]:
        return explained_faults(self.name.replace("_", " "), self.limits.error)


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Describe the fields of a dataclass by their names; a field without limits takes every value of its type."""
    options, types = {}, get_type_hints(kind)
    for declared in fields(kind):
        of_type, limits = types[declared.name], declared.metadata.get("limits", FieldLimits())
        if get_origin(of_type) is Literal:
            limits = replace(limits, choices=get_args(of_type))
        default = None if declared.default is MISSING else declared.default
        options[declared.name] = Option(declared.name, of_type, default, limits)
    return options


def check_options(product: object) -> None:
    """Refuse a dataclass with a field of another type or out of bounds."""
    kind: Any = type(product)
    for declared in options_of(kind).values():
        declared.check(getattr(product, declared.name))


def write_options(product: object, usual: Mapping[str, Any]) -> list[str]:
    """Write the options of a dataclass that differ from usual values, else defaults, as the words of a command."""
    kind: Any = type(product)
    words = list[str]()
    for name, declared in options_of(kind).items():
        value, flag = getattr(product, name), declared.flag
        if value is not None and value != usual.get(name, declared.default):
            words += [flag, str(value)] if not isinstance(value, bool) else [flag if value else f"--no-{flag[2:]}"]
    return words


def differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Describe the values of `new` that differ from those of `old`."""
    return [f"{name} {value!r} instead of {old.get(name)!r}" for name, value in new.items() if value != old.get(name)]
