"""Makes the proposer that a worker's settings name: one of Baton's, a model or layer that guesses, or a plugin's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import Plugins
from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.draft_model import DraftModel
from baton.worker.executors.cpu.eagle3.proposer import Eagle3Proposer
from baton.worker.executors.cpu.mtp.checkpoint import load_mtp
from baton.worker.executors.cpu.mtp.proposer import MtpProposer
from baton.worker.executors.host.draft_models import DraftMemory, load_draft_model
from baton.worker.executors.host.eagle3 import load_eagle3
from baton.worker.executors.host.proposers import check_num_drafts, host_proposer
from baton.worker.models.weights import ModelWeights
from baton.worker.speculation.interface import ProposerContext
from baton.worker.speculation.proposer import Proposer
from baton.worker.speculation_settings import METHODS, SpeculationSettings
from baton.worker.weights.loading import LoadedModel, ModelOptions
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
    check_num_drafts(settings, verifier.max_model_len)
    plugins.refuse_names(PROPOSERS, METHODS)
    match settings.method:
        case "draft_model":
            return _draft_model(settings, verifier)
        case "eagle3":
            return _eagle3(settings, verifier)
        case "mtp":
            return _mtp(verifier)
    vocab_size, most = verifier.loaded.config.vocab_size, verifier.config.max_num_requests
    return host_proposer(settings, ProposerContext(vocab_size, verifier.max_model_len, most), plugins)


def _draft_model(settings: SpeculationSettings, verifier: Verifier) -> DraftModel:
    loaded = load_draft_model(settings, verifier.config, verifier.options, verifier.dtype)
    return DraftModel(loaded, verifier.dtype, _draft_memory(verifier), verifier.loaded.config.vocab_size)


def _eagle3(settings: SpeculationSettings, verifier: Verifier) -> Eagle3Proposer:
    model, weights = verifier.loaded.config, _read_weights(verifier, "eagle3")
    folder = resolve_model(settings.model, settings.revision)
    head = load_eagle3(folder, model, weights.embed, verifier.dtype)
    return Eagle3Proposer(head, verifier.max_model_len, model.vocab_size)


def _mtp(verifier: Verifier) -> MtpProposer:
    config, model, weights = verifier.config, verifier.loaded.config, _read_weights(verifier, "mtp")
    if config.load_format == "dummy":
        raise Unsupported(
            f"{_FIELD}: method 'mtp' reads a layer of the checkpoint, and load_format=dummy reads none", field=_FIELD
        )
    layer = load_mtp(resolve_model(config.model, config.revision), model, weights, verifier.dtype)
    return MtpProposer(layer, weights, model.num_layers, verifier.dtype, _draft_memory(verifier))


def _draft_memory(verifier: Verifier) -> DraftMemory:
    config = verifier.config
    return DraftMemory(config.max_num_requests, verifier.max_model_len, config.block_size, verifier.num_blocks)


def _read_weights(verifier: Verifier, method: str) -> ModelWeights:
    """Returns the weights of a model whose hidden states can be read."""
    if not isinstance(verifier.loaded.weights, ModelWeights):
        raise Unsupported(
            f"{_FIELD}: method {method!r} reads hidden states, which a model of "
            f"{verifier.loaded.config.implementation} does not give",
            field=_FIELD,
        )
    return verifier.loaded.weights
