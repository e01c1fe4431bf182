"""The engine's vocabulary: requests, the plan of a step, and its result. Knows no tensors and no wire format."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import ServiceError

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # chained: equal hashes mean equal prefixes
Row = NewType("Row", int)  # index in the executor's persistent batch
HostSlot = NewType("HostSlot", int)  # index of a block in host memory

ExtraValue = str | int | float | bool | tuple[str | int | float | bool, ...]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class TokenIds(Sequence[int]):
    """A request's prompt, in the array that it was submitted in, and its generated tokens. A slice returns a list."""

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
                raise IndexError(f"index out of range: there are {len(self)} tokens")
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
        """Appends a generated token."""
        self.generated.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
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
    POOL = "pool"  # vectors: embeddings, or scores of classes


class PoolingTask(enum.Enum):
    """What a request to the head POOL returns; mirrors baton.v1.PoolingTask."""

    EMBED = "embed"  # one vector of the text
    CLASSIFY = "classify"  # the scores of the model's classes for the text
    TOKEN_EMBED = "token_embed"  # a vector of each token
    TOKEN_CLASSIFY = "token_classify"  # the scores of the model's classes for each token

    @property
    def by_token(self) -> bool:
        """Whether there is a vector for each token, and not one for the text."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What a request to the head POOL asks for, with every value resolved."""

    task: PoolingTask
    dimensions: int = 0  # the first values of each embedding that are kept; 0: all
    activation: bool = True  # embeddings are normalized, scores become probabilities, where the model does that
    second_text_start: int = 0  # the token at which the second text of a pair begins; 0: there is one text
    reads_all: bool = False  # needs the hidden states of all tokens, so none are taken from the cache


class Pooler(Protocol):
    """The properties of a model's pooler that the engine and the contract use."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What requests may ask for."""

    @property
    def width(self) -> int:
        """Values of an embedding, or number of classes."""

    @property
    def normalize(self) -> bool:
        """Whether embeddings have length 1."""

    @property
    def cuttable(self) -> bool:
        """Whether embeddings may be cut to fewer values."""

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The numbers of values that embeddings may be cut to; empty: any."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; empty: it makes embeddings."""

    @property
    def takes_pairs(self) -> bool:
        """Whether a text may be a pair of two."""

    def reads_all(self, task: PoolingTask) -> bool:
        """Whether a request needs the hidden states of all tokens, so that none are taken from a cache."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The loaded model's properties that the engine and the contract use."""

    digest: bytes  # 16 bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    heads: tuple[HeadKind, ...] = (HeadKind.GENERATE,)
    pooler: Pooler | None = None  # of the head POOL
    cached: bool = True  # keys and values are kept in blocks; if not, each step computes whole prompts


class Tier(enum.Enum):
    """The memory that a cached block is in; mirrors baton.v1.KvTier."""

    DEVICE = "device"
    HOST = "host"


class FinishReason(enum.Enum):
    """The reason for the end of a generation; mirrors baton.v1.FinishReason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """Ends reasoning that grows too long. See baton.v1.ReasoningLimit."""

    max_tokens: int
    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None  # None: the output begins with reasoning


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request's tokens, with every value resolved."""

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
    logprobs: int | None = None  # alternatives in addition to the sampled token
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives of `logprobs`; empty: the most likely ones
    prompt_logprobs: int | None = None  # the same for each token of the prompt, which is then recomputed
    # Tokens that cannot be sampled before min_tokens.
    min_tokens: int = 0
    suppressed_token_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens, under min_tokens
    # If the output ends with a sequence except its last token, that token cannot be sampled.
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    reasoning_limit: ReasoningLimit | None = None
    # Arguments of logits processors, by name; a list is a tuple.
    extra_args: tuple[tuple[str, ExtraValue], ...] = ()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The conditions that end a request, with every value resolved."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    stop_token_ids: frozenset[int] = frozenset()


class ConstraintForm(enum.Enum):
    """The kind of a constraint; the values are the fields of baton.v1.Constraint's oneof."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an output must have. See baton.v1.Constraint for each field."""

    form: ConstraintForm
    text: str = ""  # for every form but choices
    choices: tuple[str, ...] = ()
    no_whitespace: bool = False
    whitespace_pattern: str = ""
    no_additional_properties: bool = False
    lenient: bool = False
    reasoning_end_token_ids: tuple[int, ...] = ()
    reasoning_start_token_id: int | None = None
    may_end_in_reasoning: bool = False


class MaskWalk(Protocol):
    """The masks behind guessed tokens of one row. Its constraint stays where it is."""

    def follow(self, token_id: int) -> Int32 | None:
        """Returns the mask of the token behind this one, [ceil(vocab_size / 32)]. None: the run of guesses ends here.

        `token_id` follows the row's known tokens and those of earlier calls, and their masks allow it.
        """


class MaskGuide(Protocol):
    """What knows the masks of a row."""

    def walk(self) -> MaskWalk:
        """Begins behind the row's known tokens."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that may be sampled, for some rows of a step."""

    indices: Int32  # into the plan's rows with `samples`; the mask is that of each one's first token
    bits: Int32  # [len(indices), ceil(vocab_size / 32)]: token t may be sampled if bit t % 32 of word t // 32 is set
    guides: tuple[MaskGuide, ...] = ()  # for the masks of further tokens; empty: each row gets one token

    def among(self, drawn: NDArray[np.bool_]) -> TokenMasks:
        """Returns the masks with indices into the drawn rows among those with `samples`."""
        return TokenMasks((np.cumsum(drawn, dtype=np.int32) - 1)[self.indices], self.bits)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's distribution before temperature and filters."""

    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class AdapterRef(NamedTuple):
    """A LoRA adapter: its digest says which one, its path where it is read from."""

    name: str
    path: str
    digest: bytes  # 16 bytes


