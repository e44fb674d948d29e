"""Write the measurements of a real model that the first page shows:  python -m tests.benchmarks.landing

They are those of results/real-smollm2-135m.json and of results/questions-smollm2-135m.json, in a file of the package.

  python -m tests.benchmarks.landing --ask RUN   first asks the questions of RUN's teacher, student and a plain window

RUN is a run of SmolLM2-135M-Instruct at a budget of 256 tokens (`linearizer run MODEL --budget 256`), whose student is
made again in memory. A fact stands far back in a text, and each side ends a sentence about it. All answers are kept; a
second call goes on with the facts that were not asked for yet.
"""

import argparse
import json
from pathlib import Path

from linearizer.evaluate.side_by_side import Reader, write_in_turns
from linearizer.evaluate.subjects import Setup
from linearizer.method.initialise import initialise
from linearizer.method.recorder import samples_of
from linearizer.page.landing import FILE, SIDES, STUDENT, WINDOW, Asked, Budget, RealModel, Row
from linearizer.pipeline import begin_student
from linearizer.progress import quiet
from linearizer.run.files import write_whole
from linearizer.run.folder import Run
from linearizer.run.results import StateSizes
from linearizer.teacher.load import load_teacher_of
from tests.benchmarks.quality_table import RESULTS
from tests.benchmarks.real_table import TEACHER, RealTable
from tests.benchmarks.real_texts import NAME, documents_to_judge

