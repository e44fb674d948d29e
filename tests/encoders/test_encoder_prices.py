"""What ways to attend cost an encoder's output, and how a run chooses among what prices buy and plain students."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from linearizer import pipeline
from linearizer.encoders import encoder_prices, encoder_run
from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer
from linearizer.encoders.encoder_prices import choose_by_prices, list_offers, measure_prices
from linearizer.encoders.encoder_quality import read_outputs, score
from linearizer.encoders.kinds import ENCODER
from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from linearizer.errors import FolderError
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.progress import finish
from linearizer.run.folder import Run
from tests.support.damage import change_json
from tests.support.encoders import SIZES

TOKENS = 120


def classifier():
    """Return a student of a classifier whose outputs depend on its attention, and texts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SIZES, vocab_size=100, max_position_embeddings=TOKENS, num_labels=5)
    teacher = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        teacher.classifier.weight.mul_(4)
    how = {"ways": [[[4], 12]], "first": 1, "last": 1}
    student = LinearizedEncoder.from_teacher(
        teacher.requires_grad_(False), LinearizedEncoderConfig(config, "AutoModelForSequenceClassification", **how)
    )
    return student, [{"input_ids": torch.randint(3, 100, (1, TOKENS))} for _ in range(12)]


def test_prices_are_near_the_kl_that_a_head_causes(monkeypatch):
    monkeypatch.setattr(encoder_prices, "DRAWN", 300 * TOKENS)
    monkeypatch.setattr(encoder_prices, "MOST_DRAWS", 300)
    student, texts = classifier()
    whole, offers = BothWays((TOKENS,), 0, 1, 1), [BothWays((1,), 0, 1, 1), BothWays((4,), 0, 1, 1)]
    prices = finish(measure_prices(student, texts, offers, 0))
    student.attend_with(whole)
    teacher, found = read_outputs(student, texts), torch.zeros_like(prices[0])
    for head, offer in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        changed = HeadsOfLayer(tuple(offers[offer] if at == head else whole for at in range(4)))
        student.attend_with([changed, whole])
        found[head, offer] = score(teacher, read_outputs(student, texts))["kl"].mean()
    assert found.max() > 10 * found.min() > 0
    torch.testing.assert_close(prices[0].log(), found.log(), atol=0.5, rtol=0)
    assert prices[1].max() < 1e-9  # of the last layer, [CLS] alone is read, which sees all tokens


def test_heads_whose_prices_are_higher_see_more_keys_within_the_budget():
    offers = list_offers(40, 1, 1, True, TOKENS)
    assert len({*offers}) == len(offers) > 10 and offers[-1].keys >= TOKENS
    prices = torch.tensor([[[scale / how.keys for how in offers] for scale in (1.0, 4.0, 0.25)]] * 2)
    layers = choose_by_prices(prices, offers, 40, TOKENS)
    for layer in layers:
        middle, high, low = (how.keys for how in layer.ways)
        assert low < middle < high
    assert 0.9 * 40 < sum(min(how.keys, TOKENS) for layer in layers for how in layer.ways) / 6 <= 40


def test_each_head_of_a_layer_attends_in_its_own_way():
    ways = BothWays((4,), 12, 1, 1), BothWays((9,), 0, 1, 1), BothWays((4,), 12, 1, 1), BothWays((TOKENS,), 0, 1, 1)
    rows = torch.randn(3, 2, 4, TOKENS, 8, generator=torch.Generator().manual_seed(0)).unbind()
    out = HeadsOfLayer(ways).attend(*rows, 0.3)
    for head, how in enumerate(ways):
        alone = how.attend(*(x[:, head : head + 1] for x in rows), 0.3)
        torch.testing.assert_close(out[:, head : head + 1], alone)


@pytest.fixture(scope="module")
def plan(sentence_encoder, topics):
    return EncoderPlan(str(sentence_encoder), 40, 60, topics, texts=6, steps=0)


def test_a_run_keeps_the_ways_with_the_least_measured_kl(plan, tmp_path):
    encoder = ENCODER.begin(tmp_path / "run", plan)
    finish(pipeline.linearize(encoder.run))
    ways = encoder.ways
    assert ways.kl[ways.chosen] == min(ways.kl.values()) and len(ways.kl) == 3
    config = json.loads((encoder.run.checkpoint / "config.json").read_text())
    assert config["heads"] == [list(layer) for layer in ways.heads]
    student = encoder_run.load_student(encoder.run.checkpoint)
    assert [module.both_ways for module in student.modules() if hasattr(module, "both_ways")] == ways.layers
    (checked,) = (event for event in Run(tmp_path / "run").events() if event["event"] == "checked")
    assert (checked["kept"], checked["kl"]) == (ways.chosen, ways.kl)


@pytest.mark.parametrize("ways", [[], [[4]], 5])
def test_a_config_that_does_not_say_how_heads_attend_is_refused(ways, plan, tmp_path):
    encoder = ENCODER.begin(tmp_path / "run", plan)
    student = encoder_run.make_student(encoder, encoder_run.load_teacher(encoder), encoder.ways.layers)
    encoder_run.save(encoder, student, encoder.run.checkpoint)
    change_json(encoder.run.checkpoint / "config.json", ways=ways, heads=[])
    with pytest.raises(FolderError, match="does not say how heads attend: make the student again"):
        encoder_run.load_student(encoder.run.checkpoint)


def test_prices_that_lie_make_no_student(plan, tmp_path, monkeypatch):
    measured = encoder_prices.measure_prices

    def lie(*args):
        return 1 / (yield from measured(*args))

    monkeypatch.setattr(encoder_run, "measure_prices", lie)
    encoder = ENCODER.begin(tmp_path / "run", plan)
    finish(pipeline.linearize(encoder.run))
    kl = encoder.ways.kl
    assert encoder.ways.chosen != "each head by its price" and kl["each head by its price"] > min(kl.values())
