"""How much a run will write, and estimated before anything is downloaded."""

from __future__ import annotations

from linearizer.plan.head_bytes import FEATURE_MAPS, Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import FITTED, Plan
from linearizer.plan.update_rules import MEMORIES

NUMBER = 4  # bytes of a float32
KEPT = 4  # numbers that training keeps of a parameter: itself, a good one of before, two moments
FILES = 2  # of a state of training: the newest, and the one that is being written
PRICED_SHARE = 3 / 4  # of a text: as many rows as heads with prices are offered
SAVE_EVERY = 25  # steps of a training
SMALL_FILES, TOKEN = 1_000_000, 64  # bytes of what every run writes, and of an entry in a tokenizer's file
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def checkpoint_bytes(plan: Plan, inspection: Inspection, linked: bool = True) -> int:
    """Estimate what a student takes on the disk: its features, and its teacher's weights where they cannot be linked.

    Weights that training changed are written anew, in no larger type than the teacher's.
    """
    weights = 0 if linked and inspection.links else inspection.weight_bytes
    if not inspection.links and (inspection.tower_of or inspection.quantised):
        weights = inspection.parameters * inspection.number_bytes  # a part of the files, or more than they hold
    if plan.changes_weights:
        weights = min(inspection.expanded_bytes, inspection.parameters * SIZES.get(plan.dtype, NUMBER))
    return weights + map_bytes(plan, inspection)


def other_bytes(inspection: Inspection) -> int:
    """Estimate what a run writes besides: a tokenizer, the student's code, tables and pictures."""
    return SMALL_FILES + TOKEN * inspection.vocabulary


def map_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the size of the feature maps, if any, or of the memories, whose rows are what a query and a key are."""
    if not plan.may_hold_features:
        return 0
    numbers = memory_numbers if plan.feature_map in MEMORIES else FEATURE_MAPS[plan.feature_map]
    return NUMBER * sum(layer.kv_heads * numbers(layer.key_dim, mean_rows(plan, layer)) for layer in inspection.layers)


def memory_numbers(dim: int, rows: int) -> int:
    """Estimate the numbers that a memory learns for a head."""
    return rows * (3 * dim + 4)


def mean_rows(plan: Plan, layer: Layer) -> int:
    """Estimate how many features, or rows of a memory, the heads of a layer hold in the mean, beside their windows."""
    rows = most_rows(plan, layer)
    if plan.rules.decided_by != "freedoms" or plan.budget is None or plan.features:
        return rows
    tokens = plan.budget - plan.kept_window - plan.kept_sinks
    return min(rows, tokens * (layer.key_dim + layer.value_dim) // (2 * layer.value_dim))


def most_rows(plan: Plan, layer: Layer) -> int:
    """Estimate how many features, or rows of a memory, a head of a layer may hold: as many as a budget has tokens."""
    rows = plan.features or plan.budget or 0
    if plan.rules.decided_by == "prices":
        rows = min(rows, int(PRICED_SHARE * plan.kept_length(None)))
    return min(rows, MEMORIES[plan.memory].most_rows(layer.key_dim)) if plan.memory else rows


def resume_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate what resuming needs: samples of queries, keys and values, and the state of training."""
    kept = plan.kept_samples // 2 + (plan.kept_length(inspection.max_positions) if plan.memory else 0)
    samples = sum(
        (layer.query_heads * layer.key_dim + layer.kv_heads * (layer.key_dim + layer.value_dim)) * kept
        for layer in inspection.layers
    )
    trained = map_bytes(plan, inspection) + adapter_bytes(plan, inspection)
    files = 0 if not plan.trains else 1 if plan.minutes is None and plan.steps <= SAVE_EVERY else FILES
    return samples * NUMBER + text_bytes(plan, inspection) + KEPT * files * trained + fitted_bytes(plan, inspection)


def text_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the size of the texts that are kept as tokens: to measure and judge, and to train."""
    texts = plan.steps * plan.batch + plan.texts_measured + plan.kept_texts
    return texts * plan.kept_length(inspection.max_positions) * NUMBER


def fitted_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the size of the maps that a fit in closed form keeps, by the most that they are of a model."""
    if not plan.trains or FITTED not in plan.kept_loss.split("+"):
        return 0
    return inspection.active // 2 * SIZES.get(plan.dtype, inspection.number_bytes)


def adapter_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the size of the adapters, for hidden states as wide as all queries of a token."""
    widths = [
        (layer.query_heads * layer.key_dim, layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim)
        for layer in inspection.layers
        if layer.native_window is None
    ]
    return plan.kept_lora * NUMBER * sum(6 * hidden + keys + values for hidden, keys, values in widths)
