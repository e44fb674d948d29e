"""What was damaged in a run's folder is named, with what to remove; what is only kept for speed is made anew."""

import re
import shutil

import pytest

from linearizer import pipeline
from linearizer.cli.main import main
from linearizer.errors import FolderError
from linearizer.method import allocate_run
from linearizer.method.measure_run import measure_teacher
from linearizer.method.recorder import SAMPLES, samples_of
from linearizer.method.texts import TextsOfRun
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.teacher import load as teacher_module
from tests.support.damage import cut, flip_bit

ASKED = dict(model="demo", budget=24, texts=2, length=32, sinks=1, dtype="float32")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped once it was profiled, and its teacher."""
    run = pipeline.begin(tmp_path_factory.mktemp("stopped") / "run", Plan.of(**ASKED))
    teacher = teacher_module.load_teacher_of(run.plan)
    finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
    return run, teacher


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped[0].folder, tmp_path / "run")
    return Run(tmp_path / "run")


def read(run, name):
    return getattr(run, name.removesuffix(".json"))


@pytest.mark.parametrize("name", ["profile.json", "prices.json", "allocation.json"])
@pytest.mark.parametrize("damage", [b"", b'{"sinks": 1', b"\xff\xfe", b"[3]"], ids=["empty", "cut", "no text", "else"])
def test_a_damaged_product_is_named_with_what_to_do(name, damage, run):
    (run.folder / name).write_bytes(damage)
    with pytest.raises(FolderError) as refused:
        read(run, name)
    said = str(refused.value)
    assert said.startswith(f"{str(run.folder / name)!r} cannot be read (") and said.count(": remove ") == 1
    assert said.endswith(f"): remove it, and `linearizer runs resume {run.folder}` makes it again")
    run.checkpoint.mkdir()
    with pytest.raises(FolderError, match=re.escape(name) + r"' cannot be read \(.*\): start a new run$"):
        read(run, name)


def test_a_file_that_cannot_be_read_is_named_once(run):
    (run.folder / "inspection.json").unlink()
    with pytest.raises(FolderError) as refused:
        read(run, "inspection.json")
    assert str(refused.value).count("cannot be read") == 1 and "No such file" in str(refused.value)


def flip_a_digit(path):
    """Change one digit of a number in a file, as a failing disk may."""
    content = path.read_bytes()
    place = next(i for i in range(len(content) // 2, len(content)) if content[i : i + 1].isdigit())
    digit = b"7" if content[place : place + 1] != b"7" else b"3"
    path.write_bytes(content[:place] + digit + content[place + 1 :])


def test_a_changed_digit_of_a_product_is_seen(run):
    for name in ("profile.json", "plan.json", "inspection.json"):
        read(run, name)
        flip_a_digit(run.folder / name)
        with pytest.raises(FolderError, match="its content has changed since it was written"):
            read(run, name)


def test_a_changed_bit_of_the_samples_is_seen(run):
    flip_bit(run.folder / SAMPLES)
    with pytest.raises(FolderError, match="its content has changed since it was written"):
        samples_of(run)


@pytest.mark.parametrize("name", ["plan.json", "inspection.json", "begun.json"])
@pytest.mark.parametrize("damage", [cut, lambda path: path.write_text('{"layers": [{}]}')], ids=["cut", "else"])
def test_what_a_run_cannot_do_without_is_named(name, damage, run):
    damage(run.folder / name)
    with pytest.raises(FolderError, match=re.escape(name) + r"' cannot be read \(.*\): start a new run$"):
        read(run, name)


def test_a_damaged_plan_that_a_new_run_is_asked_for_by_is_named(run, tmp_path, capsys):
    plan = run.folder / "plan.json"
    for content in (b"[]", b'{"model"', b"\xff", run.read("plan.json").replace("24", "0").encode()):
        plan.write_bytes(content)
        assert main(["run", "demo", "--plan", str(plan), "--out", str(tmp_path / "new")]) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"linearizer: '{re.escape(str(plan))}' cannot be read \(.*\): name a plan.json\n", said)


def test_what_is_made_anew_is_what_was_lost(run):
    before = run.read("profile.json"), (run.folder / SAMPLES).read_bytes()
    for damage in (cut, lambda path: path.unlink()):
        damage(run.folder / SAMPLES)
        with pytest.raises(
            FolderError, match=r"samples.safetensors' cannot be read \(.*\): remove '.*run/profile.json', "
        ):
            samples_of(run)
        (run.folder / "profile.json").unlink()
        teacher = teacher_module.load_teacher_of(run.plan)
        finish(measure_teacher(run, teacher, TextsOfRun.of(run, teacher)))
        assert (run.read("profile.json"), (run.folder / SAMPLES).read_bytes()) == before


def test_damaged_prices_of_the_first_layers_are_measured_anew_and_that_is_logged(run, stopped):
    teacher = stopped[1]
    texts = TextsOfRun.of(run, teacher).priced
    finish(allocate_run.price_heads(run, teacher, texts))
    result = run.read("prices.json")
    (run.folder / "prices.json").unlink()
    (run.folder / allocate_run.LAYERS).mkdir()
    run.write(f"{allocate_run.LAYERS}/0.json", '{"sinks"')
    finish(allocate_run.price_heads(run, teacher, texts))
    assert run.read("prices.json") == result
    (dropped,) = (event for event in run.events() if event["event"] == "dropped")
    assert dropped["file"] == f"{allocate_run.LAYERS}/0.json" and "not JSON" in dropped["why"]
    assert not run.has_file(allocate_run.LAYERS)
