"""How the benchmark on a real model judges: token by token beside its teacher, by needles, long-text tasks and answers.

What a teacher says of a text is computed once, and kept as what its output embedding is given: a few megabytes where
the logits of 8,192 tokens take 1.6 GB. Logits are made of it again piece by piece.
"""

import random
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from linearizer.errors import UnsupportedModel
from linearizer.evaluate.language import catastrophic, join_scores, scores_of
from linearizer.evaluate.recall import DEPTHS, HiddenPairs
from linearizer.evaluate.subjects import Subject, read_last, read_logits
from linearizer.evaluate.tasks import DEPTHS as TASK_DEPTHS
from linearizer.evaluate.tasks import KINDS, frequent_words, lay_out_all, score_answers
from linearizer.hub.weight_files import digest
from linearizer.teacher.logits import fresh_cache, logits_of, losses_of

PIECE = 512  # tokens of some texts that are read, and whose logits are held, at once
FIRST_PLACE = 256
FACT, QUESTION = "\nThe secret number is{}. Remember it.\n", "\nThe secret number is"
DIGITS = 6
QUESTIONS = ("What is the text above about?", "Which names does the text above mention?")
MEASURES = ("loss", "kl", "agreement", "catastrophic")
ANSWER_TOKENS = 64  # of the teacher's answers, at most


def edges_of(lengths):
    """List where places in a text begin: at 0, 256, 512, 1024, … below the longest length, and at the other lengths."""
    most = max(lengths)
    doubling = (FIRST_PLACE << step for step in range(30))
    return sorted({0, *(edge for edge in doubling if edge < most), *(each for each in lengths if each < most)})


@torch.inference_mode()
def teacher_readings(folder, load, ids):
    """Return what a teacher's output embedding is given for every token of a text, once computed: (tokens, dim)."""

    def read():
        model, given = load(), []
        cache = fresh_cache(model)
        with watched(model.get_output_embeddings(), given):
            for piece in ids.split(PIECE, 1):
                read_logits(Subject("teacher", model), piece, cache)
        return torch.cat(given, 1)[0].contiguous()

    return kept_of(Path(folder) / digest({"ids": ids})[:24], read)


def kept_of(path, make):
    """Return a tensor that is made once and then kept in a file."""
    kept = path.with_suffix(".safetensors")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file({"given": make()}, unfinished := kept.with_suffix(".part"))
        unfinished.replace(kept)
    return load_file(kept)["given"]


@contextmanager
def watched(module, given):
    """While this lasts, keep what a module is given."""
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args[0].float()))
    try:
        yield
    finally:
        hook.remove()


@torch.inference_mode()
def check_readings(model):
    """Refuse a teacher whose logits are more than what its output embedding makes."""
    ids, given, output = torch.arange(16)[None], [], model.get_output_embeddings()
    with watched(output, given):
        expected = logits_of(model, ids)
    if not torch.allclose(output(given[0].to(output.weight.dtype)).float(), expected, atol=1e-4):
        raise UnsupportedModel("the model changes the logits of its output embedding: this benchmark does not judge it")


@torch.inference_mode()
def read_by_place(subject, readings, ids, edges):
    """Return of each text loss, kl, agreement and catastrophic positions of a subject, by place.

    `readings` is what the teacher was read to say.
    """
    cache, output, size = subject.fresh_cache(), subject.model.get_output_embeddings(), PIECE // len(ids)
    parts, missed = [], []
    for begin in range(0, ids.shape[1], size):
        expected = output(readings[:, begin : begin + size].to(output.weight.dtype)).float()
        given = expected if subject.softmax else read_logits(subject, ids[:, begin : begin + size], cache)
        following = ids[:, begin + 1 : begin + 1 + size]
        said = [x[:, : following.shape[1]] for x in (given, expected)]
        parts.append(scores_of(*said, following))
        missed.append(catastrophic(parts[-1].loss, losses_of(said[1], following).double()))
    scores, places = join_scores(parts, 1)._asdict(), list(pairwise([*edges, ids.shape[1]]))
    scores["catastrophic"] = torch.cat(missed, 1)
    return [
        {
            "edges": [*edges, ids.shape[1]],
            "counts": [scores["loss"][text, a:b].numel() for a, b in places],
            **{name: [scores[name][text, a:b].mean().item() for a, b in places] for name in MEASURES},
        }
        for text in range(len(ids))
    ]


