"""Fuzzed requests of two tenants, each prompt sent by both, on a device that computes nothing.

An oracle beside the device notes who wrote each block, and who reads it. There are two ways:

    worker   the gateway's hashes, one shipped scheduler with its block pool, and the router's index fed with its events
    fleet    the whole simulator: three workers, placement, and hand-overs between them; ten times as slow

`python tests/security/tenant_fuzz.py worker --requests 1000000` prints what it saw.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.gateway.access.identity import Tenant
from baton.gateway.core import GenerationRequest
from baton.gateway.generation.hashed_prompt import hash_prompt
from baton.gateway.serving.tenancy import _as_tenants
from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.block_hash import HASH_BYTES, hash_blocks
from baton.rpc.prompt_hashes import PromptHashes
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.executor import VirtualExecutor
from baton.services.simulate.cluster.policy import BatonPolicy
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.simulation import Simulation
from baton.services.simulate.requests.workloads import Arrival
from baton.services.simulate.virtual.timeline import Clock
from baton.v1 import kv_pb2, types_pb2
from baton.worker.core import BlockHash, BlockId, Request, SamplingParams, StepPlan, StopConditions, TokenIds
from baton.worker.engine.engine import Engine
from baton.worker.kv.cache_events import StoredEvent
from baton.worker.scheduling.settings import EngineSettings

BLOCK_SIZE = 4
INFO = types_pb2.ModelInfo(name="simulated", digest=bytes(range(16)), max_model_len=4096, block_size=BLOCK_SIZE)
# A salt that is the other's name, and requests' own salts that are names too.
TENANTS = (Tenant("a"), Tenant("b", salt="a"))
CACHE_SALTS = ("", "", "", "a", "b")
ERA = 5_000  # requests, after which all texts are new
OUTPUT_TOKEN = 3  # whoever asks
NUM_ROWS = 128
UNKNOWN = 0  # owner of a block that a peer wrote, until it is read


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the simulator asks of a prompt, made as the gateway makes it."""

    tokens: list[int]
    namespace: bytes
    block_hashes: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_ids(self) -> list[int]:
        return list(self.tokens)

    def hash_list(self) -> list[BlockHash]:
        packed = self.block_hashes
        return [BlockHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]


@dataclass(slots=True)
class Seen:
    """What a run showed."""

    num_requests: int = 0
    num_hashes: int = 0
    num_hit_blocks: int = 0  # read by who did not compute them
    num_shared_hashes: int = 0  # one hash, two owners
    num_shared_blocks: int = 0  # read by another owner than wrote them
    num_foretold: int = 0  # placements that counted on blocks which the owner never had
    num_tempting: int = 0  # prompts of which another owner had sent a block's text, and this one had not
    owners: dict[bytes, int] = field(default_factory=dict)  # of each hash of this era
    num_finished: int = 0

    @property
    def num_shared(self) -> int:
        """0, or tenants are not apart."""
        return self.num_shared_hashes + self.num_shared_blocks + self.num_foretold


