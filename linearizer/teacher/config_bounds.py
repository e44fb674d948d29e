"""Bounds a stranger's config before anything is built from it: code that reads it loops as often as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from linearizer.errors import UnsupportedModel

MAX_BYTES = 2**24  # of a config: those of published models have some kilobytes
MAX_LAYERS, MAX_EXPERTS, MAX_LABELS = 512, 4096, 2**16
MAX_ENTRIES = 4096  # of a list: code may build a part for each
MAX_PIXELS = 2**12  # on a side: tables of positions are as large as their square
MAX_PARTS = 2**18  # layers × experts, which some models have as modules
LAYERS = re.compile(r"(^|_)(n_layer|(layers|depths?|blocks))$")
KINDS = re.compile(r"((layer|block|attention)\w*types?|pattern)$")  # of layers, in their order, or with numbers
STAGES = re.compile(r"(^|_)(depths|numb_of_layers)$")
EXPERTS, LABELS = re.compile(r"experts$"), re.compile(r"^num_labels$")
PIXELS, ENTRIES = re.compile(r"(^|_)image_size$"), re.compile(r" entries$")
BOUNDS = (
    (LAYERS, "layers", MAX_LAYERS),
    (EXPERTS, "experts", MAX_EXPERTS),
    (LABELS, "labels", MAX_LABELS),
    (PIXELS, "pixels a side", MAX_PIXELS),
    (ENTRIES, "entries in a list", MAX_ENTRIES),
)


def check_counts(name: str, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config with more parts than any model has, or more layers than its files have tensors; 0: unknown."""
    most = dict.fromkeys((kind for _, kind, _ in BOUNDS), 0)
    for key, count in list_counts(config):
        for pattern, kind, bound in BOUNDS:
            if pattern.search(key):
                check_count(name, key, count, kind, bound)
                most[kind] = max(most[kind], count)
        if key == "num_hidden_layers" and tensors and count > tensors:
            raise UnsupportedModel(
                f"{name!r} has a config.json with {count:,} layers, and its files hold {tensors:,} tensors: use the "
                "config that belongs to its weights"
            )
    check_count(name, "layers times experts", most["layers"] * most["experts"], "parts", MAX_PARTS)


def check_count(name: str, key: str, count: int, kind: str, bound: int) -> None:
    if count > bound:
        raise UnsupportedModel(
            f"{name!r} has a config.json with {count:,} {kind} ({key}), and at most {bound:,} are served: repair that "
            "file, or name another model"
        )


def list_counts(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """List the whole numbers of a config by the names that they have there, in sections and lists, too.

    Lists of layers have a number, too, and layers of several stages a sum.
    """
    key = "layers" if KINDS.search(key) else key
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from list_counts(item, str(name))
    elif isinstance(value, list):
        counts = [pair for item in value for pair in list_counts(item, key)]
        yield from counts
        if STAGES.search(key):
            yield key, sum(count for _, count in counts)
        yield key if LAYERS.search(key) else f"{key} entries", len(value)
    elif isinstance(value, str) and key == "layers":
        yield key, len(value)
    elif isinstance(value, int | float) and value == value:
        yield key, int(min(max(value, 0), 2**63))
