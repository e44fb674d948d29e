"""Memories of fixed size beside features and slots: what they are called, and the bytes that they take.

The arithmetic of each is a Rule of the same name in student/matrix_rule.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_CELLS = 1024
KATHAROPOULOS = "Katharopoulos et al., Transformers are RNNs, ICML 2020, arXiv:2006.16236"


@dataclass(frozen=True)
class Memory:
    """How many numbers a memory keeps for one KV head; `rows` are what a budget buys more or less of."""

    about: str
    reference: str = ""  # none: that of the recipe of its name
    columns: int = 0  # of a row, beside one for each number of a value
    matrices: int = 1
    moments: bool = False  # mean and variance of keys, and mean of values
    levels: bool = False  # a logarithm for each row
    taps: int = 0  # tokens whose keys and queries are kept for a convolution
    holds_keys: bool = False  # in each row, beside the value
    is_wide: bool = False  # two rows from each product with a key
    is_positive: bool = False  # what a query reads is a mean of all tokens, by positive weights
    begins_like: str = ""  # the memory that it is until it is trained, because its own gates then stand still

    @property
    def origin(self) -> str:
        """Say what it is, with its reference."""
        return f"{self.about} ({self.reference})" if self.reference else self.about

    def numbers(self, rows: int, key_dim: int, value_dim: int, group: int) -> int:
        """Count the fp32 numbers of one KV head, which a group of so many query heads reads."""
        columns = value_dim + self.columns + int(self.levels) + self.holds_keys * key_dim
        kept = self.moments * (2 * key_dim + value_dim) + self.taps * (1 + group) * key_dim
        return self.matrices * rows * columns + kept

    def most_rows(self, key_dim: int) -> int:
        """Count the rows beyond which further rows would repeat them."""
        return MOST_CELLS if self.holds_keys else 2 * key_dim if self.is_wide else key_dim


MEMORIES: Mapping[str, Memory] = {
    "linear": Memory("sums of products, normalised when read, as TransNormer has it", KATHAROPOULOS),
    "elu": Memory("linear attention with the map elu + 1", KATHAROPOULOS, is_positive=True, columns=1),
    "nalaformer": Memory(
        "powers of products by sign, the query's norm in the power", is_positive=True, columns=1, is_wide=True
    ),
    "mala": Memory("weights with a magnitude and an offset, which sum to one", columns=1, moments=True),
    "cells": Memory(
        "tokens shared among cells: mean keys, mean values, and how many", is_positive=True, columns=1, holds_keys=True
    ),
    "lawcat": Memory(
        "softmaxes of products, decays by token, keys and queries convolved",
        is_positive=True,
        columns=1,
        taps=3,
        is_wide=True,
    ),
    "retnet": Memory("one decay for a head, as Lightning Attention has it"),
    "mamba2": Memory(
        "a decay by token, keys and queries convolved",
        "Dao and Gu, Transformers are SSMs, ICML 2024, arXiv:2405.21060",
        taps=3,
    ),
    "gla": Memory("a decay by token and channel", begins_like="retnet"),
    "liger": Memory("decays that the keys themselves give"),
    "hgrn2": Memory(
        "what is not kept is written",
        "Qin et al., HGRN2: Gated Linear RNNs with State Expansion, COLM 2024, arXiv:2404.07904",
    ),
    "lightnet": Memory(
        "means over the past, weighted by keys",
        "Qin et al., You Only Scan Once (LightNet), 2024, arXiv:2405.21022",
        levels=True,
    ),
    "deltanet": Memory("erases what a key finds, then writes", moments=True),
    "gdn": Memory("erases and writes, with a decay by token", moments=True),
    "kda": Memory("erases and writes, with a decay by token and channel", moments=True, begins_like="gdn"),
    "gdn2": Memory(
        "the same, with gates of their own for what is erased and written",
        "Gated DeltaNet-2, 2026, arXiv:2605.22791",
        moments=True,
        begins_like="gdn",
    ),
    "rwkv7": Memory(
        "a step that erases and one that writes, with decays by channel",
        "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025, arXiv:2503.14456",
        moments=True,
    ),
    "mom": Memory("several memories that tokens are routed to, and a shared one", matrices=4, moments=True),
}


def beginning(name: str) -> str:
    """Say which other memory the memory of a name is until it is trained; nothing where it is like no other."""
    like = MEMORIES[name].begins_like if name in MEMORIES else ""
    return f"until it is trained the same as {like}" if like else ""
