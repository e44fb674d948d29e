"""Decides an allocation from a plan and the measurements of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from linearizer.errors import BudgetError, RequestError
from linearizer.method.by_freedoms import allocate_by_freedoms, check_room
from linearizer.method.by_prices import OffersOfHeads, allocate_by_prices, check_least_budget
from linearizer.plan.allocation import Allocation, heads_replaced
from linearizer.plan.head_bytes import (
    SINKS,
    Head,
    Layer,
    head_bytes,
    slot_bytes,
    token_bytes,
)
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.measured import Prices
from linearizer.student.update_rules import UPDATE_RULES


def check_budget(plan: Plan, layers: tuple[Layer, ...]) -> None:
    """Refuse a budget that the plan's strategy cannot spend, whatever is measured later."""
    check_bits(plan, layers)
    if plan.strategy_spec.spends_tokens:
        fewest_sinks = min(sinks_to_try(plan)) if plan.strategy_spec.decided_by == "prices" else plan.resolved_sinks
        fewest_bits = min(plan.resolved_bits, *fewer_bits(plan, layers), 16)
        check_least_budget(layers, plan.budget or 0, fewest_sinks, fewest_bits)
    else:
        check_room(layers, plan.budget, plan.features, plan.resolved_window + plan.resolved_sinks)


def check_bits(plan: Plan, layers: Sequence[Layer]) -> None:
    """Refuse bits in which the numbers of a key or value do not fill bytes."""
    if unfilled := [size for size in vector_sizes(layers) if size * plan.resolved_bits % 8]:
        raise RequestError(
            f"a key or value of {min(unfilled)} numbers does not fill bytes at {plan.bits} bits a number: ask for "
            "8 or 16 bits, or leave them out"
        )


def decide(run: Run, plan: Plan, layers: tuple[Layer, ...]) -> Allocation:
    """Allocate by a plan, from the measurements of a run."""
    check_budget(plan, layers)
    if plan.strategy_spec.decided_by == "prices":
        return allocate_by_prices(offers_of(run, plan, layers), plan.strategy)
    if plan.strategy_spec.decided_by == "budget":
        return allocate_alike(layers, plan, plan.resolved_sinks)
    if plan.strategy_spec.decided_by == "former":
        raise RequestError(f"the strategy {plan.strategy} is no longer offered: start a new run with another")
    if (profile := run.profile) is None:
        raise missing_measurement(run, plan, "profile")
    return allocate_by_freedoms(
        profile,
        layers,
        budget=plan.budget,
        features=plan.features,
        strategy=plan.strategy,
        window=plan.resolved_window,
        sinks=plan.resolved_sinks,
    )


def decidable(run: Run) -> bool:
    """Whether a run has its profile and the other measurements that it decides by."""
    return run.has_file("profile.json") and run.has_file(f"{run.plan.strategy_spec.product}.json")


