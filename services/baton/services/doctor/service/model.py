"""The model's folder: whether it is complete and readable, and fits into memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import ServiceError
from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.targets import Targets

_TOPIC = "model"
_GIB = 1 << 30
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
_NO_SAFETENSORS = "no safetensors file, perhaps a Git LFS pointer"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The contents of one folder."""

    folder: str
    exists: bool = False
    is_hub_id: bool = False
    config_problem: str = ""
    architecture: str = ""
    refusal: str = ""  # why a worker cannot run it
    is_foreign: bool = False  # no family of Baton's computes it
    has_tokenizer: bool = False
    weight_bytes: int = 0
    num_values: int = 0  # of all weights
    is_quantized: bool = False
    missing: tuple[str, ...] = ()  # files of the index
    broken: tuple[str, ...] = ()  # truncated files, or not safetensors


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory for weights in bytes. None is unknown."""

    gpu: int | None = None
    memory: int | None = None


def check_model(facts: ModelFacts, targets: Targets, capacity: Capacity) -> Iterator[Finding]:
    """Checks the files that a service needs: the tokenizer for a gateway, the weights for a worker."""
    if not targets.model:
        return
    if not facts.exists:
        yield _absent(facts)
        return
    if facts.config_problem:
        yield failed(_TOPIC, facts.config_problem, "copy the folder again, all *.json files of it")
    elif targets.service == "worker" and facts.refusal:
        yield failed(_TOPIC, facts.refusal, "take another model: `baton models` lists what runs")
    elif facts.is_foreign:
        what = f"its architecture is {facts.architecture or 'missing'}, which only Transformers may run"
        yield unknown(_TOPIC, what, f"baton models {facts.folder} tries it; `baton models` lists Baton's own")
    if not facts.has_tokenizer and targets.service == "gateway":
        what = f"{facts.folder} has no tokenizer.json"
        yield failed(_TOPIC, what, "copy the model's fast tokenizer there; workers need none")
    if targets.needs_weights:
        yield from _weights(facts, targets, capacity)
    elif not facts.config_problem:
        yield ok(_TOPIC, f"{facts.folder} can be read")


def observe_model(targets: Targets) -> ModelFacts:
    """Reads the folder's JSON files, and the headers of weight files."""
    model = targets.model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        is_hub_id = model.count("/") == 1 and not model.startswith((".", "~", "/"))
        return ModelFacts(model, is_hub_id=is_hub_id)
    problem, config = _json_of(folder / "config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    files = sorted(folder.glob("*.safetensors"))
    return ModelFacts(
        folder=str(folder),
        exists=True,
        config_problem=problem,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        **(_examined(folder, targets.executor) if targets.service == "worker" and targets.executor != "sim" else {}),
        has_tokenizer=(folder / "tokenizer.json").is_file(),
        weight_bytes=sum(path.stat().st_size for path in files),
        num_values=sum(map(num_values_of, files)),
        is_quantized=isinstance(config, dict) and bool(config.get("quantization_config")),
        missing=tuple(_missing(folder)),
        broken=tuple(f"{path.name} ({why})" for path in files if (why := why_broken(path))),
    )


def _examined(folder: Path, executor: str) -> dict[str, Any]:
    """Returns why a worker cannot run the model, or that no family of Baton's does; nothing without its packages."""
    try:
        from baton.worker.models.supported.cuda_limits import misfit
        from baton.worker.models.supported.families import family_of, read_by, read_folder
    except ImportError:  # reported under `versions`
        return {}
    try:
        fields = read_folder(folder)
        family = family_of(fields)
        if family is None:
            return {"is_foreign": True}
        config = read_by(family, fields)
    except ServiceError as error:
        return {"refusal": error.message}
    return {"refusal": misfit(config) if executor == "cuda" else ""}


def why_broken(path: Path) -> str:
    """Returns the problem of a safetensors file; empty if its size matches its header."""
    problem, header, data_start = _header_of(path)
    if problem:
        return problem
    try:
        end = max((one["data_offsets"][1] for one in header.values()), default=0)
        missing = data_start + end - path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (KeyError, TypeError, IndexError):
        return _NO_SAFETENSORS
    return f"{missing} bytes are missing" if missing > 0 else ""


def num_values_of(path: Path) -> int:
    """Returns the number of values in a safetensors file; 0 if it is broken."""
    _, header, _ = _header_of(path)
    try:
        return sum(math.prod(one["shape"]) for one in header.values())
    except (KeyError, TypeError):
        return 0


def _header_of(path: Path) -> tuple[str, dict[str, Any], int]:
    """Returns the problem of a file, or its tensors by name and where their bytes begin."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return _NO_SAFETENSORS, {}, 0
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except OSError as error:
        return f"cannot be read: {error.strerror}", {}, 0
    except (ValueError, AttributeError, TypeError, RecursionError, struct.error):
        return _NO_SAFETENSORS, {}, 0
    return "", header, 8 + length


def _absent(facts: ModelFacts) -> Finding:
    if facts.is_hub_id:
        what = f"{facts.folder!r} is no folder here; it would be fetched from the hub"
        return unknown(_TOPIC, what, f"hf download {facts.folder} --local-dir FOLDER, then --model FOLDER")
    fix = "--model FOLDER; in Kubernetes: the claim baton-models, mounted at /models, and the folder's name below it"
    return failed(_TOPIC, f"there is no folder {facts.folder!r}", fix)


def _weights(facts: ModelFacts, targets: Targets, capacity: Capacity) -> Iterator[Finding]:
    for name in facts.missing:
        yield failed(_TOPIC, f"{name} is missing, which {_INDEX} names", "copy the folder again: hf download resumes")
    for name in facts.broken:
        yield failed(_TOPIC, name, "copy this file again: hf download resumes")
    if not facts.weight_bytes:
        yield failed(
            _TOPIC, f"{facts.folder} has no *.safetensors", "convert its weights, or --load-format dummy to try"
        )
    if facts.missing or facts.broken or not facts.weight_bytes:
        return
    have = capacity.gpu if targets.executor == "cuda" else capacity.memory
    size = f"{facts.weight_bytes / _GIB:.1f} GiB of weights"
    if have is None:
        yield unknown(_TOPIC, f"{size}; it is not known what there is for them")
    elif facts.weight_bytes > have:
        fix = "a larger GPU, a smaller model, or one in fewer bits; nvidia-smi shows who holds memory"
        yield failed(_TOPIC, f"{size} do not fit {have / _GIB:.1f} GiB", fix)
    elif facts.weight_bytes > 0.9 * have:
        yield warning(
            _TOPIC, f"{size} leave little of {have / _GIB:.1f} GiB for KV", "a larger GPU, or a smaller model"
        )
    else:
        yield ok(_TOPIC, f"{facts.folder}: {size}, {have / _GIB:.1f} GiB are there for them")


def _missing(folder: Path) -> Iterator[str]:
    problem, index = _json_of(folder / _INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if problem or not isinstance(names, dict):
        return
    for name in sorted({str(name) for name in names.values()}):
        if not (folder / name).is_file():
            yield name


def _json_of(path: Path) -> tuple[str, object]:
    try:
        return "", json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}", None
    except (ValueError, RecursionError) as error:
        return f"{path} is no JSON: {error}", None
