"""A teacher whose weights do not fit into memory is read block by block, and gives the same bits."""

import gc
import platform
import shutil
from collections import Counter
from types import SimpleNamespace

import accelerate.hooks
import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors.torch import load_file, save_file

from linearizer import ask, pipeline, read
from linearizer.amounts import size
from linearizer.errors import FolderError, ModelNotAvailable, RequestError
from linearizer.hub.models import find_model
from linearizer.method import checkpoint, head_prices
from linearizer.method.blockwise_pass import chain_of
from linearizer.method.checkpoint import load_student
from linearizer.method.head_prices import estimate_prices
from linearizer.method.measure_run import measure_profile
from linearizer.method.recorder import Samples
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.measured import ProfileSettings
from linearizer.run.results import Request
from linearizer.serve.engine import Engine
from linearizer.serve.row import Row
from linearizer.student.attention_interface import attention_modules, device_of
from linearizer.teacher import streaming
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.streaming import is_streamed, place_weights, streamed_weights
from tests.support.hybrids import HYBRIDS
from tests.support.hybrids import teacher_of as hybrid_of
from tests.support.models import layers_of, teacher_of, tokens
from tests.support.runs import weights_of


@pytest.fixture
def little(monkeypatch):
    """Let memory have room for some bytes."""

    def have(count, patch=monkeypatch):
        patch.setattr(streaming, "free_bytes", lambda device: count / streaming.FILLED)

    return have


def places_of(name):
    source = find_model(str(name))
    return place_weights(load_config(source), source, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "zaya"])  # zaya's files hold experts as used
@torch.no_grad()
def test_streamed_weights_give_the_bits_of_resident_weights(family, little, tmp_path):
    (hybrid_of if family in HYBRIDS else teacher_of)(family).save_pretrained(tmp_path / "model")
    resident = load_teacher(find_model(str(tmp_path / "model")))
    bytes_of_all = sum(x.nbytes for x in resident.parameters())
    little(bytes_of_all)
    assert places_of(tmp_path / "model") is None
    little(bytes_of_all - 1)
    streamed = load_teacher(find_model(str(tmp_path / "model")), places=places_of(tmp_path / "model"))
    assert is_streamed(streamed) and not is_streamed(resident)
    for _ in range(2):
        assert torch.equal(streamed(tokens(2, 20)).logits, resident(tokens(2, 20)).logits)
    inside = {id(x) for block in blocks_of(streamed) for x in block.parameters()}
    assert all(x.is_meta == (id(x) in inside) for x in streamed.parameters())
    expected = dict(resident.named_parameters())
    assert all(torch.equal(x, expected[name]) for name, x in streamed_weights(streamed))


