"""Caches of texts other than KV blocks: one tenant's entries never speed up another's requests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.gateway.rest_harness import INFO, SAMPLE

from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.models.tokenization.segments import SegmentEncoder
from baton.gateway.serving.tenancy import allowed_model
from baton.rpc.block_hash import cache_namespace
from baton.rpc.prompt_hashes import PromptHashes
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

NUMBERS = itertools.count()


def long_text() -> str:
    """Several segments, none of which any other text has."""
    serial = next(NUMBERS)
    return " ".join(f"n{number}z{serial}x" for number in range(5000))


@pytest.fixture(scope="module")
def catalog() -> ModelCatalog:
    catalog = ModelCatalog([load_served_model(str(SAMPLE))])
    catalog.update([INFO])
    return catalog


def test_a_text_of_another_owner_is_encoded_again():
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(text)]

    segments = SegmentEncoder(encode, 1 << 20)
    text = long_text()
    counts = []
    for owner in ("a", "a", "b", "b", ""):
        segments.encode(text, owner)
        counts.append(len(encoded))
        encoded.clear()
    assert counts[0] == counts[2] == counts[4] > 3
    assert counts[1] == counts[3] == 1  # the end of a text is not kept


def test_the_cache_stays_within_its_bytes_over_all_owners():
    segments = SegmentEncoder(lambda text: [1] * len(text), 100_000)
    for number in range(50):
        segments.encode(long_text(), f"owner {number}")
        assert segments.num_bytes <= 100_000


@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        (Tenant("a"), Tenant("a"), True),
        (Tenant("a"), Tenant("b"), False),
        (Tenant("a", salt="s"), Tenant("b", salt="s"), True),  # as the operator says
        (Tenant("a", salt="b"), Tenant("b"), False),
        (Tenant("salt x"), Tenant("a", salt="x"), False),
        (Tenant(), Tenant("a"), False),
        (Tenant(), Tenant(), True),
    ],
)
async def test_a_model_encodes_a_text_once_for_each_tenant(catalog, monkeypatch, one, other, shares):
    base = catalog.get("")
    encoded: list[str] = []
    segments = base.tokenizer._segments
    plain = segments._encode
    monkeypatch.setattr(segments, "_encode", lambda text: encoded.append(text) or plain(text))
    text = long_text()
    models = [allowed_model(catalog, Identity(tenant), "") for tenant in (one, other)]
    ids = [await model.encode_text(text, whole=True) for model in models]
    assert ids[0] == ids[1] == base.tokenizer.encode(text, add_special_tokens=True, owner="nobody")
    num_pieces = len(set(encoded))
    assert num_pieces > 3
    # The last piece is never kept, and nobody was here before either.
    assert len(encoded) == (2 * num_pieces + 1 if shares else 3 * num_pieces)


def test_a_tenants_view_of_a_model_has_the_workers_properties(catalog):
    model = allowed_model(catalog, Identity(Tenant("a")), "")
    assert model.require_info() == INFO
    assert model.name == catalog.get("").name


def test_the_hashes_of_one_namespace_are_not_found_by_another():
    hashes = PromptHashes()
    tokens = list(range(20_000))
    spaces = [cache_namespace(bytes(16), 16, salt=salt) for salt in ("1:a", "1:b")]
    first = hashes.hash_blocks(spaces[0], tokens, 16)
    kept = len(hashes)
    assert hashes.hash_blocks(spaces[1], tokens, 16) != first
    assert len(hashes) == 2 * kept


def test_a_constraint_of_another_owner_is_compiled_again():
    spec = ModelSpec(bytes(16), 4096, 2048, (2,))
    compiler = Compiler(load_vocabulary(Path(SAMPLE), spec))
    schema = Constraint(ConstraintForm.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "string"}}}')
    counts = []
    for owner in (b"a", b"a", b"b", b"b"):
        compiler.matcher(schema, owner)
        counts.append(compiler.num_compiled)
    assert counts == [1, 1, 2, 2]
