"""`baton up` as a user meets it: a program with an output and an exit code."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from support.processes.stack import MODEL, wait_until
from support.processes.tandem_program import TandemProgram


@pytest.fixture
def up(tmp_path):
    started = []

    def start(*flags: str, **environ: str) -> TandemProgram:
        listen = ("--rest-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0")
        started.append(TandemProgram(tmp_path, "up", *listen, *flags, **environ))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
        one.process.wait(60)


def listening_ports(processes):
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def assert_nothing_left(family, ports, seconds=5):
    wait_until(lambda: not [p for p in family if p.is_running() and p.status() != "zombie"], "no process left", seconds)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def shared_memory():
    """Without semaphores of multiprocessing, which no service makes, but pools of tests that run at the same time."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else ()
    return {name for name in names if not name.startswith("sem.mp-")}


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ("--executor", "sim")), (signal.SIGHUP, ("--executor", "sim"))],
)
def test_it_starts_answers_and_leaves_nothing_after_a_signal(up, number, flags):
    before = shared_memory()
    one = up(*flags)
    if not flags:  # a real model takes its time
        wait_until(lambda: "waiting for " in one.output, "a line of what it waits for", 30)
    address = one.wait_ready()
    assert "logs are in" in one.output
    curl = next(line for line in one.output.splitlines() if line.strip().startswith("curl "))
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer
    assert address in curl
    for name in ("gateway", "router", "worker prefill-0", "worker decode-0", "kvstore"):
        assert re.search(rf"{name} +ready after", one.output), name
    family = one.family()
    ports = listening_ports(family)
    assert len(family) >= 5
    assert len(ports) >= 6
    one.process.send_signal(number)
    assert one.process.wait(30) == 0, one.output
    assert_nothing_left(family, ports)
    assert list(one.tmp.iterdir()) == []
    assert shared_memory() - before == set()


def test_a_running_answer_does_not_hold_up_a_stop(up):
    one = up("--executor", "sim")
    address = one.wait_ready()
    host, _, port = address.partition(":")
    body = b'{"prompt": "Once", "max_tokens": 1900, "ignore_eos": true, "stream": true}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert b"200" in client.recv(4096)
        family = one.family()
        one.process.terminate()
        one.process.wait(60)
    assert_nothing_left(family, ())


def test_kill_9_takes_the_services_along(up):
    one = up("--executor", "sim")
    one.wait_ready()
    family = one.family()
    ports = listening_ports(family)
    one.process.kill()
    one.process.wait(10)
    assert_nothing_left(family, ports, 20)


def test_a_service_that_dies_is_named_with_the_end_of_its_log(up):
    one = up("--executor", "sim")
    one.wait_ready()
    family = one.family()
    (router,) = [process for process in family if "router" in process.cmdline()]
    router.kill()
    assert one.process.wait(30) == 1
    assert "router was ended by SIGKILL; the end of" in one.output
    assert "listening" in one.output.partition("the end of")[2]
    assert_nothing_left(family, ())
    assert "--log-dir FOLDER keeps the whole logs" in one.output
    assert list(one.tmp.iterdir()) == []


def test_the_logs_of_a_failed_tandem_stay_in_the_folder_that_was_given(up, tmp_path):
    one = up("--executor", "sim", "--log-dir", str(tmp_path / "logs"), "--model", str(MODEL), "--ready-timeout", "1")
    assert one.process.wait(60) == 1
    assert "not ready after" in one.output
    assert (tmp_path / "logs" / "gateway.log").is_file()


def test_the_password_of_a_redis_is_in_no_argument(up, redis_server):
    secret = "hunter2hunter2"
    url = f"redis://default:{secret}@127.0.0.1:{redis_server.port}/0"
    one = up("--executor", "sim", "--api-keys", "redis", BATON_UP_REDIS_URL=url)

    def started():
        return {word for process in one.family() for word in process.cmdline()} >= {"kvstore", "gateway"}

    wait_until(started, "the services started", 30)
    shown = [word for process in one.family() for word in process.cmdline()]
    assert not [word for word in shown if secret in word]


def test_a_port_in_use_is_named_before_anything_starts(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        one = up("--rest-listen", address)
        assert one.process.wait(10) == 2
    assert (
        one.output
        == f"baton up: --rest-listen {address}: the port is in use; give another with --rest-listen HOST:PORT\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/folder"), "--model: '/no/such/folder' is no folder"),
        (("--executor", "abacus"), "--executor: 'abacus' is not allowed; give one of auto, cpu, cuda, sim"),
        (("--decode-workers", "0"), "--decode-workers: '0' is not allowed; give an integer from 1 to 64"),
        (("--rest-listen", "8000"), "is not host:port"),
        (("--log-dir", "/dev/null"), "--log-dir: no log can be written in /dev/null"),
        (("--modle", "x"), "unknown argument '--modle'; did you mean --model?"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(up, flags, message):
    one = up(*flags)
    assert one.process.wait(10) == 2
    assert message in one.output
    assert one.output.count("\n") == 1


BROKEN = {
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "is missing"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 5_000_000), "model.safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "unknown architecture": (
        lambda folder: (folder / "config.json").write_text('{"architectures": ["AbacusForCausalLM"]}'),
        "AbacusForCausalLM",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_folder_is_named(up, tmp_path, case):
    folder = tmp_path / "broken"
    shutil.copytree(MODEL, folder)
    damage, word = BROKEN[case]
    damage(folder)
    one = up("--model", str(folder), "--prefill-workers", "0")
    assert one.process.wait(60) != 0
    assert str(folder) in one.output
    tail = one.output.partition("the end of")[2]
    assert word in (tail or one.output), one.output
    assert "Traceback" not in one.output
