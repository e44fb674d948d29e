"""From the page a job is begun on the visitor's own account, after a second question, and is none of another's."""

import pytest

from linearizer.errors import NotAgreed, RequestError
from linearizer.page import actions, limits, planning, run_state
from linearizer.page.visitors import find_visitor
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.workers import control, hub_jobs
from tests.support.page_server import looking, shown
from tests.support.page_steps import choose_demo, unfold
from tests.support.runs import QUICK, wait_for, wait_until

STOPPED = 'print(\'{"time": 1.0, "event": "stopped"}\', flush=True)'


@pytest.fixture
def ann(hub, on_space):
    """A visitor of a Space who signed in; jobs stop at once."""
    hub.program = STOPPED
    yield find_visitor("ann", "hf_fake_ann")
    hub.clear_jobs()


def test_a_job_is_begun_for_what_was_agreed_to_and_belongs_to_its_visitor(ann, hub):
    options = {name: value for name, value in QUICK.items() if name != "budget"}
    plan, asked = Plan("demo", **QUICK), {"budget": QUICK["budget"], "options": options, "minutes": 30}
    inspection = planning.examine_model(ann, "demo").inspection
    job = hub_jobs.offer_job(plan, inspection, "l4x1", minutes=30, token=ann.token)
    assert (job.owner, job.cap) == ("ann", 0.4)
    with pytest.raises(NotAgreed, match=r"a job on l4x1 costs ann \$0.80 an hour, and at most \$0.40 for 30 minutes"):
        actions.start_job(ann, "demo", "l4x1", 0.39, **asked)
    stranger = find_visitor(None, None, "a secret of sixteen")
    with pytest.raises(
        RequestError, match="nobody is signed in, so no job can be begun: press the button that signs in"
    ):
        actions.start_job(stranger, "demo", "l4x1", 1.0, **asked)
    assert not hub.jobs and not control.runs_in(ann.home)
    name = actions.start_job(ann, "demo", "l4x1", job.cap, **asked)
    run = ann.find_own_run(name)
    wait_for(run, "stopped")
    wait_until(lambda: not run.is_locked)
    assert hub.jobs["job0"].owner == "ann" and hub.jobs["job0"].spec["secrets"] == {"HF_TOKEN": "hf_fake_ann"}
    with pytest.raises(RequestError, match="is not one of your runs"):
        find_visitor("ben", "hf_fake_ben").find_run(name)
    with pytest.raises(NotAgreed, match="needs another job, and a job on l4x1 costs ann"):
        actions.resume_run(ann, name)
    assert not run_state.possible_actions(control.status(run))["pay"] and [*hub.jobs] == ["job0"]
    assert "a job on l4x1, at most $0.40" in run_state.cards.run_card(control.status(run), name, 0.0)
    with run.take_lock():
        run.log("started")
        limits.enforce_limit(control.status(run), 1e12)
        assert not run.has_request("stop")  # a job takes no time of the Space


def test_a_visitor_chooses_what_a_job_runs_on_hears_what_it_costs_agrees_and_watches_it(local, browser, hub):
    hub.program = STOPPED
    with looking(browser, local.url) as page:
        choose_demo(page)
        unfold(page, "Change how")
        unfold(page, "Run it in a job on your account instead")
        page.click("#job-offer")
        page.wait_for_selector("text=no hardware was chosen: choose what the job runs on")
        page.locator("#flavor input").fill("l4x1")
        page.locator("#flavor input").press("Enter")
        page.locator("#job-minutes").get_by_role("spinbutton").fill("30")
        page.locator("#job-push").get_by_role("textbox").fill("mine")
        page.click("#job-offer")
        shown(page, "#job-question", "A job on l4x1 costs ann $0.80 an hour, and at most $0.40 for 30 minutes")
        shown(page, "#job-question", "it publishes ann/mine")
        page.locator("#job-minutes").get_by_role("spinbutton").fill("60")  # the question was for another price
        page.wait_for_selector("#job-start", state="hidden")
        assert not hub.jobs
        page.click("#job-offer")
        shown(page, "#job-question", "at most $0.80 for 60 minutes")
        page.click("#job-start")
        page.wait_for_url("**/?run=*")
        shown(page, "#run-card", "a job on l4x1, at most $0.80")
        run = Run(local.runs / page.url.rpartition("=")[2])
        wait_for(run, "stopped")
        wait_until(lambda: not run.is_locked)
    assert hub.jobs["job0"].owner == "ann"
    hub.clear_jobs()
