"""The card shows what an evaluation found: tables, and pictures of the same figures."""

from io import BytesIO

import pytest
from markdown_it import MarkdownIt
from PIL import Image

from linearizer.publish.card import card, card_files
from linearizer.publish.chart_picture import MISSING, between, draw_chart
from linearizer.publish.evaluation_charts import figures_of
from linearizer.publish.parts import TITLES
from tests.support.cards import HOSTILE, colours, made, rgb
from tests.support.evaluation_results import FOUND


def picture(part, number):
    return Image.open(BytesIO(draw_chart(figures_of(part, FOUND[part])[number], "title")))


def test_every_part_is_on_the_card_with_its_pictures_in_the_folder(tmp_path):
    run = made(tmp_path / "run")
    assert set(card_files(run)) == {"README.md", "allocation.png"}
    run.keep_found(parts=FOUND)
    files = card_files(run, "me/student")
    assert set(files) == {"README.md", "allocation.png", "recall.png", "needle.png", "speed.png", "memory.png"}
    text = files["README.md"].decode()
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    for title, _ in TITLES.values():
        assert f"<h3>{title}</h3>" in page
    for name in set(files) - {"README.md"}:
        assert f'src="{name}"' in page and Image.open(BytesIO(files[name])).format == "PNG"
    assert "<td" in page and "25%" in page and "4.6000" not in page and text.count("<details>") == 2 + len(TITLES)


def test_what_others_wrote_in_an_evaluation_stays_text(tmp_path):
    run = made(tmp_path / "run")
    score = {**FOUND["tasks"]["subjects"][0]["scores"][0], "task": HOSTILE}
    language = {**FOUND["language"], "text": f"file:/home/someone/{HOSTILE}"}
    run.keep_found(parts={"language": language, "tasks": {**FOUND["tasks"], "subjects": [
        {"name": "teacher", "scores": [score], "accuracy": None}]}})  # fmt: skip
    text = card(run)
    page = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n")[2])
    assert "<script>" not in page and 'href="http://evil"' not in page and "<strong>" not in page
    assert page.count("<h1>") == 1 and "/home/someone" not in text


def test_a_cell_has_the_colour_of_its_share_and_none_where_memory_ended():
    seen = colours(picture("needle", 0), (0, 60, 640, 300))
    scale = figures_of("needle", FOUND["needle"])[0].layout.coloraxis.colorscale
    assert {rgb(between(scale, 0.25)), rgb(between(scale, 1.0)), rgb(MISSING)} <= seen
    assert between(scale, 0) == scale[0][1] and between(scale, 1) == scale[-1][1]


def test_what_was_not_measured_is_drawn_open():
    figure = figures_of("speed", FOUND["speed"])[2]
    for trace in figure.data:
        trace.marker.symbol = [symbol.removesuffix("-open") for symbol in trace.marker.symbol]
    filled = Image.open(BytesIO(draw_chart(figure, "title")))
    grey = rgb(figure.data[0].line.color)

    def count(image):
        return sum(number for number, colour in image.getcolors(10**6) if colour == grey)

    assert count(picture("speed", 2)) < count(filled)


@pytest.mark.parametrize(("part", "number"), [
    ("language", 1), ("language", 2), ("recall", 0), ("recall", 1), ("needle", 0), ("speed", 0), ("speed", 1),
    ("speed", 2), ("approximation", 1),
])  # fmt: skip
def test_lines_and_maps_can_be_drawn(part, number):
    image = picture(part, number)
    assert image.format == "PNG" and len(image.getcolors(10**6)) > 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_student_that_says_nothing_can_be_drawn(tmp_path, loss):
    run = made(tmp_path / "run")
    lost = [{**one, "second": [loss, loss]} if one["name"] == "student" else one for one in FOUND["recall"]["subjects"]]
    none = [{**one, "one": [{**pace, "write_rate": None, "read_rate": None} for pace in one["one"]]}
            for one in FOUND["speed"]["subjects"]]  # fmt: skip
    run.keep_found(
        parts={"recall": {**FOUND["recall"], "subjects": lost}, "speed": {**FOUND["speed"], "subjects": none}}
    )
    assert {"recall.png", "speed.png"} <= set(card_files(run))
