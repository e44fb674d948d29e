"""The app as a Space: what it is made of, and that what was sent works where only that is."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from linearizer.cli.main import main
from linearizer.errors import RequestError
from linearizer.publish import push
from linearizer.run import files
from linearizer.workers import control
from tests.support.page_server import SMALL, SPACE, client_of, serving
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, files_of, publish, refused

HERE = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(HOW_THE_HUB_SENDS)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of the project, with what a working copy gathers."""
    root = tmp_path / "checkout"
    for name in ("linearizer", "assets"):
        shutil.copytree(HERE / name, root / name)
    for name in ("LICENSE", "pyproject.toml", "README.md", "requirements.txt"):
        shutil.copy(HERE / name, root / name)
    (root / "app.py").write_text("import linearizer\n")
    (root / "linearizer" / "__pycache__").mkdir(exist_ok=True)
    (root / "linearizer" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (root / "linearizer" / ".env").write_text("HF_TOKEN=hf_secret")
    (root / "linearizer" / "link.py").symlink_to("/etc/passwd")
    (root / "runs").mkdir()
    for module in (push, files):
        monkeypatch.setattr(module, "PACKAGE", root / "linearizer")
    return root


def test_a_space_holds_the_project_and_nothing_of_a_working_copy(hub, checkout):
    publish(None, "me/app")
    held = files_of(hub, "me/app", "spaces")
    assert {"app.py", "requirements.txt", "linearizer/hub/models.py", "linearizer/publish/card.md", "LICENSE"} <= set(
        held
    )
    assert "assets/demo-model/config.json" in held
    assert not [
        name
        for name in held
        if "pycache" in name or name.startswith("runs/") or ".env" in name or name.endswith("/link.py")
    ]


def test_its_requirements_are_the_projects_without_what_a_space_has(checkout):
    own = (checkout / "requirements.txt").read_text().splitlines()
    sent = push.list_space_files("me/app")["requirements.txt"].decode().splitlines()
    assert [line for line in sent if line not in own] == [push.TORCH]
    assert [line.partition(">")[0] for line in own if line not in sent] == ["gradio", "torch", "triton"]


def test_publishing_again_removes_what_is_gone(hub, checkout):
    publish(None, "me/app")
    (checkout / "linearizer" / "report" / "verdict.py").unlink()
    publish(None, "me/app")
    assert "linearizer/report/verdict.py" not in files_of(hub, "me/app", "spaces")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as a wheel brings it, in a folder where nothing else is."""
    root = tmp_path_factory.mktemp("wheel")
    shutil.copytree(HERE / "linearizer", root / "source" / "linearizer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HERE / "assets", root / "source" / "assets")
    for name in ("app.py", "LICENSE", "pyproject.toml", "README.md", "requirements.txt"):
        shutil.copy(HERE / name, root / "source" / name)
    program = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", program], cwd=root / "source", check=True, capture_output=True)
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        held.extractall(root / "site-packages")
    return root / "site-packages"


def test_an_installed_package_publishes_the_same_space_and_what_was_sent_shows_the_page(hub, installed, tmp_path):
    known = {**os.environ, "HF_TOKEN": ME, "HF_HOME": str(tmp_path / "home"), "LINEARIZER_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "linearizer", "push", "--space", "me/app"]
    pushed = subprocess.run(
        command, cwd=tmp_path, env={**known, "PYTHONPATH": str(installed)}, capture_output=True, text=True
    )
    assert pushed.returncode == 0, pushed.stderr
    sent, own = files_of(hub, "me/app", "spaces"), push.list_space_files("me/app")
    pictures = {name for name in own if name.startswith("assets/") and name.endswith((".png", ".svg"))}
    assert set(sent) - {".gitattributes"} == set(own) - pictures
    assert "](assets/page" in own["README.md"].decode() and b"](assets/page" not in sent["README.md"]
    for name, content in own.items():
        if name not in pictures | {"README.md"}:
            assert sent[name] == (content if isinstance(content, bytes) else content.read_bytes()), name
    folder = snapshot_download("me/app", repo_type="space", token=ME, local_dir=tmp_path / "space")
    with serving(tmp_path / "runs", [sys.executable, "app.py"], folder, **SPACE, PYTHONPATH="") as (url, *_):
        client = client_of(url)
        assert client.predict("demo", api_name="/inspect_model")["supported"]
        run = client.predict("demo", 64, "Try it", {**SMALL, "steps": 0}, "a secret of sixteen", api_name="/start_run")
        while (result := client.predict(run, "a secret of sixteen", api_name="/run_status"))["state"] in control.LIVE:
            time.sleep(0.2)
        assert result["state"] == "done", result


def test_another_space_is_left_alone(hub, checkout):
    hub.add("me/app", {"app.py": b"mine"}, "spaces", private=True)
    assert "'me/app' exists and holds something else" in refused(None, "me/app")


def test_where_a_file_is_missing_it_says_what_to_do(hub, checkout, monkeypatch, capsys):
    (checkout / "app.py").unlink()
    monkeypatch.setenv("HF_TOKEN", ME)
    assert main(["push", "--space", "me/app"]) == 2
    assert "app.py', which is missing: install the package again" in capsys.readouterr().err
    with pytest.raises(RequestError, match="a Space needs .*, which is missing"):
        push.preview(None, "me/app", token=ME)
    assert not [line for line in hub.requests if line.startswith("POST")]


def test_the_command_shows_and_publishes(hub, checkout, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", ME)
    assert main(["push", "--space", "me/app", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "me/app, private" in out and "hf_oauth_scopes" in out and not hub.repos
    assert main(["push", "--space", "app", "--public"]) == 0
    assert capsys.readouterr().out.strip().endswith("/spaces/me/app") and not hub.repos["spaces", "me/app"].private
