"""The worker as a service: real gRPC on loopback, the simulator as thread or process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.processes import ports
from support.processes.engine_processes import engine_of, engines_of
from support.processes.stack import wait_until
from support.processes.worker_harness import Worker, running_worker, sampling, submit

from baton.rpc.errors import InternalError, ServiceError
from baton.v1 import control_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import server
from baton.worker.config import WorkerConfig
from baton.worker.link.liveness import is_stopped


@pytest.fixture
async def worker(free_port: int) -> AsyncIterator[Worker]:
    async with running_worker(free_port) as running:
        yield running


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def health(worker: Worker) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


async def test_a_generation_streams_its_tokens_and_ends_with_its_counts(worker: Worker) -> None:
    stream = worker.stream()
    (slot,) = await stream.generate(submit(3, list(range(5, 45)), max_tokens=10))
    assert len(slot.tokens) == 10
    assert slot.finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert slot.finish.num_cached_tokens == 0
    (again,) = await stream.generate(submit(3, list(range(5, 45)), max_tokens=10))
    assert again.finish.num_cached_tokens == 32
    assert again.tokens == slot.tokens


async def test_many_requests_over_one_stream_have_the_output_of_each_alone(worker: Worker) -> None:
    prompts = [[5 + i, 6, 7 + i] * (1 + i % 9) for i in range(100)]
    together = worker.stream()
    slots = await together.generate(*(submit(i, prompt, max_tokens=12) for i, prompt in enumerate(prompts)))
    alone = worker.stream()
    for i in (0, 17, 99):
        (one,) = await alone.generate(submit(i, prompts[i], max_tokens=12))
        assert one.tokens == slots[i].tokens
    assert (await worker.until_idle()).counters.num_finished == 103


async def test_streams_share_a_worker_and_not_their_slots(worker: Worker) -> None:
    first, second = worker.stream(), worker.stream()
    (a,), (b,) = await asyncio.gather(
        first.generate(submit(0, [5, 6, 7])), second.generate(submit(0, [9, 9, 9], max_tokens=5))
    )
    assert (len(a.tokens), len(b.tokens)) == (8, 5)


async def test_logprobs_come_for_each_token_of_the_requests_that_ask(worker: Worker) -> None:
    asking, other = await worker.stream().generate(
        submit(0, [5, 6], max_tokens=4, sampling=sampling(logprobs=2)), submit(1, [5, 6], max_tokens=4)
    )
    assert asking.tokens == other.tokens
    assert [len(entry.top_token_ids) for entry in asking.logprobs] == [2] * 4
    assert other.logprobs == []


async def test_a_request_behind_a_full_batch_is_reported_as_waiting_until_it_starts(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0, max_num_requests=1) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5, 6], max_tokens=8), submit(1, [7, 8], max_tokens=2))
        waiting, started = [], []
        while not stream.slots[1].ended:
            frame = await stream.read()
            assert not stream.slots[1].tokens or started, "a token came before the report of the start"
            waiting += frame.waiting_slots
            started += frame.started_slots
        assert (waiting, started) == ([1], [1])


async def test_a_resumed_generation_continues_where_the_other_worker_stopped(worker: Worker) -> None:
    stream = worker.stream()
    (whole,) = await stream.generate(submit(0, [5, 6, 7], max_tokens=12))
    resume = worker_pb2.ResumeState(output_token_ids=whole.tokens[:5])
    (rest,) = await stream.generate(submit(1, [5, 6, 7], max_tokens=12, resume=resume))
    assert rest.tokens == whole.tokens[5:]


async def test_a_generation_that_only_lost_its_finish_gets_it(worker: Worker) -> None:
    resume = worker_pb2.ResumeState(output_token_ids=[9] * 8)
    (slot,) = await worker.stream().generate(submit(0, [5, 6, 7], max_tokens=8, resume=resume))
    assert slot.tokens == []
    assert slot.finish.reason == types_pb2.FINISH_REASON_LENGTH


async def test_an_abort_is_answered_with_a_finish_and_frees_the_blocks(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, list(range(5, 100)), max_tokens=5000))
        while not stream.slots[0].tokens:
            await stream.read()
        await stream.send(aborts=(0, 77))
        (slot,) = await stream.until_ended(0)
        assert slot.finish.reason == types_pb2.FINISH_REASON_ABORT
        await worker.until_idle()
        (again,) = await worker.stream().generate(submit(0, [5], max_tokens=3))
        assert len(again.tokens) == 3


async def test_a_cut_stream_frees_the_blocks_of_all_its_requests(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(*(submit(i, list(range(5, 60)), max_tokens=5000) for i in range(20)))
        while len(stream.slots) < 20:
            await stream.read()
        assert (await worker.stats()).num_held_blocks > 0
        stream.call.cancel()
        stats = await worker.until_idle(2.0)
        assert stats.counters.num_aborted == 20
        assert stats.state.load.num_running == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, 4096]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 9000}, "prompt_token_ids"),
        ({"cache_namespace": b"short"}, "cache_namespace"),
        ({"stop": types_pb2.StopConditions()}, "stop.max_tokens"),
        ({"stop": types_pb2.StopConditions(max_tokens=4, stop_token_ids=[99999])}, "stop.stop_token_ids"),
        ({"sampling": types_pb2.SamplingParams(temperature=0)}, "sampling.top_p"),
        ({"sampling": sampling(temperature=2.5)}, "sampling.temperature"),
        ({"sampling": sampling(top_p=0)}, "sampling.top_p"),
        ({"sampling": sampling(repetition_penalty=float("nan"))}, "sampling.repetition_penalty"),
        ({"sampling": sampling(logit_bias_token_ids=[5])}, "sampling.logit_bias_values"),
        ({"resume": worker_pb2.ResumeState(output_token_ids=[5] * 9)}, "resume.output_token_ids"),
    ],
)
async def test_a_bad_submit_fails_its_slot_and_nothing_else(worker: Worker, fields: dict, field: str) -> None:
    stream = worker.stream()
    bad, good = await stream.generate(submit(0, [5, 6], **fields), submit(1, [5, 6]))
    assert bad.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert bad.failure.detail.field == field
    assert not bad.failure.detail.retryable
    assert len(good.tokens) == 8


async def test_an_unknown_adapter_is_unsupported(worker: Worker) -> None:
    (slot,) = await worker.stream().generate(submit(0, [5], adapter="pirate"))
    assert slot.failure.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert "pirate" in slot.failure.message


async def test_a_slot_in_use_ends_both_of_its_requests(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=5000))
        while not stream.slots[0].tokens:
            await stream.read()
        (slot,) = await stream.generate(submit(0, [6], max_tokens=5000))
        assert slot.failure.detail.field == "slot"
        await worker.until_idle()


async def test_a_full_queue_refuses_with_a_retry_time(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0, max_num_requests=1, max_queue=2) as worker:
        stream = worker.stream()
        await stream.send(*(submit(i, [5 + i], max_tokens=3000) for i in range(5)))
        (refused,) = await stream.until_ended(4)
        assert refused.failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.failure.detail.retryable
        assert refused.failure.detail.retry_after_ms > 0


async def test_a_timeout_fails_the_request_with_deadline_exceeded(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        (slot,) = await worker.stream().generate(submit(0, [5], max_tokens=5000, timeout_ms=100))
        assert slot.failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        await worker.until_idle()


async def test_bytes_that_are_no_message_end_the_stream_with_invalid_argument(worker: Worker) -> None:
    call = worker.channel.stream_stream("/baton.v1.WorkerService/GenerateStream")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (slot,) = await worker.stream().generate(submit(0, [5]))
    assert len(slot.tokens) == 8


async def test_the_state_names_the_worker_its_model_and_its_layout(worker: Worker) -> None:
    state = await worker.state()
    assert state.worker_id == worker.address.replace(":", "-")
    assert state.role == types_pb2.WORKER_ROLE_BOTH
    assert state.model.vocab_size == 4096
    assert len(state.model.digest) == 16
    assert state.layout.block_size == 16
    assert state.load.num_free_blocks == state.load.num_blocks == 8192
    assert not state.draining


async def test_the_state_is_sent_again_when_load_comes_and_when_it_goes(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        watch = worker_pb2_grpc.WorkerServiceStub(worker.channel).WatchState(
            worker_pb2.WatchStateRequest(max_interval_ms=60_000)
        )
        assert (await watch.read()).state.load.num_running == 0
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=5000))
        async with asyncio.timeout(10):
            while (await watch.read()).state.load.num_running != 1:
                pass
        stream.call.cancel()
        async with asyncio.timeout(10):
            while (await watch.read()).state.load.num_running != 0:
                pass
        watch.cancel()


async def test_a_reset_forgets_the_cache_and_starts_an_epoch(worker: Worker) -> None:
    prompt = list(range(5, 85))
    stream = worker.stream()
    await stream.generate(submit(0, prompt))
    (warm,) = await stream.generate(submit(1, prompt))
    assert warm.finish.num_cached_tokens == 64
    before = (await worker.state()).epoch
    epoch = (await worker.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())).epoch
    assert epoch > before
    assert (await worker.state()).epoch == epoch
    assert (await worker.stats()).num_cached_blocks == 0
    (cold,) = await stream.generate(submit(2, prompt))
    assert cold.finish.num_cached_tokens == 0
    assert cold.tokens == warm.tokens


async def test_a_drain_refuses_new_requests_and_lets_running_ones_finish(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=100))
        while not stream.slots[0].tokens:
            await stream.read()
        answer = await worker.control.Drain(control_pb2.DrainRequest())
        assert answer.num_requests == 1
        assert await health(worker) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await worker.state()).draining
        await stream.send(submit(1, [5]))
        running, refused = await stream.until_ended(0, 1)
        assert len(running.tokens) == 100
        assert refused.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert refused.failure.detail.retryable


async def test_a_too_long_drain_aborts_remaining_requests(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=8000))
        while not stream.slots[0].tokens:
            await stream.read()
        await worker.control.Drain(control_pb2.DrainRequest(timeout_ms=100))
        (slot,) = await stream.until_ended(0)
        assert slot.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert slot.failure.detail.retryable
        await worker.until_idle()


async def test_a_stop_drains_and_returns(free_port: int) -> None:
    async with running_worker(free_port, sim_slowness=1.0, drain_timeout=60.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=50))
        while not stream.slots[0].tokens:
            await stream.read()
        worker.stop.set()
        (slot,) = await stream.until_ended(0)
        assert len(slot.tokens) == 50
        async with asyncio.timeout(30):
            await worker.serving
        assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE


async def test_reflection_and_health_know_the_services(worker: Worker) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {"baton.v1.WorkerService", "baton.v1.ControlService", "grpc.health.v1.Health"} <= names
    assert await health(worker) == health_pb2.HealthCheckResponse.SERVING


async def test_the_engine_as_a_process_serves_and_leaves_nothing_behind(free_port: int) -> None:
    async with running_worker(free_port, engine_process=True) as worker:
        engine = engine_of()
        (slot,) = await worker.stream().generate(submit(0, [5, 6, 7]))
        assert len(slot.tokens) == 8
    assert has_ended(engine)


async def test_a_stop_before_the_worker_is_ready_is_quick(free_port: int) -> None:
    config = WorkerConfig(listen=f"127.0.0.1:{free_port}", executor="sim", model="none")
    others = set(psutil.Process().children())
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(10):
        await server.serve(config, stop)
    assert set(psutil.Process().children()) <= others


async def test_a_killed_engine_ends_streams_at_once_and_the_service_with_the_reason(free_port: int) -> None:
    async with running_worker(free_port, engine_process=True, sim_slowness=1.0) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=5000))
        while not stream.slots[0].tokens:
            await stream.read()
        engine_of().send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):  # the watch over a hung engine takes two minutes
            with contextlib.suppress(Exception):
                while True:  # what came before the end is read first
                    await stream.read()
            assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(InternalError, match="SIGKILL"):
            await worker.serving


async def test_a_hung_engine_is_ended_by_the_watch(free_port: int) -> None:
    async with running_worker(free_port, engine_process=True, step_timeout=2.0) as worker:
        engine_of().send_signal(signal.SIGSTOP)
        with pytest.raises(InternalError, match="hung"):
            async with asyncio.timeout(30):
                await worker.serving


async def test_a_stopped_engine_is_ended_soon_while_its_gateway_gets_no_frames(free_port: int) -> None:
    async with running_worker(free_port, engine_process=True) as worker:
        stream = worker.stream()
        await stream.call.write(worker_pb2.GenerateStreamRequest(ping=1))
        assert (await stream.call.read()).pong == 1
        engine = engine_of()
        engine.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_until, lambda: is_stopped(engine.pid), "the engine's stop")
        async with asyncio.timeout(30):
            while not worker.serving.done():
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream ends first
                    await stream.call.write(worker_pb2.GenerateStreamRequest(ping=2))
                await asyncio.wait([worker.serving], timeout=0.2)
        with pytest.raises(InternalError, match="hung: it is stopped"):
            await worker.serving


async def test_a_long_step_is_no_hang(free_port: int) -> None:
    fields = {"engine_process": True, "sim_slowness": 1.0, "sim_step_seconds": 1.0, "engine_silence_ms": 50}
    async with running_worker(free_port, **fields) as worker:
        stream = worker.stream()
        await stream.send(submit(0, [5], max_tokens=2))
        for ping in range(1, 11):
            await stream.call.write(worker_pb2.GenerateStreamRequest(ping=ping))
            await asyncio.sleep(0.1)
        (slot,) = await stream.until_ended(0)
        assert len(slot.tokens) == 2


async def test_an_engine_whose_front_dies_ends_too(free_port: int) -> None:
    code = (
        "import asyncio; from baton.worker.config import WorkerConfig; from baton.worker.server import serve\n"
        f"config = WorkerConfig(listen='127.0.0.1:{free_port}', executor='sim', model='none')\n"
        "asyncio.run(serve(config, asyncio.Event()))"
    )
    front = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await asyncio.to_thread(wait_until, lambda: engines_of(front.pid), "the engine's process")
    engine = engine_of(front.pid)
    front.kill()
    await front.wait()
    await asyncio.to_thread(wait_until, lambda: has_ended(engine), "the engine's end", 10.0)


async def test_a_broken_model_is_one_clear_error(free_port: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{ broken")
    with pytest.raises(ServiceError, match=r"config\.json cannot be read") as caught:
        async with running_worker(free_port, engine_process=True, model=str(tmp_path)):
            pass
    assert caught.value.field == "model"


async def test_a_port_in_use_names_the_address(worker: Worker) -> None:
    with pytest.raises(ServiceError, match=worker.address):
        await server.serve(worker.config, asyncio.Event())


async def test_metrics_are_those_of_the_moment(free_port: int) -> None:
    (metrics_port,) = ports.free_ports(1)

    def scrape() -> str:
        with urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5) as response:
            return response.read().decode()

    async with running_worker(free_port, metrics_listen=f"127.0.0.1:{metrics_port}") as worker:
        await worker.stream().generate(submit(0, [5, 6, 7]))
        text = ""
        while 'baton_worker_output_tokens_total{model_name="none"} 8.0' not in text:
            # An engine that is busy is not waited for: the scrape shows its last answer.
            text = await asyncio.to_thread(scrape)
        assert 'baton_worker_requests_total{ending="finished",model_name="none"} 1.0' in text
        assert "baton_worker_kv_usage" in text
