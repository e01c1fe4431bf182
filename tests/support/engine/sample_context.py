"""Prompts that tell the sample model a name, and ask for it thousands of tokens later."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
SENTENCES = (
    "Tom went to the park with a red ball and met a dog.",
    "Lily saw a bird in the tree and it sang a song.",
    "The little boat went down the river to the sea.",
    "Ben and Anna made a cake and gave it to the queen.",
    "One day, a cat sat on the mat and looked at the moon.",
)


def sample_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def prompt_of(statement: str, question: str, num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """Returns the statement, stories, and the question `num_tokens` later."""
    rng = random.Random(0)
    pieces = [f"<|bos|><|im_start|>user\n{statement}"]
    used = 0
    while used < num_tokens:
        pieces.append(f" {rng.choice(SENTENCES)}")
        used += len(tokenizer.encode(pieces[-1], add_special_tokens=False).ids)
    pieces.append("<|im_end|>\n<|im_start|>assistant\nThank you.<|im_end|>\n")
    pieces.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    token_ids: list[int] = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    return token_ids
