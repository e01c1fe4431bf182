"""What guesses on a GPU: loads the weights that a method needs, and makes its proposer over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import Plugins
from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.executors.cuda.draft_model import CudaDraftModel, draft_kv_spec
from baton.worker.executors.cuda.eagle3 import CudaEagle3, block_bytes, head_model
from baton.worker.executors.cuda.startup.support import check_supported
from baton.worker.executors.cuda.steps.kept_hidden import KeptHidden
from baton.worker.executors.host.draft_models import DraftMemory, load_draft_model
from baton.worker.executors.host.eagle3 import Eagle3Head, load_eagle3
from baton.worker.executors.host.proposers import check_num_drafts, host_proposer
from baton.worker.models.config import ModelConfig
from baton.worker.models.weights import ModelWeights
from baton.worker.speculation.interface import ProposerContext
from baton.worker.speculation.proposer import Proposer
from baton.worker.speculation_settings import METHODS, SpeculationSettings
from baton.worker.weights.loading import LoadedModel, ModelOptions
from baton.worker.weights.resolve import resolve_model

_FIELD = "speculative_config"


def check_method(settings: SpeculationSettings | None) -> None:
    """Raises Unsupported for a method that has no form on a GPU."""
    if settings is not None and settings.method == "mtp":
        raise Unsupported(
            f"{_FIELD}: method 'mtp' has no form on executor=cuda; give eagle3, draft_model, ngram, suffix or a "
            "plugin, or executor=cpu",
            field=_FIELD,
        )


@dataclass(frozen=True, slots=True)
class Guesser:
    """A net that guesses, with weights on the device or going there."""

    model: ModelConfig
    num_bytes: int  # of the weights
    block_bytes: int  # of the memory beside each block of the model's KV
    source: LoadedModel | Eagle3Head

    def kept(self, model: ModelConfig, num_rows: int, dtype: torch.dtype, device: torch.device) -> KeptHidden | None:
        """Returns the memory of the model's hidden states that it reads; None: it reads none."""
        if not isinstance(self.source, Eagle3Head):
            return None
        return KeptHidden(self.source.config.layers, num_rows, model.hidden_size, dtype, device)


def load_guesser(
    settings: SpeculationSettings | None,
    config: WorkerConfig,
    options: ModelOptions,
    verifier: LoadedModel,
    dtype: torch.dtype,
    device: torch.device,
) -> Guesser | None:
    """Returns what guesses for the model `verifier`; None for methods without a net. Raises InvalidRequest for a net
    that does not fit the model, Unsupported for one that no GPU computes."""
    if settings is None or settings.method not in ("draft_model", "eagle3"):
        return None
    if settings.method == "eagle3":
        return _load_eagle3(settings, config, verifier, dtype, device)
    loaded = load_draft_model(settings, config, options, dtype, device)
    check_supported(config, loaded.config, dtype, device)
    page_bytes = draft_kv_spec(loaded, config.block_size, dtype).page_bytes
    return Guesser(loaded.config, loaded.weights.num_bytes, page_bytes, loaded)


def make_proposer(
    settings: SpeculationSettings,
    guesser: Guesser | None,
    model: ModelConfig,
    dtype: torch.dtype,
    memory: DraftMemory,
    config: WorkerConfig,
    device: torch.device,
    plugins: Plugins,
) -> Proposer:
    """Returns the proposer of a method. Raises InvalidRequest for one that does not fit the model."""
    check_num_drafts(settings, memory.max_model_len)
    most = settings.num_speculative_tokens
    if guesser is None:
        return host_proposer(
            settings, ProposerContext(model.vocab_size, memory.max_model_len, memory.num_rows), plugins
        )
    plugins.refuse_names(PROPOSERS, METHODS)
    if isinstance(guesser.source, Eagle3Head):
        return CudaEagle3(guesser.source, model, dtype, memory, config, device, most=most)
    return CudaDraftModel(guesser.source, dtype, memory, config, device, most=most)


def _load_eagle3(
    settings: SpeculationSettings, config: WorkerConfig, verifier: LoadedModel, dtype: torch.dtype, device: torch.device
) -> Guesser:
    model, weights = verifier.config, verifier.weights
    if not isinstance(weights, ModelWeights):
        raise Unsupported(
            f"{_FIELD}: method 'eagle3' reads hidden states, which a model of {model.implementation} does not give",
            field=_FIELD,
        )
    head = load_eagle3(resolve_model(settings.model, settings.revision), model, weights.embed, dtype)
    own = head_model(head.config, model, model.max_model_len)
    check_supported(config, own, dtype, device)
    embed = model.vocab_size * head.config.hidden_size * dtype.itemsize
    num_bytes = 2 * sum(tensor.nbytes for tensor in head.weights.values()) + embed  # fused linears are copies
    return Guesser(own, num_bytes, block_bytes(head.config, config.block_size, dtype), head)
