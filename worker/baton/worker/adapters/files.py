"""The files of a PEFT folder: its config, its tensors by module, and their values. Knows no base model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest, Mismatch, NotFound, ServiceError, Unsupported
from baton.worker.adapters.digest import adapter_digest
from baton.worker.adapters.peft_config import FIELD, PeftConfig, read_peft_config
from baton.worker.adapters.site import Site
from baton.worker.weights.files.safetensors_file import DTYPES, SafetensorsFile, TensorEntry

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_A|embedding_B|A|B)(\.weight)?")
_MAGNITUDE = "lora_magnitude_vector"


@dataclass(slots=True)
class Found:
    """The two tensors of a module, by their names in the file."""

    a: str = ""
    b: str = ""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's config and its open file. Checked, but not read."""

    config: PeftConfig
    file: SafetensorsFile
    digest: bytes
    modules: dict[str, Found] = field(default_factory=dict)


@contextmanager
def open_adapter(folder: Path) -> Iterator[AdapterFiles]:
    """Opens a folder's adapter. Raises a ServiceError that names the file and the key or tensor that is wrong."""
    if not folder.is_dir():
        raise NotFound(f"lora_path {str(folder)!r}: there is no such folder on the worker", field=FIELD)
    config = read_peft_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.exists():
        pickled = (folder / _PICKLE).exists()
        why = f"; {_PICKLE} is a pickle, which can run code: save it as safetensors" if pickled else ""
        raise InvalidRequest(f"{folder} holds no {WEIGHTS_FILE}{why}", field=FIELD)
    with _named_field():
        file = SafetensorsFile(path)
        try:
            yield AdapterFiles(config, file, adapter_digest(config, file), _modules(file))
        finally:
            file.close()


def _modules(file: SafetensorsFile) -> dict[str, Found]:
    """Returns the tensors of each module, by its name in the base model."""
    found: dict[str, Found] = {}
    for name in sorted(file.entries):
        if name.endswith((".base_layer.weight", ".base_layer.bias")):  # PEFT's copy of a layer that did not change
            continue
        if _MAGNITUDE in name:
            raise Unsupported(f"{file.path}: {name} is of DoRA, which is not supported", field=FIELD)
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(
                f"{file.path}: {name} is no tensor of LoRA; only lora_A, lora_B and those of embeddings are read",
                field=FIELD,
            )
        module = match["module"].removeprefix(_PREFIX)
        setattr(found.setdefault(module, Found()), match["kind"][-1].lower(), name)
    for module, pair in found.items():
        if not pair.a or not pair.b:
            missing = "lora_B" if pair.a else "lora_A"
            raise InvalidRequest(f"{file.path}: {module} has no {missing}; both are needed", field=FIELD)
    return found


def read_matrix(file: SafetensorsFile, name: str, shape: tuple[int, int], site: Site, dtype: torch.dtype) -> Tensor:
    entry: TensorEntry = file.entries[name]
    if entry.dtype not in DTYPES:
        raise InvalidRequest(
            f"{file.path}: {name} has dtype {entry.dtype}; it must be one of {', '.join(DTYPES)}", field=FIELD
        )
    if entry.shape != shape:
        what = "the vocabulary or the width differs" if site.is_embedding else "the rank or the base model differs"
        raise Mismatch(
            f"{file.path}: {name} has shape {list(entry.shape)}; by adapter_config.json and the base model it must be "
            f"{list(shape)}: {what}",
            field=FIELD,
        )
    stored = torch.frombuffer(bytearray(file.read(entry.start, entry.num_bytes)), dtype=DTYPES[entry.dtype])
    tensor = stored.view(shape).to(dtype)
    if not tensor.isfinite().all():
        raise InvalidRequest(f"{file.path}: {name} has values that are not finite in {dtype}", field=FIELD)
    return tensor


@contextmanager
def _named_field() -> Iterator[None]:
    """Names the adapter's field in errors of files that models have too."""
    try:
        yield
    except ServiceError as error:
        error.field = FIELD
        raise
