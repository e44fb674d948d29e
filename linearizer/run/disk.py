"""Estimates the bytes that a run writes, before anything is downloaded."""

from __future__ import annotations

from linearizer.plan.head_bytes import Layer
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.student.update_rules import UPDATE_RULES

NUMBER = 4  # bytes of a float32
KEPT = 4  # numbers that training stores for a parameter: itself, an earlier good one, two moments
FILES = 2  # of a training's state: the newest, and the one that is being written
SAVE_EVERY = 25  # steps of a training
SMALL_FILES, TOKEN = 1_000_000, 64  # bytes of small files of every run, and of an entry in a tokenizer's file
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def checkpoint_bytes(plan: Plan, inspection: Inspection, linked: bool = True) -> int:
    """Estimate the bytes of a student: its features, and its teacher's weights if they cannot be linked.

    Weights that training changed are written again, in no larger type than the teacher's.
    """
    weights = 0 if linked and inspection.links else inspection.weight_bytes
    if not inspection.links and (inspection.tower_of or inspection.quantised):
        weights = inspection.parameters * inspection.number_bytes  # less than in the files (a tower), or more
    if plan.changes_weights:
        weights = min(inspection.expanded_bytes, inspection.parameters * SIZES.get(plan.dtype, NUMBER))
    return weights + map_bytes(plan, inspection)


def run_bytes(plan: Plan, inspection: Inspection, linked: bool = True) -> int:
    """Estimate all that a run writes: also a tokenizer, the student's code, tables and pictures."""
    small = SMALL_FILES + TOKEN * inspection.vocabulary
    return resume_bytes(plan, inspection) + checkpoint_bytes(plan, inspection, linked) + small


def map_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the size of the feature maps, or of memories, which have rows as long as a query or key."""
    if not plan.may_hold_features:
        return 0
    rows = {"mlp": 6}.get(plan.feature_map, 3 if plan.memory else 2)  # numbers for each number of a key
    return NUMBER * sum(
        layer.kv_heads * layer.key_dim * (rows * rows_of(plan, layer) + layer.key_dim) for layer in inspection.layers
    )


def rows_of(plan: Plan, layer: Layer) -> int:
    """Estimate the mean number of features, or of rows of a memory, of the heads of a layer."""
    rows = plan.features or (plan.budget or 0) - plan.resolved_window - plan.resolved_sinks
    return min(rows, UPDATE_RULES[plan.memory].most_rows(layer.key_dim)) if plan.memory else rows


def resume_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate the bytes for resuming: samples of queries, keys and values, texts, and the state of training."""
    plan = plan.sized(inspection.max_positions)
    length = plan.resolved_length(None)
    sampled = plan.samples // 2 + (length if plan.memory else 0)
    samples = sampled * sum(
        layer.all_queries * layer.key_dim + layer.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in inspection.layers
        if layer.reads is None
    )
    texts = length * (plan.texts_learnt + plan.texts_measured + plan.resolved_texts)
    return NUMBER * (samples + texts) + training_bytes(plan, inspection)


def training_bytes(plan: Plan, inspection: Inspection) -> int:
    """Estimate an upper bound of the size of the training's state."""
    if not plan.trains:
        return 0
    widths = sum(layer.query_heads * layer.key_dim for layer in inspection.replaced_layers)
    adapters = plan.resolved_lora * NUMBER * 8 * widths  # of q, k, v and o, for hidden states as wide as all queries
    files = 1 if plan.steps <= SAVE_EVERY else FILES
    return KEPT * files * (map_bytes(plan, inspection) + adapters)
