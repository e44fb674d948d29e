"""The curves of a training go on over all its losses, also where it was stopped in one of them."""

from linearizer.page.run_state import RunState
from linearizer.plan.plan import Plan
from linearizer.run.events import EventName
from linearizer.run.folder import Run

PLAN = Plan("demo", recipe="features", strategy="common-lambda", budget=64, steps=3)


def take_steps(run, first, last):
    for step in range(first, last + 1):
        run.log(EventName.DISTILL, done=step, total=3, unit="steps")


def test_a_second_loss_goes_on_where_the_first_ended(tmp_path):
    run = Run.create(tmp_path / "run", PLAN)
    watched = RunState(run)
    run.log(EventName.STARTED)
    take_steps(run, 1, 3)
    run.log(EventName.DISTILLED, phase=0, steps=3)
    take_steps(run, 1, 2)
    watched.read()
    assert [event["done"] for event in watched.training] == [1, 2, 3, 4, 5]
    run.log(EventName.STARTED)  # resumed from the first step of the second loss
    run.log(EventName.DISTILLED, phase=0, steps=3)
    take_steps(run, 2, 3)
    watched.read()
    assert [event["done"] for event in watched.training] == [1, 2, 3, 4, 5, 6]
    assert watched.training[-1]["total"] == 6
