"""How byte-level tokenizers of GGUF files split texts into words, by the names that llama.cpp has for the splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_CONTRACTIONS})"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_LINES}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PATH_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATH_LINES}|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_ANY_CASE}?|{_CASED[1]}{_ANY_CASE}?|\p{{N}}{{1,3}}|{_PATH_LINES}|{_SPACES}"


@dataclass(frozen=True, slots=True)
class Split:
    """The expressions that split a text, one after the other, and what the vocabulary expects besides."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # where the metadata does not state it


_PLAIN = Split((_GPT2,))
_DIGITS = Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = Split((_LLAMA3,), whole_words_first=True, adds_bos=True)

SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jina-es", "jina-de", "granite-docling"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split((_QWEN2,))),
    "tekken": Split((_TEKKEN,), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((_GPT4O,))),
}
