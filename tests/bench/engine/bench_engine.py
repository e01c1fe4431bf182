"""Measures the engine without gRPC: offline workloads `requests x in/out`, next to vLLM's figures.

baton bench engine --preset-table 8b|0.6b|30b-a3b|30b-a3b-fp8|gpt-oss-mxfp4|all [--json PATH]
baton bench engine --model llama-3.1-8b --workload 256x512/256 --workload '256x(4096+64)/32'
baton bench engine --model qwen3-0.6b --workload 256x128/128 --sampling greedy --sampling qwen_rep
baton bench engine --executor cpu --model models/storyteller-7m --workload 4x64/32
baton bench engine --model llama-3.1-8b --model-impl transformers --workload 64x512/128
baton bench engine --model qwen3-30b-a3b --set quantization=fp8 --workload 1x128/256
baton bench engine --model qwen3-30b-a3b-fp8 --workload 256x512/256 --repeat 1 --profile
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

from bench.engine.runs import Outcome, Plan, RowResult, RunFailed, run_plan
from bench.engine.sampling import SAMPLINGS
from bench.engine.workloads import TABLES, VLLM, VLLM_SECONDS, Workload, vllm_seconds

from baton.rpc.errors import ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.services.settings import SettingsError, options_of
from baton.worker.config import WorkerConfig
from baton.worker.models.presets import PRESETS

_EXECUTORS = ("cuda", "cpu", "sim")
_MOST_REQUESTS = 1024  # rows of the batch if a workload has more requests


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workloads, prints one table, and writes JSON. Returns an exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        plans = _plans(options)
    except (SettingsError, ServiceError, ValueError) as error:
        print(f"baton bench engine: {error}", file=sys.stderr)
        return 2
    problem = _missing_device(options.executor)
    if problem:
        print(f"baton bench engine: {problem}", file=sys.stderr)
        return 1
    try:
        outcomes = _run(plans)
    except (ServiceError, RunFailed, BrokenProcessPool) as error:
        print(f"baton bench engine: {error}", file=sys.stderr)
        return 1
    _show(options, plans, outcomes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=_EXECUTORS, default="cuda")
    parser.add_argument("--preset-table", choices=tuple(TABLES), help="runs the workloads that vLLM was measured on")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"a folder, or a shape: {', '.join(PRESETS)}")
    parser.add_argument("--model-impl", choices=("auto", "baton", "transformers"), default="auto")
    parser.add_argument("--workload", action="append", default=[], help="REQUESTSxIN/OUT or REQUESTSx(SHARED+OWN)/OUT")
    parser.add_argument(
        "--sampling",
        action="append",
        choices=(*SAMPLINGS, "all"),
        help="sampling of the requests; several are measured in turns and compared with the first",
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed passes per row, of which the median is reported")
    parser.add_argument("--warm-up", type=int, default=16, help="requests before a row's first pass")
    parser.add_argument("--warm-prefix", action="store_true", help="cache shared tokens before the timed passes")
    parser.add_argument("--max-num-requests", type=int, help="rows of the batch (default: the most requests)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any setting of a worker")
    parser.add_argument(
        "--profile", action="store_true", help="one more pass, whose kernels are printed by name, of some steps"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one pass may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _plans(options: argparse.Namespace) -> list[Plan]:
    """Returns one plan per model. Raises ValueError, SettingsError or ServiceError for invalid values."""
    if options.repeat < 1 or options.warm_up < 0:
        raise ValueError("--repeat must be at least 1, --warm-up at least 0")
    if options.profile and options.executor == "sim":
        raise ValueError("--profile needs --executor cuda or cpu: sim computes nothing")
    if options.preset_table:
        if options.workload:
            raise ValueError("--preset-table has its own workloads: leave --workload out")
        return [_plan(options, model, tuple(VLLM_SECONDS[model])) for model in TABLES[options.preset_table]]
    if not options.workload:
        raise ValueError("give --workload or --preset-table")
    return [_plan(options, options.model, tuple(Workload.parse(text) for text in options.workload))]


def _plan(options: argparse.Namespace, model: str, workloads: tuple[Workload, ...]) -> Plan:
    most = max(workload.num_requests for workload in workloads)
    longest = max(workload.num_total for workload in workloads)
    fields: dict[str, Any] = {
        "executor": options.executor,
        "model": model,
        "load_format": "dummy" if model in PRESETS else "auto",
        "model_impl": options.model_impl,
        "max_num_requests": options.max_num_requests or min(most, _MOST_REQUESTS),
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": longest,
        "max_queue": 1 << 20,
        **_settings(options.set),
    }
    if options.executor == "sim" and not {"num_blocks", "kv_cache_memory"} & fields.keys():
        block_size = fields.get("block_size", WorkerConfig().block_size)
        fields["num_blocks"] = max(w.num_requests * (w.num_total // block_size + 2) for w in workloads)
    config = WorkerConfig(**fields)
    config.validate()
    return Plan(
        config,
        workloads,
        _samplings(options),
        options.repeat,
        options.warm_up,
        options.warm_prefix,
        options.timeout,
        options.seed,
        options.profile,
    )


def _samplings(options: argparse.Namespace) -> tuple[str, ...]:
    asked = options.sampling or ["greedy"]
    return tuple(SAMPLINGS) if "all" in asked else tuple(dict.fromkeys(asked))


def _settings(words: Sequence[str]) -> dict[str, Any]:
    known = {option.field: option for option in options_of("worker", WorkerConfig)}
    values = {}
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in known:
            raise ValueError(f"--set {word!r}: a worker has no setting {name!r}; see baton worker --help")
        values[name] = known[name].parse(value, f"--set {name}")
    return values


def _missing_device(executor: str) -> str:
    if executor != "cuda":
        return ""
    import torch

    if torch.cuda.is_available():
        return ""
    return f"--executor cuda needs an NVIDIA GPU, and torch {torch.__version__} sees none; --executor cpu needs none"


def _run(plans: Sequence[Plan]) -> list[Outcome]:
    if len(plans) == 1:
        return [run_plan(plans[0], _say)]
    outcomes = []
    for plan in plans:
        # Each model runs in its own process, which frees its device memory for the next model.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes.append(pool.submit(_run_apart, plan).result())
    return outcomes


def _run_apart(plan: Plan) -> Outcome:
    try:
        return run_plan(plan, _say)
    except ServiceError as error:
        raise RunFailed(error.message) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(options: argparse.Namespace, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
    card = {"cuda": _card_name, "cpu": str, "sim": lambda: "simulator"}[options.executor]()
    facts = machine_facts(("torch", "triton") if options.executor != "sim" else (), card)
    rows = [row for outcome in outcomes for row in outcome.rows]
    print(f"engine, executor {options.executor}: {facts_line(facts)}; median of {options.repeat} runs")
    header = ["workload", "seconds", "min..max", "out tok/s", "in tok/s", "ms/token", "steps", "vLLM s", "x vLLM"]
    peers = [_vllm_seconds(options, row) for row in rows]
    cells = [_cells(row, theirs) for row, theirs in zip(rows, peers, strict=True)]
    samplings = _samplings(options)
    if len(samplings) > 1:
        header.append(f"x {samplings[0]}")
        cells = [(*cell, f"{_ratio(row, rows):.3f}") for row, cell in zip(rows, cells, strict=True)]
    print(render_table(header, cells, options.markdown))
    if any(peers):
        prefix = "cached before" if options.warm_prefix else "computed within the time"
        print(f"vLLM: {VLLM}; x vLLM over 1 is faster than it; shared prefixes are {prefix}")
    for plan, outcome in zip(plans, outcomes, strict=True):
        if outcome.expert_hits:
            print(f"{plan.config.model}: {outcome.expert_hits}")
        for one in outcome.profiles:
            print("\n".join(one.lines(options.markdown)))
    document = {
        **facts,
        "executor": options.executor,
        "engines": [
            {
                "config": asdict(plan.config),
                "start_seconds": outcome.start_seconds,
                "num_blocks": outcome.num_blocks,
                "expert_hits": outcome.expert_hits,
                "profiles": [asdict(one) for one in outcome.profiles],
                "rows": [_record(row, _vllm_seconds(options, row)) for row in outcome.rows],
            }
            for plan, outcome in zip(plans, outcomes, strict=True)
        ],
    }
    write_json(options.json, document)


def _card_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _ratio(row: RowResult, rows: Sequence[RowResult]) -> float:
    """Returns the median ratio of the row's time to that of the first sampling in the same turn."""
    first = next(each for each in rows if (each.model, each.workload) == (row.model, row.workload))
    turns = zip(row.runs, first.runs, strict=True)
    return statistics.median(own.seconds / theirs.seconds for own, theirs in turns)


