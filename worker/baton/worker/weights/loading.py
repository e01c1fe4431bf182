"""Loads a model by its name and load format: config, weights and digest."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.model_folder.form import gguf_file_of
from baton.model_folder.tokenizers.vocabulary import check_tokenizer
from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.rpc.errors import Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Weights
from baton.worker.models.plugins import NO_MODEL_PLUGINS, ModelPlugins, start_model_plugins
from baton.worker.models.pooling.reading import with_pooler
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import load_config, parse_config
from baton.worker.models.supported.families import read_folder
from baton.worker.models.weight_formats import in_gguf, quantized_as
from baton.worker.quantization.formats.table import FORMATS, ONLINE
from baton.worker.weights.build import dummy_weights, weight_bytes
from baton.worker.weights.digest import dummy_digest, kv_facts, model_digest
from baton.worker.weights.files.formats import open_tensors
from baton.worker.weights.files.gguf import block_types
from baton.worker.weights.filling import FilledWeights, load_weights
from baton.worker.weights.heads import with_true_head
from baton.worker.weights.kv_scales import load_kv_scales, unit_scales
from baton.worker.weights.resolve import commit_of, resolve_model
from baton.worker.weights.tensors import Tensors

_log = logging.getLogger(__name__)

_DUMMY_SEED = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with all that an executor needs."""

    config: ModelConfig
    weights: Weights
    digest: bytes  # 16 bytes
    kv_scales: Tensor  # [num_layers, 2] fp32 on the host, of a quantized cache's keys and values


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model's folder is found and its config read."""

    revision: str = ""  # of a hub id
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    implementation: str = "auto"  # or baton, transformers
    # The longest sequence that is served, which some kinds of RoPE depend on. 0: the model's own limit.
    max_model_len: int = 0
    convert: str = "auto"  # see baton.worker.models.pooling.reading.CONVERSIONS
    plugins: ModelPlugins = NO_MODEL_PLUGINS
    quantization: str = "auto"  # or the name of a weight format
    packs_gguf: bool = True  # else GGUF files are dequantized at load
    gguf_planes: bool = False  # packed as the GPU's kernels read them


_NO_OPTIONS = ModelOptions()


def model_options(config: WorkerConfig, plugins: Plugins = NO_PLUGINS) -> ModelOptions:
    """Returns the options of a worker's settings, with the models of its plugins."""
    return ModelOptions(
        config.revision,
        config.config_overrides,
        config.model_impl,
        max(0, config.max_model_len),
        config.convert,
        start_model_plugins(plugins),
        config.quantization,
        packs_gguf=config.executor in FORMATS["gguf"].executors,
        gguf_planes=config.executor == "cuda",
    )


def other_options(options: ModelOptions, longest: int, *, is_same: bool) -> ModelOptions:
    """Returns the options of weights that replace others, for sequences of the same length; `is_same`: their folder."""
    return replace(options, revision=options.revision if is_same else "", max_model_len=longest)


def read_config(model: str, load_format: str, options: ModelOptions = _NO_OPTIONS) -> ModelConfig:
    """Reads the config of a folder, a hub id or, with load_format dummy, a preset. Of weights it reads the names."""
    length = options.max_model_len
    if load_format == "dummy" and model in PRESETS:
        source = f"preset {model}"
        preset = parse_config(PRESETS[model], source, options.implementation, options.overrides, options.plugins)
        return quantized_as(preset, options.quantization, source).at_length(length)
    folder = resolve_model(model, options.revision)
    config = _read_folder(folder, options)
    if load_format == "dummy" or not config.tie_embeddings or config.transformers is not None:
        return config
    with open_tensors(folder) as checkpoint:
        return with_true_head(config, checkpoint)


def _read_folder(folder: Path, options: ModelOptions) -> ModelConfig:
    config = load_config(folder, options.implementation, options.overrides, options.plugins)
    config = with_pooler(config, folder, read_folder(folder), options.convert)
    if options.packs_gguf and options.quantization not in ONLINE and (file := gguf_file_of(folder)) is not None:
        config = in_gguf(config, block_types(file), planes=options.gguf_planes)
    return quantized_as(config, options.quantization, str(folder)).at_length(options.max_model_len)


def check_same(ours: ModelConfig, theirs: ModelConfig, source: str) -> None:
    """Raises Mismatch with the differences if weights of one config do not fit the other."""
    our_facts, their_facts = _served_facts(ours), _served_facts(theirs)
    different = [
        f"{name} is {their_facts.get(name)}, not {our_facts.get(name)}"
        for name in our_facts | their_facts
        if our_facts.get(name) != their_facts.get(name)
    ]
    if different:
        raise Mismatch(
            f"model={source!r} has another architecture than what is served: {'; '.join(different)}", field="model"
        )


def _served_facts(config: ModelConfig) -> dict[str, Any]:
    return kv_facts(config) | {
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": config.eos_token_ids,
    }


def load_model(
    model: str,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    options: ModelOptions = _NO_OPTIONS,
) -> LoadedModel:
    """Loads a folder or hub id; with load_format dummy, returns random weights for its config or for a preset."""
    started = time.monotonic()
    read, commit = "", ""
    if load_format == "dummy":
        config = read_config(model, load_format, options)
        if model not in PRESETS:
            check_tokenizer(resolve_model(model, options.revision), config.vocab_size)
        weights = _dummy(config, dtype, device)
        digest = dummy_digest(config, _DUMMY_SEED, device.type)
        loaded = LoadedModel(config, weights, digest, unit_scales(config.num_layers))
    else:
        folder = resolve_model(model, options.revision)
        commit = commit_of(folder)
        config = _read_folder(folder, options)
        check_tokenizer(folder, config.vocab_size)
        with open_tensors(folder, () if config.pooler is None else config.pooler.modules) as checkpoint:
            filled = _load(config, checkpoint, dtype, device)
            read = f", {filled.streamed}" if filled.streamed.num_bytes else ""
            digest = model_digest(filled.config, checkpoint)
            loaded = LoadedModel(filled.config, filled.weights, digest, load_kv_scales(checkpoint, config.num_layers))
    _log.info(
        "model loaded: %s by %s, %d layers, in %.2f s%s",
        loaded.config.architecture,
        loaded.config.implementation,
        loaded.config.num_layers,
        time.monotonic() - started,
        read,
        extra={"model": model, "digest": loaded.digest.hex(), "load_format": load_format}
        | ({"commit": commit} if commit else {}),
    )
    return loaded


def model_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the size of a model's weights on a device. Allocates nothing."""
    return weight_bytes(config, dtype) if config.transformers is None else config.transformers.num_bytes(dtype.itemsize)


def _load(config: ModelConfig, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> FilledWeights:
    if config.transformers is None:
        return load_weights(config, checkpoint, dtype, device)
    from baton.worker.weights.transformers_loading import load_with_transformers

    return FilledWeights(config, load_with_transformers(config, checkpoint, dtype, device))


def _dummy(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    if config.transformers is None:
        return dummy_weights(config, dtype, _DUMMY_SEED, device)
    from baton.worker.weights.transformers_loading import dummy_with_transformers

    return dummy_with_transformers(config, dtype, _DUMMY_SEED, device)
