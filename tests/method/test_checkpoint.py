"""A saved student loads anywhere, and is the same student."""

from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linearizer.errors import FolderError, RequestError
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import load, put_student_into, restore_type, save
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head
from linearizer.student.modeling_linearized import CODE, OTHER_CODE
from linearizer.teacher.load import load_teacher
from tests.support.bare_environment import make_bare_environment, run_bare
from tests.support.families import FAMILIES
from tests.support.models import layers_of, student_of, tokens

LOADED_BARE = ("llama", "gpt2", "gemma3_text")  # families


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    return make_bare_environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def answers(bare, tmp_path_factory):
    """Students, and the folder of what they answer where only torch and transformers are: one process for all."""
    root, students = tmp_path_factory.mktemp("answers"), {family: student_of(family) for family in LOADED_BARE}
    for family, student in students.items():
        save(student, None, root / family / "checkpoint")
    save_file({"ids": tokens(2, 20)}, root / "ids.safetensors")
    run_bare(
        bare,
        """
        import sys
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import AutoModelForCausalLM
        torch.set_grad_enabled(False)
        try:
            import linearizer
            raise SystemExit("the environment is not bare")
        except ImportError:
            pass
        ids = load_file("ids.safetensors")["ids"]
        for family in sys.argv[1:]:
            model = AutoModelForCausalLM.from_pretrained(f"{family}/checkpoint", trust_remote_code=True)
            text = model.generate(ids, attention_mask=ids > 0, max_new_tokens=12, do_sample=False)
            save_file({"logits": model(ids).logits.contiguous(), "text": text}, f"{family}/answer.safetensors")
        first = AutoModelForCausalLM.from_pretrained("llama/checkpoint", trust_remote_code=True)
        first.save_pretrained("second")
        second = AutoModelForCausalLM.from_pretrained("second", trust_remote_code=True)
        assert torch.equal(first(ids).logits, second(ids).logits)
        first(ids, cache=(cache := first.empty_cache()))
        logits = [model(ids[:, :4], cache=state).logits for model, state in ((second, cache.fork()), (first, cache))]
        assert torch.equal(*logits)
        """,
        *LOADED_BARE,
        cwd=root,
    )
    return students, root


@pytest.mark.parametrize("family", LOADED_BARE)
@torch.no_grad()
def test_torch_and_transformers_alone_give_equal_logits_and_equal_text(family, answers):
    students, root = answers
    student, ids, answer = students[family], tokens(2, 20), load_file(root / family / "answer.safetensors")
    torch.testing.assert_close(answer["logits"], student(ids).logits, atol=1e-4, rtol=1e-4)  # here by kernels
    text = student.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert torch.equal(answer["text"], text)


@pytest.mark.parametrize(
    ("heads", "entry"),
    [
        ([Head(window=4, slots=6)], ""),
        ([Head(window=4), Head(softmax=True)], "other_heads"),
        ([Head(softmax=True), Head(window=4, features=8)], "feature_maps"),
        ([Head(window=4, features=8), Head(window=4, features=6, memory="gdn")], "matrix_rule"),
    ],
    ids=["slots", "all tokens", "features", "a rule"],
)
def test_a_checkpoint_carries_the_code_of_its_heads_alone(heads, entry, tmp_path):
    student_of("llama", heads).config.save_pretrained(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.py")} == {*CODE, *OTHER_CODE.get(entry, ())}


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    save(student_of("llama"), None, tmp_path / "checkpoint")
    modes = {path.stat().st_mode for path in (tmp_path / "checkpoint").iterdir() if path.is_file()}
    (tmp_path / "usual").touch()
    assert modes == {(tmp_path / "usual").stat().st_mode}


@pytest.mark.parametrize("family, feature_map", [*zip(FAMILIES, cycle(["mlp", "clusters"]), strict=False)])
@torch.no_grad()
def test_a_reloaded_checkpoint_gives_equal_logits(family, feature_map, tmp_path):
    student, ids = student_of(family, feature_map=feature_map), tokens(2, 20)
    save(student, None, tmp_path / "checkpoint")
    assert torch.equal(load(tmp_path / "checkpoint")(ids).logits, student(ids).logits)


def test_saving_what_was_loaded_keeps_it_loadable(answers):
    _, root = answers
    first, second = ({path.name for path in (root / name).iterdir()} for name in ("llama/checkpoint", "second"))
    assert first == second


@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_half_precision_keeps_features_in_fp32_and_the_answer(dtype, tmp_path):
    student, ids = student_of("llama", dtype=dtype), tokens(2, 20)
    save(student, None, tmp_path / "checkpoint")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in half.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".student." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".student." not in name} == {torch.bfloat16}
    logits = half(ids).logits
    assert logits.dtype == torch.bfloat16
    for name, parameter in student.named_parameters():
        if ".student." not in name:
            parameter.data = parameter.data.bfloat16()
    assert torch.equal(logits, student(ids).logits)


@torch.no_grad()
def test_weights_that_were_computed_with_in_float32_are_saved_as_the_teacher_has_them(tmp_path):
    stored = load_teacher(find_model("demo"))
    teacher = load_teacher(find_model("demo"), "float32")
    layers = layers_of(teacher)
    student = put_student_into(teacher, layers, Allocation("by hand", 4, ((Head(window=28, features=32),) * 4,) * 8))
    restore_type(student, torch.bfloat16)
    save(student, None, tmp_path / "checkpoint")
    loaded = load(tmp_path / "checkpoint")
    saved, expected = dict(loaded.named_parameters()), dict(stored.named_parameters())
    assert loaded.dtype == torch.bfloat16 and all(torch.equal(saved[name], expected[name]) for name in expected)
    assert {x.dtype for name, x in saved.items() if ".student." in name} == {torch.float32}


def test_a_failed_save_keeps_the_checkpoint_that_was_there(tmp_path):
    student = student_of("llama")
    save(student, None, tmp_path / "checkpoint")
    before = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    student.save_pretrained = full_disk
    with pytest.raises(FolderError, match="No space left on device.*free the disk"):
        save(student, None, tmp_path / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def full_disk(folder, **options):
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    save(student_of("llama"), None, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"base.{name}": x for name, x in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match="lacks 38 weights, such as lm_head.weight: write the checkpoint again"):
        load(tmp_path)
