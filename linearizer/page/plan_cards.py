"""The HTML of a choice: the model, the plan, what a budget buys and costs here, and how the heads share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from linearizer.amounts import count_in_words, duration, from_length, size
from linearizer.errors import LinearizerError, RequestError
from linearizer.page.limits import MIN_BUDGET
from linearizer.plan import head_bytes
from linearizer.plan.allocation import ROW_TITLES, Allocation, StateSize, size_row
from linearizer.plan.head_bytes import Layer
from linearizer.plan.options import options_of
from linearizer.plan.plan import ALLOCATION, Plan
from linearizer.plan.recipes import find_recipe
from linearizer.report.head_needs import HeadNeeds, Measuring, needs_of
from linearizer.report.markup import announcement, folded, message_box, table, values_list
from linearizer.report.needs_chart import draw_needs
from linearizer.report.quality_charts import budget_chart
from linearizer.report.verdict import judge_run, predict_kl
from linearizer.run.folder import Run
from linearizer.run.names import refuse_encoder
from linearizer.run.training_end import Trained

if TYPE_CHECKING:
    from linearizer.plan.inspection import Inspection, ModelFacts
    from linearizer.run.measured import Profile
    from linearizer.workers.forecast import Machine, RunForecast

ALLOCATING = {name for name, option in options_of(Plan).items() if option.limits.group == ALLOCATION}
HOLDING = {"recipe", "feature_map"} | ALLOCATING - {"budget", "features"}  # options that decide what a budget buys


def model_card(inspection: Inspection) -> str:
    """Describe a model, and whether it can be linearized."""
    active = f", {count_in_words(inspection.active)} active per token" if inspection.resting else ""
    pairs = [
        ("parameters", count_in_words(inspection.parameters) + active),
        *inspection.describe_shape(),
        ("cache", f"{size(inspection.cache_bytes_per_token)} per token"),
        ("weights", size(inspection.weight_bytes)),
    ]
    refusal = "" if inspection.supported else f"Not supported, because {inspection.reason}: {inspection.remedy}."
    kind = inspection.architecture + (f" · {inspection.revision[:8]}" if inspection.revision else "")
    kind += f" · {inspection.reads}" if inspection.reads else ""
    kind += f" · quantised: {inspection.quantised}" if inspection.quantised else ""
    return show_model(inspection, kind, pairs if inspection.layers else (), refusal)


def show_model(facts: ModelFacts, kind: str, pairs: Sequence[tuple[str, str]], refusal: str = "") -> str:
    """Show the kind of a model, why it is refused if it is, and facts about it."""
    tested = "" if facts.tested else " by its interface; its family is not among the tested families"
    verdict = message_box(refusal, "bad") if refusal else message_box(f"Supported{tested}.", "good")
    return (
        f'<article class="lz-card"><header><h3>{escape(facts.name)}</h3><small>{escape(kind)}</small></header>'
        f"{verdict}{values_list(pairs) if pairs else ''}</article>"
    )


def cost_card(features: float, state: str, smaller: str, rows: Sequence[Sequence[str]], kl: str = "") -> str:
    """Show the size of a state, its KL and the source of that, and the memory of teacher and student by length."""
    kl, _, source = kl.partition(": ")
    pairs = [("state", state), ("smaller than the cache", smaller), *[("KL, nats per token", kl)] * bool(kl)]
    if features:
        pairs.append(("mean features per KV head", f"{features:.1f}"))
    loud = announcement(f"state {state}, smaller than the cache {smaller}")
    source_line = f'<p class="lz-faint">KL: {escape(source)}.</p>' if source else ""
    sizes = table("Memory of teacher and student", ROW_TITLES, rows)
    return f"<div{loud}>{values_list(pairs, 'lz-wide')}{source_line}{sizes}</div>"


def budget_card(plan: Plan, layers: Sequence[Layer], positions: int, kl: str = "", beside: str = "") -> str:
    """Show the most that the state of a budget can take, before anything is measured, and its KL if that is known.

    Where heads may grow, the state takes at most the budget at the plan's target length. It has a fixed part and a part
    in proportion to the length, so beyond that it grows at most in proportion to the length.
    """
    unit = sum(layer.kv_heads * head_bytes.feature_bytes(layer) for layer in layers if layer.native_window is None)
    exact_bytes = head_bytes.cache_bytes(layers, plan.resolved_sinks + plan.resolved_window)
    if plan.budget is None:
        features, max_bytes = float(plan.features or 0), exact_bytes + (plan.features or 0) * unit
    else:
        max_bytes = head_bytes.cache_bytes(layers, plan.budget)
        features = 0.0 if plan.strategy_spec.spends_tokens else max(0, max_bytes - exact_bytes) / unit
    grows = plan.may_grow and plan.strategy_spec.decided_by == "prices"
    target = plan.target_tokens(positions)
    rows = rows_by_length(
        positions,
        cache=lambda tokens: head_bytes.cache_bytes(layers, tokens),
        state=lambda tokens: max_bytes * max(target, tokens) // target if grows else max_bytes,
        sign="≤",
    )
    begin = head_bytes.find_breakeven(max_bytes, head_bytes.cache_bytes(layers, 1))
    length = f" up to {target:,} tokens, more beyond" if grows else ", whatever the length"
    smaller = from_length(begin if not grows or (plan.budget or 0) < target else None)
    name = f'<h3 class="lz-group">{escape(plan.model)}</h3>'
    kl = kl or "not known yet: once a run of this model has priced the heads, it predicts it for every budget"
    state = with_beside(f"at most {size(max_bytes)}{length}", beside)
    return name + cost_card(features, state, smaller, rows, kl)


def with_beside(state: str, beside: str) -> str:
    """Add to the size of a state what recurrent layers keep beside it."""
    return f"{state}; {beside}" if beside else state


def expected_kl(run: Run | None, plan: Plan) -> str:
    """Describe the KL that a run of the same model predicts for a budget; empty if its heads hold something else."""
    if run is None or plan.budget is None or not holds_alike(run, plan):
        return ""
    with suppress(LinearizerError):  # the run may be deleted, or its prices may not cover the budget
        predicted, _, basis = predict_kl(run, *share_out(run, plan.budget)).partition(": ")
        limit = basis.partition("; ")[2]
        length = f"over texts of {run.plan.resolved_length(run.positions):,} tokens"
        source = f"{length}, by the prices of {run.folder.name}{f'; {limit}' * bool(limit)}"
        return f"{predicted}: {source}" * bool(predicted)
    return ""


def holds_alike(run: Run, plan: Plan) -> bool:
    return all(getattr(plan, name) == getattr(run.plan, name) for name in HOLDING)


def budget_strip(run: Run | None, plan: Plan) -> str:
    """Draw the KL that a run of the same model predicts by the budget."""
    if run is not None and plan.budget is not None and holds_alike(run, plan):
        with suppress(LinearizerError):  # the run may be deleted
            if drawn := budget_chart(run, plan.budget, MIN_BUDGET):
                return f'<div class="lz-real">{drawn}</div>'
    return ""


def rows_by_length(
    positions: int, cache: Callable[[int], int], state: Callable[[int], int], sign: str = ""
) -> list[tuple[str, ...]]:
    """State the sizes after the longest text that a teacher reads, and after shorter ones."""
    lengths = positions // 16, positions // 4, positions
    return [(f"{tokens:,} tokens", *size_row(tokens, cache(tokens), state(tokens), sign)[1:]) for tokens in lengths]


def allocation_card(
    allocation: Allocation, layers: Sequence[Layer], positions: int, kl: str = "", beside: str = ""
) -> str:
    """Show the size of an allocation's state."""
    state = StateSize.of(allocation, layers)
    rows = rows_by_length(positions, state.teacher_bytes, state.student_bytes)
    words = with_beside(state.in_words, beside)
    return cost_card(allocation.features_mean, words, from_length(state.breakeven), rows, kl)


