"""Measures the engine under realistic mixes of requests: TTFT and ITL, p50 and p99.

baton bench mixes [--model llama-3.1-8b] [--only long-tailed ...] [--json PATH]
baton bench mixes --executor cpu --model models/storyteller-7m --scale 0.02

A load is a share of the engine's capacity: the requests a second that it finished when the mix arrived all at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

from bench.engine.bench_masks import write_tokenizer
from bench.engine.mixes import MIXES, Mix, Timings, arrivals

from baton.rpc.errors import ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.factory import make_executor
from baton.worker.executors.host.resources import usable_cores
from baton.worker.models.presets import PRESETS
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.scheduling.settings import EngineSettings

_WARM_UP = 16  # requests


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one mix."""

    mix: Mix
    seconds: float
    num_output: int  # tokens
    num_steps: int
    num_preemptions: int
    ttft_p50: float  # ms
    ttft_p99: float
    itl_p50: float
    itl_p99: float


class _FewerBlocks:
    """An executor that reports fewer KV blocks than it has."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        self._executor = executor
        self.num_blocks = num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the mixes, prints one table, and writes JSON. Returns an exit code."""
    options = _parser().parse_args(argv)
    mixes = _mixes(options)
    if not mixes:
        print(f"baton bench mixes: no mix is named so; there are: {', '.join(m.name for m in MIXES)}", file=sys.stderr)
        return 2
    try:
        config = _config(options, mixes)
        executor = make_executor(config)
    except ServiceError as error:
        print(f"baton bench mixes: {error}", file=sys.stderr)
        return 1
    try:
        results = _run(executor, config, mixes, options)
    finally:
        executor.close()
    _show(options, results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench mixes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"a folder, or a shape: {', '.join(PRESETS)}")
    parser.add_argument("--only", action="append", default=[], help="run only mixes whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number and the lengths of requests")
    parser.add_argument("--max-num-requests", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _mixes(options: argparse.Namespace) -> list[Mix]:
    """Returns the requested mixes, scaled. A mix with a relative load follows the mix that measures its base."""
    asked = [mix for mix in MIXES if not options.only or any(word in mix.name for word in options.only)]
    if any(mix.load is not None for mix in asked) and MIXES[0] not in asked:
        asked.insert(0, MIXES[0])

    def smaller(value: int, least: int) -> int:
        return max(least, round(value * options.scale))

    return [
        replace(
            mix,
            num_requests=smaller(mix.num_requests, 2),
            prompt=smaller(mix.prompt, 4),
            output=min(mix.output, smaller(mix.output, 4)),
            longest=smaller(mix.longest, 8),
            num_blocks=None if mix.num_blocks is None else smaller(mix.num_blocks, 16),
        )
        for mix in asked
    ]


def _config(options: argparse.Namespace, mixes: Sequence[Mix]) -> WorkerConfig:
    longest = max((2 * mix.longest if mix.spread else mix.prompt + mix.output) for mix in mixes)
    config = WorkerConfig(
        executor=options.executor,
        model=options.model,
        load_format="dummy" if options.model in PRESETS else "auto",
        max_num_requests=options.max_num_requests,
        max_model_len=longest,
        max_queue=1 << 20,
    )
    config.validate()
    return with_device_limits(config)


def _run(executor: Executor, config: WorkerConfig, mixes: Sequence[Mix], options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(config.model)
        if not (folder / "tokenizer.json").exists():
            folder = Path(made)
            write_tokenizer(folder / "tokenizer.json", executor.model.vocab_size)
        for number, mix in enumerate(mixes):
            first = results[0] if results else None
            rate = first.mix.num_requests / first.seconds if first is not None else 1.0
            warm_up = replace(mix, num_requests=min(_WARM_UP, mix.num_requests), output=min(8, mix.output), load=None)
            if mix.prompt < 4096:
                _pass(executor, config, warm_up, folder, rate, options.seed + 1000 + number)
            results.append(_pass(executor, config, mix, folder, rate, options.seed + number))
            print(", ".join(_cells(results[-1])), file=sys.stderr, flush=True)
    return results


def _pass(executor: Executor, config: WorkerConfig, mix: Mix, folder: Path, rate: float, seed: int) -> Result:
    """Runs one mix on a new engine, so that nothing is cached."""
    settings = EngineSettings(config.max_num_requests, config.max_num_batched_tokens, max_queue_depth=config.max_queue)
    grammars = Grammars(lambda: folder, executor.model, max(1, min(8, usable_cores() // 2)))
    grammars.warm_up().result()  # as in a worker that has started
    given: Any = executor if mix.num_blocks is None else _FewerBlocks(executor, mix.num_blocks)
    engine = Engine(given, settings, epoch=time.time_ns(), grammars=grammars)
    made = arrivals(mix, executor.model.vocab_size, rate, seed)
    timings = Timings()
    coming = list(zip(made.times, made.requests, strict=True))[::-1]
    left = len(coming)
    began = time.perf_counter()
    while left:
        now = time.perf_counter() - began
        while coming and coming[-1][0] <= now:
            at, request = coming.pop()
            timings.arrived[request.request_id] = at
            engine.submit(request)
        if not engine.has_work():
            time.sleep(max(0.0, coming[-1][0] - now))
            continue
        outputs = engine.step()
        if outputs.failures:
            raise outputs.failures[0].error
        now = time.perf_counter() - began
        for request in outputs.requests:
            timings.token(request.request_id, now)
        left -= len(outputs.finishes)
    seconds = time.perf_counter() - began
    while engine.has_work():
        engine.step()
    grammars.close()
    counters = engine.counters()
    num_output = sum(len(request.token_ids) - request.num_prompt_tokens for request in made.requests)
    return Result(mix, seconds, num_output, counters.num_steps, counters.num_preemptions, **timings.summary())


def _show(options: argparse.Namespace, results: Sequence[Result]) -> None:
    facts = machine_facts(("torch", "triton"), _card_name() if options.executor == "cuda" else "")
    print(f"mixes, {options.model}, executor {options.executor}: {facts_line(facts)}")
    header = ("mix", "requests", "s", "out tok/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "steps", "preempted")
    cells = [_cells(result) for result in results]
    print(render_table(header, cells, options.markdown))
    write_json(options.json, {**facts, "results": [asdict(result) for result in results]})


def _cells(result: Result) -> tuple[str, ...]:
    return (
        f"{result.mix.name}, {result.mix.sampling}",
        str(result.mix.num_requests),
        f"{result.seconds:.2f}",
        f"{result.num_output / result.seconds:,.0f}",
        f"{result.ttft_p50:.1f}",
        f"{result.ttft_p99:.1f}",
        f"{result.itl_p50:.2f}",
        f"{result.itl_p99:.2f}",
        str(result.num_steps),
        str(result.num_preemptions),
    )


def _card_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
