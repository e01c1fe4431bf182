"""The tokenizer, against transformers as the oracle."""

import asyncio
import random
import string
import time
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"
TEXTS = [
    "Once upon a time",
    "naïve café 你好 😀👩‍👩‍👧",
    "  two  spaces\n\n\ttab",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    "١٢٣ 42",
]


@pytest.fixture(scope="module")
def sample():
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def transformers_sample():
    return AutoTokenizer.from_pretrained(SAMPLE)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_encoding_equals_transformers(sample, transformers_sample, text, add_special_tokens):
    expected = transformers_sample(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert sample.encode(text, add_special_tokens=add_special_tokens) == expected


async def test_a_long_text_is_encoded_without_blocking_the_event_loop(sample):
    # Words that the tokenizer has not seen take it long enough to be sure of ticks, however busy the machine is.
    letters = random.Random(1)
    text = " ".join("".join(letters.choices(string.ascii_lowercase, k=8)) for _ in range(200_000))
    gaps = []

    async def tick():
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - begin)

    ticker = asyncio.create_task(tick())
    token_ids = await sample.encode_async(text, add_special_tokens=False)
    ticker.cancel()
    assert len(token_ids) > 50_000
    assert gaps
    assert sample.decode(token_ids) == text


def test_a_lone_surrogate_is_a_clear_error(sample):
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        sample.encode("\ud800", add_special_tokens=False)


def test_a_broken_tokenizer_file_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer(path)


def test_a_files_own_truncation_and_padding_are_off(tmp_path):
    rust = RustTokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    rust.enable_truncation(4)
    rust.enable_padding(length=64)
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = "Once upon a time there was a little girl and a dog"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_token_bytes_join_to_the_text(sample):
    text = "naïve 你好 😀"
    token_ids = sample.encode(text, add_special_tokens=False)
    assert b"".join(map(sample.token_bytes, token_ids)).decode() == text
    assert sample.token_bytes(1_000_000) == b""


async def test_memory_of_a_huge_text_is_freed(sample):
    process = psutil.Process()
    await sample.encode_async("dog " * 500_000, add_special_tokens=False)
    before = process.memory_info().rss
    for _ in range(2):
        assert len(await sample.encode_async("dog " * 2_000_000, add_special_tokens=False)) >= 2_000_000
    assert process.memory_info().rss - before < 200e6
