import json
from pathlib import Path

import pytest
from support.processes import node

from baton.rpc.block_hash import HASH_BYTES, cache_namespace, hash_blocks

VECTORS_PATH = Path(__file__).parents[2] / "proto" / "block_hash_vectors.json"
VECTORS = json.loads(VECTORS_PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS["namespaces"])
def test_a_namespace_is_the_published_one(vector):
    digest = bytes.fromhex(vector["model_digest"])
    actual = cache_namespace(digest, vector["block_size"], vector["adapter"], vector["salt"])
    assert actual.hex() == vector["namespace"]


@pytest.mark.parametrize("vector", VECTORS["chains"])
def test_a_chain_is_the_published_one(vector):
    hashes = hash_blocks(bytes.fromhex(vector["parent"]), vector["token_ids"], vector["block_size"])
    assert hashes.hex() == "".join(vector["block_hashes"])


def test_the_vectors_distinguish_inputs_that_must_not_share_blocks():
    namespaces = [vector["namespace"] for vector in VECTORS["namespaces"]]
    assert len(set(namespaces)) == len(namespaces)


@pytest.mark.timeout(360)
def test_another_language_computes_the_same_vectors():
    node.install()
    printed = node.run("block_hash.mjs", str(VECTORS_PATH))
    assert printed == f"{len(VECTORS['namespaces'])} namespaces and {len(VECTORS['chains'])} chains agree\n"


def test_a_chain_can_be_continued_from_any_block():
    tokens = list(range(100))
    whole = hash_blocks(bytes(HASH_BYTES), tokens, 16)
    head = hash_blocks(bytes(HASH_BYTES), tokens[:32], 16)
    assert head + hash_blocks(head[-HASH_BYTES:], tokens[32:], 16) == whole


def test_one_changed_token_changes_its_block_and_all_after_it():
    tokens = list(range(64))
    changed = [*tokens[:20], 999, *tokens[21:]]
    before, after = hash_blocks(bytes(HASH_BYTES), tokens, 16), hash_blocks(bytes(HASH_BYTES), changed, 16)
    same = [before[i : i + HASH_BYTES] == after[i : i + HASH_BYTES] for i in range(0, len(before), HASH_BYTES)]
    assert same == [True, False, False, False]
