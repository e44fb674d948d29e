"""Training lowers losses, changes what it may, says what went wrong, and stays within its memory."""

from itertools import cycle

import pytest
import torch

from linearizer.errors import FaultError
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.student.feature_maps import FEATURE_MAPS
from linearizer.student.layer_student import LayerStudent
from linearizer.student.update_rules import UPDATE_RULES
from linearizer.teacher.observing import attending
from linearizer.train import trainer
from linearizer.train.distill import distill
from linearizer.train.settings import END_TO_END, LAYERWISE, RATES, TrainingSettings
from linearizer.train.trainer import MAX_HIGH_STEPS
from tests.support.hybrids import student_of as hybrid_of
from tests.support.models import WHOLE, teacher_of, tokens
from tests.support.training import FEW, TEXT, a_student, assert_equal_weights, weights

LEARNED = [name for name in FEATURE_MAPS if name != "performer"]


@pytest.mark.parametrize("feature_map, loss", [*zip(LEARNED, cycle(LAYERWISE + END_TO_END), strict=False)])
def test_training_lowers_the_loss_of_every_feature_map(loss, feature_map):
    student = a_student(feature_map)
    same_text = TrainingSettings(loss=loss, steps=12, batch=4, warmup=2, window_dropout=0.0, repeats=0.0)
    trained = finish(distill(student, tokens(4, 32), same_text))
    assert sum(trained.end.values()) < sum(trained.start.values())
    assert trained.steps == 12 and not trained.events


def test_only_the_features_change():
    student = a_student(heads=[Head(window=4, features=16), WHOLE])
    student.get_output_embeddings().requires_grad_(True)  # its owner trains it, too
    before, flags = weights(student), [p.requires_grad for p in student.parameters()]
    finish(distill(student, TEXT, FEW))
    changed = {name for name, tensor in weights(student).items() if not torch.equal(tensor, before[name])}
    assert changed and all(".feature_map." in name for name in changed)
    assert [p.requires_grad for p in student.parameters()] == flags
    assert not student.training and all(p.grad is None for p in student.parameters())


def test_every_rate_is_of_a_parameter_and_every_parameter_has_a_rate():
    held = [Head(window=4, features=8, memory=rule).to_config() for rule in UPDATE_RULES]
    layers = [LayerStudent([[4, 8]], 1, 16, feature_map, 16) for feature_map in FEATURE_MAPS]
    layers += [LayerStudent([head], 1, 16, "prf", 16) for head in held]
    names = {name.rpartition(".")[2] for layer in layers for name, _ in layer.named_parameters()}
    assert RATES.keys() == names | {"lora"}


def test_a_student_without_features_has_nothing_to_learn():
    student = a_student(heads=[Head(window=4), WHOLE])
    before = weights(student)
    assert finish(distill(student, TEXT, FEW)).steps == 0
    assert_equal_weights(weights(student), before)


def test_adapters_make_up_for_what_slots_and_few_bits_lost():
    student = a_student(heads=[Head(window=4, slots=4, bits=4), Head(window=4, bits=5)])
    settings = TrainingSettings(
        loss="logits", lora=4, steps=20, batch=4, rate=10.0, warmup=2, window_dropout=0.0, repeats=0.0
    )
    trained = finish(distill(student, tokens(4, 32), settings))
    assert sum(trained.end.values()) < 0.95 * sum(trained.start.values()) and not trained.events


def spoil(student, layer, step):
    """Let the gradient of a layer's first parameter be NaN from a step on."""
    p = next(p for p in student.students()[layer].parameters() if p.requires_grad)
    calls = []

    def hook(gradient):
        calls.append(None)
        return gradient * float("nan") if len(calls) > step else gradient

    p.register_hook(hook)


def test_a_layer_with_nan_falls_back_is_named_and_the_others_go_on():
    student, unspoiled = a_student(), a_student()
    finish(distill(unspoiled, TEXT, FEW))
    spoil(student, 1, 5)
    begun = weights(student)
    events = list(steps := distill(student, TEXT, FEW))
    messages = [message for event in events for message in event.details["events"]]
    assert len(messages) == 1 and messages[0].startswith("step 6: layer 1: its loss or gradient is not finite")
    assert sorted(events[-1].details["layers"]) == [0, 2] and steps is not None
    for name, tensor in weights(student).items():
        expected = begun if ".layers.1." in name else weights(unspoiled)  # the last good state was that of the start
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("loss", ["softmax", "logits"])
def test_a_teacher_that_gives_nan_is_a_fault(loss):
    student = a_student()
    student.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(FaultError, match="teacher's logits are not finite"):
        finish(distill(student, TEXT, TrainingSettings(loss=loss)))


def test_a_diverging_rate_is_halved_for_its_layer_and_said():
    student = a_student("prf")
    settings = TrainingSettings(steps=2 * MAX_HIGH_STEPS, rate=1000.0, window_dropout=0.0)
    trained = finish(distill(student, TEXT, settings))
    assert any("its learning rate halved to 0.5" in event for event in trained.events)
    assert all(tensor.isfinite().all() for tensor in weights(student).values())