class Oracle:
    """Who wrote each block of one engine, by the plans that its device is given."""

    def __init__(self, engine: Engine, executor: VirtualExecutor, seen: Seen) -> None:
        self._seen = seen
        self._owner_of = np.zeros(executor.num_blocks, np.int32)
        self._tables: dict[int, list[BlockId]] = {}
        self._owners: dict[int, int] = {}  # by row
        self._executor = executor
        self._launch, executor.launch = executor.launch, self.launch
        pool = engine._scheduler.pool
        self._lease, pool.lease = pool.lease, self.lease

    def lease(self, count: int) -> list[BlockId] | None:
        """A peer may write them."""
        block_ids = self._lease(count)
        if block_ids:
            self._owner_of[block_ids] = UNKNOWN
        return block_ids

    def launch(self, plan: StepPlan) -> None:
        """Checks the blocks that each row will read and write."""
        self._launch(plan)
        admitted = set()
        for init in plan.admitted:
            self._tables[init.row], self._owners[init.row] = [], init.sampling.seed
            self._executor._tokens[init.row] = OUTPUT_TOKEN
            admitted.add(int(init.row))
        for row, block_ids in plan.new_blocks:
            self._tables[row].extend(block_ids)
        counts = zip(
            plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
        )
        reads, writes, readers, writers = [], [], [], []
        for row, computed, scheduled in counts:
            table, owner = self._tables[row], self._owners[row]
            read = table[: -(-computed // BLOCK_SIZE)]
            fresh = table[computed // BLOCK_SIZE : -(-(computed + scheduled) // BLOCK_SIZE)]
            reads += read
            readers += [owner] * len(read)
            writes += fresh
            writers += [owner] * len(fresh)
            self._seen.num_hit_blocks += len(read) if row in admitted else 0
        found = self._owner_of[reads]
        self._seen.num_shared_blocks += int(((found != readers) & (found != UNKNOWN)).sum())
        self._owner_of[reads] = readers
        self._owner_of[writes] = writers


def arrivals(count: int, seen: Seen, salted: bool, seed: int = 0, rate: float = 2500.0) -> Iterator[Arrival]:
    """Prompts of a few words each, so that most begin as others did; each tenant sends each."""
    draws = random.Random(seed)
    hashes = PromptHashes()
    serial = {pair: number for number, pair in enumerate(itertools.product((0, 1), CACHE_SALTS), 1)}
    now, pending = 0.0, []
    for number in range(count):
        if number % ERA == 0:
            seen.owners.clear()
        if pending and (draws.random() < 0.5 or len(pending) > 200):
            who, tokens = pending.pop(draws.randrange(len(pending)))
        else:
            who, tokens = draws.randrange(2), _tokens(draws, number // ERA)
            pending.append((1 - who, tokens))
        salt = draws.choice(CACHE_SALTS)
        owner = serial[who, salt]
        prompt = _prompt(tokens, TENANTS[who] if salted else Tenant(), salt if salted else "", hashes)
        _note(prompt, owner, seen)
        now += draws.expovariate(rate)
        yield Arrival(now, prompt, draws.randint(1, 6), 16, owner, TENANTS[who].name, prompt.namespace)  # type: ignore[arg-type]


def _tokens(draws: random.Random, era: int) -> list[int]:
    tokens = [10 + era]  # of this era alone
    for _ in range(draws.randint(1, 5)):
        tokens += [draws.randint(OUTPUT_TOKEN, OUTPUT_TOKEN + 2)] * draws.randint(1, 12)
    return tokens


def _prompt(tokens: list[int], tenant: Tenant, salt: str, hashes: PromptHashes) -> Prompt:
    request = _as_tenants(GenerationRequest("r", "simulated", tokens, cache_salt=salt), tenant, lambda usage: None)
    made = hash_prompt(request, INFO, hashes)
    return Prompt(tokens, made.namespace, made.block_hashes)


def _note(prompt: Prompt, owner: int, seen: Seen) -> None:
    """One hash, one owner."""
    owners = seen.owners
    plain = hash_blocks(bytes(HASH_BYTES), prompt.tokens, BLOCK_SIZE)
    tempts = False
    for place, one in enumerate(prompt.hash_list()):
        known = owners.get(one)
        if known is None:
            owners[one] = owner
        elif known != owner:
            seen.num_shared_hashes += 1
        seen.num_hashes += 1
        who = owners.setdefault(b"plain" + plain[place * HASH_BYTES : (place + 1) * HASH_BYTES], owner)
        tempts = tempts or (known is None and who != owner)
    seen.num_tempting += tempts
    seen.num_requests += 1


def fuzz_fleet(count: int, salted: bool = True, seed: int = 0) -> Seen:
    """Runs so many requests on three simulated workers; raises where a pool contradicts itself."""
    seen = Seen()
    settings = ClusterSettings(
        roles=("both", "prefill", "decode"),
        block_size=BLOCK_SIZE,
        num_blocks=320,
        max_model_len=512,
        engine=EngineSettings(max_num_requests=32, max_num_batched_tokens=256, min_remote_prefill_tokens=8),
        coast=False,
    )
    namespace = _prompt([0], Tenant(), "", PromptHashes()).namespace
    simulation = Simulation(settings, BatonPolicy, namespace, seed)
    for worker in simulation.workers.values():
        Oracle(worker.engine, worker._executor, seen)
    simulation.run(arrivals(count, seen, salted, seed), 600.0)
    for worker in simulation.workers.values():
        worker.engine.audit()
    seen.num_finished = sum(not record.error for record in simulation.gateway.records)
    return seen


def fuzz_worker(count: int, salted: bool = True, seed: int = 0) -> Seen:
    """Runs so many requests on one engine, its cache events in the router's index."""
    seen, clock = Seen(), Clock()
    device = DeviceModel()
    executor = VirtualExecutor(device, clock, 4096, BLOCK_SIZE, 512, NUM_ROWS)
    limits = EngineSettings(max_num_requests=NUM_ROWS, max_num_batched_tokens=4096)
    engine = Engine(executor, limits, 1, clock)
    Oracle(engine, executor, seen)
    index = PrefixIndex()
    index.receive(kv_pb2.KvSnapshot(worker_id="w", epoch=1, tier=kv_pb2.KV_TIER_DEVICE, first=True, last=True))
    sequence = 0
    for arrival in arrivals(count, seen, salted, seed):
        hashes = arrival.prompt.block_hashes
        if index.lookup(hashes) and seen.owners[hashes[:HASH_BYTES]] != arrival.output_content:
            seen.num_foretold += 1
        engine.submit(_request(arrival, seen.num_requests))
        while engine._scheduler.num_queued > NUM_ROWS:
            seen.num_finished += len(engine.step().finishes)
            sequence += _publish(engine, index, sequence + 1)
    while engine.has_work():
        seen.num_finished += len(engine.step().finishes)
    engine.audit()
    return seen


def _request(arrival: Arrival, number: int) -> Request:
    prompt = arrival.prompt
    return Request(
        request_id=str(number),
        token_ids=TokenIds(prompt.token_ids()),
        num_prompt_tokens=prompt.num_tokens,
        sampling=SamplingParams(temperature=0.0, seed=arrival.output_content),
        stop=StopConditions(arrival.num_output_tokens),
        cache_namespace=arrival.namespace,
        block_hashes=prompt.block_hashes,
    )


def _publish(engine: Engine, index: PrefixIndex, sequence: int) -> int:
    """Publishes the cache's events to the index. Returns the number of batches."""
    events = engine.take_events()
    if not events:
        return 0
    batch = kv_pb2.KvEventBatch(worker_id="w", epoch=1, sequence=sequence)
    for event in events:
        kind = batch.events.add()
        entry = kind.stored if isinstance(event, StoredEvent) else kind.removed
        entry.block_hashes = event.block_hashes
        entry.tier = kv_pb2.KV_TIER_DEVICE
    assert index.apply(batch), "the batches are in order"
    return 1


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("worker", "fleet"))
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    began, cpu = time.monotonic(), time.process_time()
    run = fuzz_worker if arguments.way == "worker" else fuzz_fleet
    seen = run(arguments.requests, seed=arguments.seed)
    print(
        f"{arguments.way}: {seen.num_requests} requests of 2 tenants, {seen.num_finished} finished;"
        f" {seen.num_hashes} block hashes, {seen.num_hit_blocks} blocks read from the cache;"
        f" {seen.num_tempting} prompts went on as another's had and none of their own\n"
        f"shared: {seen.num_shared_hashes} hashes, {seen.num_shared_blocks} blocks; foretold of another's:"
        f" {seen.num_foretold} ({time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU)"
    )
    return 1 if seen.num_shared or not seen.num_hit_blocks else 0


if __name__ == "__main__":
    sys.exit(main())
