"""Reads what sentence-transformers keeps beside a model: modules.json, and the folders of its modules.

Source of the format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.models.fields import Fields, read_json
from baton.worker.models.pooling.spec import DenseSpec, Pick, Squash

MODULES_FILE = "modules.json"
_CONFIG_FILE = "config.json"
# The files of the module Transformer's settings; the first one that exists counts.
_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_PICKS: dict[str, Pick] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_OTHER_PICKS = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_SQUASHES: dict[str, Squash] = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules behind the Transformer."""

    pick: Pick | None = None  # None: there is no pooling module
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    max_tokens: int = 0  # of a text; 0: as many as the model takes

    @property
    def by_token(self) -> bool:
        """Whether vectors are of tokens, as PyLate has its ColBERT models: linears without a pooling module."""
        return bool(self.dense) and self.pick is None


def read_modules(folder: Path, hidden_size: int) -> SentenceModules | None:
    """Returns the modules of a folder; None without modules.json. Raises InvalidRequest, which names file and key."""
    path = folder / MODULES_FILE
    if not path.exists():
        return None
    pick: Pick | None = None
    dense: list[DenseSpec] = []
    normalize, width = False, hidden_size
    listed = _listed(path)
    _check_order(path, [name for name, _ in listed])
    for name, inner in listed:
        match name:
            case "Transformer":
                pass
            case "Pooling":
                pick = _read_pick(_config_of(folder, inner), width)
            case "Dense":
                dense.append(_read_dense(_config_of(folder, inner), inner, width))
                width = dense[-1].out_features
            case "Normalize":
                normalize = True
            case _:
                raise InvalidRequest(
                    f"{path}: the module {name!r} is not served; it must be Transformer, Pooling, Dense or Normalize",
                    field="model",
                )
    return SentenceModules(pick, tuple(dense), normalize, _read_max_tokens(folder))


def _check_order(path: Path, names: Sequence[str]) -> None:
    """Raises InvalidRequest for modules in another order than they are computed in."""
    known = [name for name in names if name in _ORDER]
    if known != sorted(known, key=_ORDER.index) or any(known.count(name) > 1 for name in _ORDER if name != "Dense"):
        raise InvalidRequest(
            f"{path}: the modules are {', '.join(names)}; they must be {', '.join(_ORDER)} in this order, each once, "
            "and Dense any number of times",
            field="model",
        )


def _config_of(folder: Path, inner: str) -> Fields:
    path = folder / inner / _CONFIG_FILE
    return Fields(read_json(path, f"{MODULES_FILE} names its folder"), str(path))


def _listed(path: Path) -> Sequence[tuple[str, str]]:
    """Returns the class and the folder of each module."""
    try:
        listed: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model") from error
    named = isinstance(listed, list) and all(isinstance(one, dict) and "type" in one for one in listed)
    if not named:
        raise InvalidRequest(f"{path} must hold a list of objects with type and path", field="model")
    return [(str(one["type"]).rpartition(".")[2], str(one.get("path", ""))) for one in listed]


def _read_pick(fields: Fields, width: int) -> Pick:
    stated = fields.raw.get("word_embedding_dimension", fields.raw.get("embedding_dimension", width))
    if stated != width:
        raise fields.error("word_embedding_dimension", f"{width}, which is the model's width")
    if fields.raw.get("include_prompt") is False:
        raise fields.error("include_prompt", "true: tokens of a prompt cannot be left out of the embedding")
    modes = [key for key in (*_PICKS, *_OTHER_PICKS) if fields.flag(key, default=False)]
    if (mode := fields.raw.get("pooling_mode")) is not None and not modes:
        modes = [f"pooling_mode_{mode}", f"pooling_mode_{mode}_token", f"pooling_mode_{mode}_tokens"]
        modes = [key for key in modes if key in _PICKS][:1]
    if len(modes) != 1 or modes[0] not in _PICKS:
        found = " and ".join(modes) or "none"
        raise InvalidRequest(
            f"{fields.source}: the pooling modes are {found}; exactly one of {', '.join(_PICKS)} must be true",
            field="model",
        )
    return _PICKS[modes[0]]


def _read_dense(fields: Fields, inner: str, width: int) -> DenseSpec:
    in_features = fields.positive_int("in_features")
    if in_features != width:
        raise fields.error("in_features", f"{width}, which is the width before it")
    for key in ("module_input_name", "module_output_name"):
        if fields.text(key, default="sentence_embedding") != "sentence_embedding":
            raise fields.error(key, "sentence_embedding")
    activation = fields.text("activation_function", default="torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _SQUASHES:
        raise fields.error("activation_function", f"one of {', '.join(_SQUASHES)}")
    return DenseSpec(
        f"{inner}/linear",
        in_features,
        fields.positive_int("out_features"),
        fields.flag("bias", default=True),
        _SQUASHES[activation],
    )


def _read_max_tokens(folder: Path) -> int:
    for name in _TRANSFORMER_FILES:
        if (folder / name).exists():
            fields = Fields(read_json(folder / name, ""), name)
            return fields.positive_int("max_seq_length") if fields.raw.get("max_seq_length") is not None else 0
    return 0
