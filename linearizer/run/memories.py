"""Memories of fixed size beside features and slots: what they are called, and the bytes that they take.

The arithmetic of each is a Rule of the same name in runtime/matrix_rule.py.
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
    squares: bool = False  # rows × rows besides
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
        columns = (
            value_dim + self.columns + (rows if self.squares else 0) + int(self.levels) + self.holds_keys * key_dim
        )
        kept = self.moments * (2 * key_dim + value_dim) + self.taps * (1 + group) * key_dim
        return self.matrices * rows * columns + kept

    def most_rows(self, key_dim: int) -> int:
        """Count the rows beyond which further rows would repeat them."""
        return MOST_CELLS if self.holds_keys else 2 * key_dim if self.is_wide else key_dim


MEMORIES: Mapping[str, Memory] = {
    "linear": Memory("sums of products, normalised when read", KATHAROPOULOS),
    "elu": Memory("linear attention with the map elu + 1", KATHAROPOULOS, is_positive=True, columns=1),
    "rfa": Memory(
        "sines and cosines of random products",
        "Peng et al., Random Feature Attention, ICLR 2021, arXiv:2103.02143",
        moments=True,
        is_wide=True,
    ),
    "cosformer": Memory(
        "rectified products, weighted by distance",
        "Qin et al., cosFormer: Rethinking Softmax in Attention, ICLR 2022, arXiv:2202.08791",
        columns=1,
        is_wide=True,
    ),
    "nalaformer": Memory(
        "powers of products by sign, the query's norm in the power", is_positive=True, columns=1, is_wide=True
    ),
    "mala": Memory("weights with a magnitude and an offset, which sum to one", columns=1, moments=True),
    "transnormer": Memory(
        "linear attention with a norm in place of the denominator",
        "Qin et al., The Devil in Linear Transformer, EMNLP 2022, arXiv:2210.10340",
    ),
    "cells": Memory(
        "tokens shared among cells: mean keys, mean values, and how many", is_positive=True, columns=1, holds_keys=True
    ),
    "cells-gauss": Memory(
        "cells whose mass is that of Gaussian keys", "ours", columns=1, moments=True, holds_keys=True
    ),
    "lawcat": Memory(
        "softmaxes of products, decays by token, keys and queries convolved",
        is_positive=True,
        columns=1,
        taps=3,
        is_wide=True,
    ),
    "retnet": Memory("one decay for a head"),
    "lightning": Memory(
        "one decay for a head, keys and queries by silu", "Qin et al., Lightning Attention-2, 2024, arXiv:2401.04658"
    ),
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
    "deltanet-negative": Memory(
        "the same, with eigenvalues down to -1",
        "Grazzi et al., State-Tracking in Linear RNNs Through Negative Eigenvalues, ICLR 2025, arXiv:2411.12537",
        moments=True,
        begins_like="deltanet",
    ),
    "gdn": Memory("erases and writes, with a decay by token", moments=True),
    "kda": Memory("erases and writes, with a decay by token and channel", moments=True, begins_like="gdn"),
    "gdn2": Memory(
        "the same, with gates of their own for what is erased and written",
        "Gated DeltaNet-2, 2026, arXiv:2605.22791",
        moments=True,
        begins_like="gdn",
    ),
    "deltaproduct": Memory(
        "two steps of erasing and writing a token",
        "Siems et al., DeltaProduct: State-Tracking via Householder Products, 2025, arXiv:2502.10297",
        moments=True,
    ),
    "rwkv7": Memory(
        "a step that erases and one that writes, with decays by channel",
        "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025, arXiv:2503.14456",
        moments=True,
    ),
    "mesa": Memory(
        "the least squares of all that was written",
        "von Oswald et al., MesaNet: Locally Optimal Test-Time Training, 2025, arXiv:2506.05233",
        moments=True,
        squares=True,
    ),
    "mom": Memory("several memories that tokens are routed to, and a shared one", matrices=4, moments=True),
    "mom-cells": Memory(
        "cells in several memories that tokens are routed to, and a shared one; read by their masses",
        "after Du et al., MoM: Linear Sequence Modeling with Mixture-of-Memories, 2025, arXiv:2502.13685",
        matrices=4,
        is_positive=True,
        columns=1,
        holds_keys=True,
    ),
    "selective": Memory(
        "gdn, with queries scaled by their place and norm, keys by their norm",
        "after Zhang et al., Selective Attention, NeurIPS 2024, arXiv:2411.12892",
        moments=True,
        begins_like="gdn",
    ),
}


def beginning(name: str) -> str:
    """Say which other memory the memory of a name is until it is trained; nothing where it is like no other."""
    like = MEMORIES[name].begins_like if name in MEMORIES else ""
    return f"until it is trained the same as {like}" if like else ""
