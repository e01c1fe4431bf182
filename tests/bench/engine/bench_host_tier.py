"""Measures the time to first token of a prompt that is computed, cached on the device, or cached in host memory.

baton bench host_tier --executor cuda --model llama-3.1-8b
baton bench host_tier --executor cpu --model models/storyteller-7m --tokens 1024

Every prompt is new: it is computed the first time and cached on the device the second time. Other prompts then evict
it until its blocks are in host memory only. With --beside, other requests decode throughout, and the times between
their tokens are reported too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

from baton.rpc.block_hash import HASH_BYTES, hash_blocks
from baton.rpc.errors import ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions, Tier
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.factory import make_executor
from baton.worker.models.presets import PRESETS
from baton.worker.scheduling.settings import EngineSettings

_NAMESPACE = b"baton bench     "
_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_SECONDS = 300.0  # timeout of one request
_SIDE_TOKENS = 2048  # output limit of a concurrently decoding request
_WAYS = ("computed", "device", "host")


class RunFailed(Exception):
    """The measured case could not be produced. The message is for the user."""


@dataclass(slots=True)
class Row:
    """The results for prompts of one length."""

    num_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in _WAYS})
    gaps: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in _WAYS})
    restored_bytes: int = 0
    restore_seconds: float = 0.0

    def median(self, way: str) -> float:
        """The median seconds to the first token."""
        return statistics.median(self.seconds[way])

    def worst_gap(self, way: str) -> float:
        """Returns the 99th percentile between tokens of a concurrently decoding request; 0 without one."""
        return float(np.percentile(self.gaps[way], 99)) if self.gaps[way] else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes JSON. Returns an exit code."""
    options = _parser().parse_args(argv)
    try:
        config = _config(options)
        executor = make_executor(config)
        try:
            rows = _measure(executor, config, options)
        finally:
            executor.close()
    except (ServiceError, RunFailed) as error:
        print(f"baton bench host_tier: {error}", file=sys.stderr)
        return 1
    _show(options, config, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench host_tier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("cuda", "cpu", "sim"), default="cpu")
    parser.add_argument("--model", default="models/storyteller-7m", help=f"a folder, or a shape: {', '.join(PRESETS)}")
    parser.add_argument("--tokens", type=int, action="append", help="tokens per prompt; may be repeated")
    parser.add_argument("--repeat", type=int, default=5, help="prompts per row, of which the median is reported")
    parser.add_argument("--beside", type=int, default=0, help="number of requests that decode concurrently")
    parser.add_argument("--host-cache-gb", type=float, default=0.0, help="0: enough for the longest prompts")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


def _config(options: argparse.Namespace) -> WorkerConfig:
    options.tokens = sorted(options.tokens or ([256, 1024, 4096] if options.executor == "cuda" else [256, 1024]))
    longest, block_size = options.tokens[-1], options.block_size
    if options.tokens[0] < 2 * block_size or options.repeat < 1:
        raise RunFailed(f"--tokens must be at least two blocks of {block_size}, --repeat at least 1")
    num_blocks = 3 * (longest // block_size + 2) + options.beside * (_SIDE_TOKENS // block_size + 1)
    return WorkerConfig(
        executor=options.executor,
        model=options.model,
        load_format="dummy" if options.model in PRESETS else "auto",
        block_size=block_size,
        num_blocks=num_blocks,
        host_cache_gb=options.host_cache_gb or (1.0 if options.executor == "cpu" else 8.0),
        max_num_requests=options.beside + 4,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max(longest + 2, _SIDE_TOKENS if options.beside else 0),
    )


class _Bench:
    """An engine, and concurrently decoding requests."""

    def __init__(self, executor: Executor, config: WorkerConfig, num_beside: int) -> None:
        settings = EngineSettings(
            config.max_num_requests,
            config.max_num_batched_tokens,
            min_host_hit_tokens=0,
            cache_outputs=not config.batch_invariant,
        )
        self.engine = Engine(executor, settings, epoch=1)
        self._vocab_size = executor.model.vocab_size
        self._block_size = config.block_size
        self._num_beside = num_beside
        self._beside: dict[str, float] = {}  # time of each one's last token
        self._random = np.random.default_rng(0)
        self._num_requests = 0

    def prompt(self, count: int) -> list[int]:
        """Returns a new prompt."""
        token_ids: list[int] = self._random.integers(_FIRST_TOKEN_ID, self._vocab_size, size=count).tolist()
        return token_ids

    def first_token(self, prompt: list[int], gaps: list[float] | None = None) -> float:
        """Returns the seconds from the submission to the first token."""
        self._keep_beside()
        request = self._request(prompt, 1)
        began = time.perf_counter()
        self.engine.submit(request)
        while not self._step(request, gaps):
            if time.perf_counter() - began > _SECONDS:
                raise RunFailed(f"a prompt of {len(prompt)} tokens had no token after {_SECONDS:g} s")
        return time.perf_counter() - began

    def evict(self, prompt: list[int]) -> None:
        """Runs other prompts until this one's blocks are in host memory only."""
        whole = (len(prompt) - 1) // self._block_size * self._block_size
        wanted = _split(hash_blocks(_NAMESPACE, prompt[:whole], self._block_size))
        for _ in range(100):
            self.first_token(self.prompt(len(prompt)))
            self._settle()
            on_device, in_host = (_split(self.engine.cached_hashes(tier)) for tier in (Tier.DEVICE, Tier.HOST))
            if wanted.isdisjoint(on_device):
                if wanted <= in_host:
                    return
                raise RunFailed(f"{len(wanted - in_host)} of {len(wanted)} blocks did not reach host memory")
        raise RunFailed("the prompt's blocks do not leave the device")

    def finish(self) -> None:
        """Ends the decoding requests."""
        for request_id in self._beside:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.engine.step()

    def _settle(self) -> None:
        """Waits for running copies."""
        for _ in range(50):
            self._step()
            time.sleep(1e-3)

    def _keep_beside(self) -> None:
        while len(self._beside) < self._num_beside:
            request = self._request(self.prompt(16), _SIDE_TOKENS - 16)
            self.engine.submit(request)
            self._beside[request.request_id] = 0.0
            while not self._step(request):
                pass

    def _step(self, awaited: Request | None = None, gaps: list[float] | None = None) -> bool:
        outputs = self.engine.step()
        if outputs.failures:
            raise RunFailed(f"a request failed: {outputs.failures[0].error.message}")
        now = time.perf_counter()
        for request in outputs.requests:
            last = self._beside.get(request.request_id, 0.0)
            if last and gaps is not None:
                gaps.append(now - last)
            if request.request_id in self._beside:
                self._beside[request.request_id] = now
        for finish in outputs.finishes:
            self._beside.pop(finish.request.request_id, None)
        return awaited in outputs.requests

    def _request(self, prompt: list[int], num_output: int) -> Request:
        self._num_requests += 1
        return Request(
            request_id=f"bench-{self._num_requests}",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=num_output),
            cache_namespace=_NAMESPACE,
        )


