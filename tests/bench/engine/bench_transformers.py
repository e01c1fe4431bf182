"""Compares tokens a second of Transformers' `generate`, of its models on Baton's KV cache, and of Baton's own models.

baton bench transformers [--model llama-3.1-8b] [--workload 64x512/128 64x256/128~0.9] [--json PATH]
baton bench transformers --executor cpu --model models/storyteller-7m --workload 16x64/64

`~0.9` spreads the lengths. `generate` then pads prompts on the left and runs until the longest output; tokens behind a
request's own length are not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

import torch
from bench.engine.runs import Plan, RunFailed, run_plan
from bench.engine.workloads import Workload

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import FAMILIES
from baton.worker.weights.loading import read_config

_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
_PAD = 0
_WARM_UP_OUTPUT = 8  # tokens

# Returns the seconds of each pass, by workload.
Run = Callable[[argparse.Namespace, Sequence[Workload]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Way:
    """The results of one way to generate."""

    name: str
    seconds: list[list[float]]  # of each pass, by workload

    def median(self, index: int) -> float:
        """Returns the median of a workload's passes."""
        return statistics.median(self.seconds[index])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs each way in its own process, and prints one table. Returns an exit code."""
    options = _parser().parse_args(argv)
    if options.executor == "cuda" and not torch.cuda.is_available():
        return _failed("--executor cuda needs an NVIDIA GPU; --executor cpu needs none")
    try:
        workloads = [Workload.parse(text) for text in options.workload]
        architecture = read_config(options.model, _load_format(options.model)).architecture
        ways = [_apart(name, run, options, workloads) for name, run in _ways(architecture).items()]
    except (ServiceError, RunFailed, BrokenProcessPool, ValueError) as error:
        return _failed(str(error))
    _show(options, workloads, ways)
    return 0


def _failed(problem: str) -> int:
    print(f"baton bench transformers: {problem}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench transformers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=tuple(_DTYPES), default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"a folder, or a shape: {', '.join(PRESETS)}")
    parser.add_argument("--workload", nargs="+", default=["64x512/128"], help="REQUESTSxIN/OUT, or ~SPREAD behind it")
    parser.add_argument("--repeat", type=int, default=3, help="timed passes per way; the median is reported")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one pass may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _ways(architecture: str) -> dict[str, Run]:
    """Returns the ways by name. The last one is missing if Baton has no family for the architecture."""
    ways: dict[str, Run] = {
        "Transformers generate": _with_generate,
        "Baton, --model-impl transformers": partial(_with_engine, implementation="transformers"),
    }
    if architecture in FAMILIES:
        ways["Baton, --model-impl baton"] = partial(_with_engine, implementation="baton")
    return ways


def _load_format(model: str) -> str:
    return "dummy" if model in PRESETS else "auto"


def _apart(name: str, run: Run, options: argparse.Namespace, workloads: Sequence[Workload]) -> Way:
    """Runs one way in its own process, which frees its memory for the next one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        way = Way(name, pool.submit(run, options, workloads).result())
    for index, workload in enumerate(workloads):
        print(f"{name}: {workload}: {way.median(index):.3f} s", file=sys.stderr, flush=True)
    return way


def _with_engine(options: argparse.Namespace, workloads: Sequence[Workload], implementation: str) -> list[list[float]]:
    most = max(workload.num_requests for workload in workloads)
    config = WorkerConfig(
        model=options.model,
        load_format=_load_format(options.model),
        model_impl=implementation,
        executor=options.executor,
        dtype=_DTYPES[options.executor],
        threads=options.threads,
        max_num_requests=most,
        max_num_batched_tokens=max(8192, most),
        max_model_len=max(workload.num_total for workload in workloads),
        max_queue=1 << 20,
    )
    plan = Plan(config, tuple(workloads), ("greedy",), options.repeat, 1, False, options.timeout, options.seed)
    try:
        outcome = run_plan(plan, lambda line: None)
    except ServiceError as error:
        raise RunFailed(error.message) from None
    return [[run.seconds for run in row.runs] for row in outcome.rows]


def _with_generate(options: argparse.Namespace, workloads: Sequence[Workload]) -> list[list[float]]:
    """Generates greedily for one batch, with Transformers' own KV cache and attention."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = _transformers_model(options)
    generator = torch.Generator().manual_seed(options.seed)
    seconds = []
    for workload in workloads:
        longest = max(output for _, output in workload.lengths)
        _generated(model, workload, min(_WARM_UP_OUTPUT, longest), generator, options.executor)
        seconds.append(
            [_generated(model, workload, longest, generator, options.executor) for _ in range(options.repeat)]
        )
    return seconds


def _generated(model: Any, workload: Workload, num_output: int, generator: torch.Generator, device: str) -> float:
    """Returns the seconds until all rows have `num_output` tokens."""
    lengths = torch.tensor([workload.num_shared + own for own, _ in workload.lengths])
    longest = int(lengths.max())
    prompts = torch.randint(5, model.config.vocab_size, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - lengths.unsqueeze(1)).long()  # padding is on the left
    prompts, mask = (prompts * mask).to(device), mask.to(device)
    began = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            prompts,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=num_output,
            eos_token_id=None,
            pad_token_id=_PAD,
        )
    assert made[:, longest:].cpu().shape[1] == num_output
    return time.perf_counter() - began


def _transformers_model(options: argparse.Namespace) -> Any:
    import transformers

    dtype = getattr(torch, _DTYPES[options.executor])
    if options.model not in PRESETS:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        return loaded.eval().to(options.executor)
    raw = dict(PRESETS[options.model])
    (name,) = raw.pop("architectures")
    made: Any = getattr(transformers, name)
    if made is None:
        raise InvalidRequest(f"Transformers has no {name}", field="model")
    with torch.device(options.executor):
        return made._from_config(made.config_class.from_dict(raw), dtype=dtype).eval()


def _show(options: argparse.Namespace, workloads: Sequence[Workload], ways: Sequence[Way]) -> None:
    card = str(torch.cuda.get_device_name()) if options.executor == "cuda" else ""
    facts = machine_facts(("torch", "transformers", "triton"), card)
    print(f"{options.model}, {_DTYPES[options.executor]}: {facts_line(facts)}; median of {options.repeat} runs")
    last = ways[-1]
    cells = [
        (
            str(workload),
            way.name,
            f"{way.median(index):.3f}",
            f"{min(way.seconds[index]):.3f}..{max(way.seconds[index]):.3f}",
            f"{workload.all_outputs / way.median(index):,.0f}",
            f"{ways[0].median(index) / way.median(index):.2f}",
            f"{last.median(index) / way.median(index):.2f}",
        )
        for index, workload in enumerate(workloads)
        for way in ways
    ]
    header = ("workload", "way", "seconds", "min..max", "out tok/s", "x generate", f"x {last.name.rpartition(' ')[2]}")
    print(render_table(header, cells, options.markdown))
    rows = [
        {**asdict(workload), "ways": [{"name": way.name, "seconds": way.seconds[index]} for way in ways]}
        for index, workload in enumerate(workloads)
    ]
    write_json(options.json, {**facts, "model": options.model, "workloads": rows})


if __name__ == "__main__":
    sys.exit(main())
