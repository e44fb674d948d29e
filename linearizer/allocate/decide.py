"""What a plan and the measurements of a run decide."""

from __future__ import annotations

from collections.abc import Sequence

from linearizer.allocate.by_freedoms import allocate, check_amount, check_dial
from linearizer.allocate.by_prices import OffersOfHeads, allocate_by_prices, check_least_budget
from linearizer.errors import RequestError
from linearizer.run.allocation import Allocation, heads_replaced
from linearizer.run.folder import Run
from linearizer.run.head_bytes import SINKS, Head, Layer, cache_bytes, feature_bytes, slot_bytes, token_bytes
from linearizer.run.plan import Plan
from linearizer.run.prices import SMALLEST, Prices


def check_dials(plan: Plan, layers: tuple[Layer, ...]) -> None:
    """Refuse a budget that cannot be spent as the plan's strategy spends it, whatever will be measured."""
    if plan.rules.spends_tokens:
        check_amount("budget", plan.budget, 1)
        least = min(sinks_tried(plan)) if plan.rules.decided_by == "prices" else plan.kept_sinks
        check_least_budget(layers, plan.budget or 0, least, plan.kept_bits)
    else:
        check_dial(layers, plan.budget, plan.features, plan.strategy, plan.kept_window, plan.kept_sinks)


def decide(run: Run, plan: Plan, layers: tuple[Layer, ...]) -> Allocation:
    """Allocate what a plan asks for, from what the run has measured."""
    check_dials(plan, layers)
    if plan.rules.decided_by == "prices":
        prices, positions = prices_for(run, plan)
        return allocate_by_prices(prices, layers, plan.budget or 0, positions, plan.constant)[0]
    if plan.rules.decided_by == "budget":
        return alike(layers, plan, plan.kept_sinks)
    if plan.rules.decided_by == "gates":
        if (gates := run.gates) is None:
            raise missing(run, plan, "gates")
        return by_gates(gates, layers, plan.budget or 0, plan.kept_sinks, plan.target_tokens(run.positions))
    if (profile := run.profile) is None:
        raise missing(run, plan, "profile")
    return allocate(
        profile,
        layers,
        budget=plan.budget,
        features=plan.features,
        strategy=plan.strategy,
        window=plan.kept_window,
        sinks=plan.kept_sinks,
    )


def decidable(run: Run) -> bool:
    """Tell whether a run has measured all that it decides by, its profile in any case."""
    return run.has("profile.json") and run.has(f"{run.plan.rules.product}.json")


def alike(layers: Sequence[Layer], plan: Plan, sinks: int) -> Allocation:
    """Give every head a window, and as much of what is far if the plan has it, all that the budget pays for."""

    far_field = plan.rules.far_field

    def row(layer: Layer) -> tuple[Head, ...]:
        token = token_bytes(layer, plan.kept_bits)
        room = (plan.budget or 0) * token_bytes(layer) - sinks * token
        one = {"": 0, "slots": slot_bytes(layer, plan.kept_bits), "features": feature_bytes(layer)}[far_field]
        count = room // (token + one) if one else 0
        slots, features = (count if far_field == far else 0 for far in ("slots", "features"))
        head = Head((room - count * one) // token, features, slots=slots, bits=plan.kept_bits)
        return (head,) * heads_replaced(layer)

    return Allocation("window", sinks, tuple(map(row, layers)))


def sinks_tried(plan: Plan) -> tuple[int, ...]:
    """Give the numbers of sinks that a plan leaves open, the most first: where texts cannot tell, that is safest."""
    return (
        tuple(count for count in (SINKS, 2, 1, 0) if count <= plan.kept_sinks) if plan.sinks is None else (plan.sinks,)
    )


def prices_for(run: Run, plan: Plan) -> tuple:
    """Give the prices that a plan allocates by, and the length at which it pays for heads left softmax."""
    if (prices := run.prices) is None:
        raise missing(run, plan, "prices")
    check_asked(prices, plan)

    def wanted(head: Head) -> bool:
        far_field = plan.rules.far_field
        return (not head.slots or far_field == "slots") and (not head.features or far_field == "features")

    return prices.of_options(wanted), plan.target_tokens(run.positions)


def check_asked(prices: Prices, plan: Plan) -> None:
    """Refuse a plan that asks for what the prices do not tell of."""
    bits = prices.options[0].bits
    if plan.bits not in (None, bits):
        raise RequestError(f"the prices were measured with {bits} bits a number, not {plan.bits}: start a new run")
    if plan.sinks not in (None, prices.sinks):
        raise RequestError(f"the prices were measured with sinks {prices.sinks}, not {plan.sinks}: start a new run")
    far_field = plan.rules.far_field
    if far_field and not any(getattr(option, far_field) for option in prices.options):
        raise RequestError(
            f"the prices were measured without {far_field}, which the strategy {plan.strategy} needs: start a new run "
            f"with --strategy {plan.strategy}"
        )


def offers_of(run: Run, plan: Plan, layers: tuple[Layer, ...]) -> OffersOfHeads:
    """List the offers of every head under a plan."""
    prices, positions = prices_for(run, plan)
    return OffersOfHeads.of(prices, layers, plan.budget or 0, positions, plan.constant)


def missing(run: Run, plan: Plan, what: str) -> RequestError:
    """Say what a plan needs and a run has not measured: going on with the run may measure it, or only a new one."""
    if what in ("profile", run.plan.rules.product) and not run.checkpoint.exists():
        return RequestError(f"{str(run.folder)!r} has no {what} yet: `linearizer run --resume` measures them")
    return RequestError(
        f"{str(run.folder)!r} has no {what}, by which the strategy {plan.strategy} decides, and going on with it "
        f"measures none: start a new run with --strategy {plan.strategy}"
    )


def by_gates(
    gates: Sequence[Sequence[float]], layers: Sequence[Layer], budget: int, sinks: int, length: int
) -> Allocation:
    """Leave softmax as many heads as the budget pays for, those with the largest gates; the rest share what is left."""
    order = sorted(
        ((index, head) for index, row in enumerate(gates) for head in range(len(row))),
        key=lambda place: -gates[place[0]][place[1]],
    )
    whole: set[tuple[int, int]] = set()
    least = sinks + max(SMALLEST, budget // 4)  # a window is worth more than another whole head
    for place in order:
        if shared(layers, gates, whole | {place}, budget, length) < least:
            break
        whole.add(place)
    window = shared(layers, gates, whole, budget, length) - sinks
    return Allocation(
        "duo",
        sinks,
        tuple(
            tuple(Head(softmax=True) if (index, head) in whole else Head(window=window) for head in range(len(row)))
            for index, row in enumerate(gates)
        ),
    )


def shared(
    layers: Sequence[Layer], gates: Sequence[Sequence[float]], whole: set[tuple[int, int]], budget: int, length: int
) -> int:
    """Give the tokens that every other head can have if some have their whole cache at a length."""
    paid = cache_bytes(layers, budget) - sum(length * token_bytes(layers[index]) for index, _ in whole)
    others = sum(
        token_bytes(layer)
        for index, (layer, row) in enumerate(zip(layers, gates, strict=True))
        for head in range(len(row))
        if (index, head) not in whole
    )
    return paid // others if others else 0
