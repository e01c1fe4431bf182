"""Makes the proposer that a worker's settings name: one of Baton's, a draft model, or a plugin's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import Plugins, subclass_of
from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.draft_model import DraftMemory, DraftModel, check_draft_config
from baton.worker.models.config import ModelConfig
from baton.worker.speculation.interface import ProposerContext, TokenProposer
from baton.worker.speculation.ngram import NgramProposer
from baton.worker.speculation.proposer import EachRow, Proposer
from baton.worker.speculation.suffix import SuffixProposer
from baton.worker.speculation.threaded import ThreadedProposer
from baton.worker.speculation.vocabularies import check_same_vocabulary
from baton.worker.speculation_settings import METHODS, SpeculationSettings
from baton.worker.weights.loading import ModelOptions, load_model, read_config
from baton.worker.weights.resolve import resolve_model

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a proposer needs to know of the model and the batch that verify its guesses."""

    config: WorkerConfig
    model: ModelConfig
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
    return DraftModel(loaded, verifier.dtype, memory, verifier.model.vocab_size)


def _plugin(name: str, verifier: Verifier, plugins: Plugins) -> Proposer:
    context = ProposerContext(verifier.model.vocab_size, verifier.max_model_len, verifier.config.max_num_requests)

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
