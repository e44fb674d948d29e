"""What others do with a model of transformers works with a student: weights by the teacher's names, losses, offloading,
lower precision, compilation."""

import copy
import pickle
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearizer.method.checkpoint import load, save
from linearizer.plan.head_bytes import Head
from linearizer.student import attention_interface, modeling_linearized
from linearizer.student.cache import CACHE
from linearizer.teacher.observing import attending_as_teacher
from tests.support.families import FAMILIES
from tests.support.kernels import needs_compiler
from tests.support.models import MIXED, student_of, teacher_of, tokens

CLOSE = dict(atol=2e-4, rtol=0)
SMALL = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8), Head(softmax=True, bits=8)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_its_parts_are_found_where_the_teachers_are(family):
    student, teacher, ids = student_of(family), teacher_of(family), tokens(2, 20)
    names = {name for name in student.state_dict() if ".student." not in name}
    assert names == set(teacher.state_dict()) and len(names) < len(student.state_dict())
    assert student.base_model_prefix == teacher.base_model_prefix
    assert type(student.base_model) is type(teacher.base_model)
    for ask in ("get_decoder", "get_input_embeddings", "get_output_embeddings"):
        assert type(getattr(student, ask)()) is type(getattr(teacher, ask)())
        assert getattr(student, ask)() is getattr(student, ask)()
    assert student.all_tied_weights_keys == teacher.all_tied_weights_keys
    whole = student(ids, output_hidden_states=True).hidden_states[-1]
    for part in (student.base_model, student.get_decoder()):
        first = part(ids[:, :12])  # its default keeps a cache
        second = part(ids[:, 12:], **{CACHE: first[CACHE]})
        result = torch.cat([first.last_hidden_state, second.last_hidden_state], 1)
        torch.testing.assert_close(result, whole, **CLOSE)


def test_its_config_reads_and_writes_what_its_teachers_config_knows(tmp_path):
    cases = {
        "cohere": ("logit_scale", 0.5),
        "granite": ("logits_scaling", 3.0),
        "gemma3_text": ("final_logit_softcapping", 2.0),
    }
    for family, (name, value) in cases.items():
        student, ids = student_of(family), tokens(1, 9)
        before = student(ids).logits
        assert getattr(student.config, name) == getattr(teacher_of(family).config, name)
        student.save_pretrained(tmp_path / family)
        changed = AutoModelForCausalLM.from_pretrained(tmp_path / family, **{name: value})
        assert getattr(changed.config, name) == getattr(changed.config, name) == value
        assert not torch.equal(changed(ids).logits, before)
        changed.save_pretrained(tmp_path / family)
        assert getattr(AutoModelForCausalLM.from_pretrained(tmp_path / family).config, name) == value
    config = student_of("gpt2").config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (128, 64, 3)
    assert config.get_text_config().vocab_size == 128
    with pytest.raises(AttributeError, match="no attribute 'logit_scale'"):
        config.logit_scale  # noqa: B018
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_it_goes_to_another_process_with_its_config():
    student, ids = student_of("gpt2"), tokens(1, 9)
    received = pickle.loads(pickle.dumps(student))
    assert type(received) is type(student) and received.config.to_dict() == student.config.to_dict()
    assert torch.equal(received(ids).logits, student(ids).logits)


def test_a_checkpoint_does_not_tell_where_its_teacher_lay(tiny_llama, tmp_path):
    from linearizer.method.checkpoint import put_student_into
    from tests.support.models import allocation_of, layers_of

    teacher = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="sdpa")
    layers = layers_of(teacher)
    save(put_student_into(teacher, layers, allocation_of(layers, MIXED, 2)), None, tmp_path / "checkpoint")
    assert str(tiny_llama) not in (tmp_path / "checkpoint" / "config.json").read_text()


def test_what_students_do_not_serve_is_refused_at_once():
    student = student_of("llama")
    begin = time.monotonic()
    for ask in (student.generate_batch, student.init_continuous_batching):
        with pytest.raises(ValueError, match="call generate with a padded batch"):
            ask([[3, 4, 5]])
    with pytest.raises(ValueError, match="call generate with a padded batch"):
        with student.continuous_batching_context_manager():
            pass
    assert time.monotonic() - begin < 5  # it took 40 s to answer nothing


@torch.no_grad()
def test_it_warns_where_a_text_is_longer_than_its_teacher_reads(capfd):
    student, ids = student_of("llama", max_position_embeddings=16), tokens(1, 20)
    modeling_linearized.logger.warning_once.cache_clear()
    cache = student(ids[:, :10])[CACHE]
    student(ids[:, 10:16], **{CACHE: cache})
    assert not capfd.readouterr().err
    student(ids[:, 16:17], **{CACHE: cache})
    assert "longer than the 16 positions" in capfd.readouterr().err
    student(ids)
    assert not capfd.readouterr().err  # once


