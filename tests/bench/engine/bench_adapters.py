"""Measures what LoRA adapters cost an engine, beside the same engine without them: throughput, and loads beside steps.

baton bench adapters [--model llama-3.1-8b] [--workload 64x512/256] [--repeat 1] [--json PATH]
baton bench adapters --executor cpu --model models/storyteller-7m --workload 4x32/16 --rows base,none:4x8,4x8

Rows are `base`, a worker without adapters; `16x16`, 16 adapters of rank 16 on all linears, used in turns; `64x8+16+64`,
64 adapters of these ranks in turns; `none:16x16`, a worker with room for them whose requests use none; and
`load:16x16`, adapters that come from host memory while other requests decode. Adapters have random values.
"""

from __future__ import annotations

import argparse
import multiprocessing
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

from bench.engine.adapter_runs import STEPS_OF_LOAD, AdapterPlan, LoadRun, RowOf, RowRun, run_rows
from bench.engine.workloads import Workload

from baton.rpc.errors import ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.models.presets import PRESETS

_ROWS = "base,none:16x16,16x16,load:16x16,64x8+16+64"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, prints one table, and writes JSON. Returns an exit code."""
    options = _parser().parse_args(argv)
    try:
        plans = _plans(options)
    except (ServiceError, ValueError) as error:
        print(f"baton bench adapters: {error}", file=sys.stderr)
        return 2
    try:
        runs = [run for plan in plans for run in _run_apart(plan)]
    except (ServiceError, BrokenProcessPool, TimeoutError) as error:
        print(f"baton bench adapters: {error}", file=sys.stderr)
        return 1
    _show(options, runs)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"a folder, or a shape: {', '.join(PRESETS)}")
    parser.add_argument("--workload", default="64x512/256", help="REQUESTSxIN/OUT")
    parser.add_argument("--rows", default=_ROWS, help=f"default: {_ROWS}")
    parser.add_argument("--repeat", type=int, default=3, help="timed passes of a row, of which the median is reported")
    parser.add_argument("--loads", type=int, default=8, help="adapters that load rows load")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one pass may take")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _plans(options: argparse.Namespace) -> list[AdapterPlan]:
    """Returns one plan for each worker: rows whose adapters are alike share one. Raises ValueError."""
    workload = Workload.parse(options.workload)
    if options.repeat < 1 or options.loads < 1:
        raise ValueError("--repeat and --loads must be at least 1")
    grouped: dict[tuple[int, ...], list[RowOf]] = {}
    for text in options.rows.split(","):
        row = RowOf.parse(text)
        grouped.setdefault((row.num_adapters, *row.ranks), []).append(row)
    plans = []
    for rows in grouped.values():
        fields: dict[str, Any] = {"block_size": 16} if options.executor == "cpu" else {}
        if rows[0].num_adapters:
            most = rows[0].num_adapters
            fields |= {"enable_lora": True, "max_loras": most, "max_lora_rank": max(rows[0].ranks)}
        has_loads = any(row.loads for row in rows)
        config = WorkerConfig(
            model=options.model,
            executor=options.executor,
            load_format="dummy" if options.model in PRESETS else "auto",
            max_num_requests=workload.num_requests,
            max_num_batched_tokens=8192,
            max_model_len=workload.num_total + (STEPS_OF_LOAD * (2 * options.loads + 2) if has_loads else 0),
            max_queue=1 << 20,
            **fields,
        )
        config.validate()
        plans.append(AdapterPlan(config, tuple(rows), workload, options.repeat, options.loads, options.timeout))
    return plans


def _run_apart(plan: AdapterPlan) -> list[RowRun | LoadRun]:
    """Runs a worker in its own process, which frees its device memory for the next one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_rows, plan).result()


def _show(options: argparse.Namespace, runs: Sequence[RowRun | LoadRun]) -> None:
    facts = machine_facts(("torch", "triton"), _card_name() if options.executor == "cuda" else "")
    print(f"adapters, executor {options.executor}: {facts_line(facts)}; median of {options.repeat} runs")
    passes = [run for run in runs if isinstance(run, RowRun)]
    base = next((run.seconds for run in passes if run.row == "base"), None)
    workload = Workload.parse(options.workload)
    header = ["row", "workload", "seconds", "out tok/s", "x base", "KV blocks"]
    cells = [
        (
            run.row,
            options.workload,
            f"{run.seconds:.3f}",
            f"{workload.all_outputs / run.seconds:,.0f}",
            "-" if base is None else f"{base / run.seconds:.3f}",
            str(run.num_blocks),
        )
        for run in passes
    ]
    print(render_table(header, cells, options.markdown))
    for load in (run for run in runs if isinstance(run, LoadRun)):
        print(load.summary)
    write_json(options.json, {**facts, "executor": options.executor, "runs": [asdict(run) for run in runs]})


def _card_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
