"""The papers of the update rules of memories, and what each rule does; student/update_rules.py has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KATHAROPOULOS = "Katharopoulos et al., Transformers are RNNs, ICML 2020, arXiv:2006.16236"


@dataclass(frozen=True)
class RulePaper:
    """Where a rule was published."""

    label: str
    about: str
    reference: str
    begins_like: str = ""  # the rule that it equals before training, while tokens do not change its gates


RULE_PAPERS: Mapping[str, RulePaper] = {
    "linear": RulePaper(
        "linear attention",
        "sums of products, normalised when read, as TransNormer has it",
        KATHAROPOULOS,
    ),
    "elu": RulePaper("linear attention, elu + 1", "sums of products of elu + 1", KATHAROPOULOS),
    "nalaformer": RulePaper(
        "NaLaFormer",
        "powers of products by their signs, with the query's norm in the power",
        "Meng et al., NaLaFormer: Norm-Aware Linear Attention for Transformer Models, 2025, arXiv:2506.21137",
    ),
    "mala": RulePaper(
        "MALA",
        "linear attention whose weights have a magnitude and an offset and sum to one",
        "Fan et al., Rectifying Magnitude Neglect in Linear Attention, ICCV 2025, arXiv:2507.00698",
    ),
    "lawcat": RulePaper(
        "LAWCAT",
        "normalised sums with a decay by token, keys and queries convolved over four tokens",
        "Liu et al., LAWCAT: Efficient Distillation from Quadratic to Linear Attention with Convolution across Tokens "
        "for Long Context Modeling, Findings of EMNLP 2025, arXiv:2509.18467",
    ),
    "retnet": RulePaper(
        "RetNet",
        "sums of products with one decay for a head, as Lightning Attention has it, too",
        "Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023, arXiv:2307.08621",
    ),
    "mamba2": RulePaper(
        "Mamba-2",
        "sums of products with a decay by token, keys and queries convolved over four tokens",
        "Dao and Gu, Transformers are SSMs, ICML 2024, arXiv:2405.21060",
    ),
    "gla": RulePaper(
        "gated linear attention",
        "sums of products with decays by token and channel",
        "Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, ICML 2024, "
        "arXiv:2312.06635",
        begins_like="retnet",
    ),
    "liger": RulePaper(
        "Liger",
        "gated linear attention whose gates are the keys",
        "Lan et al., Liger: Linearizing Large Language Models to Gated Recurrent Structures, ICML 2025, "
        "arXiv:2503.01496",
    ),
    "hgrn2": RulePaper(
        "HGRN2",
        "sums of products with decays by channel, in which what is not kept is written",
        "Qin et al., HGRN2: Gated Linear RNNs with State Expansion, COLM 2024, arXiv:2404.07904",
    ),
    "deltanet": RulePaper(
        "DeltaNet",
        "erases what a key finds before it writes",
        "Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, NeurIPS 2024, "
        "arXiv:2406.06484",
    ),
    "gdn": RulePaper(
        "Gated DeltaNet",
        "erases and writes, with a decay by token",
        "Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR 2025, "
        "arXiv:2412.06464",
    ),
    "kda": RulePaper(
        "Kimi Delta Attention",
        "erases and writes, with decays by token and channel",
        "Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025, arXiv:2510.26692",
        begins_like="gdn",
    ),
    "gdn2": RulePaper(
        "Gated DeltaNet-2",
        "as Kimi Delta Attention, with gates of their own for what is erased and written",
        "Gated DeltaNet-2, 2026, arXiv:2605.22791",
        begins_like="gdn",
    ),
    "rwkv7": RulePaper(
        "RWKV-7",
        "a step that erases and one that writes, with decays by channel",
        "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, 2025, arXiv:2503.14456",
    ),
    "mom": RulePaper(
        "mixture of memories",
        "three Gated DeltaNets that tokens are routed to by their keys, and a shared one",
        "Du et al., MoM: Linear Sequence Modeling with Mixture-of-Memories, 2025, arXiv:2502.13685",
    ),
}


def beginning(name: str) -> str:
    """Describe the rule that equals this one until it is trained; empty if there is none."""
    like = RULE_PAPERS[name].begins_like if name in RULE_PAPERS else ""
    return f"until it is trained the same as {like}" if like else ""
