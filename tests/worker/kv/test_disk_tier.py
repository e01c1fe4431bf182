"""Blocks on disk: files are whole and right or not used, their bytes are bounded, and an engine finds them again."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.engine_harness import BLOCK_SIZE, Rig, expected_for, make_executor, make_request, prompt_of

from baton.llm import LLM, SamplingParams
from baton.rpc.errors import DataLoss, InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockHash
from baton.worker.engine.engine import Engine
from baton.worker.executors.sim.executor import SimExecutor
from baton.worker.kv.disk_tier.folder import HEADER_BYTES, BlockFolder
from baton.worker.kv.disk_tier.index import DiskIndex
from baton.worker.kv.disk_tier.tier import DiskTier
from baton.worker.scheduling.settings import EngineSettings

LAYOUT, OTHER = bytes(16), bytes([1]) * 16
SLOT = 96
SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
NO_DISK = Path("/none")


def key_of(number: int, group: int = 0) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little") + (bytes([group]) if group else b""))


def slots_of(number: int, count: int = 1) -> list[memoryview]:
    return [memoryview(bytearray(random.Random(number * 10 + slot).randbytes(SLOT))) for slot in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BlockFolder]:
    made = BlockFolder(tmp_path, LAYOUT, SLOT)
    yield made
    made.close()


def files_of(root: Path) -> list[Path]:
    return sorted((root / LAYOUT.hex()).glob("*.kv"))


def put(folder: BlockFolder, number: int, count: int = 1, group: int = 0) -> None:
    folder.publish(folder.write(key_of(number, group), slots_of(number, count)))


# The files.


@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_a_block_is_read_as_it_was_written(folder: BlockFolder, count: int, group: int):
    put(folder, 1, count, group)
    read = [memoryview(bytearray(SLOT)) for _ in range(count)]
    folder.read(key_of(1, group), read)
    assert read == slots_of(1, count)
    found = folder.find()
    assert found.sizes == {key_of(1, group): folder.size_of(count)}
    assert folder.num_slots_of(folder.size_of(count)) == count


def test_no_byte_of_a_file_can_change_unnoticed(folder: BlockFolder, tmp_path: Path):
    put(folder, 1)
    (path,) = files_of(tmp_path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataLoss, match=r"damaged|not the block"):
            folder.read(key_of(1), slots_of(0))
    for length in (0, 8, HEADER_BYTES, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataLoss, match=r"torn|not the block"):
            folder.read(key_of(1), slots_of(0))
    path.write_bytes(whole + b"x")
    with pytest.raises(DataLoss, match="damaged"):
        folder.read(key_of(1), slots_of(0))


def test_a_file_under_another_name_or_of_another_layout_is_not_used(tmp_path: Path):
    folder, other = BlockFolder(tmp_path, LAYOUT, SLOT), BlockFolder(tmp_path, OTHER, SLOT)
    put(folder, 1)
    (path,) = files_of(tmp_path)
    path.with_name(f"{key_of(2).hex()}.kv").write_bytes(path.read_bytes())
    with pytest.raises(DataLoss, match="not the block"):
        folder.read(key_of(2), slots_of(0))
    (tmp_path / OTHER.hex() / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DataLoss, match="not the block"):
        other.read(key_of(1), slots_of(0))


def test_torn_files_are_removed_and_foreign_ones_left_alone(folder: BlockFolder, tmp_path: Path):
    put(folder, 1)
    own = tmp_path / LAYOUT.hex()
    (own / f"{key_of(2).hex()}.kv").write_bytes(b"short")
    (own / f"{key_of(3).hex()}.kv.part").write_bytes(bytes(folder.size_of(1)))
    for foreign in ("notes.txt", "zz.kv", f"{key_of(4).hex().upper()}A.kv"):
        (own / foreign).write_text("mine")
    (own / f"{key_of(5).hex()}.kv").symlink_to(tmp_path / "elsewhere")
    found = folder.find()
    assert list(found.sizes) == [key_of(1)]
    assert (found.num_torn, found.num_foreign) == (2, 4)
    assert {path.name for path in own.iterdir()} == {
        "lock",
        "notes.txt",
        "zz.kv",
        *(f"{key_of(4).hex().upper()}A.kv", f"{key_of(1).hex()}.kv", f"{key_of(5).hex()}.kv"),
    }


def test_one_worker_has_a_folder_at_a_time(folder: BlockFolder, tmp_path: Path):
    with pytest.raises(InvalidRequest, match="another worker of the same model has it; give each one a folder"):
        BlockFolder(tmp_path, LAYOUT, SLOT)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"disk_cache_dir=.*file: .*give a folder that this worker may write"):
        BlockFolder(tmp_path / "file", LAYOUT, SLOT)


@given(st.lists(st.tuples(st.sampled_from("wftl"), st.integers(0, 9), st.integers(1, 3)), max_size=60))
def test_the_index_is_a_bounded_lru(steps: list[tuple[str, int, int]]):
    index, model = DiskIndex(6, {}), {}  # the least recently used first
    for action, number, size in steps:
        key = key_of(number)
        if action in "wf":
            evicted = index.begin(key, size)
            assert (evicted is None) == (key in model)
            if evicted is None:
                continue
            gone = []
            while sum(model.values()) + size > 6:
                gone.append(next(iter(model)))
                del model[gone[-1]]
            assert evicted == gone
            index.end(key, succeeded=action == "w")
            if action == "w":
                model[key] = size
        elif action == "t":
            index.touch(key)
            if key in model:
                model[key] = model.pop(key)
        else:
            assert index.lose(key) == (model.pop(key, None) is not None)
        assert index.num_bytes == sum(model.values()) <= 6
        assert [known for known in map(key_of, range(10)) if known in index] == sorted(model)


# The threads.


def until_ended(tier: DiskTier, count: int) -> list:
    ended = []
    deadline = time.monotonic() + 20
    while len(ended) < count:
        assert time.monotonic() < deadline
        tier.wait(0.05)
        ended += tier.poll()
    return ended


def make_tier(root: Path, capacity: int = 10_000) -> DiskTier:
    return DiskTier(BlockFolder(root, LAYOUT, SLOT), capacity, lambda: LAYOUT)


def test_files_are_bounded_also_those_of_an_earlier_worker(tmp_path: Path):
    tier = make_tier(tmp_path)
    for number in range(8):
        assert tier.begin_write(key_of(number), slots_of(number))
    until_ended(tier, 8)
    size = tier.folder.size_of(1)
    for number in range(8):  # clocks of file systems are coarse
        os.utime(files_of(tmp_path)[0].with_name(f"{key_of(number).hex()}.kv"), ns=(number, number))
    tier.close()
    tier = make_tier(tmp_path, 5 * size)
    assert [number for number in range(8) if key_of(number) in tier.index] == [3, 4, 5, 6, 7]
    assert tier.begin_write(key_of(9), slots_of(9))
    until_ended(tier, 1)
    tier.close()
    assert sum(path.stat().st_size for path in files_of(tmp_path)) == 5 * size
    assert not make_tier(tmp_path, size - 1).begin_write(key_of(1), slots_of(1))


def test_what_was_being_written_at_a_reset_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier = make_tier(tmp_path)
    written, go = threading.Event(), threading.Event()
    write = tier.folder.write

    def slow(key, slots):
        path = write(key, slots)
        written.set()
        assert go.wait(20)
        return path

    monkeypatch.setattr(tier.folder, "write", slow)
    assert tier.begin_write(key_of(1), slots_of(1))
    assert written.wait(20)
    tier.reset()
    go.set()
    (ended,) = until_ended(tier, 1)
    tier.close()
    assert not ended.succeeded
    assert len(tier.index) == tier.index.num_bytes == 0
    assert files_of(tmp_path) == []


# The engine.


def make_disk_rig(root: Path, num_host_blocks: int = 64, capacity: int = 10**8, **values: object) -> Rig:
    executor: SimExecutor = make_executor(num_blocks=40, num_host_blocks=num_host_blocks)
    assert executor.host is not None
    tier = DiskTier(BlockFolder(root, LAYOUT, len(executor.host.slot_bytes(0))), capacity, lambda: LAYOUT)  # type: ignore[arg-type]
    defaults: dict[str, object] = {
        "max_num_requests": 32,
        "max_num_batched_tokens": 256,
        "min_remote_prefill_tokens": 4,
        "min_host_hit_tokens": 0,
    }
    return Rig(Engine(executor, EngineSettings(**{**defaults, **values}), 1, disk=tier), executor)  # type: ignore[arg-type]


def disk_of(rig: Rig) -> DiskTier:
    blocks = rig.engine._scheduler.disk
    assert blocks is not None
    return blocks.disk


def flood(rig: Rig, count: int, salt: int = 1000) -> None:
    """Other prompts pass through the pool and host memory; what is copied there is written."""
    blocks, host = rig.engine._scheduler.disk, rig.executor.host
    assert blocks is not None
    assert host is not None
    staging = host.capacity()
    for number in range(count):
        rig.run(make_request(prompt_of(152, salt + number), 1))
        until = time.monotonic() + 20
        while blocks._writing or blocks._kept or host.capacity() < staging:
            assert time.monotonic() < until
            rig.engine.step()
            time.sleep(0.001)


def test_a_prefix_that_left_host_memory_is_read_from_disk(tmp_path: Path):
    rig = make_disk_rig(tmp_path)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    flood(rig, 5)
    assert disk_of(rig).counters.num_dropped_blocks == 0
    again = make_request(prompt)
    rig.run(again)
    assert rig.seen.tokens[again.request_id] == expected_for(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 80
    assert disk_of(rig).counters.num_loaded_blocks == 20
    rig.assert_nothing_held()
    disk_of(rig).close()


def test_a_prefix_is_found_after_a_restart_and_damaged_blocks_are_computed(tmp_path: Path):
    rig = make_disk_rig(tmp_path)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    flood(rig, 2)
    disk_of(rig).close()
    rig = make_disk_rig(tmp_path)
    again = make_request(prompt)
    rig.run(again)
    assert rig.seen.tokens[again.request_id] == expected_for(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 80
    disk_of(rig).close()
    for path in files_of(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 255
        path.write_bytes(data)
    rig = make_disk_rig(tmp_path)
    third = make_request(prompt)
    rig.run(third)
    assert rig.seen.tokens[third.request_id] == expected_for(third)
    assert rig.seen.finishes[third.request_id].num_cached_tokens == 0
    assert disk_of(rig).counters.num_damaged_files == 20
    rig.assert_nothing_held()
    disk_of(rig).close()


def test_requests_with_one_prefix_share_a_read_and_an_ended_one_leaves(tmp_path: Path):
    rig = make_disk_rig(tmp_path)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    flood(rig, 2)
    disk_of(rig).close()
    rig = make_disk_rig(tmp_path)
    requests = [make_request(prompt) for _ in range(3)]
    for request in requests:
        rig.engine.submit(request)
    assert rig.engine._scheduler.num_queued == 3
    rig.engine.abort(requests[1].request_id)
    assert rig.engine._scheduler.num_queued == 2
    rig.run()
    assert disk_of(rig).counters.num_loaded_blocks == 20
    for request in (requests[0], requests[2]):
        assert rig.seen.tokens[request.request_id] == expected_for(request)
        assert rig.seen.finishes[request.request_id].num_cached_tokens == 80
    rig.assert_nothing_held()
    disk_of(rig).close()


def test_a_reset_forgets_the_disk_too(tmp_path: Path):
    rig = make_disk_rig(tmp_path)
    prompt = prompt_of(81)
    rig.run(make_request(prompt, 1))
    flood(rig, 2)
    rig.engine.reset_prefix_cache()
    again = make_request(prompt)
    rig.run(again)
    assert rig.seen.tokens[again.request_id] == expected_for(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0
    disk_of(rig).close()
    kept = {path.stem for path in files_of(tmp_path)}
    assert kept == {key.hex() for key in disk_of(rig).index._sizes}


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_with_resets_and_damage_never_yields_another_token(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    prompts = [prompt_of(chance.choice([17, 41, 81, 121]), salt) for salt in range(9)]
    for _ in range(3):  # workers, one after the other
        capacity = chance.choice([3_000, 20_000, 10**7])
        rig = make_disk_rig(tmp_path, num_host_blocks=chance.choice([6, 24, 64]), capacity=capacity)
        requests = []
        for _ in range(14):
            batch = [make_request(chance.choice(prompts), 3) for _ in range(chance.choice([1, 1, 4]))]
            for request in batch:
                rig.engine.submit(request)
            if chance.random() < 0.2:
                rig.step()
                rig.engine.abort(batch.pop().request_id)
            rig.run()
            requests += batch
            if chance.random() < 0.1:
                rig.engine.reset_prefix_cache()
            if chance.random() < 0.3 and (files := files_of(tmp_path)):
                chance.choice(files).write_bytes(chance.randbytes(chance.choice([0, 50, 500])))
        for request in requests:
            assert rig.seen.tokens[request.request_id] == expected_for(request)
        rig.assert_nothing_held()
        disk_of(rig).close()
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= capacity + 14 * 500


# The real model, whose layers with windows have groups of their own, in a process of its own.


def generate(root: Path, *prompts: list[int], **more: object) -> list[tuple[list[int], int]]:
    """Returns each prompt's tokens and its cached tokens, of a worker that starts and ends here."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    disk = {"host_cache_gb": 0.05, "disk_cache_dir": str(root), "disk_cache_gb": 1.0, **more} if root != NO_DISK else {}
    with LLM(str(SAMPLE), num_blocks=160, max_model_len=1024, max_num_batched_tokens=1024, **disk) as llm:
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]


