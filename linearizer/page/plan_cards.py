"""The HTML of what is chosen: the model, the plan, what a budget buys and takes here, and how heads share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from linearizer.amounts import count_in_words, duration, from_length, size
from linearizer.errors import BudgetError, LinearizerError, RequestError
from linearizer.plan import head_bytes
from linearizer.plan.allocation import ROW_TITLES, Allocation, StateSize, size_row
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.plan.recipes import RECIPES
from linearizer.report import plotly_charts
from linearizer.report.markup import announcement, folded, message_box, table, values_list
from linearizer.report.prediction import predict_kl
from linearizer.report.verdict import judge_run
from linearizer.run.folder import Run
from linearizer.run.names import refuse_encoder

if TYPE_CHECKING:
    from linearizer.plan.inspection import Inspection
    from linearizer.plan.profile import Profile
    from linearizer.workers.forecast import Machine, RunForecast


def model_card(inspection: Inspection) -> str:
    """Describe a model, and whether it can be linearized."""
    at_work = f", {count_in_words(inspection.active)} at work for a token" if inspection.resting else ""
    pairs = [
        ("parameters", count_in_words(inspection.parameters) + at_work),
        *inspection.describe_shape(),
        ("cache", f"{size(inspection.cache_bytes_per_token)} a token"),
        ("weights", size(inspection.weight_bytes)),
    ]
    if not inspection.supported:
        verdict = message_box(f"Not supported, because {inspection.reason}: {inspection.remedy}.", "bad")
    else:
        tested = "" if inspection.tested else " by its interface; its family is not among the tested families"
        verdict = message_box(f"Supported{tested}.", "good")
    kind = inspection.architecture + (f" · {inspection.revision[:8]}" if inspection.revision else "")
    kind += f" · the text tower of {inspection.tower_of}: it reads no pictures" if inspection.tower_of else ""
    kind += f" · quantised: {inspection.quantised}" if inspection.quantised else ""
    return (
        f'<article class="lz-card"><header><h3>{escape(inspection.name)}</h3><small>{escape(kind)}</small></header>'
        f"{verdict}{values_list(pairs) if inspection.layers else ''}</article>"
    )


def cost_card(features: float, state: str, smaller: str, rows: Sequence[Sequence[str]], kl: str = "") -> str:
    """Show the size of a state, its KL and how that is known, and the memory of teacher and student by length."""
    kl, _, how = kl.partition(": ")
    pairs = [("state", state), ("smaller than the cache", smaller), *[("KL, nats per token", kl)] * bool(kl)]
    if features:
        pairs.append(("mean features per KV head", f"{features:.1f}"))
    loud = announcement(f"state {state}, smaller than the cache {smaller}")
    known = f'<p class="lz-faint">KL: {escape(how)}.</p>' if how else ""
    sizes = table("Memory of teacher and student", ROW_TITLES, rows)
    return f"<div{loud}>{values_list(pairs, 'lz-wide')}{known}{sizes}</div>"


def budget_card(plan: Plan, layers: Sequence[Layer], positions: int, kl: str = "") -> str:
    """Show the most that the state of a budget can take, before anything is measured, and its KL where that is known.

    Where heads may grow, the state takes no more than the budget at the plan's target length. It is a fixed part and a
    part in proportion to the length, so at a greater length it takes at most as many times more.
    """
    unit = sum(layer.kv_heads * head_bytes.feature_bytes(layer) for layer in layers if layer.native_window is None)
    kept = head_bytes.cache_bytes(layers, plan.kept_sinks + plan.kept_window)
    if plan.budget is None:
        features, most = float(plan.features or 0), kept + (plan.features or 0) * unit
    else:
        most = head_bytes.cache_bytes(layers, plan.budget)
        features = 0.0 if plan.rules.spends_tokens else max(0, most - kept) / unit
    grows = plan.may_grow and plan.rules.decided_by in ("prices", "gates")
    target = plan.target_tokens(positions)
    rows = []
    for tokens in stated_lengths(positions):
        state = most * max(target, tokens) // target if grows else most
        rows.append(length_row(tokens, head_bytes.cache_bytes(layers, tokens), state, "≤"))
    begin = head_bytes.find_breakeven(most, head_bytes.cache_bytes(layers, 1))
    length = f" up to {target:,} tokens, more beyond" if grows else ", whatever the length"
    smaller = from_length(begin if not grows or (plan.budget or 0) < target else None)
    name = f'<h3 class="lz-group">{escape(plan.model)}</h3>'
    kl = kl or "not known yet: a run of this model predicts it for every budget, once it has priced the heads"
    return name + cost_card(features, f"at most {size(most)}{length}", smaller, rows, kl)


def expected_kl(run: Run | None, plan: Plan) -> str:
    """Describe the KL that a run of the same model predicts for a budget; empty where it priced another recipe."""
    if run is None or plan.budget is None or (plan.recipe, plan.may_grow) != (run.plan.recipe, run.plan.may_grow):
        return ""
    with suppress(LinearizerError):  # the run may be gone, or its prices may not reach to the budget
        predicted, _, how = predict_kl(run, *share_out(run, plan.budget)).partition(": ")
        most = how.partition("; ")[2]
        return f"{predicted}: by the prices of {run.folder.name}{f'; {most}' * bool(most)}" * bool(predicted)
    return ""


def stated_lengths(positions: int) -> list[int]:
    """Choose the lengths of text for which sizes are stated: the longest that a teacher reads, and shorter texts."""
    return [positions // 16, positions // 4, positions]


def length_row(tokens: int, cache: int, state: int, sign: str = "") -> tuple[str, ...]:
    """State the sizes after a number of tokens."""
    return f"{tokens:,} tokens", *size_row(tokens, cache, state, sign)[1:]


def allocation_card(allocation: Allocation, layers: Sequence[Layer], positions: int, kl: str = "") -> str:
    """Show the size of an allocation's state."""
    state = StateSize.of(allocation, layers)
    rows = [
        length_row(each, state.teacher_bytes(each), state.student_bytes(each)) for each in stated_lengths(positions)
    ]
    return cost_card(allocation.features_mean, state.in_words, from_length(state.breakeven), rows, kl)


