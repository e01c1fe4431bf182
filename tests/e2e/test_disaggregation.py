import time

import grpc
import pytest
from support.processes.load import Load
from support.processes.stack import wait_until

from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc


@pytest.fixture(scope="module")
def load_of_32(tandem_stack, prompts, expected_texts):
    """The counters of both workers before and after 32 concurrent chats, and the answers."""
    before = {worker.plan.name: tandem_stack.stats(worker).counters for worker in tandem_stack.workers}
    with Load(tandem_stack, prompts) as load:
        return before, load.texts()


def test_32_concurrent_answers_equal_those_of_a_single_worker(load_of_32, expected_texts):
    assert load_of_32[1] == expected_texts


def test_kv_really_came_from_the_prefill_worker(load_of_32, tandem_stack):
    before, _ = load_of_32
    (decode,) = [worker for worker in tandem_stack.workers if "decode" in worker.plan.name]

    def handed_over():
        """Waits for a hand-over. The router only uses it when it expects a gain, which a busy machine may delay."""
        if tandem_stack.stats(decode).counters.num_transfers > before[decode.plan.name].num_transfers:
            return True
        story = " ".join(f"{time.monotonic_ns()} dogs" for _ in range(20))
        tandem_stack.chat(story, temperature=0, max_tokens=8)
        return False

    wait_until(handed_over, "a prompt comes from the prefill worker", 90)
    after = tandem_stack.stats(decode).counters
    assert after.num_transfers > before[decode.plan.name].num_transfers
    assert after.num_transfer_bytes > before[decode.plan.name].num_transfer_bytes
    assert after.num_failed_transfers == 0
    assert after.num_checksum_errors == 0
    assert after.transfers.num_stranded_blocks == after.transfers.num_retries == 0
    assert sum(after.transfers.exposed_seconds.counts) == after.transfers.num_transfers


def test_no_block_is_held_after_the_load(load_of_32, tandem_stack):
    tandem_stack.wait_all_blocks_back()


def test_the_index_has_the_blocks_of_all_workers(load_of_32, tandem_stack):
    with grpc.insecure_channel(tandem_stack["router"].plan.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for worker in tandem_stack.workers:

            def agrees(worker=worker):
                cached = tandem_stack.stats(worker).num_indexed_blocks
                workers = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10).workers
                (entry,) = [entry for entry in workers if entry.address == worker.plan.address]
                return cached > 0 and entry.num_indexed_blocks == cached

            wait_until(agrees, f"the router indexes the blocks of {worker.plan.name}", 20)


def test_a_cache_reset_starts_a_new_epoch_and_changes_no_answer(tandem_stack, prompts, expected_texts):
    for worker in tandem_stack.workers:
        epoch = tandem_stack.stats(worker).state.epoch
        with grpc.insecure_channel(worker.plan.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            answer = stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest(), timeout=10)
        assert answer.epoch != epoch
        assert tandem_stack.stats(worker).num_cached_blocks == 0
    answer = tandem_stack.chat(prompts[0], temperature=0, max_tokens=48)
    assert answer["choices"][0]["message"]["content"] == expected_texts[0]
