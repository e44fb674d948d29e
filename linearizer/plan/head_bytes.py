"""The costs of attention: bytes of state, operations per token, and the length at which a student breaks even.

Keys and values of a cache are priced at two bytes a number (bf16), and so are sinks; of a state at two, or at 4 to 8
bits and a byte or two for the scale of each vector. The running state is priced at four (fp32).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linearizer.student.update_rules import UPDATE_RULES

CACHED = 2  # bytes of a cached number
BITS = (4, 5, 6, 8, 16)  # that a number in keys and values may have
SUMMED = 4  # bytes of a number in a running state
SINKS = 4  # tokens at the start of a text that most models rely on
TILE = 16  # features that a kernel computes at once, and the fewest of a head
BLOCK = 16  # tokens that leave a window at once, at least, if slots take them and the window has room
FEATURE_MAPS = ("clusters", "mlp", "prf", "performer", "dijiang", "hedgehog")


@dataclass(frozen=True)
class Layer:
    """The shape of one attention layer."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    native_window: int | None = None  # the teacher already bounds this layer: it is not changed
    reads: int | None = None  # the number of the layer whose keys and values it attends to: it has no KV heads itself
    readers: int = 0  # later layers that attend to its keys and values

    @property
    def all_queries(self) -> int:
        """The query heads that attend to its keys, of this layer and of others."""
        return self.query_heads * (1 + self.readers)


WITHOUT_ATTENTION = Layer(0, 0, 0, 0, native_window=0)  # a recurrent layer, a convolution, or only an MLP


