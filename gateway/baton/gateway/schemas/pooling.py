"""Request and response bodies of the routes for vectors: OpenAI's embeddings, and vLLM's classify and pooling.

One definition for parsing, encoding and the OpenAPI document. Null means unset.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from baton.gateway.schemas.foreign_fields import CHANGING_VECTORS, NEUTRAL_ONLY
from baton.gateway.schemas.requests import ChatMessage, Count, Name, PrintableId, Salt, TokenId


class VectorFields(Struct, kw_only=True):
    """What all routes for vectors take."""

    CHANGING: ClassVar = CHANGING_VECTORS

    model: str | None = None  # null: the only served model
    user: str | None = None
    add_special_tokens: bool | None = None  # null: true for texts, false for a chat
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # keeps so many of each text; -1: what fits
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; null: right, the end
    # Longer texts than the model takes are embedded in pieces, whose mean by their numbers of tokens is the embedding.
    enable_chunked_processing: bool | None = None
    use_activation: bool | None = None  # null: true. Normalizes embeddings, makes scores probabilities
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower runs earlier
    cache_salt: Salt | None = None
    request_id: PrintableId | None = None


class TextObject(Struct, kw_only=True):
    """A text as an object."""

    text: str


class TextFields(VectorFields, kw_only=True):
    """The texts of a request."""

    # A text, texts, token ids, or lists of token ids.
    input: str | list[str | TokenId | list[TokenId] | TextObject] | None = None
    messages: list[ChatMessage] | None = None  # a chat in place of `input`
    add_generation_prompt: bool | None = None  # of a chat; null: false
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(TextFields, kw_only=True):
    """POST /v1/embeddings, as OpenAI's and Jina's clients send it."""

    encoding_format: Literal["float", "base64"] | None = None  # null: float. base64: little-endian float32
    dimensions: Count | None = None  # null: all that the model has
    # Jina's fields
    embedding_type: Literal["float", "base64", "binary", "ubinary"] | None = None  # encoding_format, and bits
    task: Name | None = None  # what the embedding is for, by the prompts of sentence-transformers
    truncate: bool | None = None  # truncate_prompt_tokens: -1
    normalized: bool | None = None  # use_activation
    late_chunking: Annotated[bool | None, NEUTRAL_ONLY] = None
    return_multivector: Annotated[bool | None, NEUTRAL_ONLY] = None


class Embedding(Struct, kw_only=True):
    """The vector of one text."""

    index: int
    embedding: list[float] | str  # whole numbers as bits, a string with encoding_format base64
    object: Literal["embedding"] = "embedding"


class PoolingUsage(Struct):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct, kw_only=True):
    """The vectors of all texts, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class ClassifyRequest(TextFields, kw_only=True):
    """POST /classify."""


class Classified(Struct, kw_only=True):
    """The classes of one text."""

    index: int
    label: str  # of the highest score
    probs: list[float]  # of each class, in the model's order
    num_classes: int


class ClassifyResponse(Struct, kw_only=True):
    """The classes of all texts, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage


class PoolingRequest(TextFields, kw_only=True):
    """POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None  # null: the model's first
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


class Pooled(Struct, kw_only=True):
    """The vector of one text, or the vectors of its tokens."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(Struct, kw_only=True):
    """The vectors of all texts, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class ScoreRequest(VectorFields, kw_only=True):
    """POST /score: one query with each document, or as many queries as documents. All three pairs of names do."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class Score(Struct, kw_only=True):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(Struct, kw_only=True):
    """The scores of all pairs, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankRequest(VectorFields, kw_only=True):
    """POST /rerank, as Jina's and Cohere's clients send it."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | TextObject], Meta(min_length=1)]
    top_n: Count | None = None  # null: all
    return_documents: bool | None = None  # null: true, under /v2 false
    max_tokens_per_doc: Count | None = None  # null: 4096 under /v2, as Cohere has it; else no limit of its own


class Ranked(Struct, kw_only=True):
    """A document's place: results are in the order of their scores."""

    index: int  # in the request
    relevance_score: float
    document: TextObject | None = None


class ApiVersion(Struct):
    """The version of Cohere's API."""

    version: Literal["2"] = "2"


class BilledUnits(Struct, omit_defaults=True):
    """What a request counts as, in Cohere's units."""

    input_tokens: int = 0
    search_units: int = 0


class CohereMeta(Struct):
    """What Cohere's clients show of a request."""

    billed_units: BilledUnits
    api_version: ApiVersion = field(default_factory=ApiVersion)


class RerankResponse(Struct, kw_only=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    meta: CohereMeta | None = None  # under /v2
