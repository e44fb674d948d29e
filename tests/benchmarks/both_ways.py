"""Attention in both directions on two real encoders: quality beside controls, time beside SDPA.

  python -m tests.benchmarks.both_ways                  all parts; what is finished is kept, and a second call goes on
  python -m tests.benchmarks.both_ways --parts time     only some: text, windows (text, without slots), pictures, time

Quality is that of `linearizer run`, on held-out texts of Python's language reference and on photographs; a
control has as many keys. Time is CPU time of one layer of 12 heads of 64 (pictures: 6), in float32 on one thread.
Writes results/both-ways.json and .md.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from linearizer.encoders import encoder_run
from linearizer.encoders.attention_both_ways import BothWays
from linearizer.encoders.key_budget import spend_keys
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.progress import finish
from linearizer.run.files import write_whole
from tests.benchmarks.both_ways_models import photographs, picture_encoder, sentence_encoder

RESULTS = Path(__file__).parent / "results" / "both-ways"
TEXT, PICTURE = {"budget": 80, "length": 512}, {"budget": 100, "texts": 4, "steps": 0}
LENGTHS, GRIDS = (512, 2048, 8192, 16384), ((37, 37), (74, 74), (148, 148))
TIMED = 2  # times; the fastest counts


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--work", type=Path, default=Path("build") / "both-ways", help="what is made once is kept here")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    path = RESULTS.with_suffix(".json")
    found = json.loads(path.read_text()) if path.exists() else {}
    for part in given.parts:
        found[part] = PARTS[part](given.work)
        write_whole(path, json.dumps(found, indent=1) + "\n")
        write_whole(RESULTS.with_suffix(".md"), write_tables(found))
    print(write_tables(found))


def judge_text(work):
    return judge(work, "text", model=str(sentence_encoder(work)), **TEXT)


def judge_windows(work):
    return judge(work, "windows", model=str(sentence_encoder(work)), **TEXT, slots=False)


def judge_pictures(work):
    return judge(work, "pictures", model=str(picture_encoder(work)), pictures=str(photographs(work)), **PICTURE)


def judge(work, name, **plan):
    """Make a run, or go on with it, and return its table."""
    run = encoder_run.begin(work / "runs" / name, EncoderPlan(**plan), resume=(work / "runs" / name).exists())
    rows = finish(encoder_run.linearize(run))
    made = {**asdict(run.both_ways), "tokens": run.tokens, "attention": run.inspection.share(run.tokens)}
    return {"made": made, "rows": {row: asdict(quality) for row, quality in rows.items()}}


def time_layers(work):
    """Time one layer of a text and of a picture at several sizes."""
    torch.set_num_threads(1)
    text, picture = spend_keys(256, 1, 1, 1, slots=True), spend_keys(100, 2, 1, 0, slots=True)
    rows = [time_layer(12, (length,), text) for length in LENGTHS]
    return rows + [time_layer(6, grid, picture) for grid in GRIDS]


def time_layer(heads, grid, how: BothWays):
    tokens = torch.Size(grid).numel() + (how.first if len(grid) == 2 else 0)
    query, key, value = (torch.randn(1, heads, tokens, 64) for _ in range(3))
    axes = grid if len(grid) == 2 else ()
    ours = cpu_seconds(lambda: how.attend(query, key, value, 0.125, axes))
    exact = cpu_seconds(lambda: scaled_dot_product_attention(query, key, value))
    return {"tokens": tokens, "axes": len(grid), "keys": how.keys, "seconds": ours, "sdpa": exact}


def cpu_seconds(work):
    with torch.no_grad():
        seconds = []
        for _ in range(TIMED):
            begun = time.process_time()
            work()
            seconds.append(time.process_time() - begun)
    return min(seconds)


def write_tables(found):
    """Write the results as Markdown."""
    lines = ["# Attention in both directions", "", "`python -m tests.benchmarks.both_ways`"]
    for part in (part for part in found if part != "time"):
        made = found[part]["made"]
        about = f"{made['tokens']:,} tokens, attention {made['attention']:.0%} of the operations"
        lines += ["", f"## {TITLES[part]}: {about}", "", "|  | keys | KL | agreement | cosine | hidden states |"]
        lines.append("| --- | --: | --: | --: | --: | --: |")
        for name, row in found[part]["rows"].items():
            shares = f"{row['agreement']:.1%} | {row['cosine']:.4f} | {row['hidden']:.4f}"
            lines.append(f"| {name} | {row['keys']:g} | {row['kl']:.4f} | {shares} |")
    if "time" in found:
        lines += ["", "## CPU seconds of a layer", "", "| | tokens | keys | linear | SDPA | times faster |"]
        lines.append("| --- | --: | --: | --: | --: | --: |")
        for row in found["time"]:
            kind, faster = "text" if row["axes"] == 1 else "picture", row["sdpa"] / row["seconds"]
            times = f"{row['seconds']:.3g} | {row['sdpa']:.3g} | {faster:.2g}"
            lines.append(f"| {kind} | {row['tokens']:,} | {row['keys']:g} | {times} |")
    return "\n".join(lines) + "\n"


TITLES = {
    "text": "MiniLM-L6, windows and slots",
    "windows": "MiniLM-L6, windows alone",
    "pictures": "DINOv2-small, windows and slots",
}
PARTS = {"text": judge_text, "windows": judge_windows, "pictures": judge_pictures, "time": time_layers}

if __name__ == "__main__":
    main()