@dataclass(slots=True)
class RowInit:
    """A request that enters the batch, with all that the executor needs until the row is freed."""

    row: Row
    token_ids: Int32  # all known so far: the prompt, and the output after a preemption or failover; never changed
    num_prompt_tokens: int  # the prompt's part of token_ids; the rest counts as output in penalties and noise positions
    sampling: SamplingParams
    pooling: PoolingParams | None = None  # of a request to the head POOL
    namespace: bytes = b""  # of its cache: what it computes must not depend on requests of others, nor its time
    adapter_slot: int = -1  # of the device's adapters; -1: the model itself


class MoreBlocks(NamedTuple):
    """Blocks for a row's table of another group than the first."""

    row: Row
    group: int
    start: int  # the place of the first one in the table; what is there is replaced
    block_ids: list[BlockId]


@dataclass(slots=True)
class StepPlan:
    """One engine step, as a difference to the executor's persistent batch.

    Columns have one entry for each scheduled row: rows that decode first, then prefill chunks. num_scheduled_tokens of
    a decode is the most that it may compute, and return, in this step: the last known token, and as many after it as
    the executor guesses correctly. Its num_computed_tokens are exact without an earlier step in flight, else an upper
    bound: the executor keeps its own count.

    The executor applies, in this order: freed, admitted, new_blocks, more_blocks; then it computes. Admission replaces
    the row's contents and starts with empty block tables; admitted, new_blocks and more_blocks have scheduled rows
    only. An empty row may be freed: after a failed launch the engine cannot know.
    """

    step: int
    freed: list[Row] = field(default_factory=list)
    admitted: list[RowInit] = field(default_factory=list)
    new_blocks: list[tuple[Row, list[BlockId]]] = field(default_factory=list)  # appended to the row's block table
    more_blocks: list[MoreBlocks] = field(default_factory=list)  # of executors whose KV has several groups
    rows: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    num_scheduled_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_computed_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # before the step
    samples: NDArray[np.bool_] = field(
        default_factory=lambda: np.empty(0, np.bool_)
    )  # the chunk reaches the row's last token
    num_decodes: int = 0  # number of rows that decode, which come first
    masks: TokenMasks | None = None  # for rows with a constraint
    head: HeadKind = HeadKind.GENERATE  # of all its rows
    masks_follow: bool = False  # with the executor's `draw`: some masks depend on tokens of the previous step

    @property
    def num_tokens(self) -> int:
        """The most tokens that the step computes."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of its prefill chunks."""
        if self.num_decodes == len(self.rows):
            return 0
        return int(self.num_scheduled_tokens[self.num_decodes :].sum())


@dataclass(slots=True)
class StepResult:
    """The tokens that a step sampled: `counts[i]` tokens of the plan's row i, row after row, in the plan's order.

    A decode returns one token at least and num_scheduled_tokens at most, a prefill chunk with `samples` exactly one,
    and other chunks none. Rows that `draw` left out, and failed ones, return none.
    """

    step: int
    token_ids: Int32
    counts: Int32
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into token_ids
    # By index into the plan's rows: the first prompt position, and the log-probabilities from there on.
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    # By index into the plan's rows, of a step of the head POOL: [vectors, values], as soon as the row's last token is
    # computed. `counts` are 0 then.
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # By index into the plan's rows: requests that cannot continue. They get no token after those returned.
    failed: dict[int, ServiceError] = field(default_factory=dict)
    drafted: Int32 | None = None  # drafts that were verified of each of the plan's decodes; None: none
    num_proposer_failures: int = 0  # requests whose proposer failed since the last step: they get no more drafts
    seconds: float = 0.0  # device time
    idle_seconds: float | None = None  # of the device before the step; None: unknown


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """The times of a request's KV transfer from its prefill worker."""

    num_bytes: int
    seconds: float  # from the lease to the last block
    exposed_seconds: float  # that the first token waited for the last block


@dataclass(slots=True, eq=False)
class Request:
    """One generation on this worker, from submit to finish.

    `token_ids` is the prompt and, after a failover, the output that the client has received; num_prompt_tokens is where
    the prompt ends. The engine appends to it. `request_id` is unique among the engine's live requests.
    """

    request_id: str
    token_ids: TokenIds  # prompt first, then output; made of any sequence of integers
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_namespace: bytes
    block_hashes: bytes = b""  # 16 bytes a block: of the first full blocks, as far as they are computed
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0  # monotonic seconds
    deadline: float | None = None  # monotonic seconds
    prefill_only: bool = False  # a prefill for another worker: ends with its first token, holds its blocks until freed
    remote_prefill: bool = False  # another worker computes the prompt, unless enough of it is cached here
    traceparent: str = ""  # W3C trace context of the caller; empty: none
    num_prefill_cached_tokens: int = 0  # tokens that the prefill worker had cached; set by the hand-over
    transfer: TransferTimes | None = None  # of the KV that a prefill worker sent; set by the hand-over
    head: HeadKind = HeadKind.GENERATE
    pooling: PoolingParams | None = None  # with the head POOL: it ends with its prompt's last token
    constraint: Constraint | None = None  # of the whole output, including its part in token_ids
    tenant: str = ""  # charged for its compilation; empty: unknown
    adapter: AdapterRef | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenIds):
            self.token_ids = TokenIds(self.token_ids)
