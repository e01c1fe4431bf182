"""Hashes of prompts that begin alike, against hashing each from its start."""

import random

import pytest

from baton.rpc import prompt_hashes
from baton.rpc.block_hash import HASH_BYTES, hash_blocks, hash_packed_blocks, pack_tokens
from baton.rpc.prompt_hashes import PromptHashes

NAMESPACE = bytes(range(16))


def tokens(count, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(1 << 32) for _ in range(count)]


@pytest.fixture
def counted(monkeypatch):
    """Returns the lengths of prompts that are hashed block by block."""
    lengths = []

    def hash_and_count(parent, packed, block_size):
        lengths.append(len(packed) // 4)
        return hash_packed_blocks(parent, packed, block_size)

    monkeypatch.setattr(prompt_hashes, "hash_packed_blocks", hash_and_count)
    return lengths


@pytest.mark.parametrize("block_size", [1, 16, 48, 5000])
@pytest.mark.parametrize("count", [0, 15, 4096, 4097, 20_001])
def test_hashes_are_those_of_the_whole_prompt_each_time(count, block_size):
    hashes, prompt = PromptHashes(), tokens(count)
    expected = hash_blocks(NAMESPACE, prompt, block_size)
    assert hashes.hash_blocks(NAMESPACE, prompt, block_size) == expected
    assert hashes.hash_blocks(NAMESPACE, prompt, block_size) == expected
    assert len(expected) == count // block_size * HASH_BYTES


def test_only_different_blocks_are_hashed_again(counted):
    hashes, shared = PromptHashes(), tokens(16_384)
    hashes.hash_blocks(NAMESPACE, shared + tokens(5000, 1), 16)
    counted.clear()
    prompt = shared + tokens(5000, 2)
    assert hashes.hash_blocks(NAMESPACE, prompt, 16) == hash_blocks(NAMESPACE, prompt, 16)
    assert sum(counted) == 5000


def test_other_namespaces_share_nothing():
    hashes, prompt, other = PromptHashes(), tokens(8192), bytes(16)
    hashes.hash_blocks(NAMESPACE, prompt, 16)
    assert hashes.hash_blocks(other, prompt, 16) == hash_blocks(other, prompt, 16)


def test_a_change_at_the_start_changes_every_hash():
    hashes, prompt = PromptHashes(), tokens(12_288)
    before = hashes.hash_blocks(NAMESPACE, prompt, 16)
    after = hashes.hash_blocks(NAMESPACE, [prompt[0] ^ 1, *prompt[1:]], 16)
    assert not {before[at : at + 16] for at in range(0, len(before), 16)} & {
        after[at : at + 16] for at in range(0, len(after), 16)
    }


def test_no_more_runs_are_kept_than_allowed(counted):
    hashes = PromptHashes(max_runs=3)
    kept, other = tokens(8192, 1), tokens(8192, 2)
    hashes.hash_blocks(NAMESPACE, kept, 16)
    hashes.hash_blocks(NAMESPACE, other[:4096], 16)
    hashes.hash_blocks(NAMESPACE, kept, 16)
    hashes.hash_blocks(NAMESPACE, other[4096:], 16)
    assert len(hashes) == 3
    counted.clear()
    hashes.hash_blocks(NAMESPACE, kept, 16)
    assert sum(counted) == 0, "what was used last went first"


def test_packed_prompts_share_runs_with_prompts_of_numbers(counted):
    hashes, prompt = PromptHashes(run_blocks=4), tokens(150)
    hashes.hash_blocks(NAMESPACE, prompt, 16)
    counted.clear()
    runs = list(hashes.hash_runs(NAMESPACE, pack_tokens(prompt), 16))
    assert b"".join(runs) == hash_blocks(NAMESPACE, prompt, 16)
    assert [len(run) // HASH_BYTES for run in runs] == [4, 4, 1]
    assert sum(counted) == 150 - 128, "only what is no whole run"
