"""The card says what is there, and nothing that others wrote becomes markup, metadata or a path of this machine."""

from dataclasses import asdict

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from linearizer.plan.allocation import Allocation
from linearizer.plan.plan import Plan
from linearizer.publish.card import card_of
from linearizer.report.parts import PART_VIEWS
from linearizer.report.tables import language_tables
from linearizer.run.results import read_part
from tests.support.cards import HEADS, HOSTILE, made
from tests.support.evaluation_results import MADE, STORED, at_length


def test_the_card_names_base_results_and_how_to_load(tmp_path):
    text = (card := card_of(made(tmp_path / "run"))).write("me/student")
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ("org/base", "mit")
    assert data.model_name == "student" and "linear-attention" in data.tags
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results["loss"] == 3.25 and results["recall_after_16"] == 2.0
    assert "| teacher | 65.5 kB | 3.000 |" in text and "| student | 4.1 kB | 3.250 |" in text
    assert "2 texts of 128 tokens" in text
    assert card.write_snippet("me/student") in text and "1 KV heads left softmax" in text
    assert "Some KV heads keep their whole cache, so the state grows with the text." in text
    assert f"linearizer run org/base@{'c0ffee' * 6} --budget 64" in text
    assert "| 0 | 8 + 32 features · softmax |" in text and "| 2 | 8 + 4 slots · 64 features |" in text
    assert "| 1 | unchanged: the teacher itself has a window here" in text
    assert "Refused: assisted decoding" in text and "In a batch the products of matrices differ" in text
    assert (
        "Its teacher was made for 1,024 tokens" in text
        and f"It was judged in {MADE['dtype']}: results in another dtype" in text
    )
    assert "a KV head keeps the first tokens and an exact window" in text
    exact = card.run.require_allocation().exact_until(card.run.layers)
    assert exact and f"A text\nof at most {exact} tokens is read exactly" in text


def test_the_plan_on_the_card_is_the_plan(tmp_path):
    options = dict(features=32, text="dataset:org/text:en:train:body", steps=0, window=3, may_grow=True)
    plan = Plan.of(model="org/base@main", **options)
    text = card_of(made(tmp_path / "run", plan=plan)).write()
    shown = Plan.from_json(text.partition("```json\n")[2].partition("\n```")[0])
    assert shown == Plan(**{**asdict(plan), "model": f"org/base@{'c0ffee' * 6}"})
    assert ModelCard(text).data.datasets == ["org/text"] and "The features were not trained." in text


def test_a_data_set_of_this_machine_is_named_without_its_folder_and_not_as_one_of_the_hub(tmp_path):
    (tmp_path / "private" / "poems").mkdir(parents=True)
    text = card_of(
        made(tmp_path / "run", plan=Plan("org/base", budget=64, text=f"dataset:{tmp_path}/private/poems::train"))
    ).write()
    assert "dataset:poems::train" in text and "private" not in text and str(tmp_path) not in text
    assert ModelCard(text).data.datasets is None


def test_the_card_says_what_was_trained_and_not_what_was_asked_for(tmp_path):
    run = made(tmp_path / "run", plan=Plan("org/base@main", budget=64, steps=400))
    assert "The features were not trained." in card_of(run).write()
    run.log("distilled", phase=0, asked=400, steps=7)
    run.log("distilled", phase=0, asked=400, steps=12)  # it was resumed
    text = card_of(run).write()
    assert "for 12 of 400 steps" in text and "- The training was ended at 12 of 400 steps." in text
    assert "makes the same student again" not in text and "not interrupted, trains all 400 steps" in text
    run.log("distilled", phase=0, asked=400, steps=400)
    text = card_of(run).write()
    assert "for 400 steps" in text and "ended" not in text and "The same plan makes the same student again" in text


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"steps": 0}, ""),
        ({"steps": 8, "recipe": "features", "strategy": "common-lambda"}, ""),  # features have weights of their own
        (
            {"steps": 8, "loss": "squares"},
            "two matrices of each layer were fitted to the teacher's outputs by least squares",
        ),
        ({"steps": 8}, "adapters of rank 8 on q, k, v and o were trained and merged into them"),
        ({"steps": 8, "loss": "logits"}, "adapters of rank 8 on q, k, v and o were trained and merged into them"),
    ],
)
def test_the_card_calls_a_student_finetuned_only_if_training_changed_the_teachers_weights(tmp_path, options, change):
    run = made(tmp_path / "run", plan=Plan("org/base@main", budget=64, **options))
    if options["steps"]:
        assert "base_model_relation" not in ModelCard(card_of(run).write()).data.to_dict()  # until it has trained
        run.log("distilled", phase=0, asked=8, steps=8)
    text = card_of(run).write()
    assert ModelCard(text).data.get("base_model_relation") == ("finetune" if change else None)
    assert ("The weights are the teacher's, unchanged, and so is the licence" in text) == (not change)
    assert ("The teacher's weights are unchanged" in text) == (not change)
    assert ("same weights and softmax attention" in text.replace("\n", " ")) == (not change)
    assert text.count(f"made from the teacher's: {change}.") == (2 if change else 0)