def plan_card(plan: Plan, trained: Trained | None = None) -> str:
    """Show the plan of a run, how far its training came, and the command that does the same elsewhere."""
    recipe, training = find_recipe(plan.recipe), f"{plan.steps} steps" if plan.steps else "none"
    if trained is not None and trained.early:
        training = f"{trained.in_words}: it was ended early"
    pairs = [
        ("model", plan.model),
        ("budget", plan.budget_in_words),
        ("state", "may grow" if plan.may_grow else "never grows"),
        ("recipe", f"{plan.recipe}: {recipe.label}"),
        *((("reference", recipe.reference),) if recipe.reference else ()),
        ("text", f"{plan.resolved_texts} texts of {plan.resolved_length(None)} tokens, {plan.text}"),
        ("training", training),
        ("seed", str(plan.seed)),
    ]
    return show_choices(pairs, plan.command(), folded("The whole plan", f"<pre>{escape(plan.to_json())}</pre>"))


def show_choices(pairs: Sequence[tuple[str, str]], command: str, details: str = "") -> str:
    """Show the choices of a plan, the command that makes the same, and more details as HTML."""
    command = f'<p class="lz-faint">From a command line: <code>{escape(command)}</code></p>'
    return f'<article class="lz-card">{values_list(pairs)}{command}{details}</article>'


