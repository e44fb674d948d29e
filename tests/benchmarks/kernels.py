"""Time attention, slots, losses and training steps beside rivals, in one process: python -m tests.benchmarks.kernels.

Writes results/kernels-DEVICE.json. Without a GPU it times the PyTorch paths at small sizes, and says so. `ours` is what
the doors choose. `floor` is the time that the machine's own copy and product rates allow for the bytes and operations
that cannot be avoided; `error` is relative, against float64 on a part of the input.
"""

import argparse
import json
from itertools import chain
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
    own = row["ours"]["seconds"] if isinstance(row["ours"], dict) else row["ours"]
    floor = f", {row['floor'] / own:.0%} of the floor's speed" if "floor" in row else ""
    error = f", error {row['error']:.1e}" if "error" in row else ""
    yield f"  ours {own * 1e3:.3f} ms{floor}{error}"
    for name, x in {**row.get("rivals", {}), **row}.items():
        if isinstance(x, dict) and ("seconds" in x or "failed" in x):
            memory = f", {x['bytes'] / 2**20:.0f} MiB" if x.get("bytes") else ""
            ratio = f", {x['seconds'] / own:.2f} of ours" if "seconds" in x else ""
            yield f"  {name} {times(x)}{ratio}{memory}"


def crossover(rows):
    """The shortest text from which on ours is faster than every softmax rival, by batch and features."""
    found: dict[str, int | None] = {}
    for row in sorted((r for r in rows if r["op"] == "prefill"), key=lambda r: -r["tokens"]):
        rivals = [x["seconds"] for name, x in row["rivals"].items() if name.startswith("sdpa") and "seconds" in x]
        key = f"batch {row['batch']}, {row['features']} features"
        if rivals and row["ours"] < min(rivals) and found.get(key, row["tokens"]) is not None:
            found[key] = row["tokens"]
        elif key not in found:
            found[key] = None
    return found


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
    rows = []
    for row in chain(prefill(limits, quick), decode(quick), slots(quick), losses(quick), layerwise_steps(quick)):
        rows.append(row)
        print("\n".join(describe(row)), flush=True)
    print("faster than softmax from", crossover(rows))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"kernels-{name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows, "crossover": crossover(rows)}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