def allocate_alike(layers: Sequence[Layer], plan: Plan, sinks: int) -> Allocation:
    """Let all heads hold the same within the budget: a window, and as many slots if the strategy has them."""

    def hold(layer: Layer) -> Head:
        token = token_bytes(layer, plan.resolved_bits)
        room = ((plan.budget or 0) - sinks) * token_bytes(layer)
        slot = slot_bytes(layer, plan.resolved_bits)
        slots = room // (token + slot) if plan.strategy_spec.far_field else 0
        return Head((room - slots * slot) // token, slots=slots, bits=plan.resolved_bits)

    counts = [(layer, heads_replaced(layer)) for layer in layers]
    heads = [(allocate_memory(x, plan, sinks) if plan.memory else hold(x),) * n if n else () for x, n in counts]
    return Allocation(plan.strategy if plan.memory else "window", sinks, tuple(heads))


def fewer_bits(plan: Plan, layers: Sequence[Layer]) -> tuple[int, ...]:
    """List the fewer bits that heads may also have: none where vectors do not fill bytes."""
    fills_bytes = all(size % 8 == 0 for size in vector_sizes(layers))
    return plan.fewer_bits if fills_bytes else ()


def vector_sizes(layers: Sequence[Layer]) -> set[int]:
    """List the numbers of a key or value in the layers that a student replaces."""
    return {size for layer in layers if layer.native_window is None for size in (layer.key_dim, layer.value_dim)}


def allocate_memory(layer: Layer, plan: Plan, sinks: int) -> Head:
    """Let every head of a layer hold a window, the plan's or half of the budget, and spend the rest on memory rows.

    If the plan sets no window, the window also takes the bytes that rows cannot use.
    """
    room = (plan.budget or 0) * token_bytes(layer)
    token = token_bytes(layer, plan.resolved_bits)
    head = Head(plan.resolved_window, bits=plan.resolved_bits, memory=plan.memory)
    most_rows = UPDATE_RULES[plan.memory].most_rows(layer.key_dim)
    fits = [r for r in range(1, most_rows + 1) if head_bytes(replace(head, features=r), layer, sinks, 0) <= room]
    if not fits:
        least_bytes = head_bytes(replace(head, features=1), layer, sinks, 0)
        raise BudgetError(
            f"a budget of {plan.budget} tokens has no room for a row of {plan.memory} beside a window of {head.window} "
            f"and {sinks} sinks: ask for at least {-(-least_bytes // token_bytes(layer))}, or for a smaller window"
        )
    head = replace(head, features=fits[-1])
    if plan.window is None:
        head = replace(head, window=head.window + (room - head_bytes(head, layer, sinks, 0)) // token)
    return head


def sinks_to_try(plan: Plan) -> tuple[int, ...]:
    """List the numbers of sinks to choose from, the largest first: it is the safest where the kl does not differ."""
    if plan.sinks is not None:
        return (plan.sinks,)
    return tuple(count for count in (SINKS, 2, 1, 0) if count <= plan.resolved_sinks)


def offers_of(run: Run, plan: Plan, layers: tuple[Layer, ...], windows_alone: bool = False) -> OffersOfHeads:
    """List the offers of every head under a plan, or its windows alone, from the prices that the run has measured."""
    if (prices := run.prices) is None:
        raise missing_measurement(run, plan, "prices")
    check_prices(prices, plan)
    has_slots = bool(plan.strategy_spec.far_field) and not windows_alone

    def is_allowed(option: Head) -> bool:
        if option.softmax:  # what fewer bits cost
            return option.bits in plan.fewer_bits
        return not option.features and (has_slots or not option.slots)

    length = plan.target_tokens(run.positions)
    return OffersOfHeads.of(prices.of_options(is_allowed), layers, plan.budget or 0, length, plan.may_grow)


def check_prices(prices: Prices, plan: Plan) -> None:
    """Refuse a plan that asks for options without a price."""
    bits = prices.options[0].bits
    if plan.bits not in (None, bits):
        raise RequestError(f"the prices were measured with {bits} bits a number, not {plan.bits}: start a new run")
    if plan.sinks not in (None, prices.sinks):
        raise RequestError(f"the prices were measured with sinks {prices.sinks}, not {plan.sinks}: start a new run")
    if plan.strategy_spec.far_field and not any(option.slots for option in prices.options):
        raise RequestError(
            f"the prices were measured without slots, which the strategy {plan.strategy} needs: start a new run "
            f"with --strategy {plan.strategy}"
        )


def missing_measurement(run: Run, plan: Plan, product: str) -> RequestError:
    """Explain which measurement of a plan is missing, and whether resuming the run or only a new run measures it."""
    if product in ("profile", run.plan.strategy_spec.product) and not run.checkpoint.exists():
        return RequestError(f"{str(run.folder)!r} has no {product} yet: `linearizer run --resume` measures them")
    return RequestError(
        f"{str(run.folder)!r} has no {product}, by which the strategy {plan.strategy} decides, and resuming it "
        f"measures none: start a new run with --strategy {plan.strategy}"
    )
