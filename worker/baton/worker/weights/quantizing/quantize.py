"""Writes an unquantized model folder again in a weight format, linear by linear."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.quantization.base import LinearShape
from baton.worker.weights.build import build_weights
from baton.worker.weights.checkpoint import Checkpoint
from baton.worker.weights.filling import checked_names
from baton.worker.weights.quantizing.calibration import Calibration, check_calibrated
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.linears import ModelLinears, Stack
from baton.worker.weights.quantizing.scheme import Packed, Scheme
from baton.worker.weights.quantizing.shards import SHARD_BYTES, ShardWriter
from baton.worker.weights.quantizing.source import UnquantizedFolder

_META = torch.device("meta")

OnProgress = Callable[[int, int], None]  # bytes of the source that are done, and all


@dataclass(slots=True)
class Quantized:
    """The result of quantizing a folder."""

    num_packed: int = 0  # tensors that are packed now
    left_out: list[str] = field(default_factory=list)
    source_bytes: int = 0
    num_bytes: int = 0
    error: float = 0.0  # root of the mean squared rounding error, relative to that of the weights
    worst_error: float = 0.0  # of one tensor
    worst: str = ""
    _squares: float = 0.0
    _error_squares: float = 0.0

    def count(self, name: str, weight: Tensor, meant: Tensor) -> None:
        """Adds a tensor's rounding error."""
        squares, errors = (float(one.double().square().sum()) for one in (weight, weight - meant))
        self.num_packed += 1
        self._squares += squares
        self._error_squares += errors
        self.error = (self._error_squares / self._squares) ** 0.5 if self._squares else 0.0
        relative = (errors / squares) ** 0.5 if squares else 0.0
        if relative >= self.worst_error:
            self.worst, self.worst_error = name, relative


def quantize(
    folder: Path,
    out: Path,
    scheme: Scheme,
    ignore: tuple[str, ...] = (),
    progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    calibration: Calibration | None = None,
) -> Quantized:
    """Writes the folder `out`, which must not exist. Memory holds one output file and one linear; with `calibration`,
    which chooses the integers of the linears, the model too.

    Raises InvalidRequest, before it writes, for a model, a format or sizes that do not go together.
    """
    if out.exists():
        raise InvalidRequest(f"{out} exists already; give the name of a new folder", field="out")
    source = UnquantizedFolder(folder)
    with Checkpoint(folder) as checkpoint, torch.inference_mode():
        plan = _Plan(source, checkpoint, scheme, ignore)
        if calibration is not None:
            plan.calibrate(calibration)
        with _new_folder(out) as partial:
            writer = ShardWriter(partial, shard_bytes)
            result = plan.write(writer, progress)
            writer.close()
            source.copy_rest(partial, plan.settings)
    return result