def test_a_worker_of_the_sample_model_finds_its_prefixes_after_a_restart(tmp_path: Path):
    chance = random.Random(0)
    prompts = [[chance.randrange(5, 4000) for _ in range(700)] for _ in range(6)]
    expected = [tokens for tokens, _ in generate(NO_DISK, *prompts)]
    first = generate(tmp_path, *prompts)
    again = generate(tmp_path, prompts[0], prompts[1])
    assert [tokens for tokens, _ in first] == expected
    assert [tokens for tokens, _ in again] == expected[:2]
    assert [cached for _, cached in again] == [688, 688]
    # Bits may differ where tokens are computed in another way: such a worker does not read these files.
    assert generate(tmp_path, prompts[0], batch_invariant=True)[0][1] == 0


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"disk_cache_dir=.* and disk_cache_gb=0 go together"):
        WorkerConfig(model=str(SAMPLE), disk_cache_dir=str(tmp_path)).validate()
    with pytest.raises(InvalidRequest, match=r"disk_cache_dir=.* is below host memory: set host_cache_gb too"):
        WorkerConfig(model=str(SAMPLE), disk_cache_dir=str(tmp_path), disk_cache_gb=1.0).validate()


assert BLOCK_SIZE == 4, "prompts above are of whole blocks and a token"
