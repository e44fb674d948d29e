import gzip
import json

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from linearizer.errors import TextError
from linearizer.hub.models import find_model
from linearizer.teacher import pdf_files
from linearizer.teacher.load import load_tokenizer
from linearizer.teacher.text import (
    check_source,
    decode_document,
    document_numbers,
    pack_texts,
    read_documents,
    read_texts,
    read_whole,
    sample_from,
)
from linearizer.teacher.token_loop import HALF_LETTER, TextStream
from tests.support.families import tiny_config


@pytest.fixture
def starting_tokenizer():
    """Give a tokenizer that puts a token before every text, as Llama's and Gemma's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(find_model("demo"))
    end = tokenizer.eos_token
    tokenizer.bos_token = "~"
    start = ("~", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[start])
    assert tokenizer.eos_token == end and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("BUILTIN", "not a source of text: write `builtin`, `file:PATH`, `dataset:.*` or `self`"),
        ("file:", "not a source of text"),
        ("file:/no/such/text", "does not exist"),
        ("file:/", "is a folder"),
        ("dataset:name", "'name' is not the id of a data set"),
        ("dataset:a/b:c:d:e:f", "has 5 parts and may have 4"),
    ],
)
def test_what_is_no_source_is_refused_before_anything_is_read(source, said):
    with pytest.raises(TextError, match=said):
        check_source(source)
    for known in ("builtin", "self", "dataset:org/name::train", f"file:{__file__}"):
        check_source(known)


def test_windows_hold_every_token_in_order_with_an_end_after_each_document(tokenizer):
    documents = ["The first text.", "A second, longer text that goes on.", "End"]
    packed = [token for document in documents for token in [*ids(tokenizer, document), tokenizer.eos_token_id]]
    windows = list(pack_texts(documents, tokenizer, 5))
    assert all(window.shape == (5,) for window in windows)
    assert torch.cat(windows).tolist() == packed[: len(packed) // 5 * 5]


def test_windows_of_a_tokenizer_that_starts_texts_start_alike(starting_tokenizer):
    document = "A text that is long enough for many windows. " * 5
    windows = torch.stack(list(pack_texts([document], starting_tokenizer, 8)))
    assert (windows[:, 0] == starting_tokenizer.bos_token_id).all()
    body = windows[:, 1:].flatten().tolist()
    assert body == [*ids(starting_tokenizer, document), starting_tokenizer.eos_token_id][: len(body)]


@pytest.mark.parametrize("has_end", [True, False])  # without, as with OPT, the start token ends documents
def test_a_document_ends_at_its_end_and_not_where_a_text_starts(starting_tokenizer, has_end):
    starting_tokenizer.eos_token = starting_tokenizer.eos_token if has_end else None
    long = "A text that is long enough for many windows. " * 5
    windows = torch.stack(list(pack_texts([long, "The end of a second text."], starting_tokenizer, 8)))
    numbers = document_numbers(windows, starting_tokenizer)
    assert numbers.flatten().diff().min() == 0 and numbers.unique().tolist() == [0, 1]
    assert (numbers[:, 1:] == 0).sum() == len(ids(starting_tokenizer, long)) + 1


def test_tokenizer_without_end_separates_by_its_start(starting_tokenizer):
    starting_tokenizer.eos_token = None
    window = next(iter(pack_texts(["a", "b"] * 9, starting_tokenizer, 8)))
    (a,), (b,), start = ids(starting_tokenizer, "a"), ids(starting_tokenizer, "b"), starting_tokenizer.bos_token_id
    assert window.tolist() == [start, a, start, b, start, a, start, b]


def test_windows_of_one_token_are_refused_whether_or_not_texts_start_with_one(tokenizer, starting_tokenizer):
    for kind_of_tokenizer in (tokenizer, starting_tokenizer):
        with pytest.raises(TextError, match="1 token has nothing to predict: ask for a --length of at least 2"):
            read_texts("builtin", kind_of_tokenizer, 1, 2)
        assert read_texts("builtin", kind_of_tokenizer, 2, 3).shape == (3, 2)


def test_file_is_the_same_text_however_it_is_read_in_pieces(tmp_path):
    text = "".join(f"line {number} of the text, é\n" for number in range(20_000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8-sig")
    pieces = list(read_documents(f"file:{tmp_path / 'text.txt'}"))
    assert len(pieces) > 3 and "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_lines_of_jsonl_are_documents(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "label": 3}\n')
    assert list(read_documents(f"file:{tmp_path / 'rows.jsonl'}")) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("binary.txt", b"\xff\xfe\x80 bytes", "is not text in UTF-8"),
        ("zeros.txt", b"text\0text", "contains zero bytes, so it is not text"),
        ("rows.jsonl", b'{"text": "fine"}\n{"text": 3}\n', "no string named .* in line 2"),
        ("broken.jsonl", b'{"text": "fine"}\n{"te', "no JSON in line 2"),
        (".", None, "is a folder: name one file in it"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_file_that_is_no_text_is_one_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=sentence):
        list(read_documents(f"file:{tmp_path / name}"))


def rows(count):
    lines = [json.dumps({"text": f"text {number} " * 30, "note": "n", "label": number}) for number in range(count)]
    return "\n".join(lines).encode()


def test_data_set_is_streamed_from_a_folder(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_bytes(rows(40))
    (tmp_path / "test.jsonl").write_bytes(rows(3))
    assert read_texts(f"dataset:{tmp_path}", tokenizer, 64, 4).shape == (4, 64)
    assert len(list(read_documents(f"dataset:{tmp_path}::test"))) == 3
    assert list(read_documents(f"dataset:{tmp_path}:default:test:note")) == ["n"] * 3


def test_rows_of_a_data_set_without_a_text_are_left_out(tmp_path):
    texts = [None, "first", None, "second"]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": text, "label": 1}) for text in texts))
    assert list(read_documents(f"dataset:{tmp_path}")) == ["first", "second"]


def test_data_set_is_streamed_from_the_hub(hub):
    for name, private in (("texts", False), ("secret", True)):
        hub.add(f"org/{name}", {"train.jsonl": rows(5)}, kind="datasets", private=private)
        assert len(list(read_documents(f"dataset:org/{name}", token="hf_fake_org"))) == 5


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("dataset:org/none", "'org/none' is not a folder here and not on the Hub, or it is private"),
        ("dataset:org/private", "'org/private' is not a folder here and not on the Hub, or it is private"),
        ("dataset:org/gated", "'org/gated' is gated: accept its terms at http"),
        ("dataset:org/open::valid", "'org/open' has no split 'valid': it has train"),
        ("dataset:org/open:de", "'org/open' has no config 'de': it has default"),
        ("dataset:org/open:::body", "'org/open' has no text in a column 'body': it has some in text, note"),
        ("dataset:org/open:::label", "'org/open' has no text in a column 'label': it has some in text, note"),
        ("dataset:org/nothing", "'org/nothing' cannot be read"),
        ("dataset:org/odd", "'org/odd' cannot be read .TypeError: keywords must be strings.: name another data set"),
        ("dataset:org/cut", "'org/cut' cannot be read .EOFError"),
        ("dataset:org/numbers", "'org/numbers' has no text in a column 'text': it has some in no column"),
        ("dataset:org/elsewhere", "'org/elsewhere' names files outside of itself .'file:/etc/hostname'."),
    ],
)
def test_data_set_that_cannot_be_had_is_one_sentence(hub, source, sentence):
    hub.add("org/open", {"train.jsonl": rows(5)}, kind="datasets")
    hub.add("org/nothing", {"README.md": b"Nothing here."}, kind="datasets")
    hub.add("org/odd", {"train.jsonl": rows(5), "README.md": b"---\n5: 3\n---\n"}, kind="datasets")
    hub.add("org/cut", {"train.jsonl.gz": gzip.compress(rows(5000))[:-20]}, kind="datasets")
    hub.add("org/numbers", {"train.jsonl": b'{"label": 5}'}, kind="datasets")
    settings = b"configs:\n- config_name: default\n  data_files: file:/etc/hostname\n"
    hub.add("org/elsewhere", {"train.jsonl": rows(5), ".huggingface.yaml": settings}, kind="datasets")
    hub.add("org/private", {"train.jsonl": rows(5)}, kind="datasets", private=True)
    hub.add("org/gated", {"train.jsonl": rows(5)}, kind="datasets", gated="auto")
    with pytest.raises(TextError, match=sentence):
        list(read_documents(source))


def test_data_set_without_network_is_one_sentence(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TextError, match="the Hub does not answer"):
        list(read_documents("dataset:org/open"))


def test_model_writes_texts_that_its_seed_repeats(tokenizer):
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    state = torch.get_rng_state()
    texts = sample_from(model, tokenizer, 12, 20, seed=3)
    assert texts.shape == (20, 12) and (texts[:, 0] == tokenizer.eos_token_id).all()
    assert torch.equal(texts, sample_from(model, tokenizer, 12, 20, seed=3))
    assert not torch.equal(texts, sample_from(model, tokenizer, 12, 20, seed=4))
    assert torch.equal(texts, read_texts("self", tokenizer, 12, 20, model=model, seed=3))
    assert torch.equal(state, torch.get_rng_state())


def test_the_first_texts_that_a_model_writes_are_the_same_however_many_it_writes(tokenizer):
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    texts = sample_from(model, tokenizer, 12, 20, seed=3)
    for count in (1, 2, 4, 8, 17):
        assert torch.equal(texts[:count], sample_from(model, tokenizer, 12, count, seed=3))


@pytest.mark.parametrize("text", ["The quick  brown fox.\n\nx = 1", "naïve café — 東京 👩‍🚀!", " a"])
def test_pieces_add_up_to_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, tokenizer("Once")["input_ids"])
    pieces = [stream.add(token) for token in ids]
    assert "".join([*pieces, stream.rest()]) == text
    assert not any(HALF_LETTER in piece for piece in pieces)


def pdf_of(text):
    """Write a PDF of one page."""
    shown = f"BT /F1 12 Tf 20 50 Td ({text}) Tj ET"
    parts = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(shown)}>>stream\n{shown}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    body, places = "%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(body))
        body += f"{number} 0 obj{part}endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(body)}\n%%EOF"
    return (body + end).encode()


def test_a_pdf_is_its_text_and_what_is_none_is_said(tmp_path, monkeypatch):
    (path := tmp_path / "a.PDF").write_bytes(pdf_of("The sea was calm."))
    assert read_whole(path).strip() == "The sea was calm."
    for content, reason in ((b"%PDF-1.4 nothing", "cannot be read as a PDF"), (pdf_of(""), "holds no text")):
        with pytest.raises(TextError, match=f"'the file' {reason}.*: send its text as a text file"):
            decode_document("the file", content)
    monkeypatch.setattr(pdf_files, "MOST_TEXT", 8)
    with pytest.raises(TextError, match="'the file' holds more than 8 B of text: send a part"):
        decode_document("the file", pdf_of("The sea"))
    monkeypatch.setattr(pdf_files, "SECONDS", 0.01)
    with pytest.raises(TextError, match="takes longer than 0.01 s"):
        decode_document("the file", pdf_of("The sea"))
    (tmp_path / "pypdf.py").write_text("import os\nraise KeyError if 'HF_TOKEN' in os.environ else ModuleNotFoundError")
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TextError, match="is not installed: `pip install pypdf`"):
        decode_document("the file", pdf_of("The sea"))
