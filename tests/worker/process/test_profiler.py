"""Profiles of a worker's engine, asked for over ControlService."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import grpc
import pytest
from support.processes.worker_harness import Worker, running_worker, submit

from baton.v1 import control_pb2

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"


def events_of(path: str) -> set[str]:
    return {str(event.get("name")) for event in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]}


async def start(worker: Worker, num_steps: int = 0) -> control_pb2.StartProfileResponse:
    return await worker.control.StartProfile(control_pb2.StartProfileRequest(num_steps=num_steps), timeout=60)


async def stop(worker: Worker) -> control_pb2.StopProfileResponse:
    return await worker.control.StopProfile(control_pb2.StopProfileRequest(), timeout=60)


@pytest.mark.filterwarnings("default")
async def test_profiles_of_a_cpu_worker_hold_its_steps(free_port: int, tmp_path: Path) -> None:
    folder, trace = tmp_path / "profiles", tmp_path / "steps"
    fields = {"executor": "cpu", "model": str(SAMPLE_MODEL), "engine_process": True, "threads": 1, "num_blocks": 64}
    async with running_worker(free_port, **fields, profile_dir=str(folder), trace_steps=str(trace)) as worker:
        with pytest.raises(grpc.aio.AioRpcError, match="no profile was started"):
            await stop(worker)
        path = (await start(worker)).path
        with pytest.raises(grpc.aio.AioRpcError, match="running already"):
            await start(worker)
        await worker.stream().generate(submit(0, [5, 6, 7], max_tokens=4))
        written = await stop(worker)
        assert written.path == path
        assert written.num_steps == 4
        assert any(name.startswith("aten::") for name in events_of(path))

        await start(worker, num_steps=2)
        await worker.stream().generate(submit(0, [5, 6, 7], max_tokens=4))
        written = await stop(worker)
        assert written.path != path
        assert written.num_steps == 2
        assert any(name.startswith("aten::") for name in events_of(written.path))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == 8
    assert all(line["device_us"] > 0 for line in lines)


async def test_a_worker_without_a_folder_or_a_device_reports_it(free_port: int, tmp_path: Path) -> None:
    async with running_worker(free_port, profile_dir=str(tmp_path)) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await start(worker)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "executor=sim" in (caught.value.details() or "")


def test_profiling_without_a_folder_is_refused() -> None:
    from baton.rpc.errors import Mismatch
    from baton.worker.process.profiler import ProfilePlan, StepProfiler

    with pytest.raises(Mismatch, match="--profile-dir"):
        StepProfiler("", "cpu", lambda: 0).start(ProfilePlan(1))


def test_a_plan_skips_steps_and_writes_a_file_for_each_profile(tmp_path: Path) -> None:
    from baton.worker.process.profiler import ProfilePlan, StepProfiler

    steps = [0]
    profiler = StepProfiler(str(tmp_path), "cpu", lambda: steps[0])
    first = profiler.start(ProfilePlan(num_steps=2, delay_steps=3, num_profiles=2))
    recorded = []
    while profiler.active:
        steps[0] += 1
        recorded.append(profiler.recording)
        profiler.on_step()
    # Steps 4 and 5, and after three more steps 9 and 10.
    assert [step for step, was in enumerate(recorded, 1) if was] == [4, 5, 9, 10]
    last, num_steps = profiler.stop()
    assert num_steps == 2
    assert sorted(map(str, tmp_path.iterdir())) == sorted((first, last))


def test_several_profiles_without_an_end_are_refused(tmp_path: Path) -> None:
    from baton.rpc.errors import InvalidRequest
    from baton.worker.process.profiler import ProfilePlan, StepProfiler

    profiler = StepProfiler(str(tmp_path), "cpu", lambda: 0)
    with pytest.raises(InvalidRequest, match="num_profiles=2 needs num_steps"):
        profiler.start(ProfilePlan(num_profiles=2))
    assert not profiler.active
