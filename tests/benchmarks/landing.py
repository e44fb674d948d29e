"""Write the measurements of a real model that the first page shows:  python -m tests.benchmarks.landing

They are those of results/real-smollm2-135m.json and of results/questions-smollm2-135m.jsonl, in a file of the package.

  python -m tests.benchmarks.landing --ask RUN   first asks the questions of RUN's teacher, student and a plain window

RUN is a run of SmolLM2-135M-Instruct (`linearizer run MODEL --budget 256`), whose student is made again in memory.
Facts stand far back in a text, and each side ends sentences about them: ten in a contract and ten in a log, both our
own, and one in each of ten texts of others, a novel the first. All answers are kept; a second call goes on with the
texts that were not read yet. Which text is shown at which budget was chosen before any was asked.
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path

from linearizer.evaluate.side_by_side import Reader, read_in_turns, write_in_turns
from linearizer.evaluate.subjects import Setup
from linearizer.method.initialise import initialise
from linearizer.method.recorder import samples_of
from linearizer.page.landing import FILE, SIDES, STUDENT, WINDOW, Asked, Budget, RealModel, Recording, Row
from linearizer.pipeline import begin_student
from linearizer.progress import quiet
from linearizer.run.files import write_whole
from linearizer.run.folder import Run
from linearizer.teacher.load import load_teacher_of
from tests.benchmarks.quality_table import RESULTS
from tests.benchmarks.real_table import TEACHER, RealTable
from tests.benchmarks.real_texts import NAME, documents_to_judge
from tests.benchmarks.recorded_texts import CONTRACT_FACTS, LOG_FACTS, write_contract, write_log

TABLE, QUESTIONS = RESULTS / "real-smollm2-135m", RESULTS / "questions-smollm2-135m.jsonl"
LENGTHS = (1024, 2048, 4096, 8192)
SHOWN = {  # rows -> their names on the page
    "best": STUDENT,
    "swa, 8 bits": WINDOW,
    "h2o, 8 bits": "H2O",
    "tova, 8 bits": "TOVA",
    "zsmerge, 8 bits": "ZSMerge",
}
NOVEL, CONTRACT, LOG = "Novel", "Contract", "Log"
SHOWN_AT = {NOVEL: 256, CONTRACT: 128, LOG: 64}  # tokens of the budget
READ = {NOVEL: "Joyce’s Dubliners", CONTRACT: "a lease", LOG: "a server’s log"}  # by all sides of a recording
SHOWN_TEXT = "novel Dubliners"  # of 1914, by James Joyce, who died in 1941: nobody's property
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
    budget, known = run.plan.budget, {(each["budget"], each["text"]) for each in recorded()}
    with quiet():
        teacher = load_teacher_of(run.plan)
        student = begin_student(run, teacher, run.require_allocation())
    initialise(student, samples_of(run))
    setup = Setup(run, student.eval(), student, teacher.tokenizer, student, None)
    subjects = setup.subjects(BEFORE + FAR)
    for recording, name, text, facts in texts_with_facts(setup.tokenizer):
        if (budget, name) in known:
            continue
        told = {"recording": recording, "budget": budget, "text": name}
        readings, asked = read_and_ask(subjects, setup.tokenizer, text, facts)
        answered = [{**told, **each} for each in asked]
        if recording != NOVEL or name == SHOWN_TEXT:  # the others are not ours to copy
            answered[0] |= {"read": text, "readings": readings}
        with QUESTIONS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in answered)
        print(budget, name, right_of(answered), flush=True)


def recorded():
    """Return all questions that were asked."""
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def texts_with_facts(tokenizer):
    """Yield the recording of each text, its name, the text, and its facts."""
    yield CONTRACT, "contract", write_contract(), CONTRACT_FACTS
    yield LOG, "log", write_log(), LOG_FACTS
    documents = documents_to_judge(tokenizer, BEFORE + FAR, len(FACTS))
    pairs = sorted(zip(FACTS, documents, strict=True), key=lambda pair: pair[1].name != SHOWN_TEXT)
    for fact, document in pairs:
        ids = document.ids[0]
        before, after = (tokenizer.decode(part) for part in (ids[:BEFORE], ids[BEFORE:]))
        yield NOVEL, document.name, f"{before}\n\n{sentence(fact)}\n\n{after}", [fact]


def sentence(fact):
    return f"{fact[0]} {fact[1]}."


def read_and_ask(subjects, tokenizer, text, facts):
    """Let subjects read a text once, piece by piece, and then end a sentence about each fact."""
    prompts = [write_prompt(tokenizer, text, fact) for fact in facts]
    tokens = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]  # a template has those
    alike = len([*takewhile(lambda column: len({*column}) == 1, zip(*tokens, strict=False))])
    shared = tokens[0][: min(alike, len(tokens[0]) - 1)]
    readers = [Reader.of(subject) for subject in subjects]
    pieces = read_in_turns(readers, [shared] * len(readers))
    readings = [[now.tokens, *(now.bytes[side] for side, _ in SIDES)] for now in pieces]
    asked = []
    for fact, prompt, ids in zip(facts, prompts, tokens, strict=True):
        forks = [reader.fork() for reader in readers]
        *_, written = write_in_turns(forks, tokenizer, prompt, ids[len(shared) :], NEW_TOKENS)
        answers = {side: first_sentence(getattr(written, side).text) for side, _ in SIDES}
        distance = len(tokenizer(prompt.partition(sentence(fact))[2], add_special_tokens=False)["input_ids"])
        asked.append({"fact": fact, "distance": distance, "answers": answers})
    return readings, asked


def write_prompt(tokenizer, text, fact):
    """Write a chat with a text and a question, whose answer has begun."""
    turn = [{"role": "user", "content": f"{text}\n\n{fact[2]}"}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + fact[0]


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
    asked = tuple(count_answers(recording, budget) for recording in SHOWN_AT for budget in SHOWN_AT.values())
    documents = len(teacher["texts"])
    return RealModel(NAME, documents, LENGTHS, cache, tuple(budgets), tuple(shown_recordings()), asked)


def reaches(record):
    """Return whether a record was judged at all lengths."""
    return bool(record["texts"]) and {*map(str, LENGTHS)} <= {*record["summary"]}


def measured(record):
    """Return KL and agreement of a record at every length."""
    of_lengths = [record["summary"][str(length)] for length in LENGTHS]
    kl = ((each["kl"]["mean"], *each["kl"]["interval"]) for each in of_lengths)
    agreement = tuple(round(each["agreement"]["mean"], 4) for each in of_lengths)
    return tuple(tuple(round(value, 5) for value in values) for values in kl), agreement


def shown_recordings():
    """Choose a question of each recording, whose text may be shown."""
    for recording, budget in SHOWN_AT.items():
        asked = asked_of(recording, budget)
        first = next(each for each in asked if "read" in each)
        of_text = [each for each in asked if each["text"] == first["text"]]
        shown = next(each for each in of_text if is_right(each, "teacher") and is_right(each, STUDENT))
        begin, _, question = shown["fact"]
        yield Recording(
            asked=count_answers(recording, budget),
            about=READ[recording],
            fact=sentence(shown["fact"]),
            question=question,
            distance=shown["distance"],
            answers={side: f"{begin} {answer}." for side, answer in shown["answers"].items()},
            text=first["read"],
            readings=tuple(tuple(reading) for reading in first["readings"]),
        )


def asked_of(recording, budget):
    return [each for each in recorded() if (each["recording"], each["budget"]) == (recording, budget)]


def count_answers(recording, budget):
    asked = asked_of(recording, budget)
    return Asked(recording, budget, len(asked), right_of(asked))


def right_of(asked):
    """Count the right answers of each side."""
    return {side: sum(is_right(each, side) for each in asked) for side, _ in SIDES}


def is_right(each, side):
    """Whether a side ended the sentence as it stood in the text."""
    return each["answers"][side].startswith(each["fact"][1])


if __name__ == "__main__":
    main()
