"""Compares a prefill and a decode worker with one worker for both: TTFT, exposed transfer time, hand-over, ITL.

baton bench tandem [--executor sim|cpu|cuda] [--model PRESET_OR_FOLDER] [--lengths 2048,8192,32768]
    [--devices 0,1] [--num-blocks N] [--transports auto] [--json PATH]

exposed     from the first token at the decode worker to the arrival of the last block
landed      from the first token at the prefill worker to the arrival of the last block
launched    from the same moment to the launch of the decode worker's step that computes the second token
1st token   from the same moment to the first token at the client; the 2nd token likewise
ITL         of neighbours, which only decode: alone; with prompts arriving at the given concurrency; and "along" as many
            requests of such prompts that have been transferred and only decode, whose KV a step reads too

Both workers and the client must share a host: their clocks are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.transfer.tandem_runs import Answer, Deployment, deployment

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_OUTPUT_TOKENS = 16
_VOCAB_SIZES = {"sim": 4000, "cpu": 4000, "cuda": 32000}
_LENGTHS = {"sim": "512,2048,7168", "cpu": "256,1024,1792", "cuda": "2048,4096,8192,16384,32768"}
_MODELS = {"sim": "none", "cpu": "models/storyteller-7m", "cuda": "llama-3.1-8b"}


@dataclass(frozen=True)
class Figures:
    """Figures of one deployment and prompt length, in seconds. None: not in this deployment."""

    deployment: str
    num_prompt_tokens: int
    ttft: float  # median, one prompt at a time
    exposed: float | None = None  # median
    exposed_share: float | None = None  # of TTFT, median
    landed: float | None = None
    launched: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    num_bytes: float | None = None
    num_local: int = 0  # prompts that the decode worker computed itself
    itl_p50_alone: float = 0.0
    itl_p99_alone: float = 0.0
    itl_p50_beside: float = 0.0
    itl_p99_beside: float = 0.0
    itl_p50_along: float = 0.0
    itl_p99_along: float = 0.0
    loaded_ttft: float = 0.0  # median, at the given concurrency
    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0


async def measure(served: Deployment, name: str, num_tokens: int, options: argparse.Namespace) -> Figures:
    """Returns all figures of one prompt length."""
    async with served.stream() as stream:
        await served.window(stream, num_tokens, 2, 1, 4)  # warms up: connections, kernels
        single = await served.window(stream, num_tokens, options.prompts, 1, _OUTPUT_TOKENS)
        resting = await served.rest(stream, options.seconds, options.neighbours)
        loaded = await served.window(
            stream, num_tokens, options.prompts * 2, options.concurrency, _OUTPUT_TOKENS, options.neighbours
        )
        along = await served.rest(stream, options.seconds, options.neighbours, [num_tokens] * options.concurrency)
    num_output = len(loaded.answers) * _OUTPUT_TOKENS + loaded.num_neighbour_tokens
    return Figures(
        deployment=name,
        num_prompt_tokens=num_tokens,
        ttft=statistics.median(one.ttft for one in single.answers),
        **(_handover(served, single.answers) if served.prefill else {}),
        itl_p50_alone=percentile(resting.neighbour_gaps, 50),
        itl_p99_alone=percentile(resting.neighbour_gaps, 99),
        itl_p50_beside=percentile(loaded.neighbour_gaps, 50),
        itl_p99_beside=percentile(loaded.neighbour_gaps, 99),
        itl_p50_along=percentile(along.neighbour_gaps, 50),
        itl_p99_along=percentile(along.neighbour_gaps, 99),
        loaded_ttft=statistics.median(one.ttft for one in loaded.answers),
        prompt_tokens_per_second=len(loaded.answers) * num_tokens / loaded.seconds,
        output_tokens_per_second=num_output / loaded.seconds,
    )


def _handover(served: Deployment, answers: Sequence[Answer]) -> dict[str, float | int | None]:
    records = served.records()
    exposed, shares, landed, launched, first, second, num_bytes = [], [], [], [], [], [], []
    for one in answers:
        record = records.get(one.request_id, {})
        if "received_landed_at" not in record or "sent_computed_at" not in record:
            continue
        first_token_at = record["received_first_token_at"]
        waited = max(0.0, record["received_landed_at"] - first_token_at) if first_token_at else 0.0
        exposed.append(waited)
        shares.append(waited / one.ttft)
        landed.append(max(0.0, record["received_landed_at"] - record["sent_computed_at"]))
        launched.append(max(0.0, record["received_launched_at"] - record["sent_computed_at"]))
        first.append(one.arrivals[0] - record["sent_computed_at"])
        second.append(one.arrivals[1] - record["sent_computed_at"])
        num_bytes.append(record["received_num_bytes"])
    medians = {
        name: statistics.median(values) if values else None
        for name, values in (
            ("exposed", exposed),
            ("exposed_share", shares),
            ("landed", landed),
            ("launched", launched),
            ("first_token", first),
            ("second_token", second),
            ("num_bytes", num_bytes),
        )
    }
    return {**medians, "num_local": len(answers) - len(exposed)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile by the nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def table(rows: Sequence[Figures]) -> str:
    """Returns the printed table, in milliseconds."""
    header = (
        "workers", "prompt", "TTFT", "exposed", "of TTFT", "landed", "launched", "1st token", "2nd token", "MiB",
        "local", "ITL p50", "p99", "p50 beside", "p99 beside", "p50 along", "p99 along", "loaded TTFT", "prompt tok/s",
        "output tok/s",
    )  # fmt: skip
    lines = []
    for row in rows:
        share = "-" if row.exposed_share is None else f"{row.exposed_share:.2%}"
        size = "-" if row.num_bytes is None else f"{row.num_bytes / 2**20:.1f}"
        gaps = (row.itl_p50_alone, row.itl_p99_alone, row.itl_p50_beside, row.itl_p99_beside)
        times = (*gaps, row.itl_p50_along, row.itl_p99_along, row.loaded_ttft)
        lines.append(
            (
                row.deployment, str(row.num_prompt_tokens), _ms(row.ttft), _ms(row.exposed), share, _ms(row.landed),
                _ms(row.launched), _ms(row.first_token), _ms(row.second_token), size, str(row.num_local),
                *(_ms(one) for one in times),
                f"{row.prompt_tokens_per_second:.0f}", f"{row.output_tokens_per_second:.0f}",
            )
        )  # fmt: skip
    return render_table(header, lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def worker_flags(options: argparse.Namespace, longest: int) -> dict[str, object]:
    """Returns the flags of every worker."""
    executor = options.executor
    flags: dict[str, object] = {
        "executor": executor,
        "model": options.model or _MODELS[executor],
        "transports": options.transports,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "drain_timeout": 0.0,
        "verify_transfers": options.verify,
    }
    if executor == "cuda":
        flags |= {"load_format": options.load_format, "max_model_len": longest + 4096}
    elif executor == "cpu":
        flags |= {"threads": 1}
    else:
        flags |= {"num_blocks": 8192}
    if options.num_blocks:
        flags |= {"num_blocks": options.num_blocks}
    return flags


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("sim", "cpu", "cuda"), default="sim")
    parser.add_argument("--model", default="", help="a preset (cuda) or a folder")
    parser.add_argument("--load-format", default="dummy", help="load format with executor=cuda")
    parser.add_argument("--lengths", default="", help="prompt tokens, separated by commas")
    parser.add_argument("--prompts", type=int, default=10, help="prompts sent one at a time; twice as many under load")
    parser.add_argument("--concurrency", type=int, default=2, help="concurrent prompts under load")
    parser.add_argument("--neighbours", type=int, default=8, help="requests that decode during the measurements")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement of their decoding")
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of each worker (cuda: 0,1)")
    parser.add_argument("--num-blocks", type=int, default=0, help="KV blocks per worker, if two share a GPU")
    parser.add_argument("--transports", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--verify", action="store_true", help="verify checksums")
    parser.add_argument("--only", choices=("1P1D", "both"), help="run one deployment only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the workers' logs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both deployments one after the other."""
    options = parse(argv)
    lengths = [int(one) for one in (options.lengths or _LENGTHS[options.executor]).split(",")]
    devices = tuple((options.devices or ("0,1" if options.executor == "cuda" else "")).split(","))
    flags = worker_flags(options, max(lengths))
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory() as made:
        folder = options.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("1P1D", "both"):
            if options.only not in (None, name):
                continue
            given = devices if devices != ("",) else ()
            vocab_size = _VOCAB_SIZES[options.executor]
            with deployment(folder, name == "1P1D", flags, given, vocab_size, options.seed) as served:
                rows += [asyncio.run(measure(served, name, length, options)) for length in lengths]
    facts = machine_facts(("torch", "grpcio"))
    print(f"{options.executor}, {flags['model']}, transports {options.transports}; {facts_line(facts)}; times in ms")
    print(table(rows))
    write_json(options.json, {"facts": facts, "flags": flags, "figures": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