def forecast_card(machine: Machine | None, forecast: RunForecast) -> str:
    """Describe what a run takes, and whether it fits; a machine of None: a GPU that is lent only during the work."""
    load = f"{size(forecast.download_bytes)} to download" if forecast.download_bytes else "nothing to download"
    needs = f"about {size(forecast.memory_bytes)} of memory and {size(forecast.disk_bytes)} of disk"
    takes = f"it takes {needs}, and {time_forecast(forecast)}; {load}."
    if machine is None:
        return message_box(f"On a CPU {takes} The run is faster than that, on a GPU that is lent for a while.")
    if machine.fits(forecast):
        return message_box(f"Fits on {machine.device} (kernels: {machine.kernels}): {takes}", "good")
    cuts = "shorter texts, a smaller batch" if forecast.memory_bytes > machine.free_memory else "fewer or shorter texts"
    return message_box(
        f"Does not fit: it takes {needs}, and {size(machine.free_memory)} of memory and {size(machine.free_disk)} "
        f"of disk are free. Make room, ask for {cuts} (under Advanced) or a smaller model, or use another machine.",
        "bad",
    )


def time_forecast(forecast: RunForecast) -> str:
    """Say how long a run takes, and how sure that is."""
    time = time_range(forecast)
    runs = "runs" if " to " in time else "run"
    return f"{time}, as this {'machine’s speed promises' if forecast.least is None else f'model’s last {runs} did'}"


def time_range(forecast: RunForecast) -> str:
    seconds = (
        (forecast.seconds,) if forecast.least is None or forecast.most is None else (forecast.least, forecast.most)
    )
    times = [*dict.fromkeys(map(duration, seconds))]
    return " to ".join(times) if len(times) > 1 else f"about {times[0]}"


def share_out(run: Run, budget: int | None = None) -> tuple[Plan, Allocation]:
    """Share a budget out among the heads as the run's plan does; no model is loaded.

    For the run's own budget, or None, return what the run itself has decided, once it has.
    """
    from linearizer.method.decide import decide

    require_profile(run)
    if budget in (None, run.plan.budget):
        return run.plan, run.allocation or decide(run, run.plan, run.layers)
    plan = replace(run.plan, budget=budget, features=None)
    return plan, decide(run, plan, run.layers)


def require_profile(run: Run) -> Profile:
    """Return the profile of a run; refuse a run that has not measured what sharing out a budget needs."""
    from linearizer.method.decide import decidable

    refuse_encoder(run)
    if (profile := run.profile) is None or not decidable(run):
        raise RequestError("this run has not measured its heads yet: wait until it has, or resume it")
    return profile


def draw_shares(run: Run, budget: int | None = None) -> tuple[str, str]:
    """Draw need, price and purchase under a budget, or the run's own, and show the bytes of the purchase."""
    plan, allocation = share_out(run, budget)
    is_decided = plan == run.plan and run.allocation is not None
    judged = judge_run(run) if is_decided else None
    if judged is not None and judged.kl is not None:
        kl = f"{judged.kl:.4f}: measured on texts of {judged.length:,} tokens"
    else:
        kl = predict_kl(run, plan, allocation)
    needs = needs_of(run, allocation)
    card = allocation_card(allocation, run.layers, run.positions, kl, run.inspection.beside_state)
    about = "What this run holds." if is_decided else "What this budget would buy, predicted from the measurements."
    return draw_needs(needs).to_json(), f'{needs_note(needs)}<p class="lz-faint">{about}</p>{card}'


def draw_measuring(run: Run, measuring: Measuring) -> tuple[str, str]:
    """Draw what has been measured of the heads so far."""
    needs = needs_of(run, measuring=measuring)
    return draw_needs(needs).to_json(), needs_note(needs)


def needs_note(needs: HeadNeeds) -> str:
    """Say how need and price agree, and what degrees of freedom are."""
    agreement = f"<p>{escape(needs.agreement)}</p>" if needs.agreement else ""
    return f'<div class="lz-needs">{agreement}<p class="lz-faint">{escape(needs.meaning)}</p></div>'
