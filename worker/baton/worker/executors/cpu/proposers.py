"""Makes the proposer that a worker's settings name: one of Baton's, a draft model, or a plugin's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import Plugins, subclass_of
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.draft_model import DraftMemory, DraftModel, check_draft_config
from baton.worker.executors.cpu.eagle3.checkpoint import load_eagle3
from baton.worker.executors.cpu.eagle3.proposer import Eagle3Proposer
from baton.worker.models.weights import ModelWeights
from baton.worker.speculation.interface import ProposerContext, TokenProposer
from baton.worker.speculation.ngram import NgramProposer
from baton.worker.speculation.proposer import EachRow, Proposer
from baton.worker.speculation.suffix import SuffixProposer
from baton.worker.speculation.threaded import ThreadedProposer
from baton.worker.speculation.vocabularies import check_same_vocabulary
from baton.worker.speculation_settings import METHODS, SpeculationSettings
from baton.worker.weights.loading import LoadedModel, ModelOptions, load_model, read_config
from baton.worker.weights.resolve import resolve_model

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a proposer needs to know of the model and the batch that verify its guesses."""

    config: WorkerConfig
    loaded: LoadedModel
    options: ModelOptions
    dtype: torch.dtype
    max_model_len: int
    num_blocks: int


def make_proposer(settings: SpeculationSettings, verifier: Verifier, plugins: Plugins) -> Proposer:
    """Returns the proposer of a method. Raises InvalidRequest for one that does not fit the model."""
    if settings.num_speculative_tokens >= verifier.max_model_len:
        raise InvalidRequest(
            f"{_FIELD}: num_speculative_tokens is {settings.num_speculative_tokens}; a request has at most "
            f"{verifier.max_model_len} tokens, so it must be at most {verifier.max_model_len - 1}",
            field=_FIELD,
        )
    plugins.refuse_names(PROPOSERS, METHODS)
    match settings.method:
        case "ngram":
            return EachRow(NgramProposer(settings.prompt_lookup_max, settings.prompt_lookup_min))
        case "suffix":
            depth, size = settings.suffix_decoding_max_tree_depth, settings.suffix_decoding_max_cached_tokens
            return EachRow(SuffixProposer(depth, size, settings.prompt_lookup_min))
        case "draft_model":
            return _draft_model(settings, verifier)
        case "eagle3":
            return _eagle3(settings, verifier)
        case name:
            return _plugin(name, verifier, plugins)


def _draft_model(settings: SpeculationSettings, verifier: Verifier) -> DraftModel:
    options = replace(verifier.options, revision=settings.revision, overrides={}, max_model_len=0, convert="auto")
    source, load_format = settings.model, verifier.config.load_format
    check_draft_config(read_config(source, load_format, options), source)
    if load_format != "dummy":
        ours = resolve_model(verifier.config.model, verifier.options.revision)
        check_same_vocabulary(ours, resolve_model(source, settings.revision))
    loaded = load_model(source, load_format, verifier.dtype, options=options)
    memory = DraftMemory(
        verifier.config.max_num_requests, verifier.max_model_len, verifier.config.block_size, verifier.num_blocks
    )
    return DraftModel(loaded, verifier.dtype, memory, verifier.loaded.config.vocab_size)


def _eagle3(settings: SpeculationSettings, verifier: Verifier) -> Eagle3Proposer:
    model, weights = verifier.loaded.config, verifier.loaded.weights
    if not isinstance(weights, ModelWeights):
        raise Unsupported(
            f"{_FIELD}: method 'eagle3' reads hidden states, which a model of {model.implementation} does not give",
            field=_FIELD,
        )
    folder = resolve_model(settings.model, settings.revision)
    head = load_eagle3(folder, model, weights.embed, verifier.dtype)
    return Eagle3Proposer(head, verifier.max_model_len, model.vocab_size)


def _plugin(name: str, verifier: Verifier, plugins: Plugins) -> Proposer:
    context = ProposerContext(
        verifier.loaded.config.vocab_size, verifier.max_model_len, verifier.config.max_num_requests
    )

    def make(found: Any) -> ThreadedProposer:
        proposer: type[TokenProposer] = subclass_of(TokenProposer)(found)
        return ThreadedProposer(partial(proposer, context), name)

    made = plugins.start(PROPOSERS, make)
    if name not in made:
        raise InvalidRequest(
            f"{_FIELD}: method is {name!r}, and the plugin of this name is no proposer; give {' or '.join(METHODS)}",
            field=_FIELD,
        )
    return made[name]
