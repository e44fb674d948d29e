"""Some hundred hostile inputs end in one short sentence with exit code 2, and leave no folder behind."""

import json
import shutil
from itertools import cycle, product
from pathlib import Path

import pytest

from tests.support.damage import change_json

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"
DEEP = "[" * 100_000
NAMES = [
    "x" * 3000,
    "~nosuchuser/model",
    "name@/x",
    "a\0b",
    "\udcff\udcfe",
    "a\nb",
    "\x1b[2J",
    "/",
    " ",
    "@",
    "org/name@",
]
OPTIONS = [
    ["--device", "meta"],
    ["--device", "cuda:99"],
    ["--device", "\udcff"],
    ["--seed", str(2**63)],
    ["--texts", str(2**63)],
    ["--length", str(2**70)],
    ["--budget", "9" * 5000],
    ["--text", "file:" + "x" * 3000],
    ["--text", "file:~nosuchuser/x"],
    ["--text", "dataset:a/b:c:d:e:f"],
    ["--text", "\udcff"],
    ["--out", ""],
    ["--out", "x" * 5000],
    ["--out", "/".join(["x" * 200] * 30)],
    ["--out", "a\0b"],
    ["--out", "\udcff"],
    ["--out", "loop"],
    ["--plan", "loop"],
    ["--text", "file:loop"],
]


def check_refusal(code, out, err):
    assert (code, out) == (2, ""), err[-2000:]
    assert err.startswith("linearizer: ") and err.count("\n") == 1 and "Traceback" not in err
    assert len(err) < 900, len(err)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty working directory, which stays empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "runs").mkdir()
    yield tmp_path
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.rglob("plan.json"))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_names_of_no_model(name, empty, said):
    check_refusal(*said("inspect", name))
    check_refusal(*said("run", name))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_names_of_no_run(name, empty, said):
    for command in (["evaluate", name], ["compare", name], ["allocate", name, "--budget", "8"], ["runs", "stop", name]):
        check_refusal(*said(*command))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(ascii, options))[:30])
def test_options_that_cannot_be(options, empty, said):
    check_refusal(*said("run", "demo", *options))


def write_json(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


def drop_from_json(folder, name, key):
    content = json.loads((folder / name).read_text())
    del content[key]
    write_json(folder, name, **content)


def put_loop(path):
    path.unlink()
    path.symlink_to(path.name)


MODELS = {
    "deep config": lambda f: (f / "config.json").write_text(DEEP),
    "config of another kind": lambda f: (f / "config.json").write_text("3"),
    "config that is a folder": lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
    "model_type is a dictionary": lambda f: change_json(f / "config.json", model_type={"a": 1}),
    "model_type is long": lambda f: change_json(f / "config.json", model_type="x" * 3000),
    "no layers": lambda f: change_json(f / "config.json", num_hidden_layers=-1),
    "index without files": lambda f: change_json(f / "model.safetensors.index.json", weight_map={"a": 3}),
    "index of long names": lambda f: change_json(f / "model.safetensors.index.json", weight_map={"a": "x" * 300}),
    "index beyond the folder": lambda f: change_json(f / "model.safetensors.index.json", weight_map={"a": "../x"}),
    "damaged generation_config": lambda f: (f / "generation_config.json").write_text("{"),
    "index without metadata": lambda f: drop_from_json(f, "model.safetensors.index.json", "metadata"),
    "index that is a loop": lambda f: put_loop(f / "model.safetensors.index.json"),
    "tokenizer that is a loop": lambda f: put_loop(f / "tokenizer.json"),
    "padding beyond the embedding": lambda f: change_json(f / "config.json", pad_token_id=10**9),
    "generation_config whose end is text": lambda f: write_json(f, "generation_config.json", eos_token_id="x"),
    "generation_config that is hot": lambda f: write_json(f, "generation_config.json", temperature="hot"),
    "generation_config of another kind": lambda f: (f / "generation_config.json").write_text("null"),
    "damaged tokenizer": lambda f: (f / "tokenizer.json").write_text("{"),
    "tokenizer whose length is a list": lambda f: change_json(f / "tokenizer_config.json", model_max_length=[]),
    "tokenizer ids beyond the embedding": lambda f: change_json(f / "config.json", vocab_size=100),
}


@pytest.mark.parametrize("name", MODELS)
def test_damaged_models(name, empty, said):
    folder = empty / "model"
    shutil.copytree(DEMO, folder)
    MODELS[name](folder)
    check_refusal(*said("run", folder, "--texts", "2", "--length", "64", "--out", empty / "out"))
    assert not (empty / "out").exists()


CARDS = [
    b"---\nlicense: \xff\xfe\n---\n",
    b"---\n- a\n- list\n---\n",
    b"---\nlicense: [mit, {a: 1}]\n---\n",
    b"---\n{\n---\n",
    b"---\na: " + b"[" * 9999 + b"\n---\n",
]


@pytest.mark.parametrize("card", CARDS, ids=range(len(CARDS)))
def test_a_damaged_card_does_not_matter(card, empty, said):
    folder = empty / "model"
    shutil.copytree(DEMO, folder)
    (folder / "README.md").write_bytes(card)
    code, out, err = said("inspect", folder, "--json")
    assert code == 0 and json.loads(out)["supported"], err


ABSOLUTE = "/etc/hostname"
OTHER_FILES = [ABSOLUTE, f"file://{ABSOLUTE}", f"file:{ABSOLUTE}", f"local:{ABSOLUTE}", "../secret.txt", "~/x.txt"]


@pytest.mark.parametrize("path", OTHER_FILES)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_data_set_whose_configs_name_other_files_is_refused(file, path, empty, said):
    data = empty / "org" / "data"
    data.mkdir(parents=True)
    (data / "mine.txt").write_text("words " * 9000)
    front = "---\n" if file == "README.md" else ""
    (data / file).write_text(f"{front}configs:\n- config_name: default\n  data_files: {path}\n{front}")
    (empty / "org" / "secret.txt").write_text("secret " * 9000)
    code, out, err = said("run", "demo", "--text", "dataset:org/data", "--texts", "2", "--length", "64")
    check_refusal(code, out, err)
    assert "names files outside of itself" in err


COMMANDS = {
    "compare": ["compare", "RUN", "--tokens", "2"],
    "evaluate": ["evaluate", "RUN", "--part", "recall"],
    "allocate": ["allocate", "RUN", "--budget", "32"],
    "resume": ["run", "demo", "--plan", "RUN/plan.json", "--out", "RUN", "--resume"],
    "push": ["push", "RUN", "ann/name", "--dry-run"],
}
DAMAGE = {
    "deep": lambda path: path.write_text(DEEP),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another kind": lambda path: path.write_text('{"parts": 3, "layers": [], "heads": null, "model_type": []}'),
}


DAMAGED = [
    "plan.json",
    "inspection.json",
    "profile.json",
    "allocation.json",
    "evaluation.json",
    "checkpoint/config.json",
]


@pytest.mark.parametrize(
    "name, command, damage", [(*each, damage) for each, damage in zip(product(DAMAGED, COMMANDS), cycle(DAMAGE))]
)
def test_damaged_runs(name, damage, command, quick_run, tmp_path, said):
    """A command refuses a damaged file in a sentence, or does not need it."""
    folder = tmp_path / "run"
    shutil.copytree(quick_run, folder)
    DAMAGE[damage](folder / name)
    code, out, err = said(*(word.replace("RUN", str(folder)) for word in COMMANDS[command]))
    if code != 0:
        check_refusal(code, out, err)
