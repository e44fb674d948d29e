"""A Space: visitors apart, its limits kept by itself, no file of its machine served, and nothing that breaks it."""

import json
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from gradio_client.exceptions import AppError

from linearizer.page.actions import ENDPOINTS
from linearizer.page.visitors import hash_identity
from linearizer.report.verdict import judge_run
from linearizer.run.files import unseal
from linearizer.run.folder import Run
from linearizer.workers import control, device_queue
from tests.support.page_server import SMALL, SPACE_MINUTES, client_of, ended, looking, session_of, shown
from tests.support.page_steps import choose_demo, unfold
from tests.support.runs import end_runs

ANN, BOB = "ann's secret, long enough", "bob's secret, long enough"
QUICK = {"texts": 2, "seconds": 0.2, "lengths": [160]}


USUAL = {  # arguments of endpoints, by their names
    "query": "x", "model": "demo", "budget": 64, "effort": "Try it", "options": {"steps": -1}, "flavor": "l4x1",
    "most_usd": 1.0, "minutes": 30, "push": "", "run": "none", "pay": False, "name": "new", "parts": ["language"],
    "prompt": "Once", "tokens": 4, "seed": 0, "sample": False, "text": "Once", "as_chat": True, "system": "",
    "window": True, "chat": "talk", "pictures": [], "repo_id": "ann/x", "private": True, "secret": ANN,
}  # fmt: skip


@cache
def arguments_of(url):
    """Name the arguments of every endpoint."""
    info = json.loads(urllib.request.urlopen(f"{url}gradio_api/info").read())["named_endpoints"]
    return {api: [each["parameter_name"] for each in endpoint["parameters"]] for api, endpoint in info.items()}


@pytest.fixture
def busy(space):
    """Let the device be at work for another, so that runs wait and take no time of the processor."""
    ticket = device_queue.take_ticket(Path("another"), ["cpu"])
    yield
    end_runs(space.runs)
    ticket.remove()


def test_a_signed_in_visitor_publishes_with_their_own_token(space, hub, trained_run):
    url, runs, log = space
    run, client = "trained", client_of(url, headers=signed_in("ann"))
    shutil.copytree(trained_run, runs / hash_identity("account ann") / run)
    preview = client.predict(run, "ann/small", True, api_name="/preview_publication")
    assert preview["private"] and "config.json" in [name for name, _ in preview["files"]]
    assert ("models", "ann/small") not in hub.repos
    done = client.predict(run, "ann/small", True, api_name="/publish_run")
    assert hub.repos["models", "ann/small"].private
    published = client.predict(run, api_name="/run_status")["published"]
    assert published.items() >= done.items() and published["private"] and "from_pretrained" in done["snippet"]
    assert "hf_fake_ann" not in everything_written(log.parent)
    with pytest.raises(AppError, match="not one of your runs"):
        client_of(url, headers=signed_in("bob")).predict(run, api_name="/run_status")


def signed_in(account):
    return {"Cookie": f"session={session_of(account)}"}


