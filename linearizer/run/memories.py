"""Memories of fixed size beside features and slots: what they are called, and the bytes that they take.

The arithmetic of each is a Rule of the same name in runtime/matrix_rule.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_CELLS = 1024


@dataclass(frozen=True)
class Memory:
    """How many numbers a memory keeps for one KV head; `rows` are what a budget buys more or less of."""

    about: str
    columns: int = 0  # of a row, beside one for each number of a value
    matrices: int = 1
    moments: bool = False  # mean and variance of keys, and mean of values
    levels: bool = False  # a logarithm for each row
    squares: bool = False  # rows × rows besides
    keys: int = 0  # that are kept for a convolution
    holds_keys: bool = False  # in each row, beside the value
    is_wide: bool = False  # two rows from each product with a key

    def numbers(self, rows: int, key_dim: int, value_dim: int) -> int:
        """Count the fp32 numbers of one KV head."""
        columns = (
            value_dim + self.columns + (rows if self.squares else 0) + int(self.levels) + self.holds_keys * key_dim
        )
        return self.matrices * rows * columns + self.moments * (2 * key_dim + value_dim) + self.keys * key_dim

    def most_rows(self, key_dim: int) -> int:
        """Count the rows beyond which further ones would repeat them."""
        return MOST_CELLS if self.holds_keys else 2 * key_dim if self.is_wide else key_dim


MEMORIES: Mapping[str, Memory] = {
    "linear": Memory("sums of products, normalised when read"),
    "elu": Memory("linear attention with the map elu + 1", columns=1),
    "rfa": Memory("sines and cosines of random products", moments=True, is_wide=True),
    "cosformer": Memory("rectified products, weighted by distance", columns=1, is_wide=True),
    "nalaformer": Memory("powers of products by sign, the query's norm in the power", columns=1, is_wide=True),
    "mala": Memory("weights with a magnitude and an offset, which sum to one", columns=1, moments=True),
    "transnormer": Memory("linear attention with a norm in place of the denominator"),
    "cells": Memory("tokens shared among cells: mean keys, mean values, and how many", columns=1, holds_keys=True),
    "cells-gauss": Memory("cells whose mass is that of Gaussian keys", columns=1, moments=True, holds_keys=True),
    "lawcat": Memory("softmaxes of products, with a decay by token, keys convolved", columns=1, keys=3, is_wide=True),
    "retnet": Memory("one decay for a head"),
    "lightning": Memory("one decay for a head, keys and queries by silu"),
    "mamba2": Memory("a decay by token, keys convolved", keys=3),
    "gla": Memory("a decay by token and channel"),
    "liger": Memory("decays that the keys themselves give"),
    "hgrn2": Memory("what is not kept is written"),
    "lightnet": Memory("means over the past, weighted by keys", levels=True),
    "deltanet": Memory("erases what a key finds, then writes", moments=True),
    "deltanet-negative": Memory("the same, with eigenvalues down to -1", moments=True),
    "gdn": Memory("erases and writes, with a decay by token", moments=True),
    "kda": Memory("erases and writes, with a decay by token and channel", moments=True),
    "gdn2": Memory("the same, with gates of their own for what is erased and written", moments=True),
    "deltaproduct": Memory("two steps of erasing and writing a token", moments=True),
    "rwkv7": Memory("a step that erases and one that writes, with decays by channel", moments=True),
    "mesa": Memory("the least squares of all that was written", moments=True, squares=True),
    "mom": Memory("several memories that tokens are routed to, and a shared one", matrices=4, moments=True),
    "selective": Memory("gdn, with queries scaled by their place and norm, keys by their norm", moments=True),
}
