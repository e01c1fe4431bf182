"""Measures how long a new process takes to its first token: imports, the engine, the token. Then the same once more
in that process.

baton bench startup --model models/storyteller-7m --num-iters 3
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

from baton.services.bench.offline.options import (
    add_numbers,
    engine_arguments_of,
    facts,
    model_of,
    offline_parser,
    print_machine,
    spread_record,
)
from baton.services.bench.report import render_table, write_json

# The process measures itself: its own start is in `process`, of which the parent knows the beginning.
_PROGRAM = """
import json, sys, time
began = time.time()
model, arguments = json.loads(sys.argv[1])
from baton.llm import LLM, SamplingParams
params = SamplingParams(max_tokens=1, temperature=0)
imported = time.time()
def start():
    llm = LLM(model, **arguments)
    ready = time.time()
    llm.generate([[5]], params, use_tqdm=False)
    told = time.time()
    llm.shutdown()
    return ready, told
ready, told = start()
again = time.time()
again_ready, again_told = start()
print(json.dumps([began, imported, ready, told, again, again_ready, again_told]))
"""
_STAGES = ("process", "import", "engine", "first token", "in total", "engine again", "first token again")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts processes and prints the table. Returns an exit code."""
    parser = offline_parser("startup", __doc__)
    add_numbers(parser, (("--num-iters", 3, "processes, one after the other"),))
    options = parser.parse_args(argv)
    try:
        given = json.dumps([model_of(options), engine_arguments_of(options)])
    except ValueError as error:
        print(f"baton bench startup: {error}", file=sys.stderr)
        return 2
    rows: list[tuple[float, ...]] = []
    for _ in range(options.num_iters):
        row = _one(given)
        if isinstance(row, str):
            print(f"baton bench startup: {row}", file=sys.stderr)
            return 1
        rows.append(row)
    columns = dict(zip(_STAGES, zip(*rows, strict=True), strict=True))
    print(f"startup: {model_of(options)}, {options.num_iters} processes")
    print_machine()
    table = [(name, *(f"{of(values):.2f}" for of in (_mean, min, max))) for name, values in columns.items()]
    print(render_table(("seconds", "mean", "least", "most"), table))
    stages = {name: spread_record(values) for name, values in columns.items()}
    write_json(options.json, {**facts(), "model": model_of(options), "stages": stages})
    return 0


def _one(given: str) -> tuple[float, ...] | str:
    """Returns the seconds of each stage, or the last line of what the process said about its failure."""
    before = time.time()
    done = subprocess.run([sys.executable, "-c", _PROGRAM, given], capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    began, imported, ready, told, again, again_ready, again_told = json.loads(done.stdout.splitlines()[-1])
    return (
        began - before,
        imported - began,
        ready - imported,
        told - ready,
        told - before,
        again_ready - again,
        again_told - again_ready,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