TABLE, QUESTIONS = RESULTS / "real-smollm2-135m", RESULTS / "questions-smollm2-135m.json"
LENGTHS = (1024, 2048, 4096, 8192)
SHOWN = {  # rows -> their names on the page
    "best": STUDENT,
    "swa, 8 bits": WINDOW,
    "h2o, 8 bits": "H2O",
    "tova, 8 bits": "TOVA",
    "zsmerge, 8 bits": "ZSMerge",
}
SHOWN_TEXT = "Dubliners"  # of 1914, by James Joyce, who died in 1941: nobody's property
BEFORE, FAR = 60, 1500  # tokens of a text before a fact, and from there to the question
NEW_TOKENS = 8
FACTS = (  # how a sentence begins, how it ends, and the question for it
    ("Anna keeps the spare key in the", "blue teapot", "Where does Anna keep the spare key?"),
    ("Boris parks his bicycle behind the", "old bakery", "Where does Boris park his bicycle?"),
    ("Clara meets the plumber on", "Thursday", "When does Clara meet the plumber?"),
    ("David hides the letters under the", "piano", "Where does David hide the letters?"),
    ("Elena earns her living as a", "beekeeper", "How does Elena earn her living?"),
    ("Frank sails next summer to", "Lisbon", "Where does Frank sail next summer?"),
    ("Greta paints the garden fence", "orange", "Which colour does Greta paint the garden fence?"),
    ("Hugo feeds the neighbour's", "parrot", "Which animal does Hugo feed?"),
    ("Irene left her umbrella at the", "library", "Where did Irene leave her umbrella?"),
    ("Jonas plays the", "trumpet", "Which instrument does Jonas play?"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", type=Path, metavar="RUN")
    arguments = parser.parse_args()
    if arguments.ask:
        ask_all(Run.open(arguments.ask))
    write_whole(FILE, shown_model().to_json() + "\n")
    print(f"{FILE.stat().st_size:,} bytes in {FILE}")


def ask_all(run):
    """Ask every question of teacher, student and window, and keep what each answered."""
    recorded = json.loads(QUESTIONS.read_text(encoding="utf-8")) if QUESTIONS.exists() else {"asked": []}
    with quiet():
        teacher = load_teacher_of(run.plan)
        student = begin_student(run, teacher, run.require_allocation())
    initialise(student, samples_of(run))
    setup = Setup(run, student.eval(), student, teacher.tokenizer, student, None)
    documents = documents_to_judge(setup.tokenizer, BEFORE + FAR, len(FACTS))
    subjects = setup.subjects(BEFORE + FAR)
    pairs = sorted(zip(FACTS, documents, strict=True), key=lambda pair: SHOWN_TEXT not in pair[1].name)
    for fact, document in pairs[len(recorded["asked"]) :]:
        prompt, distance = hide(setup.tokenizer, document.ids[0], *fact)
        readings, answers = read_and_answer(subjects, setup.tokenizer, prompt)
        shown = {"prompt": prompt, "readings": readings} if SHOWN_TEXT in document.name else {}
        asked = {"fact": fact, "text": document.name, "distance": distance, "answers": answers, **shown}
        recorded["asked"].append(asked)
        write_whole(QUESTIONS, json.dumps({"budget": run.plan.budget, **recorded}, indent=1) + "\n")
        print(fact[1], recorded["asked"][-1]["answers"], flush=True)


def hide(tokenizer, ids, begin, end, question):
    """Write a chat in which a fact stands far back, and the answer has begun; count the tokens after the fact."""
    before, after = (tokenizer.decode(part) for part in (ids[:BEFORE], ids[BEFORE:]))
    turn = [{"role": "user", "content": f"{before}\n\n{begin} {end}.\n\n{after}\n\n{question}"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + begin
    return prompt, len(tokens_of(tokenizer, prompt.partition(f"{begin} {end}.")[2]))


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # a template has those that are needed


def read_and_answer(subjects, tokenizer, prompt):
    """Let subjects read a prompt piece by piece, and end the sentence; record the bytes of each after every piece."""
    readers, readings = [Reader.of(subject) for subject in subjects], []
    for now in write_in_turns(readers, tokenizer, prompt, tokens_of(tokenizer, prompt), NEW_TOKENS):
        if isinstance(now, StateSizes):
            readings.append([now.tokens, *(now.bytes[side] for side, _ in SIDES)])
    return readings, {side: first_sentence(getattr(now, side).text) for side, _ in SIDES}


def first_sentence(text):
    return text.strip().partition("\n")[0].partition(".")[0]


def shown_model():
    """Choose what the page shows of the results."""
    table = RealTable(TABLE)
    budgets = []
    for tokens in sorted({record["budget"] for record in table.records if record["budget"]}):
        found = [(name, table.find(row, tokens)) for row, name in SHOWN.items()]
        rows = [Row(name, *measured(record)) for name, record in found if reaches(record)]
        if [row.name for row in rows[:2]] != [STUDENT, WINDOW]:
            continue
        budgets.append(Budget(tokens, table.find("best", tokens)["state"][str(LENGTHS[-1])], tuple(rows)))
    teacher = table.find(TEACHER, 0)
    cache = tuple(teacher["state"][str(length)] for length in LENGTHS)
    return RealModel(NAME, len(teacher["texts"]), LENGTHS, cache, tuple(budgets), shown_questions())


def reaches(record):
    """Return whether a record was judged at all lengths."""
    return bool(record["texts"]) and {*map(str, LENGTHS)} <= {*record["summary"]}


def measured(record):
    """Return KL and agreement of a record at every length."""
    of_lengths = [record["summary"][str(length)] for length in LENGTHS]
    kl = ((each["kl"]["mean"], *each["kl"]["interval"]) for each in of_lengths)
    agreement = tuple(round(each["agreement"]["mean"], 4) for each in of_lengths)
    return tuple(tuple(round(value, 5) for value in values) for values in kl), agreement


def shown_questions():
    """Count the right answers, and choose the question whose text may be shown."""
    recorded = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    asked = recorded["asked"]
    right = {side: sum(is_right(each, side) for each in asked) for side in asked[0]["answers"]}
    shown = next(each for each in asked if "readings" in each)
    begin, end, question = shown["fact"]
    text = shown["prompt"].partition("<|im_start|>user\n")[2].rpartition(f"\n\n{question}")[0]
    return Asked(
        count=len(asked),
        budget=recorded["budget"],
        right=right,
        fact=f"{begin} {end}.",
        question=question,
        distance=shown["distance"],
        answers={side: f"{begin} {answer}." for side, answer in shown["answers"].items()},
        source="Joyce’s Dubliners",
        text=text,
        readings=tuple(tuple(reading) for reading in shown["readings"]),
    )


def is_right(each, side):
    """Whether a side ended the sentence as it stood in the text."""
    return each["answers"][side].startswith(each["fact"][1])


if __name__ == "__main__":
    main()
