"""A worker with host memory, through its service."""

from __future__ import annotations

from support.processes.worker_harness import running_worker, submit


async def test_a_prompt_is_restored_from_host_memory_through_the_service(free_port: int) -> None:
    prompt = [5 + number * 7 % 3000 for number in range(321)]
    # 0.4 GB are 190 blocks of the model that the simulator stands for.
    async with running_worker(free_port, num_blocks=48, host_cache_gb=0.4, sim_slowness=1.0) as worker:
        stream = worker.stream()
        (first,) = await stream.generate(submit(0, prompt))
        tokens = list(first.tokens)
        for number in range(1, 5):
            await stream.generate(submit(0, [number, *prompt], request_id=f"other-{number}"))
        (again,) = await stream.generate(submit(0, prompt, request_id="again"))
        assert again.tokens == tokens
        assert again.finish is not None
        assert again.finish.num_cached_tokens == 320
        stats = await worker.until_idle()
        assert stats.counters.host_cache.num_hit_tokens >= 160
        assert stats.counters.host_cache.num_restored_blocks * 16 == stats.counters.host_cache.num_hit_tokens
        load = stats.state.load
        assert load.num_host_blocks == 190
        assert 0 < load.num_cached_host_blocks <= 190
        assert load.restore_bytes_per_second > 0
