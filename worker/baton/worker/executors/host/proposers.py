"""Makes proposers that need no model: Baton's own, or a plugin's. They run on the host, whatever verifies."""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import Plugins, subclass_of
from baton.rpc.errors import InvalidRequest
from baton.worker.speculation.interface import ProposerContext, TokenProposer
from baton.worker.speculation.ngram import NgramProposer
from baton.worker.speculation.proposer import EachRow, Proposer
from baton.worker.speculation.suffix import SuffixProposer
from baton.worker.speculation.threaded import ThreadedProposer
from baton.worker.speculation_settings import METHODS, SpeculationSettings

_FIELD = "speculative_config"


def check_num_drafts(settings: SpeculationSettings, max_model_len: int) -> None:
    """Raises InvalidRequest for more drafts than a request has room for."""
    if settings.num_speculative_tokens >= max_model_len:
        raise InvalidRequest(
            f"{_FIELD}: num_speculative_tokens is {settings.num_speculative_tokens}; a request has at most "
            f"{max_model_len} tokens, so it must be at most {max_model_len - 1}",
            field=_FIELD,
        )


def host_proposer(settings: SpeculationSettings, context: ProposerContext, plugins: Plugins) -> Proposer:
    """Returns the proposer of a method without a model. Raises InvalidRequest for a plugin that has none."""
    plugins.refuse_names(PROPOSERS, METHODS)
    match settings.method:
        case "ngram":
            return EachRow(NgramProposer(settings.prompt_lookup_max, settings.prompt_lookup_min))
        case "suffix":
            depth, size = settings.suffix_decoding_max_tree_depth, settings.suffix_decoding_max_cached_tokens
            return EachRow(SuffixProposer(depth, size, settings.prompt_lookup_min))
        case name:
            return _plugin(name, context, plugins)


def _plugin(name: str, context: ProposerContext, plugins: Plugins) -> Proposer:
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
