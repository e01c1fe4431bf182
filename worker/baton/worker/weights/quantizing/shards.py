"""Writes tensors into safetensors files of bounded size, with the index that Hugging Face has."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from baton.worker.weights.checkpoint import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 4 << 30


class ShardWriter:
    """Keeps the tensors of one file in memory. `close` names the files and writes the index."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []  # names of their tensors
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes the tensor by the time of `close`."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes what waits, and the index if there are several files."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._waiting, self._path(len(self._shards)), {"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"
