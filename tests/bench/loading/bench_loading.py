"""GB/s at which a checkpoint is loaded, against a raw read of the same files by as many readers, in turns.

baton bench loading [--device cpu|cuda] [--gb 4] [--shards 4] [--experts] [--cache dropped warm] [--folder PATH]

Writes a checkpoint of random bytes into a temporary folder. Before each read its pages are dropped from the page cache
(posix_fadvise), with `--cache warm` they are left there. `raw` reads the files into reused buffers, `raw direct` past
the page cache (O_DIRECT). On a CPU, `touch` populates and writes as much fresh memory as the weights take, without a
read: its rate is in bytes of the files too. On a GPU, shares are of the best raw read into pinned buffers that are
copied to the device meanwhile, and `copy` does this without a read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

import numpy as np
import torch
from bench.loading.raw_reads import DeviceReads, drop_pages, read_to_host
from safetensors.torch import save_file

from baton.worker.models.config import ModelConfig
from baton.worker.models.registry import load_config
from baton.worker.weights.build import build_weights
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.filling import load_weights
from baton.worker.weights.stream.fresh_memory import populate
from baton.worker.weights.stream.streaming import StreamSettings, stream_settings

_DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_LAYER_GB = {"dense": 0.436, "experts": 1.249}


@dataclass(frozen=True)
class Row:
    """One way to read the files, over all rounds."""

    what: str
    cache: str
    gb_per_second: float  # median
    lowest: float
    highest: float
    first: float
    share_of_raw: float  # of the median of the best raw read


def main() -> None:
    """Reads the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--experts", action="store_true", help="a tensor for each of 128 experts, of 3 MB")
    parser.add_argument("--readers", type=int, default=0, help="0: as many as a worker takes")
    parser.add_argument("--read-mib", type=int, default=0, help="of one read. 0: as a worker takes")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="on the device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", nargs="+", default=["dropped"], choices=("dropped", "warm"), help="the page cache")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        config = write_checkpoint(Path(folder), options)
        ways = made_ways(Path(folder), config, options)
        rows = [row for cache in options.cache for row in measure(Path(folder), ways, cache, options)]
    print(f"peak host memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def settings_of(options: argparse.Namespace) -> StreamSettings:
    """Returns a worker's settings, with those of the command line."""
    settings = stream_settings(torch.device(options.device))
    return replace(
        settings,
        num_readers=options.readers or settings.num_readers,
        read_bytes=options.read_mib << 20 or settings.read_bytes,
    )


def made_ways(folder: Path, config: ModelConfig, options: argparse.Namespace) -> Mapping[str, Callable[[], object]]:
    """Returns the ways to read the files, by name. Those that make the floor begin with `raw`, or on a GPU `device`."""
    paths = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    device, dtype, settings = torch.device(options.device), getattr(torch, options.dtype), settings_of(options)
    ways: dict[str, Callable[[], object]] = {
        "raw": partial(read_to_host, paths, settings, direct=False),
        "load": partial(load, folder, config, dtype, device, settings),
    }
    if hasattr(os, "O_DIRECT"):
        ways["raw direct"] = partial(read_to_host, paths, settings, direct=True)
    if options.device == "cpu":
        ways["touch"] = partial(touch, size * dtype.itemsize // torch.bfloat16.itemsize, settings)
        return ways
    reads = DeviceReads(device, settings)
    ways["device"] = partial(reads, paths, direct=False)
    if hasattr(os, "O_DIRECT"):
        ways["device direct"] = partial(reads, paths, direct=True)
    return {**ways, "copy": partial(reads.copy, size)}


def measure(
    folder: Path, ways: Mapping[str, Callable[[], object]], cache: str, options: argparse.Namespace
) -> list[Row]:
    """Runs the ways interleaved, round by round, and prints the table."""
    paths = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            if cache == "dropped":
                drop_pages(paths)
            started = time.perf_counter()
            kept = way()
            rates[name].append(size / 1e9 / (time.perf_counter() - started))
            del kept
    rows = rows_of(rates, cache, "raw" if options.device == "cpu" else "device")
    report(rows, f"{size / 1e9:.2f} GB in {len(paths)} files, page cache {cache}", options)
    return rows


def write_checkpoint(folder: Path, options: argparse.Namespace) -> ModelConfig:
    """Writes bf16 tensors of random bytes, in shards of about one size."""
    kind = "experts" if options.experts else "dense"
    num_layers = max(1, round((options.gb - 0.5) / _LAYER_GB[kind]))
    raw = {**(_EXPERTS if options.experts else _DENSE), "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...], into: torch.Tensor) -> None:
        shapes[name] = shape

    build_weights(config, note, torch.bfloat16, torch.device("meta"))
    random = np.random.default_rng(0)
    names = list(shapes)
    weight_map = {}
    for shard in range(options.shards):
        mine = names[shard * len(names) // options.shards : (shard + 1) * len(names) // options.shards]
        file = f"model-{shard + 1:05}-of-{options.shards:05}.safetensors"
        save_file({name: random_tensor(random, shapes[name]) for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    os.sync()
    return config


def random_tensor(random: np.random.Generator, shape: Sequence[int]) -> torch.Tensor:
    """Returns bf16 numbers of random bits."""
    bits = random.integers(0, 1 << 16, size=tuple(shape), dtype=np.uint16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def load(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, settings: StreamSettings
) -> object:
    """Loads the weights as a worker does."""
    with Checkpoint(folder) as checkpoint:
        filled = load_weights(config, checkpoint, dtype, device, settings)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return filled.weights


def touch(num_bytes: int, settings: StreamSettings) -> torch.Tensor:
    """Writes to fresh memory in several threads, by parts of the size of a read, as a load does."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)

    def run(share: torch.Tensor) -> None:
        for part in share.split(settings.read_bytes):
            populate(part)
            part.fill_(1)

    threads = [threading.Thread(target=run, args=(share,)) for share in memory.chunk(settings.num_readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return memory


def rows_of(rates: Mapping[str, list[float]], cache: str, floor: str) -> list[Row]:
    """Returns a row for each way. `floor`: what the names of the raw reads begin with."""
    best = max(statistics.median(rates[name]) for name in rates if name.startswith(floor))
    return [
        Row(name, cache, statistics.median(one), min(one), max(one), one[0], statistics.median(one) / best)
        for name, one in rates.items()
    ]


def report(rows: Sequence[Row], what: str, options: argparse.Namespace) -> None:
    """Prints a line for each way."""
    settings = settings_of(options)
    print(
        f"{what}; {settings.num_readers} readers of {settings.read_bytes >> 20} MiB, "
        f"to {options.device} as {options.dtype}; {options.rounds} rounds"
    )
    for row in rows:
        spread = f"({row.lowest:.2f} to {row.highest:.2f}, first {row.first:.2f})"
        share = f"{row.share_of_raw:5.0%} of the best raw read"
        print(f"{row.what:<13} {row.gb_per_second:6.2f} GB/s {spread}  {share}", flush=True)


if __name__ == "__main__":
    main()
