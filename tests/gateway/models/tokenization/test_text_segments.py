"""Texts encoded in segments, against texts encoded whole."""

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from baton.gateway.models.tokenization.segments import SegmentEncoder, can_be_cut
from baton.gateway.models.tokenization.token_table import build_token_table
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m" / "tokenizer.json"
PIECES = [
    "the dog", " ", "  ", "\n", "\n\n", ".", "'s", "don't", "I'll be", "a b c", "1 234", "é à", "Ёж и", "你好", "😀",
    "<|im_start|>", "<|im_end|>\n", "\t", "_", "x y", " Z",
]  # fmt: skip


@pytest.fixture(scope="module")
def sample():
    tokenizer = Tokenizer(SAMPLE)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def rust():
    return RustTokenizer.from_file(str(SAMPLE))


def encode_plainly(rust, text):
    return rust.encode(text, add_special_tokens=False).ids


def cuttable(rust):
    return can_be_cut(rust, build_token_table(rust), partial(encode_plainly, rust))


def long_text(seed, words):
    generator = random.Random(seed)
    return "".join(generator.choice(PIECES) for _ in range(words))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=40),
    st.integers(1, 40),
)
def test_segments_make_the_ids_of_the_whole_text(rust, pieces, segment_chars):
    text = "".join(pieces)
    expected = encode_plainly(rust, text)
    encode = partial(encode_plainly, rust)
    encoder = SegmentEncoder(encode, 1 << 20, segment_chars)
    assert encoder.encode(text) == expected
    assert encoder.encode(text) == expected, "the second time it comes from memory"


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_has_the_ids_that_the_library_gives_it(sample, rust, add_special_tokens):
    text = long_text(1, 20_000)
    expected = rust.encode(text, add_special_tokens=add_special_tokens).ids
    assert sample.encode(text, add_special_tokens=add_special_tokens) == expected


def test_only_new_segments_are_encoded(rust):
    encoded = []

    def encode(text):
        encoded.append(len(text))
        return encode_plainly(rust, text)

    encoder = SegmentEncoder(encode, 1 << 24)
    shared = long_text(2, 15_000)
    encoder.encode(shared + long_text(3, 2000))
    encoded.clear()
    encoder.encode(shared + long_text(4, 2000))
    assert sum(encoded) < len(long_text(4, 2000)) + 2 * 4200


def test_the_cache_is_bounded(rust):
    encoder = SegmentEncoder(partial(encode_plainly, rust), 100_000)
    for seed in range(5):
        encoder.encode(long_text(seed, 20_000))
    assert 50_000 < encoder.num_bytes <= 100_000


def test_a_lone_surrogate_deep_in_a_long_text_is_a_clear_error(sample):
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        sample.encode("a word and " * 5000 + "\ud800" + " and more" * 5000, add_special_tokens=False)


def test_the_sample_can_be_cut(rust):
    assert cuttable(rust)


def byte_level(merges=(), **more):
    """A byte-level tokenizer of single bytes and these merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *("".join(merge) for merge in merges)]
    rust = RustTokenizer(models.BPE({name: at for at, name in enumerate(names)}, list(merges)))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **more)
    rust.decoder = decoders.ByteLevel()
    return rust


def test_tokens_that_reach_over_a_space_forbid_cuts():
    assert cuttable(byte_level())
    assert not cuttable(byte_level([("a", "Ġ"), ("aĠ", "b")], use_regex=False))


def test_tokenizers_that_depend_on_the_start_of_a_text_allow_no_cuts():
    rust = byte_level()
    rust.normalizer = normalizers.Prepend("_")
    assert not cuttable(rust)
    rust = byte_level()
    rust.normalizer = normalizers.Strip()
    assert not cuttable(rust)


def test_added_tokens_that_swallow_spaces_after_letters_forbid_cuts():
    rust = byte_level()
    rust.add_tokens([AddedToken("word", rstrip=True)])
    assert not cuttable(rust)


def test_added_tokens_with_a_space_inside_forbid_cuts():
    rust = byte_level()
    rust.add_tokens(["hello world"])
    assert not cuttable(rust)


def test_other_models_than_pair_merging_ones_are_not_cut():
    rust = RustTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.decoder = decoders.Fuse()
    assert not cuttable(rust)
