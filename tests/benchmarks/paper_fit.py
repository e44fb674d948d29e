"""Which reading of the paper's algorithm 1 gives its tables: everything that it leaves open is tried."""

import itertools
import math

from linearizer.amounts import columns
from linearizer.evaluate.head_errors import spearman
from linearizer.method.by_freedoms import layer_units
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head

NORMALISE, GAUGE, SINKS, OVER = ("trace", "J", "none"), ("raw", "centred"), (0, 1, 4), ("max", "mean")
HEADS_AT = 2.0**-8  # the λ of table 2


def head_freedoms(profile):
    """Degrees of freedom of every head at the λ of table 2: [layer][head]."""
    place = profile.settings.ridges.index(HEADS_AT)
    return [[curve[place] for curve in layer.query_freedoms] for layer in profile.layers if layer.heads]


def allocate_as_paper(profile, layers, features, strategy):
    """Round features to whole numbers as the paper does, not to tiles: they may exceed their mean a little."""
    rows = [layer_units(profile, index, layer, strategy) for index, layer in enumerate(layers)]
    shares = [unit.features_at(0.0) for row in rows for unit in row]
    mean = math.fsum(shares) / len(shares)
    heads = []
    for row, layer in zip(rows, layers, strict=True):
        most = layer.key_dim if strategy == "dof-clip" else math.inf
        counts = [min(max(1, round(features * unit.features_at(0.0) / mean)), most) for unit in row]
        heads.append(tuple(Head(0, count) for unit, count in zip(row, counts, strict=True) for _ in range(unit.heads)))
    return Allocation(strategy, 0, tuple(heads))


def fit(paper):
    """Hold every reading against tables 2 and 1, the best first; without published figures, only show what it gives."""
    arguments, rows = paper.arguments, []
    figures = [value for row in paper.published.get("table 2", []) for value in row]
    published = paper.published.get("table 1", [])
    samples = sorted({max(32, arguments.samples // 2), arguments.samples})
    for normalise, gauge, sinks, count in itertools.product(NORMALISE, GAUGE, SINKS, samples):
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            profile = paper.measure(normalise, gauge, sinks, count, seed)
            heads = [value for row in head_freedoms(profile) for value in row]
            for over in OVER:
                layers = paper.dimensions(profile, over)
                way = f"{normalise}, {gauge}, {sinks} sinks, {count} samples, seed {seed}, {over} over heads"
                rows.append((way, *agreement(heads, figures), *agreement(layers, published), *layers))
    rows.sort(key=lambda row: (-(row[1] or 0.0), row[2] or 0.0))
    heading = ("read as", "ranks of table 2", "log error", "ranks of table 1", "log error", *range(1, len(layers) + 1))
    return columns([heading, *((row[0], *map(shown, row[1:])) for row in rows)])


def agreement(ours, published):
    """Give the correlation of ranks, and the root mean square of the logarithms of the ratios."""
    if len(ours) != len(published):
        return None, None
    logs = [math.log(max(own, 1e-9) / other) for own, other in zip(ours, published, strict=True)]
    return spearman(ours, published), math.sqrt(math.fsum(log * log for log in logs) / len(logs))


def shown(value):
    """Write a number with four digits, and nothing as nothing."""
    return "" if value is None else f"{value:.4g}"
