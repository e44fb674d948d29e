"""Visitors, and what the page says to them."""

import os
import time
from dataclasses import replace

import pytest

from linearizer.errors import FolderError, ModelNotAvailable, RequestError
from linearizer.page import actions, cards, limits, plan_cards, planning, result_step, run_list, run_steps
from linearizer.page.chat import chats
from linearizer.page.limits import Limits
from linearizer.page.visitors import find_visitor
from linearizer.plan.plan import Plan
from linearizer.report import markup
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.page_server import free_port
from tests.support.runs import begin_for

ANN, BOB = "a" * 16, "b" * 16


def test_visitors_of_a_space_have_folders_that_nobody_can_guess(on_space):
    run = begin_for(find_visitor(secret=ANN), Plan("demo", budget=64))
    assert find_visitor(secret=ANN).find_run(run.folder.name) == run
    for other in (find_visitor(secret=BOB), find_visitor("ann"), find_visitor(ANN)):  # an account of these letters
        with pytest.raises(RequestError, match="not one of your runs"):
            other.find_run(run.folder.name)
    signed_in = find_visitor("ann", secret=ANN)
    assert signed_in.find_run(run.folder.name) == run and chats.key_of(signed_in, run, "talk")[0] == run.folder.parent
    with pytest.raises(RequestError, match="your runs fill 0 GB"), limits.turn(signed_in, Limits(disk=0)):
        pass
    later = begin_for(signed_in, Plan("demo", budget=64))
    assert [each.run for each in actions.list_runs(signed_in)] == [later.folder.name, run.folder.name]
    assert find_visitor("ann").find_run(later.folder.name) == later
    assert len(run.folder.name) > 20
    assert ANN not in str(run.folder)


@pytest.mark.parametrize("secret", ["", "short", None, 5, {"a": 1}, ["a" * 16]])
def test_who_cannot_be_known_again_has_no_runs(on_space, secret):
    with pytest.raises(RequestError, match="this Space does not know you"):
        find_visitor(secret=secret).home  # noqa: B018


def test_a_token_is_not_in_what_a_visitor_looks_like(on_space):
    assert "hf_secret" not in repr(find_visitor("ann", "hf_secret"))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\0b", "a" * 300, None, 5, ["x"], "-" * 0])
def test_a_name_never_leads_out_of_the_folder(root, name):
    (root / "x").mkdir(parents=True)
    with pytest.raises(RequestError, match="not one of your runs"):
        find_visitor().find_run(name)


def test_a_link_out_of_the_folder_is_not_followed(root, tmp_path):
    Run.create(tmp_path / "elsewhere", Plan("demo", budget=64))
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="not one of your runs"):
        find_visitor().find_run("link")


def test_a_run_is_renamed_only_where_nothing_is_changed_or_replaced(root, tmp_path):
    run, other = (Run.create(root / name, Plan("demo", budget=64)) for name in ("run", "other"))
    someone = find_visitor()
    (root / "link").symlink_to(tmp_path / "nowhere")
    for name in ("other", "link"):
        with pytest.raises(RequestError, match="beside this run already"):
            actions.rename_run(someone, "run", name)
    for name in ("", ".", "..", "a/b", "../x", "a\0b", "-rf", "a b", "ü", "x" * 201, "example-run"):
        with pytest.raises(RequestError, match="cannot be the name of a run"):
            actions.rename_run(someone, "run", name)
    with run.take_lock(), pytest.raises(FolderError, match="is being written by another process"):
        actions.rename_run(someone, "run", "new")
    with pytest.raises(RequestError, match="not one of your runs"):
        actions.rename_run(someone, "link", "new")
    for name in ("", "..", "a/b", "../x"):  # of whoever calls it without the page
        with pytest.raises(RequestError, match="is not the name of a folder"):
            control.rename(run, name)
    before = run.id
    assert actions.rename_run(someone, "run", "new") == "new"
    assert someone.find_run("new").id == before and sorted(path.name for path in root.iterdir()) == [
        "link",
        "new",
        "other",
    ]
    assert other.plan.budget == 64


def test_home_reads_the_newest_runs_alone(root):
    for number in range(6):
        run = Run.create(root / f"run-{number}", Plan("demo", budget=64))
        os.utime(run.folder / "plan.json", (number, number))
    (root / "run-0" / "plan.json").write_bytes(b"\xff")  # which would show as damaged
    os.utime(root / "run-0" / "plan.json", (0, 0))
    assert [status.run.folder.name for status in control.runs_in(root, 4)] == [f"run-{n}" for n in (5, 4, 3, 2)]
    assert len(control.runs_in(root)) == 6


def test_what_comes_from_outside_is_escaped(root):
    odd = "<img src=x onerror=alert(1)>\"'&`<b>`"
    result = replace(planning.examine_model(find_visitor(), "demo").inspection, name=odd, licence=odd)
    run = Run.create(find_visitor().fresh_folder(plan := Plan(odd, budget=64, text=odd)), plan)
    run.log("failed", error=odd)
    status = control.status(run)
    for shown in (
        plan_cards.model_card(result),
        markup.message_box(odd, "bad"),
        cards.run_card(status, odd, 0.0),
        run_list.run_cards([status]),
        cards.files_table([(odd, 1)], 1),
        cards.sending_card(odd, None, odd),
        cards.sending_card(odd, None, None),
        cards.published_card({"repo_id": odd, "revision": odd, "url": odd}),
        markup.table(odd, [odd], [[odd, odd]]),
    ):
        assert "<img" not in shown
        assert "<b>" not in shown


def test_a_list_without_a_visitor_says_so(on_space):
    listed, *choices = run_list.list_runs({}, None, None, False)
    assert "this Space does not know you" in listed and len(choices) == 3
    assert "this Space does not know you" in run_list.compare_runs({}, None, None, "one", "other")
    note, *_ = result_step.preview_publication({}, None, None, "ann", "student", True)
    assert "lz-bad" in note and "not one of your runs" in note
    assert "this Space does not know you" in run_steps.share_budget({"run": "one"}, None, None, 64)[0]


def test_models_of_the_hub_and_local_folders_are_found_and_no_folder_on_a_space(root, tmp_path, hub, monkeypatch):
    hub.add("org/demonstration", {"config.json": b"{}"})
    hub.add("ann/demo-private", {"config.json": b"{}"}, private=True)
    assert actions.search_models(find_visitor(), "demo") == ["demo", "org/demonstration"]
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert actions.search_models(find_visitor(), str(tmp_path / "models" / "mi")) == [str(model)]
    monkeypatch.setenv("SPACE_ID", "owner/name")
    assert actions.search_models(find_visitor(), str(tmp_path / "models") + "/") == []


def test_without_a_network_a_search_finds_local_folders_and_the_demo_at_once(root, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    begun = time.monotonic()
    assert actions.search_models(find_visitor(), str(tmp_path / "mi")) == [str(tmp_path / "mine")]
    assert actions.search_models(find_visitor(), "dem") == ["demo"]
    with pytest.raises(ModelNotAvailable, match="the Hub cannot be searched"):
        actions.search_models(find_visitor(), "org")
    assert time.monotonic() - begun < 10  # a client that repeats its requests waits 20 seconds for each


def test_a_sentence_does_not_tell_where_runs_are_kept(on_space):
    home = find_visitor(secret=ANN).home
    assert markup.without_folders(f"'{home}/r123' is done") == "'r123' is done"
