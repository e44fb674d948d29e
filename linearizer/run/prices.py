"""."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from linearizer.errors import RequestError
from linearizer.run.head_bytes import Head

SMALLEST = 4  # tokens of the least window that is priced


@dataclass(frozen=True)
class Prices:
    """KL in nats per token when one KV head alone is cut to an option; a head left softmax costs nothing."""

    sinks: int
    options: tuple[Head, ...]
    divergences: tuple[tuple[tuple[float, ...], ...], ...]  # [layer][kv head][option]; no heads in a native layer

    def of(self, kinds: Callable[[Head], bool]) -> Prices:
        """Keep some of the options."""
        kept = [index for index, option in enumerate(self.options) if kinds(option)]
        found = tuple(tuple(tuple(row[index] for index in kept) for row in layer) for layer in self.divergences)
        return Prices(self.sinks, tuple(self.options[index] for index in kept), found)

    def to_json(self) -> str:
        """Write the prices as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Prices:
        """Read prices that `to_json` wrote."""
        try:
            read = json.loads(text)
            found = tuple(tuple(tuple(row) for row in layer) for layer in read["divergences"])
            return Prices(read["sinks"], tuple(Head(**option) for option in read["options"]), found)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the prices cannot be read ({error}): measure them again") from error