def _measure(executor: Executor, config: WorkerConfig, options: argparse.Namespace) -> list[Row]:
    bench = _Bench(executor, config, options.beside)
    rows = []
    for num_tokens in options.tokens:
        _pass(bench, num_tokens, Row(num_tokens))  # warm-up
        row = Row(num_tokens)
        for number in range(options.repeat):
            _pass(bench, num_tokens, row)
            print(f"{num_tokens} tokens: {number + 1}/{options.repeat}", file=sys.stderr, flush=True)
        rows.append(row)
    bench.finish()
    bench.engine.audit()
    return rows


def _pass(bench: _Bench, num_tokens: int, row: Row) -> None:
    prompt = bench.prompt(num_tokens)
    row.seconds["computed"].append(bench.first_token(prompt, row.gaps["computed"]))
    row.seconds["device"].append(bench.first_token(prompt, row.gaps["device"]))
    bench.evict(prompt)
    before = bench.engine.counters()
    row.seconds["host"].append(bench.first_token(prompt, row.gaps["host"]))
    after = bench.engine.counters()
    if after.num_host_hit_tokens == before.num_host_hit_tokens:
        raise RunFailed(f"a prompt of {num_tokens} tokens did not come from host memory")
    row.restored_bytes += after.num_restored_bytes - before.num_restored_bytes
    row.restore_seconds += after.restore_seconds - before.restore_seconds


def _show(options: argparse.Namespace, config: WorkerConfig, rows: Sequence[Row]) -> None:
    card = {"cuda": _card_name, "cpu": str, "sim": lambda: "simulator"}[options.executor]()
    facts = machine_facts(("torch", "triton") if options.executor != "sim" else (), card)
    print(f"host memory, {options.model}, executor {options.executor}: {facts_line(facts)}; median of {options.repeat}")
    header = ["prompt", "computed ms", "device ms", "host ms", "host faster x", "device faster x", "copy GB/s"]
    if options.beside:
        header += [f"gap p99 ms, {way}" for way in _WAYS]
    print(render_table(header, [_cells(row, options.beside) for row in rows], options.markdown))
    document = {**facts, "config": asdict(config), "rows": [{**asdict(row), **_ratios(row)} for row in rows]}
    write_json(options.json, document)


def _ratios(row: Row) -> dict[str, float]:
    return {
        "times_faster_than_computed": row.median("computed") / row.median("host"),
        "copy_bytes_per_second": row.restored_bytes / row.restore_seconds if row.restore_seconds else 0.0,
    }


def _cells(row: Row, num_beside: int) -> list[str]:
    computed, device, host = (row.median(way) for way in _WAYS)
    cells = [str(row.num_tokens), *(f"{1000 * seconds:.2f}" for seconds in (computed, device, host))]
    cells += [f"{computed / host:.2f}", f"{computed / device:.2f}"]
    cells.append(f"{_ratios(row)['copy_bytes_per_second'] / 1e9:.2f}")
    if num_beside:
        cells += [f"{1000 * row.worst_gap(way):.2f}" for way in _WAYS]
    return cells


def _split(packed: bytes) -> set[bytes]:
    """Returns the set of packed block hashes."""
    return {packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)}


def _card_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
