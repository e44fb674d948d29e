"""Attention in both directions on two real encoders: quality beside controls, time beside SDPA.

  python -m tests.benchmarks.both_ways                  all parts; what is finished is kept, and a second call goes on
  python -m tests.benchmarks.both_ways --parts time     only some: text, long, longest, farthest, others, pictures, time

Quality is that of `linearizer run` and `linearizer evaluate`, on held-out texts of Python's language reference and on
photographs; a control has as many keys. `long`, `longest` and `farthest` stretch the 512 positions of the text model,
and train nothing; `others` puts what papers have in the place of slots. Time is CPU time of one layer of 12 heads of 64
(pictures: 6), in float32 on one thread; eager is softmax written out.
Writes results/both-ways.json, .md and .svg.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.encoders import encoder_run
from linearizer.encoders.attention_both_ways import BothWays
from linearizer.encoders.distill_encoder import distil
from linearizer.encoders.encoder_quality import Judgement, LayerTime, MergedTokens, describe_scores, read_outputs, score
from linearizer.encoders.encoder_report import judge_encoder, quality_table
from linearizer.encoders.key_budget import spend_keys
from linearizer.encoders.kinds import ENCODER
from linearizer.encoders.layer_times import crossing, time_layer
from linearizer.evaluate.language import Units, owners_of
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.progress import finish
from linearizer.publish.card import public_text, table_markdown
from linearizer.report.line_chart import Line
from linearizer.run.files import write_whole
from linearizer.run.results import Request
from tests.benchmarks.both_ways_controls import Flow, Normed, Nystrom, Summed
from tests.benchmarks.both_ways_models import photographs, picture_encoder, sentence_encoder
from tests.benchmarks.line_chart import Panel, draw

RESULTS = Path(__file__).parent / "results" / "both-ways"
TEXT, PICTURE = {"budget": 80, "length": 512}, {"budget": 100, "texts": 4, "steps": 0}
LONG = {"budget": 256, "length": 2048, "texts": 8, "steps": 0}
LONGEST = {"budget": 256, "length": 4096, "texts": 4, "steps": 0}
FARTHEST = {**LONGEST, "length": 8192}
OTHERS = {"budget": 80, "length": 512, "texts": 8, "batch": 1}
LENGTHS, GRIDS = (512, 1024, 2048, 4096, 8192, 16384, 32768), ((37, 37), (74, 74), (148, 148))
TRAINED = (
    "window and slots",
    "window",
    "elu + 1 (LinFusion)",
    "window and elu + 1",
    "MALA",
    "TransNormer",
    "LightNet",
    "Flowformer",
)
ABOUT_OTHERS = (
    "Texts are learnt from one by one, 32 in all, at the rate of a run. The sums of NaLaFormer have twice as many "
    "features as a head has dimensions, and therefore more keys than the budget."
)
MOST_EAGER = 4096  # tokens: the scores of all pairs take gigabytes


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--work", type=Path, default=Path("build") / "both-ways", help="what is made once is kept here")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    path = RESULTS.with_suffix(".json")
    found = {}
    for part in given.parts:
        result = PARTS[part](given.work)
        found = {**(json.loads(path.read_text()) if path.exists() else {}), part: result}
        write_whole(path, json.dumps({name: found[name] for name in PARTS if name in found}, indent=1) + "\n")
        write_whole(RESULTS.with_suffix(".md"), write_tables(found))
        if "time" in found:
            write_whole(RESULTS.with_suffix(".svg"), draw_times(found["time"]))
    print(write_tables(found))


def judge_texts(work, name, plan, lengths=()):
    return judge(work, name, lengths, model=str(sentence_encoder(work)), **plan)


def judge_others(work):
    """Judge what papers have in the place of slots, before and after the training of a student."""
    folder = work / "runs" / "others"
    plan = EncoderPlan(model=str(sentence_encoder(work)), **OTHERS)
    encoder = ENCODER.begin(folder, plan, resume=folder.exists())
    shares, how = encoder_run.read_shares(encoder, encoder.plan, None), encoder.both_ways
    teacher, dims = encoder_run.load_teacher(encoder), encoder.inspection.head_dim
    expected = read_outputs(teacher, shares.judged)
    student = encoder_run.make_student(encoder, teacher, encoder.uniform_layers(how))
    weights = {name: x.clone() for name, x in student.state_dict().items()}
    rows = {
        "window and slots": how,
        "window": encoder.plain_window,
        "merged tokens (ToMe)": MergedTokens(int(how.keys)),
        "Nyström (SOFT)": Nystrom(38, encoder.tokens),
        "elu + 1 (LinFusion)": Summed("elu", dims, dims),
        "window and elu + 1": Summed("elu", dims, dims, block=2),
        "MALA": Summed("elu", dims, dims, mala=True),
        "NaLaFormer": Summed("signs", 2 * dims, dims),
        "TransNormer": Normed(dims, over_tokens=False),
        "LightNet": Normed(dims, over_tokens=True),
        "Flowformer": Flow(dims),
    }
    scores = {}
    for name, attention in rows.items():
        student.load_state_dict(weights)
        student.attend_with(attention)
        keys = getattr(attention, "keys", how.keys)  # merged tokens do not count their search
        scores[name] = keys, score(expected, read_outputs(student, shares.judged))
        if name in TRAINED:
            finish(distil(student, shares.learnt, encoder.plan.batch))
            scores[f"{name}, trained"] = keys, score(expected, read_outputs(student, shares.judged))
    drawn, owners = owners_of(shares.documents)
    over, first = Units(owners), scores["window and slots"][1]
    described = {name: describe_scores(keys, each, first, over) for name, (keys, each) in scores.items()}
    judgement = Judgement(encoder.plan.text, encoder.tokens, len(shares.judged), drawn, over.count, described)
    attention = encoder.inspection.share(encoder.tokens)
    made = {**asdict(how), "tokens": encoder.tokens, "attention": attention}
    table = table_markdown(quality_table(encoder, judgement))
    return {"made": made, "verdict": ABOUT_OTHERS, "tables": [table], "judged": [asdict(judgement)]}


def judge_pictures(work):
    return judge(work, "pictures", (), model=str(picture_encoder(work)), pictures=str(photographs(work)), **PICTURE)


def judge(work, name, lengths, **plan):
    """Make a run, or go on with it, judge it at other lengths, too, and return its tables."""
    encoder = ENCODER.begin(work / "runs" / name, EncoderPlan(**plan), resume=(work / "runs" / name).exists())
    finish(pipeline.linearize(encoder.run))
    for length in lengths:
        finish(pipeline.evaluate_run(encoder.run, Request(length=length, texts=encoder.plan.texts)))
    attention = encoder.inspection.share(encoder.tokens)
    made = {**asdict(encoder.ways), "tokens": encoder.tokens, "attention": attention}
    judged = [replace(each, text=public_text(each.text)) for each in encoder.judgements.values()]
    tables = [table_markdown(quality_table(encoder, each)) for each in judged]
    verdict = judge_encoder(encoder).sentence
    return {"made": made, "verdict": verdict, "tables": tables, "judged": [asdict(each) for each in judged]}


def time_layers(work):
    """Time one layer of a text and of a picture at several sizes."""
    torch.set_num_threads(1)
    text, picture = spend_keys(256, 1, 1, 1, slots=True), spend_keys(100, 2, 1, 0, slots=True)
    rows = [time_sizes(12, (length,), text) for length in LENGTHS]
    return rows + [time_sizes(6, grid, picture) for grid in GRIDS]


def time_sizes(heads, grid, how: BothWays):
    timed = time_layer(how, heads, 64, grid, clock=time.process_time)
    row = {"tokens": timed.tokens, "axes": len(grid), "keys": how.keys, "linear": timed.student, "sdpa": timed.sdpa}
    if timed.tokens <= MOST_EAGER:
        query, key, value = (torch.randn(1, heads, timed.tokens, 64) for _ in range(3))
        begun = time.process_time()
        with torch.no_grad():
            (query * 0.125 @ key.mT).softmax(-1) @ value
        row["eager"] = time.process_time() - begun
    return row


def write_tables(found):
    """Write the results as Markdown."""
    lines = ["# Attention in both directions", "", "`python -m tests.benchmarks.both_ways`"]
    for part in (part for part in PARTS if part in found and part != "time"):
        made = found[part]["made"]
        about = f"{made['tokens']:,} tokens, attention {made['attention']:.0%} of the operations"
        lines += ["", f"## {TITLES[part]}: {about}", "", found[part]["verdict"]]
        if kl := made.get("kl"):
            all_kl = ", ".join(f"{name} {each:.4f}" for name, each in kl.items())
            lines += ["", f"Chosen: {made['chosen']}, by the KL before training on other texts: {all_kl}."]
        lines += [line for table in found[part]["tables"] for line in ("", table)]
    if "time" in found:
        lines += ["", "## CPU seconds of a layer", "", "| | tokens | keys | linear | SDPA | eager | times faster |"]
        lines.append("| --- | --: | --: | --: | --: | --: | --: |")
        for row in found["time"]:
            kind, faster = "text" if row["axes"] == 1 else "picture", row["sdpa"] / row["linear"]
            times = " | ".join(f"{row[name]:.3g}" if name in row else "" for name in ("linear", "sdpa", "eager"))
            lines.append(f"| {kind} | {row['tokens']:,} | {row['keys']:g} | {times} | {faster:.2g} |")
        lines += ["", "![Time of a layer over the number of tokens](both-ways.svg)"]
    return "\n".join(lines) + "\n"


def draw_times(rows):
    """Draw time over tokens, for texts and for pictures, and name where the lines of SDPA and ours cross."""
    looks = {"linear": "lz-student", "sdpa": "lz-window", "eager": "lz-dashed"}
    panels = []
    for axes, kind in ((1, "text"), (2, "picture")):
        own = [row for row in rows if row["axes"] == axes]
        lines = [
            Line(name, [(row["tokens"], row[name]) for row in own if name in row], look)
            for name, look in looks.items()
            if sum(name in row for row in own) > 1
        ]
        where = crossing([LayerTime(row["tokens"], row["linear"], row["sdpa"]) for row in own])
        title = f"A {kind}: " + (f"equal at {where:,.0f} tokens" if where else "seconds of a layer")
        panels.append(Panel(title, lines, lambda seconds: f"{seconds:g} s"))
    return draw(panels, "CPU seconds of a layer over the number of tokens: ours, SDPA, and softmax written out")


TITLES = {
    "text": "MiniLM-L6, windows and slots",
    "long": "MiniLM-L6 with stretched positions, windows and slots",
    "longest": "MiniLM-L6 with positions stretched further, windows and slots",
    "farthest": "MiniLM-L6 with positions stretched sixteen times, windows and slots",
    "others": "MiniLM-L6, what papers have in the place of slots",
    "pictures": "DINOv2-small, windows and slots",
}
PARTS = {
    "text": partial(judge_texts, name="text", plan=TEXT),
    "long": partial(judge_texts, name="long", plan=LONG, lengths=(512,)),
    "longest": partial(judge_texts, name="longest", plan=LONGEST),
    "farthest": partial(judge_texts, name="farthest", plan=FARTHEST),
    "others": judge_others,
    "pictures": judge_pictures,
    "time": time_layers,
}

if __name__ == "__main__":
    main()
