"""The page as an API: the whole flow by `gradio_client`, visitors of a Space apart, and nothing that breaks it."""

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from gradio_client.exceptions import AppError

from linearizer.page.api import ENDPOINTS
from linearizer.page.site import MAX_SESSIONS
from linearizer.page.visitors import hash_identity
from linearizer.run.options import options_of
from linearizer.run.plan import Plan
from tests.support.page_server import SMALL, SPACE, client_of, ended, process_of, serving, session_of

ANN, BOB = "ann's secret, long enough", "bob's secret, long enough"


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
    assert both["teacher"]["tokens"] == both["student"]["tokens"] == 8
    assert both["difference"] is None or both["difference"]["teacher"] != both["difference"]["student"]
    read = client.predict(run, "One two three. " * 50, api_name="/read_document")
    assert read["tokens"] > 100 and 0 < read["state_bytes"] < read["cache_bytes"]
    told = [client.predict(run, "One", 6, api_name="/ask_document") for _ in range(2)]
    assert told[0] == told[1] != ""
    assert client.predict(run, "One", 6, keep=True, api_name="/ask_document") == told[0]
    assert client.predict(run, api_name="/take_back_answer") == read
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
        assert name in ("model", "budget") or f"{name} (" in described, name
        assert option.limits.choices or name == "model" or option.allowed in described, name


def test_stopping_an_evaluation_tells_of_the_evaluation(local, done):
    with pytest.raises(AppError, match=f"the evaluation of '{done}' is stopped: there is nothing to stop"):
        client_of(local.url).predict(done, api_name="/stop_evaluation")


def test_a_measured_run_branches_into_another_budget_without_measuring_again(local, done):
    client, run = client_of(local.url), done
    other = client.predict(run, 96, api_name="/branch_run")
    assert ended(client, other)["state"] == "done"
    folder = local.runs
    assert (folder / other / "profile.json").read_bytes() == (folder / run / "profile.json").read_bytes()
    assert "profiled" not in (folder / other / "events.jsonl").read_text()
    assert json.loads((folder / other / "plan.json").read_text())["budget"] == 96


def test_a_signed_in_visitor_publishes_with_their_own_token_and_loads_what_was_published(
    space, hub, trained_run, tmp_path
):
    url, runs, log = space
    run, client = "trained", client_of(url, headers=signed_in("ann"))
    shutil.copytree(trained_run, runs / hash_identity("account ann") / run)
    preview = client.predict(run, "ann/small", True, api_name="/preview_publication")
    assert preview["private"] and "config.json" in [name for name, _ in preview["files"]]
    assert ("models", "ann/small") not in hub.repos
    done = client.predict(run, "ann/small", True, api_name="/publish_run")
    assert hub.repos["models", "ann/small"].private
    published = client.predict(run, api_name="/run_status")["published"]
    assert (
        {name: published[name] for name in done} == done
        and published["private"]
        and "from_pretrained" in done["snippet"]
    )
    load_back(done, tmp_path)
    assert "hf_fake_ann" not in everything_written(log.parent)
    with pytest.raises(AppError, match="none of your runs"):
        client_of(url, headers=signed_in("bob")).predict(run, api_name="/run_status")


def signed_in(account):
    return {"Cookie": f"session={session_of(account)}"}


def load_back(done, folder):
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    from linearizer.model.checkpoint import load

    there = snapshot_download(done["repo_id"], revision=done["revision"], token="hf_fake_ann", local_dir=folder)
    student, tokenizer = load(there), AutoTokenizer.from_pretrained(there)
    written = student.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert written.shape[1] > 4


