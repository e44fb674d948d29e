"""Other ways to attend in both directions, by which a student is compared: what papers put in the place of softmax.

Each has `keys`, counted as the budget counts them, and `attend` as a student's layers call it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import adaptive_avg_pool1d, elu, pad, rms_norm, silu

from linearizer.encoders.attention_both_ways import block_layout
from linearizer.student.matrix_rule import rows_of

LEAST = 1e-6  # of a sum of weights


@dataclass(frozen=True)
class Nystrom:
    """SOFT's form (Lu et al. 2021, arXiv:2110.11945): a Gaussian kernel through landmarks, which are means of segments.

    Its queries are its keys; a teacher's are not, so half of the landmarks are of either, and a key weighs e^(|k|²/2).
    """

    landmarks: int
    tokens: int

    @property
    def keys(self):
        return 2 * self.landmarks + self.landmarks**2 / self.tokens

    def attend(self, query, key, value, scale, grid=()):
        query, key = query * scale**0.5, key * scale**0.5
        middles = torch.cat([segment_means(x, self.landmarks // 2) for x in (query, key)], -2)
        weight = key.square().sum(-1, keepdim=True) / 2
        columns = (
            torch.cat([value, torch.ones_like(value[..., :1])], -1) * (weight - weight.amax(-2, keepdim=True)).exp()
        )
        core = torch.linalg.pinv(gauss(middles, middles), rtol=1e-3, hermitian=True)
        out = gauss(query, middles) @ (core @ (gauss(middles, key) @ columns))
        return out[..., :-1] / out[..., -1:].clamp_min(LEAST)


def segment_means(x, count):
    return adaptive_avg_pool1d(x.flatten(0, 1).mT, count).mT.unflatten(0, x.shape[:2])


def gauss(x, y):
    return (-torch.cdist(x, y).square() / 2).exp()


@dataclass(frozen=True)
class Summed:
    """Linear attention: one sum over all tokens of products with a feature map of the package, near tokens exactly.

    `map`: elu (Katharopoulos, LinFusion without its network), signs (NaLaFormer); `mala` reads it as MALA does.
    """

    map: str
    features: int
    dims: int  # of keys and values of a head
    block: int = 0
    mala: bool = False

    @property
    def keys(self):
        near = 3 * self.block
        return 2 * self.features + near * (1 + self.features / self.dims)

    def attend(self, query, key, value, scale, grid=()):
        tokens, ones = key.shape[2], torch.ones_like(value[..., :1])
        asks, rows, columns = (
            rows_of(self.map, query, True),
            rows_of(self.map, key, False),
            torch.cat([value, ones], -1),
        )
        out = asks @ (rows.mT @ columns)
        if self.mala:  # weights β s - γ with β = 1 + 1 / Σ s and γ = Σ s / n
            out = out / (self.features * tokens)
            total = out[..., -1:].clamp_min(LEAST)
            return (1 + 1 / total) * out[..., :-1] - total * value.mean(-2, keepdim=True)
        if self.block:
            out = out + self.corrected(query * scale, key, columns, asks, rows)
        return out[..., :-1] / out[..., -1:].clamp_min(LEAST)

    def corrected(self, query, key, columns, asks, rows):
        """What near tokens weigh beyond what the map gives them."""
        layout = block_layout((key.shape[2],), (self.block,), key.device)
        query, key, columns, asks, rows = (pad(x, (0, 0, 0, 1)) for x in (query, key, columns, asks, rows))
        exact = (query[:, :, layout.members] @ key[:, :, layout.near].mT).clamp_max(30).exp()
        beyond = exact - asks[:, :, layout.members] @ rows[:, :, layout.near].mT
        return (beyond @ columns[:, :, layout.near]).flatten(2, 3)[:, :, layout.places]


@dataclass(frozen=True)
class Normed:
    """One sum over all tokens, read with unit norm: TransNormer's of elu + 1 (Qin et al. 2022, arXiv:2210.10340), or
    LightNet's (Qin et al. 2024, arXiv:2405.21022), whose keys are a softmax over the tokens."""

    features: int
    over_tokens: bool

    @property
    def keys(self):
        return 2 * self.features

    def attend(self, query, key, value, scale, grid=()):
        asks = silu(query) if self.over_tokens else elu(query) + 1
        rows = key.softmax(-2) if self.over_tokens else elu(key) + 1
        return rms_norm(asks @ (rows.mT @ value), value.shape[-1:])


@dataclass(frozen=True)
class Flow:
    """Flowformer (Wu et al. 2022, arXiv:2202.06258): what tokens give competes, and what they take is allotted."""

    features: int

    @property
    def keys(self):
        return 2 * self.features

    def attend(self, query, key, value, scale, grid=()):
        asks, rows = query.sigmoid(), key.sigmoid()
        taken, given = asks @ total(rows).mT, rows @ total(asks).mT
        allotted, competing = asks @ total(rows / given).mT, rows @ total(asks / taken).mT
        columns = competing.softmax(-2) * key.shape[-2] * value
        return allotted.sigmoid() * (asks / taken @ (rows.mT @ columns))


def total(x):
    """The sum over all tokens."""
    return x.sum(-2, keepdim=True)
