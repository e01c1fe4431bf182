"""adapter_config.json of a PEFT folder: what an adapter's tensors mean, or why they are refused. Knows no tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, NotFound, Unsupported
from baton.worker.adapters.module_patterns import problem_of
from baton.worker.models.fields import read_json

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 512
_MAX_PATTERNS = 4096
FIELD = "lora_path"  # of the errors about an adapter's folder

# Keys of PEFT's LoRA variants that change what the tensors mean, and their values without the variant.
_VARIANTS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "use_dora": ("DoRA", (False, None)),
    "use_qalora": ("QALoRA", (False, None)),
    "use_bdlora": ("BD-LoRA", (None, False)),
    "arrow_config": ("Arrow", (None,)),
    "alora_invocation_tokens": ("aLoRA", (None,)),
    "corda_config": ("CorDA", (None,)),
    "megatron_config": ("LoRA of Megatron's layers", (None,)),
    "layer_replication": ("layer replication", (None, [])),
    "trainable_token_indices": ("trainable tokens", (None, [], {})),
    "lora_bias": ("LoRA with biases", (False, None)),
}
# Initializations that change the base model's weights too.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "merge the adapter into its base with PEFT's merge_and_unload and serve the result as a model"


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The scales and ranks of an adapter's modules."""

    rank: int
    alpha: float
    rslora: bool = False  # the scale is alpha / sqrt(rank), not alpha / rank
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # by a regular expression of the module's end
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str = ""  # as the trainer named it
    parameters: tuple[str, ...] = ()  # ends of the names of parameters that are changed, beside whole modules

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max([self.rank, *self.rank_pattern.values()])

    def targets(self, parameter: str) -> bool:
        """Returns whether `target_parameters` has this parameter, by its full name."""
        return any(parameter == one or parameter.endswith(f".{one}") for one in self.parameters)

    def key_of(self, module: str) -> str:
        """Returns the name by which patterns find a module: its weight's, if that is what is changed."""
        return f"{module}.weight" if self.targets(f"{module}.weight") else module

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module by its full name."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor on B @ A of a module."""
        alpha = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads a folder's config. Raises NotFound without one, Unsupported for other kinds of adapters, InvalidRequest."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise NotFound(f"{folder} holds no {CONFIG_FILE}: give a folder that PEFT saved an adapter to", field=FIELD)
    try:
        values = read_json(path, "")
    except InvalidRequest as error:
        error.field = FIELD
        raise
    _refuse_others(path, values)
    rank = _number(path, "r", values.get("r"), whole=True)
    return PeftConfig(
        rank=int(rank),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha", rank)),
        rslora=values.get("use_rslora") is True,
        rank_pattern={key: int(value) for key, value in _pattern(path, "rank_pattern", values, whole=True).items()},
        alpha_pattern=_pattern(path, "alpha_pattern", values),
        base_model=str(values.get("base_model_name_or_path") or ""),
        parameters=_names(path, "target_parameters", values),
    )


def _refuse_others(path: Path, values: Mapping[str, Any]) -> None:
    """Raises Unsupported for what is not plain LoRA."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"{path}: peft_type is {kind!r}; workers compute LORA alone. Else {_MERGE}", field=FIELD)
    for key, (name, neutral) in _VARIANTS.items():
        value = values.get(key)
        if key in values and value not in neutral:
            raise Unsupported(f"{path}: {key} is {value!r}: {name} is not supported; {_MERGE}", field=FIELD)
    if values.get("bias", "none") != "none":
        raise Unsupported(f"{path}: bias is {values['bias']!r}; it must be 'none', or {_MERGE}", field=FIELD)
    if saved := values.get("modules_to_save"):
        raise Unsupported(
            f"{path}: modules_to_save is {saved!r}: whole modules are not exchanged for a request; {_MERGE}",
            field=FIELD,
        )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise Unsupported(
            f"{path}: init_lora_weights is {start!r}, which changes the base model too; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA",
            field=FIELD,
        )


def _number(path: Path, key: str, value: Any, *, whole: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (whole and (value != int(value) or not 1 <= value <= MAX_RANK)):
        allowed = f"a whole number from 1 to {MAX_RANK}" if whole else "a number"
        raise InvalidRequest(f"{path}: {key} is {value!r}; it must be {allowed}", field=FIELD)
    return float(value)


def _names(path: Path, key: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    given = values.get(key) or []
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise InvalidRequest(f"{path}: {key} is {given!r}; it must be a list of names", field=FIELD)
    return tuple(sorted(given))


def _pattern(path: Path, key: str, values: Mapping[str, Any], *, whole: bool = False) -> dict[str, float]:
    given = values.get(key) or {}
    if not isinstance(given, dict):
        raise InvalidRequest(f"{path}: {key} is {given!r}; it must be an object of numbers by module", field=FIELD)
    if len(given) > _MAX_PATTERNS:
        raise InvalidRequest(f"{path}: {key} has {len(given)} patterns; at most {_MAX_PATTERNS}", field=FIELD)
    for pattern in given:
        if problem := problem_of(pattern):
            raise InvalidRequest(f"{path}: {key} has {pattern[:80]!r}, which {problem}", field=FIELD)
    return {pattern: _number(path, f"{key}.{pattern}", value, whole=whole) for pattern, value in given.items()}


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """Returns the first pattern that matches the module's end, as PEFT's get_pattern_key does, or the name itself."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", module)), module)
