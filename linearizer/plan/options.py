"""Options: the fields of a dataclass say what they may be and mean; checks, `--help` and forms derive from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin

from linearizer.errors import RequestError
from linearizer.plan.json_products import field_types, in_words, is_optional, quote, read_value, without_none

TRUTH = {"true": True, "false": False}  # as text


@dataclass(frozen=True)
class FieldLimits:
    """The facts about a field beside its name, type and default."""

    about: str = ""  # its meaning, with the unit
    default_text: str = ""  # for a default that is None or depends on other options
    least: float | None = None
    above: float | None = None  # a lower bound that is not allowed itself
    most: float | None = None
    choices: tuple[Any, ...] = ()
    group: str = ""  # the title under which `--help` shows the option; none: it is no option of a command
    error: type[RequestError] = RequestError  # what a value out of bounds raises


def option(default: Any, *about: str, **limits: Any) -> Any:
    """Declare a field of a dataclass; the rest are the fields of FieldLimits in their order."""
    return field(default=default, metadata={"limits": FieldLimits(*about, **limits)})


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
    def is_list(self) -> bool:
        return get_origin(without_none(self.kind)) is tuple

    @property
    def value_kind(self) -> Any:
        """Give the type of a value; of each value where the option is a list."""
        kind = without_none(self.kind)
        return get_args(kind)[0] if self.is_list else kind

    @property
    def help(self) -> str:
        """Say what the option means, which choices there are, and what it is where it is not given."""
        shows_default = self.default is not None and self.default is not False and self.default != ()
        default = self.limits.default_text or (str(self.default) if shows_default else "")
        text = ": ".join(filter(None, (self.limits.about, ", ".join(map(str, self.limits.choices)))))
        return f"{text} (default: {default})" if default else text

    @property
    def usual(self) -> str:
        """Say in words what the option is where it is not given; nothing where it is then left out."""
        return self.limits.default_text or ("" if self.default is None else str(self.default))

    @property
    def allowed(self) -> str:
        """Say which values are allowed."""
        bounds = (("above", self.limits.above), ("at least", self.limits.least), ("at most", self.limits.most))
        limits = " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
        kind = ("a list, each " if self.is_list else "") + in_words(self.value_kind)
        return kind + (f", {limits}" if limits else "") + (", or leave it out" if is_optional(self.kind) else "")

    def check(self, value: Any) -> None:
        """Refuse a value that is of another kind or out of bounds."""
        try:
            read_value(self.kind, value, self.name)
        except RequestError as error:
            raise self.refusal(value) from error
        for each in value if self.is_list else () if value is None else (value,):
            if not self.is_within(each):
                raise self.refusal(each)

    def is_within(self, value: Any) -> bool:
        """Tell whether a value is a choice and within the bounds and 63 bits; NaN is in no bounds."""
        if isinstance(value, int) and abs(value) >= 2**63:
            return False
        least, above, most = self.limits.least, self.limits.above, self.limits.most
        return (
            (not self.limits.choices or value in self.limits.choices)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
        )

    def refusal(self, value: Any) -> RequestError:
        """Say which value was received and which are allowed."""
        received, choices = f"{self.name.replace('_', ' ')} {quote(value)}", list(map(str, self.limits.choices))
        if not choices or isinstance(value, (list, tuple)) or (self.is_list and not isinstance(value, self.value_kind)):
            return self.limits.error(f"{received} is not allowed: give {self.allowed}")
        near = get_close_matches(str(value), choices, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return self.limits.error(f"{received} is none of {', '.join(choices)}{meant}")

    def parse(self, text: str) -> Any:
        """Read a value that was written as text; commas stand between the values of a list."""
        if self.value_kind is bool:
            if text not in TRUTH:
                raise self.refusal(text)
            return TRUTH[text]
        parts = [part.strip() for part in text.split(",") if part.strip()] if self.is_list else [text]
        try:
            values = tuple(self.value_kind(part) if self.value_kind in (int, float) else part for part in parts)
        except ValueError as error:
            raise self.refusal(text) from error
        value = values if self.is_list else values[0]
        self.check(value)
        return value


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Describe the fields of a dataclass by their names; a field that says nothing takes every value of its type."""
    options = {}
    for declared in fields(kind):
        of_type, limits = field_types(kind)[declared.name], declared.metadata.get("limits", FieldLimits())
        if get_origin(of_type) is Literal:
            limits = replace(limits, choices=get_args(of_type))
        default = None if declared.default is MISSING else declared.default
        options[declared.name] = Option(declared.name, of_type, default, limits)
    return options


def check_options(product: object) -> None:
    """Refuse a dataclass with a field that is of another kind or out of bounds."""
    kind: Any = type(product)
    for each in options_of(kind).values():
        each.check(getattr(product, each.name))


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name the values of `mine` that are others in `other`."""
    return [f"{name} {mine[name]!r} instead of {other.get(name)!r}" for name in mine if mine[name] != other.get(name)]
