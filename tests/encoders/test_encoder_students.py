"""Encoders of each kind become students that load anywhere; what cannot be linearized is refused with its reason."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.utils import find_labels

from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer
from linearizer.encoders.encoder_quality import MergedTokens
from linearizer.encoders.inspect_encoder import blank_input, inspect_encoder
from linearizer.encoders.key_budget import spend_keys
from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from linearizer.errors import BudgetError, UnsupportedModel
from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from tests.support.bare_environment import make_bare_environment, run_bare

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, initializer_range=0.2)
TEXT = dict(**SIZES, vocab_size=100, max_position_embeddings=258)
PICTURE = dict(**SIZES, image_size=48, patch_size=4)
KINDS = {
    "bert": TEXT,
    "roberta": TEXT,
    "electra": dict(TEXT, embedding_size=32),
    "distilbert": dict(
        vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=258, initializer_range=0.2
    ),
    "modernbert": dict(TEXT, num_hidden_layers=4, pad_token_id=0, local_attention=16),  # two of its layers are local
    "vit": PICTURE,
    "deit": PICTURE,
    "dinov2": PICTURE,
    "siglip_vision_model": PICTURE,
    "clip_vision_model": PICTURE,
}
REFUSED = {
    "mpnet": (TEXT, "does not hand its attention"),
    "deberta-v2": (TEXT, "does not hand its attention"),
    "deberta": (TEXT, "does not hand its attention"),
    "swin": (dict(image_size=56, patch_size=2, embed_dim=32, depths=[1], num_heads=[2]), "biases of positions"),
    "clip_text_model": (TEXT, "read only those before them"),
    "beit": (dict(PICTURE, use_relative_position_bias=True), "(does not hand its attention|biases of positions)"),
}


SOURCE = Source("tiny", None, None, None, False, Weights((), 0, 0, frozenset()))


def teacher_of(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **changes})
    return AutoModel.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def inspect(config):
    return inspect_encoder(SOURCE, config)


def inputs_of(teacher):
    if "pixel_values" in blank_input(teacher):
        width = 40 if teacher.config.model_type == "dinov2" else 48  # others take one size alone
        return {"pixel_values": torch.randn(2, 3, 48, width, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": torch.randint(3, 100, (2, 200), generator=torch.Generator().manual_seed(1))}


def student_of(teacher, how):
    fields = {"ways": [[how.block, how.slots]], "first": how.first, "last": how.last}
    return LinearizedEncoder.from_teacher(
        teacher, LinearizedEncoderConfig(teacher.config, "AutoModel", **fields)
    ).eval()


def sized(teacher):
    """Keys for a third of the tokens, in a picture without slots."""
    inspection = inspect(teacher.config)
    texts = inspection.reads == "texts"
    return spend_keys(50, 1 if texts else 2, 1 if texts else inspection.first, int(texts), slots=texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_with_keys_for_all_tokens_is_its_teacher_and_with_fewer_is_not(kind):
    teacher, inspection = teacher_of(kind), inspect(teacher_of(kind).config)
    given = inputs_of(teacher)
    expected = teacher(**given).last_hidden_state
    axes = 2 if inspection.reads == "pictures" else 1
    whole = BothWays((100,) * axes, 0, inspection.first if axes == 2 else 1, 0 if axes == 2 else 1)
    student = student_of(teacher, whole)
    torch.testing.assert_close(student(**given).last_hidden_state, expected)
    how = spend_keys(50, axes, whole.first, whole.last, slots=axes == 1)
    student.attend_with(how)
    found = student(**given).last_hidden_state
    assert torch.isfinite(found).all() and (found - expected).abs().max() > 1e-4
    student.attend_with([HeadsOfLayer((how,) * inspection.heads)] * inspection.layers)
    assert torch.equal(student(**given).last_hidden_state, found)
    with pytest.raises(ValueError, match="its own and cannot be exchanged"):
        student.set_attn_implementation("sdpa")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_linearized_is_refused_with_its_reason(kind):
    sizes, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=f"'tiny' cannot be linearized, because .*{reason}.*: name an encoder"):
        inspect(AutoConfig.for_model(kind, **sizes))


def test_padding_changes_nothing_in_a_model():
    teacher = teacher_of("bert")
    student = student_of(teacher, sized(teacher))
    ids = torch.randint(3, 100, (2, 180), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 120:] = 0
    out = student(input_ids=ids, attention_mask=mask).last_hidden_state
    alone = student(input_ids=ids[1:, :120]).last_hidden_state
    torch.testing.assert_close(out[1:, :120], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradients_for_pictures_are_the_same_where_layers_are_computed_again():
    student = student_of(teacher_of("vit").requires_grad_(True), BothWays((1, 1), 20, 1)).train()
    gradients = []
    for again in (False, True):
        if again:
            student.gradient_checkpointing_enable()
        student.zero_grad()
        student(**inputs_of(student.base)).last_hidden_state.square().sum().backward()
        gradients.append([x.grad.clone() for x in student.parameters() if x.grad is not None])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_labels_of_a_data_set_give_a_loss():
    teacher = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **TEXT), attn_implementation="sdpa")
    student, ids = student_of(teacher, sized(teacher)), inputs_of(teacher)["input_ids"]
    assert find_labels(type(student)) == ["labels"]
    assert student(input_ids=ids, labels=ids).loss > 0 and student(input_ids=ids).loss is None


def test_a_config_is_read_from_its_teachers_and_written_to_it():
    config = student_of(teacher_of("bert"), BothWays((4,), 20, 1, 1)).config
    config.tie_word_embeddings = False
    config.output_hidden_states = True
    assert config.base.tie_word_embeddings is False and config.hidden_size == 32
    student = LinearizedEncoder(config).eval()
    out = student(input_ids=torch.arange(3, 90)[None])
    assert len(out.hidden_states) == 3


def test_a_checkpoint_loads_with_torch_and_transformers_alone_and_gives_the_same_bits(tmp_path):
    expected, given = {}, {}
    for kind in ("bert", "dinov2", "clip_vision_model"):
        teacher = teacher_of(kind)
        student = student_of(teacher, sized(teacher))
        given |= {f"{kind}.{name}": x for name, x in inputs_of(teacher).items()}
        expected[kind] = student(**inputs_of(teacher)).last_hidden_state
        student.save_pretrained(tmp_path / kind)
    save_file(given, tmp_path / "given.safetensors")
    (bare := tmp_path / "bare").mkdir()
    run_bare(
        make_bare_environment(bare),
        """
        import sys
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import AutoModel
        torch.set_grad_enabled(False)
        given, out = load_file("given.safetensors"), {}
        for name, x in given.items():
            kind, _, argument = name.partition(".")
            model = AutoModel.from_pretrained(kind, trust_remote_code=True)
            assert type(model).__name__ == "LinearizedEncoder" and "linearizer" not in sys.modules
            out[kind] = model(**{argument: x}).last_hidden_state
        save_file(out, "out.safetensors")
        """,
        cwd=tmp_path,
    )
    out = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(out[kind], expected[kind]) for kind in expected)


def test_the_share_of_attention_decides_what_is_worth_it():
    inspection = inspect(AutoConfig.for_model("vit"))  # the usual sizes: 224 pixels, 197 tokens
    assert 0.03 < inspection.share(197) < 0.05
    with pytest.raises(
        UnsupportedModel, match="attention is 4.* of its operations there: let its processor make larger"
    ):
        inspection.check_worth(80, 197)
    with pytest.raises(UnsupportedModel, match="the budget of 256 is not less: ask for a smaller"):
        inspection.check_worth(256, 197)
    inspection.check_worth(256, 4097)


@pytest.mark.parametrize("budget", [20, 50, 80, 256, 1000])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_budget_is_spent_but_never_exceeded(budget, axes):
    for slots in (True, False):
        how = spend_keys(budget, axes, 1, 1 if axes == 1 else 0, slots)
        assert 0.5 * budget < how.keys <= budget
    with pytest.raises(BudgetError, match="ask for .* or more"):
        spend_keys(4, axes, 1, 1, False)


def test_merged_tokens_are_exact_where_each_is_merged_with_its_copy():
    shape, seeded = (1, 2, 60, 16), torch.Generator().manual_seed(0)
    copies = [torch.randn(shape, generator=seeded).repeat_interleave(2, 2) for _ in range(3)]
    exact = torch.nn.functional.scaled_dot_product_attention(*copies)
    for count in (120, 60):
        torch.testing.assert_close(MergedTokens(count).attend(*copies, 16**-0.5), exact)
