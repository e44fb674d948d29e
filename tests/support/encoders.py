"""A small sentence encoder, and texts that it can tell apart."""

import json

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, initializer_range=0.2)
WORDS = [f"w{number}" for number in range(60)]


def write_sentence_encoder(folder):
    """Write a small sentence encoder, with the files by which sentence-transformers knows it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SIZES, vocab_size=64, max_position_embeddings=256)
    AutoModel.from_config(config).save_pretrained(folder)
    of_its_origin = (folder / "config.json").read_text().replace("BertModel", "BertForMaskedLM")
    (folder / "config.json").write_text(of_its_origin)  # as many sentence encoders have it
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    settings = [{"pooling_mode_mean_tokens": True}, {"in_features": 32, "out_features": 16, "bias": True}]
    for (path, _), values in zip(modules[1:], settings, strict=True):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(values))
    dense = {"linear.weight": torch.randn(16, 32), "linear.bias": torch.zeros(16)}
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    return folder


def write_topics(path):
    """Write words of a few topics, each a passage of its own, and name them as a source of text."""
    draw = np.random.default_rng(0)
    topics = [draw.choice(WORDS, 12) for _ in range(5)]
    rows = [" ".join(draw.choice(topics[number % 5], 200)) for number in range(12)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return f"file:{path}"
