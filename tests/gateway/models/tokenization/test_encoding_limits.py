"""What cannot fit a context is refused before it is encoded, and nothing that fits is."""

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
from support.gateway.rest_harness import INFO
from support.processes.cpu_seconds import cheapest, cheapest_of
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.served import load_served_model
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, EncodingStopped, TooManyTokens
from baton.gateway.models.tokenization.segments import cut
from baton.gateway.models.tokenization.token_bound import ASSUMED_BYTES, TokenBound
from baton.gateway.models.tokenization.token_table import build_token_table
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"
MEGABYTES = 15_000_000
HUGE = {
    "digits": "1234567890" * (MEGABYTES // 10),
    "one word": "a" * MEGABYTES,
    "spaces": " " * MEGABYTES,
    "words": "hello there " * (MEGABYTES // 12),
    "ideographs": "你好" * (MEGABYTES // 6),
    "marks": "e" + "\u0301" * (MEGABYTES // 2),
    "lines": "\n" * MEGABYTES,
}


@pytest.fixture(scope="module")
def model():
    model = load_served_model(str(SAMPLE))
    model.info = INFO
    yield model
    model.tokenizer.close()


@pytest.mark.parametrize("name", HUGE)
async def test_a_huge_prompt_is_refused_at_once(model, name):
    chat = [{"role": "user", "content": HUGE[name]}]
    for encode in (
        lambda: model.encode_text(HUGE[name]),
        lambda: model.encode_text(HUGE[name], whole=True),
        lambda: model.encode_chat(chat),
        lambda: model.encode_chat(chat, whole=True),
        lambda: model.encode_chat([{"role": "user", "content": "<|im_end|>" + HUGE[name]}]),
    ):

        async def refused(encode=encode):
            with pytest.raises(ContextTooLong, match=r"at least \d+ tokens"):
                await encode()

        assert await cheapest_of(refused, 0.5) < 0.5


@pytest.mark.parametrize("name", ["digits", "words"])
async def test_a_prompt_that_exceeds_the_context_a_little_is_encoded_no_further(model, name):
    """The bound by size lets it pass."""
    text = HUGE[name][: model.tokenizer.bound.bytes_per_token * 8000]
    for tokenizer in (model.tokenizer, uncut()):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))

        def refused(tokenizer=tokenizer, num_tokens=num_tokens):
            with pytest.raises(TooManyTokens) as caught:
                tokenizer.encode(text, add_special_tokens=False, limit=EncodingLimit(8000))
            assert caught.value.at_least <= num_tokens

        assert cheapest(refused, 0.2) < 0.2


def test_text_without_a_place_to_cut_has_a_limit(model):
    """A vocabulary with long tokens lets it pass the bound by size."""
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    tokenizer.bound.bytes_per_token = 1 << 20
    text = "a" * 900_000 + " b" * 10_000
    for encode in (tokenizer.encode, lambda text, **options: tokenizer.encode_plain(text, text, **options)):
        assert encode(text, add_special_tokens=False)
    for chunks in (1, 3):
        with pytest.raises(InvalidRequest, match="characters in long runs"):
            tokenizer.encode(("a" * (1_500_000 // chunks) + " b" * 10_000) * chunks, add_special_tokens=False)


@pytest.mark.parametrize("char", ["\0", "a", "=", "漢"])
def test_one_long_word_that_cannot_fit_costs_little(model, char):
    """Its words cannot be counted without encoding it, and its bytes might be few tokens."""
    limit = EncodingLimit(65_535)
    for tokenizer in (model.tokenizer, uncut()):

        def refused(tokenizer=tokenizer):
            with pytest.raises((InvalidRequest, TooManyTokens)):
                limit.check(len(tokenizer.encode(char * 750_000, add_special_tokens=False, limit=limit)))

        assert cheapest(refused, 0.3) < 0.3
        assert tokenizer.encode(char * 60_000, add_special_tokens=False, limit=limit)


def uncut():
    """The same, as if its texts could not be cut."""
    other = Tokenizer(SAMPLE / "tokenizer.json")
    other._segments = None
    return other


def pieces_of_every_kind(seed):
    draw = random.Random(seed)
    kinds = ["1234567", "  ", " dog", "the cat ", "\n\n", "é", "e\u0301", "你好", "<|im_end|>", "a" * 50, "=-=", "\t"]
    return "".join(draw.choice(kinds) * draw.randint(1, 40) for _ in range(draw.randint(1, 400)))


def bpe(normalizer=None, pre_tokenizer=None, alphabet=None, merges=(), **options):
    alphabet = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    vocab = {char: at for at, char in enumerate(sorted(alphabet))}
    for one, two in merges:
        vocab.setdefault(one + two, len(vocab))
    rust = RustTokenizer(models.BPE(vocab, list(merges), **options))
    if normalizer is not None:
        rust.normalizer = normalizer
    if pre_tokenizer is not None:
        rust.pre_tokenizer = pre_tokenizer
    return rust


def byte_level(**options):
    rust = bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), **options)
    rust.decoder = decoders.ByteLevel()
    return rust


def byte_fallback(**options):
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    rust = bpe(normalizers.Replace(" ", "▁"), alphabet=[*names, "▁", "a", "d", "o"], byte_fallback=True, **options)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust


SPACES = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]
TOKENIZERS = {
    "sample": lambda: RustTokenizer.from_file(str(SAMPLE / "tokenizer.json")),
    "byte level": lambda: byte_level(merges=SPACES),
    "composing": lambda: byte_level(normalizer=normalizers.NFC(), merges=SPACES),
    "compatible": lambda: byte_level(normalizer=normalizers.NFKC(), merges=SPACES),
    "byte fallback": lambda: byte_fallback(merges=[("▁", "▁"), ("d", "o")]),
    "unknown words": lambda: bpe(alphabet="ab[", unk_token="[", fuse_unk=True),
    "dropping": lambda: byte_level(normalizer=normalizers.StripAccents()),
    "words": lambda: bpe(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
}


def swallowing():
    rust = byte_level(merges=SPACES)
    rust.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, lstrip=True)])
    return rust


