"""Creates the configured executor. Does not import PyTorch for the simulator."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.plugins.kinds import LOGITS_PROCESSORS, MODEL_FAMILIES, PROPOSERS, WEIGHT_FORMATS
from baton.plugins.plugins import NO_PLUGINS, PluginError, Plugins
from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.config_overrides import overridden
from baton.worker.executors.base import ServingExecutor
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.model_len import fitting_model_len
from baton.worker.executors.ranks import RankGroup, start_ranks

if TYPE_CHECKING:
    from baton.worker.executors.sim.executor import SimSettings

_OF_MODELS = (LOGITS_PROCESSORS, MODEL_FAMILIES, PROPOSERS, WEIGHT_FORMATS)
_SIM_NUM_BLOCKS = 8192
_SIM_WRITE_SHARE = 0.05  # a copy to the device, of a read from files
_SIM_BYTES_PER_TOKEN = 131072  # of host memory: the KV of an 8B model, which the simulator's speed is from


def make_executor(config: WorkerConfig, plugins: Plugins = NO_PLUGINS) -> RankGroup:
    """Creates the executor with its model. Raises InvalidRequest for a wrong configuration or model folder."""
    return start_ranks(lambda: _make_leader(config, plugins))


def _make_leader(config: WorkerConfig, plugins: Plugins) -> ServingExecutor:
    if config.executor == "sim":
        _check_simulated(plugins)
        from baton.worker.executors.sim.executor import SimExecutor

        stall = Path(config.sim_stall_file) if config.sim_stall_file else None
        return SimExecutor(
            sim_settings(config),
            read_settings=lambda model: _sim_settings_of(config, model),
            is_stalled=None if stall is None else stall.exists,
        )
    if config.executor == "cuda":
        from baton.worker.executors.cuda.start import start_cuda_executor

        return start_cuda_executor(config, plugins)
    from baton.worker.executors.cpu.executor import CpuExecutor

    return CpuExecutor(config, plugins)


def _check_simulated(plugins: Plugins) -> None:
    """Raises PluginError for plugins of what the simulator does not have."""
    for kind in _OF_MODELS:
        for plugin in plugins.of(kind):
            raise PluginError(f"{plugin.name!r}: executor=sim computes no model, so it loads no {kind.name}")


def sim_settings(config: WorkerConfig) -> SimSettings:
    """Returns the simulator's settings, with the vocabulary, context and end tokens of the configured model, if any."""
    from baton.worker.executors.sim.executor import SimSettings, SimSpeed

    speed = SimSpeed(
        base=config.sim_step_seconds,
        per_prefill_token=config.sim_prefill_token_seconds,
        per_decode_request=config.sim_decode_request_seconds,
        factor=config.sim_slowness,
    )
    config = with_device_limits(config)
    defaults = SimSettings()
    model = _read_model_config(config.model)
    model = overridden(model, config.config_overrides, f"{config.model}/config.json")
    guesses = config.speculation
    num_blocks = config.num_blocks or _SIM_NUM_BLOCKS
    limit = model.get("max_position_embeddings", defaults.max_model_len)
    eos = model.get("eos_token_id", defaults.eos_token_ids)
    return SimSettings(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_requests=config.max_num_requests,
        max_model_len=_sim_model_len(config, limit, num_blocks),
        vocab_size=model.get("vocab_size", defaults.vocab_size),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        eos_every=config.sim_eos_every,
        max_step_tokens=config.sim_step_tokens if guesses is None else 1 + guesses.num_speculative_tokens,
        acceptance=None if guesses is None else config.sim_acceptance,
        num_host_blocks=config.num_host_blocks(_SIM_BYTES_PER_TOKEN * config.block_size),
        host_staging_blocks=-(-config.max_num_batched_tokens // config.block_size),
        max_loras=config.max_loras if config.enable_lora else 0,
        adapter_read_seconds=config.sim_adapter_seconds,
        adapter_write_seconds=config.sim_adapter_seconds * _SIM_WRITE_SHARE,
        speed=speed,
    )


def _sim_model_len(config: WorkerConfig, limit: int, num_blocks: int) -> int:
    """Returns the most tokens of a request. The simulator has no limit of its own."""
    return fitting_model_len(config.max_model_len, max(limit, config.max_model_len), num_blocks * config.block_size)


def _sim_settings_of(config: WorkerConfig, model: str) -> SimSettings:
    """Returns the settings for another folder, which must exist. Folders with equal config.json are the same model."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise InvalidRequest(f"model={model!r}: there is no {path}", field="model")
    settings = sim_settings(dataclasses.replace(config, model=model))
    text = path.read_bytes()
    before = Path(config.model) / "config.json"
    if before.is_file() and before.read_bytes() == text:
        return settings
    return dataclasses.replace(settings, digest=hashlib.blake2b(settings.model_digest + text, digest_size=16).digest())


def _read_model_config(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"model={folder!r}: config.json cannot be read: {error}", field="model") from error
    if not isinstance(values, dict):
        raise InvalidRequest(f"model={folder!r}: config.json holds no object", field="model")
    return values
