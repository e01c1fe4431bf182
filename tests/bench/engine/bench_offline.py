"""Compares tokens a second of `baton.llm`, of the engine alone, and of services over gRPC, in turns.

baton bench offline [--model FOLDER] [--requests 64] [--output 64] [--threads 1] [--rounds 5] [--services]
baton bench offline --executor cuda --model FOLDER --load-format dummy --requests 256 --prompt 512 --output 256
baton bench offline --executor sim --requests 512 --prompt 512 --output 1

With --executor sim steps take no time: what is left is the CPU of each way, by request.
The engine alone runs in a loop without tokenizer, text or results. With --services, one worker, a router and a gateway
answer the same prompts as one request to /v1/completions.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from baton.llm import LLM, SamplingParams

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
TESTS = Path(__file__).resolve().parents[2]

_BLOCK_SIZE = 16
_STEP_TOKENS = {"cpu": 2048, "cuda": 8192, "sim": 8192}

Way = Callable[[list[list[int]]], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE_MODEL)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt, drawn at random")
    parser.add_argument("--output", type=int, default=64, help="tokens of each output")
    parser.add_argument("--executor", choices=("cpu", "cuda", "sim"), default="cpu")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU executor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--services", action="store_true")
    options = parser.parse_args()
    with ExitStack() as cleanup:
        llm = cleanup.enter_context(
            LLM(
                str(options.model),
                executor=options.executor,
                load_format=options.load_format,
                threads=options.threads,
                max_num_seqs=options.requests,
                max_num_batched_tokens=_STEP_TOKENS[options.executor],
                num_blocks=num_blocks_of(options),
                sim_slowness=0.0,
            )
        )
        ways: dict[str, Way] = {
            "the engine alone": cleanup.enter_context(engine_alone(options)),
            "offline": lambda prompts: offline(llm, prompts, options.output),
        }
        if options.services:
            ways["services over gRPC"] = services(options, cleanup)
        measure(options, ways)


def measure(options: argparse.Namespace, ways: dict[str, Way]) -> None:
    """Runs the ways in turns, with new prompts in each round, and prints the table."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, options.rounds):
        torch.manual_seed(number + 1)
        prompts = torch.randint(5, 4000, (options.requests, options.prompt)).tolist()
        outputs = []
        for name, way in ways.items():
            started, used = time.perf_counter(), time.process_time()
            outputs.append(way(prompts))
            if number >= 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
        assert all(one == outputs[0] for one in outputs), "every way computes the same tokens"
    base = seconds["the engine alone"]
    print(
        f"{options.model.name}, {options.threads} threads, {options.requests} requests of {options.prompt} +"
        f" {options.output} tokens, {options.rounds} rounds in turns"
    )
    print(f"{'':<20} {'tok/s':>8} {'lowest':>8} {'highest':>8} {'x the engine':>13} {'CPU us a request':>17}")
    for name, taken in seconds.items():
        rates = sorted(options.requests * options.output / one for one in taken)
        ratio = statistics.median(first / one for first, one in zip(base, taken, strict=True))
        own = statistics.median(cpu[name]) * 1e6 / options.requests  # of this process
        spread = f"{statistics.median(rates):>8.0f} {rates[0]:>8.0f} {rates[-1]:>8.0f}"
        print(f"{name:<20} {spread} {ratio:>13.3f} {own:>17.0f}")


def num_blocks_of(options: argparse.Namespace) -> int:
    """Returns the number of KV blocks that hold all requests, with an eighth for those of the round before."""
    return options.requests * -(-(options.prompt + options.output) // _BLOCK_SIZE) * 9 // 8


@contextmanager
def engine_alone(options: argparse.Namespace) -> Iterator[Way]:
    """Gives a function that runs prompts on a new engine."""
    from baton.worker.config import WorkerConfig
    from baton.worker.core import Request, SamplingParams, StopConditions
    from baton.worker.engine.engine import Engine
    from baton.worker.executors.factory import make_executor
    from baton.worker.scheduling.settings import EngineSettings

    config = WorkerConfig(
        model=str(options.model),
        executor=options.executor,
        load_format=options.load_format,
        threads=options.threads,
        max_num_requests=options.requests,
        max_num_batched_tokens=_STEP_TOKENS[options.executor],
        num_blocks=num_blocks_of(options),
        sim_slowness=0.0,
    )
    executor, num_tokens = make_executor(config), config.max_num_batched_tokens
    greedy, stop = SamplingParams(temperature=0.0), StopConditions(max_tokens=options.output)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        settings = EngineSettings(max_num_requests=options.requests, max_num_batched_tokens=num_tokens)
        engine = Engine(executor, settings, epoch=1)
        requests = [
            Request(str(index), list(prompt), len(prompt), greedy, stop, bytes(16))
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:
            engine.submit(request)
        while engine.has_work():
            engine.step()
        return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]

    yield run
    executor.close()


def offline(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generates with `baton.llm`, including texts and results."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def services(options: argparse.Namespace, cleanup: ExitStack) -> Way:
    """Starts one worker with a router and a gateway. Returns a function that sends prompts."""
    sys.path.insert(0, str(TESTS))
    from support.processes.stack import start_stack

    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
    stack = start_stack(folder, cleanup, prefill_workers=0, threads=options.threads, model=str(options.model))

    def run(prompts: list[list[int]]) -> list[list[int]]:
        body: dict[str, Any] = {
            "prompt": prompts,
            "max_tokens": options.output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        host = stack.rest.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return [choice["token_ids"] for choice in answer["choices"]]

    return run


if __name__ == "__main__":
    main()
