"""Processes that train shares of the layers run their own blocks alone, where the one before has left its answers."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from linearizer.model.layers import blocks_of
from linearizer.model.swap import is_fixed
from linearizer.progress import finish
from linearizer.run.sharing import ALL, Share
from linearizer.train import relay
from linearizer.train.distill import distill
from linearizer.train.step import shares_for
from tests.support.training import FEW, TEXT, a_student, weights


@pytest.fixture
def passes():
    """Count how often the blocks of a student run."""
    with ExitStack() as stack:

        def counted(student):
            counts = [0] * len(blocks_of(student.base))
            for index, block in enumerate(blocks_of(student.base)):

                def count(*_, index=index):
                    counts[index] += not is_fixed(blocks_of(student.base)[index])

                stack.callback(block.register_forward_pre_hook(count).remove)
            return counts

        yield counted


def share_of(student, number, count, folder):
    """Train a share of the layers; the learnt weights of the student."""
    place = folder / f"{number}-of-{count}"
    place.mkdir(parents=True, exist_ok=True)
    finish(distill(student, TEXT, FEW, folder=place, share=Share(number, count)))
    return {name: x for name, x in weights(student).items() if ".feature_map." in name}


def test_shares_end_in_the_bits_of_a_whole_training_with_and_without_what_others_left(tmp_path, passes, monkeypatch):
    begun, whole = a_student(), a_student()
    finish(distill(whole, TEXT, FEW))
    expected = {name: x for name, x in weights(whole).items() if ".feature_map." in name}
    before = {name: weights(begun)[name] for name in expected}
    for most in (FEW.steps, 1, 0):
        monkeypatch.setattr(relay, "MOST_AHEAD", most)
        found, folder = dict(before), tmp_path / str(most)
        for number in range(3):
            student = a_student()
            counts = passes(student)
            learnt = share_of(student, number, 3, folder)
            found |= {name: x for name, x in learnt.items() if not x.equal(before[name])}
            left = folder / f"hidden-{number}"
            assert len(list(left.glob("*"))) == (min(most, FEW.steps) if number < 2 else 0)
            taken, own = min(most, FEW.steps) if number else 0, counts[number]
            assert counts == [own - taken] * number + [own] + [own - FEW.steps] * (2 - number)
            if number:
                assert not list((folder / f"hidden-{number - 1}").glob("*"))  # taken
        assert all(found[name].equal(x) for name, x in expected.items())


def test_layers_that_are_computed_together_stay_with_one_process(tmp_path):
    student, together = a_student(), replace(FEW, loss="output")
    assert shares_for(student, together, tmp_path / "small", 2, tokens=64) == [ALL]
    for name, settings, tokens in (("large", together, 2**20), ("apart", FEW, 64)):
        assert shares_for(student, settings, tmp_path / name, 2, tokens) == [Share(0, 2), Share(1, 2)]