def _vllm_seconds(options: argparse.Namespace, row: RowResult) -> float | None:
    """Returns vLLM's time. None: it was not measured, or this executor or sampling is not comparable."""
    alike = options.executor == "cuda" and row.sampling == "greedy"
    return vllm_seconds(row.model, row.workload) if alike else None


def _cells(row: RowResult, theirs: float | None) -> tuple[str, ...]:
    workload, seconds = row.workload, row.seconds
    spread = sorted(run.seconds for run in row.runs)
    return (
        f"{row.model}, {workload}" + ("" if row.sampling == "greedy" else f", {row.sampling}"),
        f"{seconds:.3f}",
        f"{spread[0]:.3f}..{spread[-1]:.3f}",
        f"{workload.all_outputs / seconds:,.0f}",
        f"{workload.all_prompts / seconds:,.0f}",
        f"{1000 * seconds / workload.num_output:.3f}",
        str(row.median.num_steps),
        "-" if theirs is None else f"{theirs:.3f}",
        "-" if theirs is None else f"{theirs / seconds:.2f}",
    )


def _record(row: RowResult, theirs: float | None) -> dict[str, Any]:
    workload, seconds = row.workload, row.seconds
    return {
        "model": row.model,
        "workload": str(workload),
        "sampling": row.sampling,
        **asdict(workload),
        "seconds": seconds,
        "output_tokens_per_second": workload.all_outputs / seconds,
        "input_tokens_per_second": workload.all_prompts / seconds,
        "ms_per_token": 1000 * seconds / workload.num_output,
        "vllm_seconds": theirs,
        "times_vllm": None if theirs is None else theirs / seconds,
        "runs": [asdict(run) for run in row.runs],
    }


if __name__ == "__main__":
    sys.exit(main())
