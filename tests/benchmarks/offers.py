"""What heads buy where all memories are on offer, and which kind is the best for each head at equal bytes.

  python -m tests.benchmarks.offers PRICES.json…     prices of the demo model: of a run, or of the quality benchmark

Prices come from `linearizer run demo --memories all`, or from `tests.benchmarks.quality --rows "best, 8 bits, all
memories"`, which keeps them in its folder of work. Prices of several files are of the same model; each is a column.
"""

import argparse
from collections import Counter
from pathlib import Path

from linearizer.allocate.by_prices import OffersOfHeads, allocate_by_prices, offers_for_head
from linearizer.pipeline import inspect
from linearizer.run.files import unseal
from linearizer.run.head_bytes import token_bytes
from linearizer.run.prices import Prices

BUDGETS = (16, 32, 64, 128)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prices", nargs="+", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    arguments = parser.parse_args(arguments)
    layers = inspect(arguments.model).layers
    text = "\n".join(table(Prices.from_json(unseal(path.read_text())), layers, path.stem) for path in arguments.prices)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def kind_of(head):
    """Name what holds a head's far field."""
    return head.memory or ("slots" if head.slots else "features" if head.features else "window")


def table(prices, layers, name):
    """What a budget buys, and how many heads each kind is the best for where all heads have the same bytes."""
    lines = [f"## {name}", ""]
    kinds = sorted({kind_of(option) for option in prices.options if not option.softmax})
    lines += ["| tokens | heads that buy | their kl, predicted | with windows and slots alone |", "|---" * 4 + "|"]
    plain = prices.of_options(lambda option: not option.memory)
    for budget in BUDGETS:
        all_offers, few = (OffersOfHeads.of(each, layers, budget, 512) for each in (prices, plain))
        bought, alone = allocate_by_prices(all_offers), allocate_by_prices(few)
        counts = Counter(kind_of(head) for row in bought.heads for head in row)
        said = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        kl = all_offers.kl(all_offers.levels(bought)), few.kl(few.levels(alone))
        lines.append(f"| {budget} | {said} | {kl[0]:.4f} | {kl[1]:.4f} |")
    lines += ["", "| kind | " + " | ".join(f"best for, of {budget}: sum of kl" for budget in BUDGETS) + " |"]
    lines.append("|---" * (1 + len(BUDGETS)) + "|")
    best = {budget: best_by_kind(prices, layers, budget, kinds) for budget in BUDGETS}
    for kind in kinds:
        cells = []
        for rows in best.values():
            own = [row[kind] for row in rows if kind in row]
            wins = sum(min(row, key=row.get) == kind for row in rows)
            cells.append(f"{wins}: {sum(own):.4f}" if len(own) == len(rows) else "too large")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def best_by_kind(prices, layers, budget, kinds):
    """The least kl of every head by each kind that fits, within the same bytes for all heads."""
    rows = []
    for layer, heads in zip(layers, prices.kl, strict=True):
        room = budget * token_bytes(layer)
        for kl in heads:
            offers = [o for o in offers_for_head(prices, layer, kl, 512, may_grow=False) if o.bytes <= room]
            own = {kind: [o.kl for o in offers if kind_of(o.head) == kind] for kind in kinds}
            rows.append({kind: min(kl) for kind, kl in own.items() if kl})
    return rows


if __name__ == "__main__":
    main()