def out_of_memory_above(student, numbers):
    """Let the model run out of memory where a device would."""

    def refuse(module, args, kwargs):
        if kwargs["input_ids"].numel() > numbers:
            raise torch.cuda.OutOfMemoryError("out of memory")

    student.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    return student


@pytest.mark.parametrize("loss", ("softmax", *END_TO_END))  # others are divided by a measure of each part
def test_out_of_memory_halves_the_batch_and_gives_the_same_gradients(loss):
    settings = TrainingSettings(loss=loss, steps=2, batch=8, save_every=3)
    undivided, student = a_student(), out_of_memory_above(a_student(), 2 * 32)
    expected, events = list(distill(undivided, TEXT, settings)), list(distill(student, TEXT, settings))
    messages = [message.partition("from now on ")[2] for message in events[0].details["events"]]
    assert messages == ["4 of the batch's 8 texts at once", "2 of the batch's 8 texts at once"]
    assert not events[1].details["events"]
    assert events[0].details["loss"] == pytest.approx(expected[0].details["loss"], rel=1e-5)
    for name, tensor in weights(student).items():
        torch.testing.assert_close(tensor, weights(undivided)[name], atol=1e-3, rtol=1e-3)


def test_a_text_that_does_not_fit_is_a_fault_that_asks_for_shorter_texts():
    student = out_of_memory_above(a_student(), 40)
    with pytest.raises(FaultError, match="one text of 64 tokens does not fit into memory: ask for shorter texts"):
        finish(distill(student, tokens(4, 64), TrainingSettings(batch=4)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@torch.no_grad()
def test_merged_adapters_give_what_unmerged_ones_gave(family, monkeypatch):
    student, logits = a_student(family=family), []
    teacher = teacher_of(family)(TEXT).logits
    from linearizer.train import distill as distillation

    merge = distillation.remove_adapters

    def look(base, merge_them):
        logits.append(student(TEXT).logits)
        merge(base, merge_them)

    monkeypatch.setattr(distillation, "remove_adapters", lambda base, merge: look(base, merge))
    with torch.enable_grad():
        finish(distill(student, TEXT, TrainingSettings(loss="logits", lora=2, steps=4, rate=3.0)))
    assert not any("lora" in name for name, _ in student.named_modules())
    torch.testing.assert_close(student(TEXT).logits, logits[0], atol=1e-4, rtol=1e-4)
    with attending(student, "sdpa"):
        assert not torch.allclose(student(TEXT, use_cache=False).logits, teacher, atol=1e-3)  # they had an effect


@pytest.mark.parametrize("rate, steps", [(3.0, 40), (300.0, 3)])
def test_adapters_stay_only_where_the_student_is_better_with_them(rate, steps):
    student = a_student(heads=[Head(window=4, slots=8), Head(window=6)])
    before = weights(student)
    how = TrainingSettings(loss="logits", lora=2, steps=steps, warmup=0, rate=rate, repeats=0.0)
    trained = finish(distill(student, TEXT, how, compared=TEXT[:2]))
    (without, with_them), after = trained.kl, weights(student)
    if rate == 3.0:
        assert with_them < without and not trained.events
        assert not all(torch.equal(after[name], before[name]) for name in before)
    else:
        assert with_them > without and "left out" in trained.events[-1]
        assert_equal_weights(after, before)


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3n_text"])
def test_blocks_that_are_computed_again_for_their_gradients_learn_alike(family, monkeypatch):
    """Where memory has no room for the graphs of all blocks; a block of gemma3n may read another one's state."""
    how = TrainingSettings(loss="logits", lora=2, steps=3, warmup=0)
    forward, results = LayerStudent.forward, []

    def count(*given):
        calls.append(torch.is_grad_enabled())
        return forward(*given)

    monkeypatch.setattr(LayerStudent, "forward", count)
    heads = [Head(window=4, slots=8), Head(window=6, bits=8)]
    for free in (2**60, 0):
        student, calls = a_student(heads=heads) if family == "llama" else hybrid_of(family, heads), []
        monkeypatch.setattr(trainer, "free_bytes", lambda device, free=free: free)
        finish(distill(student, TEXT, how))
        results.append((weights(student), sum(calls)))
    (kept, few), (again, many) = results
    assert many == 2 * few
    assert_equal_weights(again, kept)


def test_a_stopped_training_leaves_no_adapters():
    student = a_student()
    before = {name: tensor for name, tensor in weights(student).items() if "feature_map" not in name}
    training = distill(student, TEXT, TrainingSettings(loss="logits", lora=2, steps=4))
    next(training)
    training.close()
    after = weights(student)
    assert_equal_weights({name: tensor for name, tensor in after.items() if "feature_map" not in name}, before)


def test_window_dropout_leaves_inference_unchanged():
    student = a_student()
    windows = [group.window for layer in student.students() for group in layer.groups]
    for loss in ("softmax", "logits"):
        finish(distill(student, TEXT, TrainingSettings(loss=loss, steps=4, window_dropout=1.0, rate=0.0)))
    assert [group.window for layer in student.students() for group in layer.groups] == windows
    torch.testing.assert_close(student(TEXT).logits, a_student()(TEXT).logits, atol=0, rtol=0)
