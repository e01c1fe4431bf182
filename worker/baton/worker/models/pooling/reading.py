"""Decides from a model's folder what the model makes of its hidden states: tokens, embeddings or scores of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.core import HeadKind, PoolingTask
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.pooling.names import Purpose, purpose_of
from baton.worker.models.pooling.sentence_transformers import MODULES_FILE, SentenceModules, read_modules
from baton.worker.models.pooling.spec import DenseSpec, PoolerSpec, ScoreActivation

CONVERSIONS = ("auto", "none", "embed", "classify")
_EMBEDS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
_CLASSIFIES = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)
_COLBERT_WIDTHS = ("dim", "colbert_dim", "projection_dim")  # names of the width of ColBERT's vectors
_COLBERT_WIDTH = 128


def with_pooler(config: ModelConfig, folder: Path, fields: Fields, convert: str) -> ModelConfig:
    """Returns the config with its pooler, if the model has one, or is converted to one that has.

    `convert`: one of CONVERSIONS. auto: what the architecture and modules.json say. Raises InvalidRequest.
    """
    purpose = _purpose(folder, fields, convert)
    if purpose is Purpose.GENERATE:
        if not config.cached:
            raise InvalidRequest(
                f"{fields.source}: {config.architecture} reads whole texts and generates no tokens; convert must be "
                "auto, embed or classify",
                field="convert",
            )
        return config
    pooler = {
        Purpose.EMBED: _embedder,
        Purpose.CLASSIFY: _classifier,
        Purpose.TOKEN_CLASSIFY: _token_classifier,
        Purpose.TOKEN_EMBED: _token_embedder,
        Purpose.REWARD: _rewarder,
        Purpose.STEP_REWARD: _step_rewarder,
    }[purpose](config, folder, fields)
    prefix = config.names.embed.partition(".")[0] + "."
    names = replace(config.names, aliases=(*config.names.aliases, (prefix, "")))  # as of a model saved without a head
    return replace(config, pooler=pooler, heads=(HeadKind.POOL,), tie_embeddings=True, names=names)


def _purpose(folder: Path, fields: Fields, convert: str) -> Purpose:
    stated = purpose_of(fields)
    match convert:
        case "none":
            return Purpose.GENERATE
        case "embed":
            return Purpose.EMBED
        case "classify":
            return stated if stated.classifies else Purpose.CLASSIFY
        case _:
            return Purpose.EMBED if stated is Purpose.GENERATE and (folder / MODULES_FILE).exists() else stated


def _embedder(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    modules = read_modules(folder, config.hidden_size) or SentenceModules(normalize=True)
    if modules.by_token:
        return _late_interaction(modules.dense, modules.max_tokens)
    dimensions = fields.raw.get("matryoshka_dimensions") or ()
    width = modules.dense[-1].out_features if modules.dense else config.hidden_size
    fits = isinstance(dimensions, list | tuple) and all(isinstance(one, int) and 0 < one <= width for one in dimensions)
    if not fits:
        raise fields.error("matryoshka_dimensions", f"a list of integers of 1 to {width}")
    return PoolerSpec(
        tasks=_EMBEDS,
        width=width,
        pick=modules.pick or config.default_pick,
        dense=modules.dense,
        normalize=modules.normalize,
        dimensions=tuple(sorted(dimensions)),
        cuttable=bool(dimensions) or fields.flag("is_matryoshka", default=False),
        max_tokens=modules.max_tokens,
    )


def _token_embedder(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    """Reads ColBERT's own layout: a linear beside the encoder's tensors."""
    key = next((name for name in _COLBERT_WIDTHS if fields.raw.get(name) is not None), _COLBERT_WIDTHS[0])
    width = fields.positive_int(key, default=_COLBERT_WIDTH)
    return _late_interaction((DenseSpec("linear", config.hidden_size, width, bias=False),), 0)


def _late_interaction(dense: Sequence[DenseSpec], max_tokens: int) -> PoolerSpec:
    return PoolerSpec(
        tasks=(PoolingTask.TOKEN_EMBED,),
        width=dense[-1].out_features,
        pick="first",
        dense=tuple(dense),
        normalize=True,
        max_tokens=max_tokens,
    )


def _rewarder(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    """Reads a reward of a whole text: two linears on its last token."""
    labels = _read_labels(fields, default=1)
    return PoolerSpec(_CLASSIFIES, len(labels), "last", _reward_linears(config, len(labels)), labels=labels)


def _step_rewarder(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    """Reads rewards of steps: the chances of bad and good at each token."""
    labels = _read_labels(fields)
    linears = _reward_linears(config, len(labels))
    task = (PoolingTask.TOKEN_CLASSIFY,)
    return PoolerSpec(task, len(labels), "last", linears, labels=labels, score_activation="softmax")


def _reward_linears(config: ModelConfig, num_labels: int) -> tuple[DenseSpec, ...]:
    size = config.hidden_size
    return DenseSpec("score.0", size, size, squash="relu"), DenseSpec("score.2", size, num_labels)


def _classifier(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    labels, stated = _read_labels(fields), config.classifier
    score = DenseSpec(stated.linear, config.hidden_size, len(labels), stated.bias)
    return PoolerSpec(
        tasks=_CLASSIFIES,
        width=len(labels),
        pick=stated.pick,
        dense=(*stated.before, score),
        labels=labels,
        score_activation=_read_activation(fields, len(labels)),
        takes_pairs=stated.takes_pairs,
    )


def _token_classifier(config: ModelConfig, folder: Path, fields: Fields) -> PoolerSpec:
    labels, stated = _read_labels(fields), config.classifier
    score = DenseSpec(stated.token_linear, config.hidden_size, len(labels))
    return PoolerSpec(
        tasks=(PoolingTask.TOKEN_CLASSIFY,),
        width=len(labels),
        pick=stated.pick,
        dense=(*stated.token_before, score),
        labels=labels,
        score_activation="softmax",
    )


def _read_labels(fields: Fields, default: int = 2) -> tuple[str, ...]:
    """Reads the names of the classes, in their order; `default` of them if the config states nothing."""
    named: Mapping[str, Any] | None = fields.raw.get("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(fields.positive_int("num_labels", default=default)))
    keys = {str(index) for index in range(len(named))} if isinstance(named, Mapping) else set()
    if not named or set(map(str, named)) != keys or not all(isinstance(name, str) for name in named.values()):
        raise fields.error("id2label", "an object with a string for each of 0, 1, ..")
    by_index = {int(key): name for key, name in named.items()}
    return tuple(by_index[index] for index in range(len(by_index)))


def _read_activation(fields: Fields, num_labels: int) -> ScoreActivation:
    """Reads how scores become probabilities: as CrossEncoder of sentence-transformers does, else by problem_type."""
    inner = fields.inner("sentence_transformers")
    stated = inner.raw.get("activation_fn") if inner else fields.raw.get("sbert_ce_default_activation_function")
    if stated is not None:
        name = str(stated).rpartition(".")[2]
        known: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        if name not in known:
            raise InvalidRequest(
                f"{fields.source}: the activation of scores is {stated!r}; it must be one of {', '.join(known)}",
                field="model",
            )
        return known[name]
    match fields.raw.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case _:
            return "sigmoid" if num_labels == 1 else "softmax"
