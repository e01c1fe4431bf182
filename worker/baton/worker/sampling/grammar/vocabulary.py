"""The model's vocabulary in the grammar library's form. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from baton.model_folder.tokenizers.folder import tokenizer_folder
from baton.model_folder.tokenizers.source import TOKENIZER_FILE
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import Int32, ModelSpec
from baton.worker.sampling.grammar.added_tokens import AddedTokens, read_added_tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and the token ids that the model can output."""

    tokenizer: LLTokenizer
    added: AddedTokens
    eos_token_ids: tuple[int, ...]
    num_words: int  # of the library's masks
    every_token: Int32  # [ceil(vocab_size / 32)]: the mask of the model's whole vocabulary


def load_vocabulary(folder: Path, model: ModelSpec) -> Vocabulary:
    """Reads the folder's tokenizer. Raises Unsupported if it is missing, InvalidRequest if it is broken."""
    path = tokenizer_folder(folder) / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Unsupported(
            f"constraint needs the model's tokenizer.json, and {folder} has none", field="constraint"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="constraint") from error
    eos = [token_id for token_id in model.eos_token_ids if token_id < model.vocab_size] or None
    try:
        tokenizer = _make(text, model.vocab_size, eos)
        added = read_added_tokens(text, tokenizer)
    except ValueError as error:
        raise InvalidRequest(f"{path} does not work with constraints: {error}", field="constraint") from error
    ends = tuple(token_id for token_id in tokenizer.eos_tokens if token_id < model.vocab_size)
    every_token = mask_of(range(model.vocab_size), model.vocab_size)
    return Vocabulary(tokenizer, added, ends, -(-tokenizer.vocab_size // 32), every_token)


def mask_of(token_ids: tuple[int, ...] | range, vocab_size: int) -> Int32:
    """Returns the mask [ceil(vocab_size / 32)] of these tokens. Ids outside the vocabulary are ignored."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    ids = np.asarray(token_ids, np.int64)
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _make(text: str, vocab_size: int, eos: list[int] | None) -> LLTokenizer:
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError:
        # Some tokenizers have more tokens than their models.
        return LLTokenizer(text, eos_token=eos)
