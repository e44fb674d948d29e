"""The tables of what paper.py measured, with what the paper printed of the same model."""

import json
from statistics import fmean, stdev

from linearizer.evaluate.language import student_t
from linearizer.run.files import write_whole

PRINTED = {  # by the name of a model: of Nishikawa, Higuchi and Suzuki, arXiv:2507.03340
    "gpt2": {
        "chosen": (130, 182, 35, 44, 42, 65, 92, 33, 28, 34, 46, 39),
        "teacher": 3.3558,
        "losses": {
            "fix": {"direct": 3.9657, "softmax": 5.4082, "l2": 6.2453},
            "dof": {"direct": 5.2651, "softmax": 4.0170, "l2": 6.6802},
            "dof+clip": {"direct": 5.4547, "softmax": 4.0355, "l2": 6.2378},
            "dijiang": {"direct": 5.5965},
            "performer": {"none": 8.1586},
        },
        "milliseconds": {"direct": 109.4, "softmax": 90.4, "l2": 60.6},
        "errors": {
            "fix": (8.7, 10.6, 3.74, 2.39, 3.48, 1.77, 1.8, 1.21, 1.19, 1.22, 1.32, 8.26),
            "dof": (7.83, 8.92, 4.15, 2.5, 3.48, 1.76, 1.76, 1.24, 1.33, 1.29, 1.32, 8.52),
        },
        "seconds": 105,
    },
    "pythia-1b": {
        "chosen": (277, 138, 275, 132, 204, 167, 115, 142, 231, 64, 96, 73, 40, 52, 34, 9),
        "seconds": 477,
    },
}
NAMES = {"fix": "Fix", "dof": "DoF", "dof+clip": "DoF + clip", "performer": "Performer", "dijiang": "DiJiang"}
LOSSES = ("softmax", "l2", "direct", "none")


def write_tables(out):
    """Write the tables beside the file of cells; return them."""
    cells = json.loads(out.with_suffix(".json").read_text())
    printed = PRINTED.get(out.name.removeprefix("paper-"), {})
    tables = [of_freedoms, of_losses, of_order, of_errors, of_amounts, of_times]
    text = "\n\n".join(filter(None, (table(cells, printed) for table in tables))) + "\n"
    write_whole(out.with_suffix(".md"), text)
    return text


def of_freedoms(cells, printed):
    """Which features layers get, and the degrees of freedom of their heads."""
    if "freedoms" not in cells:
        return ""
    found, count = cells["freedoms"], len(cells["freedoms"]["heads"])
    rows = [[NAMES[choice], *(f"{each:g}" for each in chosen)] for choice, chosen in found["chosen"].items()]
    rows += [["DoF, printed", *map(str, printed["chosen"])]] if "chosen" in printed else []
    chosen = table(["layer", *map(str, range(1, count + 1))], rows)
    heads = [
        [str(layer), f"{fmean(row) / max(row):.2f}", " ".join(f"{each:.1f}" for each in row)]
        for layer, row in enumerate(found["heads"], 1)
    ]
    freedoms = table(["layer", "mean / max", "heads"], heads)
    about = f"Features of a KV head, by layer; {cells['facts']['features']} in the mean"
    return f"{about}\n\n{chosen}\n\nDegrees of freedom N(λ) of query heads at λ = 2⁻⁸\n\n{freedoms}"


def of_losses(cells, printed):
    """The next-token loss of every choice by every loss, a table for each number of steps."""
    own, given, facts = cells["teacher"]["loss"], printed.get("teacher"), cells["facts"]
    teacher = f"{own:.4f}" + f" ({given} printed)" * bool(given)
    tables = []
    for steps in every_steps(cells):
        rows = [[NAMES[row], *(loss_in_words(cells, printed, row, loss, steps) for loss in LOSSES)] for row in NAMES]
        tokens = f"{steps} steps of {facts['batch']} × {facts['length']} tokens"
        about = f"Next-token loss after {tokens}, with 95% intervals over seeds; teacher {teacher}"
        tables.append(f"{about}\n\n{table(['', *LOSSES], rows)}")
    return "\n\n".join(tables)


def loss_in_words(cells, printed, row, loss, steps):
    values = values_of(cells, row, loss, steps, "loss")
    paper = printed.get("losses", {}).get(row, {}).get(loss)
    return (interval(values) if values else "") + f" ({paper} printed)" * (paper is not None)


