"""Folders without a tokenizer.json: the tokenizer that is made of theirs gives the same ids."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from support.models.texts import LETTERS, TEXTS, trained_bytes
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from baton.gateway.models.files import read_model_files
from baton.gateway.models.served import load_served_model
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import ModelSpec
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["[INST]", "[/INST]", "[TOOL_CALLS]"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the cache, which tests share: a conversion takes a second."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    write_byte_level(folder, "gpt2", "GPT2Tokenizer")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def ids_of(folder: Path, *, add_special_tokens: bool = False) -> list[list[int]]:
    tokenizer = load_served_model(str(folder)).tokenizer
    return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in TEXTS]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def write_settings(folder: Path, model_type: str, tokenizer_class: str, **more: object) -> None:
    write_json(folder / "config.json", {"model_type": model_type, "vocab_size": 512})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, **more})


def write_byte_level(folder: Path, model_type: str, tokenizer_class: str) -> None:
    trained_bytes().model.save(str(folder))
    write_settings(folder, model_type, tokenizer_class, eos_token="<|endoftext|>", unk_token="<|endoftext|>")


def train_sentencepiece(folder: Path, kind: str = "bpe", name: str = "tokenizer.model", **more: object) -> Path:
    (folder / "text.txt").write_text(LETTERS)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "made"),
        model_type=kind,
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        **more,
    )
    (folder / "text.txt").unlink()
    (folder / "made.vocab").unlink()
    return (folder / "made.model").rename(folder / name)


def test_vocab_and_merges_give_the_ids_of_transformers(gpt2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(gpt2)
    assert ids_of(gpt2) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_the_class_that_the_folder_names_decides_how_texts_are_split(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "qwen2", "Qwen2Tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ids_of(tmp_path) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_a_sentencepiece_model_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write_settings(tmp_path, "llama", "LlamaTokenizer", **special_tokens)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for special in (False, True):
        expected = [theirs.encode(text, add_special_tokens=special) for text in TEXTS]
        assert ids_of(tmp_path, add_special_tokens=special) == expected
    assert ids_of(tmp_path, add_special_tokens=True)[2][0] == 1


def test_a_sentencepiece_model_of_mistral_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path, name="tokenizer.model.v3", control_symbols=CONTROL)
    write_json(tmp_path / "config.json", {"vocab_size": 340})
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    model = load_served_model(str(tmp_path))
    for text in TEXTS:
        if not text or text[0] == " ":
            continue  # sentencepiece adds a space to such texts too
        assert model.tokenizer.encode(text, add_special_tokens=True) == [1, *theirs.EncodeAsIds(text)], text
    control = [model.tokenizer.encode(text, add_special_tokens=False) for text in CONTROL]
    assert control == [[theirs.PieceToId(text)] for text in CONTROL]


def write_tekken(folder: Path) -> tiktoken.Encoding:
    """Writes a tekken.json. Returns the encoding that mistral-common makes of it."""
    spelled = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = trained_bytes(special=False)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [bytes(spelled[letter] for letter in token) for token, _ in vocabulary]
    words = sorted(words[:256]) + words[256:]  # the first are the bytes
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + 10,
            "default_num_special_tokens": 10,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)],
    }
    write_json(folder / "tekken.json", content)
    ranks = {word: rank for rank, word in enumerate(words)}
    return tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_a_tekken_tokenizer_gives_the_ids_of_tiktoken(tmp_path: Path) -> None:
    theirs = write_tekken(tmp_path)
    model = load_served_model(str(tmp_path))
    for text in TEXTS:
        ours = model.tokenizer.encode(text, add_special_tokens=True)
        assert ours == [1, *(10 + token_id for token_id in theirs.encode_ordinary(text))], text
    assert model.tokenizer.encode("[INST]", add_special_tokens=False) == [3]


def test_the_worker_makes_the_same_tokenizer_for_constraints(gpt2: Path, cache: Path) -> None:
    made = read_model_files(str(gpt2)).tokenizer_path
    vocabulary = load_vocabulary(gpt2, ModelSpec(bytes(16), 400, 512, (0,)))
    assert made.is_relative_to(cache / "baton" / "models")
    ours = load_served_model(str(gpt2)).tokenizer
    assert vocabulary.tokenizer.tokenize_str("the dog") == ours.encode("the dog", add_special_tokens=False)


def test_the_folders_template_and_special_tokens_count(gpt2: Path) -> None:
    files = read_model_files(str(gpt2))
    assert files.chat_templates == {"default": "{{ messages[0].content }}"}
    assert files.special_tokens["eos_token"] == "<|endoftext|>"


def _tekken(folder: Path) -> None:
    write_tekken(folder)


def _sentencepiece_of_mistral(folder: Path) -> None:
    train_sentencepiece(folder, name="tokenizer.model.v3")


def hide(package: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes processes that start from now on believe that a package is not installed."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("package", "write", "file"),
    [("transformers", _tekken, "tekken.json"), ("sentencepiece", _sentencepiece_of_mistral, "tokenizer.model.v3")],
)
def test_a_missing_package_is_named(
    package: str, write: Callable[[Path], None], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    hide(package, tmp_path / "site", monkeypatch)
    with pytest.raises(Unsupported) as caught:
        read_model_files(str(folder))
    assert caught.value.message == (
        f"{folder / file} cannot be converted: the package {package} is not installed;"
        " pip install 'baton-inference[slow-tokenizers]'"
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.model.v3", "no model"), ("tekken.json", "{"), ("tokenizer.model", "no model")],
)
def test_a_broken_tokenizer_is_named(file: str, content: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    write_settings(tmp_path, "llama", "LlamaTokenizer")
    with pytest.raises(InvalidRequest, match=rf"tokenizer {file} of {tmp_path} cannot be converted: \w+"):
        read_model_files(str(tmp_path))


def test_custom_code_is_refused_before_the_tokenizer_is_converted(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "gpt2", "GPT2Tokenizer")
    write_json(tmp_path / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}})
    with pytest.raises(InvalidRequest, match="has an auto_map"):
        read_model_files(str(tmp_path))


def test_a_tokenizer_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    trained_bytes(special=False).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"vocab_size": 399})
    with pytest.raises(InvalidRequest, match=r"has 400 tokens, and vocab_size in .*config\.json is 399"):
        load_served_model(str(tmp_path))
    write_json(tmp_path / "config.json", {"text_config": {"vocab_size": 400}})
    assert load_served_model(str(tmp_path)).tokenizer.vocab_size == 400


def test_added_tokens_may_be_beyond_the_models_vocabulary(tmp_path: Path) -> None:
    tokenizer = trained_bytes(special=False)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"vocab_size": 400})
    assert load_served_model(str(tmp_path)).tokenizer.vocab_size == 401


def test_a_tekken_file_without_special_tokens_names_the_package_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path)
    content = json.loads((tmp_path / "tekken.json").read_text())
    del content["special_tokens"]
    write_json(tmp_path / "tekken.json", content)
    hide("mistral_common", tmp_path / "site", monkeypatch)
    with pytest.raises(Unsupported, match=r"mistral-common is not installed; pip install 'baton-inference\[mistral\]'"):
        read_model_files(str(tmp_path))
