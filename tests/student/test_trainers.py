"""Trainers, pipelines and streamers of others work with a student, as they do with its teacher."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    TextIteratorStreamer,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from linearizer.hub.models import find_model
from linearizer.method.checkpoint import save
from linearizer.teacher.load import load_tokenizer
from tests.support.models import student_of, tokens

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
QUESTION = [{"role": "user", "content": "What does len do?"}]
ANSWER = [{"role": "assistant", "content": "It counts what a list holds."}]

pytestmark = pytest.mark.filterwarnings("ignore")  # of trainers about themselves, new with each of their versions


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = load_tokenizer(find_model("demo"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """Save a student with gradients for all weights, and return its folder."""
    folder = tmp_path_factory.mktemp("student") / "checkpoint"
    save(student_of("llama", vocab_size=4096), tokenizer, folder)
    return folder


def settings(folder, **more):
    return dict(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip


def assert_trained(trainer, before):
    """Check that the losses are finite, and that weights of base and features have changed."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(torch.tensor(losses).isfinite())
    after = dict(trainer.model.named_parameters())
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert any(".student." in name for name in changed) and any("q_proj" in name for name in changed)


def loaded(folder):
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return student, {name: x.clone() for name, x in student.named_parameters()}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_trainer_trains_and_saves_it(gradient_checkpointing, checkpoint, tokenizer, tmp_path):
    student, before = loaded(checkpoint)
    data = Dataset.from_dict({"input_ids": tokens(4, 24).tolist()})
    arguments = TrainingArguments(**settings(tmp_path, gradient_checkpointing=gradient_checkpointing))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(student, arguments, train_dataset=data, data_collator=collator)
    assert_trained(trainer, before)
    trainer.save_model(str(tmp_path / "saved"))
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, student.eval()(ids).logits)


PAIR = {"prompt": QUESTION, "chosen": ANSWER, "rejected": [{"role": "assistant", "content": "It sorts."}]}
TRL = {  # trainer -> data, arguments, settings
    "SFT": ({"messages": QUESTION + ANSWER}, {}, {"max_length": 32}),
    "DPO": (PAIR, {}, {"max_length": 32}),
    "GRPO": (
        {"prompt": "What does len do?"},
        {"reward_funcs": lambda completions, **_: [float(index) for index, _ in enumerate(completions)]},
        {"num_generations": 2, "max_completion_length": 6},
    ),
}


@pytest.mark.parametrize("kind", TRL)
def test_trl_trains_it_on_conversations_on_preferences_and_by_rewards(kind, checkpoint, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    student, before = loaded(checkpoint)
    data, given, more = TRL[kind]
    arguments = getattr(trl, f"{kind}Config")(**settings(tmp_path), **more, bf16=False)
    given = {"args": arguments, "train_dataset": Dataset.from_list([data] * 4), "processing_class": tokenizer, **given}
    assert_trained(getattr(trl, f"{kind}Trainer")(student, **given), before)


def test_peft_trains_saves_and_loads_an_adapter(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    student, _ = loaded(checkpoint)
    ids = tokens(2, 20)
    wrapped = peft.get_peft_model(student, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(checkpoint)[0], tmp_path)
    with torch.no_grad():
        expected = wrapped.eval()(input_ids=ids).logits
        assert torch.equal(again.eval()(input_ids=ids).logits, expected)
        with wrapped.disable_adapter():
            assert not torch.equal(wrapped(input_ids=ids).logits, expected)


def test_peft_hears_why_keys_of_a_prefix_cannot_be_given(checkpoint):
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(loaded(checkpoint)[0], config)
    with pytest.raises(ValueError, match="keeps a state, not keys"):
        wrapped(input_ids=tokens(1, 9))


def test_a_head_that_peft_trains_whole_is_the_head_that_answers(checkpoint):
    peft = pytest.importorskip("peft")
    student, ids = loaded(checkpoint)[0], tokens(1, 9)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    wrapped, before = peft.get_peft_model(student, config), copy.deepcopy(student)(ids).logits
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(2)
        torch.testing.assert_close(wrapped(input_ids=ids).logits, 2 * before)


def test_pipelines_and_streamers_write_what_generate_writes(checkpoint, tokenizer, capsys):
    student, _ = loaded(checkpoint)
    given = tokenizer("The quick brown", return_tensors="pt")
    settings = dict(max_new_tokens=5, do_sample=False)
    written = student.generate(**given, **settings, streamer=TextStreamer(tokenizer))
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == tokenizer.decode(written[0]).strip()
    streamer = TextIteratorStreamer(tokenizer)
    student.generate(**given, **settings, streamer=streamer)
    assert "".join(streamer).strip() == tokenizer.decode(written[0]).strip()
    write = pipeline("text-generation", model=student, tokenizer=tokenizer)
    assert write("The quick brown", **settings)[0]["generated_text"] == text
    ((answer,), *_) = (turns["generated_text"][-1:] for turns in write(QUESTION, **settings))
    prompt = tokenizer.apply_chat_template(QUESTION, return_tensors="pt", return_dict=True)
    reply = student.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :]
    assert answer["content"] == tokenizer.decode(reply, skip_special_tokens=True)
