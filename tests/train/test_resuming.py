"""A training that was stopped, interrupted or damaged goes on and ends in the bits of one that was not."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from linearizer.errors import FaultError, RequestError
from linearizer.progress import finish
from linearizer.train.distill import distill
from linearizer.train.settings import TrainingSettings
from linearizer.train.training_state import NEWEST, PREVIOUS
from tests.support.damage import cut, flip_bit
from tests.support.models import tokens
from tests.support.training import FEW, TEXT, a_student, assert_equal_weights, weights


@cache
def unstopped(loss="softmax", lora=0):
    """A student whose training never stopped, which no test may change, and the training's result."""
    student = a_student()
    return student, finish(distill(student, TEXT, replace(FEW, loss=loss, lora=lora)))


@pytest.mark.parametrize("loss,lora", [("softmax", 0), ("output", 0), ("logits", 2)])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_training_that_is_stopped_and_resumed_is_one_that_never_stopped(loss, lora, stop, tmp_path):
    settings = replace(FEW, loss=loss, lora=lora)
    reference, expected = unstopped(loss, lora)
    training = distill(a_student(), TEXT, settings, folder=tmp_path)
    for _ in range(stop):
        next(training)
    training.close()
    student = a_student()
    events = list(resumed := distill(student, TEXT, settings, folder=tmp_path, resume=True))
    assert [event.done for event in events] == list(range(stop + 1, 9)) and resumed is not None
    assert_equal_weights(weights(student), weights(reference))
    resumed_again = a_student()
    assert finish(distill(resumed_again, TEXT, settings, folder=tmp_path, resume=True)) == expected
    assert_equal_weights(weights(resumed_again), weights(reference))


@pytest.mark.parametrize("last", [1, 3, 5])  # of the states that are saved anyway, that of step 3 alone is among them
def test_an_interrupt_within_a_step_loses_no_step_and_no_bit(last, tmp_path):
    (reference, _), student = unstopped(), a_student()

    def interrupt(module, args):
        if len(read) == last + 1:
            raise KeyboardInterrupt
        read.append(None)

    read, reached = [], 0
    handle = student.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        for event in distill(student, TEXT, FEW, folder=tmp_path):
            reached = event.done
    handle.remove()
    assert reached == last
    events = list(distill(student, TEXT, FEW, folder=tmp_path, resume=True))
    assert events[0].done == last + 1
    assert_equal_weights(weights(student), weights(reference))


@pytest.mark.parametrize("damage", [cut, flip_bit, Path.unlink], ids=["cut", "flipped", "missing"])
def test_of_a_damaged_state_the_one_before_is_used_and_said(damage, tmp_path):
    (reference, _), training = unstopped(), distill(a_student(), TEXT, FEW, folder=tmp_path)
    while next(training).done < 7:
        pass
    training.close()  # the states of steps 7 and 6 are there
    damage(tmp_path / NEWEST)
    student = a_student()
    events = list(distill(student, TEXT, FEW, folder=tmp_path, resume=True))
    assert events[0].done == 7
    messages = " ".join(events[0].details["events"])
    assert (f"going on from {PREVIOUS}" in messages) == (damage is not Path.unlink)
    assert_equal_weights(weights(student), weights(reference))


def test_two_damaged_states_are_a_fault(tmp_path):
    finish(distill(a_student(), TEXT, FEW, folder=tmp_path))
    for name in (NEWEST, PREVIOUS):
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(FaultError, match="remove it, and the training begins again"):
        next(distill(a_student(), TEXT, FEW, folder=tmp_path, resume=True))


def test_resuming_otherwise_is_refused_with_the_difference(tmp_path):
    finish(distill(a_student(), TEXT, FEW, folder=tmp_path))
    for change, message in (
        (
            dict(settings=TrainingSettings(steps=9, batch=2, save_every=3, loss="output")),
            "loss 'output' instead of 'softmax'; steps 9",
        ),
        (dict(texts=tokens(12, 32, seed=1)), "another text"),
        (dict(student=a_student("prf")), "another student"),
    ):
        arguments = dict(student=a_student(), texts=TEXT, settings=FEW) | change
        with pytest.raises(RequestError, match=re.escape(message)):
            next(distill(**arguments, folder=tmp_path, resume=True))


def test_beginning_anew_forgets_an_earlier_training(tmp_path):
    finish(distill(a_student(), TEXT, FEW, folder=tmp_path))
    training = distill(a_student(), TEXT, FEW, folder=tmp_path)
    assert next(training).done == 1
    assert not (tmp_path / NEWEST).exists()
