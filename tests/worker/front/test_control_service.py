"""ControlService over real gRPC on the simulator and the CPU engine: responses, and effects on requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import ports
from support.processes.worker_harness import Worker, running_worker, submit

from baton.v1 import control_pb2 as pb
from baton.v1 import types_pb2

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "storyteller-7m"
LONG = list(range(5, 69))
NUM_TOKENS = 120


@pytest.fixture
async def worker(free_port: int) -> AsyncIterator[Worker]:
    # 2 ms a step: what runs is still running when a call arrives.
    fields = {"model": str(MODEL), "sim_slowness": 1.0, "sim_step_seconds": 2e-3, "sim_prefill_token_seconds": 0.0}
    async with running_worker(free_port, **fields) as running:
        yield running


@pytest.fixture
async def cpu_worker(free_port: int) -> AsyncIterator[Worker]:
    fields = {"model": str(MODEL), "executor": "cpu", "engine_process": True, "threads": 1, "num_blocks": 256}
    async with running_worker(free_port, **fields) as running:
        yield running


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model with some weights changed."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(MODEL, folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(7_000_000)
        mirrored = bytes(reversed(weights.read(4096)))
        weights.seek(7_000_000)
        weights.write(mirrored)
    return folder


@pytest.fixture(scope="module")
def other_architecture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose config has another vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "wider"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    return folder


async def health(worker: Worker) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


async def begun(worker: Worker, slot: int = 0, **fields: object):
    """A stream on which a long generation has its first tokens."""
    stream = worker.stream()
    await stream.send(submit(slot, LONG, max_tokens=NUM_TOKENS, **fields))
    async with asyncio.timeout(20):
        while not stream.slots[slot].tokens:
            await stream.read()
    return stream


async def undisturbed(worker: Worker) -> list[int]:
    (slot,) = await worker.stream().generate(submit(0, LONG, max_tokens=NUM_TOKENS))
    return slot.tokens


def code_of(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return caught.value.code()


@pytest.mark.parametrize("stop", ["pause", "sleep 1", "sleep 2", "reload"])
async def test_kept_requests_continue_with_identical_tokens(worker: Worker, stop: str) -> None:
    expected = await undisturbed(worker)
    stream = await begun(worker)
    keep = pb.RUNNING_REQUESTS_KEEP
    if stop == "pause":
        answer = await worker.control.Pause(pb.PauseRequest(running_requests=keep), timeout=20)
    elif stop == "reload":
        answer = await worker.control.ReloadWeights(pb.ReloadWeightsRequest(running_requests=keep), timeout=20)
    else:
        answer = await worker.control.Sleep(pb.SleepRequest(running_requests=keep, level=int(stop[-1])), timeout=20)
        stats = await worker.stats()
        assert (stats.activity, stats.sleep_level) == (pb.WORKER_ACTIVITY_ASLEEP, int(stop[-1]))
        assert stats.num_empty_blocks == stats.state.load.num_blocks
        assert answer.num_freed_bytes > 0
    assert answer.num_requests == 1
    if stop == "pause":
        before = (await worker.stats()).counters.num_output_tokens
        await asyncio.sleep(0.05)
        assert (await worker.stats()).counters.num_output_tokens == before
        await worker.control.Resume(pb.ResumeRequest(), timeout=20)
    elif stop != "reload":
        await worker.control.WakeUp(pb.WakeUpRequest(), timeout=20)
    (slot,) = await stream.until_ended(0)
    assert slot.tokens == expected
    assert slot.failure is None
    assert (await worker.until_idle()).activity == pb.WORKER_ACTIVITY_SERVING


async def test_a_default_pause_fails_running_requests_so_that_gateways_move_them(worker: Worker) -> None:
    stream = await begun(worker)
    await worker.control.Pause(pb.PauseRequest(), timeout=20)
    (slot,) = await stream.until_ended(0)
    assert slot.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
    stats = await worker.stats()
    assert (stats.num_held_blocks, stats.activity) == (0, pb.WORKER_ACTIVITY_PAUSED)


async def test_a_pause_may_wait_for_running_requests_up_to_its_deadline(worker: Worker) -> None:
    stream = await begun(worker)
    wait = pb.RUNNING_REQUESTS_WAIT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.control.Pause(pb.PauseRequest(running_requests=wait, timeout_ms=20), timeout=20)
    assert code_of(caught) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await worker.stats()).activity == pb.WORKER_ACTIVITY_SERVING
    assert await health(worker) == health_pb2.HealthCheckResponse.SERVING
    await worker.control.Pause(pb.PauseRequest(running_requests=wait), timeout=20)
    (slot,) = await stream.until_ended(0)
    assert len(slot.tokens) == NUM_TOKENS


async def test_while_stopped_it_reports_so_and_refuses_requests_with_a_retryable_error(worker: Worker) -> None:
    stream = worker.stream()
    control = worker.control
    for stop, request, go_on, ended in (
        (control.Pause, pb.PauseRequest(), control.Resume, pb.ResumeRequest()),
        (control.Sleep, pb.SleepRequest(), control.WakeUp, pb.WakeUpRequest()),
        (control.Drain, pb.DrainRequest(), control.Resume, pb.ResumeRequest()),
    ):
        await stop(request, timeout=20)
        assert (await worker.state()).draining
        assert await health(worker) == health_pb2.HealthCheckResponse.NOT_SERVING
        (slot,) = await stream.generate(submit(1, LONG))
        assert slot.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await go_on(ended, timeout=20)
        assert not (await worker.state()).draining
        assert await health(worker) == health_pb2.HealthCheckResponse.SERVING
        (slot,) = await stream.generate(submit(1, LONG))
        assert slot.finish is not None


async def test_a_role_changes_when_running_requests_have_ended_and_the_cache_stays(worker: Worker) -> None:
    await undisturbed(worker)
    cached = (await worker.stats()).num_cached_blocks
    epoch = (await worker.state()).epoch
    stream = await begun(worker)
    request = pb.SwitchRoleRequest(
        role=types_pb2.WORKER_ROLE_PREFILL, running_requests=pb.RUNNING_REQUESTS_WAIT, timeout_ms=20_000
    )
    answer = await worker.control.SwitchRole(request, timeout=30)
    assert (answer.before, answer.num_requests) == (types_pb2.WORKER_ROLE_BOTH, 0)
    (slot,) = await stream.until_ended(0)
    assert len(slot.tokens) == NUM_TOKENS
    state, stats = await worker.state(), await worker.stats()
    assert (state.role, state.epoch, state.draining) == (types_pb2.WORKER_ROLE_PREFILL, epoch, False)
    assert (stats.activity, stats.num_cached_blocks >= cached > 0) == (pb.WORKER_ACTIVITY_SERVING, True)
    assert await health(worker) == health_pb2.HealthCheckResponse.SERVING
    kept = await begun(worker)
    back = pb.SwitchRoleRequest(role=types_pb2.WORKER_ROLE_BOTH, running_requests=pb.RUNNING_REQUESTS_KEEP)
    assert (await worker.control.SwitchRole(back, timeout=20)).num_requests == 1
    (slot,) = await kept.until_ended(0)
    assert len(slot.tokens) == NUM_TOKENS
    assert (await worker.state()).role == types_pb2.WORKER_ROLE_BOTH
    with pytest.raises(grpc.aio.AioRpcError, match="must be prefill, decode or both") as caught:
        await worker.control.SwitchRole(pb.SwitchRoleRequest(), timeout=20)
    assert code_of(caught) is grpc.StatusCode.INVALID_ARGUMENT


async def test_operations_refused_while_asleep_name_the_call_needed_first(worker: Worker) -> None:
    await worker.control.Sleep(pb.SleepRequest(), timeout=20)
    for method, request in (
        (worker.control.Pause, pb.PauseRequest()),
        (worker.control.Resume, pb.ResumeRequest()),
        (worker.control.ReloadWeights, pb.ReloadWeightsRequest()),
        (worker.control.SwitchRole, pb.SwitchRoleRequest(role=types_pb2.WORKER_ROLE_PREFILL)),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="WakeUp") as caught:
            await method(request, timeout=20)
        assert code_of(caught) is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.control.Sleep(pb.SleepRequest(level=3), timeout=20)
    assert code_of(caught) is grpc.StatusCode.INVALID_ARGUMENT
    epoch = (await worker.control.WakeUp(pb.WakeUpRequest(), timeout=20)).epoch
    assert (await worker.control.WakeUp(pb.WakeUpRequest(), timeout=20)).epoch == epoch


async def test_weights_wake_up_first_and_can_be_replaced_before_there_is_a_kv_cache(worker: Worker) -> None:
    expected = await undisturbed(worker)
    stream = await begun(worker)
    keep = pb.RUNNING_REQUESTS_KEEP
    await worker.control.Sleep(pb.SleepRequest(level=2, running_requests=keep), timeout=20)
    both = [pb.MEMORY_PART_WEIGHTS, pb.MEMORY_PART_KV_CACHE]
    assert (await worker.stats()).asleep == both
    for _ in range(2):  # the second time, nothing is left to do
        await worker.control.WakeUp(pb.WakeUpRequest(parts=[pb.MEMORY_PART_WEIGHTS]), timeout=20)
        stats = await worker.stats()
        assert (stats.activity, stats.sleep_level) == (pb.WORKER_ACTIVITY_ASLEEP, 1)
        assert stats.asleep == [pb.MEMORY_PART_KV_CACHE]
    await worker.control.ReloadWeights(pb.ReloadWeightsRequest(running_requests=keep), timeout=20)
    assert await health(worker) == health_pb2.HealthCheckResponse.NOT_SERVING
    await worker.control.WakeUp(pb.WakeUpRequest(parts=[pb.MEMORY_PART_KV_CACHE]), timeout=20)
    (slot,) = await stream.until_ended(0)
    assert slot.tokens == expected
    assert (await worker.until_idle()).activity == pb.WORKER_ACTIVITY_SERVING
    # The other order, and asleep again in between.
    await worker.control.Sleep(pb.SleepRequest(level=2), timeout=20)
    await worker.control.WakeUp(pb.WakeUpRequest(parts=[pb.MEMORY_PART_KV_CACHE]), timeout=20)
    stats = await worker.stats()
    assert (stats.sleep_level, stats.asleep) == (2, [pb.MEMORY_PART_WEIGHTS])
    with pytest.raises(grpc.aio.AioRpcError, match="WakeUp"):
        await worker.control.ReloadWeights(pb.ReloadWeightsRequest(), timeout=20)
    await worker.control.Sleep(pb.SleepRequest(level=2), timeout=20)
    assert (await worker.stats()).asleep == both
    with pytest.raises(grpc.aio.AioRpcError, match="parts names 9: they must be weights and kv_cache"):
        await worker.control.WakeUp(pb.WakeUpRequest(parts=[9]), timeout=20)  # type: ignore[list-item]
    await worker.control.WakeUp(pb.WakeUpRequest(), timeout=20)
    assert await undisturbed(worker) == expected


async def test_an_idle_drain_forgets_every_block_under_a_new_epoch(worker: Worker) -> None:
    await undisturbed(worker)
    before = await worker.stats()
    assert before.num_cached_blocks > 0
    assert (await worker.control.Drain(pb.DrainRequest(), timeout=20)).num_requests == 0
    after = await worker.until_idle()
    assert after.num_cached_blocks == 0
    assert after.state.epoch > before.state.epoch
    assert (await worker.control.Drain(pb.DrainRequest(), timeout=20)).num_requests == 0


async def test_a_drain_fails_remaining_requests_at_its_deadline(worker: Worker) -> None:
    stream = await begun(worker)
    assert (await worker.control.Drain(pb.DrainRequest(timeout_ms=30), timeout=20)).num_requests == 1
    (slot,) = await stream.until_ended(0)
    assert slot.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert (await worker.until_idle()).num_cached_blocks == 0


@pytest.mark.parametrize("stop", ["pause", "sleep"])
async def test_a_stopped_worker_returns_its_requests_at_once_on_shutdown(worker: Worker, stop: str) -> None:
    stream = await begun(worker)
    keep = pb.RUNNING_REQUESTS_KEEP
    if stop == "pause":
        await worker.control.Pause(pb.PauseRequest(running_requests=keep), timeout=20)
    else:
        await worker.control.Sleep(pb.SleepRequest(running_requests=keep), timeout=20)
    worker.stop.set()
    (slot,) = await stream.until_ended(0)
    assert slot.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
    async with asyncio.timeout(20):
        await worker.serving


async def test_one_change_at_a_time(worker: Worker) -> None:
    stream = await begun(worker)
    wait = pb.PauseRequest(running_requests=pb.RUNNING_REQUESTS_WAIT)
    pausing = asyncio.ensure_future(worker.control.Pause(wait, timeout=20))
    async with asyncio.timeout(20):
        while not (await worker.state()).draining:
            pass
    with pytest.raises(grpc.aio.AioRpcError, match="a pause is in progress") as caught:
        await worker.control.Sleep(pb.SleepRequest(), timeout=20)
    assert code_of(caught) is grpc.StatusCode.FAILED_PRECONDITION
    await pausing
    (slot,) = await stream.until_ended(0)
    assert len(slot.tokens) == NUM_TOKENS


async def test_reloaded_weights_serve_under_their_own_digest_and_no_old_block(
    cpu_worker: Worker, other_weights: Path, free_ports_of_two: list[int]
) -> None:
    async with running_worker(
        free_ports_of_two[0], model=str(other_weights), executor="cpu", engine_process=True, threads=1, num_blocks=256
    ) as fresh:
        (expected,) = await fresh.stream().generate(submit(0, LONG, max_tokens=24))
        digest = (await fresh.state()).model.digest
    stream = cpu_worker.stream()
    (old,) = await stream.generate(submit(0, LONG, max_tokens=24))
    request = pb.ReloadWeightsRequest(model=str(other_weights))
    answer = await cpu_worker.control.ReloadWeights(request, timeout=60)
    state = await cpu_worker.state()
    assert answer.digest == state.model.digest == state.layout.model_digest == digest
    (new,) = await stream.generate(submit(1, LONG, max_tokens=24))
    assert new.finish.num_cached_tokens == 0
    assert new.tokens == expected.tokens != old.tokens


async def test_weights_that_do_not_fit_or_load_leave_the_old_ones_serving(
    cpu_worker: Worker, other_architecture: Path, tmp_path: Path
) -> None:
    before, state = await undisturbed(cpu_worker), await cpu_worker.state()
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    for folder, code in (
        (other_architecture, grpc.StatusCode.FAILED_PRECONDITION),
        (broken, grpc.StatusCode.INVALID_ARGUMENT),
        (tmp_path / "nothing", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cpu_worker.control.ReloadWeights(pb.ReloadWeightsRequest(model=str(folder)), timeout=60)
        assert code_of(caught) is code, caught.value.details()
    after = await cpu_worker.state()
    assert (after.model, after.epoch) == (state.model, state.epoch)
    assert await undisturbed(cpu_worker) == before


async def test_a_cpu_worker_that_slept_answers_as_before(cpu_worker: Worker) -> None:
    expected = await undisturbed(cpu_worker)
    for level in (1, 2):
        await cpu_worker.control.Sleep(pb.SleepRequest(level=level), timeout=60)
        await cpu_worker.control.WakeUp(pb.WakeUpRequest(), timeout=60)
        assert await undisturbed(cpu_worker) == expected


@pytest.fixture
def free_ports_of_two() -> list[int]:
    return ports.free_ports(2)


def test_memory_of_a_cpu_executor_that_sleeps_is_the_machines_again() -> None:
    from baton.worker.config import WorkerConfig
    from baton.worker.executors.cpu.executor import CpuExecutor

    num_bytes = 128 << 20
    executor = CpuExecutor(WorkerConfig(executor="cpu", model=str(MODEL), kv_cache_memory=num_bytes, threads=1))
    kv = executor.kv_bytes
    assert kv is not None
    for layer in kv:
        layer[:] = 1
    process = psutil.Process()
    full = process.memory_info().rss
    assert executor.sleep(2) >= num_bytes
    assert full - process.memory_info().rss > 0.9 * num_bytes
    assert executor.sleep(2) == 0
    executor.wake(executor.read_weights(""))
    assert not any(layer.any() for layer in kv)
