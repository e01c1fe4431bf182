"""A worker refuses a tokenizer with more tokens than its model, without a library for tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.texts import LETTERS, trained_bytes
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from baton.model_folder.tokenizers.vocabulary import count_tokens
from baton.rpc.errors import InvalidRequest
from baton.worker.weights.loading import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 400,
}


def write_folder(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_larger_tokenizer_is_refused_before_weights_are_loaded(load_format: str, tmp_path: Path) -> None:
    write_folder(tmp_path, trained_bytes(special=False), 399)
    with pytest.raises(InvalidRequest) as caught:
        load_model(str(tmp_path), load_format, torch.float32)
    assert caught.value.message == (
        f"the tokenizer {tmp_path}/tokenizer.json has 400 tokens, and vocab_size in {tmp_path}/config.json is 399:"
        " the tokenizer belongs to another model"
    )


def test_added_tokens_may_be_beyond_the_models_vocabulary(tmp_path: Path) -> None:
    tokenizer = trained_bytes(special=False)
    tokenizer.add_special_tokens(["<image>"])
    write_folder(tmp_path, tokenizer, 400)
    assert load_model(str(tmp_path), "dummy", torch.float32).config.vocab_size == 400


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"vocab": 7}}', "\udc80"])
def test_a_broken_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    write_folder(tmp_path, trained_bytes(), 400)
    (tmp_path / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest, match=rf"model file {tmp_path}/tokenizer\.json is not a valid tokenizer: \w+"):
        load_model(str(tmp_path), "dummy", torch.float32)


@pytest.mark.parametrize(
    ("model", "trainer_type"),
    [
        (models.BPE, trainers.BpeTrainer),
        (models.Unigram, trainers.UnigramTrainer),
        (models.WordLevel, trainers.WordLevelTrainer),
        (models.WordPiece, trainers.WordPieceTrainer),
    ],
)
def test_tokens_are_counted_as_the_library_counts_them(model: Any, trainer_type: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainer_type(vocab_size=90, special_tokens=["<a>"], show_progress=False)
    tokenizer.train_from_iterator([LETTERS], trainer)
    tokenizer.add_tokens(["added"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count_tokens(tmp_path / "tokenizer.json") == tokenizer.get_vocab_size(with_added_tokens=False)
