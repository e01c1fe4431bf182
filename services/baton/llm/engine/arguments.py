"""The arguments of LLM and AsyncLLM: vLLM's names and those of the worker's settings, as a worker's configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.config import GatewayConfig
from baton.gateway.models.sampling import RequestLimits
from baton.gateway.models.served import TemplateFlags
from baton.gateway.parsing.format_choice import FormatFlags
from baton.llm.engine.plugins import offline_plugins
from baton.llm.parameters.names import InvalidParameter, check_known, refuse_unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.device_limits import with_device_limits

_log = logging.getLogger(__name__)

_MAX_N = 16384
_MAX_QUEUE = 1 << 20

# vLLM's names of the worker's settings.
_OTHER_NAMES: Mapping[str, str] = {
    "max_num_seqs": "max_num_requests",
    "enable_prefix_caching": "prefix_caching",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "device": "executor",
}
# Settings of a service that have no meaning without one.
OF_SERVICES = frozenset({
    "worker_id", "role", "listen", "advertise", "metrics_listen", "tls_certificate", "tls_key", "tls_ca",
    "metrics_plain", "kv_plain", "transfer_listen", "transports", "kvstore", "min_remote_prefill_tokens", "lease_ms",
    "verify_transfers", "drain_timeout", "step_timeout", "engine_silence_ms", "step_stall_ms", "engine_process",
    "kv_load_failure_policy",
    "otlp_endpoint", "log_stats_interval", "max_queue", "max_shared_prefill_tokens", "max_background_prefill_tokens",
})  # fmt: skip
# vLLM's arguments that only have these values here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "swap_space": (0, None),
    "cpu_offload_gb": (0, None),
    "hf_token": (None,),
    "hf_overrides": (None, {}),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "speculative_config": (None,),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None,),
    "pooler_config": (None,),
    "distributed_executor_backend": (None, "uni"),
    "logits_processors": (None, []),
    "kv_transfer_config": (None,),
}
# vLLM's arguments that change nothing here, whatever they are: what they switch is always on, or has no counterpart.
_WITHOUT_EFFECT: Mapping[str, str] = {
    "enable_sleep_mode": "sleep() always works",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "disable_log_stats": "get_metrics() always works",
    "trust_remote_code": "no code of a model folder is run",
    "disable_custom_all_reduce": "one device computes",
    "async_scheduling": "steps are always prepared ahead on a GPU",
    "compilation_config": "kernels are compiled ahead, and steps captured as CUDA graphs",
    "max_seq_len_to_capture": "graphs work for all lengths",
    "generation_config": "defaults come from the model folder",
    "weight_transfer_config": "tensors and CUDA IPC handles are both taken",
}
# This side's own arguments.
_OWN: Mapping[str, Any] = {
    "tokenizer": None,
    "enforce_eager": False,
    "seed": 0,
    "max_logprobs": 20,
    "chat_template": None,
    "reasoning_parser": "auto",
}


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What an engine in this process is made of."""

    config: WorkerConfig
    limits: RequestLimits
    seed: int | None  # of requests that have none; None: random
    formats: FormatFlags = field(default_factory=FormatFlags)
    templates: TemplateFlags = field(default_factory=TemplateFlags)


def engine_arguments(
    model: str, values: Mapping[str, Any], has_cuda: Callable[[], bool] | None = None
) -> EngineArguments:
    """Reads the arguments of LLM. Raises UnknownParameter with the nearest name, or InvalidParameter."""
    of_worker = {one.name for one in dataclasses.fields(WorkerConfig)} - OF_SERVICES
    known = {*of_worker, *_OTHER_NAMES, *_NEUTRAL, *_WITHOUT_EFFECT, *_OWN}
    check_known(values, known, "LLM")
    refuse_unsupported(values, _NEUTRAL, "LLM")
    for name, reason in _WITHOUT_EFFECT.items():
        if values.get(name):
            _log.info("%s=%r changes nothing: %s", name, values[name], reason)
    own = {**_OWN, **{name: value for name, value in values.items() if name in _OWN}}
    if own["tokenizer"] not in (None, model):
        raise InvalidParameter("tokenizer: another tokenizer than the model's is not supported", field="tokenizer")
    settings = _worker_settings(values, of_worker)
    settings["plugins"], parsers = offline_plugins(values.get("plugins") or ())
    if own["enforce_eager"]:
        settings["cuda_graphs"] = False
    if settings.get("executor", "auto") == "auto":
        settings["executor"] = "cuda" if (has_cuda or _has_cuda)() else "cpu"
    return EngineArguments(
        config=_config(model, settings),
        limits=RequestLimits(max_n=_MAX_N, max_logprobs=_most_logprobs(own["max_logprobs"])),
        seed=None if own["seed"] is None else _number("seed", own["seed"], None),
        formats=FormatFlags(tools="none", reasoning=own["reasoning_parser"] or "none", plugins=parsers),
        templates=TemplateFlags(path=own["chat_template"] or ""),
    )


