"""Prints what embedding costs on one GPU, beside what is wanted.

baton bench encoder_figures [--part qwen3|bert-large|http ...] [--passes 2] [--json FILE]

qwen3: tokens a second of Qwen3-Embedding-0.6B's shape, 1,024 texts of 512 tokens. bert-large: the time of its layers'
matrix products alone, of the engine's time for 4,096 texts of 256 tokens. http: requests a second of bge-base's shape
by 64 clients of a running Baton, with one gateway process and with four. Models have random weights. A part prints its
figures when it ends. `--executor cpu --small` runs the same program over tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.engine.bench_encoders import EngineThread
from bench.engine.bench_encoders_gpu import SHAPES, products_seconds, write_tokenizer
from bench.gateway.rig import started
from support.processes.ports import free_ports
from transformers import AutoModel, PretrainedConfig

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.executors.factory import make_executor

_HEADER = ("figure", "found", "wanted", "")
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@dataclass(frozen=True)
class Figure:
    """One measured number, and the least that is wanted."""

    name: str
    value: float
    least: float
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.least

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of its line."""
        digits = 2 if self.least < 10 else 0
        found, least = (f"{value:,.{digits}f}{self.unit}" for value in (self.value, self.least))
        return self.name, found, f">= {least}", f"{'reached' if self.reached else 'MISSED'}; {self.note}"


@dataclass(frozen=True)
class Batch:
    """Texts of one shape that an engine embeds."""

    shape: str
    num_texts: int
    num_tokens: int  # of a text
    budget: int  # tokens of a step

    @property
    def total(self) -> int:
        return self.num_texts * self.num_tokens

    def small(self) -> Batch:
        """Returns a batch for a CPU."""
        return replace(self, num_texts=8, num_tokens=16, budget=64)

    def words(self) -> str:
        return f"{self.shape}, {self.num_texts:,} x {self.num_tokens} tokens"


QWEN3 = Batch("qwen3-embedding-0.6b", 1024, 512, 16384)
BERT_LARGE = Batch("bert-large", 4096, 256, 8192)
GATEWAYS = [1, 4]
TEXTS = "texts.jsonl"


def config_of(shape: str, options: argparse.Namespace) -> PretrainedConfig:
    """Returns the config of a shape, or a tiny one of its architecture."""
    config = SHAPES[shape].make()
    if not options.small:
        return config
    more = {"num_key_value_heads": 2, "head_dim": 16, "layer_types": None} if SHAPES[shape].causal else {}
    return type(config)(vocab_size=512, max_position_embeddings=128, **_TINY, **more)


@contextmanager
def random_model(shape: str, options: argparse.Namespace) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields a folder with random weights of a shape, and its config."""
    config = config_of(shape, options)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda" if options.executor == "cuda" else "cpu"):  # random numbers take seconds on a CPU
            model = AutoModel.from_config(config, dtype=getattr(torch, options.dtype))
        model.save_pretrained(folder)
        del model
        free_memory()
        yield folder, config


def free_memory() -> None:
    """Returns the memory of tensors that are not used any more to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def batch_seconds(batch: Batch, options: argparse.Namespace) -> tuple[float, float]:
    """Returns the engine's fastest time for a batch, and that of the matrix products alone."""
    dtype, device = getattr(torch, options.dtype), torch.device(options.executor)
    with random_model(batch.shape, options) as (folder, config):
        products = min(products_seconds(config, batch.total, batch.budget, dtype, device) for _ in range(2))
        texts = list(
            np.random.default_rng(0).integers(3, config.vocab_size, (batch.num_texts, batch.num_tokens), np.int32)
        )
        rows = 4 * max(1, batch.budget // batch.num_tokens)  # a step is prepared while another runs
        executor = make_executor(
            WorkerConfig(
                model=folder, executor=options.executor, dtype=options.dtype, max_num_requests=rows,
                max_num_batched_tokens=batch.budget, gpu_memory_utilization=0.5, max_model_len=batch.num_tokens + 1,
                convert="embed", num_blocks=256 if options.executor == "cpu" else 0,
            )
        )  # fmt: skip
        engine = EngineThread(executor, rows, batch.budget)
        try:
            seconds = []
            for _ in range(1 + options.passes):
                began = time.perf_counter()
                vectors = engine.encode_all(texts)
                seconds.append(time.perf_counter() - began)
        finally:
            engine.close()
            executor.close()
        if vectors.shape[0] != batch.num_texts or not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-2):
            raise BenchFailed(f"{batch.words()}: the vectors are not embeddings of all texts")
        return min(seconds[1:]), products