@dataclass(frozen=True)
class Head:
    """The contents of one KV head of a student: an exact window, far-field features or slots, or its whole cache."""

    window: int = 0
    features: int = 0
    softmax: bool = False
    slots: int = 0  # tokens, each merged of several
    bits: int = 16  # of a number in keys and values
    memory: str = ""  # a rule (update_rules.py): `features` count its rows; none: features, log sums

    @property
    def block(self) -> int:
        """The number of tokens that are merged at once; more for many slots, since each merge costs slots².

        Half of a window stays exact: a head that attends to the previous token must not find it merged.
        """
        return min(max(1, self.window // 2), max(BLOCK, self.slots // 8))

    @property
    def in_brief(self) -> str:
        """The contents of the head without its sinks: a window of 16 tokens, or 16 + 48 slots, 4 bits."""
        bits = f", {self.bits} bits" if self.bits < 8 else ""
        if self.softmax:
            return f"softmax{bits}"
        rows = f"rows of {self.memory}" if self.memory else "features"
        far = [f"{count} {name}" for count, name in ((self.features, rows), (self.slots, "slots")) if count]
        near = [f"{self.window}" if far else f"{self.window} tokens"] if self.window else []
        return (" + ".join(near + far) or "nothing") + bits

    def to_config(self) -> dict[str, int | str]:
        """Return the entry of this head in a student's config."""
        named = {**vars(self), "block": self.block if self.slots else 0}
        return {name: x for name, x in named.items() if x and (name, x) != ("bits", 16)}


def token_bytes(layer: Layer, bits: int = 16) -> int:
    """Bytes of one token of one KV head in a cache, or in a state with this number of bits a number."""
    return vector_bytes(layer.key_dim, bits) + vector_bytes(layer.value_dim, bits)


def vector_bytes(numbers: int, bits: int) -> int:
    """Bytes of a key or a value: with 8 bits a number also an exponent, with fewer a scale of two bytes."""
    if bits == 16:
        return CACHED * numbers
    return numbers + 1 if bits == 8 else numbers * bits // 8 + 2


def feature_bytes(layer: Layer) -> int:
    """Bytes of one feature: a running mean of values and the logarithm of its weight."""
    return SUMMED * (layer.value_dim + 1)


def far_bytes(head: Head, layer: Layer) -> int:
    """Bytes of the features, or of the rows of a memory, of one head."""
    if not head.memory or not head.features:
        return head.features * feature_bytes(layer)
    group = layer.query_heads // layer.kv_heads
    return SUMMED * UPDATE_RULES[head.memory].numbers(head.features, layer.key_dim, layer.value_dim, group)


def slot_bytes(layer: Layer, bits: int = 16) -> int:
    """Bytes of one slot: a token, the weight it stands for, and how far that spreads; two bytes each with few bits."""
    return token_bytes(layer, bits) + (2 * SUMMED if bits >= 8 else SUMMED)


def cache_bytes(layers: Sequence[Layer], tokens: int) -> int:
    """Bytes of the teacher's KV cache in the layers that a student replaces."""
    return tokens * sum(layer.kv_heads * token_bytes(layer) for layer in layers if layer.native_window is None)


def head_bytes(head: Head, layer: Layer, sinks: int, length: int) -> int:
    """Bytes that one head holds once `length` tokens have been read."""
    if head.softmax:
        kept_twice = sinks * token_bytes(layer) if head.bits < 16 else 0
        return length * token_bytes(layer, head.bits) + kept_twice
    far = far_bytes(head, layer) + head.slots * slot_bytes(layer, head.bits)
    return sinks * token_bytes(layer) + head.window * token_bytes(layer, head.bits) + far


def state_bytes(heads: Sequence[Sequence[Head]], layers: Sequence[Layer], sinks: int, length: int) -> int:
    """Bytes that a student holds once `length` tokens have been read, in the layers that it replaces."""
    return sum(head_bytes(head, layer, sinks, length) for head, layer in pair_with_layers(heads, layers))


def cache_operations(layers: Sequence[Layer], length: int) -> int:
    """Multiplications and additions of the teacher's attention for one new token after `length` others."""
    replaced = [layer for layer in layers if layer.native_window is None]
    return sum(layer.all_queries * pair_operations(layer) * length for layer in replaced)


def state_operations(heads: Sequence[Sequence[Head]], layers: Sequence[Layer], sinks: int, length: int) -> int:
    """Multiplications and additions of a student's attention for one new token after `length` others."""
    return sum(head_operations(head, layer, sinks, length) for head, layer in pair_with_layers(heads, layers))


def head_operations(head: Head, layer: Layer, sinks: int, length: int) -> int:
    """Count the operations of one KV head and its queries; a feature map counts as one product, key_dim × features."""
    group = layer.all_queries // layer.kv_heads
    if head.softmax:
        return group * pair_operations(layer) * length
    feature = 2 * layer.key_dim + 2 * (layer.value_dim + 1)  # made from a vector, and read from or added to the state
    pair = pair_operations(layer)
    merging = pair * (head.slots + head.block) ** 2 // head.block if head.slots else 0  # of a block: all distances
    near = group * pair * (sinks + head.window + head.slots)
    return near + (group + 1) * feature * head.features + merging


def pair_operations(layer: Layer) -> int:
    """Count the operations of one query with one cached token: a score, and adding its value."""
    return 2 * (layer.key_dim + layer.value_dim)


def breakeven_tokens(heads: Sequence[Sequence[Head]], layers: Sequence[Layer], sinks: int) -> int | None:
    """Return the length from which on the teacher's cache is no smaller than the student's state; None: never."""
    fixed = state_bytes(heads, layers, sinks, 0)
    growth = cache_bytes(layers, 1) - (state_bytes(heads, layers, sinks, 1) - fixed)
    return find_breakeven(fixed, growth)


def breakeven_operations(heads: Sequence[Sequence[Head]], layers: Sequence[Layer], sinks: int) -> int | None:
    """Return the length from which on the teacher's attention is no cheaper per token; None: never."""
    fixed = state_operations(heads, layers, sinks, 0)
    growth = cache_operations(layers, 1) - (state_operations(heads, layers, sinks, 1) - fixed)
    return find_breakeven(fixed, growth)


def find_breakeven(fixed: int, growth: int) -> int | None:
    """Return the smallest n with growth · n ≥ fixed."""
    if fixed == 0:
        return 0
    return -(-fixed // growth) if growth > 0 else None


def pair_with_layers(heads: Sequence[Sequence[Head]], layers: Sequence[Layer]) -> Iterator[tuple[Head, Layer]]:
    """Pair every head with its layer."""
    for row, layer in zip(heads, layers, strict=True):
        for head in row:
            yield head, layer
