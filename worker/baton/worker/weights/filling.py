"""Fills a model's weights from a checkpoint, which is checked as a whole before a byte of its tensors is read."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Weights
from baton.worker.weights.build import build_weights, is_redundant
from baton.worker.weights.checkpoint import WrongTensor
from baton.worker.weights.files.safetensors_file import DTYPES, QUANTIZED_DTYPES
from baton.worker.weights.heads import tied_source, with_true_head
from baton.worker.weights.stored_experts import with_stored_experts
from baton.worker.weights.stream.pieces import Coding, Place
from baton.worker.weights.stream.progress import LoadProgress
from baton.worker.weights.stream.streaming import Streamed, StreamSettings, TensorStream
from baton.worker.weights.tensors import Tensors

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NAMED_PROBLEMS = 4  # in an error; the others are counted


@dataclass(frozen=True, slots=True)
class FilledWeights:
    """Weights, the config that they are of, and what reading them took."""

    config: ModelConfig
    weights: Weights
    streamed: Streamed = Streamed()  # noqa: RUF009 - frozen


def load_weights(
    config: ModelConfig,
    checkpoint: Tensors,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    settings: StreamSettings | None = None,
    prefix: str = "",
) -> FilledWeights:
    """Streams a checkpoint's tensors to the device, converted. The model has all tensors whose names begin with
    `prefix`; the log names those of them that it does not need.

    Raises InvalidRequest that names tensors that are missing, misnamed or misshapen.
    """
    if (true := with_true_head(config, checkpoint)) is not config:
        _log.warning(
            "%s: by config.json the head is tied to the embedding, but the checkpoint has another one, which is used",
            checkpoint.source,
        )
        config = true
    config = with_stored_experts(config, checkpoint)
    names = checked_names(config, checkpoint, dtype, prefix)
    stream = TensorStream(device, settings)
    streamed = Streamed()
    progress = LoadProgress()
    total = sum(checkpoint.entry(name).num_bytes for name in set(names.values()))

    def source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        theirs = names[name]
        stream.add(_place(config, checkpoint, theirs, shape, into), checkpoint.in_file_order(theirs, into))

    def read() -> None:
        nonlocal streamed
        before = streamed
        try:
            now = stream.run(
                lambda done, _, seconds: progress(before.num_bytes + done, total, before.seconds + seconds)
            )
        finally:
            progress.end()
        streamed = Streamed(before.num_bytes + now.num_bytes, before.seconds + now.seconds)

    weights = build_weights(config, source, dtype, device, read)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the readers' streams have pools of their own
    return FilledWeights(config, weights, streamed)


@dataclass(slots=True)
class _Checked:
    names: dict[str, str] = field(default_factory=dict)  # the checkpoint's, by ours
    problems: list[str] = field(default_factory=list)
    missing: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


def checked_names(config: ModelConfig, checkpoint: Tensors, dtype: torch.dtype, prefix: str = "") -> dict[str, str]:
    """Returns the checkpoint's name of each tensor that the model needs. Logs those with `prefix` that it does not.

    Raises InvalidRequest for tensors that are missing, misnamed or misshapen.
    """
    found = _Checked()

    def source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        theirs = tied_source(config, checkpoint, name)
        theirs = theirs or next((one for one in _spellings(config, name) if one in checkpoint), "")
        if not theirs:
            found.missing.append((name, shape))
            return
        found.names[name] = theirs
        try:
            _check_stored(_place(config, checkpoint, theirs, shape, into), into, theirs)
        except WrongTensor as error:
            found.problems.append(error.message)

    build_weights(config, source, dtype, torch.device("meta"))
    unused = sorted(set(checkpoint.names).difference(found.names.values()))
    unused = [name for name in unused if name.startswith(prefix) and not is_redundant(name, config)]
    problems = [*found.problems, *_missing(config, checkpoint, found.missing, unused)]
    if problems:
        more = f"; and {len(problems) - _NAMED_PROBLEMS} more tensors" if len(problems) > _NAMED_PROBLEMS else ""
        raise InvalidRequest("; ".join(problems[:_NAMED_PROBLEMS]) + more, field="model")
    if unused:
        _log.warning("%d tensors of %s are not used: %s", len(unused), checkpoint.source, ", ".join(unused[:4]))
    return found.names


def _spellings(config: ModelConfig, name: str) -> list[str]:
    """Returns the names that checkpoints may have for a tensor."""
    names = config.names.spellings(name)
    others = {} if config.weight_format is None else config.weight_format.made().other_endings
    for ours, theirs in others.items():
        if name.endswith(ours):
            names += [one.removesuffix(ours) + theirs for one in names]
    return names


def _place(config: ModelConfig, checkpoint: Tensors, name: str, shape: tuple[int, ...], into: Tensor) -> Place:
    decode = None if config.weight_format is None else config.weight_format.made().decoder_of(name)
    if decode is None:
        place = checkpoint.place(name, shape)
        packed = into.dtype is torch.uint8 and place.coding.decode is not None
        return place._replace(coding=Coding(torch.uint8)) if packed else place
    entry = checkpoint.entry(name)
    coding = Coding(torch.float32, block_bytes=entry.num_bytes, decode=decode)
    return checkpoint.place(name, entry.shape)._replace(coding=coding)


def _check_stored(place: Place, into: Tensor, name: str) -> None:
    """Raises WrongTensor for a quantized tensor where the model needs floats, and the other way round."""
    stored = place.coding.dtype
    floats = DTYPES.values()
    if stored == into.dtype or (stored in floats and into.dtype in floats):
        return
    if stored is torch.float8_e8m0fnu and into.dtype is torch.float32:  # powers of two, which are scales
        return
    allowed = ", ".join(DTYPES) if into.dtype in floats else _shown(into.dtype)
    why = "" if into.dtype in floats else "; if the checkpoint leaves this linear out, so must quantization_config"
    raise WrongTensor(
        f"{place.path}: {name} has dtype {_shown(stored)}; it must be one of {allowed}{why}", field="model"
    )


def _shown(dtype: torch.dtype) -> str:
    return next((name for name, one in {**DTYPES, **QUANTIZED_DTYPES}.items() if one is dtype), str(dtype))


def _missing(
    config: ModelConfig, checkpoint: Tensors, missing: list[tuple[str, tuple[int, ...]]], unused: Collection[str]
) -> list[str]:
    """Describes missing tensors; the first ones with the nearest name that is not used."""
    problems = []
    for index, (name, shape) in enumerate(missing):
        problem = f"{checkpoint.source}: no file holds the tensor {checkpoint.name_in_file(name)} {list(shape)}"
        if name == f"{config.names.lm_head}.weight":
            problem += (
                ", and by config.json the head is not tied to the embedding; if it is, set "
                """--hf-overrides '{"tie_word_embeddings": true}'"""
            )
        elif index < _NAMED_PROBLEMS and (nearest := difflib.get_close_matches(name, unused, n=1)):
            problem += f"; the nearest name there is {nearest[0]}"
        problems.append(problem)
    return problems
