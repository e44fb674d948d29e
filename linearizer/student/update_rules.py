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

KATHAROPOULOS = "Katharopoulos et al., Transformers are RNNs, ICML 2020, arXiv:2006.16236"


@dataclass(frozen=True)
class UpdateRule:
    """One member of the family."""

    label: str
    about: str
    reference: str
    map: str = "unit"  # makes rows from keys and queries
    decay: str = ""  # fixed, scalar, channel: by gates; key: by the key; complement: by what is not written
    erase: str = ""  # "": nothing; scalar or channel: what the key finds; removal: in a separate step before writing
    mass: str = "gauss"
    read: str = ""  # norm: of unit norm; mala
    memories: int = 1  # to route to; if several, every token also uses a shared one
    taps: int = 1  # of causal convolutions over keys and over queries
    share: float = -2.0  # the logarithm of the far share before training, if the mass is a share
    begins_like: str = ""  # the rule that it equals before training, while tokens do not change its gates

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


UPDATE_RULES: Mapping[str, UpdateRule] = {
    "linear": UpdateRule(
        "linear attention",
        "sums of products, normalised when read, as TransNormer has it",
        KATHAROPOULOS,
        map="plain",
        mass="share",
        read="norm",
    ),
    "elu": UpdateRule("linear attention, elu + 1", "sums of products of elu + 1", KATHAROPOULOS, map="elu", mass="sum"),
    "nalaformer": UpdateRule(
        "NaLaFormer",
        "powers of products by their signs, with the query's norm in the power",
        "Meng et al., NaLaFormer: Norm-Aware Linear Attention for Transformer Models, 2025, arXiv:2506.21137",
        map="signs",
        mass="sum",
    ),
    "mala": UpdateRule(
        "MALA",
        "linear attention whose weights have a magnitude and an offset and sum to one",
        "Fan et al., Rectifying Magnitude Neglect in Linear Attention, ICCV 2025, arXiv:2507.00698",
        map="elu",
        read="mala",
    ),
    "lawcat": UpdateRule(
        "LAWCAT",
        "normalised sums with a decay by token, keys and queries convolved over four tokens",
        "Liu et al., LAWCAT: Efficient Distillation from Quadratic to Linear Attention with Convolution across Tokens "
        "for Long Context Modeling, Findings of EMNLP 2025, arXiv:2509.18467",
        map="both",
        decay="scalar",
        mass="sum",
        taps=4,
    ),
    "retnet": UpdateRule(
        "RetNet",
        "sums of products with one decay for a head, as Lightning Attention has it, too",
        "Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023, arXiv:2307.08621",
        map="plain",
        decay="fixed",
        mass="share",
        read="norm",
    ),
    "mamba2": UpdateRule(
        "Mamba-2",
        "sums of products with a decay by token, keys and queries convolved over four tokens",
        "Dao and Gu, Transformers are SSMs, ICML 2024, arXiv:2405.21060",
        map="plain",
        decay="scalar",
        mass="share",
        taps=4,
    ),
    "gla": UpdateRule(
        "gated linear attention",
        "sums of products with decays by token and channel",
        "Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, ICML 2024, "
        "arXiv:2312.06635",
        map="plain",
        decay="channel",
        mass="share",
        read="norm",
        begins_like="retnet",
    ),
    "liger": UpdateRule(
        "Liger",
        "gated linear attention whose gates are the keys",
        "Lan et al., Liger: Linearizing Large Language Models to Gated Recurrent Structures, ICML 2025, "
        "arXiv:2503.01496",
        map="softmax",
        decay="key",
        mass="share",
        share=0.0,
    ),
    "hgrn2": UpdateRule(
        "HGRN2",
        "sums of products with decays by channel, in which what is not kept is written",
        "Qin et al., HGRN2: Gated Linear RNNs with State Expansion, COLM 2024, arXiv:2404.07904",
        map="plain",
        decay="complement",
        mass="share",
    ),
    "deltanet": UpdateRule(
        "DeltaNet",
        "erases what a key finds before it writes",
        "Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, NeurIPS 2024, "
        "arXiv:2406.06484",
        erase="scalar",
    ),
    "gdn": UpdateRule(
        "Gated DeltaNet",
        "erases and writes, with a decay by token",
        "Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR 2025, "
        "arXiv:2412.06464",
        decay="scalar",
        erase="scalar",
    ),
    "kda": UpdateRule(
        "Kimi Delta Attention",
        "erases and writes, with decays by token and channel",
        "Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025, arXiv:2510.26692",
        decay="channel",
        erase="scalar",
        begins_like="gdn",
    ),
    "gdn2": UpdateRule(
        "Gated DeltaNet-2",
        "as Kimi Delta Attention, with gates of their own for what is erased and written",
        "Gated DeltaNet-2, 2026, arXiv:2605.22791",
        decay="channel",
        erase="channel",
        begins_like="gdn",
    ),
    "rwkv7": UpdateRule(
        "RWKV-7",
        "a step that erases and one that writes, with decays by channel",
        "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025, arXiv:2503.14456",
        decay="channel",
        erase="removal",
    ),
    "mom": UpdateRule(
        "mixture of memories",
        "three Gated DeltaNets that tokens are routed to by their keys, and a shared one",
        "Du et al., MoM: Linear Sequence Modeling with Mixture-of-Memories, 2025, arXiv:2502.13685",
        decay="scalar",
        erase="scalar",
        memories=3,
    ),
}


def beginning(name: str) -> str:
    """Describe the rule that equals this one until it is trained; empty if there is none."""
    like = UPDATE_RULES[name].begins_like if name in UPDATE_RULES else ""
    return f"until it is trained the same as {like}" if like else ""