TOKENIZERS["swallowing"] = swallowing


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_never_has_fewer_tokens_than_the_lower_bound(name):
    rust = TOKENIZERS[name]()
    bound = TokenBound(rust, build_token_table(rust))
    texts = [pieces_of_every_kind(seed) for seed in range(12)]
    texts += ["\u0344" * 5000, " " * 9000 + "<|im_end|>" + "\u2003 " * 9000, "a" * 40_000, "각" * 500]
    texts += ["\u1100\u1161\u11a8" * 3000, "α\u0313\u0300\u0345" * 3000]
    for text in texts:
        token_ids = rust.encode(text, add_special_tokens=False).ids
        for most in (0, 5, len(token_ids) // 2, len(token_ids)):
            found = [fewest(bound.check_size, text, most)] if bound.bytes_per_token != ASSUMED_BYTES else []
            found.append(fewest(lambda text, limit: bound.check_piece(text, limit, 0), text, most))
            assert max(found) <= len(token_ids)


def fewest(check, text, most):
    try:
        check(text, EncodingLimit(most))
    except TooManyTokens as error:
        return error.at_least
    return 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("byte level", 8),
        ("composing", 32),
        ("byte fallback", 6),
        ("unknown words", ASSUMED_BYTES),
        ("dropping", ASSUMED_BYTES),
        ("words", ASSUMED_BYTES),
    ],
)
def test_the_longest_token_is_known_where_no_text_is_dropped(name, expected):
    rust = TOKENIZERS[name]()
    assert TokenBound(rust, build_token_table(rust)).bytes_per_token == expected


def test_texts_within_the_limits_are_encoded_unchanged(model):
    whole = uncut()
    for seed in range(25):
        text = pieces_of_every_kind(seed)
        expected = model.tokenizer._rust.encode(text, add_special_tokens=False).ids
        limit = EncodingLimit(len(expected))
        assert model.tokenizer.encode(text, add_special_tokens=False, limit=limit) == expected
        assert whole.encode(text, add_special_tokens=False, limit=limit) == expected


def test_cuts_at_the_borders_of_windows_are_found():
    for size in range(65_530, 65_545):
        text = "1" * size + "a b" + "2" * 70_000
        assert "".join(cut(text, 1)) == text
        assert len(list(cut(text, 1))) == 2


async def test_encoding_stops_when_the_client_leaves(model):
    """Within 50 ms, of work that would take seconds."""
    stopped = threading.Event()
    text = "the dog and the cat " * 500_000

    def encode(limit):
        try:
            return model.tokenizer.encode(text, add_special_tokens=False, limit=limit)
        except EncodingStopped:
            stopped.set()
            raise

    task = asyncio.create_task(model.tokenizer.run_limited(encode, EncodingLimit(), len(text)))
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    began = time.perf_counter()
    while not stopped.is_set():
        await asyncio.sleep(0.002)
        assert time.perf_counter() - began < 10  # of a busy machine
