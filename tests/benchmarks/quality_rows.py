"""The rows of the table that decides: of each its recipe, what of its plan is not as usual, and a line about it."""

from linearizer.plan.recipes import RECIPES, STRATEGIES
from linearizer.plan.rule_papers import RULE_PAPERS
from linearizer.student.update_rules import UPDATE_RULES
from tests.benchmarks.rivals import RULES
from tests.benchmarks.shares import ABOUT

STEPS, MEMORY_STEPS = 60, 300  # of every recipe that trains; of memories alone
OURS = {
    "best": "gain",
    "distilled": "gain",
    "windows": "windows",
}  # recipes of ours that prices decide, and their strategies
SINKS = {"sinks": 4}  # as these recipes have it; where heads are priced the number is measured


ROWS = {  # name -> recipe and what of its plan is not as usual; in the order in which they are measured
    "best": ("best", {}),
    "distilled": ("distilled", {}),
    "best --may-grow": ("best", {"may_grow": True}),
    "best, 8 bits": ("best", {"bits": 8}),
    "best, 8 bits --may-grow": ("best", {"bits": 8, "may_grow": True}),
    "windows, 8 bits": ("windows", {"bits": 8}),
    "windows, 8 bits --may-grow": ("windows", {"bits": 8, "may_grow": True}),
    "windows, 16 bits": ("windows", {"bits": 16}),
    "windows, 16 bits --may-grow": ("windows", {"bits": 16, "may_grow": True}),
    "windows": ("windows", {}),
    "windows --may-grow": ("windows", {"may_grow": True}),
    "best, 8 bits, uniform": ("best", {"bits": 8}),
    "best, 16 bits, uniform": ("best", {"bits": 16}),  # what memories stand beside: slots of their bytes
    "best, 16 bits": ("best", {"bits": 16}),
    "swa": ("swa", SINKS),
    "swa, 8 bits": ("swa", {"bits": 8, **SINKS}),
    "evict (h2o)": ("swa", SINKS),
    "evict (tova)": ("swa", SINKS),
    **{f"{rule}, 8 bits": ("swa", SINKS) for rule in RULES},
    **{f"{kind}, 8 bits, by {share}": ("best", {"bits": 8}) for share in ABOUT for kind in ("slots", *RULES)},
    **{f"cache, {bits} bits": ("swa", SINKS) for bits in (2, 3, 4)},
    "duo --may-grow": ("swa", {"may_grow": True, **SINKS}),
    "best, 8 bits --may-grow at 8192": (
        "best",
        {"may_grow": True, "target_length": 8192, "length": 1024, "bits": 8},
    ),
    "windows --may-grow at 8192": (
        "windows",
        {"may_grow": True, "target_length": 8192, "length": 1024, "bits": 8},
    ),
    "features": ("features", SINKS),
    "lolcats": ("lolcats", {}),
    "hedgehog": ("hedgehog", {}),
    "paper": ("paper", {}),
    "performer": ("performer", {}),
    "dijiang": ("dijiang", {}),
    "paper, fix": ("paper", {"strategy": "fix"}),
    "features, fix": ("features", {"strategy": "fix", **SINKS}),
    "paper, direct": ("paper", {"loss": "direct"}),
}
for name in UPDATE_RULES:  # beside the same window in every head: as they begin, and trained
    memory = {"feature_map": name, **SINKS}
    ROWS |= {f"{name}, untrained": (name, {**memory, "steps": 0})}
    ROWS |= {f"{name}, {MEMORY_STEPS} steps": (name, {**memory, "steps": MEMORY_STEPS, "batch": 1})}
ROWS |= {
    "sas": ("sas", SINKS),
}


PRICED_FEATURES = "every KV head a window, or a window with features, 8 bits a number, by its price"
FORMER = {  # rows of methods that are gone, since they measured worse: name -> what they were
    "best, 100 steps of adapters": "ours: as distilled, in 100 steps, whatever the adapters gave",
    "best, 100 steps": "ours: as best; what layers write fitted to the teacher's by least squares, 100 steps",
    "gain-features": f"ours: {PRICED_FEATURES}; far fields trained layer by layer, {STEPS} steps",
    "gain-features --may-grow": f"ours: {PRICED_FEATURES}, or its whole cache; trained layer by layer, {STEPS} steps",
}


def describe_row(row):
    """Describe a row in a line."""
    if row in FORMER:
        return FORMER[row]
    if row.startswith("duo"):
        return "each KV head its whole cache or a window, 16 bits a number, by learned gates (DuoAttention, 2410.10819)"
    kind, (recipe, changes) = row.split()[0].rstrip(","), ROWS[row]
    rule = row.partition("(")[2].rstrip(")") or kind
    if kind == "cache":
        return f"the whole cache, {row.split()[1]} bits a number: keys per channel, values per token, rotated; it grows"
    if rule in RULES:
        bits = "16" if kind == "evict" else "8"
        return f"{RULES[rule]}; {bits} bits, {ABOUT.get(share_of(row), 'the same bytes in every head')}"
    if kind == "slots":
        return f"a window and as many slots in every head; 8 bits, {ABOUT[share_of(row)]}"
    if changes.get("feature_map") in UPDATE_RULES and "strategy" not in changes:
        trained = (
            f"{changes['steps']} steps of a text, layer by layer" if changes["steps"] else "as it begins, untrained"
        )
        return f"{RULE_PAPERS[changes['feature_map']].about}, beside the same window in every head; {trained}"
    if recipe in OURS:
        return describe_priced(row)
    changed = [
        f"{name} {value}" + (f": {STRATEGIES[value].about}" if name == "strategy" else "")
        for name, value in changes.items()
        if name not in ("sinks", "may_grow")
    ]
    return "; with ".join(filter(None, [RECIPES[recipe].about, ", ".join(changed)]))


def describe_priced(row):
    """Describe in a line what the KV heads of a row of ours hold, in how many bits, and what is decided and trained."""
    recipe, changes = ROWS[row]
    strategy = STRATEGIES[changes.get("strategy", OURS[recipe])]
    bits = (
        f"{changes['bits']} bits"
        if "bits" in changes
        else "4 to 8 bits"
        if strategy.fewer
        else f"{strategy.bits[0]} bits"
    )
    if "uniform" in row:
        return f"ours: the same window and as many slots in every KV head, {bits} a number; no training"
    held = ["a window"] + [f"a window with {strategy.far_field}"] * bool(strategy.far_field)
    held += ["its whole cache"] * changes.get("may_grow", False)
    parts = [f"ours: every KV head {', or '.join(held)}, {bits} a number, by its price"]
    parts += [f"priced for texts of {changes.get('target_length')} tokens"] * ("target_length" in changes)
    steps = {**RECIPES[recipe].choices, **changes}.get("steps")
    learnt = f"adapters learn from the teacher's logits in {steps} steps, and stay where they help on other texts"
    parts.append(learnt if steps else "no training")
    return "; ".join(parts)


def share_of(row):
    """Name what gives heads their shares of the bytes in a row, where that is said: our prices, or others'."""
    return row.partition(", by ")[2]


def is_control(row):
    """Return whether no student of its own is judged in a row."""
    return row.split()[0].rstrip(",") in ("evict", "cache", *RULES)
