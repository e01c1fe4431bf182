from __future__ import annotations

import asyncio
import contextlib
import logging

from baton.v1 import control_pb2
from baton.worker.front.stats_log import line_of, log_stats, stats_between


def stats(prompt=0, cached=0, output=0, running=0, waiting=0, free=100, preemptions=0):
    made = control_pb2.GetStatsResponse()
    counters, load = made.counters, made.state.load
    counters.num_prompt_tokens, counters.num_cached_tokens, counters.num_output_tokens = prompt, cached, output
    counters.num_preemptions = preemptions
    load.num_running, load.queue_depth, load.num_blocks, load.num_free_blocks = running, waiting, 100, free
    return made


def test_the_line_has_throughput_load_and_cache():
    facts = stats_between(stats(100, 0, 50), stats(1100, 250, 1050, 3, 2, 75, 1), 10.0)
    assert facts is not None
    assert line_of(facts) == (
        "prompt 100.0 tokens/s, output 100.0 tokens/s, running 3, waiting 2, KV 25.0 %, prefix hits 25.0 %, "
        "preemptions 1"
    )


def test_without_prompts_there_is_no_hit_rate():
    facts = stats_between(stats(), stats(output=20, running=1), 2.0)
    assert facts is not None
    assert line_of(facts) == "prompt 0.0 tokens/s, output 10.0 tokens/s, running 1, waiting 0, KV 0.0 %"


async def test_an_idle_worker_logs_nothing(caplog):
    states = iter([stats(), stats(), stats(), stats(8, 0, 8), stats(8, 0, 8)])
    read_all = asyncio.Event()

    async def read():
        try:
            return next(states)
        except StopIteration:
            read_all.set()
            return stats(8, 0, 8)

    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(log_stats(read, 0.001))
        await read_all.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    lines = [record.message for record in caplog.records if "tokens/s" in record.message]
    assert len(lines) == 1
