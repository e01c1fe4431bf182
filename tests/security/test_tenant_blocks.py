"""Two tenants share no block: by hash, in the router's index, in a worker's pool, in a fleet with hand-overs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet.simulate_harness import make_simulation
from tenant_fuzz import fuzz_fleet, fuzz_worker

from baton.gateway.access.identity import Tenant
from baton.gateway.core import GenerationRequest
from baton.gateway.generation.hashed_prompt import hash_prompt
from baton.gateway.serving.tenancy import _as_tenants
from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.prompt_hashes import PromptHashes
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import WORKLOADS, generate
from baton.v1 import types_pb2

INFO = types_pb2.ModelInfo(name="m", digest=bytes(range(16)), max_model_len=4096, block_size=4)
# Texts that look like each other, and like the marks that the salt is made of.
WORDS = st.text(st.sampled_from("=:01ab"), max_size=6)
TENANTS = st.builds(Tenant, name=WORDS.filter(bool), salt=WORDS)
TOKENS = list(range(64))


def hashes_of(tenant: Tenant, cache_salt: str, adapter: str = "") -> set[bytes]:
    request = GenerationRequest("r", "m", TOKENS, cache_salt=cache_salt, adapter=adapter)
    packed = hash_prompt(_as_tenants(request, tenant, lambda usage: None), INFO, PromptHashes()).block_hashes
    return {packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)}


@given(TENANTS, TENANTS, WORDS, WORDS)
def test_two_tenants_have_no_hash_in_common_whatever_their_names_and_salts(one, other, salt, other_salt):
    shares = bool(hashes_of(one, salt) & hashes_of(other, other_salt))
    is_one = (one.salt, one.salt or one.name) == (other.salt, other.salt or other.name)
    assert shares == (is_one and salt == other_salt)


@given(TENANTS, WORDS)
def test_hashes_without_tenant_and_salt_differ_from_all_others(tenant, salt):
    assert not hashes_of(tenant, salt) & hashes_of(Tenant(), "")
    assert not hashes_of(tenant, "") & hashes_of(Tenant(), salt)


def test_an_adapter_is_no_salt():
    assert not hashes_of(Tenant("a"), "x") & hashes_of(Tenant("a"), "", "x")


@pytest.mark.parametrize(("fuzz", "count"), [(fuzz_worker, 3000), (fuzz_fleet, 250)])
def test_fuzzed_requests_of_two_tenants_share_no_block(fuzz, count):
    seen = fuzz(count)
    assert seen.num_shared == 0
    assert seen.num_finished > 0.9 * count
    assert seen.num_hit_blocks > count, "the cache is used"
    assert seen.num_tempting > 0.1 * count, "there is something to share"


@pytest.mark.parametrize(("fuzz", "count"), [(fuzz_worker, 500), (fuzz_fleet, 100)])
def test_the_oracle_detects_sharing_without_salts(fuzz, count):
    seen = fuzz(count, salted=False)
    assert seen.num_shared_hashes > count
    assert seen.num_shared_blocks > 0


def hit_rate(salted: bool, seed: int) -> float:
    """Of three tenants' chats, each with texts of its own, on three workers."""
    texts = [Texts(64) for _ in range(3)]
    arrivals = []
    for number, of_tenant in enumerate(texts):
        of_tenant._contents = number << 24  # no two tenants send one text
        if salted:
            of_tenant.namespace = f"tenant {number}".encode().ljust(16)
        arrivals += [
            (one.time, number, one, of_tenant.namespace)
            for one in generate(WORKLOADS["chat"], of_tenant, 3.0, 8.0, seed + number)
        ]
    simulation = make_simulation(Texts(64), num_blocks=4096)
    ordered = sorted(arrivals, key=lambda one: one[:2])
    simulation.run((replace(one, tenant=f"t{who}", namespace=space) for _, who, one, space in ordered), 120.0)
    done = [record for record in simulation.gateway.records if not record.error]
    return sum(one.num_cached_tokens for one in done) / sum(one.num_prompt_tokens for one in done)


def test_a_tenants_own_hit_rate_is_that_of_a_fleet_without_salts():
    salted, plain = hit_rate(True, 1), hit_rate(False, 1)
    assert plain > 0.3
    assert abs(salted - plain) <= 0.01 * plain, (salted, plain)
