"""The tokenizer of a GGUF file as the content of tokenizer.json and tokenizer_config.json, from its metadata."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from baton.model_folder.gguf.metadata import Metadata
from baton.model_folder.gguf.splits import SPLITS, Split
from baton.model_folder.tokenizer_json import (
    AddsSpace,
    Pieces,
    added_token,
    around,
    byte_level_parts,
    sentencepiece_parts,
    tokenizer_json,
)
from baton.rpc.errors import InvalidRequest, Unsupported

_PREFIX = "tokenizer.ggml."
_TOKENS = f"{_PREFIX}tokens"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Control tokens that end an answer, in models whose metadata names only one end.
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
)


class _Kind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def tokenizer_of(metadata: Metadata) -> dict[str, Any]:
    """Returns tokenizer.json. Raises InvalidRequest for missing metadata, Unsupported for unknown kinds."""
    kind = metadata.text(f"{_PREFIX}model")
    tokens = metadata.texts(_TOKENS)
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens)
    else:
        raise Unsupported(f"{metadata.path}: {_PREFIX}model is {kind!r}; it must be gpt2 or llama", field="model")
    return tokenizer_json(parts, list(_added_tokens(metadata, tokens)), _around(metadata, tokens))


def tokenizer_config_of(metadata: Metadata) -> dict[str, Any]:
    """Returns tokenizer_config.json: special tokens, and the chat template if there is one."""
    tokens = metadata.texts(_TOKENS)
    config: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        token_id = metadata.token_id(f"{_PREFIX}{key}_token_id", len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    named = {
        key.removeprefix("tokenizer.chat_template."): metadata.text(key)
        for key in metadata.values
        if key.startswith("tokenizer.chat_template.")
    }
    template = metadata.text("tokenizer.chat_template", default="")
    if template or named:
        templates = {"default": template, **named} if template else named
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def end_token_ids(metadata: Metadata) -> list[int]:
    """Returns the tokens that end an answer."""
    tokens = metadata.texts(_TOKENS)
    found = [metadata.token_id(f"{_PREFIX}{key}_token_id", len(tokens)) for key in ("eos", "eot", "eom")]
    kinds = _kinds(metadata, len(tokens))
    found += [token_id for token_id, token in enumerate(tokens) if token in _ENDS and kinds[token_id] == _Kind.CONTROL]
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _kinds(metadata: Metadata, num_tokens: int) -> list[float]:
    return metadata.numbers(f"{_PREFIX}token_type", num_tokens)


def _added_tokens(metadata: Metadata, tokens: list[str]) -> Iterator[dict[str, Any]]:
    for token_id, kind in enumerate(_kinds(metadata, len(tokens))):
        if kind in (_Kind.UNKNOWN, _Kind.CONTROL, _Kind.USER_DEFINED):
            yield added_token(token_id, tokens[token_id], special=kind != _Kind.USER_DEFINED)


def _vocabulary(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise InvalidRequest(f"{metadata.path}: {_TOKENS} has {twice!r} twice", field="model")
    return vocabulary


def _split(metadata: Metadata) -> Split:
    name = metadata.text(f"{_PREFIX}pre")
    if name not in SPLITS:
        raise Unsupported(
            f"{metadata.path}: {_PREFIX}pre is {name!r}; it must be one of {', '.join(SPLITS)}", field="model"
        )
    return SPLITS[name]


def _byte_level(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    split = _split(metadata)
    merges = metadata.texts(f"{_PREFIX}merges")
    pairs = [merge.split(" ") for merge in merges]
    if bad := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise InvalidRequest(f"{metadata.path}: {_PREFIX}merges has {bad!r}; it must be two tokens", field="model")
    return byte_level_parts(_vocabulary(metadata, tokens), pairs, split.patterns, split.whole_words_first)


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    adds_space = metadata.flag(f"{_PREFIX}add_space_prefix", default=True)
    pieces = Pieces(
        tokens,
        metadata.numbers(f"{_PREFIX}scores", len(tokens)),
        metadata.token_id(f"{_PREFIX}unknown_token_id", len(tokens)),
        AddsSpace.ALWAYS if adds_space else AddsSpace.NEVER,
    )
    return sentencepiece_parts(_vocabulary(metadata, tokens), pieces)


def _around(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    kind = metadata.text(f"{_PREFIX}model")
    adds_bos = metadata.flag(f"{_PREFIX}add_bos_token", default=kind == "llama" or _split(metadata).adds_bos)
    adds_eos = metadata.flag(f"{_PREFIX}add_eos_token", default=False)
    before = [_token_id(metadata, "bos", len(tokens))] if adds_bos else []
    after = [_token_id(metadata, "eos", len(tokens))] if adds_eos else []
    return around(tokens, before, after)


def _token_id(metadata: Metadata, name: str, num_tokens: int) -> int:
    key = f"{_PREFIX}{name}_token_id"
    token_id = metadata.token_id(key, num_tokens)
    if token_id is None:
        raise metadata.error(key, f"a token id, as {_PREFIX}add_{name}_token is set")
    return token_id
