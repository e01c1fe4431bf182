"""Tokenizers of GGUF files: the same ids as the tokenizers that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from support.gguf.files import Vocabulary, write_gguf
from support.models.texts import LETTERS, TEXTS, trained_bytes
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from baton.gateway.models.served import load_served_model

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, **values: Any) -> Path:
    """Writes a file with this tokenizer, and a model of almost no weights."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(values["tokens"]), **shape))
    template = values.pop("chat_template", None)
    return write_gguf(path, model, vocabulary=Vocabulary(values), tokenizer__chat_template=template)


def byte_level_values(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    content = json.loads(tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {token["content"] for token in content["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [token for token, _ in vocabulary],
        "token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_a_byte_level_tokenizer_gives_the_ids_of_transformers(pre: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **byte_level_values(trained_bytes(), pre), add_bos_token=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_served_model(str(path)).tokenizer
    for text in TEXTS:
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(token_ids) == text


def test_smollm_splits_each_digit(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **byte_level_values(trained_bytes(), "smollm"), add_bos_token=False)
    ours = load_served_model(str(path)).tokenizer
    digits = ours.encode("12 345", add_special_tokens=False)
    assert [ours.token_text(token_id) for token_id in digits] == ["1", "2", " ", "3", "4", "5"]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text(LETTERS)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def sentencepiece_values(spm: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(token_id: int) -> int:
        if spm.IsByte(token_id):
            return 6
        return 2 if spm.IsUnknown(token_id) else 3 if spm.IsControl(token_id) else 1

    token_ids = range(spm.GetPieceSize())
    return {
        "model": "llama",
        "tokens": [spm.IdToPiece(token_id) for token_id in token_ids],
        "scores": [float(spm.GetScore(token_id)) for token_id in token_ids],
        "token_type": [kind(token_id) for token_id in token_ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_a_sentencepiece_tokenizer_gives_the_ids_of_sentencepiece(
    spm: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", **sentencepiece_values(spm))
    ours = load_served_model(str(path)).tokenizer
    for text in TEXTS:
        if text:  # sentencepiece puts its space before an empty text too
            token_ids = ours.encode(text, add_special_tokens=False)
            assert token_ids == spm.EncodeAsIds(text), text
            assert ours.decode(token_ids) == text
    assert ours.encode("a", add_special_tokens=True) == [1, *spm.EncodeAsIds("a")]


def test_the_file_gives_special_tokens_template_and_name(tmp_path: Path) -> None:
    values = byte_level_values(trained_bytes(), "gpt-2")
    path = write(tmp_path / "tiny-chat.Q4_0.gguf", **values, add_bos_token=True, chat_template=CHAT)
    model = load_served_model(str(path))
    assert model.name == "tiny-chat.Q4_0"
    assert model.template.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert model.tokenizer.encode("x", add_special_tokens=True)[0] == 1
    assert model.tokenizer.is_special("<|im_end|>")
    assert model.tokenizer.encode("<|im_start|>", add_special_tokens=False) == [1]


def test_control_tokens_that_end_answers_are_ends(tmp_path: Path) -> None:
    from baton.model_folder.form import hugging_face_form

    values = byte_level_values(trained_bytes(), "gpt-2") | {"eos_token_id": 2}
    folder = hugging_face_form(write(tmp_path / "model.gguf", **values))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2, 0]
