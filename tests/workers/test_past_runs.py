"""A forecast learns from the runs of the same model that were finished here."""

import shutil
from dataclasses import replace

import pytest

from linearizer.run.events import WorkTime
from linearizer.run.folder import Run
from linearizer.workers.forecast import RunForecast, Speeds, forecast_seconds
from linearizer.workers.past_runs import NEWEST, PastRuns

SPEEDS = Speeds(1e10, 1e10, 1e6, 1e10, 1e9)


def speeds_of(plan):
    return SPEEDS


@pytest.fixture
def done(tmp_path, quick_run):
    return Run(shutil.copytree(quick_run, tmp_path / "runs" / "first"))


def test_a_forecast_is_what_the_newest_finished_runs_of_the_model_took(done):
    home, forecast = done.folder.parent, forecast_seconds(done.plan, done.inspection, SPEEDS)
    took = WorkTime.of(done.events()).seconds
    corrected = PastRuns.of(home, done.inspection, speeds_of).correct(RunForecast(forecast, 1, 2, 3))
    assert corrected == RunForecast(pytest.approx(took), 1, 2, 3, pytest.approx(took), pytest.approx(took))
    for number in range(4):  # each starts later and takes longer
        run = Run(shutil.copytree(done.folder, home / str(number)))
        run.log("started")
        run.log("waited", seconds=-100.0 * (number + 1))
        run.log("done")
    shares = PastRuns.of(home, done.inspection, speeds_of).shares
    longer = [share - took / forecast for share in shares]
    assert len(shares) == NEWEST and longer == pytest.approx([400 / forecast, 300 / forecast, 200 / forecast], rel=0.01)
    corrected = PastRuns(shares).correct(RunForecast(forecast, 1, 2, 3))
    assert corrected.least < corrected.seconds < corrected.most


def test_runs_of_other_models_stopped_runs_and_damaged_ones_tell_nothing(done):
    home, model, plain = done.folder.parent, done.inspection, RunForecast(1, 1, 1, 1)
    assert PastRuns.of(home, replace(model, name="other"), speeds_of).correct(plain) == plain
    done.log("started")
    done.log("stopped")
    assert not PastRuns.of(home, model, speeds_of).shares
    done.log("done")
    (done.folder / "inspection.json").write_text("{")
    assert not PastRuns.of(home, model, speeds_of).shares
