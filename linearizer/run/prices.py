"""Prices of heads: the kl that each KV head costs the model when it alone holds an option."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from linearizer.errors import RequestError
from linearizer.run.head_bytes import Head

SMALLEST = 4  # tokens of the smallest window that is priced


@dataclass(frozen=True)
class Prices:
    """The kl in nats per token when one KV head alone holds an option; a head left softmax costs none."""

    sinks: int
    options: tuple[Head, ...]
    kl: tuple[tuple[tuple[float, ...], ...], ...]  # [layer][KV head][option]; no heads in a native layer

    def of_options(self, is_wanted: Callable[[Head], bool]) -> Prices:
        """Keep the options that are wanted."""
        kept = [index for index, option in enumerate(self.options) if is_wanted(option)]
        kl = tuple(tuple(tuple(row[index] for index in kept) for row in layer) for layer in self.kl)
        return Prices(self.sinks, tuple(self.options[index] for index in kept), kl)

    def to_json(self) -> str:
        """Write the prices as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Prices:
        """Read prices that `to_json` wrote."""
        try:
            fields = json.loads(text)
            kl = tuple(tuple(tuple(row) for row in layer) for layer in fields["kl"])
            return Prices(fields["sinks"], tuple(Head(**option) for option in fields["options"]), kl)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the prices cannot be read ({error}): measure them again") from error
