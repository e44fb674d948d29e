"""A budget shared out among the heads of a measured run: what each head holds, drawn and in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from linearizer.errors import BudgetError, RequestError
from linearizer.page import cards, plan_cards
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.report import allocation_charts
from linearizer.report.prediction import predict_kl
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.plan.profile import Profile


@dataclass(frozen=True)
class Shares:
    """A budget shared out among the heads, and what it is compared with."""

    plan: Plan  # of the run, with that budget
    allocation: Allocation
    fix: Allocation | None
    layers: tuple[Layer, ...]
    length: int  # tokens of text at which the bytes of heads that may grow count
    decided: bool  # by the run itself, after measuring whole students; else predicted


def share_out(run: Run, budget: int | None = None) -> Shares:
    """Share a budget out among the heads as the run's plan does, and as Fix does; no model is loaded.

    For the run's own budget, or none, it is what the run itself decided, once it has.
    """
    from linearizer.method.by_freedoms import allocate_by_freedoms
    from linearizer.method.decide import decide

    profile = require_profile(run)
    own = budget in (None, run.plan.budget)
    plan, layers = run.plan if own else replace(run.plan, budget=budget, features=None), run.layers
    decided = run.allocation if own else None
    allocation = decided or decide(run, plan, layers)
    try:
        fix = allocate_by_freedoms(
            profile,
            layers,
            budget=plan.budget,
            features=plan.features,
            strategy="fix",
            window=plan.kept_window,
            sinks=plan.kept_sinks,
        )
    except BudgetError:  # windows come in smaller pieces than features
        fix = None
    return Shares(plan, allocation, fix, layers, plan.target_tokens(run.positions), decided is not None)


def require_profile(run: Run) -> Profile:
    """Return the profile of a run, once all is measured that sharing out a budget needs."""
    from linearizer.method.decide import decidable

    if (profile := run.profile) is None or not decidable(run):
        raise RequestError("this run has not measured its heads yet: wait for it, or resume it")
    return profile


def draw_shares(run: Run, budget: int | None = None) -> tuple[str, str]:
    """Draw how a budget, or that of the run, is shared out, and say which bytes it takes."""
    shares = share_out(run, budget)
    figure = allocation_charts.draw_allocation(shares.allocation, shares.layers, shares.fix)
    kl = predict_kl(run, shares.plan, shares.allocation)
    own, other = "What this run holds.", "What this budget would buy, as predicted from what was measured."
    note = f'<p class="lz-faint">{own if shares.decided else other}</p>'
    card = note + plan_cards.allocation_card(shares.allocation, shares.layers, kl)
    return figure.to_json(), card + (cards.candidates_card(run) if shares.decided else "")
