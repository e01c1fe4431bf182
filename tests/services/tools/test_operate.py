"""`baton drain` and its siblings with a real worker, and errors in their arguments."""

from __future__ import annotations

import asyncio

import pytest
from support.processes.worker_harness import running_worker

from baton.services import cli
from baton.services.tools import operate
from baton.v1 import control_pb2


async def baton(*words: str) -> int:
    return await asyncio.to_thread(cli.main, words, {})


async def test_a_worker_is_drained_paused_put_to_sleep_woken_and_reloaded_by_name(free_port, capsys):
    async with running_worker(free_port) as worker:
        for words, activity in (
            (("sleep", worker.address, "--level=2", "--mode=keep"), control_pb2.WORKER_ACTIVITY_ASLEEP),
            (("wake-up", worker.address, "--part=weights"), control_pb2.WORKER_ACTIVITY_ASLEEP),
            (("wake-up", worker.address), control_pb2.WORKER_ACTIVITY_SERVING),
            (("pause", worker.address, "--mode=wait", "--timeout=5"), control_pb2.WORKER_ACTIVITY_PAUSED),
            (("reload", worker.address), control_pb2.WORKER_ACTIVITY_PAUSED),
            (("resume", worker.address), control_pb2.WORKER_ACTIVITY_SERVING),
            (("switch-role", worker.address, "--role=prefill"), control_pb2.WORKER_ACTIVITY_SERVING),
            (("drain", worker.address), control_pb2.WORKER_ACTIVITY_DRAINING),
        ):
            assert await baton(*words) == operate.EXIT_OK, words
            assert (await worker.stats()).activity == activity
    printed = capsys.readouterr().out
    assert "num_freed_bytes: " in printed
    assert "digest: " in printed
    assert "before: WORKER_ROLE_" in printed


async def test_a_refusal_has_the_workers_message(free_port, capsys):
    async with running_worker(free_port) as worker:
        assert await baton("sleep", worker.address) == operate.EXIT_OK
        assert await baton("resume", worker.address) == operate.EXIT_FAILED
    assert "call WakeUp before Resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["drain"],
        ["drain", "--timeout=1"],
        ["drain", "nowhere"],
        ["sleep", "127.0.0.1:1", "--level=3"],
        ["switch-role", "127.0.0.1:1"],
    ],
)
def test_words_that_make_no_sense_are_refused_before_anybody_is_asked(words, capsys):
    assert cli.main(words, {}) == operate.EXIT_MISCONFIGURED
    assert f"baton {words[0]}: " in capsys.readouterr().err


def test_every_verb_is_listed(capsys):
    assert set(cli.OPERATIONS) == set(operate.VERBS)
    assert cli.main(["--help"], {}) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in operate.VERBS)