def everything_written(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return "".join(path.read_text(errors="replace") for path in files)


def test_a_space_offers_to_sign_in_once_on_each_page(space):
    home, runs = (urllib.request.urlopen(space.url + path).read().decode() for path in ("", "runs"))
    assert 0 < home.count("Sign in with Hugging Face") == runs.count("Sign in with Hugging Face")


def test_a_space_serves_the_name_that_the_hub_gives_it(space):
    named = {"Host": "owner-linearizer.hf.space", "Origin": "https://huggingface.co"}
    assert urllib.request.urlopen(urllib.request.Request(space.url, headers=named), timeout=60).status == 200


def test_visitors_of_a_space_see_only_their_own(space, busy):
    url = space.url
    client = client_of(url)
    run = client.predict("demo", 64, "Try it", {**SMALL, "steps": 0}, ANN, api_name="/start_run")
    assert len(run) > 16
    assert [listed["run"] for listed in client.predict(ANN, api_name="/list_runs")] == [run]
    assert client.predict(BOB, api_name="/list_runs") == []
    for api, names in arguments_of(url).items():
        for secret, why in (
            ((BOB, "not one of your runs"), ("", "this Space does not know you")) if "run" in names else ()
        ):
            sent = {**USUAL, "run": run, "secret": secret}
            with pytest.raises(AppError, match=why):
                client.predict(**{name: sent[name] for name in names}, api_name=api)
    with pytest.raises(AppError, match="this Space does not know you"):
        client.predict("short", api_name="/list_runs")


def judge_as_worse(folder):
    """Let the evaluation of a run show that its student is worse than a plain window."""
    path = folder / "evaluation.json"
    content = json.loads(unseal(path.read_text()))
    for result in content["parts"]["language"]["lengths"]:
        result["difference"] = {"mean": 0.2, "interval": [0.1, 0.3]}
    path.write_text(json.dumps(content))


def test_two_visitors_of_a_space_do_not_see_each_other_and_preview_without_signing_in(
    space, browser, busy, trained_run
):
    url, runs, _ = space
    with looking(browser, url) as ann, looking(browser, url) as bob:
        choose_demo(ann)
        ann.click("#start")
        ann.wait_for_url("**/?run=*")
        name = ann.url.rpartition("=")[2]
        shown(ann, "#run-card", "demo")
        bob.goto(f"{url}?run={name}")
        bob.wait_for_selector(".lz-bad >> text=not one of your runs")
        bob.goto(f"{url}runs")
        shown(bob, "#runs", "No runs yet")
        ann.goto(f"{url}runs")
        shown(ann, "#runs", name)
        (home,) = runs.glob(f"*/{name}/..")
        shutil.copytree(trained_run, home / "finished")
        judge_as_worse(home / "finished")
        ann.goto(f"{url}?run=finished")
        unfold(ann, "Publish to the Hub")
        shown(ann, "#preview-note", "To publish, sign in at the top right")
        ann.locator("#owner input").fill("ann")
        ann.get_by_role("button", name="Show what will be sent").click()
        shown(ann, "#files", "files, ")
        shown(ann, "#preview-note", judge_run(Run(home / "finished")).sentence)
        assert ann.locator("#preview-note .lz-bad").count() == 1
        assert ann.locator("#publish").is_disabled()


@pytest.mark.parametrize("model", ["/", "~", "./runs", "../..", "/etc", "assets/demo-model", "a/b/c"])
def test_a_space_reads_no_folder_of_its_machine(space, model):
    with pytest.raises(AppError, match="on a Space|is gated|not on the Hub"):
        client_of(space.url).predict(model, api_name="/inspect_model")


@pytest.mark.parametrize("text", ["file:/etc/passwd", "file:README.md", "dataset:/etc", "dataset:.", "nonsense"])
def test_a_space_reads_no_file_of_its_machine(space, text):
    with pytest.raises(AppError, match="on a Space text comes from"):
        client_of(space.url).predict("demo", 64, "Try it", {"text": text}, ANN, api_name="/start_run")


def test_a_space_says_its_limits_in_words(space, busy):
    client = client_of(space.url)
    with pytest.raises(AppError, match=r"steps 5000 is more than this Space serves: ask for at most 300, or"):
        client.predict("demo", 64, "Try it", {"steps": 5000}, "a visitor who asks much", api_name="/start_run")
    client = client_of(space.url, headers=signed_in("eve"))
    two = [client.predict("demo", 64, "Thorough", {}, api_name="/start_run") for _ in range(2)]
    with pytest.raises(AppError, match="at most 2 of your runs may run or wait"):
        client.predict("demo", 64, "Thorough", {}, api_name="/start_run")
    assert sorted(two) == sorted(run["run"] for run in client.predict(api_name="/list_runs"))


def test_a_space_stops_what_works_too_long_by_itself_and_lets_it_go_on(space, busy):
    client = client_of(space.url)
    assert f"{SPACE_MINUTES} minutes each" in urllib.request.urlopen(space.url).read().decode()
    run = client.predict("demo", 64, "Thorough", {}, ANN, api_name="/start_run")
    begun = time.time() - 60 * SPACE_MINUTES - 1
    with (space.runs / hash_identity(f"secret {ANN}") / run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": begun, "event": "started"}) + "\n")
    status = ended(client, run, ANN)
    assert status["state"] in ("stopped", "stopping")
    while status["state"] == "stopping":
        status = client.predict(run, ANN, api_name="/run_status")
    assert f"it has run for {SPACE_MINUTES} minutes, the limit of this Space for a run at a time" in status["error"]
    assert client.predict(run, ANN, api_name="/resume_run") == "queued"


def test_an_evaluation_on_a_space_is_ones_own_and_refuses_what_only_an_owner_may_ask(space, trained_run):
    run = "hers"
    shutil.copytree(trained_run, space.runs / hash_identity(f"secret {ANN}") / run)
    client = client_of(space.url)
    preview = client.predict(run, "ann/hers", True, ANN, api_name="/preview_publication")  # nobody is signed in
    assert "README.md" in dict(preview["files"]) and not preview["checked"]
    for options, why in (
        ({"text": "file:/etc/passwd"}, "text comes from"),
        ({"task_folder": "/etc"}, "a Space knows only lm_eval's own tasks"),
        ({"texts": 500}, "texts 500 is more than this Space serves"),
        ({"texts": "many"}, "it should be a valid integer"),
        ({"parts": "language"}, "it should be a valid array"),
        ({"pieces": 1}, "pieces is unknown: leave it out"),
    ):
        with pytest.raises(AppError, match=why):
            client.predict(run, None, options, ANN, api_name="/evaluate_run")
    assert client.predict(run, ["language"], QUICK, ANN, api_name="/evaluate_run") in control.LIVE
    while (result := client.predict(run, ANN, api_name="/evaluation_status"))["state"] != "done":
        assert result["state"] in control.LIVE, result
        time.sleep(0.1)
    assert [subject["name"] for subject in result["evaluation"]["language"]["subjects"]][:2] == ["teacher", "student"]
    assert "/" + "runs" not in str(result)


ODD = [
    None, "", " ", "\0", "..", "../..", "../../etc/passwd", "/etc/passwd", "~root", "%2e%2e/x", "a" * 5000, "<b>x</b>",
    "<img src=x onerror=alert(1)>", "`<script>`", "demo\n", "org/<i>m</i>", 0, -1, 1e308, True, [], {}, ["demo"],
    {"run": "x"}, "file:/etc/passwd", "💥", "${7*7}", "demo@main", "org/name@<b>",
]  # fmt: skip


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


@pytest.mark.parametrize("api", [action.__name__ for action in ENDPOINTS])
def test_no_input_breaks_an_endpoint(space, api):
    url, _, log = space
    before, wire = len(log.read_text()), wire_of(url, api)
    usual = [USUAL[name] for name in arguments_of(url)[f"/{api}"]]
    calls = [  # neighbours share the values
        (url, wire, [*usual[:place], odd, *usual[place + 1 :]])
        for place in range(len(usual))
        for odd in (ODD if len(usual) == 1 else ODD[place % 4 :: 4])
        if (api, place) != ("start_run", 3) or odd not in (None, {})  # a run like any other
    ]
    for (*_, data), said in at_once(asked, calls):
        harmless(said, (api, data))
    assert "Traceback" not in log.read_text()[before:], log.read_text()[before:][-2000:]


def test_no_option_of_a_plan_breaks_the_start_of_a_run(space):
    url, _, log = space
    before, wire = len(log.read_text()), wire_of(url, "start_run")
    names = ["model", "budget", "features", "text", "texts", "seed", "device", "dtype", "x"]
    options = ({**SMALL, "steps": -1, name: odd} for place, name in enumerate(names) for odd in ODD[place % 3 :: 3])
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
    calls = [  # of a stranger and of a visitor, in turn
        (
            url,
            wire,
            [odd if (place + number) % 2 else {"secret": ANN, "run": odd}, *[odd] * 99][: len(wire["inputs"])],
            odd,
        )
        for number, wire in enumerate(wires)
        for place, odd in enumerate(ODD[number % 2 :: 2])
    ]
    for (_, wire, data, _), said in at_once(asked, calls):
        assert "Traceback" not in said and "root:x:" not in said, (wire["id"], data, said[:500])
        for raw in ("<img src=x", "<b>x", "<script>`", "<i>m"):
            assert raw not in said, (wire["id"], data, said[:500])
