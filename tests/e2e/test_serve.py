"""`baton serve` as a user meets it: it picks, says why, and serves."""

import subprocess
import sys

import httpx
import pytest
from support.processes.stack import MODEL
from support.processes.tandem_program import TandemProgram

EDGE = ("--port", "0", "--grpc-listen", "127.0.0.1:0")


@pytest.fixture
def serve(tmp_path):
    started = []

    def start(*flags: str, **environ: str) -> TandemProgram:
        started.append(TandemProgram(tmp_path, "serve", *flags, **environ))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
        one.process.wait(60)


def test_on_a_machine_without_a_gpu_it_serves_the_named_model_on_the_cpu(serve):
    one = serve(str(MODEL), *EDGE, "--num-blocks", "321", "--max-logprobs", "3", CUDA_VISIBLE_DEVICES="")
    address = one.wait_ready()
    assert "executor cpu: " in one.output
    assert "workers: 1 both (one uses all cores;" in one.output
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4, "logprobs": True}
    answer = httpx.post(f"http://{address}/v1/chat/completions", json=chat | {"top_logprobs": 3}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    refused = httpx.post(f"http://{address}/v1/chat/completions", json=chat | {"top_logprobs": 4}, timeout=60)
    assert refused.status_code == 400
    (worker,) = [process for process in one.family() if "--num-blocks=321" in process.cmdline()]
    assert "both-0" in worker.cmdline()


def test_a_config_file_holds_the_settings_of_all_services(serve, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {MODEL}\nserved-model-name: [tales, gpt-5]\nexecutor: sim\nprefill: 1\ndecode: 2\n"
        "rest-listen: 127.0.0.1:0\ngrpc-listen: 127.0.0.1:0\nmax-model-len: 500\nmax-logprobs: 3\n"
    )
    one = serve("--config", str(path), "--decode", "1")
    address = one.wait_ready()
    assert "workers: 1 prefill, 1 decode (as set)" in one.output
    models = httpx.get(f"http://{address}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models][:1] == [("tales", 500)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("/no/such/folder",), "--model: '/no/such/folder' is no folder"),
        (("--prefill", "1"), "--prefill=1 needs workers that decode; add --decode 1, or give --both"),
        (("--decode", "2"), "--decode=2 needs workers that prefill; add --prefill 1, or give --both 2"),
        (("--num-block", "5"), "unknown argument '--num-block'; did you mean --num-blocks?"),
        (("--num-blocks", "x"), "--num-blocks: 'x' is not allowed; give an integer from 0"),
        (("--num-blocks", "1", "--kv-cache-memory", "1"), "--num-blocks=1 and --kv-cache-memory=1 exclude each other"),
        (("--max-logprobs", "-2"), "--max-logprobs: '-2' is not allowed"),
        (("--port", "70000"), "--port: '70000' is not allowed; give an integer from 0 to 65535, or none"),
        (("--host", "no.such.host.invalid"), "--rest-listen no.such.host.invalid:8000: "),
        (("--config", "{}"), "line 2: unknown key 'num-block'; did you mean num-blocks?"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(serve, tmp_path, flags, message):
    path = tmp_path / "bad.yaml"
    path.write_text("executor: sim\nnum-block: 5\n")
    one = serve(*(flag.format(path) for flag in flags))
    assert one.process.wait(10) == 2
    assert message in one.output
    assert one.output.count("\n") == 1


def test_cuda_is_refused_before_anything_starts_where_no_gpu_is_usable(serve):
    one = serve("--executor", "cuda", *EDGE, CUDA_VISIBLE_DEVICES="")
    assert one.process.wait(30) == 2
    assert one.output.startswith("baton serve: --executor cuda: ")


def test_a_variable_that_a_service_does_not_know_is_named(serve):
    one = serve(*EDGE, BATON_WORKER_NUM_BLOCK="7")
    assert one.process.wait(30) == 2
    assert "unknown variable BATON_WORKER_NUM_BLOCK='7'; did you mean BATON_WORKER_NUM_BLOCKS?" in one.output


def test_help_lists_the_flags_of_gateway_and_worker_without_those_that_it_sets():
    words = [sys.executable, "-m", "baton.services.cli", "serve", "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for flag in ("--max-num-requests", "--tool-call-parser", "--prefill", "--config"):
        assert f"  {flag} " in text
    for flag in ("--worker-id", "--kvstore", "--router"):
        assert f"  {flag} " not in text
