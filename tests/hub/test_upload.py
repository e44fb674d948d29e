"""An upload that breaks goes on where it was, sends nothing twice, and is believed only when it was looked at."""

import pytest

from linearizer.errors import LinearizerError, PublishError
from linearizer.hub.repository import LARGE_BYTES
from linearizer.progress import finish
from linearizer.publish import push
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, copy_run, files_of, publish
from tests.support.runs import start_command, wait_until

pytestmark = pytest.mark.filterwarnings(HOW_THE_HUB_SENDS)


@pytest.fixture(scope="module")
def sharded(quick_run, tmp_path_factory):
    """A finished run whose checkpoint has several large files; no test may change it but for its log."""
    run = copy_run(quick_run, tmp_path_factory.mktemp("run") / "demo")
    for number in range(3):
        (run.checkpoint / f"more-{number}.safetensors").write_bytes(bytes([number]) * LARGE_BYTES)
    return run


def sent(hub):
    return [line for line in hub.requests if line.startswith("PUT /lfs/")]


def large(run):
    return {path.name for path in run.checkpoint.iterdir() if path.suffix in (".safetensors", ".png")}


def test_files_that_arrived_before_an_upload_broke_are_not_sent_again(hub, sharded):
    hub.fail_next("PUT /lfs/", 403, skip=3)
    with pytest.raises(PublishError, match="uploaded files will not be sent again"):
        publish(sharded)
    arrived = set(hub.objects)
    assert len(arrived) == 3 < len(large(sharded))
    hub.requests.clear()
    publish(sharded)
    again = [line.removeprefix("PUT /lfs/") for line in sent(hub)]
    assert len(again) == len(set(again)) == len(large(sharded)) - 3 and not arrived & set(again)
    assert large(sharded) <= set(files_of(hub))


def test_a_process_that_is_killed_while_it_sends_leaves_no_half_repository_and_is_gone_on_from(
    hub, sharded, said, monkeypatch
):
    hub.fail_next("PUT /lfs/", "hold", skip=3)
    monkeypatch.setenv("HF_TOKEN", ME)
    sending = start_command("push", sharded.folder, "me/student")
    wait_until(lambda: len(sent(hub)) == 4)
    sending.kill()
    sending.communicate()
    arrived = set(hub.objects)
    assert len(arrived) == 3 and set(files_of(hub)) == {".gitattributes"}
    hub.requests.clear()
    code, out, err = said("push", sharded.folder, "me/student")
    hub.released.set()
    assert code == 0, err
    assert not arrived & {line.removeprefix("PUT /lfs/") for line in sent(hub)}
    assert len(hub.repos["models", "me/student"].commits) == 2 and large(sharded) <= set(files_of(hub))
    assert "from_pretrained(name, revision=revision" in out and sharded.published["revision"] in out


def test_the_published_revision_is_loaded_by_its_config_before_it_is_called_published(hub, sharded):
    hub.fail_next("/resolve/", 404)
    before = len(sharded.events())
    with pytest.raises(LinearizerError, match="uploaded files will not be sent again"):
        publish(sharded, "me/unread")
    assert len(sharded.events()) == before
    done = publish(sharded, "me/unread")
    assert any(f"/me/unread/resolve/{done.revision}/config.json" in line for line in hub.requests)


@pytest.mark.parametrize("kind", ["model", "space"])
def test_a_token_that_may_not_write_what_is_there_is_refused_before_anything_is_sent(hub, sharded, kind):
    files = {"config.json": b'{"model_type": "linearized"}'} if kind == "model" else {"app.py": b"", "README.md": b""}
    hub.add("me/there", {**files, "linearizer/__main__.py": b""}, f"{kind}s", private=True)
    hub.fail_next("auth-check/write", 403)
    with pytest.raises(PublishError, match="may not write there"):
        publish(sharded if kind == "model" else None, "me/there")
    assert not [line for line in hub.requests if not line.startswith(("GET", "HEAD"))]


def test_what_someone_else_adds_meanwhile_stays(hub, sharded):
    steps = push.publish(sharded, "me/student", token=ME)
    while next(steps).details.get("file") != "the commit":
        pass
    hub.add("me/student", {"theirs.txt": b"theirs"})
    finish(steps)
    assert {"theirs.txt", "config.json"} <= set(files_of(hub))
