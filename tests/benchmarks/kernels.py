"""Time attention, slots, losses and training steps beside rivals, in one process: python -m tests.benchmarks.kernels.

Writes results/kernels-DEVICE.json. Without a GPU it times the PyTorch paths at small sizes, and says so. `ours` is what
the doors choose. `floor` is the time that the machine's own copy and product rates allow for the bytes and operations
that cannot be avoided; `error` is relative, against float64 on a part of the input.
"""

import argparse
import json
from pathlib import Path

import torch

from tests.benchmarks.attention_rows import prefill
from tests.benchmarks.loss_rows import losses, peak
from tests.benchmarks.slot_rows import slots
from tests.benchmarks.step_rows import layerwise_steps
from tests.benchmarks.timing import GPU, ceilings
from tests.benchmarks.token_rows import decode

RESULTS = Path(__file__).parent / "results"


def times(x):
    return f"{x['seconds'] * 1e3:.3f} ms" if "seconds" in x else x.get("failed", "")[:60]


def describe(row):
    """One line per row and rival."""
    sizes = {n: x for n, x in row.items() if not isinstance(x, dict | float) and n != "bytes"}
    yield " ".join(f"{n}={x}" for n, x in sizes.items())
    own = row["ours"] if isinstance(row["ours"], dict) else {"seconds": row["ours"]}
    error = f", error {row['error']:.1e}" if "error" in row else ""
    yield f"  ours {times(own)}{beside_floor(row, own)}{error}"
    for name, x in {**row.get("rivals", {}), **row}.items():
        if name != "ours" and isinstance(x, dict) and ("seconds" in x or "failed" in x):
            memory = f", {x['bytes'] / 2**20:.0f} MiB" if x.get("bytes") else ""
            yield f"  {name} {times(x)}{ratio(row, name, x, own)}{memory}"


def beside_floor(row, x):
    return f", {row['floor'] / x['seconds']:.0%} of the floor's speed" if "floor" in row and "seconds" in x else ""


def ratio(row, name, x, own):
    """How long a rival takes beside ours; both in a graph, where it is in one."""
    graph, beside = "ours in a graph", "ours"
    if name.endswith("in a graph") and name != graph:
        own, beside = row.get(graph, {}), graph
    if "seconds" not in x or "seconds" not in own:
        return ""
    return f", {x['seconds'] / own['seconds']:.2f} of {beside}" + (beside_floor(row, x) if name == graph else "")


def crossover(rows):
    """The shortest text from which on ours is faster than every softmax rival, by batch and features."""
    result: dict[str, int | None] = {}
    slower = set()
    for row in sorted((r for r in rows if r["op"] == "prefill" and "rivals" in r), key=lambda r: -r["tokens"]):
        rivals = [x["seconds"] for name, x in row["rivals"].items() if name.startswith("sdpa") and "seconds" in x]
        key = f"batch {row['batch']}, {row['features']} features"
        if isinstance(row["ours"], dict) or not rivals:  # not to be compared
            continue
        result.setdefault(key, None)
        if row["ours"] >= min(rivals):
            slower.add(key)
        elif key not in slower:
            result[key] = row["tokens"]
    return result


def collected(tables):
    """The rows of all tables; one that cannot go on says why, and the next begins."""
    for name, rows in tables.items():
        try:
            yield from rows
        except Exception as error:
            yield {"op": name, "ours": {"failed": f"{type(error).__name__}: {str(error)[:200]}"}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes of every table")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak))
        return
    quick = arguments.quick
    name = torch.cuda.get_device_name() if GPU else "cpu"
    limits = ceilings()
    machine = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(), **limits}
    print(f"{name}: copies {limits['copy'] / 1e9:.1f} GB/s, multiplies {limits['product'] / 1e12:.2f} TFLOP/s")
    if not GPU:
        print(f"no GPU here: PyTorch paths alone, small sizes, float32, {machine['threads']} threads")
    RESULTS.mkdir(exist_ok=True)
    path, rows = RESULTS / f"kernels-{name.lower().replace(' ', '-')}.json", []
    tables = {"prefill": prefill(limits, quick), "decode": decode(limits, quick), "slots": slots(quick)}
    for row in collected(tables | {"loss": losses(quick), "layerwise step": layerwise_steps(quick)}):
        rows.append(row)
        print("\n".join(describe(row)), flush=True)
        result = {"machine": machine, "rows": rows, "crossover": crossover(rows)}
        path.write_text(json.dumps(result, indent=1) + "\n")  # at every row: a machine may be lent for minutes
    print("faster than softmax from", crossover(rows))
    print(path)


if __name__ == "__main__":
    main()