def of_order(cells, _):
    """The best choice for every number of steps: whether more training changes the order."""
    rows = []
    for steps in every_steps(cells):
        for loss in LOSSES[:-1]:
            means = {
                row: fmean(values)
                for row in ("fix", "dof", "dof+clip")
                if (values := values_of(cells, row, loss, steps, "loss"))
            }
            pairs = paired(cells, loss, steps)
            gain = interval([a - b for a, b in pairs]) if pairs else ""
            order = " < ".join(NAMES[row] for row in sorted(means, key=means.get))
            rows += [[str(steps), loss, order, gain]] if means else []
    return "The order of choices by loss, the best first\n\n" + table(["steps", "by", "order", "Fix less DoF"], rows)


def paired(cells, loss, steps):
    """Return the losses of Fix and DoF, seed by seed."""
    seeds = sorted({int(name.rsplit("/", 1)[1]) for name in cells if name.count("/") == 3})
    names = ([f"{row}/{loss}/{steps}/{seed}" for row in ("fix", "dof")] for seed in seeds)
    return [tuple(cells[name]["loss"] for name in pair) for pair in names if all(name in cells for name in pair)]


def of_errors(cells, printed):
    """The errors of layers after training by L2."""
    steps = max((steps for steps in every_steps(cells) if values_of(cells, "fix", "l2", steps, "layers")), default=0)
    rows = []
    for row in ("fix", "dof"):
        if values := values_of(cells, row, "l2", steps, "layers"):
            means = [fmean(each) for each in zip(*(value["l2"] for value in values), strict=True)]
            rows.append([NAMES[row], *(f"{each:.3g}" for each in means), f"{sum(means):.3g}"])
        if row in printed.get("errors", {}):
            rows.append([f"{NAMES[row]}, printed, ×10⁻³", *map(str, printed["errors"][row]), ""])
    if not rows:
        return ""
    header = ["", *map(str, range(1, len(rows[0]) - 1)), "sum"]
    return "Error of the kernel by layer, Σ (K − K̂)² / Σ K², trained by L2\n\n" + table(header, rows)


def of_amounts(cells, _):
    """The errors of untrained features by their number."""
    shown = sorted((cell["features"], cell["layers"]) for name, cell in cells.items() if name.startswith("error/"))
    rows = [[str(count), *(f"{fmean(layers[loss]):.3g}" for loss in ("l2", "softmax"))] for count, layers in shown]
    header = ["features of a head", "error of the kernel", "KL of attention rows"]
    return "Untrained features by their number, means over layers\n\n" + table(header, rows)


def of_times(cells, printed):
    """Seconds of the estimate, of training on a text, and tokens that are written in a second."""
    lines = []
    if "freedoms" in cells:
        beside = f" ({printed['seconds']} printed, on an A100)" if "seconds" in printed else ""
        lines.append(f"Degrees of freedom are measured in {cells['freedoms']['seconds']:.0f} s{beside}.")
    for loss in LOSSES[:-1]:
        if values := [cell["seconds_a_text"] for name, cell in cells.items() if name.split("/")[1:2] == [loss]]:
            beside = f" ({printed['milliseconds'][loss]} ms printed)" if "milliseconds" in printed else ""
            lines.append(f"A text is trained on by {loss} in {fmean(values) * 1000:.0f} ms{beside}.")
    speeds = {"softmax (the teacher)": cells["teacher"]}
    speeds |= {NAMES[row]: cells[name] for row in NAMES if (name := f"speed/{row}") in cells}
    written = "; ".join(f"{name} {1000 / cell['tokens_per_second']:.1f} s" for name, cell in speeds.items())
    return "\n".join([*lines, f"1,000 tokens are written in: {written}."])


def every_steps(cells):
    return sorted({int(name.split("/")[2]) for name in cells if name.count("/") == 3})


def values_of(cells, row, loss, steps, kind):
    """Return a value of a cell for all its seeds."""
    return [cell[kind] for name, cell in cells.items() if name.startswith(f"{row}/{loss}/{steps}/")]


def interval(values):
    """Write a mean with its interval of 95% by Student's t."""
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{fmean(values):.4f} ± {student_t(len(values) - 1) * stdev(values) / len(values) ** 0.5:.4f}"


def table(header, rows):
    """Lay out a table of Markdown."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
