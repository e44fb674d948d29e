"""Memories are priced by what they have learned, bought where that pays, and leave their teacher as it was."""

import pytest
import torch

from linearizer import pipeline
from linearizer.allocate import step
from linearizer.errors import RequestError
from linearizer.measure.profile import measure_teacher
from linearizer.model import teacher as teacher_module
from linearizer.model.initialise import begin_of
from linearizer.model.swap import make_layer_student
from linearizer.progress import finish
from linearizer.run.head_bytes import Head, cache_bytes
from linearizer.run.plan import Plan
from linearizer.run.prices import Prices
from linearizer.runtime.attention_interface import attention_modules

SMALL = dict(model="demo", budget=16, texts=2, length=32, samples=32, exchanges=0, sinks=1, dtype="float32", bits=8)


def half_price(prices, memory):
    """Prices by which a memory is the better choice, whatever it is by nature."""
    share = [0.01 if option.memory == memory else 1.0 for option in prices.options]
    kl = tuple(tuple(tuple(p * s for p, s in zip(row, share, strict=True)) for row in rows) for rows in prices.kl)
    return Prices(prices.sinks, prices.options, kl)


def test_memories_are_trained_priced_and_bought_beside_slots(tmp_path, monkeypatch):
    few = [Head(4, bits=8), Head(16, bits=8), Head(4, slots=8, bits=8), Head(4, 8, bits=8, memory="gdn")]
    monkeypatch.setattr(step, "options_to_price", lambda *given: tuple(few))
    run = pipeline.begin(tmp_path / "run", Plan.of("best", memories=("gdn",), steps=2, **SMALL))
    teacher, option = teacher_module.load_teacher_of(run.plan), few[-1]
    finish(measure_teacher(run, teacher))
    texts = pipeline.training_and_judging_texts(run, run.plan, teacher, None)[0]
    before = teacher.model.state_dict().keys()
    train = pipeline.partial(pipeline.train_offers, run, teacher, lambda: texts)
    begin = finish(train(few, 1))
    assert teacher.model.state_dict().keys() == before and teacher.model.config._attn_implementation != "linearized"
    assert not any(hasattr(module, "student") for module in attention_modules(teacher.model))
    layer = teacher.inspection.layers[0]
    learned, begun = (
        make_layer_student(layer, [option] * layer.kv_heads, 1, how, 0, torch.device("cpu")).state_dict()
        for how in (begin, begin_of(run))
    )
    assert any(not torch.equal(learned[name], begun[name]) for name in learned)
    (file,) = (run.folder / "state" / "offers").glob("*.safetensors")
    written = file.stat().st_mtime_ns
    prices = finish(step.price_heads(run, teacher, step.texts_to_price_on(run, teacher, None), train))
    assert file.stat().st_mtime_ns == written and prices.options[-1] == option  # not trained a second time
    run.write("prices.json", half_price(prices, "gdn").to_json())
    allocation = finish(pipeline.linearize(run))
    held = {head.memory for row in allocation.heads for head in row}
    assert "gdn" in held and allocation.state_bytes(run.layers, 32) <= cache_bytes(run.layers, 16)
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [2]
    with pytest.raises(RequestError, match="the prices were measured without kda: start a new run to have them"):
        pipeline.reallocate(run, Plan.of("best", memories=("kda",), **SMALL))


def test_memories_on_offer_are_written_and_read_as_a_list():
    plan = Plan.of("best", model="demo", budget=64, memories=("gdn", "cells"))
    assert "--memories gdn,cells" in plan.command() and Plan.from_json(plan.to_json()) == plan
    assert plan.offered_memories == ("gdn", "cells") and plan.kept_loss == "output" and not plan.heals
    assert len(Plan.of("best", model="demo", budget=64, memories=("all",)).offered_memories) > 20
    with pytest.raises(RequestError, match="the strategy window buys nothing by prices, .* or ask for --strategy gain"):
        Plan.of("swa", model="demo", budget=64, memories=("gdn",))
    with pytest.raises(RequestError, match="^gdn has no rows of positive weights"):
        Plan.of("best", model="demo", budget=64, memories=("gdn", "cells"), steps=2, loss="softmax")
