"""The decisions and refusals before any work of a run, in the order of `pipeline.begin`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linearizer.errors import RequestError
from linearizer.hub.models import Source, cache_folder, download_bytes
from linearizer.method.decide import check_budget
from linearizer.method.texts import fit_to_text, min_texts, needed_tokens
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import FORMER_LOSSES, Plan
from linearizer.run.disk import run_bytes
from linearizer.run.files import check_free_disk
from linearizer.run.names import absolute_path, absolute_source
from linearizer.teacher.devices import choose_dtype
from linearizer.teacher.load import computing_dtype, load_tokenizer, stored_dtype
from linearizer.teacher.streaming import OFFLOADED, place_weights
from linearizer.teacher.text import check_source, count_tokens, too_little_text
from linearizer.train.settings import LAYERWISE, training_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


AnyPlan = TypeVar("AnyPlan", Plan, EncoderPlan)


def with_absolute_paths(plan: AnyPlan) -> AnyPlan:
    """Make the paths of a plan absolute, so that the run can be resumed from any working directory."""
    places: dict[str, Any] = {"model": plan.model if plan.model == "demo" else absolute_path(plan.model)}
    if isinstance(plan, EncoderPlan) and plan.pictures is not None:
        places["pictures"] = absolute_source(absolute_path(plan.pictures))
    return replace(plan, text=absolute_source(plan.text), **places)


def decide_dtype(plan: Plan, source: Source, config: PreTrainedConfig) -> str:
    """Choose the type that this machine computes in; refuse a plan that needs all weights in memory without room."""
    dtype = choose_dtype(plan.dtype, stored_dtype(config), plan.device)
    places = place_weights(config, source, computing_dtype(dtype, config), plan.device)
    if places is not None and OFFLOADED & set(places.values()):
        check_streamed(plan)
    elif places is not None:
        check_spread(plan)
    return dtype


def fit_plan(
    plan: Plan, source: Source, inspection: Inspection, adjustable: Collection[str], token: str | None
) -> Plan:
    """Shrink the adjustable options of a plan to the length of its source."""
    plan = plan.sized(inspection.max_positions)
    if plan.text != "self":
        tokens = count_tokens(plan.text, load_tokenizer(source, token), needed_tokens(plan), token)
        plan = fit_to_text(plan, tokens, adjustable)
        if tokens < needed_tokens(plan):
            raise too_little_text(plan.text, tokens, min_texts(plan), plan.resolved_length(None))
    if plan.samples // 2 > plan.drawn_tokens:
        raise RequestError(
            f"{plan.texts} texts of {plan.length} tokens leave {plan.drawn_tokens} tokens to draw from, and heads are "
            f"measured on {plan.samples // 2}: ask for more or longer texts"
        )
    return plan


def check_plan(plan: Plan, inspection: Inspection) -> None:
    """Refuse a plan that cannot be carried out."""
    check_method(plan)
    check_budget(plan, inspection.layers)
    check_source(plan.text)
    training_settings(plan)  # which refuses what cannot be combined
    check_packed(plan, inspection)
    others = ["caps its scores or has learned sinks"] * inspection.alters_scores
    others += ["has layers that attend to the keys of other layers"] * any(layer.readers for layer in inspection.layers)
    if plan.may_hold_features and others:
        raise RequestError(
            f"{inspection.name!r} {others[0]}, which features and rules cannot follow: choose a recipe with slots or "
            "windows, such as best"
        )


def check_method(plan: Plan) -> None:
    """Refuse a method of a former version, and training with nothing to train."""
    former = plan.strategy_spec.decided_by == "former"
    if former or plan.loss in FORMER_LOSSES:
        name = f"strategy {plan.strategy}" if former else f"loss {plan.loss}"
        raise RequestError(
            f"the {name} measured worse than others and is no longer offered: its runs can be used, and a new run asks "
            "for another"
        )
    if plan.trains and not plan.may_hold_features and not plan.resolved_lora:
        raise RequestError(
            f"the strategy {plan.strategy} gives heads no features, so {plan.steps} steps without adapters train "
            "nothing: leave --lora out, or ask for --steps 0"
        )


def check_packed(plan: Plan, inspection: Inspection) -> None:
    """Refuse to change weights that stay quantised."""
    if plan.changes_weights and inspection.packed:
        raise RequestError(
            f"{inspection.name!r} is quantised ({inspection.quantised}), and adapters cannot be merged into such "
            f"weights: ask for --lora 0, or name the model that it was quantised from"
        )


def check_spread(plan: Plan) -> None:
    """Refuse a method that needs all weights, or a second copy of them, on one device, if they take several."""
    if plan.resolved_lora:
        raise RequestError(
            "the weights do not fit into the memory of one device and are spread over several, which lora does not "
            "serve: choose another recipe, or leave adapters (--lora 0) or training (--steps 0) out"
        )


def check_streamed(plan: Plan) -> None:
    """Refuse a method that needs the gradients of a whole model, if its weights do not fit into memory."""
    end_to_end = [phase.loss for phase in training_settings(plan) if plan.trains and phase.loss not in LAYERWISE]
    if end_to_end or plan.resolved_lora:
        method = f"the loss {end_to_end[0]!r}" if end_to_end else "lora"
        raise RequestError(
            f"the weights do not fit into memory and are read block by block, which {method} cannot be computed with: "
            f"train layer by layer ({', '.join(sorted(LAYERWISE))}), choose another recipe, or use a larger machine"
        )


def check_disks(folder: Path, plan: Plan, source: Source, inspection: Inspection) -> None:
    """Refuse a run without enough room on its own disk or on the disk of the models."""
    download, weights = download_bytes(source), source.folder or cache_folder()
    weights = next(path for path in (weights, *weights.absolute().parents) if path.is_dir())
    together = weights.stat().st_dev == folder.stat().st_dev
    needed = run_bytes(plan, inspection, together)
    if together:
        check_free_disk(folder, needed + download)
    else:
        check_free_disk(folder, needed)
        check_free_disk(weights, download)