def test_too_little_memory_for_two_blocks_is_said_with_the_amounts(little, tiny_llama, tmp_path):
    little(10_000)
    with pytest.raises(RequestError, match=r"its weights take [\d.]+ kB in float32, and .* are available: free memory"):
        pipeline.begin(tmp_path / "run", Plan(str(tiny_llama), budget=64, dtype="float32"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options", [{"recipe": "lolcats"}, {"recipe": "best", "steps": 2}, {"recipe": "features", "loss": "logits"}]
)
def test_what_needs_the_whole_model_is_refused_before_any_work(options, little, tmp_path):
    little(6_000_000)
    with pytest.raises(RequestError, match="the weights do not fit into memory and are read block by block, which"):
        pipeline.begin(tmp_path / "run", Plan.of(**options, model="demo", budget=64, dtype="bfloat16"))
    assert not (tmp_path / "run").exists()


def test_inspect_and_forecast_say_that_a_model_is_read_block_by_block(little, said):
    from linearizer.workers.forecast import Speeds, forecast_run

    inspection = pipeline.inspect("demo")
    plan, machine = Plan("demo", budget=64, dtype="float32"), Speeds(1e12, 1e12, 1e8, 1e12, 1e9)
    little(10**9)
    fits = forecast_run(plan, inspection, machine, 0).seconds
    assert "of weights, fits here" in said("inspect", "demo")[1]
    little(6_000_000)
    assert "more than is free here, so they are read block by block" in said("inspect", "demo")[1]
    assert forecast_run(plan, inspection, machine, 0).seconds > fits + 4 * inspection.parameters / 1e9


@torch.no_grad()
def test_experts_that_files_hold_one_by_one_are_merged_on_disk_and_removed_with_the_model(
    little, tmp_path, monkeypatch
):
    teacher_of("mixtral").save_pretrained(tmp_path / "model")
    resident, home = load_teacher(find_model(str(tmp_path / "model"))), tmp_path / "home"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    (left := home / f"{streaming.EXPERTS}{2**22 + 1}@{platform.node()}@a").mkdir(parents=True)  # its process was killed
    (other := home / f"{streaming.EXPERTS}{2**22 + 1}@{platform.node()}-2@a").mkdir()  # of another machine
    little(900_000)
    streamed = load_teacher(find_model(str(tmp_path / "model")), places=places_of(tmp_path / "model"))
    assert torch.equal(streamed(tokens(2, 20)).logits, resident(tokens(2, 20)).logits)
    (folder,) = {*home.iterdir()} - {other}
    assert folder != left and any(folder.iterdir())
    del streamed
    gc.collect()
    assert [*home.iterdir()] == [other]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    with pytest.raises(FolderError, match="is on a disk with 10 kB free"):
        places_of(tmp_path / "model")


def test_a_student_that_memory_cannot_hold_is_not_loaded(quick_run, monkeypatch):
    stored = sum(path.stat().st_size for path in (quick_run / "checkpoint").glob("*.safetensors"))
    for dtype, needed in (("auto", stored), ("float32", 2 * stored)):
        monkeypatch.setattr(checkpoint, "free_bytes", lambda device, needed=needed: needed - 1)
        with pytest.raises(RequestError, match=f"has weights that take {size(needed)}, and .* are free"):
            load_student(Run.open(quick_run), dtype=dtype)


def test_weights_that_are_not_finite_are_named_where_they_are_streamed(little, tmp_path):
    teacher_of("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    little(400_000)
    with pytest.raises(ModelNotAvailable, match="model.layers.1.mlp.up_proj.weight holds NaN"):
        load_teacher(find_model(str(tmp_path)), places=places_of(tmp_path))


@pytest.fixture
def reads(monkeypatch):
    """Count how often every weight is read that does not lie on the device."""
    counts, read = Counter(), OffloadedWeightsLoader.__getitem__

    def counted(self, name):
        counts[name] += 1
        return read(self, name)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", counted)
    return counts


@pytest.fixture
def pair(little, tmp_path):
    """A teacher whose weights are resident, and the same with streamed weights."""
    teacher_of("llama").save_pretrained(tmp_path)
    resident = load_teacher(find_model(str(tmp_path)))
    little(400_000)
    return resident, load_teacher(find_model(str(tmp_path)), places=places_of(tmp_path))


def test_a_profile_reads_each_weight_once_whatever_the_number_of_texts(pair, reads):
    texts, settings = tokens(6, 64), ProfileSettings(samples=64, sinks=2)
    chain_of(pair[1], texts)
    assert set(reads.values()) == {1} and set(reads) == {name for name, _ in streamed_weights(pair[1])}
    reads.clear()
    arguments = ([texts], layers_of(pair[0]), settings)
    profiles = [finish(measure_profile(model, *arguments)).profile for model in pair]
    assert profiles[0] == profiles[1] and set(reads.values()) == {1}


@pytest.mark.parametrize("gradients", [1, 2**40])
def test_estimated_prices_read_each_weight_twice_whatever_the_number_of_texts(pair, reads, gradients, monkeypatch):
    monkeypatch.setattr(head_prices, "MAX_GRADIENTS", gradients)  # one text at a time, or all
    arguments = (tokens(6, 24), layers_of(pair[0]), (Head(window=8), Head(window=16)), 2, Samples((None,) * 16))
    chain_of(pair[1], arguments[0])  # known from the profile
    reads.clear()
    prices = [finish(estimate_prices(model, *arguments)) for model in pair]
    assert prices[0] == prices[1] and set(reads.values()) == {2}  # forward and back


def test_prices_that_were_all_kept_when_a_run_stopped_are_taken_without_reading_weights(pair, reads):
    arguments, kept = (tokens(2, 24), layers_of(pair[0]), (Head(window=8),), 2, Samples((None,) * 16)), {}
    prices = finish(estimate_prices(pair[1], *arguments, keep=kept.__setitem__))
    reads.clear()
    assert finish(estimate_prices(pair[1], *arguments, before=kept)) == prices and not reads


@pytest.fixture
def two_devices(monkeypatch):
    """Let two devices have room for some bytes each: the CPU by two names, so that all is there already."""

    def have(counts, patch=monkeypatch):
        rooms = {f"cpu:{place}": count for place, count in enumerate(counts)}
        patch.setattr(accelerate.hooks, "set_module_tensor_to_device", lambda *args, **kwargs: None)
        patch.setattr(accelerate.hooks, "send_to_device", lambda value, *args, **kwargs: value)
        patch.setattr(streaming, "rooms_for_weights", lambda device: rooms)

    return have


def test_blocks_are_laid_over_devices_in_their_order_and_by_their_room():
    blocks = {"embed": "", **{f"block.{index}": "block" for index in range(6)}, "head": ""}
    weights = streaming.WeightSizes(0, 0, (), blocks, {name: 20 if kind else 10 for name, kind in blocks.items()})

    def places(*rooms):
        placed = streaming.spread_blocks(weights, {f"cuda:{place}": room for place, room in enumerate(rooms)})
        return None if placed is None else [placed[name].removeprefix("cuda:") for name in blocks]

    assert places(80, 80) == list("00001110")
    assert places(60, 100) == list("00011110")
    assert places(70, 50, 50) == list("00011220")
    assert places(140, 140) == places(80, 80)  # none is filled while another is empty
    assert places(60, 60) is None and places(10, 200) is None


SMALL = dict(texts=2, length=48, sinks=2, dtype="float32", budget=16)


@pytest.mark.usefixtures("judged_briefly")
@pytest.mark.parametrize("way, strategy", [("streamed", "gain"), ("spread", "common-lambda")])
def test_a_run_that_no_device_can_hold_ends_in_the_bits_of_one_that_fits(
    way, strategy, little, two_devices, monkeypatch, tmp_path
):
    trained = {} if strategy == "gain" else {"window": 0, "steps": 2, "budget": 32}
    plan = Plan("demo", strategy=strategy, **{**SMALL, **trained})
    resident = pipeline.begin(tmp_path / "whole", plan)
    finish(pipeline.linearize(resident))
    request, runs, outputs = Request(("language",), texts=1), [resident], []
    with monkeypatch.context() as context:
        if way == "streamed":
            little(14_000_000, context)  # half of the demo model in float32
        else:
            two_devices((16_000_000, 20_000_000), context)
            assert set(places_of("demo").values()) == {"cpu:0", "cpu:1"}
        runs.append(pipeline.begin(tmp_path / "run", plan))
        finish(pipeline.linearize(runs[1]))
        if strategy == "gain":
            outputs.append(said_by(runs[1], request))
    if strategy == "gain":
        outputs.append(said_by(resident, request))
        assert outputs[0] == outputs[1]
    for product in ("profile.json", "allocation.json", *["prices.json"] * (strategy == "gain")):
        assert runs[1].read(product) == resident.read(product)
    assert weights_of(runs[1].checkpoint) == weights_of(resident.checkpoint)
    assert strategy == "gain" or runs[1].evaluation_parts == resident.evaluation_parts


def said_by(run, request):
    """What a run's student predicts, writes beside its teacher, and answers after a text that it has read."""
    finish(pipeline.evaluate_run(run, request))
    compared = finish(pipeline.compare_run(run, "Once", 4, 0, False))
    assert compared.teacher.text
    state = run.folder.parent / f"{run.folder.name}.state"
    finish(read(run, "Once upon a time", state))
    answer = finish(ask(run, " there", state, new_tokens=4)).text
    return run.results["language"].result, compared.teacher.text, compared.student.text, answer


def test_a_student_that_one_device_cannot_hold_is_served_where_its_teacher_lies(two_devices, quick_run):
    run = Run.open(quick_run)
    local, _ = checkpoint.load_of_run(run)
    two_devices((16_000_000, 20_000_000))
    student, tokenizer = checkpoint.load_of_run(run)
    assert set(student.hf_device_map.values()) == {"cpu:0", "cpu:1"} and not hasattr(local, "hf_device_map")
    prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time there", "A", "The end of")]
    written = []
    for model in (student, local):
        rows = [Row(prompt, lambda piece: None, tokenizer, 3 + len(prompt)) for prompt in prompts]
        engine = Engine(model, 0)
        for row in rows:
            engine.submit(row)
        with torch.inference_mode():
            while not all(row.done for row in rows):
                engine.step()
        written.append([row.tokens for row in rows])
    assert written[0] == written[1]


@pytest.mark.parametrize("options", [{"recipe": "lolcats"}, {"recipe": "best", "steps": 2}])
def test_what_needs_one_device_is_refused_where_several_hold_a_model(options, two_devices, tmp_path):
    two_devices((16_000_000, 20_000_000))
    plan = Plan.of(**options, model="demo", budget=64, dtype="float32")
    with pytest.raises(RequestError, match="are spread over several, which lora does not serve"):
        pipeline.begin(tmp_path / "run", plan)


def test_what_attends_in_a_layer_lies_where_the_layer_does():
    teacher, usual = teacher_of("llama"), torch.device("cuda:7")
    modules = attention_modules(teacher)
    modules[1].to("meta")  # as streamed weights are, which come to the usual device
    modules[1].student = torch.nn.Linear(1, 1)
    assert [device_of(module, usual).type for module in modules] == ["cpu", "cuda", "cpu"]
