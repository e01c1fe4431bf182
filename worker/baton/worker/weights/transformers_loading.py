"""Loads a model of Transformers: Baton reads the checkpoint, Transformers converts it to its own parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.transformers_backend import attention, experts, installed
from baton.worker.models.transformers_backend.spec import TransformersSpec
from baton.worker.models.transformers_backend.trial import EXPERTS as BATCHED
from baton.worker.models.transformers_backend.weights import TransformersWeights
from baton.worker.weights.tensors import Tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)

_MOST_NAMED = 4


def load_with_transformers(
    config: ModelConfig, checkpoint: Tensors, dtype: torch.dtype, device: torch.device
) -> TransformersWeights:
    """Copies a checkpoint's tensors to the device, converted. Raises InvalidRequest if one is missing or misshapen."""
    spec = _spec_of(config)
    lazy = {name: _Lazy(checkpoint, name) for name in checkpoint.names if checkpoint.has_floats(name)}
    made: Any = installed.model_class(spec.class_name)
    with installed.quiet():
        module, info = made.from_pretrained(
            None,
            config=config_on(spec, dtype, device),
            state_dict=lazy,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    _check(checkpoint, info)
    weights = TransformersWeights.of(module.eval()).mapped(partial(torch.Tensor.to, device=device))
    weights.install()
    return weights


class _Lazy:
    """A tensor of a checkpoint. Transformers takes it when it fills the parameter, as from a file of its own."""

    def __init__(self, checkpoint: Tensors, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def __getitem__(self, part: Any) -> Tensor:
        entry = self._checkpoint.entry(self._name)
        return self._checkpoint.tensor(self._name, entry.shape)[part]


def dummy_with_transformers(
    config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device
) -> TransformersWeights:
    """Returns Transformers' own random weights, which are equal for a seed on all devices of a type."""
    spec = _spec_of(config)
    cuda = [device] if device.type == "cuda" else []
    with installed.quiet(), torch.random.fork_rng(cuda), torch.device(device):
        torch.manual_seed(seed)
        module = installed.made_of(spec.class_name, config_on(spec, dtype, device), dtype)
    return TransformersWeights.of(module)


def _spec_of(config: ModelConfig) -> TransformersSpec:
    assert config.transformers is not None, "configs say what computes them"
    return config.transformers


def config_on(spec: TransformersSpec, dtype: torch.dtype, device: torch.device) -> PreTrainedConfig:
    """Returns the config of a model that Baton's attention and a device's experts compute."""
    attention.register()
    experts.register()
    config = installed.config_of(spec.class_name, json.loads(spec.raw_config), spec.class_name)
    config._attn_implementation = attention.ATTENTION
    if installed.takes_experts(spec.class_name):
        config._experts_implementation = _experts_on(device, dtype)
    return config


def _experts_on(device: torch.device, dtype: torch.dtype) -> str:
    """Returns the name in Transformers of experts that do not wait for a GPU, or of Baton's on a CPU."""
    if device.type == "cpu":
        return experts.EXPERTS
    return BATCHED if dtype == torch.float32 else "grouped_mm"  # which takes half precision


def _check(checkpoint: Tensors, info: dict[str, Any]) -> None:
    folder = checkpoint.source
    if missing := sorted(info["missing_keys"]):
        raise InvalidRequest(f"{folder}: no file holds the tensors {_some(missing)}", field="model")
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise InvalidRequest(
            f"{folder}: {name} has shape {list(found)}; by config.json it must be {list(expected)}", field="model"
        )
    if errors := info.get("error_msgs"):
        raise InvalidRequest(f"{folder}: {errors[0]}", field="model")
    if unused := sorted(info["unexpected_keys"]):
        _log.warning("%d tensors of %s are not used: %s", len(unused), Path(folder), _some(unused))


def _some(names: Collection[str]) -> str:
    some = ", ".join(list(names)[:_MOST_NAMED])
    return some if len(names) <= _MOST_NAMED else f"{some} and {len(names) - _MOST_NAMED} more"
