"""Measures batches: kills during one, its throughput over offline throughput, and interactive TTFT beside one.

baton bench batch --part kills --lines 20000
baton bench batch --part throughput --lines 4000 --output 64
baton bench batch --part latency --rate 20 --duration 20

Services are real, with a real Redis and a simulated engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.extend(str(ROOT / name) for name in ("tests", "proto", "services", "worker", "kernels", "gateway"))

from openai import APIConnectionError, APIStatusError, OpenAI  # noqa: E402
from openai.types import Batch  # noqa: E402
from support.gateway.batch_files import FINAL, begin, client_of, completion_lines, results, wait_for  # noqa: E402
from support.processes import ports  # noqa: E402
from support.processes.stack import MODEL, MODEL_NAME, RedisServer, Stack, start_stack  # noqa: E402

from baton.llm import LLM, SamplingParams  # noqa: E402

KILLED = ("gateway", "router", "worker-both-0", "kvstore")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("kills", "throughput", "latency"), required=True)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--output", type=int, default=16, help="tokens of each line's answer")
    parser.add_argument("--slowness", type=float, default=1.0, help="factor on the simulated engine's step times")
    parser.add_argument("--kill-every", type=float, default=4.0, help="seconds between two kills")
    parser.add_argument("--rounds", type=int, default=3, help="of throughput, in turns")
    parser.add_argument("--rate", type=float, default=10.0, help="interactive requests a second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of interactive load")
    parser.add_argument("--input-len", default="512", help="tokens of interactive prompts")
    options = parser.parse_args()
    return {"kills": kills, "throughput": throughput, "latency": latency}[options.part](options)


@contextmanager
def fleet(options: argparse.Namespace) -> Iterator[tuple[Stack, OpenAI]]:
    """Starts services with one simulated worker."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as cleanup:
        folder = Path(name)
        redis = RedisServer(folder, ports.free_ports(1)[0])
        cleanup.callback(redis.stop)
        redis.start()
        flags = {
            "gateway": ("--batch-store", str(folder / "store"), "--redis-url", redis.url, "--no-access-log"),
            "worker": ("--sim-slowness", str(options.slowness)),
        }
        stack = start_stack(folder, cleanup, flags, executor="sim", prefill_workers=0)
        yield stack, cleanup.enter_context(client_of(stack.url))


def lines_of(options: argparse.Namespace) -> Iterator[bytes]:
    return completion_lines(options.lines, MODEL_NAME, max_tokens=options.output, ignore_eos=True, temperature=0)


def kills(options: argparse.Namespace) -> int:
    """Kills every service in turn, again and again, until the batch has ended."""
    with fleet(options) as (stack, client):
        batch, began = begin(client, lines_of(options)), time.perf_counter()
        killed: Counter[str] = Counter()
        for name in itertools.cycle(KILLED):
            if ends_within(client, batch, options.kill_every):
                break
            stack[name].kill()
            stack[name].start()
            killed[name] += 1
        end = wait_for(client, batch, lambda one: one.status in FINAL)
        seconds = time.perf_counter() - began
        found = Counter(one["custom_id"] for one in results(client, end.output_file_id))
        failed = len(results(client, end.error_file_id))
    doubled, lost = sum(count > 1 for count in found.values()), options.lines - len(found) - failed
    print(f"status {end.status} after {seconds:.1f} s; kill -9: {dict(killed)}")
    print(f"{options.lines} lines: {len(found)} results, {failed} errors, {doubled} doubled, {lost} lost")
    return 0 if len(found) == options.lines and not doubled else 1


def ends_within(client: OpenAI, batch: Batch, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if client.batches.retrieve(batch.id).status in FINAL:
                return True
        except (APIConnectionError, APIStatusError):
            pass
        time.sleep(0.2)
    return False


def completed(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts is not None else 0


def throughput(options: argparse.Namespace) -> int:
    """Compares a batch with `LLM.generate` of the same prompts on the same engine, in turns."""
    prompts = [json.loads(line)["body"]["prompt"] for line in lines_of(options)]
    params = SamplingParams(max_tokens=options.output, ignore_eos=True, temperature=0)
    ratios = []
    with LLM(str(MODEL), executor="sim", sim_slowness=options.slowness) as llm, fleet(options) as (_, client):
        for number in range(options.rounds):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            offline = time.perf_counter() - began
            llm.reset_prefix_cache()
            began = time.perf_counter()
            # A client that polls 20 times a second takes a tenth of a core from the services.
            end = wait_for(
                client, begin(client, lines_of(options)), lambda one: one.status in FINAL, 600, interval=0.25
            )
            assert completed(end) == options.lines, end
            taken = time.perf_counter() - began
            ratios.append(offline / taken)
            print(
                f"round {number}: offline {options.lines / offline:.0f} lines/s ({offline:.1f} s), "
                f"batch {options.lines / taken:.0f} lines/s ({taken:.1f} s, upload and result file included), "
                f"ratio {ratios[-1]:.3f}"
            )
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.3f}")
    return 0


def latency(options: argparse.Namespace) -> int:
    """Measures interactive chats alone, beside a batch, and alone again."""
    found = {}
    with fleet(options) as (stack, client):
        interactive(options, stack, 3.0)
        found["alone"] = interactive(options, stack, options.duration)
        batch = begin(client, lines_of(options))
        wait_for(client, batch, lambda one: one.status == "in_progress")
        before = wait_for(client, batch, lambda one: completed(one) > 0)
        began = time.perf_counter()
        found["beside a batch"] = interactive(options, stack, options.duration)
        after, taken = client.batches.retrieve(batch.id), time.perf_counter() - began

        num = completed(after) - completed(before)
        running = after.status == "in_progress"
        client.batches.cancel(batch.id)
        wait_for(client, batch, lambda one: one.status in FINAL)
        found["alone again"] = interactive(options, stack, options.duration)
    for name, ttft in found.items():
        print(f"{name:<16} TTFT p50 {ttft['p50']:7.1f} ms  p99 {ttft['p99']:7.1f} ms")
    base = max(found["alone"]["p99"], 1e-9)
    print(f"p99 beside a batch / alone: {found['beside a batch']['p99'] / base:.3f}; still running: {running}")
    print(f"the batch ran {num / taken:.0f} lines/s meanwhile")
    return 0


def interactive(options: argparse.Namespace, stack: Stack, duration: float) -> dict[str, float]:
    """Returns the TTFT of chats at a rate, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.json"
        program = [sys.executable, "-m", "baton.services.cli", "bench", "serve"]
        words = ["--url", stack.url, "--rate", str(options.rate), "--duration", str(duration), "--json", str(path)]
        lengths = ["--input-len", options.input_len, "--output-len", "32"]
        subprocess.run([*program, *words, *lengths], check=True, stdout=subprocess.DEVNULL)
        ttft: dict[str, Any] = json.loads(path.read_text())["levels"][0]["ttft"]
    return {name: 1000 * ttft[name] for name in ("p50", "p99")}


if __name__ == "__main__":
    sys.exit(main())
