"""Texts on which tokenizers differ, and a small tokenizer trained on them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    "",
    " ",
    "Hello world",
    "Hello 12345 world's  test\n\n  x",
    "It's we'LL I'M don't DON'T they'd",
    "naïve café 北京 日本語 🙂👍🏽 ﷽",
    "\t\ttabs\r\nand\rcr\n\n\n",
    "3.14159e-10, 1,000,000 and ½ ²",
    "def f(x):\n    return x**2  # ok\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a" * 50,
    "   leading and trailing   ",
    "https://example.com/a?b=c&d=e#f",
    "العربية हिन्दी ไทย",
    "hello\u00a0world\u2003x",
    "!!!???...---//\n\n/",
    "CamelCaseWORDS and snake_case",
)
LETTERS = "Once upon a time there was a dog. It's 12 o'clock, they'll say: naïve café! 北京 returns x**2.\n" * 20


def trained_bytes(special: bool = True) -> Tokenizer:
    """Returns a tokenizer of 400 tokens that splits as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>") if special else ()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LETTERS, *TEXTS], trainer)
    return tokenizer
