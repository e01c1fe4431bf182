"""The forms that a model may have: a folder of Hugging Face or of Mistral, or a GGUF file. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.model_folder.form import CONFIG_FILE, gguf_file_of
from baton.model_folder.gguf.config import config_of
from baton.model_folder.gguf.header import is_gguf, read_header
from baton.model_folder.gguf.metadata import Metadata
from baton.model_folder.gguf.tokenizer import tokenizer_of
from baton.model_folder.mistral.params import PARAMS_FILE, config_of_params
from baton.model_folder.tokenizers.source import TOKENIZER_FILE, tokenizer_source
from baton.rpc.errors import ServiceError
from baton.services.doctor.service.weight_files import WeightFiles, gguf_of, json_of, safetensors_of


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The files of one model, in any form."""

    source: str  # of the config
    config: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""  # of the config
    has_tokenizer: bool = False
    is_dequantized: bool = False  # when it is loaded
    weights: WeightFiles = WeightFiles()  # noqa: RUF009 - frozen
    wanted: str = "*.safetensors"  # the names of its weights' files


def form_of(path: Path) -> ModelForm | None:
    """Returns the form of a folder or file; None if there is no model at this path."""
    if is_gguf(path):
        return _gguf(path)
    if not path.is_dir():
        return None
    if not (path / CONFIG_FILE).exists():
        gguf = gguf_file_of(path)
        if gguf is not None:
            return _gguf(gguf)
        if (path / PARAMS_FILE).exists():
            return _mistral(path)
    problem, config = json_of(path / CONFIG_FILE)
    if not problem and not isinstance(config, dict):
        problem = f"{path / CONFIG_FILE} is no JSON object"
    return ModelForm(
        source=str(path / CONFIG_FILE),
        config=config if isinstance(config, dict) else {},
        problem=problem,
        has_tokenizer=_has_tokenizer(path),
        weights=_weights_beside_config(path),
    )


def _weights_beside_config(folder: Path) -> WeightFiles:
    """Returns the weights of a folder with config.json, which may be one that was made of a GGUF file."""
    gguf = gguf_file_of(folder)
    return safetensors_of(folder) if gguf is None else gguf_of(gguf)


def _gguf(path: Path) -> ModelForm:
    weights = gguf_of(path)
    if weights.missing:
        return ModelForm(str(path), has_tokenizer=True, is_dequantized=True, weights=weights, wanted="*.gguf")
    try:
        header = read_header(path)
        config = config_of(header)
        tokenizer_of(Metadata(header.metadata, path))
        problem = ""
    except ServiceError as error:
        config, problem = {}, error.message
    return ModelForm(str(path), config, problem, True, True, weights, "*.gguf")


def _mistral(folder: Path) -> ModelForm:
    path = folder / PARAMS_FILE
    try:
        config, problem = config_of_params(path), ""
    except ServiceError as error:
        config, problem = {}, error.message
    return ModelForm(
        str(path), config, problem, _has_tokenizer(folder), False, safetensors_of(folder), "consolidated*.safetensors"
    )


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file() or tokenizer_source(folder) is not None
