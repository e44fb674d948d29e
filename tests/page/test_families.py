"""Models whose layers only in part grow, share their keys, or have learned sinks: from the page to a chat."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from linearizer.run.folder import Run
from tests.support import hybrids
from tests.support.families import ALTERED
from tests.support.page_server import LONG, looking, shown, wait_until_true
from tests.support.page_steps import field, unfold

SHAPES = ("qwen3_5_text", "gemma4_text", "gpt_oss", "nemotron_h", "falcon_h1")


def write_model(family, folder, tokenizer):
    """Write a tiny model of a kind, with the tokenizer of the demo model."""
    sizes = {"vocab_size": len(tokenizer)}
    sizes |= {"vocab_size_per_layer_input": len(tokenizer)} if family == "gemma4_text" else {}
    if family in hybrids.HYBRIDS:
        model = hybrids.teacher_of(family, **sizes)
    else:
        config = AutoConfig.for_model(family, **{**hybrids.LAYERS, **ALTERED[family], **sizes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("family", SHAPES)
def test_a_model_of_each_shape_goes_from_the_page_to_a_chat_with_its_student(
    family, local, browser, tokenizer, tmp_path
):
    write_model(family, tmp_path / family, tokenizer)
    with looking(browser, local.url) as page:
        page.locator("#model input").fill(str(tmp_path / family))
        page.locator("#model input").press("Enter")
        page.wait_for_selector("#model-card .lz-good", timeout=LONG)
        page.click("#to-budget")
        unfold(page, "Change how")
        page.get_by_label("Try it").check()
        unfold(page, "Advanced")
        for option, amount in {"texts": 3, "length": 64}.items():
            field(page, option).fill(str(amount))
            field(page, option).press("Tab")
        page.click("#start")
        page.wait_for_url("**/?run=*")
        shown(page, "#run-card", "done", LONG)
        page.click("#to-chat")
        page.locator("#prompt textarea").fill("Once upon a time")
        page.locator("#prompt textarea").press("Enter")
        wait_until_true(page, "document.querySelectorAll('#student .bot.message').length == 1", timeout=LONG)
        run = Run(local.runs / re.search(r"run=([\w.-]+)", page.url)[1])
    assert run.checkpoint.is_dir() and run.evaluation_parts
