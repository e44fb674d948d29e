"""The card shows the results of an evaluation as tables."""

from markdown_it import MarkdownIt

from linearizer.publish.card import write_card
from linearizer.report.parts import PART_VIEWS
from linearizer.report.tables import language_tables
from linearizer.run.results import read_part
from tests.support.cards import HOSTILE, made
from tests.support.evaluation_results import STORED, at_length


def test_every_part_is_on_the_card_as_tables(tmp_path):
    run = made(tmp_path / "run")
    run.write_evaluation(parts=STORED)
    text = write_card(run, "me/student")
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    for view in PART_VIEWS.values():
        assert f"<h3>{view.title}</h3>" in page
    shown = len(PART_VIEWS) - 2  # folded; language and recall are not
    assert (
        "<td" in page
        and "25%" in page
        and "1.2345" in page
        and "3.21%" in page
        and "4.6000" not in page
        and text.count("<details>") == 2 + shown
    )


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
    text = write_card(run)
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    assert "<script>" not in page and 'href="http://evil"' not in page and "<strong>" not in page
    assert page.count("<h1>") == 1 and "/home/someone" not in text
