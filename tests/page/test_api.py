"""The page as an API at one's own machine: the whole flow by `gradio_client`, types, and memory that stays flat."""

import io
import json
import os
import re
import secrets
import shutil
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from linearizer.page.actions import ENDPOINTS
from linearizer.plan.options import options_of
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from tests.support.page_server import SMALL, client_of, ended, process_of, server, wait_for


def names_of_runs(client):
    return [run["run"] for run in client.predict(api_name="/list_runs")]


def test_the_whole_flow_runs_without_a_browser(local, hub):
    client = client_of(local.url)
    before = names_of_runs(client)
    assert "demo" in client.predict("de", api_name="/search_models")
    result = client.predict("demo", api_name="/inspect_model")
    assert result["supported"] and len(result["layers"]) == 8
    guess = client.predict("demo", 64, "Try it", api_name="/estimate_run")
    assert guess["seconds"] > 1 and guess["command"].startswith("linearizer run demo --budget 64")
    run = client.predict("demo", 64, "Try it", SMALL, api_name="/start_run")
    assert ended(client, run)["state"] == "done"
    parts = client.predict(run, api_name="/run_status")["evaluation"]
    assert [subject["name"] for subject in parts["language"]["subjects"]] == ["teacher", "student", "window"]
    shared = client.predict(run, 128, api_name="/share_budget")
    assert shared["breakeven_tokens"] <= 128 < 2 * shared["breakeven_tokens"]
    both = client.predict(run, "Once", 8, api_name="/compare_models")
    assert [both[name]["tokens"] for name in ("teacher", "student", "window")] == [8] * 3
    first = both["student"]["difference"]
    assert first is None or first["teacher"] != first["own"]
    talk = {"chat": "talk", "window": False}
    read = client.predict(run, "One two three. " * 50, **talk, api_name="/read_document")
    assert read["tokens"] == read["total"] > 100 and 0 < read["bytes"]["student"] < read["bytes"]["teacher"]
    told = [client.predict(run, "One", 6, **talk, api_name="/compare_models") for _ in range(2)]
    assert told[0]["student"]["text"] == told[1]["student"]["text"] != "" and told[0]["window"] is None
    assert told[1]["student"]["tokens_read"] > read["tokens"]  # it answers after the document
    assert client.predict(run, "talk", api_name="/end_chat") == "talk"
    alone = client.predict(run, "One", 6, **talk, api_name="/compare_models")
    assert alone["student"]["tokens_read"] < read["tokens"]
    assert names_of_runs(client) == [run, *before]
    assert client.predict(run, api_name="/delete_run") == run
    assert names_of_runs(client) == before


def test_every_endpoint_says_its_types_and_what_its_options_may_be(local):
    info = json.loads(urllib.request.urlopen(f"{local.url}gradio_api/info").read())["named_endpoints"]
    assert len(info) == len(ENDPOINTS)
    for name, endpoint in info.items():
        for each in (*endpoint["parameters"], *endpoint["returns"]):
            assert each["python_type"]["type"] not in ("Any", ""), (name, each)
    described = info["/start_run"]["description"]
    for name, option in options_of(Plan).items():
        assert name in ("model", "budget") or f"{name}: {option.help}" in described, name


def test_a_measured_run_branches_into_another_budget_without_measuring_again(local, done):
    client, run = client_of(local.url), done
    other = client.predict(run, 96, api_name="/branch_run")
    assert ended(client, other)["state"] == "done"
    folder = local.runs
    assert (folder / other / "profile.json").read_bytes() == (folder / run / "profile.json").read_bytes()
    assert "profiled" not in (folder / other / "events.jsonl").read_text()
    assert json.loads((folder / other / "plan.json").read_text())["budget"] == 96


def test_a_run_that_lost_its_samples_branches_by_measuring_them_again_with_its_profile(local, done):
    lost = Run(shutil.copytree(local.runs / done, local.runs / "lost"))
    (lost.folder / "state" / "samples.safetensors").unlink()
    client = client_of(local.url)
    other = Run(local.runs / client.predict("lost", 96, api_name="/branch_run"))
    assert ended(client, other.folder.name)["state"] == "done"
    assert other.has_file("state/samples.safetensors") and other.read("profile.json") == lost.read("profile.json")


def test_a_student_is_fetched_as_a_zip_by_an_address_that_nobody_can_guess(local, done):
    address = local.url + client_of(local.url).predict(done, api_name="/download_student")
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept-Encoding": "gzip"})) as answer:
        assert answer.headers["Content-Encoding"] != "gzip"  # weights do not get smaller, and it takes long
        assert answer.headers["Content-Disposition"] == 'attachment; filename="demo-linearized.zip"'
        packed = zipfile.ZipFile(io.BytesIO(answer.read()))
    own = {path.name: path.read_bytes() for path in Run(local.runs / done).checkpoint.iterdir()}
    assert {name: packed.read(f"demo-linearized/{name}") for name in own} == own and packed.testzip() is None
    assert len(packed.namelist()) == len(own)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace(address[-24:-4], secrets.token_urlsafe(15)))


def test_at_ones_own_machine_nobody_signs_in_and_nothing_is_told_of_calls(local):
    for path in ("", "runs"):
        assert "Sign in with Hugging Face" not in urllib.request.urlopen(local.url + path).read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{local.url}login/huggingface")
    with pytest.raises(urllib.error.HTTPError, match="403"):  # nor is anybody told of others' calls
        urllib.request.urlopen(f"{local.url}monitoring/summary")


@pytest.mark.parametrize(
    "headers, status", [({"Host": "localhost:1234"}, 200), ({"Host": "evil.example"}, 403), ({"Origin": "null"}, 403)]
)
def test_a_page_on_this_machine_serves_no_other_site(local, headers, status):
    for path in ("", "gradio_api/info"):
        try:
            request = urllib.request.Request(local.url + path, headers=headers)
            assert urllib.request.urlopen(request, timeout=60).status == status
        except urllib.error.HTTPError as error:
            assert error.code == status and b"--host" in error.read()


FEW_SESSIONS = """
from linearizer.page import site
site.MAX_SESSIONS = 20
site.serve_page()
"""


def test_more_sessions_than_are_kept_leave_the_memory_of_a_server_flat(tmp_path):
    """A session holds about 0.4 MB, so 100 sessions beyond those that are kept would add about 40 MB."""
    memory = []
    with server(tmp_path / "runs", [sys.executable, "-c", FEW_SESSIONS]) as (url, log, process):
        wait_for(url, process, log)
        wires = json.loads(urllib.request.urlopen(f"{url}config").read())["dependencies"]
        prompt = next(wire for wire in wires if wire["targets"] and not wire["inputs"] and wire["backend_fn"])
        for sessions in (40, 100):
            for _ in range(sessions):
                sent = {"data": [], "fn_index": prompt["id"], "session_hash": secrets.token_hex(8)}
                assert "data" in json.loads(posted(f"{url}gradio_api/run/predict", sent))
            memory.append(memory_bytes(process.pid))
    assert memory[1] - memory[0] < 20e6


def posted(url, content):
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=180).read()


def memory_bytes(process):
    """Read the resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def test_a_server_that_nobody_asks_takes_no_time(local):
    process, taken = process_of(local.url), []
    while not taken or taken[-1] > 0.06 and len(taken) < 10:  # what was asked before may not have ended
        before = processor_seconds(process)
        time.sleep(2)
        taken.append(processor_seconds(process) - before)
    assert taken[-1] <= 0.06, taken


def processor_seconds(process):
    """Read the time that a process has had of the processor."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
