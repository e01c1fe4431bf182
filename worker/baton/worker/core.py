"""The engine's words: what a request is, what a step is to do, and what came of it. Knows no tensors and no wire."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType, overload

import numpy as np
from numpy.typing import NDArray

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # chained: equal hashes mean equal prefixes
Row = NewType("Row", int)  # a request's place in the executor's persistent batch
HostSlot = NewType("HostSlot", int)  # a block's place in host memory

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class TokenIds(Sequence[int]):
    """A request's prompt, kept as the array it came in, and its generated tokens. A slice returns a list."""

    __slots__ = ("generated", "given")

    def __init__(self, given: NDArray[np.int32] | Sequence[int]) -> None:
        self.given: NDArray[np.int32] = np.asarray(given, np.int32)  # never changed
        self.generated: list[int] = []

    def __len__(self) -> int:
        return len(self.given) + len(self.generated)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        num_given = len(self.given)
        if isinstance(index, slice):
            start, stop, step = index.indices(num_given + len(self.generated))
            if step != 1:
                return list(self)[index]
            if start >= num_given:
                return self.generated[start - num_given : max(0, stop - num_given)]
            head: list[int] = self.given[start:stop].tolist()
            return head + self.generated[max(0, start - num_given) : max(0, stop - num_given)]
        if index < 0:
            index += len(self)
            if index < 0:
                raise IndexError(f"there are {len(self)} tokens")
        return int(self.given[index]) if index < num_given else self.generated[index - num_given]

    def __iter__(self) -> Iterator[int]:
        yield from self.given.tolist()
        yield from self.generated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (TokenIds, list, tuple)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({list(self)})"

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        self.generated.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds generated tokens."""
        self.generated.extend(token_ids)

    def array(self, stop: int | None = None) -> NDArray[np.int32]:
        """Returns the first `stop` tokens, or all. May be the prompt's own array: do not write to it."""
        if stop is not None and stop <= len(self.given):
            return self.given[:stop]
        if not self.generated:
            return self.given
        whole = np.concatenate((self.given, np.array(self.generated, np.int32)))
        return whole if stop is None else whole[:stop]


class HeadKind(enum.Enum):
    """What a request's result is made of: the part of a model behind its last hidden states."""

    GENERATE = "generate"  # tokens


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The loaded model's properties that the engine and the contract use."""

    digest: bytes  # 16 bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    heads: tuple[HeadKind, ...] = (HeadKind.GENERATE,)


class Tier(enum.Enum):
    """The memory that a cached block is in; mirrors baton.v1.KvTier."""

    DEVICE = "device"
    HOST = "host"


class FinishReason(enum.Enum):
    """Why a generation ended; mirrors baton.v1.FinishReason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """Ends a reasoning that grows too long. See baton.v1.ReasoningLimit."""

    max_tokens: int
    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None  # None: the output begins in the reasoning


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn, every value resolved."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # noise is a function of (seed, position)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    logprobs: int | None = None  # alternatives beside the sampled token's own
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives of `logprobs`; empty: the most likely ones
    prompt_logprobs: int | None = None  # the same for each token of the prompt; the prompt is then computed anew
    # Tokens that cannot be drawn while fewer than min_tokens were.
    min_tokens: int = 0
    suppressed_token_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens, under min_tokens
    # Where the output ends with all of a sequence but its last token, that one cannot be drawn.
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    reasoning_limit: ReasoningLimit | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When one request ends, every value resolved."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    stop_token_ids: frozenset[int] = frozenset()


class ConstraintForm(enum.Enum):
    """How a constraint says what the text must be; the values are the fields of baton.v1.Constraint's oneof."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an output must be. See baton.v1.Constraint for each field."""

    form: ConstraintForm
    text: str = ""  # of every form but choices
    choices: tuple[str, ...] = ()
    no_whitespace: bool = False
    whitespace_pattern: str = ""
    no_additional_properties: bool = False
    lenient: bool = False
    reasoning_end_token_ids: tuple[int, ...] = ()
    reasoning_start_token_id: int | None = None
    may_end_in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn, for some of a step's rows."""

    indices: Int32  # into the plan's rows with `samples`; each of them gets one token
    bits: Int32  # [len(indices), ceil(vocab_size / 32)]: token t may come where bit t % 32 of word t // 32 is set

    def among(self, drawn: NDArray[np.bool_]) -> TokenMasks:
        """The same, with indices into those of the rows with `samples` that are drawn."""
        return TokenMasks((np.cumsum(drawn, dtype=np.int32) - 1)[self.indices], self.bits)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's distribution before temperature and filters."""

    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True)
