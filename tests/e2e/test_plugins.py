"""Plugins in real services: a hand-over changes no token, and a failure is its request's alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support.plugins.packages import install, install_example
from support.plugins.processors import NAMES, expected_tokens, install_processors
from support.processes.child_environment import child_environment
from support.processes.stack import MODEL, MODEL_NAME, start_stack, wait_until
from transformers import AutoModelForCausalLM

from baton.plugins.kinds import LOGITS_PROCESSORS

_PROMPT = " ".join(f"The {number} dogs ran to the big tree and saw a cat." for number in range(12))


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    install_processors(folder)
    for kind in ("logits_processors", "tool_parsers", "endpoints", "metric_sinks", "transports"):
        install_example(folder, kind)
    source = "raise RuntimeError('no licence')"
    install(folder, "unlicensed", source, {LOGITS_PROCESSORS.group: {"unlicensed": "X"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # `baton up` looks which service loads a plugin
        yield folder


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics") / "metrics.jsonl"


@pytest.fixture(scope="module")
def stack(tmp_path_factory, packages, metrics):
    names = (*NAMES, "forced-prefix", "bang", "token-counts", "json-metrics", "shared-folder")
    environ = {
        "PYTHONPATH": str(packages),
        "BATON_JSON_METRICS_FILE": str(metrics),
        "BATON_JSON_METRICS_SECONDS": "1",
        "BATON_SHARED_FOLDER": str(tmp_path_factory.mktemp("shared")),
    }
    with ExitStack() as cleanup:
        extra = {"gateway": ("--tool-call-parser", "bang")}
        yield start_stack(tmp_path_factory.mktemp("stack"), cleanup, extra, environ, plugins=names, threads=1)


def complete(stack, prompt, max_tokens=12, **arguments):
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return stack.post("/v1/completions", {**body, "ignore_eos": True, "vllm_xargs": arguments})


def test_a_hand_over_changes_no_token(stack):
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    (decode,) = [worker for worker in stack.workers if "decode" in worker.plan.name]
    tried = []

    def handed_over():
        """Sends prompts until the router lets the prefill worker compute one."""
        arguments = {"no_echo": 6, "wave_height": 0.3}
        status, answer = complete(stack, f"{len(tried)} {_PROMPT}", **arguments)
        assert status == 200, answer
        (choice,) = answer["choices"]
        tried.append(choice["token_ids"])
        assert choice["token_ids"] == expected_tokens(oracle, choice["prompt_token_ids"], 12, **arguments)
        return stack.stats(decode).counters.num_transfers > 0

    wait_until(handed_over, "a prompt comes from the prefill worker", 60)
    (rate,) = stack.stats(decode).counters.transfers.rates
    assert (rate.plugin, rate.received_bytes_per_second > 0) == ("shared-folder", True)


def test_a_forced_call_is_parsed_by_the_plugins_parser(stack):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    text = 'Sure. !add{"a": 1}'
    status, tokens = stack.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200, tokens
    forced = {"forced_prefix": [*tokens["tokens"], 4]}
    answer = stack.chat("Add.", tools=[tool], vllm_xargs=forced, temperature=0, max_tokens=64)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


def test_a_failure_is_its_requests_alone(stack):
    with ThreadPoolExecutor(3) as pool:
        cases = [{"fail_after": 99}, {"fail_after": 3}, {}]
        found = list(pool.map(lambda arguments: complete(stack, "One", **arguments), cases))
    assert [status for status, _ in found] == [200, 500, 200]
    assert found[0][1]["choices"][0]["token_ids"] == [7] * 12
    assert found[1][1]["error"]["message"] == "the logits processor faulty failed (RuntimeError)"


def test_an_argument_that_nothing_reads_is_refused(stack):
    status, answer = complete(stack, "One", no_ekko=1)
    assert (status, answer["error"]["param"]) == (400, "vllm_xargs")
    assert "no logits processor reads vllm_xargs.no_ekko: they read fail_after" in answer["error"]["message"]


def test_every_service_gets_the_plugins_that_it_loads(stack, metrics):
    def services():
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return {json.loads(line)["service"] for line in lines[:-1]}

    wait_until(lambda: services() == {"gateway", "router", "kvstore", "worker"}, "metrics of all services", 20)
    status, answer = stack.post("/v1/token_counts", {"texts": ["Once upon a time"]})
    assert (status, len(answer["counts"])) == (200, 1)


def test_a_worker_does_not_start_with_a_plugin_that_raises(packages):
    words = (*("worker", "--listen", "127.0.0.1:0", "--model", str(MODEL)), *("--plugins", "unlicensed"))
    environ = child_environment({"PYTHONPATH": str(packages), "PATH": os.environ["PATH"]})
    command = [sys.executable, "-m", "baton.services.cli", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "'unlicensed' cannot be started (entry point baton.logits_processors.v1: unlicensed = " in done.stderr
    assert "RuntimeError: no licence" in done.stderr
