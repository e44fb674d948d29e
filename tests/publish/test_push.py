"""What is published loads and writes as it does here."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from linearizer import pipeline
from linearizer.errors import FolderError, RequestError
from linearizer.hub import repository
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import load
from linearizer.pipeline import linearize
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.publish import push
from linearizer.workers import control
from tests.support.damage import flip_bit
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, WEIGHTS, copy_run, files_of, publish, refused, written

DEMO = find_model("demo").folder
pytestmark = [pytest.mark.filterwarnings(HOW_THE_HUB_SENDS), pytest.mark.usefixtures("slept")]


@pytest.fixture
def signed_in(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", ME)


def test_what_is_published_loads_from_its_snippet_and_writes_the_same(hub, run, tmp_path):
    done = publish(run)
    program = f"import sys\n{done.snippet}\nimport torch\n" + (
        "with torch.no_grad():\n    logits = model(torch.tensor([[5, 6, 7]])).logits\n"
        "torch.save({'logits': logits, 'text': text}, sys.argv[1])\n"
        "assert type(model).__module__.startswith('transformers_modules')\n"
    )
    environment = {**os.environ, "HF_TOKEN": ME, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = torch.load(tmp_path / "out")
    student = load(run.checkpoint)
    ids = AutoTokenizer.from_pretrained(run.checkpoint)("Once", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(result["logits"], student(torch.tensor([[5, 6, 7]])).logits)
        assert torch.equal(result["text"], student.generate(**ids, max_new_tokens=40))


def test_a_run_of_a_folder_goes_on_from_anywhere_and_tells_nobody_where_that_is(hub, tmp_path, monkeypatch):
    home, away = tmp_path / "somebodys", tmp_path / "away"
    shutil.copytree(DEMO, home / "teacher")
    (home / "words.txt").write_text("These are the words that it is measured on. " * 400)
    away.mkdir()
    monkeypatch.chdir(home)
    plan = Plan("./teacher", budget=64, strategy="window", text="file:words.txt", texts=2, length=64)
    begun = pipeline.begin(tmp_path / "run", plan)
    monkeypatch.chdir(away)
    finish(linearize(begun))
    with pytest.raises(RequestError, match="another plan"):
        pipeline.begin(tmp_path / "run", plan, resume=True)  # there is no ./teacher in this folder
    monkeypatch.chdir(home)
    assert pipeline.begin(tmp_path / "run", plan, resume=True).done
    publish(begun, "me/teacher")
    sent = files_of(hub, "me/teacher")
    assert b"linearizer run teacher --budget 64 --strategy window --text file:words.txt" in sent["README.md"]
    for name, content in sent.items():
        assert b"somebodys" not in content and str(tmp_path).encode() not in content, name


def test_weights_and_a_valid_card_come_in_one_commit_of_a_private_repository(hub, run, tmp_path):
    done = publish(run)
    repo, sent = hub.repos["models", "me/student"], files_of(hub)
    assert repo.private and list(repo.commits)[1:] == [done.revision]
    assert {"README.md", "config.json", WEIGHTS, "modeling_linearized.py"} <= set(sent)
    assert sent[WEIGHTS] == (run.checkpoint / WEIGHTS).read_bytes()
    card = ModelCard(sent["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0" and card.data.base_model is None  # the demo is on no Hub
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["loss"] == round(run.evaluation_parts["language"]["subjects"][1]["loss"]["mean"], 4)
    assert ModelCard.load(run.checkpoint / "README.md").data.to_dict()["license"] == "apache-2.0"


def test_a_student_of_a_model_on_the_hub_has_its_files_and_a_damaged_one_is_never_sent(hub, tmp_path):
    hub.add("org/small", DEMO)
    plan = Plan("org/small", budget=64, strategy="common-lambda", texts=2, length=64, steps=0)
    finish(linearize(of_hub := pipeline.begin(tmp_path / "run", plan)))
    publish(of_hub, "me/of-hub")
    sent = [content for path, content in sorted(files_of(hub, "me/of-hub").items()) if path.startswith("teacher-")]
    assert sent == [path.read_bytes() for path in sorted(DEMO.glob("*.safetensors"))]
    hub.requests.clear()
    flip_bit(of_hub.checkpoint / WEIGHTS)
    assert f"{WEIGHTS}' is not as the run wrote it" in refused(of_hub, kind=FolderError) and not written(hub)


def test_a_preview_sends_nothing_needs_no_account_and_lists_what_would_be_sent(hub, run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    result = push.preview(run, "student", token=None)
    assert not hub.requests and result.repo_id == "YOUR-ACCOUNT/student"
    assert not result.checked and result.notes[-1].startswith("nobody is signed in, so the Hub was not asked")
    with pytest.raises(RequestError, match="is not a name for a repository"):
        push.preview(run, "me/no such", token=None)
    signed = push.preview(run, "student", token=ME)
    assert (signed.repo_id, signed.private, signed.checked) == ("me/student", True, True) and not written(hub)
    publish(run)
    assert dict(signed.files) == {name: len(data) for name, data in files_of(hub).items() if name != ".gitattributes"}
    assert signed.bytes == sum(size for _, size in signed.files) and signed.card.encode() == files_of(hub)["README.md"]
    assert any("earlier student" in note for note in push.preview(run, "student", token=ME).notes)
    assert any("everyone" in note for note in push.preview(run, "other", False, ME).notes)


def test_owners_are_the_account_and_where_it_may_write(hub, run):
    hub.organisations["me"] = {"lab": "write", "club": "read"}
    assert repository.list_owners(ME) == ("me", "lab")
    assert publish(run, "lab/student").repo_id == "lab/student" and hub.repos["models", "lab/student"].private
    assert "choose from me, lab" in refused(run, "club/student")


def test_publishing_again_sends_only_what_changed(hub, run):
    first = publish(run)
    older = {"model-00001-of-00002.safetensors", "chat_template.jinja", "vocab.txt", "1_Pooling/config.json"}
    hub.add("me/student", {**dict.fromkeys(older, b"older"), "mine.txt": b"a note"})
    hub.requests.clear()
    second = publish(run)
    assert not [line for line in written(hub) if line.startswith("PUT")]
    assert {"mine.txt", WEIGHTS} <= set(files_of(hub)) and not older & set(files_of(hub))
    assert publish(run).revision == second.revision != first.revision  # nothing to change, so no commit


def test_the_command_shows_then_publishes(hub, run, signed_in, said, tmp_path):
    run, parts = copy_run(run.folder, tmp_path / "worse"), run.evaluation_parts
    for result in parts["language"]["lengths"]:
        result["difference"], result["strained"] = {"mean": 1.0, "interval": [0.5, 1.5]}, False
    run.write_evaluation(parts=parts)
    code, out, _ = said("push", run.folder, "student", "--dry-run")
    assert code == 0 and "me/student, private" in out and "note: Worse than a plain window" in out
    assert "local folder" not in out and not written(hub)
    code, out, err = said("push", run.folder, "me/student")
    assert code == 0 and err.startswith("linearizer: warning: Worse than a plain window") and err.count("\n") == 1
    assert "from_pretrained(name, revision=revision, trust_remote_code=True)" in out
    code, out, _ = said("push", run.folder, "me/open", "--public", "--json")
    assert code == 0 and json.loads(out)["repo_id"] == "me/open" and not hub.repos["models", "me/open"].private


def test_where_a_run_was_published_is_told_by_whoever_reads_its_log(hub, run, signed_in, said):
    assert not [line for line in said("runs", "--root", run.folder.parent)[1] if "me/later" in line]
    done = publish(run, "me/later")
    event = run.events()[-1]
    details = {
        "repo_id": "me/later",
        "revision": done.revision,
        "url": done.url,
        "snippet": done.snippet,
        "private": True,
    }
    assert event == {"time": event["time"], "event": "published", **details} and control.status(run).published == event
    code, out, _ = said("runs", "--root", run.folder.parent)
    sentence = f"published as me/later (private), revision {done.revision}: {done.url}"
    assert code == 0 and out.endswith(f"demo: {sentence}\n")
    code, out, _ = said("runs", "attach", run.folder)
    assert code == 0 and out.endswith(f"{sentence}\n\n{done.snippet}\n")
    run.log("evaluated")  # what comes later hides it no more than another publication does
    publish(run, "me/last")
    assert control.status(run).published["repo_id"] == "me/last"


def test_the_command_says_what_it_needs(hub, run, signed_in, said):
    for arguments in ([run.folder], [], [run.folder, "me/a", "--space", "me/b"], [run.folder, "--space", "me/b"]):
        code, out, err = said("push", *arguments)
        assert (code, out) == (2, "") and "push needs RUN and OWNER/NAME, or --space OWNER/NAME alone" in err
    code, _, err = said("push", run.folder, "org/student")
    assert code == 2 and "choose from me" in err and ME not in err