def everything_written(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return "".join(path.read_text(errors="replace") for path in files)


def test_only_a_space_offers_to_sign_in(local, space):
    for (url, *_), offered in ((local, False), (space, True)):
        for path in ("", "runs"):
            page = urllib.request.urlopen(url + path).read().decode()
            assert ("Sign in with Hugging Face" in page) == offered
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{local.url}login/huggingface")


def test_visitors_of_a_space_see_only_their_own(space):
    url = space.url
    client = client_of(url)
    run = client.predict("demo", 64, "Try it", {**SMALL, "steps": 0}, ANN, api_name="/start_run")
    assert len(run) > 16
    assert [listed["run"] for listed in client.predict(ANN, api_name="/list_runs")] == [run]
    assert client.predict(BOB, api_name="/list_runs") == []
    for name, *given in (("run_status",), ("stop_run",), ("resume_run",), ("delete_run",), ("share_budget", 64)):
        with pytest.raises(AppError, match="none of your runs"):
            client.predict(run, *given, BOB, api_name=f"/{name}")
        with pytest.raises(AppError, match="nobody is known here"):
            client.predict(run, *given, api_name=f"/{name}")
    with pytest.raises(AppError, match="nobody is known here"):
        client.predict("short", api_name="/list_runs")
    assert ended(client, run, ANN)["state"] == "done"


@pytest.mark.parametrize("model", ["/", "~", "./runs", "../..", "/etc", "assets/demo-model", "a/b/c"])
def test_a_space_reads_no_folder_of_its_machine(space, model):
    with pytest.raises(AppError, match="on a Space|is gated|not on the Hub"):
        client_of(space.url).predict(model, api_name="/inspect_model")


@pytest.mark.parametrize("text", ["file:/etc/passwd", "file:README.md", "dataset:/etc", "dataset:.", "nonsense"])
def test_a_space_reads_no_file_of_its_machine(space, text):
    with pytest.raises(AppError, match="on a Space text comes from"):
        client_of(space.url).predict("demo", 64, "Try it", {"text": text}, ANN, api_name="/start_run")


def test_a_space_says_its_limits_in_words(space):
    client = client_of(space.url)
    with pytest.raises(AppError, match=r"steps 5000 is more than this Space serves \(300\)"):
        client.predict("demo", 64, "Try it", {"steps": 5000}, "a visitor who asks much", api_name="/start_run")
    client = client_of(space.url, headers=signed_in("eve"))
    two = [client.predict("demo", 64, "Thorough", {}, api_name="/start_run") for _ in range(2)]
    with pytest.raises(AppError, match="2 runs of yours are at work or wait"):
        client.predict("demo", 64, "Thorough", {}, api_name="/start_run")
    assert sorted(two) == sorted(names_of_runs(client))
    for run in two:
        client.predict(run, api_name="/stop_run")


def test_a_space_stops_what_works_too_long_by_itself_and_lets_it_go_on(tmp_path):
    with serving(tmp_path / "runs", **SPACE, LINEARIZER_SPACE_MINUTES="0.05") as (url, *_):
        client = client_of(url)
        assert "0.05 minutes of work each" in urllib.request.urlopen(url).read().decode()
        run = client.predict("demo", 512, "Thorough", {}, ANN, api_name="/start_run")
        for again in (True, False):
            status = ended(client, run, ANN)
            assert status["state"] in ("stopped", "stopping")
            while status["state"] == "stopping":
                status = client.predict(run, ANN, api_name="/run_status")
            assert "it has worked for 0.05 minutes, which is what this Space gives to a run" in status["error"]
            if again:
                assert client.predict(run, ANN, api_name="/resume_run") == "queued"


ODD = [
    None, "", " ", "\0", "..", "../..", "../../etc/passwd", "/etc/passwd", "~root", "%2e%2e/x", "a" * 5000, "<b>x</b>",
    "<img src=x onerror=alert(1)>", "`<script>`", "demo\n", "org/<i>m</i>", 0, -1, 1e308, True, [], {}, ["demo"],
    {"run": "x"}, "file:/etc/passwd", "💥", "${7*7}", "demo@main", "org/name@<b>",
]  # fmt: skip


def answered(url, api, data):
    """Call an endpoint as any client may, in a session of its own, and give all that comes back."""
    body = json.dumps({"data": data}).encode()
    call = f"{url}gradio_api/call/{api}"
    request = urllib.request.Request(call, body, {"Content-Type": "application/json"})
    try:
        event = json.loads(urllib.request.urlopen(request, timeout=180).read())["event_id"]
        return urllib.request.urlopen(f"{call}/{event}", timeout=180).read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


@cache
def wires_of(url):
    """List what connects the page with the server."""
    return json.loads(urllib.request.urlopen(f"{url}config").read())["dependencies"]


def wire_of(url, api):
    return next(wire for wire in wires_of(url) if wire["api_name"] == api)


def at_once(work, calls):
    """Do calls side by side, for each waits for the server's queue most of the time; give each with its answer."""
    with ThreadPoolExecutor(8) as pool:
        yield from zip(calls, pool.map(lambda call: work(*call), calls), strict=True)


def harmless(said, where):
    assert "Traceback" not in said, (where, said[:500])
    assert not re.search(r"File \\?\"", said), (where, said[:500])
    assert "root:x:" not in said, (where, said[:500])
    assert not re.search(r"<(b|i|img|script)\b", said), (where, said[:500])


@pytest.mark.parametrize(
    ("api", "usual"),
    [
        ("search_models", ["x"]),
        ("inspect_model", ["demo"]),
        ("estimate_run", ["demo", 64, "Quick", {"steps": -1}]),
        ("start_run", ["demo", 64, "Try it", {"steps": -1}, ANN]),
        ("run_status", ["none", ANN]),
        ("list_runs", ["x"]),
        ("stop_run", ["none", ANN]),
        ("use_run", ["none", ANN]),
        ("resume_run", ["none", ANN, False]),
        ("delete_run", ["none", ANN]),
        ("share_budget", ["none", 64, ANN]),
        ("branch_run", ["none", 64, ANN]),
        ("compare_models", ["none", "Once", 4, 0, False, ANN]),
        ("read_document", ["none", "Once", ANN]),
        ("ask_document", ["none", "Once", 4, 0, False, False, ANN]),
        ("take_back_answer", ["none", ANN]),
        ("preview_publication", ["none", "ann/x", True, ANN]),
        ("publish_run", ["none", "ann/x", True, ANN]),
    ],
)
def test_no_input_breaks_an_endpoint(space, api, usual):
    url, _, log = space
    before, wire = len(log.read_text()), wire_of(url, api)
    calls = [
        (url, wire, [*usual[:place], odd, *usual[place + 1 :]])
        for place in range(len(usual))
        for odd in ODD
        if (api, place) != ("start_run", 3) or odd not in (None, {})  # a run like any other
    ]
    for (*_, data), said in at_once(asked, calls):
        harmless(said, (api, data))
    assert "Traceback" not in log.read_text()[before:], log.read_text()[before:][-2000:]


@pytest.mark.parametrize(
    "name", ["model", "budget", "features", "text", "texts", "samples", "seed", "device", "dtype", "x"]
)
def test_no_option_of_a_plan_breaks_the_start_of_a_run(space, name):
    url, _, log = space
    before, wire = len(log.read_text()), wire_of(url, "start_run")
    options = ({**SMALL, "steps": -1, name: odd} for odd in ODD)
    for (*_, data), said in at_once(asked, [(url, wire, ["demo", 64, "Try it", each, ANN]) for each in options]):
        harmless(said, data)
    assert "Traceback" not in log.read_text()[before:], log.read_text()[before:][-2000:]


@pytest.mark.parametrize("path", ["/etc/passwd", "pyproject.toml", "linearizer/run.py", "../../etc/passwd"])
def test_no_file_is_served(space, path):
    for route in ("gradio_api/file=", "file=", "static/", "assets/"):
        try:
            said = urllib.request.urlopen(f"{space.url}{route}{path}", timeout=180).read().decode(errors="replace")
        except urllib.error.HTTPError:
            continue
        assert "root:x:" not in said and "build-system" not in said and "class Run" not in said


def asked(url, wire, data, odd=None):
    """Do what the page's own script does when something on it is touched, and give all that comes back.

    A session is made anew for each thread only: making it takes the server longer than most answers.
    """
    session = f"fuzz{threading.get_ident()}"
    sent = {"data": data, "fn_index": wire["id"], "session_hash": session}
    sent["trigger_id"] = wire["targets"][0][0] if wire["targets"] else None
    sent["event_data"] = {"key": "a", "input_value": odd, "index": 0, "value": odd}
    path = "queue/join" if wire["queue"] else "run/predict"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}gradio_api/{path}", json.dumps(sent).encode(), headers)
    try:
        said = urllib.request.urlopen(request, timeout=180).read().decode()
        if not wire["queue"]:
            return said
        lines = []
        for line in urllib.request.urlopen(f"{url}gradio_api/queue/data?session_hash={session}", timeout=180):
            lines.append(line.decode())
            if "process_completed" in lines[-1] or "close_stream" in lines[-1]:
                break
        return "".join(lines)
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_no_input_breaks_what_the_page_itself_calls(space):
    url = space.url
    wires = [wire for wire in wires_of(url) if wire["backend_fn"] and wire["targets"]]
    assert len(wires) > 15
    calls = [
        (url, wire, data[: len(wire["inputs"])], odd)
        for wire in wires
        for odd in ODD
        for data in ([odd] * len(wire["inputs"]), [{"secret": ANN, "run": odd}, *[odd] * (len(wire["inputs"]) - 1)])
    ]
    for (_, wire, data, _), said in at_once(asked, calls):
        assert "Traceback" not in said and "root:x:" not in said, (wire["id"], data, said[:500])
        for raw in ("<img src=x", "<b>x", "<script>`", "<i>m"):
            assert raw not in said, (wire["id"], data, said[:500])


def test_five_hundred_sessions_leave_the_memory_of_a_server_flat(local):
    """A session holds about 0.4 MB, so 300 sessions beyond those that are kept would add more than 100 MB."""
    memory = []
    for sessions in (MAX_SESSIONS, 500 - MAX_SESSIONS):
        calls = [(local.url, "search_models", ["demo"])] * sessions  # each is a session of its own
        assert all("event: complete" in said for _, said in at_once(answered, calls))
        memory.append(memory_bytes(process_of(local.url)))
    assert memory[1] - memory[0] < 50e6


def memory_bytes(process):
    """Read the resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])