class _Plan:
    """What is packed and what is copied, checked before anything is written."""

    def __init__(
        self, source: UnquantizedFolder, checkpoint: Checkpoint, scheme: Scheme, ignore: tuple[str, ...]
    ) -> None:
        config = source.config(checkpoint)
        self._config = config
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._chosen: Mapping[str, Integers] = {}  # by a calibration
        self._names = checked_names(config, checkpoint, torch.float32)
        self._linears = ModelLinears(config, ignore, packs_stacks=scheme.packs_stacks)
        names = [f"{part.name}.weight" for shape in self._linears.packed for part in shape.parts]
        self._packed = [self._names[name] for name in (*names, *(stack.name for stack in self._linears.stacks))]
        if not self._packed:
            raise InvalidRequest("ignore names all linears of the model; nothing is left to quantize", field="ignore")
        self.settings = scheme.settings(self._left_out())
        _check_readable(source.quantized_config(config, self.settings))

    def calibrate(self, calibration: Calibration) -> None:
        """Lets a calibration choose the integers. Raises InvalidRequest for a format without."""
        scheme = check_calibrated(self._scheme)
        for shape in self._linears.packed:
            for part in shape.parts:
                name = self._names[f"{part.name}.weight"]
                _check_finite(name, self._checkpoint.tensor(name, (part.rows, shape.in_features)))
        self._chosen = calibration.integers_of([name.removesuffix(".weight") for name in self._packed], scheme)

    def write(self, writer: ShardWriter, progress: OnProgress) -> Quantized:
        """Packs the linears, and copies all other tensors."""
        total = sum(self._checkpoint.entry(name).num_bytes for name in self._checkpoint.names)
        result = Quantized(left_out=self._left_out(), source_bytes=total)
        done = 0
        for shape in self._linears.packed:
            done += self._pack(shape, writer, result)
            progress(done, total)
        for stack in self._linears.stacks:
            done += self._pack_stack(stack, writer, result)
            progress(done, total)
        for name, tensor in self._others():
            writer.add(name, tensor)
            done += tensor.nbytes
            progress(done, total)
        result.num_bytes = writer.num_bytes
        return result

    def _pack(self, shape: LinearShape, writer: ShardWriter, result: Quantized) -> int:
        """Writes the parts of a linear. Returns the bytes that they had."""
        stored = {part: self._names[f"{part.name}.weight"] for part in shape.parts}
        parts = {name: self._checkpoint.tensor(name, (part.rows, shape.in_features)) for part, name in stored.items()}
        for name, weight in parts.items():
            _check_finite(name, weight)
        largest = max(float(weight.abs().max()) for weight in parts.values())
        for name, weight in parts.items():
            values = weight.float()
            packed = self._round(name.removesuffix(".weight"), values, weight.dtype, largest)
            for ending, tensor in packed.tensors.items():
                writer.add(name.removesuffix(".weight") + ending, tensor)
            result.count(name, values, packed.weight)
        return sum(weight.nbytes for weight in parts.values())

    def _round(self, name: str, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        if name in self._chosen:
            return check_calibrated(self._scheme).pack_integers(self._chosen[name], dtype)
        return self._scheme.pack(weight, dtype, largest)

    def _pack_stack(self, stack: Stack, writer: ShardWriter, result: Quantized) -> int:
        """Writes the matrices of all experts. Returns the bytes that they had."""
        name = self._names[stack.name]
        stored = self._checkpoint.tensor(name, (stack.num_experts, stack.columns, stack.rows))
        _check_finite(name, stored)
        packed = []
        for expert, weight in enumerate(stored):
            values = weight.t().float().contiguous()
            packed.append(self._scheme.pack(values, weight.dtype, float(values.abs().max())))
            result.count(f"{name}[{expert}]", values, packed[-1].weight)
        for ending in packed[0].tensors:
            writer.add(name + ending, torch.stack([one.tensors[ending] for one in packed]))
        return stored.nbytes

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        packed = set(self._packed)
        by_file: dict[Path, list[str]] = {}
        for name in self._checkpoint.names:
            if name not in packed:
                by_file.setdefault(self._checkpoint.path_of(name), []).append(name)
        for path, names in by_file.items():
            with safe_open(path, "pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)

    def _left_out(self) -> list[str]:
        """Returns the checkpoint's names of linears that stay as they are, those of a vision tower and the head too."""
        packed, names = set(self._packed), self._config.names
        tables = {f"{one}.weight" for one in (names.embed, names.positions, names.token_types, names.relative) if one}
        embeddings = {theirs for ours, theirs in self._names.items() if ours in tables}
        linears = [self._names.get(f"{name}.weight", name) for name in self._linears.left_out]
        matrices = [
            name
            for name in self._checkpoint.names
            if name.endswith(".weight") and len(self._checkpoint.entry(name).shape) > 1
        ]
        left = {*linears, *matrices} - packed - embeddings
        return sorted({"lm_head", *(name.removesuffix(".weight") for name in left)})


def _check_readable(config: ModelConfig) -> None:
    """Raises InvalidRequest for sizes that the format does not have, by its reader."""
    build_weights(config, lambda name, shape, into: None, torch.float32, _META)


def _check_finite(name: str, weight: Tensor) -> None:
    count = int((~torch.isfinite(weight)).sum())
    if count:
        raise InvalidRequest(
            f"{name} holds {count} values that are not finite: the checkpoint is damaged; download it again",
            field="model",
        )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Makes a folder that is `out` once it is complete. Raises InvalidRequest if it cannot be made."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InvalidRequest(f"{out} cannot be made: {error.strerror}", field="out") from error
    try:
        partial = beside / out.name
        partial.mkdir()  # unlike its parent, with the usual permissions
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(beside)