@torch.no_grad()
@pytest.mark.parametrize("family, name", [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_it_refuses_a_text_longer_than_its_teachers_table_of_positions_and_counts_no_padding(family, name):
    student, ids = student_of(family, **{name: 16}), tokens(1, 17)
    with attending_as_teacher(student), pytest.raises(IndexError):  # on a GPU the process could not go on
        student(ids)
    whole = student(ids[:, :16])
    for new, cache in ((ids, None), (ids[:, 16:], whole[CACHE])):
        with pytest.raises(ValueError, match="table of 16 positions"):
            student(new, **{CACHE: cache})
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :4] = 0
    padded, places = torch.cat([ids[:, :4], ids[:, :16]], 1), (mask.cumsum(-1) - 1).clamp_min(0)
    logits = student(padded, attention_mask=mask, position_ids=places).logits[:, 4:]
    torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@torch.no_grad()
def test_weights_between_tokens_are_none_with_a_warning(family, capfd, tmp_path):
    """As of other models that have none: what asks for them for all models, as tools do, goes on."""
    student, ids = student_of(family), tokens(1, 9)
    plain = student(ids).logits
    student.save_pretrained(tmp_path)
    configured, its_config = student_of(family), AutoModelForCausalLM.from_pretrained(tmp_path, output_attentions=True)
    configured.config.output_attentions = True
    for ask in (
        lambda: student(ids, output_attentions=True),
        lambda: student.base_model(ids, output_attentions=True),
        lambda: configured(ids),
        lambda: its_config(ids),
        lambda: student.generate(ids, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2),
    ):
        attention_interface.logger.warning_once.cache_clear()
        out = ask()
        attentions = out.attentions
        assert attentions is None or set(attentions) == {None}
        assert "computes no weights between tokens" in capfd.readouterr().err
        if "logits" in out:
            torch.testing.assert_close(out.logits, plain)
    assert configured(ids, output_attentions=False).attentions is None and not capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [MIXED, SMALL], ids=["16 bits", "8 bits"])
def test_autocast_is_close_to_full_precision(heads, dtype):
    student, ids = student_of("llama", heads).requires_grad_(), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for given in ({}, {"attention_mask": mask}):
        exact = student(ids, **given).logits
        with torch.autocast("cpu", dtype):
            first = student(ids[:, :20], **{name: x[:, :20] for name, x in given.items()})
            kept = {"past_key_values": first[CACHE], **{name: x[:, :21] for name, x in given.items()}}
            result = torch.cat([first.logits, student(ids[:, 20:21], **kept).logits], 1)
            loss = student(ids, labels=ids, **given).loss
        loss.backward()
        real = mask[:, :21].bool() if given else torch.ones(2, 21, dtype=torch.bool)
        error = (result.float() - exact[:, :21])[real].square().mean() / exact[:, :21][real].var()
        assert error.isfinite() and error < {torch.float16: 0.02, torch.bfloat16: 0.1}[dtype], error
    assert all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # older transformers, of every offloaded model
@pytest.mark.parametrize("feature_map", ["prf", "mlp", "clusters"])
@torch.no_grad()
def test_offloaded_to_memory_or_disk_it_answers_the_same(feature_map, tmp_path):
    from accelerate import cpu_offload, disk_offload

    student, ids = student_of("llama", feature_map=feature_map), tokens(1, 20)
    expected = student(ids).logits
    written = student.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for offload in (cpu_offload, lambda model, device: disk_offload(model, tmp_path, device)):
        moved = copy.deepcopy(student)
        offload(moved, torch.device("cpu"))
        assert all(p.is_meta for p in moved.parameters())
        assert torch.equal(moved(ids).logits, expected)
        assert torch.equal(moved.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), written)


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "dtype"), [(MIXED, torch.float32), (SMALL, torch.bfloat16)], ids=["16 bits", "8 bits"]
)
def test_a_layer_may_lie_on_disk(heads, dtype, tmp_path):
    student, ids = student_of("llama", heads).to(dtype), tokens(1, 40)
    for layer in student.students():
        for weight in layer.float().parameters():
            weight.add_(0.1 * torch.rand_like(weight))  # to numbers that no smaller type holds
    save(student, None, tmp_path / "checkpoint")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    placed = load(tmp_path / "checkpoint", device_map=places, offload_folder=tmp_path / "offloaded")
    assert placed.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(placed(ids).logits, load(tmp_path / "checkpoint")(ids).logits)


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # of a compiler that breaks a graph
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_the_step_of_a_token_is_compiled_into_one_graph(masked):
    heads = [Head(window=5, features=0 if masked else 16), SMALL[1]]
    student, ids = student_of("llama", heads, num_hidden_layers=1), tokens(2, 25)
    mask = torch.ones_like(ids)
    mask[1, 23] = not masked
    torch.compiler.reset()
    first = student(ids[:, :22])
    step = torch.compile(student, backend="eager", fullgraph=True)  # of the whole model, without a break
    given = [{"attention_mask": mask[:, : i + 1]} if masked else {} for i in range(25)]
    parts = [step(ids[:, i : i + 1], past_key_values=first[CACHE], **given[i]).logits for i in (22, 23, 24)]
    expected, out = student(ids, attention_mask=mask).logits, torch.cat([first.logits, *parts], 1)
    torch.testing.assert_close(out[mask > 0], expected[mask > 0], **CLOSE)


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # of a compiler that breaks a graph
@torch.no_grad()
def test_generate_reads_and_writes_the_same_when_it_is_compiled():
    student, ids = student_of("llama", [Head(window=5, features=16), SMALL[1]], num_hidden_layers=1), tokens(2, 25)
    how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, eos_token_id=None)
    how |= dict(output_logits=True, return_dict_in_generate=True)
    expected = student.generate(ids, **how)
    torch.compiler.reset()
    student.forward = torch.compile(student.forward, backend="eager")
    out = student.generate(ids, **how)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
