import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

RACER = """
import asyncio, gc, sys
from dataclasses import dataclass
from baton.rpc.errors import InvalidRequest, Unavailable
from baton.services.process.run import run_service

@dataclass(frozen=True)
class RacerConfig:
    fate: str = "runs"

async def serve(config, stop):
    if config.fate == "taken":
        raise Unavailable("cannot listen on 127.0.0.1:1: is the port in use?")
    if config.fate == "wrong":
        raise InvalidRequest("model='x' is no folder", field="model")
    if config.fate == "defect":
        raise KeyError("defect")
    if config.fate == "counts":
        print(len(gc.get_objects()))
        return
    print("running", flush=True)
    await stop.wait()
    if config.fate == "hangs":
        print("draining", flush=True)
        await asyncio.sleep(600)
    print("drained", flush=True)

if __name__ == "__main__":
    sys.exit(run_service("racer", RacerConfig, lambda: serve, sys.argv[1:], {}, "Races."))
"""


@pytest.fixture
def racer(tmp_path):
    path = tmp_path / "racer.py"
    path.write_text(textwrap.dedent(RACER))
    return [sys.executable, str(path)]


def ended(racer, *flags):
    return subprocess.run([*racer, *flags], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(racer, number):
    with subprocess.Popen(racer, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(number)
        assert process.communicate(timeout=10)[0] == "drained\n"
        assert process.returncode == 0


def test_a_second_signal_ends_a_drain_that_hangs(racer):
    with subprocess.Popen(
        [*racer, "--fate", "hangs"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "running\n"
        process.terminate()
        assert process.stdout.readline() == "draining\n"
        process.terminate()  # one wish with the first: shells and make signal a process and its group
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


def test_garbage_collections_skip_imported_objects(racer):
    """Some 20,000 objects, of gRPC's and ours, for which every stream would wait."""
    assert int(ended(racer, "--fate", "counts").stdout) < 3_000


def test_a_service_that_cannot_start_prints_the_reason_in_one_line(racer):
    result = ended(racer, "--fate", "taken")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "racer stopped: cannot listen on 127.0.0.1:1: is the port in use?" in result.stderr


def test_a_wrong_setting_found_at_start_exits_with_2_and_one_line(racer):
    result = ended(racer, "--fate", "wrong")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "racer cannot start: model='x' is no folder" in result.stderr


def test_a_defect_is_logged_with_its_trace(racer):
    result = ended(racer, "--fate", "defect")
    assert result.returncode == 1
    assert "KeyError" in result.stderr


def test_a_service_ends_with_its_parent(racer):
    parent = (
        "import subprocess, sys, os\n"
        "words = [*sys.argv[1:], '--parent-pid', str(os.getpid())]\n"
        "child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", parent, *racer], text=True, **pipes) as process:
        child = int(process.stdout.readline())
        watch = os.pidfd_open(child)
        process.kill()
        try:
            assert select.select([watch], [], [], 10)[0], "the child outlived its parent"
        finally:
            os.close(watch)


def test_a_service_whose_parent_is_gone_already_does_not_stay(racer):
    result = ended(racer, "--parent-pid", "1" if os.getpid() != 1 else "2")
    assert result.returncode in (0, -signal.SIGTERM)
