"""The default is as good as it was when this bound was stored: on text that no head was priced on, beside others.

A change that merges, rounds, prices or decides worse fails here, whatever else holds.
"""

from linearizer import pipeline
from linearizer.method.choose import PRICED, WINDOW, WINDOWS
from linearizer.plan.plan import Plan

PLAN = Plan.of("best", model="demo", budget=64, texts=2, length=256, dtype="float32", seed=0)
BOUND = 0.0006  # nats per token: twice what was measured


def test_the_default_is_near_its_teacher_and_nearer_than_windows_of_the_same_bytes(tmp_path):
    run = pipeline.begin(tmp_path / "run", PLAN)
    steps = pipeline.linearize(run)
    while run.candidates is None:  # whole students are measured before one is kept; nothing is judged again
        next(steps)
    steps.close()
    assert run.candidates.lengths[-1] == PLAN.length
    kl = {each.name: each.kl[-1] for each in run.candidates.measured}
    assert kl[PRICED] < BOUND
    assert kl[PRICED] < kl[WINDOWS] / 4 < kl[WINDOW] / 4
