"""The model's folder: whether it is complete and readable, and fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.model_folder.hub import hub_file
from baton.rpc.errors import ServiceError
from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.service.model_forms import ModelForm, form_of
from baton.services.doctor.targets import Targets

_TOPIC = "model"
_GIB = 1 << 30
_LOADED_BYTES = 2  # of a dequantized value, at least


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The contents of one folder, or of a GGUF file."""

    folder: str
    exists: bool = False
    is_hub_id: bool = False
    config_problem: str = ""
    architecture: str = ""
    refusal: str = ""  # why a worker cannot run it
    is_foreign: bool = False  # no family of Baton's computes it
    has_tokenizer: bool = False
    weight_bytes: int = 0  # in files
    num_values: int = 0  # of all weights
    is_quantized: bool = False
    is_dequantized: bool = False  # when it is loaded
    wanted: str = "*.safetensors"  # the names of files of weights
    missing: tuple[str, ...] = ()  # files that others name
    broken: tuple[str, ...] = ()  # truncated files, or not of their format
    package: str = ""  # what is to be installed to read them

    @property
    def loaded_bytes(self) -> int:
        """Memory of the weights."""
        return _LOADED_BYTES * self.num_values if self.is_dequantized else self.weight_bytes


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
        fix = "take another file: the guide on models says which are read"
        yield failed(_TOPIC, facts.config_problem, fix if facts.is_dequantized else "copy all *.json files again")
    elif targets.service == "worker" and facts.refusal:
        yield failed(_TOPIC, facts.refusal, "take another model: `baton models` lists what runs")
    elif facts.is_foreign:
        what = f"its architecture is {facts.architecture or 'missing'}, which only Transformers may run"
        yield unknown(_TOPIC, what, f"baton models {facts.folder} tries it; `baton models` lists Baton's own")
    if not facts.has_tokenizer and targets.service == "gateway":
        what = f"{facts.folder} has no tokenizer.json, nor another file that it could be made of"
        yield failed(_TOPIC, what, "copy the model's tokenizer there; workers need none")
    if targets.needs_weights:
        yield from _weights(facts, targets, capacity)
    elif not facts.config_problem:
        yield ok(_TOPIC, f"{facts.folder} can be read")


def observe_model(targets: Targets) -> ModelFacts:
    """Reads the model's config, and the headers of weight files."""
    model = targets.model
    form = form_of(Path(model).expanduser())
    if form is None:
        is_hub_id = model.count("/") == 1 and not model.startswith((".", "~", "/"))
        return ModelFacts(model, is_hub_id=is_hub_id or hub_file(model) is not None)
    names, weights = form.config.get("architectures"), form.weights
    is_computed = targets.service == "worker" and targets.executor != "sim"
    return ModelFacts(
        folder=str(Path(model).expanduser()),
        exists=True,
        config_problem=form.problem,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        **(_examined(form, targets.executor) if is_computed and form.config else {}),
        has_tokenizer=form.has_tokenizer,
        weight_bytes=weights.num_bytes,
        num_values=weights.num_values,
        is_quantized=bool(form.config.get("quantization_config")),
        is_dequantized=form.is_dequantized,
        wanted=form.wanted,
        missing=weights.missing,
        broken=weights.broken,
        package=weights.package,
    )


def _examined(form: ModelForm, executor: str) -> dict[str, Any]:
    """Returns why a worker cannot run the model, or that no family of Baton's does; nothing without its packages."""
    try:
        from baton.worker.models.fields import Fields
        from baton.worker.models.supported.cuda_limits import misfit
        from baton.worker.models.supported.families import family_of, read_by
    except ImportError:  # reported under `versions`
        return {}
    try:
        fields = Fields(form.config, form.source)
        family = family_of(fields)
        if family is None:
            return {"is_foreign": True}
        config = read_by(family, fields)
    except ServiceError as error:
        return {"refusal": error.message}
    return {"refusal": misfit(config) if executor == "cuda" else ""}


def _absent(facts: ModelFacts) -> Finding:
    if facts.is_hub_id:
        what = f"{facts.folder!r} is no folder here; it would be fetched from the hub"
        return unknown(_TOPIC, what, f"hf download {facts.folder} --local-dir FOLDER, then --model FOLDER")
    fix = "--model FOLDER; in Kubernetes: the claim baton-models, mounted at /models, and the folder's name below it"
    return failed(_TOPIC, f"there is no folder or GGUF file {facts.folder!r}", fix)


def _weights(facts: ModelFacts, targets: Targets, capacity: Capacity) -> Iterator[Finding]:
    for name in facts.missing:
        yield failed(_TOPIC, f"{name} is missing, which other files name", "copy the folder again: hf download resumes")
    for name in facts.broken:
        yield failed(_TOPIC, name, "copy this file again: hf download resumes")
    if facts.package:
        yield failed(_TOPIC, facts.package, "the images of workers have it")
    if not facts.weight_bytes:
        fix = "convert its weights, or --load-format dummy to try"
        yield failed(_TOPIC, f"{facts.folder} has no {facts.wanted}", fix)
    if facts.missing or facts.broken or not facts.weight_bytes:
        return
    have = capacity.gpu if targets.executor == "cuda" else capacity.memory
    size = f"{facts.loaded_bytes / _GIB:.1f} GiB of weights"
    if facts.is_dequantized:
        size += f", dequantized from {facts.weight_bytes / _GIB:.1f} GiB"
    if have is None:
        yield unknown(_TOPIC, f"{size}; it is not known what there is for them")
    elif facts.loaded_bytes > have:
        fix = "a larger GPU, a smaller model, or one in fewer bits; nvidia-smi shows who holds memory"
        yield failed(_TOPIC, f"{size} do not fit {have / _GIB:.1f} GiB", fix)
    elif facts.loaded_bytes > 0.9 * have:
        yield warning(
            _TOPIC, f"{size} leave little of {have / _GIB:.1f} GiB for KV", "a larger GPU, or a smaller model"
        )
    else:
        yield ok(_TOPIC, f"{facts.folder}: {size}, {have / _GIB:.1f} GiB are there for them")
