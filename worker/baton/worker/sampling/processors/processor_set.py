"""The logits processors of a worker, and which rows of the batch each of them changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.plugins.kinds import LOGITS_PROCESSORS
from baton.plugins.plugins import Plugins, subclass_of
from baton.rpc.errors import DataLoss, InvalidRequest, ServiceError
from baton.worker.core import ExtraValue, Int32, RowInit
from baton.worker.sampling.processors.interface import LogitsProcessor, ProcessorContext, Rows

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

FIELD = "sampling.extra_args"
Arguments = Sequence[tuple[str, ExtraValue]]


class RowTokens(NamedTuple):
    """The tokens of the rows of a step that sample."""

    num_prompt_tokens: Sequence[int]
    num_tokens: Sequence[int]  # known before the step's own token
    token_ids: Callable[[Sequence[int]], Tensor]  # of some of these rows, with the width of the longest of them
    upload: Callable[[Sequence[int]], Tensor]  # numbers to the device of the logits, without a wait for it


@dataclass(frozen=True, slots=True)
class _Failed:
    """The state of a row whose state could not be made."""

    error: ServiceError


class ProcessorSet:
    """All processors of a worker, in the order in which they are applied."""

    def __init__(self, processors: Mapping[str, LogitsProcessor] | None = None) -> None:
        self._processors = dict(processors or {})
        self._states: dict[int, dict[str, Any]] = {}  # by row, then by processor

    def check(self, arguments: Arguments, prompt_token_ids: Int32) -> None:
        """Raises InvalidRequest for an argument that no processor reads, or that one refuses."""
        if not arguments:
            return
        known = {name for processor in self._processors.values() for name in processor.arguments}
        for name, _ in arguments:
            if name not in known:
                allowed = f"they read {', '.join(sorted(known))}" if known else "this worker has none (--plugins)"
                raise InvalidRequest(f"no logits processor reads vllm_xargs.{name}: {allowed}", field=FIELD)
        for state in self._states_of(arguments, prompt_token_ids).values():
            if isinstance(state, _Failed):
                raise state.error

    def admit(self, init: RowInit) -> None:
        """Makes the states of a row that enters the batch."""
        self._states.pop(init.row, None)
        if init.sampling.extra_args:
            prompt = init.token_ids[: init.num_prompt_tokens]
            self._states[init.row] = self._states_of(init.sampling.extra_args, prompt)

    def free(self, row: int) -> None:
        self._states.pop(row, None)

    def among(self, rows: Sequence[int]) -> list[int]:
        """Returns the indices of those rows that have a processor."""
        return [index for index, row in enumerate(rows) if row in self._states] if self._states else []

    def apply(
        self, logits: Tensor, rows: Sequence[int], indices: Sequence[int], tokens: RowTokens
    ) -> dict[int, ServiceError]:
        """Changes logits [len(rows), vocab_size] in place at `indices`, which have processors.

        Returns the errors of rows that failed, by index; their logits are undefined.
        """
        failed: dict[int, ServiceError] = {}
        for name, processor in self._processors.items():
            chosen = [i for i in indices if i not in failed and name in self._states[rows[i]]]
            broken = {i: self._states[rows[i]][name] for i in chosen}
            failed |= {i: state.error for i, state in broken.items() if isinstance(state, _Failed)}
            chosen = [i for i in chosen if i not in failed]
            if chosen:
                failed |= self._run(name, processor, logits, [rows[i] for i in chosen], chosen, tokens)
        return failed

    def _run(
        self,
        name: str,
        processor: LogitsProcessor,
        logits: Tensor,
        rows: Sequence[int],
        indices: list[int],
        tokens: RowTokens,
    ) -> dict[int, ServiceError]:
        """Applies one processor to all its rows at once, and to each alone if that raises."""
        states = [self._states[row][name] for row in rows]
        try:
            self._change(processor, logits, states, indices, tokens)
            return {}
        except Exception as error:
            if len(indices) == 1:
                return {indices[0]: _failure(name, error)}
        failed: dict[int, ServiceError] = {}
        for state, index in zip(states, indices, strict=True):
            try:
                self._change(processor, logits, [state], [index], tokens)
            except Exception as error:
                failed[index] = _failure(name, error)
        return failed

    def _change(
        self, processor: LogitsProcessor, logits: Tensor, states: list[Any], indices: list[int], tokens: RowTokens
    ) -> None:
        """Changes a copy of the rows' logits, and writes it back if that worked."""
        on_device = processor.on_device
        places = tokens.upload(indices)
        changed = logits.index_select(0, places).float()
        changed = changed if on_device else changed.cpu()

        def token_ids() -> Tensor:
            found = tokens.token_ids(indices)
            return found if on_device else found.cpu()

        view = Rows(
            states,
            [tokens.num_prompt_tokens[index] for index in indices],
            [tokens.num_tokens[index] for index in indices],
            token_ids,
        )
        processor.apply(changed, view)
        logits.index_copy_(0, places, changed.to(logits))

    def _states_of(self, arguments: Arguments, prompt_token_ids: Int32) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, processor in self._processors.items():
            own = {key: value for key, value in arguments if key in processor.arguments}
            if not own:
                continue
            try:
                states[name] = processor.new_row(own, prompt_token_ids)
            except ValueError as error:
                states[name] = _Failed(InvalidRequest(f"vllm_xargs: {name} refuses {own}: {error}", field=FIELD))
            except Exception as error:
                states[name] = _Failed(_failure(name, error))
        return states


NO_PROCESSORS = ProcessorSet()


def start_processors(plugins: Plugins, context: ProcessorContext) -> ProcessorSet:
    """Makes the allowed processors. Raises PluginError for one that cannot start."""

    def make(found: Any) -> LogitsProcessor:
        processor: LogitsProcessor = subclass_of(LogitsProcessor)(found)(context)
        names = getattr(processor, "arguments", None)
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"its arguments are {names!r}; they must be a tuple of names, at least one")
        return processor

    return ProcessorSet(plugins.start(LOGITS_PROCESSORS, make))


def _failure(name: str, error: Exception) -> ServiceError:
    """Returns the error of a request. Gateways move internal errors to another worker, which would fail as well."""
    _log.error("the logits processor %s failed", name, exc_info=error)
    return DataLoss(f"the logits processor {name} failed ({type(error).__name__})")
