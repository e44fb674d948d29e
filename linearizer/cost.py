"""What attention costs: bytes of state, operations per token, and the length at which a student breaks even.

Keys and values are priced at two bytes a number (a cache is kept in bf16), the running state at four (fp32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CACHED = 2  # bytes of a cached number
SUMMED = 4  # bytes of a number in a running state


@dataclass(frozen=True)
class Layer:
    """The shape of one attention layer."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    native_window: int | None = None  # the teacher already bounds this layer: it stays as it is


@dataclass(frozen=True)
class Head:
    """What one KV head of a student holds: an exact window, far-field features, or its whole cache."""

    window: int = 0
    features: int = 0
    softmax: bool = False


def token_bytes(layer: Layer) -> int:
    """Bytes that one token of one KV head takes in a cache."""
    return CACHED * (layer.key_dim + layer.value_dim)


def feature_bytes(layer: Layer) -> int:
    """Bytes of one feature: a running mean of values and the logarithm of its weight."""
    return SUMMED * (layer.value_dim + 1)


def cache_bytes(layers: Sequence[Layer], tokens: int) -> int:
    """Bytes of the teacher's KV cache in the layers that a student replaces."""
    return tokens * sum(layer.kv_heads * token_bytes(layer) for layer in layers if layer.native_window is None)


def head_bytes(head: Head, layer: Layer, sinks: int, length: int) -> int:
    """Bytes that one head holds once `length` tokens have been read."""
    if head.softmax:
        return length * token_bytes(layer)
    return (sinks + head.window) * token_bytes(layer) + head.features * feature_bytes(layer)