def measure_qwen3(options: argparse.Namespace) -> list[Figure]:
    """Returns tokens a second of an embedder with causal layers."""
    batch = QWEN3.small() if options.small else QWEN3
    seconds, products = batch_seconds(batch, options)
    note = f"{seconds:.3f} s; products alone {products:.3f} s"
    return [Figure(batch.words(), batch.total / seconds, 380_000, " tok/s", note)]


def measure_bert_large(options: argparse.Namespace) -> list[Figure]:
    """Returns the share of the matrix products in the time of an encoder."""
    batch = BERT_LARGE.small() if options.small else BERT_LARGE
    seconds, products = batch_seconds(batch, options)
    note = f"{seconds:.3f} s; products alone {products:.3f} s"
    return [Figure(f"{batch.words()}, products alone of it", products / seconds, 0.70, "", note)]


def measure_http(options: argparse.Namespace) -> list[Figure]:
    """Returns requests a second over HTTP, by the number of gateway processes."""
    with random_model("bge-base", options) as (folder, config):
        words = [f"word{number}" for number in range(min(500, config.vocab_size - 2))]
        write_tokenizer(folder, words)
        write_texts(Path(folder) / TEXTS, words)
        return [asyncio.run(_served(folder, count, options)) for count in options.gateways]


def write_texts(path: Path, words: list[str]) -> None:
    """Writes short texts, of 6 to 20 words, as `baton bench embed` reads them."""
    source = np.random.default_rng(0)
    texts = [" ".join(source.choice(words, source.integers(6, 21)).tolist()) for _ in range(512)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


async def _served(folder: str, num_gateways: int, options: argparse.Namespace) -> Figure:
    rest, grpc = free_ports(2)
    flags = {
        "model": folder, "served-model-name": "bge", "executor": options.executor, "dtype": "float16",
        "prefill-workers": 0, "decode-workers": 1, "gateway-processes": num_gateways, "gpu-memory-utilization": 0.5,
        "rest-listen": f"127.0.0.1:{rest}", "grpc-listen": f"127.0.0.1:{grpc}",
    }  # fmt: skip
    if options.executor == "cpu":
        flags["dtype"] = "float32"
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = (sys.executable, "-m", "baton.services.cli", "up", *words)
    async with started("baton up", command, rest, "/ready"):
        found = await _load(f"http://127.0.0.1:{rest}", Path(folder) / TEXTS, options)
    p50, p99 = (1e3 * found["e2e"]["chosen"][point] for point in ("p50", "p99"))
    name = f"bge-base over HTTP, {options.clients} clients, gateway processes: {num_gateways}"
    note = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    return Figure(name, found["requests_per_second"], 1000, " requests/s", note)


async def _load(url: str, texts: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs `baton bench embed`. Raises BenchFailed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = ("--url", url, "--concurrency", options.clients, "--duration", options.seconds, "--dataset-path", texts,
                 "--warm-up", options.clients, "--json", path)  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.services.cli", "bench", "embed", *map(str, words),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await child.communicate()
        if child.returncode or not path.exists():
            raise BenchFailed(f"baton bench embed ended with {child.returncode}: {said.decode()[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


PARTS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "qwen3": measure_qwen3,
    "bert-large": measure_bert_large,
    "http": measure_http,
}


def main(argv: list[str] | None = None) -> int:
    """Prints each part's figures. Returns 1 if a part failed, else 0: a missed figure is marked in its line."""
    parser = argparse.ArgumentParser(
        prog="baton bench encoder_figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="may be repeated; default: all")
    parser.add_argument("--executor", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and batches: to try the program")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--passes", type=int, default=2, help="of a batch, after one that does not count")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--gateways", type=int, nargs="+", default=GATEWAYS, metavar="N", help="gateway processes")
    parser.add_argument("--seconds", type=float, default=3, help="of requests over HTTP")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.executor == "cuda" and not torch.cuda.is_available():
        print("bench encoder_figures: no GPU; try --executor cpu --small", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name() if options.executor == "cuda" else ""
    facts = machine_facts(("torch", "triton", "transformers"), device)
    print(facts_line(facts))
    figures, failed, began = [], False, time.perf_counter()
    for name in options.part or PARTS:
        started_at = time.perf_counter()
        try:
            found = PARTS[name](options)
        except Exception as error:  # another part may still run
            print(f"bench encoder_figures: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
            continue
        figures += found
        free_memory()
        print(f"\n{name}, {time.perf_counter() - started_at:.0f} s")
        print(render_table(_HEADER, [figure.cells() for figure in found], True), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    rows = [
        {"name": one.name, "value": one.value, "least": one.least, "reached": one.reached, "note": one.note}
        for one in figures
    ]
    write_json(options.json, {**facts, "figures": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