def hide_number(window, depth, tokenizer, seed):
    """Hide a number of six digits at a depth of a text (1, tokens), and end in the question for it."""
    drawn = random.Random(f"{seed} {depth}")
    number = " " + "".join(str(drawn.randrange(1, 10)) for _ in range(DIGITS))

    def tokens(text):
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=window.dtype)

    key, value, rest = tokens(QUESTION), tokens(number), tokens(FACT.split("{}")[1])
    fact = torch.cat([key, value, rest], 1)
    room = window.shape[1] - fact.shape[1] - key.shape[1] - value.shape[1]
    place = min(room - 1, max(1, round(depth * room)))
    ids = torch.cat([window[:, :place], fact, window[:, place:room], key, value], 1)
    return HiddenPairs(ids, place, key.shape[1], value.shape[1])


def ask_for_numbers(subject, windows, tokenizer, count):
    """Ask for `count` numbers at each of five depths: the share that is told whole, and of tokens that are right."""
    hidden = [
        hide_number(windows[i % len(windows)][None], depth, tokenizer, 10 * i + place)
        for place, depth in enumerate(DEPTHS)
        for i in range(count)
    ]
    answers = read_last(subject, torch.cat([each.ids for each in hidden]), [each.value for each in hidden])
    told = [
        (logits.argmax(-1).cpu() == each.ids[0, -each.value :]).double().mean()
        for each, logits in zip(hidden, answers, strict=True)
    ]
    right = torch.stack(told).unflatten(0, (len(DEPTHS), count))
    whole = (right == 1).double()
    return {"depths": list(DEPTHS), "whole": whole.mean(1).tolist(), "right": right.mean(1).tolist(), "count": count}


def do_tasks(subject, windows, tokenizer, count):
    """Do long-text tasks on texts of one length: the share that is right over all depths, and the loss of answers."""
    words, each = frequent_words(tokenizer, windows), len(TASK_DEPTHS) * count
    cells = [lay_out_all(kind, depth, words, windows, tokenizer, count) for kind in KINDS for depth in TASK_DEPTHS]
    scores = torch.tensor(score_answers(subject, sum(cells, [])), dtype=torch.float64).unflatten(0, (len(KINDS), each))
    means = zip(KINDS, scores.mean(1).tolist(), strict=True)
    return {kind: {"right": right, "loss": loss} for kind, (right, loss) in means}


def chat_prompts(windows, tokenizer, questions):
    """Ask questions about each text, as a turn of a chat: (1, tokens) each."""
    texts = [tokenizer.decode(window, skip_special_tokens=True) for window in windows]
    turns = [[{"role": "user", "content": f"{text}\n\n{question}"}] for text in texts for question in questions]
    asked = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(each, add_special_tokens=False, return_tensors="pt")["input_ids"] for each in asked]


@torch.inference_mode()
def teacher_answers(folder, load, prompts):
    """Return the teacher's likeliest answer to each prompt, once written: (tokens)."""

    def write(ids):
        return load().generate(ids, do_sample=False, max_new_tokens=ANSWER_TOKENS)[0, ids.shape[1] :].contiguous()

    return [
        kept_of(Path(folder) / f"answer-{digest({'ids': ids})[:24]}", lambda ids=ids: write(ids)) for ids in prompts
    ]


@torch.inference_mode()
def compare_answers(subject, prompts, answers):
    """Count the tokens of a teacher's answers that a subject would write: all, and those before the first other."""
    shares, alike = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        (logits,) = read_last(subject, torch.cat([ids, answer[None]], 1), [len(answer)])
        same = logits.argmax(-1).cpu() == answer
        shares.append(same.double().mean().item())
        alike.append(int(same.cumprod(0).sum()))
    tokens = sum(map(len, answers)) / len(answers)
    return {"agreement": sum(shares) / len(shares), "alike": sum(alike) / len(alike), "tokens": tokens}