def plan_card(plan: Plan) -> str:
    """Show the plan of a run, and the command that does the same elsewhere."""
    pairs = [
        ("model", plan.model),
        ("budget", plan.dial),
        ("state", "may grow" if plan.may_grow else "never grows"),
        ("recipe", f"{plan.recipe}: {RECIPES[plan.recipe].label}"),
        *((("reference", RECIPES[plan.recipe].reference),) if RECIPES[plan.recipe].reference else ()),
        ("text", f"{plan.kept_texts} texts of {plan.kept_length(None)} tokens, {plan.text}"),
        ("training", f"{plan.steps} steps" if plan.steps else "none"),
        ("seed", str(plan.seed)),
    ]
    command = f"<code>{escape(plan.command())}</code>"
    whole = folded("The whole plan", f"<pre>{escape(plan.to_json())}</pre>")
    lines = values_list(pairs)
    return f'<article class="lz-card">{lines}<p class="lz-faint">From a command line: {command}</p>{whole}</article>'


def forecast_card(machine: Machine | None, forecast: RunForecast) -> str:
    """Describe what a run takes, and whether there is room for it; None: a GPU that is lent only for the work."""
    load = f"{size(forecast.download_bytes)} to download" if forecast.download_bytes else "nothing to download"
    needs = f"about {size(forecast.memory_bytes)} of memory and {size(forecast.disk_bytes)} of disk"
    takes = f"it takes {needs}, and about {duration(forecast.seconds)}; {load}."
    if machine is None:
        return message_box(f"On a CPU {takes} The work is done on a GPU that is lent for a while, which is faster.")
    if machine.fits(forecast):
        return message_box(f"Fits on {machine.device}: {takes}", "good")
    less = "shorter texts, a smaller batch" if forecast.memory_bytes > machine.free_memory else "fewer or shorter texts"
    return message_box(
        f"Does not fit: it takes {needs}, and {size(machine.free_memory)} of memory and {size(machine.free_disk)} "
        f"of disk are free. Make room, ask for {less} (under Advanced) or a smaller model, or use another machine.",
        "bad",
    )


def share_out(run: Run, budget: int | None = None) -> tuple[Plan, Allocation]:
    """Share a budget out among the heads as the run's plan does; no model is loaded.

    For the run's own budget, or none, it is what the run itself decided, once it has.
    """
    from linearizer.method.decide import decide

    require_profile(run)
    if budget in (None, run.plan.budget):
        return run.plan, run.allocation or decide(run, run.plan, run.layers)
    plan = replace(run.plan, budget=budget, features=None)
    return plan, decide(run, plan, run.layers)


def require_profile(run: Run) -> Profile:
    """Return the profile of a run, once everything is measured that sharing out a budget needs."""
    from linearizer.method.decide import decidable

    refuse_encoder(run)
    if (profile := run.profile) is None or not decidable(run):
        raise RequestError("this run has not measured its heads yet: wait for it, or resume it")
    return profile


def draw_shares(run: Run, budget: int | None = None) -> tuple[str, str]:
    """Draw the shares of a budget, or of the run's, next to equal shares, and name the bytes that it takes."""
    from linearizer.method.by_freedoms import allocate_by_freedoms

    plan, allocation = share_out(run, budget)
    sizes: dict[str, Any] = {"budget": plan.budget, "features": plan.features}
    sizes |= {"window": plan.kept_window, "sinks": plan.kept_sinks}
    fix = None
    with suppress(BudgetError):  # windows come in smaller pieces than features
        fix = allocate_by_freedoms(require_profile(run), run.layers, strategy="fix", **sizes)
    decided = plan == run.plan and run.allocation is not None
    own, other = "What this run holds.", "What this budget would buy, as predicted from what was measured."
    judged = judge_run(run) if decided else None
    if judged is not None and judged.kl is not None:
        kl = f"{judged.kl:.4f}: measured on texts of {judged.length:,} tokens"
    else:
        kl = predict_kl(run, plan, allocation)
    card = allocation_card(allocation, run.layers, run.positions, kl)
    note = f'<p class="lz-faint">{own if decided else other}</p>'
    figure = plotly_charts.draw_allocation(allocation, run.layers, fix)
    return figure.to_json(), note + card
