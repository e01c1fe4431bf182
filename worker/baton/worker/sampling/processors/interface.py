"""The interface of logits processors, which plugins implement. Version 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.worker.core import ExtraValue, Int32

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor knows of its worker."""

    vocab_size: int
    device: torch.device  # of the model


class Rows:
    """The requests whose logits a processor changes, one for each row."""

    def __init__(
        self,
        states: Sequence[Any],
        num_prompt_tokens: Sequence[int],
        num_tokens: Sequence[int],
        token_ids: Callable[[], Tensor],
    ) -> None:
        self.states = states  # what `new_row` returned for each
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_tokens  # of prompt and output so far
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self.states)

    @property
    def num_output_tokens(self) -> list[int]:
        """The output tokens of each row so far."""
        return [all_of - prompt for all_of, prompt in zip(self.num_tokens, self.num_prompt_tokens, strict=True)]

    @property
    def token_ids(self) -> Tensor:
        """The tokens of each row [len(rows), most tokens] int32, on the device of the logits: the prompt, then the
        output. Undefined from num_tokens[row] on."""
        return self._token_ids()

    def outputs(self) -> list[list[int]]:
        """Returns the output tokens of each row. Waits for the device if the rows are there."""
        bounds = zip(self.token_ids.tolist(), self.num_prompt_tokens, self.num_tokens, strict=True)
        return [row[prompt:end] for row, prompt, end in bounds]


class LogitsProcessor(ABC):
    """Changes the logits of requests that give one of its arguments (`vllm_xargs`). An entry point names a subclass.

    A row's logits may depend on the request's arguments and tokens alone, and on no other row: a request may be
    preempted, handed over or continued on another worker at any token, and its state is then made again.
    """

    arguments: tuple[str, ...]  # names that it reads
    # Whether `apply` works on tensors of the model's device and never waits for it. Without it, rows are copied to the
    # host, and on a GPU the step waits for the token before.
    on_device: bool = False

    def __init__(self, context: ProcessorContext) -> None:
        """Raises if it cannot work: the worker then does not start."""
        self.context = context

    @abstractmethod
    def new_row(self, arguments: Mapping[str, ExtraValue], prompt_token_ids: Int32) -> Any:
        """Returns the state of a request that gives some of the arguments. Raises ValueError for wrong values.

        Called at the submit, and again whenever the request enters the batch. Must be fast.
        """

    @abstractmethod
    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Changes fp32 logits [len(rows), vocab_size] in place, before all other edits and the constraint.

        If it raises, it is called again for each row alone, with the logits as they were; the rows for which it
        raises then fail their requests.
        """
