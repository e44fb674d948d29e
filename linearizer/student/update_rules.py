"""The update rules of memories from papers: what each does, and how many numbers it stores for a KV head.

A memory is a matrix S: every token that leaves the window decays it, erases from it and writes to it; matrix_rule.py
has the arithmetic. This file imports nothing, so that plans can be made without PyTorch.

    S <- Diag(a) S;   S <- S + k (w - e'S);   a query reads q'S, once the token that leaves its window is written.

A reading is one vector and its mass in the softmax over what a row sees:
  gauss  log n + q·mean + ½ Σ (variance · q²) + c, of the n far keys: their exact mass if they are Gaussian. The mean of
         the values is stored, too: the matrix stores how values differ from it
  sum    the feature map's denominator, stored as one more column of the matrix
  share  a share of what the row sees exactly
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateRule:
    """One member of the family."""

    map: str = "unit"  # makes rows from keys and queries
    decay: str = ""  # fixed, scalar, channel: by gates; key: by the key; complement: by what is not written
    erase: str = ""  # "": nothing; scalar or channel: what the key finds; removal: in a separate step before writing
    mass: str = "gauss"
    read: str = ""  # norm: of unit norm; mala
    memories: int = 1  # to route to; if several, every token also uses a shared one
    taps: int = 1  # of causal convolutions over keys and over queries

    @property
    def steps(self) -> int:
        """How many times a token erases and writes, each with its key."""
        return 2 if self.erase == "removal" else 1

    @property
    def is_wide(self) -> bool:
        """Whether each product with a key makes two rows."""
        return self.map in ("signs", "both")

    @property
    def has_moments(self) -> bool:
        """Whether the state has mean and variance of keys, and the mean of values."""
        return self.mass == "gauss"

    @property
    def matrices(self) -> int:
        return 1 if self.memories == 1 else self.memories + 1

    def columns(self, value_dim: int) -> int:
        """Count the numbers of a row."""
        return value_dim + int(self.mass == "sum" or self.read == "mala")

    def numbers(self, rows: int, key_dim: int, value_dim: int, group: int) -> int:
        """Count the fp32 numbers of one KV head, read by `group` query heads."""
        vectors = self.has_moments * (2 * key_dim + value_dim) + (self.taps - 1) * (1 + group) * key_dim
        return self.matrices * rows * self.columns(value_dim) + vectors

    def most_rows(self, key_dim: int) -> int:
        """Return the number of rows beyond which further ones would repeat them."""
        return 2 * key_dim if self.is_wide else key_dim


UPDATE_RULES: Mapping[str, UpdateRule] = {  # plan/rule_papers.py names the papers
    "linear": UpdateRule(map="plain", mass="share", read="norm"),
    "elu": UpdateRule(map="elu", mass="sum"),
    "nalaformer": UpdateRule(map="signs", mass="sum"),
    "mala": UpdateRule(map="elu", read="mala"),
    "lawcat": UpdateRule(map="both", decay="scalar", mass="sum", taps=4),
    "retnet": UpdateRule(map="plain", decay="fixed", mass="share", read="norm"),
    "mamba2": UpdateRule(map="plain", decay="scalar", mass="share", taps=4),
    "gla": UpdateRule(map="plain", decay="channel", mass="share", read="norm"),
    "liger": UpdateRule(map="softmax", decay="key", mass="share"),
    "hgrn2": UpdateRule(map="plain", decay="complement", mass="share"),
    "deltanet": UpdateRule(erase="scalar"),
    "gdn": UpdateRule(decay="scalar", erase="scalar"),
    "kda": UpdateRule(decay="channel", erase="scalar"),
    "gdn2": UpdateRule(decay="channel", erase="channel"),
    "rwkv7": UpdateRule(decay="channel", erase="removal"),
    "mom": UpdateRule(decay="scalar", erase="scalar", memories=3),
}