@pytest.mark.parametrize("kl, said", [((0.04, 0.03), "0.0300 with them (25% less)"), ((0.03, 0.04), "unchanged")])
def test_the_card_says_what_adapters_gave_and_calls_weights_unchanged_where_they_were_left_out(tmp_path, kl, said):
    run = made(tmp_path / "run", plan=Plan.of("distilled", model="org/base@main", budget=64))
    run.log("distilled", phase=0, asked=100, steps=100, kl=kl)
    text = " ".join(card_of(run).write().split())
    assert said in text and ("made from the teacher's" in text) == (said != "unchanged")


def test_what_others_wrote_stays_text(tmp_path):
    plan = Plan(f"/home/someone/{HOSTILE}", budget=64, text=f"file:/home/someone/{HOSTILE}", device=HOSTILE)
    terms = {"license": HOSTILE, "license_link": f"javascript:{HOSTILE}", "language": [HOSTILE]}
    run = made(tmp_path / "run", plan=plan, name=plan.model, revision=None, terms=terms)
    run.write("allocation.json", Allocation(HOSTILE, 4, HEADS).to_json())
    text = card_of(run).write()
    assert text.count("\n---\n") == 1 and text.startswith("---\n")
    data = ModelCard(text).data.to_dict()
    assert data["license"] == " ".join(HOSTILE.split()) and data["language"] == [data["license"]]
    assert "base_model" not in data and "license_link" not in data
    assert "/home/someone" not in text
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    assert "<script>" not in page and 'href="http://evil"' not in page and "<strong>" not in page
    assert page.count("<h1>") == 1 and page.count("<pre>") == 4


def test_what_was_examined_is_shown_without_the_folders_of_this_machine(tmp_path):
    run = made(tmp_path / "run")
    options = {"text": "file:/home/someone/poems.txt", "length": 64, "texts": 2, "seed": 0}
    subjects = [{"name": "student", "first": [4.0], "second": [2.5]}]
    result = {**options, "asked": {**options, "made_with": MADE}, "subjects": subjects}
    run.write_evaluation(parts={"recall": {**result, "gaps": [16], "passage": 8}, "unknown": {}})
    text = card_of(run).write()
    assert "The evaluation is small" in text
    assert "student" in text and "2.500" in text and "file:poems.txt" in text and "/home/someone" not in text
    run.write_evaluation(parts=STORED)
    assert "The evaluation is small" not in card_of(run).write()


@pytest.mark.parametrize(
    ("terms", "link", "said"),
    [
        ({"license": "mit"}, None, "mit."),
        ({}, None, "states no licence"),
        ({"license": ["mit", "apache-2.0"]}, None, "mit, apache-2.0."),
        ({"license": "other", "license_name": "x", "license_link": "LICENSE"}, "c0ffee/LICENSE", "x (<https://"),
        (
            {"license": "other", "license_name": "x", "license_link": "https://a.b/c_d"},
            "a.b/c_d",
            "(<https://a.b/c_d>)",
        ),
        ({"license": "other", "license_name": "x", "license_link": "../../evil y"}, None, "x."),
    ],
)
def test_the_licence_is_the_teachers(tmp_path, terms, link, said):
    text = card_of(made(tmp_path / "run", terms=terms)).write()
    result = ModelCard(text).data.license_link
    assert (result is None) == (link is None) and (link is None or result.endswith(link)) and said in text


def test_every_part_is_on_the_card_as_tables(tmp_path):
    run = made(tmp_path / "run")
    run.write_evaluation(parts=STORED)
    text = card_of(run).write("me/student")
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    for view in PART_VIEWS.values():
        assert f"<h3>{view.title}</h3>" in page
    shown = len(PART_VIEWS) - 2  # folded; language and recall are not
    assert all(told in page for told in ("<td", "25%", "1.2345", "3.21%")) and "4.6000" not in page
    assert text.count("<details>") == 3 + shown


def test_the_first_table_is_of_the_runs_own_length_and_the_next_of_all_lengths():
    lengths = [at_length(length) for length in (64, 256, 511)]  # the last are two texts joined
    for result, loss in zip(lengths, (3.0, 4.0, 5.0), strict=True):
        for subject in result["subjects"]:
            subject["loss"] = {"mean": loss, "interval": [loss - 0.1, loss + 0.1]}
    first, second, *_ = language_tables(read_part("language", {**STORED["language"], "lengths": lengths}))
    assert first.rows[0][0] == "over 256 tokens" and {row[2] for row in first.rows[1:]} == {"4.000"}
    assert second.rows[0][1:] == ("64", "256", "511")


def test_what_others_wrote_in_an_evaluation_stays_text(tmp_path):
    run = made(tmp_path / "run")
    score = {**STORED["tasks"]["subjects"][0]["scores"][0], "task": HOSTILE}
    language = {**STORED["language"], "text": f"file:/home/someone/{HOSTILE}"}
    run.write_evaluation(parts={"language": language, "tasks": {**STORED["tasks"], "subjects": [
        {"name": "teacher", "scores": [score], "accuracy": None}]}})  # fmt: skip
    text = card_of(run).write()
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    assert "<script>" not in page and 'href="http://evil"' not in page and "<strong>" not in page
    assert page.count("<h1>") == 1 and "/home/someone" not in text
