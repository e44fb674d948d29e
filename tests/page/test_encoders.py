"""An encoder on the page: a person names it, starts a run, looks at its result, and reloads; a Space limits it."""

from dataclasses import replace

import pytest

from linearizer.errors import RequestError
from linearizer.page import actions, limits, planning
from linearizer.page.limits import Limits
from linearizer.page.visitors import find_visitor
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.page_server import FITS, LONG, looking, shown, wrong_in_both_schemes
from tests.support.page_steps import unfold


def test_an_encoder_is_chosen_run_looked_at_and_found_again(local, browser, sentence_encoder, topics):
    with looking(browser, local.url) as page:
        page.locator("#model input").fill(str(sentence_encoder))
        page.locator("#model input").press("Enter")
        shown(page, "#model-card", "an encoder of texts", LONG)
        page.click("#to-budget")
        shown(page, "#budget-card", "there is nothing to save")  # with the usual budget, at its 256 positions
        page.get_by_role("spinbutton", name="Tokens that each token sees").fill("40")
        fields = {"length": 160, "text": topics, "texts": 6, "steps": 2, "batch": 2}
        unfold(page, "Change how")
        for name, value in fields.items():
            page.locator(f"#encoder-{name}").get_by_role("textbox").fill(str(value))
            page.locator(f"#encoder-{name}").get_by_role("textbox").press("Tab")
        shown(page, "#budget-card", "40 of 160")
        shown(page, "#forecast", "about")
        assert not page.locator("#way").is_visible() and not page.locator("#encoder-pictures").is_visible()
        page.click("#start")
        page.wait_for_url("**/?run=*")
        shown(page, "#run-card", "done", LONG)
        shown(page, "#verdict", "texts of 160 tokens")
        name = page.url.partition("run=")[2]
        page.reload()
        shown(page, "#verdict", "Judged on 6 texts", LONG)
        for said in (
            "KL to the teacher",
            "a window of as many keys has",
            "merged tokens have",
            "encoder writes no text",
        ):
            assert said in page.inner_text("#verdict"), said
        charts = [each.get_attribute("aria-label") for each in page.locator("#verdict svg").all()]
        assert ["SDPA" in charts[0], "merged tokens" in charts[1]] == [True, True]
        page.locator("#verdict summary").click()
        assert page.locator("#verdict table").count() == 2
        shown(page, "#use-card", "SentenceTransformer")
        assert [page.locator(f"#step-{step}-button").is_visible() for step in (2, 3, 5, 6)] == [
            True,
            False,
            True,
            False,
        ]
        for width in (390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(FITS), width
        assert not wrong_in_both_schemes(page)
        page.click("#step-2-button")
        shown(page, "#run-plan", "40 keys a token")
        page.get_by_role("button", name="Change and start again").click()
        page.wait_for_selector("#model-card .lz-good", timeout=LONG)
        page.click("#to-budget")
        shown(page, "#budget-card", "40 of 160")
        page.goto(f"{local.url}runs")
        card = page.locator(f"#runs [data-run='{name}']")
        card.locator(".lz-done").wait_for()
        assert "40 keys a token" in card.inner_text()
        card.get_by_text("Delete", exact=True).click()
        card.get_by_role("button", name="Delete it for good").click()
        card.wait_for(state="detached")
    assert not (local.runs / name).exists() and "Traceback" not in local.log.read_text()


def test_what_is_for_causal_models_alone_says_so_of_an_encoder(sentence_encoder, topics, root):
    visitor = find_visitor()
    with pytest.raises(RequestError, match="start its run with start_encoder_run"):
        actions.estimate_run(visitor, str(sentence_encoder))
    with pytest.raises(RequestError, match="'demo' is not an encoder: start its run with start_run"):
        actions.start_encoder_run(visitor, "demo", 40)
    with pytest.raises(RequestError, match="colour is not an option"):
        actions.start_encoder_run(visitor, str(sentence_encoder), 40, {"colour": 1})
    plan = planning.make_encoder_plan(str(sentence_encoder), 40, {"length": 160, "text": topics})
    run = planning.examine_model(visitor, plan.model).kind.begin(visitor.fresh_folder(plan), plan, None, False).run
    name = run.folder.name
    asked = (
        actions.end_training,
        lambda *who: actions.branch_run(*who, 30),
        lambda *who: actions.share_budget(*who, 30),
    )
    for ask in (*asked, lambda *who: actions.compare_models(*who, "Once")):
        with pytest.raises(RequestError, match="is of an encoder, which writes no text and keeps no state"):
            ask(visitor, name)
    assert [each.run for each in actions.list_runs(visitor)] == [name]
    assert actions.delete_run(visitor, name) == name and not run.folder.exists()


def test_a_space_limits_an_encoder_as_any_run(sentence_encoder, topics, root, monkeypatch):
    plan = planning.make_encoder_plan(str(sentence_encoder), 40, {"length": 160})
    inspection = planning.examine_model(find_visitor(), str(sentence_encoder)).inspection
    monkeypatch.setenv("SPACE_ID", "us/app")
    visitor = find_visitor(secret="a secret of sixteen")
    with pytest.raises(RequestError, match="on a Space, name a model by its id on the Hub"):
        actions.start_encoder_run(visitor, str(sentence_encoder), 40)
    with pytest.raises(RequestError, match="on a Space text comes from"):
        actions.start_encoder_run(visitor, "org/name", 40, {"text": topics})
    for folder in (str(root.parent), f"dataset:{root.parent}"):
        with pytest.raises(RequestError, match="on a Space pictures come from `dataset:ID`"):
            actions.start_encoder_run(visitor, "org/name", 40, {"pictures": folder})
    limits.check_encoder_plan(plan, inspection)
    for few in (Limits(gigabytes=1e-6), Limits(memory=0.1)):
        with pytest.raises(RequestError, match="this Space"):
            limits.check_encoder_plan(plan, inspection, few)
    with pytest.raises(RequestError, match="steps 400 is more than this Space serves"):
        limits.check_encoder_plan(replace(plan, steps=400), inspection)
    run = Run.create(visitor.home / "begun", plan, inspection)
    with run.take_lock():
        run.log("started")
        assert limits.count_at_work(visitor.home) == 1 and control.runs_in(visitor.home)[0].live
        limits.enforce_limits(1e12)
        assert run.has_request("stop")
    run.log("stopped")
    limits.enforce_limits(1e12)
    assert not run.folder.exists()
