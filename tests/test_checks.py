"""What no work can serve is refused before any work of a run begins."""

import pytest

from linearizer.checks import check_method
from linearizer.errors import RequestError
from linearizer.plan.plan import Plan

FORMER = [{"recipe": "duo", "strategy": "duo"}, {"strategy": "gain-features"}, {"steps": 4, "loss": "squares"}]


@pytest.mark.parametrize("options", FORMER, ids=str)
def test_a_method_of_a_former_version_is_read_and_no_longer_run(options):
    plan = Plan.from_json(Plan("demo", budget=64, **options).to_json())
    with pytest.raises(RequestError, match="measured worse than others and is no longer offered"):
        check_method(plan)


def test_steps_that_train_nothing_are_refused():
    for plan in (Plan("demo", budget=64, steps=4), Plan.of("features", model="demo", budget=64)):
        check_method(plan)
    with pytest.raises(RequestError, match="4 steps without adapters train nothing: leave --lora out"):
        check_method(Plan("demo", budget=64, steps=4, lora=0))
