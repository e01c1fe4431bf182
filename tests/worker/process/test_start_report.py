"""What a worker says of itself at start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from support.processes.child_environment import child_environment

from baton.worker.config import WorkerConfig
from baton.worker.executors.facts import DeviceFacts, KernelChoice, Off
from baton.worker.kv_spec import full_spec
from baton.worker.process.start_report import StartReport, start_report

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
FACTS = DeviceFacts(
    architecture="LlamaForCausalLM",
    implementation="baton",
    num_layers=32,
    device="NVIDIA H200, compute capability 9.0",
    dtype="bfloat16",
    weight_format="unquantized",
    weight_bytes=15 * GIB,
    step_bytes=2 * GIB,
    graph_bytes=GIB // 2,
    kernels=(
        KernelChoice("decode_attention", "attention.decode_hopper.split_decode", "up to 33 requests"),
        KernelChoice("decode_attention", "attention.decode.decode_attention", "from 34 requests"),
    ),
    off=(Off("attention.prefill_hopper.prefill_attention_hopper", "windows, 16 of 32 layers"),),
)
SPEC = full_spec(bytes(16), "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
CONFIG = WorkerConfig(model="models/m", executor="cuda", max_num_requests=64)


def report(config: WorkerConfig = CONFIG, num_blocks: int = 10_000, max_model_len: int = 8001) -> StartReport:
    left_out = {"rdma": "nixl is not installed"}
    return start_report(config, FACTS, SPEC, num_blocks, max_model_len, ("ipc", "tcp"), left_out)


def said(one: StartReport) -> str:
    return "\n".join(one.lines())


def test_whole_blocks_bound_the_requests_of_full_length() -> None:
    assert report().kv_tokens == 160_000
    assert report().concurrency == 10_000 / 501
    assert report(max_model_len=16).concurrency == 64  # the batch


def test_people_read_every_fact() -> None:
    text = said(report())
    for part in (
        "m, LlamaForCausalLM by baton, 32 layers; weights unquantized, computed in bfloat16",
        "NVIDIA H200, compute capability 9.0; role both",
        "decode_attention: attention.decode_hopper.split_decode (up to 33 requests)",
        "weights 15.0 GiB, steps 2.0 GiB, graphs about 512.0 MiB, KV 19.5 GiB",
        "160,000 tokens in blocks of 16, bfloat16",
        "20.0 requests of 8,001 tokens; at most 64 of shorter ones",
        "ipc, tcp",
        "prefill_attention_hopper: windows, 16 of 32 layers",
        "host cache of KV: --host-cache-gb is 0",
        "transport rdma: nixl is not installed",
    ):
        assert part in text, part


def test_operations_of_one_kernel_share_a_line() -> None:
    kernels = (KernelChoice("gate", "linear"), KernelChoice("add", "linear"), KernelChoice("add", "linear", "once"))
    text = said(replace(report(), facts=replace(FACTS, kernels=kernels)))
    assert "  kernels     gate, add: linear\n              add: linear (once)\n" in text


def test_a_batch_that_bounds_the_requests_is_named() -> None:
    assert "  at once     64 requests of 16 tokens (--max-num-requests)" in said(report(max_model_len=16))


def test_what_is_on_is_not_said_to_be_off() -> None:
    config = replace(
        CONFIG, host_cache_gb=4.0, disk_cache_dir="kv", disk_cache_gb=1.0, kvstore="127.0.0.1:1", verify_transfers=True
    )
    one = report(config)
    assert [off.feature for off in one.off] == ["transport rdma"]
    assert "host cache of KV 3.7 GiB" in said(one)


def test_programs_read_the_same_facts() -> None:
    fields = json.loads(json.dumps(report().fields()))
    assert fields["weight_bytes"] == 15 * GIB
    assert fields["kv_bytes"] == 10_000 * SPEC.bytes_per_block
    assert fields["kv_tokens"] == 160_000
    assert fields["kernels"][0] == {
        "op": "decode_attention",
        "kernel": "attention.decode_hopper.split_decode",
        "where": "up to 33 requests",
    }
    assert {"feature": "transport rdma", "reason": "nixl is not installed"} in fields["off"]


def test_a_worker_logs_its_report_before_it_is_ready() -> None:
    words = ["worker", "--listen", "127.0.0.1:0", "--num-blocks", "64", "--log-format", "json", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.services.cli", *words],
        cwd=ROOT,
        env=child_environment({}),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        entries = []
        for line in process.stderr:
            entries.append(json.loads(line))
            if entries[-1]["message"] == "listening":
                break
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    (entry,) = [entry for entry in entries if "report" in entry]
    assert entry["message"] == "this worker"
    facts = entry["report"]
    assert (facts["model"], facts["architecture"]) == ("storyteller-7m", "Qwen2ForCausalLM")
    assert (facts["kv_tokens"], facts["max_model_len"], facts["concurrency"]) == (1024, 1024, 1.0)
    assert facts["weight_format"] == "unquantized"
    assert facts["transports"] == ["ipc", "tcp"]
    assert {kernel["op"] for kernel in facts["kernels"]} >= {"decode_attention", "prefill_attention", "project"}
