"""The content of tokenizer.json, part by part. Knows no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SPACE = "\u2581"  # what sentencepiece has for a space


class AddsSpace(Enum):
    """Where a space is added, which sentencepiece has at the begin of words."""

    NEVER = "never"
    FIRST = "first"  # in front of a text without one; chat templates write it behind control tokens
    ALWAYS = "always"  # in front of a text, and behind each control token


@dataclass(frozen=True, slots=True)
class Pieces:
    """The vocabulary of a sentencepiece model."""

    tokens: Sequence[str]  # by id
    scores: Sequence[float]
    unknown: int | None  # the id of the token for characters that there is none for
    adds_space: AddsSpace


def tokenizer_json(
    parts: Mapping[str, Any], added_tokens: Sequence[Mapping[str, Any]], post_processor: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the whole file."""
    head = {"version": "1.0", "truncation": None, "padding": None}
    return {**head, "added_tokens": list(added_tokens), "post_processor": post_processor, **parts}


def added_token(token_id: int, text: str, special: bool) -> dict[str, Any]:
    """Returns a token that is found in texts before all others."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": special}


def byte_level_parts(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], patterns: Sequence[str], whole_words_first: bool
) -> dict[str, Any]:
    """Returns the parts of a tokenizer that splits by the patterns, one after the other, and merges bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges, ignore_merges=whole_words_first),
    }


def sentencepiece_parts(vocabulary: Mapping[str, int], pieces: Pieces) -> dict[str, Any]:
    """Returns the parts of a tokenizer that merges as sentencepiece's BPE does."""
    restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    adds_any = pieces.adds_space is not AddsSpace.NEVER
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_any else []
    return {
        **_spaces(pieces.adds_space),
        "decoder": {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(
            vocabulary,
            _merges(vocabulary, pieces.scores),
            unk_token=None if pieces.unknown is None else pieces.tokens[pieces.unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _spaces(adds_space: AddsSpace) -> dict[str, Any]:
    if adds_space is AddsSpace.FIRST:
        steps = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
        return {"normalizer": None, "pre_tokenizer": steps}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space is AddsSpace.ALWAYS else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return {"normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]}, "pre_tokenizer": None}


def around(tokens: Sequence[str], before: Sequence[int], after: Sequence[int]) -> dict[str, Any] | None:
    """Returns the post-processor that adds special tokens to texts; None if there are none."""
    if not before and not after:
        return None
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    single = [*_specials(tokens, before, 0), first, *_specials(tokens, after, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *_specials(tokens, before, 1), second, *_specials(tokens, after, 1)],
        "special_tokens": {
            tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
            for token_id in (*before, *after)
        },
    }


def _specials(tokens: Sequence[str], token_ids: Sequence[int], kind: int) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": tokens[token_id], "type_id": kind}} for token_id in token_ids]


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Returns the pairs of tokens that are a token together, those with the highest scores first."""
    ordered = sorted(vocabulary.items(), key=lambda item: -scores[item[1]])
    return [
        [token[:cut], token[cut:]]
        for token, _ in ordered
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **absent, **flags, **more, "vocab": vocabulary, "merges": merges}
