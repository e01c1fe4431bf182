"""Measures requests and tokens a second in this process, without a server: all prompts at once.

baton bench throughput --model models/storyteller-7m --num-prompts 200 --input-len 64:256 --output-len 64
baton bench throughput --dataset-name sharegpt --dataset-path ShareGPT.json --num-prompts 500
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.rpc.errors import ServiceError
from baton.services.bench.datasets.choice import add_dataset_flags, check_dataset, dataset_text, make_dataset
from baton.services.bench.datasets.source import BenchFailed, DatasetPrompt
from baton.services.bench.offline.options import (
    add_numbers,
    engine_arguments_of,
    facts,
    model_of,
    offline_parser,
    print_machine,
)
from baton.services.bench.report import write_json

if TYPE_CHECKING:
    from baton.llm import LLM

_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class _Result:
    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def record(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "num_requests": self.num_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "requests_per_second": self.num_requests / self.seconds,
            "output_tokens_per_second": self.num_output_tokens / self.seconds,
            "tokens_per_second": (self.num_prompt_tokens + self.num_output_tokens) / self.seconds,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the prompts and prints the throughput. Returns an exit code."""
    parser = offline_parser("throughput", __doc__)
    add_numbers(parser, (("--num-prompts", 100, "prompts"), ("--n", 1, "outputs of each prompt")))
    add_dataset_flags(parser)
    options = parser.parse_args(argv)
    try:
        check_dataset(options, chat=False)
        result = _run(options)
    except (ServiceError, BenchFailed, ValueError) as error:
        print(f"baton bench throughput: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    found = result.record()
    print(f"throughput: {model_of(options)}, {result.num_requests} prompts, {dataset_text(options)}")
    print_machine()
    print(
        f"{result.seconds:.2f} s: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:,.0f} "
        f"tokens/s, {found['output_tokens_per_second']:,.0f} output tokens/s"
    )
    write_json(options.json, {**facts(), "model": model_of(options), "dataset": dataset_text(options), **found})
    return 0


def _run(options: argparse.Namespace) -> _Result:
    from baton.llm import LLM, SamplingParams

    with LLM(model_of(options), **engine_arguments_of(options)) as llm:
        prompts = asyncio.run(_prompts(options, llm))
        given: list[Any] = [prompt.text or list(prompt.token_ids) for prompt in prompts]
        params = [
            SamplingParams(n=options.n, max_tokens=prompt.num_output, ignore_eos=True, seed=prompt.seed)
            for prompt in prompts
        ]
        llm.generate(given[:_WARM_UP], params[:_WARM_UP], use_tqdm=False)
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - began
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return _Result(seconds, len(outputs), sum(len(output.prompt_token_ids) for output in outputs), num_output)


async def _prompts(options: argparse.Namespace, llm: LLM) -> list[DatasetPrompt]:
    dataset = make_dataset(options, _Local(llm), chat=False)
    await dataset.prepare()
    made = []
    for _ in range(options.num_prompts):
        prompt = await dataset.make()
        if prompt is None:
            break
        made.append(prompt)
    return made


class _Local:
    """Implements Vocabulary with the engine's own tokenizer."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.get_tokenizer()

    async def token_pool(self) -> list[int]:
        return list(range(_FIRST_TOKEN_ID, self._tokenizer.vocab_size))

    async def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))