def _most_logprobs(value: object) -> int:
    """Returns the limit of alternatives; -1: the whole vocabulary."""
    return GatewayConfig(max_logprobs=_number("max_logprobs", value, -1)).most_logprobs


def served_arguments(model: str, values: Mapping[str, Any], gateway: GatewayConfig) -> EngineArguments:
    """Returns what an engine with this gateway's requests is made of. Raises InvalidParameter, InvalidRequest."""
    return dataclasses.replace(
        engine_arguments(model, values),
        limits=RequestLimits(max_n=gateway.max_choices, max_logprobs=gateway.most_logprobs),
        seed=None,
        formats=FormatFlags(gateway.tool_call_parser, gateway.reasoning_parser, gateway.tool_parser_plugin),
        templates=TemplateFlags(gateway.chat_template, gateway.template_variables, gateway.trust_control_tokens),
    )


def _worker_settings(values: Mapping[str, Any], of_worker: set[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for given, value in values.items():
        name = _OTHER_NAMES.get(given, given)
        if name not in of_worker or value is None:
            continue
        if name in settings and settings[name] != value:
            raise InvalidParameter(f"{given}={value!r} and {name}={settings[name]!r} are one setting", field=given)
        settings[name] = value
    return settings


def _config(model: str, settings: Mapping[str, Any]) -> WorkerConfig:
    if not isinstance(model, str) or not model:
        raise InvalidParameter(f"model is {model!r}; give a folder or a hub id", field="model")
    by_name = {one.name: one for one in dataclasses.fields(WorkerConfig)}
    settings = {name: _checked(by_name[name], value) for name, value in settings.items()}
    if settings.get("enable_lora") and not settings.get("lora_folders"):
        settings["lora_folders"] = ("/",)  # the program chooses its folders
    config = WorkerConfig(
        **{**settings, "model": model},
        transports="none",
        max_queue=_MAX_QUEUE,
        max_shared_prefill_tokens=0,
        max_background_prefill_tokens=0,
        step_stall_ms=0,
        step_timeout=0.0,
    )
    config.validate()
    return with_device_limits(dataclasses.replace(config, engine_process=False))


def _checked(setting: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value. Raises InvalidParameter for one of another type, or beyond the setting's bounds."""
    kind, facts = type(setting.default), setting.metadata
    if isinstance(value, str) and value in facts.get("words", {}):
        return facts["words"][value]
    if isinstance(value, str) and value in facts.get("refused", {}):
        message = f"{setting.name} is {value!r}, which is not supported: {facts['refused'][value]}"
        raise InvalidParameter(message, field=setting.name)
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    choices = facts.get("choices")
    low, high = facts.get("minimum"), facts.get("maximum")
    if fits and (choices is None or value in choices):
        if (low is None or value >= low) and (high is None or value <= high):
            return value
        allowed = " and ".join(
            text for bound, text in ((low, f"at least {low}"), (high, f"at most {high}")) if bound is not None
        )
    else:
        allowed = f"one of {', '.join(map(str, choices))}" if choices else kind.__name__
    raise InvalidParameter(f"{setting.name} is {value!r}; it must be {allowed}", field=setting.name)


def _number(name: str, value: Any, low: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        wanted = "a number" if low is None else f"a number of at least {low}"
        raise InvalidParameter(f"{name} is {value!r}; give {wanted}", field=name)
    return value


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
