"""Compares the CPU executor's tokens a second with those of Transformers' `generate`, called for one prompt at a time.

baton bench cpu_engine [--model FOLDER | --experts] [--requests 16] [--output TOKENS] [--threads 1] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
GREEDY = SamplingParams(temperature=0.0)
EXPERTS: dict[str, int | float] = {  # a small model with experts and random weights
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)


@dataclass(frozen=True)
class Row:
    """The results of one way to generate, over all rounds."""

    what: str
    concurrency: int
    tokens_per_second: float  # median
    lowest: float
    highest: float
    times_transformers: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE_MODEL)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt, drawn at random")
    parser.add_argument("--output", type=int, default=0, help="tokens of each output. 0: 128, or 32 with --experts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--experts", action="store_true", help="a random small Qwen3 MoE instead of a folder")
    options = parser.parse_args()
    options.output = options.output or (32 if options.experts else 128)
    with tempfile.TemporaryDirectory() as folder:
        if options.experts:
            options.model = save_experts(Path(folder) / "random-qwen3-moe")
        measure(options)


def save_experts(folder: Path) -> Path:
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace) -> None:
    """Runs the ways in turns, round by round, and prints the table."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    shape = (options.requests, options.prompt)
    prompts: list[list[int]] = torch.randint(5, model.config.vocab_size, shape).tolist()
    config = WorkerConfig(model=str(options.model), threads=options.threads, max_num_requests=options.requests)
    executor = CpuExecutor(config)
    ways: dict[tuple[str, int], Callable[[], list[list[int]]]] = {
        ("Transformers generate, one by one", 1): lambda: with_transformers(model, prompts, options.output),
        ("Baton, one by one", 1): lambda: [with_engine(executor, [one], options.output)[0] for one in prompts],
        ("Baton, all at once", options.requests): lambda: with_engine(executor, prompts, options.output),
        ("Baton, all at once, sampled", options.requests): lambda: with_engine(
            executor, prompts, options.output, SAMPLED
        ),
    }
    outputs = [way() for way in ways.values()]
    equal = sum(ours == theirs for ours, theirs in zip(outputs[2], outputs[0], strict=True))
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            seconds[name].append(timed(way))
    rows = make_rows(seconds, options.requests * options.output)
    report(rows, options, equal)
    if options.json:
        options.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "equal_outputs": equal}, indent=1))


def with_transformers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Generates greedily with Transformers and its own KV cache."""
    outputs = []
    for prompt in prompts:
        token_ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            generated = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def with_engine(
    executor: CpuExecutor, prompts: Sequence[list[int]], count: int, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Generates with a new engine, so that nothing is cached."""
    settings = EngineSettings(max_num_requests=len(prompts), max_num_batched_tokens=2048)
    engine = Engine(executor, settings, epoch=1)
    stop = StopConditions(max_tokens=count)
    requests = [
        Request(str(index), list(prompt), len(prompt), sampling, stop, bytes(16))
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        failures = engine.step().failures
        if failures:
            raise failures[0].error
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def timed(way: Callable[[], list[list[int]]]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def make_rows(seconds: dict[tuple[str, int], list[float]], num_tokens: int) -> list[Row]:
    """Returns the table's rows. The other ways are compared with the first one, round by round."""
    first = next(iter(seconds.values()))
    rows = []
    for (what, concurrency), taken in seconds.items():
        rates = [num_tokens / one for one in taken]
        ratio = statistics.median(base / one for base, one in zip(first, taken, strict=True))
        rows.append(Row(what, concurrency, statistics.median(rates), min(rates), max(rates), ratio))
    return rows


def report(rows: Sequence[Row], options: argparse.Namespace, equal: int) -> None:
    print(
        f"{options.model.name}, fp32, {options.threads} threads, {options.requests} requests of {options.prompt} +"
        f" {options.output} tokens, {options.rounds} rounds, load {psutil.getloadavg()[0]:.1f}"
    )
    print(f"{'':<36} {'at once':>8} {'tok/s':>8} {'lowest':>8} {'highest':>8} {'x Transformers':>15}")
    for row in rows:
        print(
            f"{row.what:<36} {row.concurrency:>8} {row.tokens_per_second:>8.0f} {row.lowest:>8.0f} {row.highest:>8.0f}"
            f" {row.times_transformers:>15.2f}"
        )
    print(f"greedy outputs equal to Transformers': {equal} of {options.requests}")


if __name__ == "__main__":
    main()
