"""The incremental detokenizer and its token table, against tokenizers and transformers as oracles."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from baton.gateway.models.tokenization.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    PrefixDiffDetokenizer,
)
from baton.gateway.models.tokenization.tokenizer import Tokenizer

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"


@pytest.fixture(scope="module")
def sample():
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def transformers_sample():
    return AutoTokenizer.from_pretrained(SAMPLE)


def pushed(detokenizer, token_ids, rng):
    """All deltas joined, the ids cut into random pieces."""
    pieces = []
    at = 0
    while at < len(token_ids):
        size = rng.choice((1, 1, 1, 2, 5))
        pieces.append(detokenizer.push(token_ids[at : at + size]))
        at += size
    return "".join([*pieces, detokenizer.finish()])


@pytest.mark.parametrize("skip", [False, True])
def test_any_byte_level_tokens_in_any_pieces_give_the_full_decode(sample, transformers_sample, skip):
    rng = random.Random(1)
    for _ in range(400):
        token_ids = [rng.randrange(rng.choice((10, 300, 4096, 4110))) for _ in range(rng.randrange(40))]
        detokenizer = sample.detokenizer([1], skip_special_tokens=skip)
        assert isinstance(detokenizer, ByteLevelDetokenizer)
        known = [token_id for token_id in token_ids if token_id < 4096]
        expected = transformers_sample.decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert pushed(detokenizer, token_ids, rng) == expected
        assert sample.decode(token_ids, skip_special_tokens=skip) == expected


def test_an_incomplete_character_waits_for_its_end(sample):
    token_ids = sample.encode("😀", add_special_tokens=False)
    assert len(token_ids) > 1
    detokenizer = sample.detokenizer([1], skip_special_tokens=True)
    assert [detokenizer.push([token_id]) for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["😀"]
    assert detokenizer.push(token_ids[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


PIECES = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "▁▁▁", "ing", "é", "你", "a", "▁a", "x▁y", "!", "<b>"]


def fallback_tokenizer(folder, decoder):
    """A small SentencePiece-like vocabulary: specials, pieces, and the 256 byte tokens."""
    names = PIECES + [f"<0x{byte:02X}>" for byte in range(256)]
    rust = RustTokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], byte_fallback=True))
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    rust.add_tokens(["<b>"])
    rust.decoder = decoder
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(content=" ", left=1, right=0),
]
FALLBACK_DECODERS = {
    "llama": decoders.Sequence(LLAMA),
    "gemma": decoders.Sequence(LLAMA[:3]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
}
FIRST_BYTE = len(PIECES)


def random_runs(rng):
    """Token ids whose byte runs are valid UTF-8, or hold no whole character."""
    token_ids = []
    for _ in range(rng.randrange(12)):
        kind = rng.randrange(4)
        if kind == 0:
            data = rng.choice(("你", "😀é", "ß", "a\n")).encode()
            token_ids += [FIRST_BYTE + byte for byte in data]
        elif kind == 1:
            broken = rng.choice((b"\xff", b"\xe4\xbd", b"\x80\x80", b"\xf0\x9f\x98"))
            token_ids += [FIRST_BYTE + byte for byte in broken]
        token_ids += [rng.randrange(3, FIRST_BYTE) for _ in range(rng.randrange(1, 4))]
        token_ids += [rng.randrange(3)] * rng.randrange(2)
    return token_ids


@pytest.mark.parametrize("name", FALLBACK_DECODERS)
@pytest.mark.parametrize("skip", [False, True])
def test_any_byte_fallback_tokens_in_any_pieces_give_the_full_decode(tmp_path, name, skip):
    tokenizer = fallback_tokenizer(tmp_path, FALLBACK_DECODERS[name])
    rng = random.Random(2)
    for _ in range(400):
        token_ids = random_runs(rng)
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip)
        assert isinstance(detokenizer, ByteFallbackDetokenizer)
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert pushed(detokenizer, token_ids, rng) == expected, token_ids


def test_whole_characters_go_out_although_their_byte_run_ends_broken(tmp_path):
    tokenizer = fallback_tokenizer(tmp_path, FALLBACK_DECODERS["llama"])
    detokenizer = tokenizer.detokenizer([PIECES.index("a")], skip_special_tokens=True)
    run = [FIRST_BYTE + byte for byte in b"\xc3\xa9\xe4\xbd"]
    assert [detokenizer.push([token_id]) for token_id in run] == ["", "é", "", ""]
    assert detokenizer.push([PIECES.index("!")]) == "\ufffd\ufffd!"


def test_a_leading_space_stays_where_the_prompt_has_text(tmp_path):
    tokenizer = fallback_tokenizer(tmp_path, FALLBACK_DECODERS["llama"])
    hello, world = PIECES.index("▁Hello"), PIECES.index("▁world")
    assert tokenizer.detokenizer([1, hello], skip_special_tokens=True).push([world]) == " world"
    assert tokenizer.detokenizer([1], skip_special_tokens=True).push([hello]) == "Hello"


def test_other_decoders_give_the_full_decode_too(tmp_path):
    names = ["[UNK]", "[CLS]", "hello", "world", "##ing", "##s", ".", "walk", "'"]
    rust = RustTokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    rust.add_special_tokens(["[UNK]", "[CLS]"])
    rust.decoder = decoders.WordPiece(cleanup=False)
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    rng = random.Random(3)
    for _ in range(200):
        # A piece that goes on (##) has nothing to go on with at a text's start.
        token_ids = [2] + [rng.randrange(len(names)) for _ in range(rng.randrange(60))]
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
        assert isinstance(detokenizer, PrefixDiffDetokenizer)
        assert pushed(detokenizer, token_ids, rng) == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_the_general_method_equals_the_table_on_byte_level(sample):
    rng = random.Random(4)
    for _ in range(100):
        text = "".join(rng.choice(("Once upon ", "你好", "😀", "é", " a", "\n")) for _ in range(20))
        token_ids = sample.encode(text, add_special_tokens=False)
        assert pushed(PrefixDiffDetokenizer(sample.decode, []), token_ids, rng) == text


def test_deltas_come_as_early_as_from_the_libraries_own_stream(sample):
    rust = RustTokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    stream = DecodeStream(skip_special_tokens=True)
    detokenizer = sample.detokenizer([1], skip_special_tokens=True)
    for token_id in sample.encode("Once upon a 你好 time, 😀 naïve <|im_end|> girl.", add_special_tokens=False):
        assert detokenizer.push([token_id]) == (stream.step(rust, token_id) or "")
