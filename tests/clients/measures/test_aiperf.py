"""AIPerf, a load generator: every request succeeds, and its token counts are the server's."""

import json

import pytest
from clients import processes
from clients.environments import PythonEnvironment
from support.processes.stack import MODEL, MODEL_NAME

ENVIRONMENT = PythonEnvironment("aiperf", ("aiperf==0.13.0",))
NUM_REQUESTS = 8
NUM_TOKENS = 16

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


def test_aiperf_measures_every_request(tandem_stack, tmp_path):
    words = [ENVIRONMENT.program("aiperf"), "profile", "--model", MODEL_NAME, "--url", tandem_stack.url]
    words += ["--endpoint-type", "chat", "--streaming", "--tokenizer", MODEL, "--ui", "none"]
    words += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
    words += [
        "--synthetic-input-tokens-mean",
        "50",
        "--output-tokens-mean",
        str(NUM_TOKENS),
        "--use-server-token-count",
    ]
    environ = processes.client_environ(tmp_path, ENVIRONMENT.folder() / "bin", AIPERF_DISABLE_TELEMETRY="1")
    processes.run(words, tmp_path, environ, 200)
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found.get("error_summary")
    assert found["output_sequence_length"]["max"] <= NUM_TOKENS
    assert found["time_to_first_token"]["min"] > 0