class RowInit:
    """A request enters the batch: all that the executor must know of it until the row is freed."""

    row: Row
    token_ids: Int32  # all known so far: the prompt, and the output after a preemption or failover; never changed
    num_prompt_tokens: int  # the first of token_ids; the rest counts as output in penalties and noise positions
    sampling: SamplingParams


@dataclass(slots=True)
class StepPlan:
    """One engine step, as a difference to the executor's persistent batch.

    Columns have one entry for each scheduled row: rows that decode first, then prefill chunks. A decode's
    num_scheduled_tokens are the most that it may compute, and get, in this step: the last known token, and as many
    behind it as the executor guesses right. Its num_computed_tokens are exact while no earlier step is in flight, and
    otherwise the most that they may be: the executor keeps its own count.
    The executor applies, in this order: freed, admitted, new_blocks; then it computes. Admission replaces
    whatever the row held and starts with an empty block table; admitted and new_blocks name scheduled rows only.
    Freeing a row that holds nothing is no error: after a launch that failed the engine cannot know.
    """

    step: int
    freed: list[Row] = field(default_factory=list)
    admitted: list[RowInit] = field(default_factory=list)
    new_blocks: list[tuple[Row, list[BlockId]]] = field(default_factory=list)  # appended to the row's block table
    rows: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_scheduled_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_computed_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # before the step
    samples: NDArray[np.bool_] = field(
        default_factory=lambda: np.empty(0, np.bool_)
    )  # the row's chunk reaches its last token
    num_decodes: int = 0  # how many of the rows, from the front, decode
    masks: TokenMasks | None = None  # of rows that may not draw every token
    head: HeadKind = HeadKind.GENERATE  # of all its rows
    masks_follow: bool = False  # with the executor's `draw`: some depend on tokens of the step before

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes, at most."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def num_prefill_tokens(self) -> int:
        """Those of the prefill chunks."""
        return int(self.num_scheduled_tokens[self.num_decodes :].sum())


@dataclass(slots=True)
class StepResult:
    """What a step sampled: `counts[i]` tokens of the plan's row i, row behind row, in the plan's order.

    A decode gets one token at least and num_scheduled_tokens at most, a prefill chunk with `samples` exactly one, and
    other chunks none. Rows that `draw` left out get none.
    """

    step: int
    token_ids: Int32
    counts: Int32
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into token_ids
    # By index into the plan's rows: the first place in the prompt, and the log-probabilities from there on.
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    seconds: float = 0.0  # device time
    idle_seconds: float | None = None  # of the device before the step; None: not known


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """What a request's KV took to come from its prefill worker."""

    num_bytes: int
    seconds: float  # from the lease to the last block
    exposed_seconds: float  # how long the first token waited for the last block


@dataclass(slots=True, eq=False)
class Request:
    """One generation on this worker, from submit to finish.

    `token_ids` is the prompt and, after a failover, the output that the client has already; num_prompt_tokens says
    where the prompt ends. The engine appends to it. `request_id` is unique among the engine's live requests.
    """

    request_id: str
    token_ids: TokenIds  # prompt first, then output; made of any sequence of integers
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_namespace: bytes
    block_hashes: bytes = b""  # 16 bytes a block: of the first full blocks, as far as they were hashed before
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0  # monotonic seconds
    deadline: float | None = None  # monotonic seconds
    prefill_only: bool = False  # a prefill for another worker: ends with its first token, holds its blocks until freed
    remote_prefill: bool = False  # another worker computes the prompt, unless enough of it is cached here
    traceparent: str = ""  # W3C trace context of whoever asks; empty: none
    num_prefill_cached_tokens: int = 0  # tokens that the prefill worker had cached; set by the hand-over
    transfer: TransferTimes | None = None  # of the KV that a prefill worker sent; set by the hand-over
    head: HeadKind = HeadKind.GENERATE
    constraint: Constraint | None = None  # of the whole output, what is in token_ids included
    tenant: str = ""  # pays for its compilation; empty: not known

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenIds):
            self.token_ids = TokenIds(self.token_ids)
